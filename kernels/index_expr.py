"""Index expressions: masks and score modifiers as functions of ``(b, h, q, kv)``.

An attention mask or a score modifier that is *proved* is carried as a small expression tree over the symbolic indices
of one
logit: batch ``b``, query head ``h``, query token ``q`` (0 is the first token of this call) and cache slot or key
``kv``. Tensors that the expression reads are ``load`` leaves that refer to an argument list by number; symbolic sizes
are ``int`` leaves that refer to a list of integers. The tree travels through an FX graph as a string (an operator's
argument), is evaluated in PyTorch by :func:`evaluate` (the reference meaning) and printed as a Triton device function
by ``codegen.py``.

Grammar of the string form (prefix notation, no evaluation of text anywhere)::

    expr := "b" | "h" | "q" | "kv" | "score" | number | "true" | "false"
          | "(" op expr* ")"                      op in OPERATORS
          | "(" "load" argument-number expr* ")"  one index per dimension of the argument
          | "(" "int" argument-number ")"
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

INDICES = ("b", "h", "q", "kv")

#: operator name -> (number of operands, infix spelling or None)
OPERATORS: dict[str, tuple[int, str | None]] = {
    "add": (2, "+"),
    "sub": (2, "-"),
    "mul": (2, "*"),
    "div": (2, "/"),
    "floordiv": (2, "//"),
    "mod": (2, "%"),
    "min": (2, None),
    "max": (2, None),
    "neg": (1, None),
    "abs": (1, None),
    "exp": (1, None),
    "log": (1, None),
    "tanh": (1, None),
    "lt": (2, "<"),
    "le": (2, "<="),
    "gt": (2, ">"),
    "ge": (2, ">="),
    "eq": (2, "=="),
    "ne": (2, "!="),
    "and": (2, "&"),
    "or": (2, "|"),
    "xor": (2, "^"),
    "not": (1, None),
    "where": (3, None),
}

BOOLEAN = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "not"})


@dataclass(frozen=True, slots=True)
class Expr:
    """One node of an index expression: ``op`` and its operands (sub-expressions, or the literal of a leaf)."""

    op: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return _print(self)

    @property
    def serialized(self) -> str:
        """The string form of the module's grammar."""
        if self.op in INDICES or self.op == "score":
            return self.op
        if self.op == "const":
            value = self.args[0]
            if isinstance(value, bool):
                return "true" if value else "false"
            return repr(value)
        if self.op == "int":
            return f"(int {self.args[0]})"
        if self.op == "load":
            return "(" + " ".join(["load", str(self.args[0]), *(a.serialized for a in self.args[1:])]) + ")"
        return "(" + " ".join([self.op, *(a.serialized for a in self.args)]) + ")"

    def walk(self) -> Iterator[Expr]:
        """This node and every node below it, parents first."""
        yield self
        for arg in self.args:
            if isinstance(arg, Expr):
                yield from arg.walk()

    def uses(self, op: str) -> bool:
        """Whether any node of the expression is an ``op``."""
        return any(node.op == op for node in self.walk())

    def replace(self, rule: Callable[[Expr], Expr | None]) -> Expr:
        """A copy in which each node for which ``rule`` returns an expression is replaced by it (outermost first)."""
        new = rule(self)
        if new is not None:
            return new
        return Expr(self.op, tuple(a.replace(rule) if isinstance(a, Expr) else a for a in self.args))


B, H, Q, KV, SCORE = Expr("b"), Expr("h"), Expr("q"), Expr("kv"), Expr("score")
TRUE, FALSE = Expr("const", (True,)), Expr("const", (False,))


def const(value: bool | int | float) -> Expr:
    """A literal."""
    return Expr("const", (value,))


def load(argument: int, *indices: Expr) -> Expr:
    """Element ``indices`` of tensor argument number ``argument``."""
    return Expr("load", (argument, *indices))


def integer(argument: int) -> Expr:
    """Integer argument number ``argument`` (a size or an offset that the graph computes on the host)."""
    return Expr("int", (argument,))


def make(op: str, *args: Expr) -> Expr:
    """Build a node, folding what literals decide (``x & true``, ``x + 0``, literal arithmetic)."""
    arity, _ = OPERATORS[op]
    if len(args) != arity:
        raise ValueError(f"index expression {op!r} takes {arity} operands, got {len(args)}")
    literal = [a.args[0] if a.op == "const" else None for a in args]
    if all(a.op == "const" for a in args):
        return const(_FOLD[op](*literal))
    if op in ("and", "or"):
        absorbing, neutral = (FALSE, TRUE) if op == "and" else (TRUE, FALSE)
        if absorbing in args:
            return absorbing
        if neutral in args:
            return args[0] if args[1] == neutral else args[1]
        if args[0] == args[1]:
            return args[0]
    if op == "not" and args[0].op == "not":
        return args[0].args[0]
    if op in ("add", "sub") and literal[1] == 0 and literal[1] is not None:
        return args[0]
    if op == "add" and literal[0] == 0 and literal[0] is not None:
        return args[1]
    if op in ("mul", "div", "floordiv") and literal[1] == 1 and not isinstance(literal[1], bool):
        return args[0]
    if op == "mul" and literal[0] == 1 and not isinstance(literal[0], bool):
        return args[1]
    if op == "where" and literal[0] is not None:
        return args[1] if literal[0] else args[2]
    return Expr(op, args)


_FOLD: dict[str, Callable[..., bool | int | float]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y if y else math.copysign(math.inf, x) if x else math.nan,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "min": min,
    "max": max,
    "neg": lambda x: -x,
    "abs": abs,
    "exp": math.exp,
    "log": math.log,
    "tanh": math.tanh,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: bool(x) and bool(y),
    "or": lambda x, y: bool(x) or bool(y),
    "xor": lambda x, y: bool(x) != bool(y),
    "not": lambda x: not x,
    "where": lambda c, x, y: x if c else y,
}

_EVALUATE: dict[str, Callable[..., Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "floordiv": lambda x, y: x // y,
    "mod": lambda x, y: x % y,
    "min": torch.minimum,
    "max": torch.maximum,
    "neg": lambda x: -x,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "tanh": torch.tanh,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "where": torch.where,
}


def evaluate(
    expr: Expr, indices: Mapping[str, Tensor], tensors: Sequence[Tensor], integers: Sequence[int] = ()
) -> Tensor:
    """The value of ``expr`` for every index given.

    ``indices`` maps ``b, h, q, kv`` (and ``score``) to tensors that broadcast together to ``[B, H, L, K]``; ``tensors``
    and ``integers`` are the argument lists that ``load`` and ``int`` leaves refer to. Returns a tensor that broadcasts
    to ``[B, H, L, K]``: boolean for a mask, floating point for a score modifier.
    """
    device = indices["kv"].device
    memo: dict[Expr, Any] = {}

    def tensor_of(value: Any) -> Tensor:
        return value if isinstance(value, Tensor) else torch.as_tensor(value, device=device)

    def visit(node: Expr) -> Any:
        if node.op == "const":  # not remembered: 0, 0.0 and False are equal, and only one of them is an index
            return node.args[0]
        if node in memo:
            return memo[node]
        if node.op in indices:
            value: Any = indices[node.op]
        elif node.op == "int":
            value = integers[node.args[0]]
        elif node.op == "load":
            source = tensors[node.args[0]]
            where = [visit(a) for a in node.args[1:]]
            if len(where) != source.dim():
                raise ValueError(f"load of argument {node.args[0]} needs {source.dim()} indices, has {len(where)}")
            value = source[tuple(tensor_of(w) for w in where)] if where else source
        else:
            operands = [visit(a) for a in node.args]
            if node.op in ("min", "max", "where", "exp", "log", "abs", "tanh", "not", "and", "or", "xor"):
                operands = [tensor_of(o) for o in operands]
            value = _EVALUATE[node.op](*operands)
        memo[node] = value
        return value

    return tensor_of(visit(expr))


_TOKEN = re.compile(r"\s*(\(|\)|[^\s()]+)")


@lru_cache(maxsize=1024)
def parse(text: str) -> Expr:
    """The expression that :attr:`Expr.serialized` wrote. Raises ``ValueError`` on anything outside the grammar."""
    tokens = _TOKEN.findall(text)
    position = 0

    def take() -> str:
        nonlocal position
        if position >= len(tokens):
            raise ValueError(f"index expression ends early: {text!r}")
        position += 1
        return tokens[position - 1]

    def expression() -> Expr:
        token = take()
        if token != "(":
            return _leaf(token, text)
        op = take()
        if op in ("load", "int"):
            head: tuple[Any, ...] = (int(take()),)
        elif op in OPERATORS:
            head = ()
        else:
            raise ValueError(f"unknown operator {op!r} in index expression {text!r}")
        operands: list[Expr] = []
        while position < len(tokens) and tokens[position] != ")":
            operands.append(expression())
        take()
        if op in OPERATORS and len(operands) != OPERATORS[op][0]:
            raise ValueError(f"{op!r} takes {OPERATORS[op][0]} operands in index expression {text!r}")
        return Expr(op, (*head, *operands))

    result = expression()
    if position != len(tokens):
        raise ValueError(f"trailing text in index expression {text!r}")
    return result


def _leaf(token: str, text: str) -> Expr:
    if token in INDICES or token == "score":
        return Expr(token)
    if token in ("true", "false"):
        return const(token == "true")
    try:
        return const(int(token))
    except ValueError:
        pass
    try:
        return const(float(token))
    except ValueError:
        raise ValueError(f"unknown name {token!r} in index expression {text!r}") from None


def _print(expr: Expr) -> str:
    """Infix, for people."""
    if expr.op in INDICES or expr.op == "score":
        return expr.op
    if expr.op == "const":
        return repr(expr.args[0])
    if expr.op == "int":
        return f"n{expr.args[0]}"
    if expr.op == "load":
        inner = ", ".join(map(str, expr.args[1:]))
        return f"a{expr.args[0]}[{inner}]" if inner else f"a{expr.args[0]}"
    infix = OPERATORS[expr.op][1]
    if infix is None:
        return f"{expr.op}({', '.join(map(str, expr.args))})"

    def operand(node: Expr) -> str:
        nested = node.op in OPERATORS and OPERATORS[node.op][1] is not None
        return f"({node})" if nested else str(node)

    return f"{operand(expr.args[0])} {infix} {operand(expr.args[1])}"


@dataclass(frozen=True, slots=True)
class Modifier:
    """What happens to a logit between scaling and softmax: first ``score`` (softcap, bias, ALiBi), then ``mask``.

    ``score`` is an expression in ``score, b, h, q, kv`` that replaces the logit; ``mask`` is boolean, true where the
    logit takes part. Both share one list of tensor arguments and one of integers.
    """

    mask: Expr = TRUE
    score: Expr = SCORE

    @property
    def serialized(self) -> str:
        return f"{self.mask.serialized};{self.score.serialized}"

    @staticmethod
    def parse(text: str) -> Modifier:
        mask, _, score = text.partition(";")
        return Modifier(parse(mask), parse(score or "score"))

    @property
    def masks(self) -> bool:
        """Whether any logit can be masked."""
        return self.mask != TRUE

    @property
    def modifies(self) -> bool:
        """Whether the logit itself is changed."""
        return self.score != SCORE
