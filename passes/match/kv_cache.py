"""Static KV caches: a buffer that enters the graph, has this call's tokens written at given slots, and is read whole by
a site.

Recognised (each a row of :data:`WRITES`): ``index_copy`` (``transformers.StaticCache``), ``buffer[:, :, positions] =
new`` (``index_put``; gpt-fast), ``buffer[:, start:stop] = new`` (``slice_scatter``; Llama's original code) and
``scatter``, each with the store back (``copy_``) that functionalisation leaves at the graph's end; or into a *virtual*
buffer (``kernels/virtual.py``), which nothing is stored back to. A buffer may be a part of a pool (``pool[layer, 0]``:
``select`` with literal indices, put back by ``select_scatter``). Growing caches (``cat`` of an input and the new
tokens) are told apart so that the decline can name the remedy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from ...kernels.index_expr import Expr
from ...kernels.virtual import VIRTUAL_BUFFER
from ..graph import (
    Dims,
    Layout,
    Size,
    ViewTrace,
    aten,
    dtype_of,
    emit,
    inherit_roles,
    is_one,
    same,
    shape_of,
    trace_views,
)
from ..ir import CacheWrite, Mismatch
from .mask import _BINARY, IndexInterpreter
from .rotary import calls, strip

GROWING = (
    "the KV cache grows by concatenation; use a static cache (transformers: StaticCache or "
    "cache_implementation='static') or sals_compile.integrations.transformers.SalsCache"
)
ROLLING = (
    "the cache buffer is computed in the graph (a sliding cache that rolls, or a buffer written twice), so its tokens "
    "have no fixed slots; use a cache as long as the sequence"
)


@dataclass(frozen=True)
class _Write:
    """``update = buffer`` with ``new`` at ``slots`` (``[L]`` or ``[B, L]``) along ``dim``."""

    buffer: Node
    dim: int
    slots: Node
    new: Node


def _index_copy(update: Node) -> _Write:
    buffer, dim, slots, new = update.args
    return _Write(buffer, int(dim), slots, new)  # type: ignore[arg-type]


def _index_put(update: Node) -> _Write:
    """``buffer[:, :, slots] = new``, or ``buffer[arange(B)[:, None], slots] = new`` with slots per batch row."""
    buffer, indices, new = update.args[:3]
    if len(update.args) > 3 and update.args[3]:
        raise Mismatch("the cache is accumulated into, not written", update)
    given = [(i, index) for i, index in enumerate(indices) if index is not None]  # type: ignore[arg-type]
    if any(dtype_of(index) not in (torch.int64, torch.int32) for _, index in given):
        raise Mismatch("the cache is written through a boolean index", update)
    if len(given) == 1 and len(shape_of(given[0][1])) == 1:
        wanted = list(shape_of(buffer))  # type: ignore[arg-type]
        wanted[given[0][0]] = shape_of(given[0][1])[0]
        while len(shape_of(new)) < len(wanted):  # type: ignore[arg-type]
            # Indexing drops leading axes of size one from what it writes.
            if not is_one(wanted[len(wanted) - len(shape_of(new)) - 1]):  # type: ignore[arg-type]
                raise Mismatch("the cache is written by a broadcast of fewer values", update)
            new = emit(update, aten.unsqueeze.default, new, 0)
        return _Write(buffer, given[0][0], given[0][1], new)  # type: ignore[arg-type]
    if [i for i, _ in given] == [0, 1] and len(shape_of(given[1][1])) == 2:
        rows, slots = given[0][1], given[1][1]
        row = IndexInterpreter().operand(rows, (Expr("b"), Expr("q")))
        if row == Expr("b") and all(same(a, b) for a, b in zip(shape_of(slots), shape_of(new)[:2], strict=True)):  # type: ignore[arg-type]
            return _Write(buffer, 1, slots, new)  # type: ignore[arg-type]
    raise Mismatch("the cache is written through an index that is not one slot per token (a paged cache?)", update)


def _slice_scatter(update: Node) -> _Write | None:
    """``buffer[start:stop] = new`` along one dim: its slots are made here, once for all layers."""
    buffer, new, *rest = update.args
    dim, start, _, step = (*rest, *(0, 0, None, 1)[len(rest) :])
    if step != 1 or not isinstance(new, Node):
        return None
    length = shape_of(new)[int(dim)]  # type: ignore[call-overload]
    return _Write(buffer, int(dim), _slots_from(update, start or 0, length), new)  # type: ignore[arg-type,call-overload]


def _slots_from(update: Node, start: Any, length: Size) -> Node:
    """``arange(start, start + length)``, shared by all writes of the graph that begin there."""
    graph = update.graph
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        key = node.meta.get("sals_slots")
        if key is not None and key[0] is start and same(key[1], length):
            return node
    if isinstance(start, int) and start < 0:
        raise Mismatch("the cache is written at a negative slot", update)
    buffer = update.args[0]
    device = buffer.meta["val"].device  # type: ignore[union-attr]
    at = next(n for n in graph.nodes if n.op != "placeholder") if not isinstance(start, Node) else start.next
    size: Any = length
    if not isinstance(length, int):
        new: Any = update.args[1]
        at = new.next
        size = emit(at, aten.sym_size.int, new, int(update.args[2]) if len(update.args) > 2 else 0)  # type: ignore[arg-type]
    base = emit(at, aten.arange.default, size, dtype=torch.int64, device=device)
    node = emit(at, aten.add.Tensor, base, start)
    node.meta["sals_slots"] = (start, length)
    return node


def _scatter(update: Node) -> _Write | None:
    """``scatter(buffer, dim, positions expanded to new, new)``."""
    buffer, dim, index, new = update.args[:4]
    if not isinstance(new, Node) or not isinstance(index, Node) or len(update.args) > 4:
        return None
    dim = int(dim) % len(shape_of(buffer))  # type: ignore[arg-type]
    trace = trace_views(index, casts=False)
    if len(shape_of(index)) != len(shape_of(new)) or not all(
        same(a, b) for a, b in zip(shape_of(index), shape_of(new), strict=True)
    ):
        raise Mismatch("the cache is scattered into by fewer indices than there are new values", update)
    axes = [[a for a in d if not is_one(a.size) and not a.broadcast] for d in trace.dims]
    varying = [i for i, atoms in enumerate(axes) if atoms]
    rank = len(shape_of(trace.base))
    if varying in ([], [dim]) and rank == 1:
        return _Write(buffer, dim, trace.base, new)  # type: ignore[arg-type]
    if varying in ([], [0], [dim], [0, dim]) and dim and rank == 2:
        order = [a.dim or 0 for i in varying for a in axes[i]]
        if order == sorted(order) and all(len(axes[i]) == 1 for i in varying):
            return _Write(buffer, dim, trace.base, new)  # type: ignore[arg-type]
    raise Mismatch("the cache is scattered into at slots that are not one per token", update)


#: How a cache is written, as data: adding a way is adding a line and its test.
WRITES: dict[Any, Callable[[Node], _Write | None]] = {
    aten.index_copy.default: _index_copy,
    aten.index_put.default: _index_put,
    aten.slice_scatter.default: _slice_scatter,
    aten.scatter.src: _scatter,
}


def tokens_written(update: Node) -> Size | None:
    """How many tokens the call writes, when the node is the update of a cache along one axis."""
    if calls(update, aten.slice.Tensor):
        update = update.args[0]  # type: ignore[assignment]
    args: Any = update.args
    if calls(update, aten.index_copy.default):
        return shape_of(args[2])[-1]
    if calls(update, aten.index_put.default):
        last = [index for index in args[1] if index is not None][-1]
        return shape_of(last)[-1] if shape_of(last) else None
    if calls(update, aten.slice_scatter.default):
        return shape_of(args[1])[args[2] if len(args) > 2 else 0]
    return shape_of(args[2])[args[1]] if calls(update, aten.scatter.src) else None


def match_cache(trace: ViewTrace, roles: Dims) -> CacheWrite | None:
    """The write that made ``trace.base``, whose atoms play ``roles`` ``[B, S, N, D]``; None when it is no cache."""
    update, read = trace.base, None
    if calls(update, aten.slice.Tensor):
        update, read = _leading_slice(update, roles)
        if update is None:
            return None
    if calls(update, aten.cat.default):
        _reject_growing(update, roles)
        return None
    _reject_quantised(update)
    rule = WRITES.get(update.target) if update.op == "call_function" else None
    write = None if rule is None else rule(update)
    if write is None:
        return None
    buffer = write.buffer
    dim = write.dim % len(shape_of(buffer))
    pool, place = _pool(buffer)
    stores = tuple(
        u
        for u in pool.users
        if calls(u, aten.copy_.default) and u.args[0] is pool and _part_at(u.args[1], place) is update
    )
    if calls(buffer, VIRTUAL_BUFFER):
        if any(u.op == "output" for u in update.users):
            raise Mismatch("a virtual KV buffer leaves the graph", update)
    elif pool.op != "placeholder":
        if [a.dim for a in roles[1] if a.dim is not None] != [dim]:
            return None  # put together from parts of each token (MLA), not written token by token
        if not _born_here(buffer, update):
            raise Mismatch(ROLLING, update)
    elif not stores:
        raise Mismatch("the updated cache is not stored back into its buffer; write it in place (index_copy_)", update)
    _require_plain(write, dim, update)
    capacity = shape_of(buffer)[dim]
    if not isinstance(capacity, int):
        raise Mismatch("the cache's capacity is symbolic; mark it static (torch._dynamo.mark_static)", update)
    own = ViewTrace(update)
    own_roles = inherit_roles(trace, roles, own)
    if own_roles is None or [a.dim for a in own_roles[1]] != [dim]:
        raise Mismatch("the cache is written along another axis than the tokens that are attended", update)
    if len(shape_of(write.slots)) == 2 and [a.dim for a in own_roles[0]] not in ([], [0]):
        raise Mismatch("slots per batch row need the batch as the cache's first axis", update)
    layout = Layout.build(own.base_dims, own_roles)
    if layout is None:
        raise Mismatch("axes of the cache buffer could not be told apart", update)
    return CacheWrite(
        buffer=buffer,
        update=update,
        new=write.new,
        slots=write.slots,
        slots_dim=len(shape_of(write.slots)),
        capacity=capacity,
        layout=layout,
        read=read,
        stores=stores,
    )


def _require_plain(write: _Write, dim: int, update: Node) -> None:
    """The new tokens fill the buffer's other axes, and nothing is converted but the floating type."""
    old, new = shape_of(write.buffer), shape_of(write.new)
    if len(old) != len(new) or not all(i == dim or same(a, b) for i, (a, b) in enumerate(zip(old, new, strict=True))):
        raise Mismatch("only a part of the cache's batch, heads or dims is written", update)
    if len(shape_of(write.slots)) not in (1, 2) or not same(shape_of(write.slots)[-1], new[dim]):
        raise Mismatch("the cache is not written at one slot per new token", update)
    if not dtype_of(write.buffer).is_floating_point:
        raise Mismatch(f"the cache is kept in {dtype_of(write.buffer)} (a quantised cache)", update)


def _pool(buffer: Node) -> tuple[Node, list[tuple[int, int]]]:
    """What the buffer is a part of, and ``(dim, index)`` of each ``select`` that takes it, outermost first."""
    place: list[tuple[int, int]] = []
    node = buffer
    while calls(node, aten.select.int) and isinstance(node.args[2], int) and node.args[2] >= 0:
        source: Any = node.args[0]
        place.insert(0, (int(node.args[1]) % len(shape_of(source)), node.args[2]))  # type: ignore[arg-type]
        node = source
    return (node, place) if node.op == "placeholder" else (buffer, [])


def _part_at(node: Any, place: list[tuple[int, int]]) -> Node | None:
    """What a tensor put together by ``select_scatter`` holds at ``place``; None where that cannot be told."""
    place = list(place)
    while place:
        if not calls(node, aten.select_scatter.default):
            return None
        before, new, dim, index = node.args
        if int(dim) % len(shape_of(node)) != place[0][0] or not isinstance(index, int) or index < 0:
            return None
        if index == place[0][1]:
            node = new
            place.pop(0)
        else:
            node = before
    return node


def _leading_slice(node: Node, roles: Dims) -> tuple[Node | None, Any]:
    """``(source, n)`` when the node is ``source[..., :n]`` along the token axis (a first prefill reads only what it
    wrote)."""
    source = node.args[0]
    dim = (int(node.args[1]) if len(node.args) > 1 else 0) % len(shape_of(node))  # type: ignore[arg-type]
    start = node.args[2] if len(node.args) > 2 else 0
    step = node.args[4] if len(node.args) > 4 else 1
    tokens = [a.dim for a in roles[1] if not is_one(a.size)] or [dim]
    if start not in (0, None) or step != 1 or tokens != [dim]:
        return None, None
    end = node.args[3]
    if isinstance(end, int) and end < 0:
        return None, None
    return source, end  # type: ignore[return-value]


def _born_here(buffer: Node, update: Node) -> bool:
    """A cache that this graph creates (zeros) and returns: lazily initialised, as transformers' caches are."""
    return calls(buffer, aten.zeros.default) and any(u.op == "output" for u in update.users)


def _reject_growing(update: Node, roles: Dims) -> None:
    """A ``cat`` along the token axis with a graph input is a growing cache: declined, with the remedy."""
    parts = update.args[0]
    dim = int(update.args[1]) if len(update.args) > 1 else 0  # type: ignore[arg-type]
    dim %= len(shape_of(update))
    token_axis = [a.dim for a in roles[1] if not is_one(a.size)]
    if token_axis == [dim] and any(_from_input(p) for p in parts):  # type: ignore[union-attr]
        raise Mismatch(GROWING, update)


def grows(node: Node) -> bool:
    """Whether the node appends to a graph input."""
    return calls(node, aten.cat.default) and any(_from_input(p) for p in node.args[0])  # type: ignore[union-attr]


def _reject_quantised(node: Node) -> None:
    """Keys computed element by element from an integer cache are a quantised cache."""
    for _ in range(8):
        if node.op != "call_function" or not node.args or not isinstance(node.args[0], Node):
            return
        if node.target in WRITES and not dtype_of(node).is_floating_point:
            raise Mismatch(f"the cache is kept in {dtype_of(node)} (a quantised cache), which is not supported", node)
        if node.target not in (aten._to_copy.default, *_BINARY):
            return
        node = node.args[0]
        if not isinstance(node.meta.get("val"), torch.Tensor):
            return


def _from_input(node: Node) -> bool:
    """A graph input, or a slice of one (a sliding cache drops its oldest tokens first)."""
    node = strip(node)
    while calls(node, aten.slice.Tensor):
        node = strip(node.args[0])  # type: ignore[arg-type]
    return node.op == "placeholder"
