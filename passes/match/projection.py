"""The linear map that made the keys, with or without bias: where a basis from weights alone comes from.

Recognised: ``mm``/``addmm`` of the hidden state with a parameter, transposed (``nn.Linear``) or not (GPT-2's
``Conv1D``), whole or a run of columns of a fused map, and the RMS- or LayerNorm weight that multiplies the hidden state
just before.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from ..graph import aten, is_one, same, shape_of, trace_views
from ..ir import Operand, Projection
from .rotary import calls, last_slice, strip


def match_projection(key: Operand) -> Projection | None:
    """The projection of ``key``, or None when it is not a plain linear map of a parameter."""
    base = under_views(trace_views(key.node).base)
    sliced = last_slice(base)
    if sliced is not None and sliced[3] == 1:
        # A fused projection: its columns [start, stop) are the keys.
        source, start, stop, _ = sliced
        whole = linear_map(under_views(trace_views(source).base))
        return None if whole is None or not same_width(source, whole) else replace(whole, rows=(start, stop))
    return linear_map(base)


def under_views(node: Node) -> Node:
    """Past views that keep the last dim (with symbolic sizes the trace stops at those that merge batch and tokens)."""
    while calls(node, aten.view.default, aten._unsafe_view.default, aten.reshape.default):
        source = strip(node.args[0])  # type: ignore[arg-type]
        if not same(shape_of(source)[-1], shape_of(node)[-1]):
            break
        node = source
    return node


def same_width(source: Node, whole: Projection) -> bool:
    return shape_of(source)[-1] == shape_of(whole.weight)[1 if whole.transposed else 0]


def linear_map(base: Node) -> Projection | None:
    """The whole map that a product (or a product and its bias) applies, or None when no parameter is its matrix."""
    bias: Node | None = None
    if calls(base, aten.addmm.default):
        bias, left, right = (a for a in base.args[:3])  # type: ignore[assignment]
    elif calls(base, aten.mm.default, aten.bmm.default):
        left, right = base.args[:2]  # type: ignore[assignment]
    elif calls(base, aten.linear.default):
        left, right = base.args[:2]  # type: ignore[assignment]
        bias = base.args[2] if len(base.args) > 2 else None  # type: ignore[assignment]
        weight = trace_views(right).base  # type: ignore[arg-type]
        if not _is_matrix(weight):
            return None
        return Projection(weight, bias, _norm_weight(left), product=base)  # type: ignore[arg-type]
    elif calls(base, aten.add.Tensor):
        inner = [a for a in base.args[:2] if isinstance(a, Node)]
        for product, other in (inner, inner[::-1]) if len(inner) == 2 else ():
            found = linear_map(trace_views(product).base)
            if found is not None and found.bias is None and strip(other).op == "placeholder":
                return replace(found, bias=strip(other))
        return None
    else:
        return None
    trace = trace_views(right)  # type: ignore[arg-type]
    weight = trace.base
    if not _is_matrix(weight):
        return None
    # The columns of the product are the weight's rows (nn.Linear) or its columns (Conv1D).
    columns = [a.dim for a in trace.dims[-1] if not is_one(a.size)]
    if columns not in ([0], [1]) or len(trace.dims) > 3:
        return None
    return Projection(weight, bias, _norm_weight(left), None, columns == [1], base)  # type: ignore[arg-type]


def _is_matrix(weight: Node) -> bool:
    return weight.op == "placeholder" and len(shape_of(weight)) == 2


def _norm_weight(hidden: Node) -> Node | None:
    """The parameter that scales the hidden state elementwise just before the projection."""
    base = strip(trace_views(hidden).base)
    if not calls(base, aten.mul.Tensor):
        return None
    for operand in base.args[:2]:
        if isinstance(operand, Node) and operand.op == "placeholder" and len(shape_of(operand)) == 1:
            return operand
    return None
