"""A rotation in a spelling that nobody listed, carried as its own subgraph.

Whatever maps a key ``[.., D]`` to ``x * c + J x * s`` (``J``: each pair ``(a, b)`` becomes ``(-b, a)``), token by token
and alike for all heads, is known by what it makes of two keys: the one that is 1 in the first dim of every pair and 0
elsewhere, and the one that is 1 in the second. So the subgraph is copied and applied to these two; what comes out are
the rows ``c`` and ``s`` of this call's positions, which are recorded, gathered and applied like those of any rotary
embedding, by the same operators.

That the subgraph keeps tokens apart is proved by its operators, each of which keeps the leading axes as they are; that
it is such a map, by running it once on random keys and random angles. A key that is turned in another way is kept
turned: its latent is taken after the turn, which costs rank, and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils._python_dispatch import _disable_current_modes

from ...kernels import reference
from ..graph import Dims, Layout, Size, ViewTrace, aten, dtype_of, emit, is_float_cast, is_one, same, shape_of
from ..ir import Operand, Rotary
from .mask import _BINARY, _UNARY
from .rotary import calls, strip

#: Nodes between a key and the rotated key, at most.
LIMIT = 48

#: ``||rows applied - subgraph|| / ||subgraph||`` accepted, by the dtype of the keys.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 5e-3}

_POINTWISE = {
    *_BINARY,
    *_UNARY,
    aten.reciprocal.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.alias.default,
}
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
#: Operators along one dim, by the position of that argument and its default.
_ALONG = {
    aten.slice.Tensor: (1, 0),
    aten.select.int: (1, 0),
    aten.unsqueeze.default: (1, 0),
    aten.squeeze.dim: (1, 0),
    aten.unflatten.int: (1, 0),
    aten.flatten.using_ints: (1, 0),
    aten.cat.default: (1, 0),
    aten.stack.default: (1, 0),
    aten.index_select.default: (1, 0),
}
#: Operators along several dims, in their second argument (roll: its third).
_ALONG_MANY = {aten.flip.default: 1, aten.roll.default: 2, aten.sum.dim_IntList: 1, aten.squeeze.dims: 1}
_TRANSPOSED = {aten.transpose.int, aten.permute.default}


CARRIED = "its rotation is in no listed spelling, so the rows of the graph's own are kept"


def match_carried(trace: ViewTrace, roles: Dims) -> tuple[Rotary | None, str]:
    """The rotation that made ``trace.base``, whose atoms play ``roles`` ``[B, S, N, D]``, carried, and that it is; else
    None and what turns the key (empty: nothing does)."""
    node = strip(trace.base)
    dims = trace.base_dims if len(shape_of(node)) == len(trace.base_dims) else None
    lead = None if dims is None else _lead(dims, roles)
    if dims is None or lead is None:
        return None, ""
    steps, stopped = _token_wise(node, lead)
    turning = next((s for s in steps if _meets_tokens(s, lead)), None)
    if turning is None:
        return None, ""
    wide = (*shape_of(node)[: len(lead)], _width(roles[3]))
    # The nearest first: a norm's weight before the rotation is no part of it.
    for source in sorted({*steps, *(a for s in steps for a in _inputs(s))}, reverse=True):
        if source is node or len(shape_of(source)) != len(wide) or not all(map(same, shape_of(source), wide)):
            continue
        subgraph = _Subgraph.between(source, node, steps)
        found = None if subgraph is None else subgraph.rotary_form(lead)
        if subgraph is None or found is None:
            continue
        if rotary := _carry(subgraph, *found, lead, dims, roles):
            return rotary, CARRIED
        return None, "its rotation has sizes that the graph does not name, so its latent is taken after it"
    where = f"{stopped.target} at {stopped.name}" if stopped is not None else f"at {turning.name}"
    kind = "mixes tokens or heads" if stopped is not None else "is no rotation of pairs"
    return None, f"what turns the key {kind} ({where}), so its latent is taken after the turn"


def _width(atoms: Sequence[Any]) -> Size:
    size: Size = 1
    for atom in atoms:
        size = size * atom.size
    return size


def _lead(dims: Dims, roles: Dims) -> list[int] | None:
    """The role of each leading dim (0 to 2; -1 where of size one), when the trailing dims are the head dim and each
    leading dim is one factor of one role."""
    head_dim = [a for a in roles[3] if not is_one(a.size)]
    found: list[int] = []
    for position, dim in enumerate(dims):
        kept = [a for a in dim if not is_one(a.size)]
        if any(a in head_dim for a in kept):
            rest = [a for d in dims[position:] for a in d if not is_one(a.size)]
            return found if rest == head_dim and isinstance(_width(roles[3]), int) else None
        role = next((r for r in range(3) if kept and kept[0] in roles[r]), -1)
        if len(kept) > 1 or (kept and role < 0) or any(a.broadcast for a in dim):
            return None
        found.append(role)
    return None


def _keeps(node: Node, source: Node, lead: Sequence[Size]) -> bool:
    """Whether the operator leaves the leading axes of ``source`` where and as they are."""
    count = len(lead)
    if len(shape_of(source)) <= count or len(shape_of(node)) <= count:
        return False
    if not all(same(a, s) and same(b, s) for a, b, s in zip(shape_of(source), shape_of(node), lead, strict=False)):
        return False
    if node.target in _POINTWISE or is_float_cast(node) or node.target in _VIEWS:
        return True
    if node.target in (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.expand.default):
        return len(shape_of(source)) == len(shape_of(node))
    rank = max(len(shape_of(source)), len(shape_of(node)))
    if node.target in _ALONG:
        position, default = _ALONG[node.target]
        dim = node.args[position] if len(node.args) > position else default
        return int(dim) % rank >= count if int(dim) < 0 else int(dim) >= count
    if node.target in _ALONG_MANY:
        position = _ALONG_MANY[node.target]
        along = node.args[position] if len(node.args) > position else None
        return bool(along) and all(int(d) % len(shape_of(source)) >= count for d in along)
    if node.target is aten.transpose.int:
        return all(int(d) % rank >= count for d in node.args[1:3])
    if node.target is aten.permute.default:
        return [int(d) % rank for d in node.args[1]][:count] == list(range(count))
    return False


def _inputs(node: Node) -> list[Node]:
    return [n for n in node.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]


def _token_wise(node: Node, roles: Sequence[int]) -> tuple[list[Node], Node | None]:
    """Nodes reached from ``node`` backwards through operators that keep the leading axes, and the operator that ended
    the walk by moving them (None: it ended at something else, a product say)."""
    lead = shape_of(node)[: len(roles)]
    steps: list[Node] = []
    stopped: Node | None = None
    stack, seen = [node], {node}
    while stack and len(steps) < LIMIT:
        step = stack.pop()
        sources = [s for s in _inputs(step) if step.op == "call_function"]
        kept = [s for s in sources if _keeps(step, s, lead)]
        if not kept:
            moves = step.target in _ALONG or step.target in _ALONG_MANY
            whole = len(shape_of(step)) > len(lead) and all(map(same, shape_of(step), lead))
            stopped = step if moves and whole and step is not node else stopped
            continue
        steps.append(step)
        for source in kept:
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return steps, stopped


def _meets_tokens(step: Node, lead: Sequence[int]) -> bool:
    """Whether the step multiplies by something that varies along the tokens, not along the heads, and is not made of
    what it multiplies (as a norm is)."""
    if not calls(step, aten.mul.Tensor) or len(_inputs(step)) != 2:
        return False
    rank = len(shape_of(step))
    length = [s for s, r in zip(shape_of(step), lead, strict=False) if r == 1]
    for operand, other in (_inputs(step), _inputs(step)[::-1]):
        own = shape_of(operand)
        at = [i - (rank - len(own)) for i in range(len(lead))]
        sizes = [own[a] if a >= 0 else 1 for a in at]
        heads = all(is_one(s) for s, r in zip(sizes, lead, strict=True) if r == 2)
        tokens = any(not is_one(s) for s, r in zip(sizes, lead, strict=True) if r != 2)
        # (Of a single token nothing can be told apart by sizes.)
        if heads and len(own) > 1 and (tokens or not any(not is_one(s) for s in length)):
            return not _made_of(operand, strip(other))
    return False


def _made_of(node: Node, source: Node) -> bool:
    """Whether ``node`` is computed from ``source`` in a few steps."""
    stack, seen = [node], {node}
    while stack and len(seen) < 12:
        for step in stack.pop().all_input_nodes:
            if step is source:
                return True
            if step not in seen:
                seen.add(step)
                stack.append(step)
    return False


@dataclass(frozen=True)
class _Subgraph:
    """``result`` as a function of ``source [*lead, D]``; ``outer`` are the tensors that it reads beside."""

    source: Node
    result: Node
    nodes: tuple[Node, ...]
    outer: tuple[Node, ...]

    @staticmethod
    def between(source: Node, result: Node, steps: Sequence[Node]) -> _Subgraph | None:
        inside, reached = set(steps), {source}
        for step in sorted(inside):
            if step is not source and any(a in reached for a in step.all_input_nodes):
                reached.add(step)
        nodes = tuple(s for s in sorted(inside) if s in reached and s is not source)
        needed = {result}
        for step in reversed(nodes):
            if step in needed:
                needed.update(step.all_input_nodes)
        nodes = tuple(s for s in nodes if s in needed)
        if result not in nodes:
            return None
        outer = {a for s in nodes for a in s.all_input_nodes} - {source, *nodes}
        return _Subgraph(source, result, nodes, tuple(sorted(outer)))

    def run(self, values: Mapping[Node, Any]) -> Any:
        """The result, flattened to the shape of the source; ``values`` of the source and of all that is read
        beside."""
        known = dict(values)
        for node in self.nodes:
            args, kwargs = map_arg(node.args, known.__getitem__), map_arg(node.kwargs, known.__getitem__)
            known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return known[self.result]

    def copy(self, put: Callable[..., Node], source: Node) -> Node:
        """The result of nodes like these that read another ``source``; ``put`` makes a node."""
        copies = {self.source: source}
        for node in self.nodes:
            args, kwargs = (map_arg(a, lambda n: copies.get(n, n)) for a in (node.args, node.kwargs))
            copies[node] = put(node.target, *args, **kwargs)
        return copies[self.result]

    def signature(self, *facts: Any) -> tuple[Any, ...]:
        """Equal for subgraphs that do the same to tensors of one shape and read the same beside."""
        number = {self.source: "source"} | {n: f"%{i}" for i, n in enumerate(self.nodes)}
        steps = [
            (
                str(n.target),
                str(map_arg(n.args, lambda a: number.get(a, a.name))),
                str(map_arg(n.kwargs, lambda a: number.get(a, a.name))),
            )
            for n in self.nodes
        ]
        value = self.source.meta["val"]
        return (*facts, tuple(steps), str(tuple(value.shape)), value.dtype, value.device)

    def rotary_form(self, lead: Sequence[int]) -> tuple[str, int, bool] | None:
        """``(form, rotated dims, whether the batch shares its rows)``, when the map is a rotation of pairs on random
        data; ``lead``: the roles of the leading dims."""
        generator = torch.Generator().manual_seed(0)
        dtype = dtype_of(self.source)
        if dtype not in TOLERANCE:
            return None
        with torch.no_grad(), _disable_current_modes():
            values: dict[Node, Any] = {}
            for node in (self.source, *self.outer):
                value = node.meta.get("val")
                if isinstance(value, Tensor) and not value.dtype.is_floating_point:
                    return None
                values[node] = concrete(value)
                if isinstance(value, Tensor):
                    drawn = torch.randn([concrete(s) for s in value.shape], generator=generator)
                    values[node] = drawn.to(device=value.device, dtype=value.dtype)
            key = values[self.source]
            count, width = len(lead), key.shape[-1]
            try:
                actual = self.run(values).flatten(count)
                for form, dim in self._candidates(width):
                    first, second = (p.to(key) for p in probes(form, dim, width))
                    one, two = (
                        self.run(values | {self.source: p.expand_as(key).contiguous()}).flatten(count)
                        for p in (first, second)
                    )
                    rows = [one * first + two * second, one * second - two * first]
                    for position, role in enumerate(lead):
                        if role == 2:  # rows of the first head serve all; where they do not, the comparison fails
                            rows = [r.narrow(position, 0, 1) for r in rows]
                    cos, sin = (r[..., :dim].float() for r in rows)
                    expected = reference.apply_rotary(key.float(), cos, sin, form)
                    error = float((expected - actual.float()).norm() / actual.float().norm().clamp_min(1e-30))
                    if error <= TOLERANCE[dtype] and bool(sin.abs().max() > 0):
                        batch = [p for p, role in enumerate(lead) if role == 0]
                        alike = all(torch.equal(r, r.narrow(p, 0, 1).expand_as(r)) for p in batch for r in (cos, sin))
                        return form, dim, alike
            except (RuntimeError, TypeError, IndexError, ValueError):  # the subgraph asks for more than random data
                return None
        return None

    def _candidates(self, width: int) -> list[tuple[str, int]]:
        """Forms and widths worth a try: the whole head, and parts of the sizes that the subgraph cuts it into."""
        sizes = {width}
        for node in self.nodes:
            last = shape_of(node)[-1]
            sizes.update(
                s for s in ((last, 2 * last) if isinstance(last, int) else ()) if 2 <= s <= width and s % 2 == 0
            )
        return [(form, size) for size in sorted(sizes, reverse=True) for form in ("half", "interleaved")]


def concrete(size: Any) -> Any:
    return size.node.hint if isinstance(size, torch.SymInt) else size


def probes(form: str, dim: int, width: int) -> tuple[Tensor, Tensor]:
    """``[width]`` each: 1 in the first (second) dim of every pair of the first ``dim`` dims."""
    index = torch.arange(width)
    second = (index >= dim // 2) if form == "half" else (index % 2 == 1)
    return ((index < dim) & ~second).float(), ((index < dim) & second).float()


# ---- the rows, in the graph ------------------------------------------------------------------------------------------


def _carry(
    subgraph: _Subgraph, form: str, dim: int, alike: bool, lead: Sequence[int], dims: Dims, roles: Dims
) -> Rotary | None:
    """The record; the subgraph's copies are put into the graph, once for all keys that it turns alike."""
    source, result = subgraph.source, subgraph.result
    place = {p: r for p, r in enumerate(lead) if r >= 0}
    layout = _layout(source, place, dims, roles)
    signature = subgraph.signature(form, dim, alike)
    found = next(
        (
            n.meta["sals_carried"][1:]
            for n in result.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
            if n.meta.get("sals_carried", (None,))[0] == signature
        ),
        None,
    )
    if found is None:
        sizes = [_named(s, result) for s in shape_of(source)]
        if None in sizes:
            return None
        options = {"dtype": dtype_of(source), "device": source.meta["val"].device}

        def put(target: Any, *args: Any, **kwargs: Any) -> Node:
            return emit(result, target, *args, **kwargs)

        def cut(node: Node, position: int, stop: int) -> Node:
            return put(aten.slice.Tensor, node, position, 0, stop)

        index = put(aten.arange.default, shape_of(source)[-1], dtype=torch.int64, device=options["device"])
        inside = put(aten.lt.Scalar, index, dim)
        later = (
            put(aten.ge.Scalar, index, dim // 2)
            if form == "half"
            else put(aten.eq.Scalar, put(aten.remainder.Scalar, index, 2), 1)
        )
        earlier = put(aten.logical_not.default, later)
        ones = put(aten.full.default, sizes, 1, **options)
        picks = [
            put(aten._to_copy.default, put(aten.logical_and.default, inside, p), dtype=options["dtype"])
            for p in (earlier, later)
        ]
        answers = []
        for pick in picks:
            answer = subgraph.copy(put, put(aten.mul.Tensor, ones, pick))
            if len(shape_of(answer)) > len(lead) + 1:
                answer = put(aten.flatten.using_ints, answer, len(lead), len(shape_of(answer)) - 1)
            for position, role in place.items():
                if role == 2 or (role == 0 and alike):
                    answer = cut(answer, position, 1)
            answers.append(cut(answer, len(lead), dim))
        first, second = (cut(p, 0, dim) for p in picks)
        one, two = answers
        cos = put(aten.add.Tensor, put(aten.mul.Tensor, one, first), put(aten.mul.Tensor, two, second))
        sin = put(aten.sub.Tensor, put(aten.mul.Tensor, one, second), put(aten.mul.Tensor, two, first))
        found = cos, sin
        sin.meta["sals_carried"] = (signature, cos, sin)
    place = {p: r for p, r in place.items() if r == 1 or (r == 0 and not alike)}
    rows = [_layout(n, place, dims, roles) for n in found]
    if layout is None or rows[0] is None or rows[1] is None:
        return None
    return Rotary(
        form, Operand(source, layout), Operand(found[0], rows[0]), Operand(found[1], rows[1]), dim, carried=True
    )


def _layout(node: Node, place: Mapping[int, int], dims: Dims, roles: Dims) -> Layout | None:
    """``[*lead, D]`` as ``[B, S, N, D]``, its leading dims (``place``: position to role) in the order that the roles'
    atoms have."""
    own = ViewTrace(node).base_dims
    ordered: Dims = [[], [], [], list(own[-1])]
    for role in range(3):
        for atom in roles[role]:
            ordered[role] += [own[p][0] for p, r in place.items() if r == role and atom in dims[p]]
    return Layout.build(own, ordered)


def _named(size: Size, before: Node) -> Node | int | None:
    """The size as an argument of a node: a number, or a node of the graph that has its value (None: there is none)."""
    if isinstance(size, int):
        return size
    for node in before.graph.nodes:
        if node is before:
            return None
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt) and same(value, size):
            return node
    return None
