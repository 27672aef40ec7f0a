"""What the compiler did: sites, graphs, bytes, timings; as objects, a readable table, a networkx graph, a picture or an
HTML page.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from .cache import Latents, Rows, blank_basis, bytes_per_token, kv_bytes_per_token
from .config import SalsConfig
from .kernels import codegen, ops
from .kernels.virtual import blank_buffers
from .passes.ir import AttentionSite, Declined, SitePlan
from .passes.match.kv_cache import GROWING
from .passes.rewrite import Rewritten
from .passes.verify import boundary_of, cone_of

if TYPE_CHECKING:
    import networkx

    from .runtime import CompiledGraph

log = logging.getLogger("sals_compile")

_reports: deque[GraphReport] = deque(maxlen=64)


@dataclass(frozen=True)
class SiteReport:
    """One attention site. Texts are empty and numbers 0 where they say nothing (of a declined site, most).

    Attributes:
        name: the module path (``model.layers.3.self_attn``).
        status: ``"sals"``, ``"reconstruct"``, ``"exact"``, ``"dense"`` (left so by the plan) or ``"declined"`` (not
            understood, left as it was).
        reason: why.
        heads: ``query heads/KV heads x head dim``.
        rotary: ``"none"``, ``"half"`` or ``"interleaved"``, and how many dims of how many where it is partial.
        mask: what may be attended, an expression over batch ``b``, head ``h``, query ``q`` and cache slot ``kv``;
            ``a0`` is a tensor and ``n0`` an integer of the graph.
        score: what becomes of a logit (a soft cap, say), such an expression.
        cache: ``static[slots]`` and the graph input that is the buffer of keys.
        rank, score_rank: coordinates of a token's latent, and how many of them score it.
        budget: tokens attended per query.
        predicted_mass: share (0 to 1) of attention that the best ``budget`` tokens get on the calibration's text; None
            without a calibration.
        verified_error: relative difference between the original subgraph and the record, run on random data; None where
            they were not.
        query_rank, query_retained: of a factored query projection, its rank and the share (0 to 1) of its outputs'
            variance that the rank keeps.
        kv_bytes_per_token, dense_bytes_per_token: bytes of one token's keys and values and batch row, as stored and
            dense.
        remedy: of a declined site, what would make it match, where that is known.
        node: of a declined site, the FX node at which the nearest match failed.
    """

    name: str
    status: str
    reason: str
    heads: str = ""
    rotary: str = ""
    mask: str = ""
    score: str = ""
    cache: str = ""
    rank: int = 0
    score_rank: int = 0
    budget: int = 0
    predicted_mass: float | None = None
    verified_error: float | None = None
    query_rank: int = 0
    query_retained: float | None = None
    kv_bytes_per_token: float = 0.0
    dense_bytes_per_token: float = 0.0
    remedy: str = ""
    node: str = ""


class GraphReport:
    """One compiled graph. ``print`` it for a table of its sites.

    Attributes:
        sites: a :class:`SiteReport` per attention site, declined ones included.
        timings: seconds per pass.
        config: the options, a :class:`SalsConfig`.
    """

    def __init__(
        self,
        compiled: CompiledGraph,
        plans: Sequence[SitePlan],
        declined: Sequence[Declined],
        config: SalsConfig,
        timings: Mapping[str, float],
    ) -> None:
        self._compiled = compiled
        self.config = config
        self.timings = dict(timings)
        self.sites = [_site_report(p, config) for p in plans] + [
            SiteReport(
                d.name, "declined", d.reason + (f" (at {d.node})" if d.node else ""), remedy=d.remedy, node=d.node
            )
            for d in declined
        ]

    @property
    def graph_before(self) -> GraphModule:
        """The ATen graph as it was matched: an FX module that runs."""
        return self._compiled.gm

    @property
    def graph_after(self) -> GraphModule:
        """The rewritten graph: an FX module that runs, given the tensors of ``state_inputs`` after its own inputs."""
        return self._compiled.rewrite("sparse").gm

    @property
    def plans(self) -> list[SitePlan]:
        """The full records of the sites that were not declined, in the order of ``sites``."""
        return list(self._compiled.plans)

    @property
    def state_inputs(self) -> list[Any]:
        """Descriptions of the extra inputs of ``graph_after``, in order."""
        return self._compiled.rewrite("sparse").inputs

    @property
    def rewritten(self) -> int:
        """Sites that run through ``sals`` operators."""
        return sum(s.status in ("sals", "reconstruct", "exact") for s in self.sites)

    @property
    def verified(self) -> int:
        """Sites whose record was run against their own subgraph on random data, and agreed."""
        return sum(s.verified_error is not None for s in self.sites)

    def kv_bytes_per_token(self) -> dict[str, float]:
        """KV-cache bytes per token and batch row over all cached sites, at the cache's capacity: ``dense`` and
        ``sals``.

        Counted in ``sals``: latents and their scales, value codes and scales, the exact rings, and rotary rows with
        their block means.
        """
        return kv_bytes_per_token(self._compiled.plans, self._compiled.groups, self.config)

    def rewritten_with_values(self) -> Rewritten:
        """A copy of the rewritten graph in which every node has a fake tensor (``meta["val"]``), new nodes and state
        inputs included.
        """
        rewritten = self._compiled.rewrite("sparse")
        propagate_values(self._compiled, rewritten)
        return rewritten

    def generated_sources(self) -> dict[str, list[str]]:
        """Triton source generated from masks and score modifiers, each with the names of the sites that use it."""
        sources: dict[str, list[str]] = {}
        for plan in self._compiled.plans:
            site = plan.site
            if site.modifier.masks or site.modifier.modifies:
                text = codegen.source(site.modifier.serialized, [t.meta["val"] for t in site.modifier_tensors])
                sources.setdefault(text, []).append(site.name)
        return sources

    def to_networkx(self) -> networkx.DiGraph:
        """The graph before and after as one ``networkx.DiGraph``: nodes by FX name, edges from producer to user.

        Node attributes: ``op`` (``aten.mm``, ``sals.score``, ``input``, ``output``), ``shape`` (tuple, or None for
        what is no tensor), ``dtype`` (str), ``site`` (name of the attention site whose subgraph it belongs to, or ""),
        ``before`` and ``after`` (whether it is in the graph as matched, and as rewritten). Edges carry ``before`` and
        ``after`` too.
        """
        import networkx

        graph = networkx.DiGraph()
        rewritten = self.rewritten_with_values()
        belongs = self._site_of_nodes(rewritten.gm)
        for side, module in (("before", self.graph_before), ("after", rewritten.gm)):
            for node in module.graph.nodes:
                if node.name not in graph:
                    value = node.meta.get("val")
                    graph.add_node(
                        node.name,
                        op=operation(node),
                        shape=tuple(value.shape) if isinstance(value, Tensor) else None,
                        dtype=str(value.dtype).removeprefix("torch.") if isinstance(value, Tensor) else "",
                        site=belongs.get(node.name, ""),
                        before=False,
                        after=False,
                    )
                graph.nodes[node.name][side] = True
                for source in node.all_input_nodes:
                    if not graph.has_edge(source.name, node.name):
                        graph.add_edge(source.name, node.name, before=False, after=False)
                    graph.edges[source.name, node.name][side] = True
        return graph

    def _site_of_nodes(self, after: GraphModule) -> dict[str, str]:
        """FX node name -> site name: the interior of each site before, and what stands in its place after."""
        from .picture import nodes_of_site

        belongs: dict[str, str] = {}
        for plan in self._compiled.plans:
            site = plan.site
            outside = set(boundary_of(site))
            for node in cone_of(site):
                if node.op == "call_function" and node not in outside:
                    belongs.setdefault(node.name, site.name)
            if plan.action != "dense":
                for node in nodes_of_site(site, after):
                    if ops.is_sals(node.target):
                        belongs.setdefault(node.name, site.name)
        return belongs

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draw the rewritten graph with Graphviz; the format is the suffix of ``path`` (``.svg``, ``.png``, ``.pdf``,
        ``.dot``).

        ``sals`` operators are filled, state inputs are ellipses. Raises ``ImportError`` without pydot,
        ``RuntimeError`` without Graphviz's ``dot`` (``.dot`` needs neither program nor layout), ``ValueError`` for a
        suffix that Graphviz cannot write.
        """
        from .picture import draw

        draw(self.rewritten_with_values().gm, path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page about this graph (see :meth:`Explanation.save_html`)."""
        Explanation([self]).save_html(path)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the graphs, as JSON takes it. ``timings`` in seconds, ``kv_bytes_per_token`` in bytes."""
        return {
            "sites": [dataclasses.asdict(s) for s in self.sites],
            "rewritten": self.rewritten,
            "verified": self.verified,
            "timings": self.timings,
            "kv_bytes_per_token": self.kv_bytes_per_token(),
        }

    def __str__(self) -> str:
        return format_sites(self.sites)

    def __repr__(self) -> str:
        return f"<GraphReport: {len(self.sites)} sites, {self.rewritten} rewritten, {self.verified} verified>"


@dataclass
class Explanation:
    """What :func:`explain` found.

    Attributes:
        graphs: a :class:`GraphReport` per graph that Dynamo traced, in order; most models trace to one.

    What is about one graph (``graph_before``, ``draw``, ...) is about :attr:`first`.
    """

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def sites(self) -> list[SiteReport]:
        """The sites of all graphs, declined ones included."""
        return [s for g in self.graphs for s in g.sites]

    @property
    def graph_before(self) -> GraphModule:
        """Of the first graph with a site (most models trace to one graph)."""
        return self.first.graph_before

    @property
    def graph_after(self) -> GraphModule:
        """The same graph, rewritten."""
        return self.first.graph_after

    @property
    def first(self) -> GraphReport:
        """The first graph with a site, else the first graph. Raises ``ValueError`` when nothing was traced."""
        if not self.graphs:
            raise ValueError(
                "nothing was traced: the function ran without a graph (is it decorated with torch.compiler.disable?)"
            )
        return next((g for g in self.graphs if g.sites), self.graphs[0])

    def to_networkx(self) -> networkx.DiGraph:
        """:meth:`GraphReport.to_networkx` of the first graph with a site."""
        return self.first.to_networkx()

    def draw(self, path: str | os.PathLike[str]) -> None:
        """:meth:`GraphReport.draw` of the first graph with a site."""
        self.first.draw(path)

    def save_html(self, path: str | os.PathLike[str]) -> None:
        """Write one self-contained page (no network, no script needed to read it) about every graph traced.

        It shows the sites with their reasons and nearest misses, the graph before and after around each site, mask and
        score expressions, bytes per token, the options, the generated kernels and the pass timings. ``OSError`` where
        ``path`` cannot be written.
        """
        from .html import page

        with open(path, "w", encoding="utf-8") as file:
            file.write(page(self.graphs))

    def as_dict(self) -> dict[str, Any]:
        """:meth:`GraphReport.as_dict` of every graph traced."""
        return {"graphs": [g.as_dict() for g in self.graphs]}

    def __str__(self) -> str:
        return format_sites(self.sites)


_growing_noticed = False


def record(report: GraphReport) -> None:
    """Keep a report for :func:`compiled_reports`, and log it: one line at INFO, the reasons at DEBUG (logger
    ``sals_compile``); and a warning, once, where nothing can be gained because the cache grows (``generate()``'s
    default).
    """
    global _growing_noticed
    _reports.append(report)
    growing = sum(s.reason.startswith(GROWING) for s in report.sites)
    if growing and growing == len(report.sites) and not _growing_noticed:
        _growing_noticed = True
        log.warning("%d attention sites stay dense: %s", growing, GROWING)
    if not log.isEnabledFor(logging.INFO):
        return
    declined = sum(s.status == "declined" for s in report.sites)
    dense = sum(s.status == "dense" for s in report.sites)
    log.info(
        "graph compiled: %d attention sites, %d rewritten, %d left dense, %d declined, %d verified; passes took %.2f s",
        len(report.sites),
        report.rewritten,
        dense,
        declined,
        report.verified,
        sum(report.timings.values()),
    )
    for site in report.sites:
        remedy = f" [{site.remedy}]" if site.remedy else ""
        log.debug("  %s: %s, %s%s", site.name, site.status, site.reason or "no reason given", remedy)


def compiled_reports() -> list[GraphReport]:
    """Reports of the graphs compiled with ``backend="sals"`` in this process, oldest first (the last 64)."""
    return list(_reports)


def explain(fn: Callable[..., Any], *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any) -> Explanation:
    """Match and rewrite ``fn(*args, **kwargs)`` without compiling it, and report what would become of its attention.

    The call runs once, dense and uncompiled, on copies of the arguments, so that nothing of the caller's (a KV cache,
    say) changes. ``options`` are those of :class:`sals_compile.SalsConfig`.

    Raises:
        OptionError: a bad option.
        torch._dynamo.exc.BackendCompilerFailed: around a :class:`DeclinedError` (under ``on_decline="error"``) or a
            :class:`CalibrationError`, as ``torch.compile`` raises them.
        Exception: whatever ``fn`` raises.
    """
    from .backend import sals

    SalsConfig.from_options(options)  # here, so that the error is not wrapped by torch.compile
    found = Explanation()
    chosen = dict(options or {}) | {"lowering": "eager"}

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        kept = list(_reports)
        _reports.clear()
        try:
            sals(gm, example_inputs, options=chosen)
            found.graphs.extend(_reports)
        finally:
            _reports.clear()
            _reports.extend(kept)
        return gm.forward  # dense: running the compiled graph would teach the model's sites from these arguments

    with (
        blank_buffers(),
        torch.no_grad(),
        torch._dynamo.config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16),
    ):
        copies, keyed = copy.deepcopy((args, kwargs))
        torch.compile(fn, backend=backend)(*copies, **keyed)
    return found


def operation(node: Node) -> str:
    """What a node does, in a word: ``aten.mm``, ``sals.score``, ``input``, ``output``."""
    if node.op == "placeholder":
        return "input"
    if node.op != "call_function":
        return node.op
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target).removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))


def propagate_values(compiled: CompiledGraph, rewritten: Rewritten) -> None:
    """Give the nodes of a rewritten graph that have no fake value one, in ``meta["val"]``. What cannot be propagated
    stays without.
    """
    hints = [_Hint.of(n.meta.get("val")) for n in compiled.placeholders]
    inputs = iter(rewritten.inputs)
    state: dict[Any, Any] = {}
    mode = compiled.fake_mode or contextlib.nullcontext()

    def example(entry: Any) -> Any:
        kind, owner = entry.kind, entry.owner
        site = compiled.plans[compiled.groups[owner].sites[0] if kind == "rows" else owner].site
        device = site.output.meta["val"].device
        if kind == "basis":
            return blank_basis(compiled.plans[owner], entry.field, device)
        if kind == "kept":
            write = site.key_cache if entry.field == "key" else site.value_cache
            assert write is not None
            return write.buffer.meta["val"]
        if kind == "query_moment":
            return torch.zeros((site.kv_heads, site.head_dim, site.head_dim), device=device)
        if kind == "key_moment":
            return torch.zeros((site.joint_width,) * 2, device=device)
        if (kind, owner) not in state:
            assert site.key_cache is not None
            capacity = site.key_cache.capacity
            if kind == "rows":
                batch = compiled._position_batch(compiled.groups[owner], hints)
                state[kind, owner] = Rows.allocate(site, batch, capacity, compiled.config, device)
            else:
                batch = compiled._batch(site.output_layout, site.output, hints)
                state[kind, owner] = Latents.allocate(compiled.plans[owner], batch, capacity, compiled.config, device)
        return getattr(state[kind, owner], entry.field)

    with torch.no_grad(), mode:
        for node in rewritten.gm.graph.nodes:
            if node.op == "placeholder" and node.name.startswith("sals_"):
                node.meta["val"] = example(next(inputs))
            elif node.op == "call_function" and "val" not in node.meta:
                values = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
                with contextlib.suppress(Exception):  # a size that needs real data
                    node.meta["val"] = node.target(*values[0], **values[1])


class _Hint:
    """Stands for a tensor input where only its shape is asked: the sizes seen by the compiler."""

    def __init__(self, shape: Sequence[int]) -> None:
        self.shape = tuple(shape)

    @staticmethod
    def of(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return value.node.hint
        if isinstance(value, Tensor):
            return _Hint([s if isinstance(s, int) else s.node.hint for s in value.shape])
        return value


def _site_report(plan: SitePlan, config: SalsConfig) -> SiteReport:
    site = plan.site
    cache = ""
    if site.key_cache is not None:
        cache = f"static[{site.key_cache.capacity}] {site.key_cache.buffer.name}"
    sparse, dense = bytes_per_token(plan, config)
    return SiteReport(
        name=site.name,
        status=plan.action,
        reason=plan.reason,
        heads=f"{site.heads}/{site.kv_heads}x{site.head_dim}",
        rotary=_rotary_text(site),
        mask=str(site.modifier.mask) if site.modifier.masks else "none",
        score=str(site.modifier.score) if site.modifier.modifies else "",
        cache=cache,
        rank=plan.rank,
        score_rank=plan.score_rank,
        budget=plan.budget if plan.action == "sals" else 0,
        predicted_mass=_predicted_mass(plan, config),
        verified_error=plan.verified_error,
        query_rank=plan.low_rank_query.rank if plan.low_rank_query else 0,
        query_retained=plan.low_rank_query.retained if plan.low_rank_query else None,
        kv_bytes_per_token=sparse,
        dense_bytes_per_token=dense,
    )


def _predicted_mass(plan: SitePlan, config: SalsConfig) -> float | None:
    if plan.action != "sals" or config.calibration is None or isinstance(config.calibration, str):
        return None
    try:
        return config.calibration.retained(plan.site.name, plan.budget)
    except ValueError:  # a site without queries in the calibration's text
        return None


def _rotary_text(site: AttentionSite) -> str:
    if site.key_rotary is None:
        return "none"
    partial = "" if site.rotary_dim == site.head_dim else f" {site.rotary_dim}/{site.head_dim}"
    return site.rotary_form + partial


def format_sites(sites: Sequence[SiteReport]) -> str:
    """A table of sites. Neighbours that differ in nothing but the name and the error measured are one line, with the
    largest error; a reason that all share stands below the table.
    """
    if not sites:
        return "no attention found: no scaled_dot_product_attention, flex_attention or softmax between two products"
    columns = ["site", "status", "heads", "rotary", "mask", "cache", "rank", "T", "verified", "why"]
    folded: list[tuple[list[SiteReport], list[str]]] = []
    for site in sites:
        row = [
            site.status,
            site.heads,
            site.rotary,
            site.mask + (f"; {site.score}" if site.score else ""),
            site.cache.split(" ")[0],
            f"{site.rank}/{site.score_rank}" if site.rank else "",
            str(site.budget or ""),
            "" if site.verified_error is None else "yes",
            site.reason,
        ]
        if folded and folded[-1][1] == row:
            folded[-1][0].append(site)
        else:
            folded.append(([site], row))
    rows = []
    for run, row in folded:
        errors = [s.verified_error for s in run if s.verified_error is not None]
        row[columns.index("verified") - 1] = f"{max(errors):.0e}" if errors else ""
        label = run[0].name if len(run) == 1 else f"{run[0].name} .. {run[-1].name} ({len(run)})"
        rows.append([label, *row])
    shared = {site.reason for site in sites}
    if len(shared) == 1:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    widths = [max(len(r[i]) for r in [columns, *rows]) for i in range(len(columns))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in [columns, *rows]]
    lines.insert(1, "  ".join("-" * w for w in widths))
    if len(shared) == 1:
        lines.append(f"why: {shared.pop()}")
    return "\n".join(lines)
