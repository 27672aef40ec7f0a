"""Option ``query_rank``: a site's query projection ``W x`` as two thinner products, ``up (down x) + shift``.

Dimensions: ``I`` inputs, ``O`` outputs (query heads x head dim), ``r`` rank; ``down [r,I]``, ``up [O,r]``,
``shift [O]``.

Of all maps ``W' x + c`` of rank ``r``, ``U U^T W x + (1 - U U^T) m`` has the least ``E|W x - W' x - c|^2``, where ``m``
is the mean of ``W x`` and the columns of ``U [O,r]`` are the leading eigenvectors of its covariance ``C``: the best
``c`` makes the means agree, and what is left is ``||(W - W') S^1/2||^2`` with ``S`` the covariance of ``x``, least for
the leading left singular vectors of ``W S^1/2`` (Eckart and Young), which are the eigenvectors of ``W S W^T = C``. So
all that is needed of the data are mean and covariance of the projection's *outputs* (``Calibration.projected``);
without data, ``m = 0`` and ``C = W diag(g)^2 W^T``: white hidden states before the norm's gain ``g``. A bias is added
after that, unchanged. (The mean of queries is large: on SmolLM2 a third of the rank that keeps 95 % of the variance
keeps 95 % of the second moment about zero, at six times the KL.)

Recognised: from the site's pre-rotary query backwards through views, casts, biases and norms (qk-norm) to the one
product with a parameter that made it; of a fused projection, the run of columns that is the query's. What was there is
replaced as a whole, for whatever reads it next, so the norms between are kept as they are. Kept dense with the reason:
a query made of several products, columns that are not one run, outputs that something else reads too, and a rank that
does not pay.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from .graph import ancestors, aten, dtype_of, shape_of, trace_views
from .ir import AttentionSite, LowRankQuery, Mismatch, Projection, SitePlan
from .match.projection import linear_map, same_width, under_views
from .match.rotary import calls, last_slice
from .verify import TOLERANCE

PRODUCTS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.linear.default)


class Factors(Protocol):
    """What ``factors_of`` gives: the rank, the share of the outputs' variance it keeps, and by what it was chosen."""

    rank: int
    retained: float
    source: str


#: ``(site, projection, weight [O,I], gain [I] or None)`` to the factors of the weight.
FactorsOf = Callable[[AttentionSite, Projection, Tensor, Tensor | None], Factors]


def low_rank_query(
    plans: Sequence[SitePlan], query_rank: int | float, example: Mapping[Node, Any], factors_of: FactorsOf
) -> None:
    """Set ``low_rank_query`` of every plan whose query projection can be factored and pays; else say why in its reason.

    ``query_rank``: a rank, or (a float) the share of the outputs' variance that each site's rank must keep.
    """
    verified: dict[Any, float] = {}
    for entry in plans:
        if entry.action == "dense":
            entry.reason += "; query projection kept: the site is dense"
            continue
        try:
            # AOT traces under a fake mode; the weights are real.
            with torch.no_grad(), _disable_current_modes():
                entry.low_rank_query = _factored(entry.site, query_rank, example, factors_of, verified)
        except Mismatch as mismatch:
            entry.reason += f"; query projection kept: {mismatch.reason}"


def _factored(
    site: AttentionSite,
    query_rank: int | float,
    example: Mapping[Node, Any],
    factors_of: FactorsOf,
    verified: dict[Any, float],
) -> LowRankQuery:
    found = match_query_projection(site)
    weight = example.get(found.weight)
    if not isinstance(weight, Tensor):
        raise Mismatch("the projection's weight is not known at compile time")
    if weight.is_inference():
        raise Mismatch(
            "the projection's weight was made under torch.inference_mode(), so changes to it could not be noticed; "
            "load the model under torch.no_grad()"
        )
    matrix = found.read(weight)
    outputs, inputs = matrix.shape
    itemsize = dtype_of(found.product).itemsize
    if isinstance(query_rank, int):
        check_price(query_rank, inputs, outputs, itemsize)
    key = _structure(found)
    if key not in verified:
        verified[key] = _difference(found, example)
    tolerance = TOLERANCE[dtype_of(found.product)]
    if not verified[key] <= tolerance:
        raise Mismatch(
            f"verification failed: at full rank two products differ from the one by {verified[key]:.2e}, over the "
            f"tolerance {tolerance:.0e}"
        )
    factors = factors_of(site, found, matrix, None if found.norm is None else example.get(found.norm))
    check_price(factors.rank, inputs, outputs, itemsize)
    return LowRankQuery(found, factors.rank, factors.retained, factors.source)


def check_price(rank: int, inputs: int, outputs: int, itemsize: int) -> None:
    """Raise :class:`Mismatch`, with the arithmetic, unless two products of ``rank`` cost less than the one.

    Per token ``2 r (I + O)`` FLOPs against ``2 I O``; per call ``r (I + O)`` weights read against ``I O``.
    """
    thin, dense = rank * (inputs + outputs), inputs * outputs
    if thin >= dense:
        raise Mismatch(
            f"rank {rank} does not pay: {rank} x ({inputs} + {outputs}) = {thin} weights, {2 * thin} FLOPs per token "
            f"and {itemsize * thin} bytes, against {inputs} x {outputs} = {dense} weights, {2 * dense} FLOPs and "
            f"{itemsize * dense} bytes dense; ranks up to {math.ceil(dense / (inputs + outputs)) - 1} pay"
        )


# ---- match -----------------------------------------------------------------------------------------------------------


def match_query_projection(site: AttentionSite) -> Projection:
    """The projection that made the site's queries. Raises :class:`Mismatch` where they are not one linear map's."""
    rows: dict[Node, set[tuple[int, int]]] = {}
    starts: dict[Node, list[Node]] = {}
    pending, seen = [site.query_pre.node], set()
    while pending:
        node = pending.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        sliced = last_slice(node)
        source = node if sliced is None else under_views(trace_views(sliced[0]).base)
        if calls(source, *PRODUCTS) and (mapped := linear_map(source)) is not None:
            width = shape_of(source)[-1]
            if sliced is None:
                columns = (0, int(width))
            elif sliced[3] == 1 and same_width(sliced[0], mapped):
                columns = (sliced[1], sliced[2])
            else:  # a slice of each head, say: the walk goes on to the product itself
                pending.extend(node.all_input_nodes)
                continue
            rows.setdefault(source, set()).add(columns)
            starts.setdefault(source, []).append(node)
            continue
        pending.extend(node.all_input_nodes)
    if not rows:
        raise Mismatch("no product with a parameter of the model makes the queries")
    if len(rows) > 1:
        names = ", ".join(sorted(n.name for n in rows))
        raise Mismatch(f"the queries are made of {len(rows)} products ({names}), not one")
    product, columns = next(iter(rows.items()))
    mapped = linear_map(product)
    assert mapped is not None and mapped.rows is None
    if product.kwargs:
        raise Mismatch(f"the projection {product.name} scales its operands ({dict(product.kwargs)})")
    if len(columns) > 1:
        raise Mismatch(f"the queries are {len(columns)} runs of columns of the projection {product.name}, not one")
    start, stop = next(iter(columns))
    width = int(shape_of(product)[-1])
    whole = (start, stop) == (0, width)
    _check_private(site, product, starts[product], (start, stop))
    return Projection(
        mapped.weight, mapped.bias, mapped.norm, None if whole else (start, stop), mapped.transposed, product
    )


def _check_private(site: AttentionSite, product: Node, starts: Sequence[Node], rows: tuple[int, int]) -> None:
    """Raise unless what is replaced reaches the rest of the graph through the site's queries alone."""
    ends = {site.query.node, site.query_pre.node}
    pending, seen = [n for n in starts if n is not product], set()
    if product in starts:
        pending.append(product)
    else:  # fused: every other reader takes other columns
        views = [product]
        while views:
            for user in views.pop().users:
                sliced = last_slice(user)
                if user in starts:
                    continue
                if sliced is not None and sliced[3] == 1 and (sliced[2] <= rows[0] or sliced[1] >= rows[1]):
                    continue
                if sliced is None and calls(user, *PRODUCTS) is False and under_views(user) is under_views(product):
                    views.append(user)
                    continue
                raise Mismatch(f"the query's columns of the fused projection are also read by {user.name}")
    while pending:
        node = pending.pop()
        if node in seen or node in ends:
            continue
        seen.add(node)
        if node.op == "output" or node in (site.key_pre.node, site.key.node, site.value.node):
            raise Mismatch(f"the output of {product.name} is read by more than the site's queries")
        pending.extend(node.users)


# ---- meaning ---------------------------------------------------------------------------------------------------------


def _operands(product: Node) -> tuple[Node, Node, Node | None]:
    """``(hidden, matrix, bias)`` of a product."""
    arguments: list[Any] = list(product.args)
    if product.target is aten.addmm.default:
        return arguments[1], arguments[2], arguments[0]
    return arguments[0], arguments[1], arguments[2] if len(arguments) > 2 else None


def factored_meaning(found: Projection, get: Callable[[Node], Any], down: Any, up: Any, shift: Any) -> Any:
    """What takes the place of ``found.product``: tensors in, tensor out, or FX proxies while rewriting."""
    hidden, matrix, bias = _operands(found.product)
    result = aten.add.Tensor(aten.linear.default(aten.linear.default(get(hidden), down), up), shift)
    if found.rows is not None:  # the other columns of a fused projection, as they were
        whole = get(matrix)
        if found.product.target is aten.linear.default:
            whole = aten.t.default(whole)
        start, stop = found.rows
        width = int(shape_of(found.product)[-1])
        parts = [result]
        if start > 0:
            parts.insert(0, aten.matmul.default(get(hidden), aten.slice.Tensor(whole, -1, 0, start)))
        if stop < width:
            parts.append(aten.matmul.default(get(hidden), aten.slice.Tensor(whole, -1, stop, width)))
        result = aten.cat.default(parts, -1)
    return result if bias is None else aten.add.Tensor(result, get(bias))


def _structure(found: Projection) -> Any:
    """What the comparison depends on, the weights' values aside."""
    hidden, matrix, bias = _operands(found.product)
    cone = ancestors([n for n in (matrix, bias) if n is not None], [])
    steps = tuple((str(n.target) if n.op == "call_function" else n.op, str(n.meta.get("val"))) for n in cone)
    shape = tuple(map(str, shape_of(hidden)))
    return steps, str(found.product.target), shape, found.rows, found.transposed, bias is None


def _difference(found: Projection, example: Mapping[Node, Any]) -> float:
    """Relative difference of the product and its factored meaning at full rank, where they must be equal.

    ``up`` is the identity with its columns reversed: of full rank, exact in any dtype, and no wrong order of rows would
    survive it.
    """
    hidden, matrix, bias = _operands(found.product)
    values: dict[Node, Any] = {}
    for node in ancestors([n for n in (matrix, bias) if n is not None], []):
        if node.op == "placeholder":
            values[node] = example.get(node)
            if not isinstance(values[node], Tensor):
                raise Mismatch(f"the projection's operand {node.name} is not known at compile time")
        elif node.op == "call_function":
            values[node] = node.target(  # type: ignore[operator]
                *torch.fx.node.map_arg(node.args, lambda n: values[n]),
                **torch.fx.node.map_arg(node.kwargs, lambda n: values[n]),
            )
        else:
            raise Mismatch(f"the projection's operand {node.name} is not an input of the graph")
    weight = values[found.weight]
    shape = [*shape_of(hidden)]
    if found.product.target is not aten.bmm.default:
        shape = [8, shape[-1]]  # rows are independent; few will do
    elif not all(isinstance(s, int) for s in shape):
        raise Mismatch("a batched projection of symbolic shape is not supported")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn([int(s) for s in shape], generator=generator)
    values[hidden] = drawn.to(weight.device, dtype_of(hidden))
    expected = found.product.target(  # type: ignore[operator]
        *torch.fx.node.map_arg(found.product.args, lambda n: values[n])
    ).float()
    dtype = dtype_of(found.product)
    down = found.read(weight).flip(0).to(dtype)
    up = torch.eye(down.shape[0], dtype=dtype, device=weight.device).flip(1)
    shift = torch.zeros(up.shape[0], dtype=dtype, device=weight.device)
    actual = factored_meaning(found, values.__getitem__, down, up, shift).float()
    if actual.shape != expected.shape:
        raise Mismatch(f"two products give shape {list(actual.shape)} in place of {list(expected.shape)}")
    return float((actual - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))
