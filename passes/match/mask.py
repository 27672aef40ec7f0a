"""A mask or bias subgraph, read as an index expression in ``(b, h, q, kv)``.

:class:`IndexInterpreter` walks a tensor's subgraph with the symbolic index of one element: ``arange`` becomes an index,
views move indices, element-wise operators build the expression. Whatever it does not know becomes a ``load`` of that
tensor at that index, so that nothing is ever dropped. :func:`split_mask` then separates an additive score into a proved
boolean mask and what is left of the bias.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ...kernels.index_expr import BOOLEAN, FALSE, SCORE, TRUE, Expr, const, integer, load, make
from ..graph import CASTS, VIEW_OPS, aten, dtype_of, is_one, same, shape_of

#: A logit at or below this is masked: every floating type's smallest finite value lies under it (fp16's is -65504).
MASKED = -1e4

#: How many nodes one element's expression may visit before the tensor is loaded instead.
LIMIT = 512

_BINARY = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.floor_divide.default: "floordiv",
    aten.remainder.Scalar: "mod",
    aten.remainder.Tensor: "mod",
    aten.minimum.default: "min",
    aten.maximum.default: "max",
    aten.clamp_max.default: "min",
    aten.clamp_min.default: "max",
    aten.lt.Tensor: "lt",
    aten.lt.Scalar: "lt",
    aten.le.Tensor: "le",
    aten.le.Scalar: "le",
    aten.gt.Tensor: "gt",
    aten.gt.Scalar: "gt",
    aten.ge.Tensor: "ge",
    aten.ge.Scalar: "ge",
    aten.eq.Tensor: "eq",
    aten.eq.Scalar: "eq",
    aten.ne.Tensor: "ne",
    aten.ne.Scalar: "ne",
    aten.logical_and.default: "and",
    aten.logical_or.default: "or",
    aten.logical_xor.default: "xor",
    aten.bitwise_and.Tensor: "and",
    aten.bitwise_or.Tensor: "or",
    aten.bitwise_xor.Tensor: "xor",
}

_UNARY = {
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.exp.default: "exp",
    aten.log.default: "log",
    aten.tanh.default: "tanh",
    aten.logical_not.default: "not",
    aten.bitwise_not.default: "not",
}

_LOGICAL = ("and", "or", "xor", "not")

_FILLED = {
    aten.zeros.default: 0,
    aten.ones.default: 1,
    aten.zeros_like.default: 0,
    aten.ones_like.default: 1,
    aten.new_zeros.default: 0,
    aten.new_ones.default: 1,
}


class IndexInterpreter:
    """Builds expressions over one shared list of tensor arguments (``tensors``) and integers (``integers``)."""

    def __init__(self) -> None:
        self.tensors: list[Node] = []
        self.integers: list[Node | int] = []

    def argument(self, node: Node) -> int:
        if node not in self.tensors:
            self.tensors.append(node)
        return self.tensors.index(node)

    def scalar(self, value: Any) -> Expr | None:
        """A Python number, or a symbolic integer of the graph."""
        if isinstance(value, (bool, int, float)):
            return const(value)
        if isinstance(value, Node) and not isinstance(value.meta.get("val"), torch.Tensor):
            if value not in self.integers:
                self.integers.append(value)
            return integer(self.integers.index(value))
        return None

    def element(self, node: Node, index: Sequence[Expr]) -> Expr:
        """Element ``index`` of ``node``; size-one dims are read at 0."""
        self._visited = 0
        return self._element(node, tuple(index))

    def operand(self, value: Any, index: Sequence[Expr]) -> Expr:
        """Like :meth:`element` for an operand that broadcasts (from the right) against ``index``, or a number."""
        self._visited = 0
        return self._operand(value, tuple(index))

    def _operand(self, value: Any, index: tuple[Expr, ...]) -> Expr:
        number = self.scalar(value)
        if number is not None:
            return number
        shape = shape_of(value)
        aligned = index[len(index) - len(shape) :]
        return self._element(value, tuple(const(0) if is_one(s) else i for s, i in zip(shape, aligned, strict=True)))

    def _load(self, node: Node, index: tuple[Expr, ...]) -> Expr:
        return load(self.argument(node), *index)

    def _element(self, node: Node, index: tuple[Expr, ...]) -> Expr:
        shape = shape_of(node)
        index = tuple(const(0) if is_one(s) else i for s, i in zip(shape, index, strict=True))
        self._visited += 1
        if node.op != "call_function" or self._visited > LIMIT:
            return self._load(node, index)
        target, args = node.target, node.args
        found: Expr | None = None
        if target in VIEW_OPS or target in _MOVES:
            found = self._moved(node, index)
        elif target in CASTS:
            found = self._cast(node, index)
        elif target in _BINARY and not node.kwargs.get("rounding_mode"):
            found = self._binary(node, index)
        elif target is aten.clamp.default:
            found = clamp(node, lambda a: self._operand(a, index))
        elif target is aten.rsub.Scalar and len(args) == 2:
            kind = dtype_of(args[0])  # type: ignore[arg-type]
            if kind != torch.bool:
                found = distribute(make("sub", self._operand(args[1], index), self._operand(args[0], index)))
        elif target is aten.div.Tensor_mode:
            if node.kwargs.get("rounding_mode") == "floor":
                found = make("floordiv", *(self._operand(a, index) for a in args[:2]))
        elif target in _UNARY:
            op = _UNARY[target]
            value = self._operand(args[0], index)
            if op != "not" or dtype_of(args[0]) == torch.bool:
                found = make(op, value)
        elif target in (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar):
            found = make("where", *(self._operand(a, index) for a in args))
        elif target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
            found = make("where", *(self._operand(a, index) for a in (args[1], args[2], args[0])))
        elif target is aten.arange.default:
            found = index[0]
        elif target in (aten.arange.start, aten.arange.start_step):
            start = self.scalar(args[0])
            step = self.scalar(args[2]) if len(args) > 2 else const(1)
            if start is not None and step is not None:
                found = make("add", start, make("mul", step, index[0]))
        elif target in (aten.full.default, aten.full_like.default, aten.new_full.default):
            value = args[2] if target is aten.new_full.default else args[1]
            found = self.scalar(_typed(value, dtype_of(node)))
        elif target is aten.scalar_tensor.default:
            found = self.scalar(_typed(args[0], dtype_of(node)))
        elif target in _FILLED:
            found = self.scalar(_typed(_FILLED[target], dtype_of(node)))
        elif target in (aten.tril.default, aten.triu.default):
            diagonal = self.scalar(args[1] if len(args) > 1 else 0)
            if diagonal is not None:
                kept = make("le" if target is aten.tril.default else "ge", make("sub", index[-1], index[-2]), diagonal)
                value = self._operand(args[0], index)
                # By dtype: const(0) equals const(False).
                found = (
                    make("and", kept, value) if dtype_of(node) == torch.bool else make("where", kept, value, const(0))
                )
        return self._load(node, index) if found is None else found

    def _binary(self, node: Node, index: tuple[Expr, ...]) -> Expr | None:
        op = _BINARY[node.target]
        operands = [self._operand(a, index) for a in node.args[:2]]
        if (alpha := node.kwargs.get("alpha", 1)) != 1:
            scale = self.scalar(alpha)
            if scale is None:
                return None
            operands[1] = make("mul", scale, operands[1])
        types = [dtype_of(a) if isinstance(a, Node) and _is_tensor(a) else None for a in node.args[:2]]
        if op in _LOGICAL and any(t not in (torch.bool, None) for t in types):
            return None
        if op in ("add", "mul", "sub") and all(t == torch.bool for t in types):
            return make("and", *operands) if op == "mul" else None
        if op not in BOOLEAN:
            # A boolean operand of arithmetic counts as 0 or 1.
            operands = [
                make("where", o, const(1), const(0)) if t == torch.bool else o
                for o, t in zip(operands, types, strict=True)
            ]
        return distribute(make(op, *operands))

    def _cast(self, node: Node, index: tuple[Expr, ...]) -> Expr | None:
        source = node.args[0]
        assert isinstance(source, Node)
        before, after = dtype_of(source), dtype_of(node)
        value = self._operand(source, index)
        if before == after or (before.is_floating_point and after.is_floating_point):
            return value
        if before == torch.bool:
            return make("where", value, const(1), const(0))
        if after == torch.bool:
            return truth(value)
        if not before.is_floating_point:
            return value
        return None

    def _moved(self, node: Node, index: tuple[Expr, ...]) -> Expr | None:
        """The element of the input that a view's element is."""
        source = node.args[0]
        assert isinstance(source, Node)
        shape, inner = shape_of(node), shape_of(source)
        target, args = node.target, node.args
        rank = len(inner)
        if target in (aten.permute.default, aten.transpose.int, aten.t.default):
            order = list(range(rank))
            if target is aten.permute.default:
                order = [int(d) % rank for d in args[1]]  # type: ignore[union-attr]
            elif target is aten.t.default:
                order.reverse()
            else:
                a, b = int(args[1]) % rank, int(args[2]) % rank  # type: ignore[arg-type]
                order[a], order[b] = order[b], order[a]
            moved: list[Expr] = [const(0)] * rank
            for out, source_dim in enumerate(order):
                moved[source_dim] = index[out]
            return self._element(source, tuple(moved))
        if target is aten.expand.default:
            lead = len(shape) - rank
            return self._element(source, index[lead:])
        if target is aten.unsqueeze.default:
            at = int(args[1]) % (rank + 1)  # type: ignore[arg-type]
            return self._element(source, index[:at] + index[at + 1 :])
        if target in (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims):
            kept = iter(index)
            if len(args) > 1:
                where = args[1] if isinstance(args[1], (list, tuple)) else [args[1]]
                drop = {int(d) % rank for d in where}  # type: ignore[arg-type]
            else:
                drop = set(range(rank))
            dropped = [i in drop and is_one(s) for i, s in enumerate(inner)]
            return self._element(source, tuple(const(0) if d else next(kept) for d in dropped))
        if target is aten.select.int:
            at = int(args[1]) % rank  # type: ignore[arg-type]
            position = self.scalar(args[2])
            if position is not None and not self._counts_from_front(position):
                return None
            if position is None or (position.op == "const" and position.args[0] < 0):
                if position is None or not isinstance(inner[at], int):
                    return None
                position = const(position.args[0] + inner[at])
            return self._element(source, (*index[:at], position, *index[at:]))
        if target is aten.slice.Tensor:
            at = (int(args[1]) if len(args) > 1 else 0) % rank  # type: ignore[arg-type]
            start = self.scalar(args[2] if len(args) > 2 and args[2] is not None else 0)
            step = args[4] if len(args) > 4 else 1
            if start is None or not isinstance(step, int) or not self._counts_from_front(start):
                return None
            if start.op == "const" and start.args[0] < 0:
                if not isinstance(inner[at], int):
                    return None
                start = const(max(0, start.args[0] + inner[at]))
            shifted = make("add", start, make("mul", const(step), index[at]))
            return self._element(source, (*index[:at], shifted, *index[at + 1 :]))
        if target in VIEW_OPS and VIEW_OPS[target].__name__ == "_keep":
            return self._element(source, index)
        if target in VIEW_OPS and VIEW_OPS[target].__name__ == "_view":
            return self._reshaped(source, inner, shape, index)
        return None

    def _counts_from_front(self, position: Expr) -> bool:
        """Whether a symbolic position is known not to be negative (a negative one counts from the end)."""
        if position.op != "int":
            return True
        node = self.integers[position.args[0]]
        return isinstance(node, int) or bool(statically_known_true(node.meta["val"] >= 0))

    def _reshaped(
        self, source: Node, inner: Sequence[Any], shape: Sequence[Any], index: tuple[Expr, ...]
    ) -> Expr | None:
        wide = [[s for s in sizes if not is_one(s)] for sizes in (inner, shape)]
        if len(wide[0]) == len(wide[1]) and all(same(a, b) for a, b in zip(*wide, strict=True)):
            # Only axes of size one come or go.
            kept = iter(i for i, s in zip(index, shape, strict=True) if not is_one(s))
            return self._element(source, tuple(const(0) if is_one(s) else next(kept) for s in inner))
        if not all(isinstance(s, int) for s in (*inner, *shape)):
            return None
        flat: Expr = const(0)
        for size, i in zip(shape, index, strict=True):
            flat = make("add", make("mul", flat, const(size)), i)
        parts: list[Expr] = []
        for size in reversed(inner):
            parts.insert(0, make("mod", flat, const(size)))
            flat = make("floordiv", flat, const(size))
        return self._element(source, tuple(parts))


_MOVES = (aten.select.int, aten.slice.Tensor)


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


@functools.lru_cache(typed=True)
def _typed(value: Any, dtype: torch.dtype) -> Any:
    """A literal as the dtype it is stored in (``full(1, dtype=bool)`` is true; fp16 turns fp32's minimum into -inf)."""
    if not isinstance(value, (bool, int, float)):
        return value
    return torch.tensor(value).to(dtype).item()


def clamp(node: Node, value: Callable[[Any], Expr]) -> Expr:
    """``clamp(x, low, high)``; either bound may be missing."""
    low, high = (node.args[i] if len(node.args) > i else node.kwargs.get(n) for i, n in ((1, "min"), (2, "max")))
    result = value(node.args[0])
    result = result if low is None else make("max", result, value(low))
    return result if high is None else make("min", result, value(high))


def distribute(expr: Expr) -> Expr:
    """Move an operator with one literal operand into the literal branches of a ``where`` (``(1 - where(m, 1, 0)) *
    c``)."""
    if expr.op in ("add", "sub", "mul", "div", "ne", "eq", "lt", "gt", "le", "ge"):
        for position in (0, 1):
            chosen, other = expr.args[position], expr.args[1 - position]
            if chosen.op == "where" and other.op == "const" and all(a.op == "const" for a in chosen.args[1:]):
                pair = [(a, other) if position == 0 else (other, a) for a in chosen.args[1:]]
                branches = [make(expr.op, *p) for p in pair]
                if expr.op in BOOLEAN and branches == [TRUE, FALSE]:
                    return chosen.args[0]
                if expr.op in BOOLEAN and branches == [FALSE, TRUE]:
                    return make("not", chosen.args[0])
                return make("where", chosen.args[0], *branches)
    return expr


def truth(expr: Expr) -> Expr:
    """``expr != 0``, read through choices, and through sums that only penalties (nothing above zero) enter: such a sum
    is zero where each of them is."""
    if expr.op == "const":
        return const(bool(expr.args[0]))
    if expr.op == "where":
        condition, yes, no = (expr.args[0], *(truth(a) for a in expr.args[1:]))
        return make("or", make("and", condition, yes), make("and", make("not", condition), no))
    if expr.op == "add" and all(_penalty(a) for a in expr.args):
        return make("or", *(truth(a) for a in expr.args))
    return make("ne", expr, const(0))


def _penalty(expr: Expr) -> bool:
    """Whether every value of the expression is a literal that is not above zero."""
    if expr.op in ("add", "where"):
        return all(_penalty(a) for a in expr.args[expr.op == "where" :])
    return expr.op == "const" and expr.args[0] <= 0


def spread(expr: Expr) -> Expr:
    """Literal factors moved inwards, over sums and choices: ``(score + bias) * c`` becomes ``score * c + bias * c``."""
    if expr.op in ("mul", "div") and expr.args[1].op == "const":
        inner, factor = spread(expr.args[0]), expr.args[1]
        if inner.op == "add":
            return make("add", *(spread(Expr(expr.op, (a, factor))) for a in inner.args))
        if inner.op == "where":
            return make("where", inner.args[0], *(spread(Expr(expr.op, (a, factor))) for a in inner.args[1:]))
        return make(expr.op, inner, factor)
    if expr.op == "mul" and expr.args[0].op == "const":
        return spread(Expr("mul", (expr.args[1], expr.args[0])))
    if expr.op in ("add", "where"):
        return make(expr.op, *(spread(a) for a in expr.args))
    return expr


def split_mask(score: Expr) -> tuple[Expr, Expr]:
    """``(mask, score')``: an additive or filled score separated into a boolean mask and the score that remains.

    ``score + where(c, 0, -inf)`` and ``where(c, score, min)`` have mask ``c``. A finite fill counts as masked below
    :data:`MASKED`: its weight underflows to zero beside any unmasked logit. (Rows with every key masked are undefined
    by contract.)
    """
    if score.op == "where":
        condition, kept, other = score.args
        if _masked(other):
            mask, rest = split_mask(kept)
            return make("and", condition, mask), rest
        if _masked(kept):
            mask, rest = split_mask(other)
            return make("and", make("not", condition), mask), rest
        return TRUE, score
    if score.op == "add":
        left_mask, left = split_mask(score.args[0])
        right_mask, right = split_mask(score.args[1])
        return make("and", left_mask, right_mask), make("add", left, right)
    if _masked(score):
        return FALSE, const(0.0)
    return TRUE, score


def _masked(expr: Expr) -> bool:
    return expr.op == "const" and not isinstance(expr.args[0], bool) and expr.args[0] <= MASKED


def linear_in_score(expr: Expr) -> float | None:
    """``c`` when the expression is ``score`` times the literal ``c``."""
    if expr == SCORE:
        return 1.0
    if expr.op in ("mul", "div"):
        left, right = expr.args
        if right.op == "const" and (inner := linear_in_score(left)) is not None:
            value = float(right.args[0])
            return inner * value if expr.op == "mul" else inner / value
        if expr.op == "mul" and left.op == "const" and (inner := linear_in_score(right)) is not None:
            return inner * float(left.args[0])
    return None


def fold_scale(score: Expr) -> tuple[float, Expr]:
    """``(scale, score')`` with the literal factor of the raw product taken out: ``score * c + bias`` gives ``(c, score
    + bias)``.

    The innermost factor alone is moved; an expression whose raw score appears under other operators first keeps them.
    """
    best: list[Expr] = []

    def find(node: Expr) -> None:
        if node.op in ("mul", "div") and linear_in_score(node) is not None:
            best.append(node)
            return
        for arg in node.args:
            if isinstance(arg, Expr):
                find(arg)

    find(score)
    uses = sum(n == SCORE for n in score.walk())
    if len(best) == 1 and uses == 1:
        scale = linear_in_score(best[0])
        assert scale is not None
        if scale and math.isfinite(scale):
            return scale, score.replace(lambda n: SCORE if n is best[0] else None)
    return 1.0, score
