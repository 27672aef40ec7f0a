"""Index expressions printed as Triton device functions.

Use, in a kernel's launcher::

    generated = codegen.generate(modifier, tensors)     # cached; `modifier` is the operator's string argument
    args = codegen.arguments(tensors, integers)         # a tuple: pass it as ONE kernel argument
    kernel[grid](..., args, MASK_FN=generated.mask_fn, SCORE_FN=generated.score_fn, UPPER_FN=generated.upper_fn,
                 LOWER_FN=generated.lower_fn, MASKS=generated.masks, MODIFIES=generated.modifies)

and in the kernel (``args`` an ordinary parameter, the functions and flags ``tl.constexpr``)::

    if MODIFIES:
        logits = SCORE_FN(logits, b, h, q, kv, args)    # fp32, broadcasts like its operands
    if MASKS:
        valid = valid & MASK_FN(b, h, q, kv, args)      # int1; may have fewer or smaller dims than the logits
    stop = UPPER_FN(b, q, capacity, args)               # int32 <= capacity: MASK_FN is false for every kv >= stop
    start = LOWER_FN(b, q, args)                        # int32 >= 0: MASK_FN is false for every kv < start

``b, h, q, kv`` are integer scalars or tensors that broadcast together, e.g. ``h [M, 1]``, ``q [M, 1]``, ``kv [1, T]``.
The functions load without a mask, so clamp the indices of padding lanes into range before the call (``tl.minimum(kv,
capacity - 1)``). The bounds hold for the ``q`` they are given and for every ``h``: for a tile of queries call them
with the vector and reduce with ``tl.max`` / ``tl.min`` (a bound that does not depend on ``q`` is a scalar: add ``q *
0`` to make it a vector).

``args`` holds, for each tensor of the list in turn, its pointer and its strides (one for each dim), then the integers.
The number of dims is that of the tensor, its dtype that of the pointer; only the kind of the dtype changes the source.

:func:`source` returns the generated text alone (for ``explain()``), without importing Triton. Text is written to
``sals-compile/kernels/<digest>.py`` under ``$XDG_CACHE_HOME`` or ``~/.cache``, named by its content, atomically. A
file found there is never trusted: it is replaced unless it is byte for byte what was just generated.
"""

from __future__ import annotations

import hashlib
import linecache
import math
import os
import tempfile
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .index_expr import BOOLEAN, Expr, Modifier, const, make


@dataclass(frozen=True)
class Generated:
    """The device functions of one modifier (Triton ``JITFunction`` objects), and where their source lies."""

    mask_fn: Any
    score_fn: Any
    upper_fn: Any
    lower_fn: Any
    masks: bool
    modifies: bool
    bounded: bool  # whether UPPER_FN can be below the capacity
    source: str
    path: Path


def kind_of(dtype: torch.dtype) -> str:
    """``"bool"``, ``"float"`` or ``"int"``: all that the generated source needs to know of an argument's dtype."""
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


def generate(modifier: str, tensors: Sequence[Tensor] = ()) -> Generated:
    """The device functions of ``modifier`` for arguments of the dtypes and dims of ``tensors``. Needs Triton."""
    return _load(modifier, tuple(kind_of(t.dtype) for t in tensors), tuple(t.dim() for t in tensors))


def source(modifier: str, tensors: Sequence[Tensor] = ()) -> str:
    """The generated Triton source alone. ``tensors`` as for :func:`generate`; needs no Triton."""
    return _source(modifier, tuple(kind_of(t.dtype) for t in tensors), tuple(t.dim() for t in tensors))


def arguments(tensors: Sequence[Tensor], integers: Sequence[int] = ()) -> tuple[Any, ...]:
    """The value of the kernels' ``args`` parameter. Never shorter than two: unused integers fill it up."""
    flat: list[Any] = []
    for tensor in tensors:
        flat.append(tensor)
        flat.extend(tensor.stride())
    flat.extend(int(i) for i in integers)
    # Two elements at least: Triton's specialisation of a one-element or empty tuple differs between versions.
    flat.extend([0] * max(0, 2 - len(flat)))
    return tuple(flat)


# ---- bounds on kv ----------------------------------------------------------------------------------------------------


def upper_bound(mask: Expr) -> Expr | None:
    """An expression in ``b, q`` and arguments such that ``mask`` is false for every ``kv`` at or past it, or None."""
    return _bound(mask, upper=True)


def lower_bound(mask: Expr) -> Expr | None:
    """An integer expression such that ``mask`` is false for every ``kv`` before it, or None."""
    return _bound(mask, upper=False)


_NEGATED = {"lt": "ge", "le": "gt", "gt": "le", "ge": "lt", "eq": "ne", "ne": "eq"}
_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "eq": "eq", "ne": "ne"}


def _bound(mask: Expr, upper: bool) -> Expr | None:
    tighter, looser = ("min", "max") if upper else ("max", "min")
    if mask.op == "const" and mask.args[0] is False:
        return const(0) if upper else const(2**31 - 1)
    if mask.op == "not":
        inner = mask.args[0]
        if inner.op in _NEGATED:
            return _bound(Expr(_NEGATED[inner.op], inner.args), upper)
        if inner.op in ("and", "or"):
            flipped = Expr("or" if inner.op == "and" else "and", tuple(make("not", a) for a in inner.args))
            return _bound(flipped, upper)
        return None
    if mask.op == "and":
        sides = [s for s in (_bound(a, upper) for a in mask.args) if s is not None]
        return sides[0] if len(sides) == 1 else make(tighter, *sides) if sides else None
    if mask.op in ("or", "where"):
        branches = mask.args if mask.op == "or" else mask.args[1:]
        sides = [s for s in (_bound(a, upper) for a in branches) if s is not None]
        if len(sides) < 2:
            return None
        return sides[0] if sides[0] == sides[1] else make(looser, *sides)
    if mask.op in _NEGATED:
        return _bound_of_comparison(mask, upper)
    return None


def _bound_of_comparison(comparison: Expr, upper: bool) -> Expr | None:
    """Bring ``x op y`` to ``kv op bound`` (or ``kv // c op bound``) by moving terms across."""
    op, left, right = comparison.op, *comparison.args
    if right.uses("kv"):
        op, left, right = _MIRRORED[op], right, left
    if right.uses("kv") or not left.uses("kv"):
        return None
    block = 1
    while left.op != "kv":
        if left.op in ("add", "sub"):
            first, second = left.args
            if first.uses("kv") and second.uses("kv"):
                return None
            if first.uses("kv"):
                left, right = first, make("sub" if left.op == "add" else "add", right, second)
            elif left.op == "add":
                left, right = second, make("sub", right, first)
            else:  # first - second op right  <=>  second mirrored-op first - right
                op, left, right = _MIRRORED[op], second, make("sub", first, right)
        elif left.op == "neg":
            op, left, right = _MIRRORED[op], left.args[0], make("neg", right)
        elif left.op == "floordiv" and left.args[0].op == "kv" and _positive_literal(left.args[1]):
            block, left = left.args[1].args[0], left.args[0]
        else:
            return None
    if right.uses("h") or right.uses("score"):
        return None
    if upper:
        if op not in ("lt", "le", "eq"):
            return None
        stop = right if op == "lt" else make("add", right, const(1))
        return stop if block == 1 else make("mul", stop, const(block))
    if op not in ("gt", "ge", "eq"):
        return None
    start = make("add", right, const(1)) if op == "gt" else right
    return start if block == 1 else make("mul", start, const(block))


def _positive_literal(node: Expr) -> bool:
    return node.op == "const" and type(node.args[0]) is int and node.args[0] > 0


# ---- printing --------------------------------------------------------------------------------------------------------

_HELPERS = '''\
@triton.jit
def _floordiv(x, y):
    """Rounds down, as Python and PyTorch do; Triton's own division of integers rounds towards zero."""
    quotient = x // y
    return quotient - ((x - quotient * y != 0) & ((x < 0) != (y < 0))).to(tl.int32)


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)
'''


class _Printer:
    """Prints one expression as statements of a Triton function, each node once.

    ``kinds`` and ``dims`` describe the tensor arguments.
    """

    def __init__(self, kinds: Sequence[str], dims: Sequence[int]) -> None:
        self.kinds = kinds
        self.dims = dims
        self.lines: list[str] = []
        self.names: dict[Expr, tuple[str, str]] = {}

    def pointer(self, argument: int) -> int:
        """Position in ``args`` of tensor ``argument``; its strides follow."""
        if not 0 <= argument < len(self.dims):
            raise ValueError(f"index expression loads argument {argument}, but {len(self.dims)} tensors were given")
        return sum(1 + d for d in self.dims[:argument])

    def integer(self, argument: int) -> int:
        return sum(1 + d for d in self.dims) + argument

    def visit(self, node: Expr) -> tuple[str, str]:
        """The name (or literal) that holds ``node``, and its kind."""
        if node.op in ("b", "h", "q", "kv"):
            return node.op, "int"
        if node.op == "score":
            return "score", "float"
        if node.op == "const":
            return _literal(node.args[0])
        if node not in self.names:
            text, kind = self.expression(node)
            name = f"t{len(self.names)}"
            self.lines.append(f"{name} = {text}  # {node}")
            self.names[node] = (name, kind)
        return self.names[node]

    def expression(self, node: Expr) -> tuple[str, str]:
        if node.op == "int":
            return f"tl.cast(args[{self.integer(node.args[0])}], tl.int32)", "int"
        if node.op == "load":
            return self.load(node)
        operands = [self.visit(a) for a in node.args]
        names = [name for name, _ in operands]
        kinds = [kind for _, kind in operands]
        common = "float" if "float" in kinds else "int"

        def number(position: int, kind: str = common) -> str:
            """The operand as ``kind``: booleans count as 0 and 1, integers become fp32."""
            if kinds[position] == kind:
                return names[position]
            return f"tl.cast({names[position]}, {'tl.float32' if kind == 'float' else 'tl.int32'})"

        op = node.op
        if op in ("add", "sub", "mul"):
            return f"{number(0)} {'+-*'[('add', 'sub', 'mul').index(op)]} {number(1)}", common
        if op == "div":
            return f"{number(0, 'float')} / {number(1, 'float')}", "float"
        if op == "floordiv":
            if common == "float":
                return f"tl.floor({number(0)} / {number(1)})", "float"
            return f"_floordiv({number(0)}, {number(1)})", "int"
        if op == "mod":
            if common == "float":
                return f"{number(0)} - tl.floor({number(0)} / {number(1)}) * {number(1)}", "float"
            return f"{number(0)} - _floordiv({number(0)}, {number(1)}) * {number(1)}", "int"
        if op in ("min", "max"):
            return f"tl.{op}imum({number(0)}, {number(1)})", common
        if op == "neg":
            return f"-{number(0)}", common
        if op == "abs":
            return f"tl.abs({number(0)})", common
        if op in ("exp", "log"):
            return f"tl.{op}({number(0, 'float')})", "float"
        if op == "tanh":
            return f"_tanh({number(0, 'float')})", "float"
        if op in _COMPARISONS:
            if kinds == ["bool", "bool"] and op in ("eq", "ne"):
                return f"{names[0]} {_COMPARISONS[op]} {names[1]}", "bool"
            return f"{number(0)} {_COMPARISONS[op]} {number(1)}", "bool"
        if op in ("and", "or", "xor"):
            kind = "bool" if kinds == ["bool", "bool"] else "int"
            return f"{number(0, kind)} {_BITWISE[op]} {number(1, kind)}", kind
        if op == "not":
            # `== 0` and not `~`: the interpreter keeps booleans in bytes, where ~1 is not 0.
            return (f"{names[0]} == 0", "bool") if kinds[0] == "bool" else (f"~{number(0, 'int')}", "int")
        if op == "where":
            condition = names[0] if kinds[0] == "bool" else f"({names[0]} != 0)"
            if kinds[1] == kinds[2]:
                return f"tl.where({condition}, {names[1]}, {names[2]})", kinds[1]
            kind = "float" if "float" in kinds[1:] else "int"
            return f"tl.where({condition}, {number(1, kind)}, {number(2, kind)})", kind
        raise ValueError(f"no Triton form of operator {op!r}")

    def load(self, node: Expr) -> tuple[str, str]:
        argument, *indices = node.args
        first = self.pointer(argument)
        if len(indices) != self.dims[argument]:
            raise ValueError(f"load of argument {argument} needs {self.dims[argument]} indices, has {len(indices)}")
        address = f"args[{first}]"
        for position, index in enumerate(indices):
            name, kind = self.visit(index)
            if kind == "float":
                raise ValueError(f"load of argument {argument}: index {index} is not an integer")
            address += f" + tl.cast({name}, tl.int64) * args[{first + 1 + position}]"
        kind = self.kinds[argument]
        suffix = {"float": ".to(tl.float32)", "bool": " != 0", "int": ""}[kind]
        return f"tl.load({address}){suffix}", kind


_COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_BITWISE = {"and": "&", "or": "|", "xor": "^"}


def _literal(value: bool | int | float) -> tuple[str, str]:
    if isinstance(value, bool):
        return ("tl.full((), True, tl.int1)" if value else "tl.full((), False, tl.int1)"), "bool"
    if isinstance(value, int):
        return str(value), "int"
    return (repr(value) if math.isfinite(value) else f'float("{value}")'), "float"


def _function(name: str, parameters: str, expr: Expr, kind: str, kinds: Sequence[str], dims: Sequence[int]) -> str:
    printer = _Printer(kinds, dims)
    result, found = printer.visit(expr)
    if kind == "bool" and found != "bool":
        result = f"({result} != 0)"
    elif kind == "float":
        result = f"tl.cast({result}, tl.float32)"
    body = "".join(f"    {line}\n" for line in printer.lines)
    return f'@triton.jit\ndef {name}({parameters}):\n    """{expr}"""\n{body}    return {result}\n'


def _is_integer(expr: Expr, kinds: tuple[str, ...]) -> bool:
    """Whether a bound is made of integers alone, so that it is exact."""
    return not any(
        (node.op == "load" and kinds[node.args[0] : node.args[0] + 1] != ("int",))
        or (node.op == "const" and type(node.args[0]) is not int)
        or node.op in ("div", "exp", "log", "tanh")
        or node.op in BOOLEAN
        for node in expr.walk()
    )


def _bounds(modifier: Modifier, kinds: tuple[str, ...]) -> tuple[Expr | None, Expr | None]:
    found = upper_bound(modifier.mask), lower_bound(modifier.mask)
    upper, lower = (b if b is not None and _is_integer(b, kinds) else None for b in found)
    return upper, lower


def _source(modifier: str, kinds: tuple[str, ...], dims: tuple[int, ...]) -> str:
    parsed = Modifier.parse(modifier)
    upper, lower = _bounds(parsed, kinds)

    def bound(name: str, parameters: str, expr: Expr | None, limit: str, text: str) -> str:
        if expr is None:
            return f'@triton.jit\ndef {name}({parameters}):\n    """Not bounded."""\n    return {text}\n'
        head, _, tail = _function(name, parameters, expr, "exact", kinds, dims).rpartition("    return ")
        # Clamped in int64, where a bound such as 2**31 + q has not wrapped.
        clamped = limit.format(f"tl.cast({tail.strip()}, tl.int64)")
        return f"{head}    return tl.cast({clamped}, tl.int32)\n"

    parts = [
        "# Generated by sals-compile from the index expressions of a mask and a score modifier.\n"
        f"# mask:  {parsed.mask}\n# score: {parsed.score}\nimport triton\nimport triton.language as tl\n",
        _HELPERS,
        _function("mask_fn", "b, h, q, kv, args", parsed.mask, "bool", kinds, dims),
        _function("score_fn", "score, b, h, q, kv, args", parsed.score, "float", kinds, dims),
        bound("upper_fn", "b, q, capacity, args", upper, "tl.maximum(tl.minimum({}, capacity), 0)", "capacity"),
        bound("lower_fn", "b, q, args", lower, "tl.maximum({}, 0)", "0"),
    ]
    return "\n\n".join(parts)


# ---- the cache of generated modules ----------------------------------------------------------------------------------


def cache_directory() -> Path:
    """Where generated kernels lie: ``$XDG_CACHE_HOME/sals-compile/kernels`` (``~/.cache`` when unset)."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "sals-compile" / "kernels"


def write(text: str) -> Path:
    """Store ``text`` under the digest of its content; in a private folder if the cache is read-only."""
    name = f"modifier_{hashlib.sha256(text.encode()).hexdigest()[:20]}.py"
    try:
        directory = cache_directory()
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        return _write_atomically(directory / name, text)
    except OSError:
        return _write_atomically(_private_directory() / name, text)


@lru_cache(maxsize=1)
def _private_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="sals-compile-"))


def _write_atomically(path: Path, text: str) -> Path:
    if path.is_file() and path.read_bytes() == text.encode():
        return path
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path


@lru_cache(maxsize=512)
def _load(modifier: str, kinds: tuple[str, ...], dims: tuple[int, ...]) -> Generated:
    text = _source(modifier, kinds, dims)
    path = write(text)
    # Runs the text just generated, not the file's: the file is for Triton's and people's reading.
    module = types.ModuleType(f"sals_compile_generated.{path.stem}")
    module.__file__ = str(path)
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)
    functions: dict[str, Callable[..., Any]] = module.__dict__
    parsed = Modifier.parse(modifier)
    return Generated(
        mask_fn=functions["mask_fn"],
        score_fn=functions["score_fn"],
        upper_fn=functions["upper_fn"],
        lower_fn=functions["lower_fn"],
        masks=parsed.masks,
        modifies=parsed.modifies,
        bounded=_bounds(parsed, kinds)[0] is not None,
        source=text,
        path=path,
    )
