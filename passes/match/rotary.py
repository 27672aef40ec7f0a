"""Rotary embeddings: ``rotated = x * cos + J x * sin`` in the spellings that models use.

Recognised (each a row of :data:`FORMS`, tried in order): half-split (``cat(-x2, x1)``; Llama, NeoX, Qwen). Partial rotary is a ``cat`` of a
rotated and an untouched part of the same tensor. ``cos`` and ``sin`` broadcast over heads and hold one column per rotated dim.
Source of the form: RoFormer, arXiv 2104.09864; ``transformers`` ``apply_rotary_pos_emb``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph import Dims, Layout, ViewTrace, aten, is_float_cast, is_one, same, shape_of, trace_views
from ..ir import Operand, Rotary


@dataclass(frozen=True)
class _Rotation:
    """What a form found: the rotated node is ``Rot(cos, sin) source`` in ``form``; ``cos``/``sin`` broadcast to its shape."""

    form: str
    source: Node
    cos: Node
    sin: Node


def strip(node: Node) -> Node:
    """The node under casts between floating types and contiguity copies."""
    while is_float_cast(node) or (
        node.op == "call_function" and node.target in (aten.clone.default, aten.alias.default, aten.contiguous.default)
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def calls(node: object, *targets: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _is_slice(node: Node, source: Node, start: int, stop: int) -> bool:
    """``node == source[..., start:stop]`` along the last dim, as a slice, a chunk or a split."""
    node = strip(node)
    size = shape_of(source)[-1]
    if calls(node, aten.slice.Tensor) and strip(node.args[0]) is strip(source):  # type: ignore[arg-type]
        dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        rank = len(shape_of(source))
        first = node.args[2] if len(node.args) > 2 and node.args[2] is not None else 0
        last = node.args[3] if len(node.args) > 3 and node.args[3] is not None else size
        step = node.args[4] if len(node.args) > 4 else 1
        if not isinstance(size, int) or not isinstance(first, int) or not isinstance(last, int):
            return False
        first, last = (v + size if v < 0 else min(v, size) for v in (first, last))
        return dim % rank == rank - 1 and step == 1 and (first, last) == (start, stop)
    if node.op == "call_function" and node.target.__name__ == "getitem":  # type: ignore[union-attr]
        parts, position = node.args
        if calls(parts, aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
            assert isinstance(parts, Node)
            if strip(parts.args[0]) is not strip(source):  # type: ignore[arg-type]
                return False
            dim = parts.args[2] if len(parts.args) > 2 else parts.kwargs.get("dim", 0)
            rank = len(shape_of(source))
            widths = [v.shape[-1] for v in parts.meta["val"]]
            begin = sum(widths[: int(position)])  # type: ignore[arg-type]
            return int(dim) % rank == rank - 1 and (begin, begin + widths[int(position)]) == (start, stop)  # type: ignore[arg-type]
    return False


def half_split(node: Node) -> _Rotation | None:
    """``x * cos + cat(-x[..., h:], x[..., :h]) * sin``, operands in any order."""
    if not calls(node, aten.add.Tensor) or node.kwargs:
        return None
    terms = [strip(a) for a in node.args[:2] if isinstance(a, Node)]
    if len(terms) != 2 or not all(calls(t, aten.mul.Tensor) for t in terms):
        return None
    for straight, crossed in (terms, terms[::-1]):
        for turned, sin in (crossed.args[:2], crossed.args[1::-1]):
            if not isinstance(turned, Node) or not isinstance(sin, Node):
                continue
            source = _turned_half(strip(turned))
            if source is None:
                continue
            for x, cos in (straight.args[:2], straight.args[1::-1]):
                if isinstance(x, Node) and isinstance(cos, Node) and strip(x) is strip(source):
                    return _Rotation("half", x, cos, sin)
    return None


def _turned_half(node: Node) -> Node | None:
    """``x`` when the node is ``cat(-x2, x1)`` of its halves along the last dim."""
    if not calls(node, aten.cat.default):
        return None
    parts = node.args[0]
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    size, rank = shape_of(node)[-1], len(shape_of(node))
    if dim % rank != rank - 1 or len(parts) != 2 or not isinstance(size, int) or size % 2:  # type: ignore[arg-type]
        return None
    negated, first = (strip(p) for p in parts)  # type: ignore[union-attr]
    if not calls(negated, aten.neg.default):
        return None
    second = strip(negated.args[0])  # type: ignore[arg-type]
    source = _sliced_from(first)
    if source is None or not same(shape_of(source)[-1], size):
        return None
    half = size // 2
    return source if _is_slice(first, source, 0, half) and _is_slice(second, source, half, size) else None


def _sliced_from(node: Node) -> Node | None:
    if calls(node, aten.slice.Tensor):
        return node.args[0]  # type: ignore[return-value]
    if node.op == "call_function" and node.target.__name__ == "getitem" and isinstance(node.args[0], Node):  # type: ignore[union-attr]
        return node.args[0].args[0]  # type: ignore[return-value]
    return None


#: The forms, as data: adding one is adding a function here and its test.
FORMS: tuple[Callable[[Node], _Rotation | None], ...] = (half_split,)


def match_rotary(trace: ViewTrace, roles: Dims) -> tuple[Rotary | None, str]:
    """The rotary embedding that made ``trace.base``, whose atoms play ``roles`` ``[B, S, N, D]``; else None and why not."""
    node = strip(trace.base)
    rotated, part = node, None
    if calls(node, aten.cat.default) and _last_dim(node) and len(node.args[0]) == 2:  # type: ignore[arg-type]
        rotated, part = strip(node.args[0][0]), strip(node.args[0][1])  # type: ignore[index]
    for form in FORMS:
        found = form(rotated)
        if found is None:
            continue
        source = found.source
        dim = shape_of(source)[-1]
        if not isinstance(dim, int):
            return None, "rotated width is symbolic"
        if part is not None:
            whole = _sliced_from(strip(source))
            width = shape_of(node)[-1]
            if whole is None or not isinstance(width, int):
                return None, "the rotated part is not a slice of one tensor"
            if not (_is_slice(source, whole, 0, dim) and _is_slice(part, whole, dim, width)):
                return None, "rotated and untouched parts do not come from one tensor in order"
            source = whole
        head_dim = [a for a in roles[3] if not is_one(a.size)]
        if len(head_dim) != 1 or head_dim[0].dim != len(trace.base_dims) - 1:
            return None, "rotation is not along the head dim"
        layout = Layout.build(trace.base_dims, roles)
        if layout is None:
            return None, "axes of the rotated key could not be told apart"
        rows = []
        for factor in (found.cos, found.sin):
            row = _row_operand(factor, trace, roles, dim)
            if row is None:
                return None, "cos/sin vary over heads or could not be aligned with the key"
            rows.append(row)
        return Rotary(found.form, Operand(source, layout), rows[0], rows[1], dim), ""
    return None, "no rotary form matched"


def _last_dim(node: Node) -> bool:
    rank = len(shape_of(node))
    dim = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
    return dim % rank == rank - 1


def _row_operand(node: Node, rotated: ViewTrace, roles: Dims, dim: int) -> Operand | None:
    """cos or sin, broadcast against the rotated tensor, as ``[P, S, 1, Dr]``: its dims inherit the roles of those they align with."""
    shape = shape_of(node)
    base_rank = len(rotated.base_dims)
    if len(shape) > base_rank:
        return None
    trace = ViewTrace(node)
    row_roles: Dims = [[], [], [], []]
    for own, aligned in zip(trace.base_dims, rotated.base_dims[base_rank - len(shape) :], strict=True):
        if all(is_one(a.size) for a in own):
            continue
        wanted = [a for a in aligned if not is_one(a.size)]
        role = {next((r for r, atoms in enumerate(roles) if a in atoms), -1) for a in wanted}
        if len(role) != 1 or -1 in role or 2 in role:
            # Rows expanded over heads are still shared when the expansion is a broadcast.
            return _shared_row_operand(node, rotated, roles, dim)
        row_roles[role.pop()] += own
    layout = Layout.build(trace.base_dims, row_roles)
    return None if layout is None else Operand(node, layout)


def _shared_row_operand(node: Node, rotated: ViewTrace, roles: Dims, dim: int) -> Operand | None:
    trace = trace_views(node)
    if trace.base is node:
        return None
    base_rank = len(rotated.base_dims)
    row_roles: Dims = [[], [], [], []]
    for own, aligned in zip(trace.dims, rotated.base_dims[base_rank - len(trace.dims) :], strict=True):
        own = [a for a in own if not is_one(a.size) and not a.broadcast]
        if not own:
            continue
        role = {next((r for r, atoms in enumerate(roles) if a in atoms), -1) for a in aligned if not is_one(a.size)}
        if len(role) != 1 or -1 in role or 2 in role:
            return None
        row_roles[role.pop()] += own
    layout = Layout.build(trace.base_dims, row_roles)
    return None if layout is None else Operand(trace.base, layout)


def rows_dtype(rotary: Rotary) -> torch.dtype:
    """The dtype in which rows are recorded: that of the graph's own cos and sin."""
    return rotary.cos.node.meta["val"].dtype
