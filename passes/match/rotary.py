"""Rotary embeddings: each pair ``(a, b)`` of dims becomes ``(a cos - b sin, b cos + a sin)``, in the spellings that
models use.

A spelling is a *rotation* (a row of :data:`ROTATIONS`) made of *pieces* of one tensor (halves, or even and odd dims)
*joined* again:

- turned: ``x * cos + join(-b, a) * sin``, cos and sin with one column per dim (Llama, NeoX; GPT-J interleaved);
- pairwise: ``join(a * cos - b * sin, b * cos + a * sin)``, one column per pair (gpt-oss; gpt-fast; the complex form
  after canonicalisation).

``cat`` joins halves (``half``), ``stack`` and a view join even and odd dims (``interleaved``); pieces and join must
agree, so that one form is never read as the other. Partial rotary is a ``cat`` of a rotated and an untouched part of
one tensor. Source of the form: RoFormer, arXiv 2104.09864.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..graph import (
    Atom,
    Dims,
    Layout,
    ViewTrace,
    aten,
    emit,
    is_float_cast,
    is_one,
    same,
    same_value,
    shape_of,
    trace_views,
)
from ..ir import Operand, Rotary

_VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.unflatten.int,
    aten.flatten.using_ints,
)


@dataclass(frozen=True)
class _Rotation:
    """What a spelling means: ``Rot(cos, sin) source`` in ``form``; with ``pairs``, cos and sin have one column per
    pair."""

    form: str
    source: Node
    cos: Node
    sin: Node
    pairs: bool


def strip(node: Node) -> Node:
    """The node under casts between floating types and contiguity copies."""
    while is_float_cast(node) or (
        node.op == "call_function" and node.target in (aten.clone.default, aten.alias.default, aten.contiguous.default)
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def calls(node: object, *targets: object) -> bool:
    return isinstance(node, Node) and node.op == "call_function" and node.target in targets


def _argument(node: Node, position: int, default: object) -> object:
    found = node.args[position] if len(node.args) > position else default
    return default if found is None else found


def _alike(a: Node, b: Node) -> bool:
    return strip(a) is strip(b) or same_value(strip(a), strip(b))


# ---- pieces and joins ------------------------------------------------------------------------------------------------


def last_slice(node: Node) -> tuple[Node, int, int, int] | None:
    """``(source, start, stop, step)`` when the node is ``source[..., start:stop:step]``."""
    node = strip(node)
    if not calls(node, aten.slice.Tensor):
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    size, rank = shape_of(source)[-1], len(shape_of(source))
    start, stop, step = _argument(node, 2, 0), _argument(node, 3, size), _argument(node, 4, 1)
    if int(_argument(node, 1, 0)) % rank != rank - 1 or not all(isinstance(v, int) for v in (size, start, stop, step)):  # type: ignore[call-overload]
        return None
    start, stop = (v + size if v < 0 else min(v, size) for v in (start, stop))  # type: ignore[operator,type-var]
    return source, start, stop, step  # type: ignore[return-value]


def _piece(node: Node) -> tuple[Node, str] | None:
    """``(source [..., w], which)`` when the node is the ``first`` or ``second`` half, or the ``even`` or ``odd`` dims,
    of ``source``."""
    node = strip(node)
    sliced = last_slice(node)
    if sliced is not None:
        source, start, stop, step = sliced
        width = shape_of(source)[-1]
        which = {
            (0, width // 2, 1): "first",
            (width // 2, width, 1): "second",
            (0, width, 2): "even",
            (1, width, 2): "odd",
        }.get((start, stop, step))
        return None if which is None or width % 2 else (source, which)
    if not calls(node, aten.select.int):
        return None
    pairs = node.args[0]
    assert isinstance(pairs, Node)
    shape, rank = shape_of(pairs), len(shape_of(pairs))
    dim = int(node.args[1]) % rank  # type: ignore[arg-type]
    if rank < 2 or dim < rank - 2 or shape[dim] != 2 or not isinstance(node.args[2], int):
        return None
    names = ("even", "odd") if dim == rank - 1 else ("first", "second")
    return _unpaired(pairs), names[node.args[2] % 2]


def _unpaired(pairs: Node) -> Node:
    """``[..., w/2, 2]`` (or ``[..., 2, w/2]``) as ``[..., w]``: the tensor it is a view of, or a view made here."""
    shape = shape_of(pairs)
    under = strip(pairs)
    source = under.args[0] if calls(under, *_VIEWS) else None
    wanted = (*shape[:-2], shape[-2] * shape[-1])
    if isinstance(source, Node):
        given = shape_of(source)
        if len(given) == len(wanted) and all(same(a, b) for a, b in zip(given, wanted, strict=True)):
            return source
    known = next((u for u in pairs.users if u.meta.get("sals_unpaired")), None)
    if known is None:
        # aten.flatten needs no sizes, which may be symbolic.
        known = emit(pairs.next, aten.flatten.using_ints, pairs, len(shape) - 2, len(shape) - 1)
        known.meta["sals_unpaired"] = True
    return known


def _join(node: Node) -> tuple[str, Node, Node] | None:
    """``(form, a, b)`` when the node joins two parts along its last dim: ``half`` by ``cat``, ``interleaved`` by
    ``stack`` and a view."""
    node = strip(node)
    if calls(node, aten.cat.default) and _on_last_dim(node) and len(node.args[0]) == 2:  # type: ignore[arg-type]
        a, b = node.args[0]  # type: ignore[misc]
        return ("half", a, b) if same(shape_of(a)[-1], shape_of(b)[-1]) else None  # type: ignore[arg-type,return-value]
    if calls(node, *_VIEWS):
        stacked = strip(node.args[0])  # type: ignore[arg-type]
        shape = shape_of(stacked)
        merged = (*shape[:-2], shape[-2] * shape[-1]) if len(shape) > 1 else ()
        if len(merged) != len(shape_of(node)) or not all(
            same(x, y) for x, y in zip(merged, shape_of(node), strict=True)
        ):
            return None
        return _stacked(stacked)
    return None


def _stacked(node: Node) -> tuple[str, Node, Node] | None:
    """A ``stack`` of two along the last dim (interleaved) or the one before (halves)."""
    if not calls(node, aten.stack.default) or len(node.args[0]) != 2:  # type: ignore[arg-type]
        return None
    rank = len(shape_of(node))
    dim = int(_argument(node, 1, 0)) % rank  # type: ignore[call-overload]
    form = {rank - 1: "interleaved", rank - 2: "half"}.get(dim)
    return None if form is None else (form, *node.args[0])  # type: ignore[misc]


def _on_last_dim(node: Node) -> bool:
    rank = len(shape_of(node))
    return int(_argument(node, 1, 0)) % rank == rank - 1  # type: ignore[call-overload]


_PIECES = {"half": ("first", "second"), "interleaved": ("even", "odd")}


def _factors(node: Node) -> list[tuple[Node, Node]]:
    """Both orders of the operands of a product of two tensors."""
    node = strip(node)
    if not calls(node, aten.mul.Tensor) or not all(isinstance(a, Node) for a in node.args[:2]):
        return []
    return [node.args[:2], node.args[1::-1]]  # type: ignore[list-item]


# ---- rotations -------------------------------------------------------------------------------------------------------


def turned(node: Node) -> _Rotation | None:
    """``x * cos + join(-b, a) * sin``, operands in any order."""
    node = strip(node)
    if not calls(node, aten.add.Tensor) or node.kwargs or not all(isinstance(a, Node) for a in node.args[:2]):
        return None
    for straight, crossed in (node.args[:2], node.args[1::-1]):
        for joined, sin in _factors(crossed):  # type: ignore[arg-type]
            parts = _join(joined)
            if parts is None:
                continue
            form, negated, first = parts
            negated = strip(negated)
            if not calls(negated, aten.neg.default):
                continue
            a, b = _piece(first), _piece(negated.args[0])  # type: ignore[arg-type]
            if a is None or b is None or (a[1], b[1]) != _PIECES[form] or not _alike(a[0], b[0]):
                continue
            for x, cos in _factors(straight):  # type: ignore[arg-type]
                if _alike(x, a[0]):
                    return _Rotation(form, x, cos, sin, pairs=False)
    return None


def pairwise(node: Node) -> _Rotation | None:
    """``join(a * cos - b * sin, b * cos + a * sin)``."""
    parts = _join(node) or _stacked(strip(node))
    if parts is None:
        return None
    form, minus, plus = parts[0], strip(parts[1]), strip(parts[2])
    if not calls(minus, aten.sub.Tensor) or not calls(plus, aten.add.Tensor) or minus.kwargs or plus.kwargs:
        return None
    if not all(isinstance(n, Node) for n in (*minus.args[:2], *plus.args[:2])):
        return None
    for a_node, cos in _factors(minus.args[0]):  # type: ignore[arg-type]
        for b_node, sin in _factors(minus.args[1]):  # type: ignore[arg-type]
            a, b = _piece(a_node), _piece(b_node)
            if a is None or b is None or (a[1], b[1]) != _PIECES[form] or not _alike(a[0], b[0]):
                continue
            for left, right in (plus.args[:2], plus.args[1::-1]):
                straight = any(_alike(x, b_node) and _alike(c, cos) for x, c in _factors(left))  # type: ignore[arg-type]
                crossed = any(_alike(x, a_node) and _alike(s, sin) for x, s in _factors(right))  # type: ignore[arg-type]
                if straight and crossed:
                    return _Rotation(form, a[0], cos, sin, pairs=True)
    return None


#: The spellings, as data: adding one is adding a function here and its test.
ROTATIONS: tuple[Callable[[Node], _Rotation | None], ...] = (turned, pairwise)


def _rotation(node: Node) -> _Rotation | None:
    return next((found for rule in ROTATIONS if (found := rule(node)) is not None), None)


def match_rotary(trace: ViewTrace, roles: Dims) -> tuple[Rotary | None, str]:
    """The rotary embedding that made ``trace.base``, whose atoms play ``roles`` ``[B, S, N, D]``; else None and why
    not."""
    node = strip(trace.base)
    dims = trace.base_dims
    if len(shape_of(node)) != len(dims):
        return None, "no rotary form matched"
    head_dim = [a for a in roles[3] if not is_one(a.size)]
    if _stacked(node) is not None:  # the view that joins the pairs was walked through: both dims are the head dim
        if not dims[-2:] or head_dim != [a for d in dims[-2:] for a in d if not is_one(a.size)]:
            return None, "rotation is not along the head dim"
        dims = [*dims[:-2], [*dims[-2], *dims[-1]]]
    elif head_dim != [a for a in dims[-1] if not is_one(a.size)]:
        return None, "rotation is not along the head dim"
    found, part = _rotation(node), None
    if found is None and calls(node, aten.cat.default) and _on_last_dim(node) and len(node.args[0]) == 2:  # type: ignore[arg-type]
        rotated, part = node.args[0]  # type: ignore[misc]
        found = _rotation(rotated)
    if found is None:
        return None, "no rotary form matched"
    source, dim = found.source, shape_of(found.source)[-1]
    if not isinstance(dim, int):
        return None, "rotated width is symbolic"
    if part is not None:
        front, back = last_slice(source), last_slice(part)  # type: ignore[arg-type]
        width = shape_of(node)[-1]
        if front is None or back is None or not _alike(front[0], back[0]):
            return None, "the rotated part is not a slice of one tensor"
        if front[1:] != (0, dim, 1) or back[1:] != (dim, width, 1) or not same(shape_of(front[0])[-1], width):
            return None, "rotated and untouched parts do not come from one tensor in order"
        source = front[0]
    if len(shape_of(source)) != len(dims):
        return None, "the rotation broadcasts its operand"
    if not all(same(s, _size(d)) for s, d in zip(shape_of(source), dims, strict=True)):
        return None, "the rotation broadcasts its operand"
    layout = Layout.build(dims, roles)
    if layout is None:
        return None, "axes of the rotated key could not be told apart"
    rows = [_row_operand(factor, dims, roles, dim // 2 if found.pairs else dim) for factor in (found.cos, found.sin)]
    if rows[0] is None or rows[1] is None:
        return None, "cos/sin vary over heads or could not be aligned with the key"
    return Rotary(found.form, Operand(source, layout), rows[0], rows[1], dim, found.pairs), ""


def _size(dim: list[Atom]):
    size = 1
    for atom in dim:
        size = size * atom.size
    return size


def _row_operand(node: Node, dims: Dims, roles: Dims, columns: int) -> Operand | None:
    """cos or sin, broadcast against ``dims``, as ``[P, S, 1, columns]``: its dims inherit the roles of those they align
    with.

    Views are followed to the tensor that all layers share, so that its rows are recorded once.
    """
    for trace in (trace_views(node, casts=False), ViewTrace(node)):
        if len(trace.dims) > len(dims) or not trace.dims:
            continue
        last = [a for a in trace.dims[-1] if not is_one(a.size)]
        if len(last) != 1 or last[0].broadcast or not same(last[0].size, columns):
            continue
        row_roles: Dims = [[], [], [], last]
        for own, aligned in zip(trace.dims[:-1], dims[len(dims) - len(trace.dims) : -1], strict=True):
            kept = [a for a in own if not is_one(a.size) and not a.broadcast]
            if not kept:
                continue
            role = {next((r for r, atoms in enumerate(roles) if a in atoms), -1) for a in aligned if not is_one(a.size)}
            if len(role) != 1 or not role <= {0, 1}:
                break
            row_roles[role.pop()] += kept
        else:
            layout = Layout.build(trace.base_dims, row_roles)
            if layout is not None:
                return Operand(trace.base, layout)
    return None


def rows_dtype(rotary: Rotary) -> torch.dtype:
    """The dtype in which rows are recorded: that of the graph's own cos and sin."""
    return rotary.cos.node.meta["val"].dtype


__all__ = ["ROTATIONS", "calls", "last_slice", "match_rotary", "rows_dtype", "strip"]
