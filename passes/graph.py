"""The FX graph, seen two ways: axes tracked through views, and the graph as a networkx DiGraph.

**Axis tracking.** Attention code moves axes about: ``view``, ``transpose``, ``expand``, ``unsqueeze``.
:func:`trace_views` follows a tensor back through such operators to its *base* and says, for each dim of the tensor,
which parts (:class:`Atom`) of which dims of the base it is made of. Splits are proved by sizes (symbolic ones too),
never guessed: where a ``view`` cannot be factored, the trace stops there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import networkx
import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

aten = torch.ops.aten

Size = int | torch.SymInt


def same(a: Size, b: Size) -> bool:
    """Whether two sizes are known to be equal, without adding a guard."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def is_one(size: Size) -> bool:
    return isinstance(size, int) and size == 1


def shape_of(node: Node) -> tuple[Size, ...]:
    """The traced shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: Node) -> torch.dtype:
    return node.meta["val"].dtype


_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Atom:
    """A factor of one dim of a base tensor (``dim``), or a broadcast axis (``dim`` None)."""

    size: Size
    dim: int | None

    @property
    def broadcast(self) -> bool:
        return self.dim is None


Dims = list[list[Atom]]


class _Unfactorable(Exception):
    pass


class ViewTrace:
    """A tensor as a view of ``base``: ``base_dims`` and ``dims`` list the atoms of each dim of the base and of the
    tensor."""

    def __init__(self, base: Node, shape: Sequence[Size] | None = None) -> None:
        self.base = base
        self.base_dims: Dims = [[Atom(s, i)] for i, s in enumerate(shape_of(base) if shape is None else shape)]
        self.dims: Dims = [list(d) for d in self.base_dims]
        self.factor = 1.0

    def split(self, atom: Atom, outer: Size, inner: Size) -> tuple[Atom, Atom]:
        """Replace ``atom`` everywhere by two factors."""
        parts = (Atom(outer, atom.dim), Atom(inner, atom.dim))
        for dims in (self.base_dims, self.dims):
            for dim in dims:
                if atom in dim:
                    at = dim.index(atom)
                    dim[at : at + 1] = parts
        return parts

    def regroup(self, sizes: Sequence[Size]) -> None:
        """``view``: the same atoms in the same order, grouped to ``sizes``; splits atoms where needed."""
        pending = [a for dim in self.dims for a in dim]
        grouped: Dims = []
        for position, size in enumerate(sizes):
            dim: list[Atom] = []
            if is_one(size):
                # A size-one axis if one is next, else a new one: what is batch and what is head shows even where both
                # are of size one.
                dim.append(pending.pop(0) if pending and is_one(pending[0].size) else Atom(1, None))
                if position == len(sizes) - 1:
                    dim += pending
                    pending = []
                grouped.append(dim)
                continue
            product: Size = 1
            while not same(product, size):
                if not pending:
                    raise _Unfactorable
                atom = pending.pop(0)
                if same(product * atom.size, size) or (
                    isinstance(atom.size, int)
                    and isinstance(product, int)
                    and isinstance(size, int)
                    and size % (product * atom.size) == 0
                ):
                    dim.append(atom)
                    product = product * atom.size
                    continue
                need = quotient(size, product)
                rest = None if need is None else quotient(atom.size, need)
                if need is None or rest is None:
                    # With symbols an atom may be a proper factor that arithmetic on sizes can confirm.
                    if quotient(size, product * atom.size) is not None:
                        dim.append(atom)
                        product = product * atom.size
                        continue
                    raise _Unfactorable
                self.dims = [[atom]]  # split() must see the atom wherever it now lives
                outer, inner = self.split(atom, need, rest)
                dim.append(outer)
                pending.insert(0, inner)
                product = size
            # Size-one axes between dims attach to the left dim, so that no atom is lost.
            if position == len(sizes) - 1:
                dim += pending
                pending = []
            grouped.append(dim)
        if pending:
            if not all(is_one(a.size) for a in pending):
                raise _Unfactorable
            if grouped:
                grouped[-1] += pending
        self.dims = grouped


def quotient(a: Size, b: Size) -> Size | None:
    """``a / b`` when ``b`` is known to divide ``a``."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(a % b == 0):
        quotient = a // b
        expr = getattr(getattr(quotient, "node", None), "expr", None)
        if expr is not None and expr.is_number:
            return int(expr)
        return quotient
    return None


#: Operators that only move, split or broadcast axes; each maps (trace of its input, node) to the trace of its output.


def _permute(trace: ViewTrace, node: Node) -> None:
    rank = len(trace.dims)
    trace.dims = [trace.dims[int(d) % rank] for d in node.args[1]]  # type: ignore[union-attr]


def _transpose(trace: ViewTrace, node: Node) -> None:
    rank = len(trace.dims)
    a, b = int(node.args[1]) % rank, int(node.args[2]) % rank  # type: ignore[arg-type]
    trace.dims[a], trace.dims[b] = trace.dims[b], trace.dims[a]


def _t(trace: ViewTrace, node: Node) -> None:
    trace.dims.reverse()


def _view(trace: ViewTrace, node: Node) -> None:
    trace.regroup(shape_of(node))


def _expand(trace: ViewTrace, node: Node) -> None:
    sizes = shape_of(node)
    lead = len(sizes) - len(trace.dims)
    dims: Dims = [[Atom(s, None)] for s in sizes[:lead]]
    for dim, size in zip(trace.dims, sizes[lead:], strict=True):
        # Only an axis of size one can be expanded; any other keeps its size, also where symbols hide that.
        stretched = all(is_one(a.size) for a in dim) and not is_one(size)
        dims.append([Atom(size, None)] if stretched else dim)
    trace.dims = dims


def _unsqueeze(trace: ViewTrace, node: Node) -> None:
    rank = len(trace.dims) + 1
    trace.dims.insert(int(node.args[1]) % rank, [Atom(1, None)])  # type: ignore[arg-type]


def _squeeze(trace: ViewTrace, node: Node) -> None:
    rank = len(trace.dims)
    if len(node.args) > 1:
        where = node.args[1]
        drop = {int(d) % rank for d in (where if isinstance(where, (list, tuple)) else [where])}  # type: ignore[arg-type]
    else:
        drop = set(range(rank))
    sizes = shape_of(node.args[0])  # type: ignore[arg-type]
    trace.dims = [d for i, d in enumerate(trace.dims) if not (i in drop and is_one(sizes[i]))]


def _keep(trace: ViewTrace, node: Node) -> None:
    return None


def _repeat(trace: ViewTrace, node: Node) -> None:
    repeats = list(node.args[1])  # type: ignore[arg-type]
    dims: Dims = [[] for _ in range(len(repeats) - len(trace.dims))] + trace.dims
    trace.dims = [d if is_one(r) else [Atom(r, None), *d] for d, r in zip(dims, repeats, strict=True)]


VIEW_OPS: dict[Any, Any] = {
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.reshape.default: _view,
    aten.unflatten.int: _view,
    aten.flatten.using_ints: _view,
    aten.expand.default: _expand,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.clone.default: _keep,
    aten.contiguous.default: _keep,
    aten.alias.default: _keep,
    aten.detach.default: _keep,
    aten.lift_fresh_copy.default: _keep,
    aten.repeat.default: _repeat,
}

CASTS = (aten._to_copy.default, aten.to.dtype)


def is_float_cast(node: Node) -> bool:
    """A conversion between floating types (which only rounds)."""
    if node.op != "call_function" or node.target not in CASTS:
        return False
    source = node.args[0]
    return isinstance(source, Node) and dtype_of(source).is_floating_point and dtype_of(node).is_floating_point


def constant_factor(node: Node) -> tuple[Node, float] | None:
    """``(x, c)`` when the node is ``x * c`` or ``x / c`` with a literal ``c``."""
    if node.op != "call_function":
        return None
    if node.target in (aten.mul.Tensor, aten.mul.Scalar):
        for tensor, other in (node.args[:2], tuple(reversed(node.args[:2]))):
            if isinstance(tensor, Node) and (value := literal(other)) is not None and _is_tensor(tensor):
                return tensor, value
    if node.target in (aten.div.Tensor, aten.div.Scalar) and len(node.args) == 2 and not node.kwargs:
        tensor, other = node.args
        if isinstance(tensor, Node) and (value := literal(other)) and _is_tensor(tensor):
            return tensor, 1.0 / value
    return None


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def literal(value: Any) -> float | None:
    """The number that ``value`` is: a Python number, or a node that creates a one-element constant."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and value.op == "call_function":
        if value.target in (aten.scalar_tensor.default,):
            return literal(value.args[0])
        if value.target is aten.full.default and all(is_one(s) for s in value.args[0]):  # type: ignore[union-attr]
            return literal(value.args[1])
        if value.target in (*CASTS, *(k for k, v in VIEW_OPS.items() if v is _keep)):
            return literal(value.args[0])
    return None


def emit(before: Node, target: Any, *args: Any, **kwargs: Any) -> Node:
    """A new node before ``before``, with its traced value and the module that ``before`` comes from."""
    with before.graph.inserting_before(before):
        node = before.graph.call_function(target, args, kwargs)

    def value(argument: Node) -> Any:
        return argument.meta["val"]

    node.meta = {k: v for k, v in before.meta.items() if k in ("nn_module_stack", "stack_trace", "source_fn_stack")}
    node.meta["val"] = target(*map_arg(args, value), **map_arg(kwargs, value))
    return node


def same_value(a: Any, b: Any, depth: int = 4) -> bool:
    """Whether two arguments are the same node, or the same operator (up to ``depth`` deep) of the same."""
    if a is b:
        return True
    if isinstance(a, Node) and isinstance(b, Node):
        alike = depth > 0 and a.op == b.op == "call_function" and a.target is b.target and len(a.args) == len(b.args)
        if (
            not alike
            or a.kwargs.keys() != b.kwargs.keys()
            or torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ())
        ):
            return False
        pairs = [*zip(a.args, b.args, strict=True), *((a.kwargs[k], b.kwargs[k]) for k in a.kwargs)]
        return all(same_value(x, y, depth - 1) for x, y in pairs)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_value(x, y, depth) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and not isinstance(a, Node) and a == b


def trace_views(node: Node, *, scales: bool = False, casts: bool = True, stop: Iterable[Node] = ()) -> ViewTrace:
    """Follow ``node`` back through views and floating casts (and, with ``scales``, products with literals) to its
    base."""
    stop = set(stop)
    chain: list[Node] = []
    factors: list[float] = []
    current = node
    while current.op == "call_function" and current not in stop:
        if (current.target in VIEW_OPS or (casts and is_float_cast(current))) and isinstance(current.args[0], Node):
            chain.append(current)
            current = current.args[0]
            continue
        scaled = constant_factor(current) if scales else None
        if scaled is not None and len(shape_of(scaled[0])) == len(shape_of(current)):
            factors.append(scaled[1])
            chain.append(current)
            current = scaled[0]
            continue
        break
    # Replay from the base; where a view cannot be factored, its output becomes the base.
    while True:
        trace = ViewTrace(current)
        trace.factor = math.prod(factors[: sum(constant_factor(n) is not None for n in chain)])
        for position in range(len(chain) - 1, -1, -1):
            step = chain[position]
            handler = VIEW_OPS.get(step.target)
            if handler is None:
                continue
            try:
                handler(trace, step)
                if any(sum(not isinstance(a.size, int) for a in d) > 1 for d in trace.base_dims):
                    raise _Unfactorable  # the sizes of two symbolic factors cannot be read from the base's shape
            except _Unfactorable:
                current = step
                chain = chain[:position]
                break
        else:
            return trace


@dataclass(frozen=True)
class Layout:
    """How the dims of a tensor map to four roles, in the order of ``roles`` (``"BSND"``: batch, tokens, heads, head
    dim).

    ``parts`` lists, per dim of the tensor, the ``(role, size)`` factors it consists of (size None: symbolic, the whole
    dim). ``order`` lists, per role, which factors (by running number) make it up. Sizes of one may be missing from
    either side.
    """

    parts: tuple[tuple[int | None, ...], ...]
    order: tuple[tuple[int, ...], ...]

    @staticmethod
    def build(base_dims: Dims, roles: Sequence[Sequence[Atom]]) -> Layout | None:
        """From traced atoms; None when a non-trivial atom of the base has no role, or a role lacks its atoms."""
        numbers: dict[Atom, int] = {}
        parts: list[tuple[int | None, ...]] = []
        for dim in base_dims:
            kept = [a for a in dim if not is_one(a.size)]
            sizes: list[int | None] = []
            for atom in kept:
                numbers[atom] = len(numbers)
                sizes.append(atom.size if isinstance(atom.size, int) else None)
            if sum(s is None for s in sizes) > 1:
                return None
            parts.append(tuple(sizes))
        order = []
        for role in roles:
            kept = [a for a in role if not is_one(a.size)]
            if any(a not in numbers for a in kept):
                return None
            order.append(tuple(numbers[a] for a in kept))
        if sorted(itertools.chain(*order)) != list(range(len(numbers))):
            return None
        return Layout(tuple(parts), tuple(order))

    @property
    def is_identity(self) -> bool:
        flat = list(itertools.chain(*self.order))
        return flat == sorted(flat) and all(len(p) <= 1 for p in self.parts) and len(self.parts) == len(self.order)

    def _sizes(self, tensor: Any) -> list[Any]:
        """Size of every factor, read from the tensor where symbolic."""
        sizes: list[Any] = []
        for dim, factors in enumerate(self.parts):
            for factor in factors:
                if factor is not None:
                    sizes.append(factor)
                    continue
                whole = aten.sym_size.int(tensor, dim)
                known = math.prod(f for f in factors if f is not None)
                sizes.append(whole if known == 1 else whole // known)
        return sizes

    def to_roles(self, tensor: Any) -> Any:
        """The tensor (or FX proxy) as ``[role0, role1, ...]``."""
        sizes = self._sizes(tensor)
        if any(len(p) != 1 for p in self.parts):
            tensor = aten.reshape.default(tensor, sizes)
        flat = list(itertools.chain(*self.order))
        if flat != sorted(flat):
            tensor = aten.permute.default(tensor, flat)
        if any(len(o) != 1 for o in self.order):
            tensor = aten.reshape.default(tensor, [_product([sizes[i] for i in o]) for o in self.order])
        return tensor

    def from_roles(self, tensor: Any) -> Any:
        """The inverse of :meth:`to_roles`: a ``[role0, ...]`` tensor (or FX proxy) in this layout."""
        known = dict(enumerate(itertools.chain(*self.parts)))
        sizes: dict[int, Any] = {}
        for role, numbers in enumerate(self.order):
            for number in numbers:
                if known[number] is not None:
                    sizes[number] = known[number]
                    continue
                whole = aten.sym_size.int(tensor, role)
                others = math.prod(known[i] for i in numbers if known[i] is not None)
                sizes[number] = whole if others == 1 else whole // others
        flat = list(itertools.chain(*self.order))
        if any(len(o) != 1 for o in self.order):
            tensor = aten.reshape.default(tensor, [sizes[i] for i in flat])
        inverse = [flat.index(i) for i in range(len(flat))]
        if inverse != sorted(inverse):
            tensor = aten.permute.default(tensor, inverse)
        if any(len(p) != 1 for p in self.parts):
            shape, at = [], 0
            for p in self.parts:
                shape.append(_product([sizes[i] for i in range(at, at + len(p))]))
                at += len(p)
            tensor = aten.reshape.default(tensor, shape)
        return tensor


def inherit_roles(outer: ViewTrace, roles: Sequence[Sequence[Atom]], inner: ViewTrace) -> Dims | None:
    """Roles of ``inner``'s atoms when its dims stand where the dims of ``outer.base`` stand (the same tensor, or one
    written into it).

    A dim with one role gives it to whatever ``inner`` has there, whatever its size; a dim of several roles must split
    alike.
    """
    inherited: Dims = [[] for _ in roles]
    for position, (dim, _) in enumerate(zip(outer.base_dims, inner.dims, strict=True)):
        wanted = [(a, r) for a in dim if not is_one(a.size) for r, atoms in enumerate(roles) if a in atoms]
        if len({r for _, r in wanted}) == 1:
            inherited[wanted[0][1]] += [a for a in inner.dims[position] if not is_one(a.size)]
            continue
        for atom, role in wanted:
            own = [a for a in inner.dims[position] if not is_one(a.size) and not any(a in i for i in inherited)]
            if not own:
                return None
            if not same(own[0].size, atom.size):
                rest = quotient(own[0].size, atom.size)
                if rest is None:
                    return None
                own[0], _ = inner.split(own[0], atom.size, rest)
            inherited[role].append(own[0])
    return inherited


def _product(sizes: Sequence[Any]) -> Any:
    """Product without a multiplication by one (which would be a node of its own in a graph)."""
    result: Any = 1
    for size in sizes:
        result = size if isinstance(result, int) and result == 1 else result * size
    return result


def to_networkx(gm: GraphModule) -> networkx.DiGraph:
    """The graph with one node per FX node (attributes ``op``, ``target``, ``shape``, ``dtype``) and edges from input to
    user."""
    digraph = networkx.DiGraph()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        tensor = value if isinstance(value, torch.Tensor) else None
        digraph.add_node(
            node.name,
            op=node.op,
            target=str(node.target),
            shape=None if tensor is None else tuple(str(s) for s in tensor.shape),
            dtype=None if tensor is None else str(tensor.dtype),
        )
    for node in gm.graph.nodes:
        for source in node.all_input_nodes:
            digraph.add_edge(source.name, node.name)
    return digraph


def ancestors(outputs: Iterable[Node], boundary: Iterable[Node]) -> list[Node]:
    """Nodes that ``outputs`` depend on, not looking past ``boundary`` (whose nodes are included), in graph order."""
    boundary = set(boundary)
    seen: set[Node] = set()
    stack = list(outputs)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node not in boundary:
            stack.extend(node.all_input_nodes)
    return sorted(seen)
