"""Static KV caches: a buffer that enters the graph, has this call's tokens written at given slots, and is read whole by a site.

Recognised: ``index_copy(buffer, dim, slots, new)`` with the store back (``copy_``) that functionalisation leaves at the graph's end
(``transformers.StaticCache``). Growing caches (``cat`` of an input and the new tokens) are told apart so that the decline can name the remedy.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from ..graph import Dims, Layout, ViewTrace, aten, inherit_roles, is_one, shape_of
from ..ir import CacheWrite, Mismatch
from .rotary import calls, strip

GROWING = (
    "the KV cache grows by concatenation; use a static cache (transformers: StaticCache or cache_implementation='static')"
)


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
    if not calls(update, aten.index_copy.default):
        return None
    buffer, dim, slots, new = update.args
    assert isinstance(buffer, Node) and isinstance(slots, Node) and isinstance(new, Node)
    dim = int(dim) % len(shape_of(buffer))  # type: ignore[arg-type]
    if buffer.op != "placeholder" and not _born_here(buffer, update):
        raise Mismatch("the cache buffer is computed in the graph, so its tokens have no home between calls", update)
    capacity = shape_of(buffer)[dim]
    if not isinstance(capacity, int):
        raise Mismatch("the cache's capacity is symbolic; mark it static (torch._dynamo.mark_static)", update)
    own = ViewTrace(update)
    own_roles = inherit_roles(trace, roles, own)
    if own_roles is None or [a.dim for a in own_roles[1]] != [dim]:
        raise Mismatch("the cache is written along another axis than the tokens that are attended", update)
    layout = Layout.build(own.base_dims, own_roles)
    if layout is None:
        raise Mismatch("axes of the cache buffer could not be told apart", update)
    return CacheWrite(
        buffer=buffer,
        update=update,
        new=new,
        slots=slots,
        slots_dim=len(shape_of(slots)),
        capacity=capacity,
        layout=layout,
        read=read,
        stores=tuple(
            u for u in update.users if calls(u, aten.copy_.default) and u.args[0] is buffer and u.args[1] is update
        ),
    )


def _leading_slice(node: Node, roles: Dims) -> tuple[Node | None, Any]:
    """``(source, n)`` when the node is ``source[..., :n]`` along the token axis (a first prefill reads only what it wrote)."""
    source = node.args[0]
    dim = (int(node.args[1]) if len(node.args) > 1 else 0) % len(shape_of(node))  # type: ignore[arg-type]
    start = node.args[2] if len(node.args) > 2 else 0
    step = node.args[4] if len(node.args) > 4 else 1
    tokens = [a.dim for a in roles[1] if not is_one(a.size)]
    if start not in (0, None) or step != 1 or tokens != [dim]:
        return None, None
    return source, node.args[3]  # type: ignore[return-value]


def _born_here(buffer: Node, update: Node) -> bool:
    """A cache that this graph creates (zeros) and returns: lazily initialised, as transformers' caches are."""
    return calls(buffer, aten.zeros.default) and any(u.op == "output" for u in update.users)


def _reject_growing(update: Node, roles: Dims) -> None:
    """A ``cat`` along the token axis with a graph input is a growing cache: declined, with the remedy."""
    parts = update.args[0]
    dim = int(update.args[1]) if len(update.args) > 1 else 0  # type: ignore[arg-type]
    dim %= len(shape_of(update))
    token_axis = [a.dim for a in roles[1] if not is_one(a.size)]
    if token_axis == [dim] and any(strip(p).op == "placeholder" for p in parts):  # type: ignore[union-attr]
        raise Mismatch(GROWING, update)
