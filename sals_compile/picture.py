"""Pictures of graphs: a small layered drawing as SVG for the page, and Graphviz through pydot for whole graphs.

The layered drawing follows Sugiyama, Tagawa and Toda (1981): layers by longest path, dummy points on long edges, a few
barycentre sweeps for the order within layers, and horizontal positions by averaging over neighbours.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from .kernels import ops
from .passes.graph import VIEW_OPS, ancestors
from .passes.ir import AttentionSite
from .passes.verify import record_nodes

_SHORT = {
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "float64": "f64",
    "int64": "i64",
    "int32": "i32",
    "int8": "i8",
    "uint8": "u8",
    "bool": "b1",
    "complex64": "c64",
}


#: Suffixes that :func:`draw` writes.
DRAWN = (".svg", ".png", ".pdf", ".dot")


@dataclass
class Box:
    """A node of a picture. ``kind`` is a CSS class: ``input``, ``state``, ``op``, ``anchor``, ``sals``, ``edge`` (where
    the picture ends).
    """

    label: str
    detail: str = ""
    kind: str = "op"
    changed: bool = False
    title: str = ""


@dataclass
class Picture:
    """Boxes by key, and edges between keys."""

    boxes: dict[str, Box] = field(default_factory=dict)
    edges: list[tuple[str, str]] = field(default_factory=list)

    def connect(self, source: str, target: str) -> None:
        if source != target and (source, target) not in self.edges:
            self.edges.append((source, target))


def describe(value: Any) -> str:
    """``f32[1, 4, 60]`` for a tensor, ``""`` for anything else."""
    if not isinstance(value, Tensor):
        return ""
    name = str(value.dtype).removeprefix("torch.")
    return f"{_SHORT.get(name, name)}[{', '.join(map(str, value.shape))}]"


# ---- what belongs to a site -----------------------------------------------------------------------------------------


def replacement(site: AttentionSite, after: GraphModule) -> Node | None:
    """The node of ``after`` that stands where the site's output stood (they share the names of the nodes that were
    kept).
    """
    twins = {n.name: n for n in after.graph.nodes}
    for user in site.output.users:
        twin = twins.get(user.name)
        if twin is None:
            continue
        old, new = _inputs(user), _inputs(twin)
        if len(old) == len(new):
            return new[old.index(site.output)]
    return None


def _inputs(node: Node) -> list[Node]:
    """Input nodes with repetitions, in order of appearance."""
    found: list[Node] = []
    map_arg((node.args, node.kwargs), found.append)
    return found


def nodes_of_site(site: AttentionSite, after: GraphModule) -> list[Node]:
    """Nodes of ``after`` between the site's inputs and what replaced its output, with the writes to its state, in graph
    order.
    """
    output = replacement(site, after)
    if output is None:
        return []
    twins = {n.name: n for n in after.graph.nodes}
    boundary = [twins[n.name] for n in _edge_nodes(site) if n.name in twins]
    inside = set(ancestors([output], boundary))
    state = {n for n in inside if n.op == "placeholder" and n.name.startswith("sals_")}
    writes = [n for n in after.graph.nodes if ops.is_sals(n.target) and not n.users and state & set(n.all_input_nodes)]
    return ancestors([output, *writes], boundary)


def _edge_nodes(site: AttentionSite) -> list[Node]:
    """Where a site's picture ends at the top: pre-rotary query and key, value, buffers."""
    nodes = [site.query_pre.node, site.key_pre.node, site.value.node]
    nodes += [c.buffer for c in (site.key_cache, site.value_cache) if c is not None]
    return list(dict.fromkeys(nodes))


def before_picture(site: AttentionSite, after: GraphModule) -> Picture:
    """The site as the model spelled it; views are contracted into edges, boxes that the rewrite removed are marked
    ``changed``.
    """
    kept = {n.name for n in after.graph.nodes}
    nodes = ancestors([site.output, *record_nodes(site)], _edge_nodes(site))
    stores = [s for c in (site.key_cache, site.value_cache) if c is not None for s in c.stores]
    picture = _picture([*nodes, *(s for s in stores if s not in nodes)], _edge_nodes(site))
    for name, box in picture.boxes.items():
        box.changed = name not in kept and box.kind in ("op", "anchor")
    return picture


def after_picture(site: AttentionSite, before: GraphModule, after: GraphModule) -> Picture:
    """What stands in its place; new boxes are marked ``changed``, the state inputs of one owner are one box."""
    known = {n.name for n in before.graph.nodes}
    twins = {n.name: n for n in after.graph.nodes}
    edge = [twins[n.name] for n in _edge_nodes(site) if n.name in twins]
    picture = _picture(nodes_of_site(site, after), edge)
    for name, box in picture.boxes.items():
        box.changed = name not in known and box.kind in ("op", "sals")
    return picture


def neighbourhood(node: Node, above: int = 7, below: int = 3) -> Picture:
    """The surroundings of a node at which a match failed."""
    nodes, front = {node}, {node}
    for _ in range(above):
        front = {i for n in front for i in n.all_input_nodes} - nodes
        nodes |= front
    front = {node}
    for _ in range(below):
        front = {u for n in front for u in n.users if u.op != "output"} - nodes
        nodes |= front
    ordered = [n for n in node.graph.nodes if n in nodes]
    edge = [n for n in ordered if n.op == "call_function" and not set(n.all_input_nodes) & nodes and n.all_input_nodes]
    picture = _picture(ordered, edge)
    if node.name in picture.boxes:
        picture.boxes[node.name].changed = True
    return picture


def _picture(nodes: Sequence[Node], edge: Iterable[Node]) -> Picture:
    from .report import operation

    picture, inside, edge = Picture(), set(nodes), set(edge)
    state: dict[str, list[Node]] = {}
    key: dict[Node, str] = {}
    for node in nodes:
        value = node.meta.get("val")
        view = node.target in VIEW_OPS and len(node.all_input_nodes) == 1
        contracted = view and node not in edge and bool(set(node.users) & inside)
        if contracted and node.all_input_nodes[0] in key:
            key[node] = key[node.all_input_nodes[0]]
            continue
        key[node] = node.name
        if node.op == "placeholder" and node.name.startswith("sals_"):
            kind, owner = node.name.split("_")[1:3]
            key[node] = f"sals_{kind}_{owner}"
            state.setdefault(key[node], []).append(node)
            picture.boxes[key[node]] = Box(_STATE.get(kind, kind), f"{len(state[key[node]])} tensors", "state")
            picture.boxes[key[node]].title = "\n".join(
                f"{n.name.split('_', 3)[-1]}: {describe(n.meta.get('val'))}" for n in state[key[node]]
            )
            continue
        name = operation(node).removeprefix("aten.")
        kind = "op"
        if node.op == "placeholder":
            name, kind = node.name, "input"
        elif ops.is_sals(node.target):
            kind = "anchor" if "scaled_dot_product" in name else "sals"
        elif "softmax" in name:
            kind = "anchor"
        elif node in edge:
            kind = "edge"
        picture.boxes[key[node]] = Box(_without_overload(name), describe(value), kind, title=_title(node))
    for node in nodes:
        if node not in edge:
            for source in node.all_input_nodes:
                if source in key:
                    picture.connect(key[source], key[node])
    return picture


_STATE = {
    "latent": "latents and ring",
    "basis": "basis",
    "rows": "rotary rows",
    "query": "query moment",
    "key": "key moment",
}


def _without_overload(name: str) -> str:
    base, _, overload = name.rpartition(".")
    return base if (base and base != "sals" and overload[:1].isupper()) or overload in ("int", "dim", "self") else name


def _title(node: Node) -> str:
    if node.op != "call_function":
        return node.name
    literal = [str(a) for a in node.args if not isinstance(a, (Node, list, tuple))]
    text = f"{node.name} = {node.target}" + (f"({', '.join(literal)})" if literal else "")
    return text if len(text) < 300 else text[:297] + "..."


# ---- the layered drawing ---------------------------------------------------------------------------------------------

_CHARACTER, _HEIGHT, _GAP, _RISE, _MARGIN = 6.3, 34.0, 14.0, 30.0, 8.0


def svg(picture: Picture, title: str, side: str = "") -> str:
    """The picture as an ``<svg>`` element of class ``side``, styled by the classes of its boxes. Empty pictures give
    ``""``.
    """
    if not picture.boxes:
        return ""
    layers, edges = _layers(picture)
    widths = {k: _width(b) for k, b in picture.boxes.items()}
    centre = _positions(layers, edges, widths)
    left = min(c - widths.get(k, 0.0) / 2 for k, c in centre.items())
    right = max(c + widths.get(k, 0.0) / 2 for k, c in centre.items())
    width, height = right - left + 2 * _MARGIN, len(layers) * (_HEIGHT + _RISE) - _RISE + 2 * _MARGIN
    row = {k: i for i, layer in enumerate(layers) for k in layer}
    x = {k: c - left + _MARGIN for k, c in centre.items()}
    y = {k: _MARGIN + i * (_HEIGHT + _RISE) for k, i in row.items()}
    parts = [
        f'<svg class="{side}" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="{escape(title, quote=True)}">'
    ]
    paths = []
    for chain in edges:
        start, end = chain[0], chain[-1]
        path = [f"M{x[start]:.0f} {y[start] + _HEIGHT:.0f}"]
        for above, below in itertools.pairwise(chain):
            top = y[above] + _HEIGHT  # a dummy point is as tall as a box: the edge runs straight through its row
            if above != start:
                path.append(f"L{x[above]:.0f} {top:.0f}")
            mid = (top + y[below]) / 2
            path.append(f"C{x[above]:.0f} {mid:.0f} {x[below]:.0f} {mid:.0f} {x[below]:.0f} {y[below]:.0f}")
        kind = picture.boxes[start].kind
        paths.append((f"e {kind}" if kind == "state" else "e", " ".join(path), end))
    parts += [f'<path class="{kind}" d="{d}"/>' for kind, d, _ in paths]
    for key, box in picture.boxes.items():
        w, cx, top = widths[key], x[key], y[key]
        kind = f"n {box.kind}" + (" changed" if box.changed else "")
        round_ = 16 if box.kind in ("input", "state") else 4
        parts.append(
            f'<g class="{kind}"><title>{escape(box.title or box.label)}</title>'
            f'<rect x="{cx - w / 2:.0f}" y="{top:.0f}" width="{w:.0f}" height="{_HEIGHT:.0f}" rx="{round_}"/>'
        )
        if box.detail:
            parts.append(f'<text x="{cx:.0f}" y="{top + 14:.0f}">{escape(box.label)}</text>')
            parts.append(f'<text class="d" x="{cx:.0f}" y="{top + 27:.0f}">{escape(box.detail)}</text></g>')
        else:
            parts.append(f'<text x="{cx:.0f}" y="{top + 21:.0f}">{escape(box.label)}</text></g>')
    parts.append("</svg>")
    return "".join(parts)


def _width(box: Box) -> float:
    return max(len(box.label) * _CHARACTER + 2, len(box.detail) * _CHARACTER * 0.86, 30.0) + 14


def _layers(picture: Picture) -> tuple[list[list[str]], list[list[str]]]:
    """Layers of keys (boxes and dummy points) from top to bottom, and each edge as the chain of keys that it passes."""
    above: dict[str, list[str]] = {k: [] for k in picture.boxes}
    below: dict[str, list[str]] = {k: [] for k in picture.boxes}
    for source, target in picture.edges:
        above[target].append(source)
        below[source].append(target)
    depth: dict[str, int] = {}
    for key in _topological(above, below):
        depth[key] = max((depth[s] + 1 for s in above[key]), default=0)
    # What has no input goes right above its first user: long edges from the top say nothing.
    for key in reversed(_topological(above, below)):
        if not above[key] and below[key]:
            depth[key] = min(depth[t] for t in below[key]) - 1
    layers: list[list[str]] = [[] for _ in range(max(depth.values()) + 1)]
    for key in picture.boxes:
        layers[depth[key]].append(key)
    chains = []
    for number, (source, target) in enumerate(picture.edges):
        chain = [source]
        for level in range(depth[source] + 1, depth[target]):
            dummy = f"#{number}.{level}"
            layers[level].append(dummy)
            chain.append(dummy)
        chains.append([*chain, target])
    layers = [layer for layer in layers if layer]
    up: dict[str, list[str]] = {}
    down: dict[str, list[str]] = {}
    for chain in chains:
        for first, second in itertools.pairwise(chain):
            up.setdefault(second, []).append(first)
            down.setdefault(first, []).append(second)
    for sweep in range(8):
        neighbours, order = (up, layers) if sweep % 2 == 0 else (down, layers[::-1])
        for layer, other in zip(order[1:], order, strict=False):
            place = {k: i for i, k in enumerate(other)}
            rank = {
                k: _mean([place[n] for n in neighbours.get(k, ()) if n in place], float(i) * len(other) / len(layer))
                for i, k in enumerate(layer)
            }
            layer.sort(key=lambda k: rank[k])
    return layers, chains


def _topological(above: Mapping[str, Sequence[str]], below: Mapping[str, Sequence[str]]) -> list[str]:
    waiting = {k: len(v) for k, v in above.items()}
    ready = [k for k, n in waiting.items() if not n]
    order = []
    while ready:
        key = ready.pop()
        order.append(key)
        for target in below[key]:
            waiting[target] -= 1
            if not waiting[target]:
                ready.append(target)
    return order


def _mean(values: Sequence[float], otherwise: float) -> float:
    return sum(values) / len(values) if values else otherwise


def _positions(
    layers: Sequence[Sequence[str]], chains: Sequence[Sequence[str]], widths: Mapping[str, float]
) -> dict[str, float]:
    """Horizontal centre of each key: pulled to the mean of its neighbours, kept apart within its layer."""
    neighbours: dict[str, list[str]] = {}
    for chain in chains:
        for first, second in itertools.pairwise(chain):
            neighbours.setdefault(first, []).append(second)
            neighbours.setdefault(second, []).append(first)
    centre: dict[str, float] = {}
    for layer in layers:
        cursor = 0.0
        total = sum(widths.get(k, 4.0) + _GAP for k in layer)
        for key in layer:
            centre[key] = cursor + widths.get(key, 4.0) / 2 - total / 2
            cursor += widths.get(key, 4.0) + _GAP
    for _ in range(24):
        for layer in layers:
            wanted = {k: _mean([centre[n] for n in neighbours.get(k, ())], centre[k]) for k in layer}
            _spread(layer, wanted, centre, widths)
    return centre


def _spread(
    layer: Sequence[str], wanted: Mapping[str, float], centre: dict[str, float], widths: Mapping[str, float]
) -> None:
    """Place a layer at the wanted positions, keeping its order and the gaps: the mean of packing from the left and from
    the right.
    """

    def packed(keys: Sequence[str], sign: float) -> dict[str, float]:
        placed: dict[str, float] = {}
        limit = -float("inf")
        for key in keys:
            half = widths.get(key, 4.0) / 2
            at = max(sign * wanted[key], limit + half)
            placed[key], limit = sign * at, at + half + _GAP
        return placed

    from_left, from_right = packed(layer, 1.0), packed(layer[::-1], -1.0)
    for key in layer:
        centre[key] = (from_left[key] + from_right[key]) / 2


# ---- Graphviz --------------------------------------------------------------------------------------------------------


def draw(gm: GraphModule, path: str | os.PathLike[str]) -> None:
    """Draw a whole graph with Graphviz; see ``GraphReport.draw``."""
    try:
        import pydot
    except ImportError as error:
        raise ImportError("drawing needs pydot: pip install 'sals-compile[plots]' (and Graphviz's `dot`)") from error
    from .report import operation

    suffix = Path(path).suffix.lower()
    if suffix not in DRAWN:
        raise ValueError(f"draw: cannot write {os.fspath(path)!r}; the suffix must be .svg, .png, .pdf or .dot")
    drawing = pydot.Dot("graph", graph_type="digraph", rankdir="TB")
    drawing.set_node_defaults(shape="box", fontname="sans-serif", fontsize="10", style="filled", fillcolor="white")
    used = {n for n in gm.graph.nodes if n.op != "placeholder" or n.users}
    for node in gm.graph.nodes:
        if node not in used:
            continue
        label = f"{operation(node) if node.op != 'placeholder' else node.name}\\n{describe(node.meta.get('val'))}"
        style: dict[str, Any] = {}
        if ops.is_sals(node.target):
            style = {"fillcolor": "#cfe8ff", "color": "#1f6fb2"}
        elif node.op == "placeholder":
            style = {"shape": "ellipse", "fillcolor": "#fff3d6" if node.name.startswith("sals_") else "#eeeeee"}
        drawing.add_node(pydot.Node(node.name, label=f'"{label}"', **style))
        for source in node.all_input_nodes:
            drawing.add_edge(pydot.Edge(source.name, node.name))
    if suffix == ".dot":
        Path(path).write_text(drawing.to_string(), encoding="utf-8")
        return
    try:
        drawing.write(os.fspath(path), format=suffix.removeprefix("."))
    except (FileNotFoundError, AssertionError) as error:
        raise RuntimeError(
            "drawing needs Graphviz's `dot` program on the PATH (apt install graphviz); a .dot file needs no program"
        ) from error
