"""``flex_attention``: a higher-order operator whose ``score_mod`` and ``mask_mod`` are small graphs over the indices of
one logit.

Both are index expressions already; their graphs are interpreted node by node, with ``(score, b, h, q, kv)`` for their
first inputs and the captured tensors for the rest. Source: ``torch/_higher_order_ops/flex_attention.py`` (argument
order, the layout of the block mask's tuple).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...kernels.index_expr import BOOLEAN, KV, SCORE, TRUE, B, Expr, H, Q, const, make
from ..graph import CASTS, aten, dtype_of
from ..ir import Mismatch
from .mask import _BINARY, _LOGICAL, _UNARY, IndexInterpreter, clamp

FLEX = torch.ops.higher_order.flex_attention

#: ``flex_attention`` without a block mask is traced with one block of this size or more.
WHOLE = 1 << 20

_KEEP = (aten.alias.default, aten.clone.default, aten.detach.default, aten.view.default, aten.expand.default, *CASTS)


def flex_arguments(node: Node) -> tuple[list[Node], float]:
    """``([query, key, value], scale)``."""
    scale = node.args[5]
    if not isinstance(scale, (int, float)):
        raise Mismatch("scale is not a literal", node)
    return list(node.args[:3]), float(scale)  # type: ignore[arg-type]


def flex_output(node: Node) -> Node:
    """The attention output among the operator's results; the others (log-sum-exp, maxima) must not be used."""
    outputs = [u for u in node.users if u.target is operator.getitem]
    used = [u for u in outputs if u.users or u.args[1] == 0]
    if len(outputs) != len(node.users) or [u.args[1] for u in used] != [0]:
        raise Mismatch("the log-sum-exp of flex_attention is used", node)
    return used[0]


def flex_modifier(node: Node, interpreter: IndexInterpreter) -> tuple[Expr, Expr]:
    """``(mask, score)`` of the operator."""
    block_mask: Any = node.args[4]
    score_buffers, mask_buffers = node.args[7], node.args[8]
    score = _interpret(node, node.args[3], [SCORE, B, H, Q, KV, *score_buffers], interpreter)  # type: ignore[misc]
    mask = _interpret(node, block_mask[-1], [B, H, Q, KV, *mask_buffers], interpreter)  # type: ignore[misc]
    if mask == TRUE and min(block_mask[-3:-1]) < WHOLE:
        raise Mismatch("the block mask has no mask_mod, so its blocks alone say what is masked", node)
    return mask, score


def _interpret(site: Node, attribute: Any, inputs: Sequence[Any], interpreter: IndexInterpreter) -> Expr:
    graph_module = getattr(site.graph.owning_module, attribute.target)
    assert isinstance(graph_module, GraphModule)
    given = iter(inputs)
    values: dict[Node, Any] = {}

    def value(argument: Any) -> Expr:
        found = values.get(argument) if isinstance(argument, Node) else interpreter.scalar(argument)
        if isinstance(found, Node):  # a captured tensor without dims
            found = interpreter.element(found, ())
        if not isinstance(found, Expr):
            raise Mismatch(f"{argument} in a score_mod or mask_mod is not understood", site)
        return found

    for node in graph_module.graph.nodes:
        target, args = node.target, node.args
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "output":
            result = args[0][0] if isinstance(args[0], (tuple, list)) else args[0]
            return value(result)
        elif target is aten.index.Tensor and isinstance(values.get(args[0]), Node):
            source, where = values[args[0]], args[1]
            if len(where) != source.meta["val"].dim() or any(w is None for w in where):
                raise Mismatch("a captured tensor is indexed in part", site)
            values[node] = interpreter.element(source, [value(w) for w in where])
        elif target in _BINARY and node.kwargs.get("alpha", 1) == 1 and not node.kwargs.get("rounding_mode"):
            op = _BINARY[target]
            if op in _LOGICAL and any(
                isinstance(a, Node) and "val" in a.meta and dtype_of(a) != torch.bool for a in args[:2]
            ):
                raise Mismatch("integers are combined bit by bit in a score_mod or mask_mod", site)
            values[node] = make(op, *(_number(value(a), op) for a in args[:2]))
        elif target in _UNARY:
            values[node] = make(_UNARY[target], value(args[0]))
        elif target is aten.where.self:
            values[node] = make("where", *(value(a) for a in args))
        elif target is aten.clamp.default:
            values[node] = clamp(node, value)
        elif target in (aten.full.default, aten.scalar_tensor.default, aten.new_full.default):
            values[node] = value(args[0 if target is aten.scalar_tensor.default else -1 if len(args) < 3 else 2])
        elif target in (aten.new_ones.default, aten.ones.default):
            values[node] = const(True) if dtype_of(node) == torch.bool else const(1)
        elif target in _KEEP:
            values[node] = values[args[0]]
        else:
            raise Mismatch(f"{target} in a score_mod or mask_mod is not understood", site)
    raise Mismatch("a score_mod or mask_mod returns nothing", site)


def _number(expr: Expr, op: str) -> Expr:
    """A condition that takes part in arithmetic counts as 0 or 1."""
    return make("where", expr, const(1), const(0)) if expr.op in BOOLEAN and op not in BOOLEAN else expr
