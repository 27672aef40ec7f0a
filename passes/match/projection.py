"""The linear map that made the keys, with or without bias: where a basis from weights alone comes from.

Recognised: ``mm``/``addmm`` of the hidden state with a (transposed) parameter, as ``nn.Linear`` traces, and the RMS- or LayerNorm weight
that multiplies the hidden state just before.
"""

from __future__ import annotations

from torch.fx import Node

from ..graph import aten, shape_of, trace_views
from ..ir import Operand, Projection
from .rotary import calls, strip


def match_projection(key: Operand) -> Projection | None:
    """The projection of ``key``, or None when it is not a plain linear map of a parameter."""
    base = trace_views(key.node).base
    bias: Node | None = None
    if calls(base, aten.addmm.default):
        bias, left, right = (a for a in base.args[:3])  # type: ignore[assignment]
    elif calls(base, aten.mm.default, aten.bmm.default):
        left, right = base.args[:2]  # type: ignore[assignment]
    elif calls(base, aten.linear.default):
        left, right = base.args[:2]  # type: ignore[assignment]
        bias = base.args[2] if len(base.args) > 2 else None  # type: ignore[assignment]
    elif calls(base, aten.add.Tensor):
        inner = [a for a in base.args[:2] if isinstance(a, Node)]
        for product, other in (inner, inner[::-1]) if len(inner) == 2 else ():
            found = match_projection(Operand(product, key.layout))
            if found is not None and found.bias is None and strip(other).op == "placeholder":
                return Projection(found.weight, strip(other), found.norm, found.rows)
        return None
    else:
        return None
    weight = trace_views(right).base  # type: ignore[arg-type]
    if weight.op != "placeholder" or len(shape_of(weight)) != 2:
        return None
    if shape_of(weight)[0] != shape_of(base)[-1]:
        return None  # Conv1D keeps [in, out]; only [out, in] is read here
    return Projection(weight, bias, _norm_weight(left))  # type: ignore[arg-type]


def _norm_weight(hidden: Node) -> Node | None:
    """The parameter that scales the hidden state elementwise just before the projection."""
    base = strip(trace_views(hidden).base)
    if not calls(base, aten.mul.Tensor):
        return None
    for operand in base.args[:2]:
        if isinstance(operand, Node) and operand.op == "placeholder" and len(shape_of(operand)) == 1:
            return operand
    return None
