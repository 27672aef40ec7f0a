"""Attention itself: an anchored ``scaled_dot_product_attention``, or a softmax between two matrix products.

A softmax is followed back through element-wise operators and views to the product ``q @ k^T`` (giving the logit's expression: scale,
softcap, bias, mask) and forward to the product with ``v``. Axes are tracked from the products outwards, so that a softmax over another axis, a
permuted key or a reused score is seen, not assumed away. Each part of the site is matched in its own file of this folder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ...kernels import ops
from ...kernels.index_expr import FALSE, KV, SCORE, TRUE, B, Expr, H, Modifier, Q, const, make
from ..graph import (
    VIEW_OPS,
    Atom,
    Dims,
    Layout,
    ViewTrace,
    aten,
    dtype_of,
    inherit_roles,
    is_float_cast,
    is_one,
    same,
    shape_of,
    trace_views,
)
from ..ir import AttentionSite, CacheWrite, Declined, MatchResult, Mismatch, Operand, module_path
from .heads import group_heads, product, refine, split_batch
from .kv_cache import match_cache
from .mask import _BINARY, _UNARY, IndexInterpreter, fold_scale, split_mask
from .projection import match_projection
from .rotary import match_rotary

SDPA = ops.operator("scaled_dot_product_attention")
SOFTMAX = (aten._softmax.default, aten._safe_softmax.default)
PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def match_graph(gm: GraphModule) -> MatchResult:
    """Every attention site of a canonical ATen graph, or the reason why it was declined."""
    result = MatchResult()
    names: dict[str, int] = {}
    for node in gm.graph.nodes:
        if node.op != "call_function" or not (node.target is SDPA or node.target in SOFTMAX):
            continue
        name = module_path(node)
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        try:
            site = _from_sdpa(node) if node.target is SDPA else _from_softmax(node)
            result.sites.append(replace(site, name=name))
        except Mismatch as miss:
            where = miss.node or node
            anchor = "scaled_dot_product_attention" if node.target is SDPA else "softmax"
            result.declined.append(Declined(name, anchor, miss.reason, node=where.name, depth=miss.depth))
    return result


# ---- the anchored operator ----------------------------------------------------------------------------------------------


def _from_sdpa(node: Node) -> AttentionSite:
    arguments = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), node.args, strict=False))
    arguments.update(node.kwargs)
    query, key, value = (arguments[n] for n in ("query", "key", "value"))
    if arguments.get("dropout_p", 0.0):
        raise Mismatch("attention dropout is active; call model.eval()", node)
    rank = len(shape_of(query))
    if rank not in (3, 4) or any(len(shape_of(t)) != rank for t in (key, value)):
        raise Mismatch(f"scaled_dot_product_attention on {rank}-D operands; 3-D and 4-D are matched", node)
    scale = arguments.get("scale")
    width = shape_of(query)[-1]
    if scale is None:
        if not isinstance(width, int):
            raise Mismatch("head dim is symbolic", node)
        scale = 1.0 / math.sqrt(width)
    if not isinstance(scale, (int, float)):
        raise Mismatch("scale is not a literal", node)
    traces = {n: trace_views(t, scales=True) for n, t in (("q", query), ("k", key), ("v", value))}
    q, k, v = traces["q"].dims, traces["k"].dims, traces["v"].dims
    lead = [d[0] if rank == 4 else d[0] for d in (q, k, v)]
    heads = [d[1] if rank == 4 else [] for d in (q, k, v)]
    tokens, dims = [d[-2] for d in (q, k, v)], [d[-1] for d in (q, k, v)]
    if not same(product(tokens[1]), product(tokens[2])):
        raise Mismatch("keys and values differ in length", node)
    kv_heads = [group_heads(heads[1]), group_heads(heads[2])]
    interpreter = IndexInterpreter()
    mask, score = TRUE, SCORE
    index = (B, H, Q, KV) if rank == 4 else (B, Q, KV)
    attn_mask = arguments.get("attn_mask")
    if arguments.get("is_causal"):
        mask = make("le", KV, Q)  # upper-left aligned when L != S
    if attn_mask is not None:
        element = interpreter.operand(attn_mask, index)
        if dtype_of(attn_mask) == torch.bool:
            mask = make("and", mask, element)
        else:
            bias_mask, score = split_mask(make("add", SCORE, element))
            mask = make("and", mask, bias_mask)
    return _site(
        node,
        node,
        traces=(traces["q"], traces["k"], traces["v"]),
        roles=(
            [lead[0], tokens[0], heads[0], dims[0]],
            [lead[1], tokens[1], kv_heads[0], dims[1]],
            [lead[2], tokens[2], kv_heads[1], dims[2]],
        ),
        output_sizes=[[0], [2], [1], [3]] if rank == 4 else [[0], [1], [], [2]],
        scale=float(scale),
        modifier=Modifier(mask, score),
        interpreter=interpreter,
        interior=(node,),
    )


# ---- softmax between two products ---------------------------------------------------------------------------------------


@dataclass
class _Logits:
    """The path from ``q @ k^T`` to the softmax: nodes in order and what they compute."""

    product: Node
    path: list[Node]


def _leads_to_product(node: Any, memo: dict[Node, bool]) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node not in memo:
        memo[node] = False
        if node.target in PRODUCTS:
            memo[node] = True
        elif node.target in _ELEMENTWISE or node.target in VIEW_OPS or is_float_cast(node):
            memo[node] = any(_leads_to_product(a, memo) for a in node.args)
    return memo[node]


_ELEMENTWISE = {
    *_BINARY,
    *_UNARY,
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
}


def _find_logits(softmax: Node) -> _Logits:
    memo: dict[Node, bool] = {}
    path: list[Node] = []
    node = softmax.args[0]
    while True:
        assert isinstance(node, Node)
        if node.op != "call_function":
            raise Mismatch("the softmax's input is not a product of queries and keys", node, len(path))
        if node.target in PRODUCTS:
            path.append(node)
            break
        candidates = [a for a in node.args if _leads_to_product(a, memo)]
        if not candidates:
            raise Mismatch(f"no matrix product leads here through {node.target}", node, len(path))
        if len(set(candidates)) > 1:
            raise Mismatch("two matrix products feed one softmax", node, len(path))
        path.append(node)
        node = candidates[0]
    path.reverse()
    for step, following in zip(path, [*path[1:], softmax], strict=True):
        if set(step.users) != {following}:
            others = ", ".join(sorted(u.name for u in step.users if u is not following))
            raise Mismatch(f"the attention scores are also used by {others}", step, len(path))
    return _Logits(path[0], path)


def _role_index(dim: list[Atom], roles: list[tuple[Expr, list[Atom]]]) -> Expr:
    """The index along a dim made of factors of roles."""
    atoms = [a for a in dim if not is_one(a.size)]
    result: Expr = const(0)
    while atoms:
        for variable, members in roles:
            kept = [a for a in members if not is_one(a.size)]
            if kept and atoms[: len(kept)] == kept:
                result = _mixed(result, product(kept), variable)
                atoms = atoms[len(kept) :]
                break
        else:
            atom = atoms.pop(0)
            variable, kept = next(
                ((v, [m for m in members if not is_one(m.size)]) for v, members in roles if atom in members), (None, [])
            )
            if variable is None:
                raise Mismatch("an axis of the scores has no role")
            at = kept.index(atom)
            inner = product(kept[at + 1 :])
            value = make("floordiv", variable, _const_size(inner)) if kept[at + 1 :] else variable
            if at > 0:
                value = make("mod", value, _const_size(atom.size))
            result = _mixed(result, atom.size, value)
    return result


def _mixed(outer: Expr, size: Any, inner: Expr) -> Expr:
    """``outer * size + inner``; the size is needed only where there is an outer index."""
    return inner if outer == const(0) else make("add", make("mul", outer, _const_size(size)), inner)


def _const_size(size: Any) -> Expr:
    if not isinstance(size, int):
        raise Mismatch("a mask is indexed through a symbolic size")
    return const(size)


def _from_softmax(node: Node) -> AttentionSite:
    logits = _find_logits(node)
    first = logits.product
    left, right = (first.args[1], first.args[2]) if first.target is aten.baddbmm.default else first.args[:2]
    query, key = trace_views(left, scales=True), trace_views(right, scales=True)  # type: ignore[arg-type]
    q_batch, q_heads, k_batch, k_heads = split_batch(query, query.dims[0], key, key.dims[0], batch_first=True)
    q_roles = [q_batch, query.dims[1], q_heads, query.dims[2]]
    k_roles = [k_batch, key.dims[2], k_heads, key.dims[1]]

    # The logit's expression, replayed from the product to the softmax over tracked axes.
    trace = ViewTrace(first)
    batch = trace.base_dims[0][0]
    sizes = [a.size for a in (*q_batch, *q_heads)]
    factors = _split_to(trace, batch, sizes)
    b_atoms, h_atoms = factors[: len(q_batch)], factors[len(q_batch) :]
    roles = [(B, b_atoms), (H, h_atoms), (Q, [trace.base_dims[1][0]]), (KV, [trace.base_dims[2][0]])]
    interpreter = IndexInterpreter()
    expression: Expr = SCORE

    def index() -> list[Expr]:
        return [_role_index(d, roles) for d in trace.dims]

    if first.target is aten.baddbmm.default:
        beta, alpha = first.kwargs.get("beta", 1), first.kwargs.get("alpha", 1)
        expression = make("mul", SCORE, const(alpha))
        if beta != 0:
            bias = make("mul", interpreter.operand(first.args[0], index()), const(beta))
            expression = make("add", expression, bias)
    for previous, step in zip(logits.path, logits.path[1:], strict=False):
        if step.target in VIEW_OPS:
            VIEW_OPS[step.target](trace, step)
        elif not is_float_cast(step):
            if len(shape_of(step)) != len(trace.dims) or not _same_shape(step, previous):
                raise Mismatch("the scores are broadcast to another shape before the softmax", step, len(logits.path))
            expression = _apply(step, previous, expression, interpreter, index())
    axis = int(node.args[1]) % len(trace.dims)  # type: ignore[arg-type]
    last = [a for a in trace.dims[axis] if not is_one(a.size)]
    if last != [a for a in roles[3][1] if not is_one(a.size)]:
        raise Mismatch("the softmax is not over the keys", node, len(logits.path))
    scale, expression = fold_scale(expression)
    mask, score = split_mask(expression)

    output, value, v_roles, interior = _find_values(node, trace, roles)
    return _site(
        node,
        output,
        traces=(query, key, value),
        roles=(q_roles, k_roles, v_roles),
        output_sizes=None,
        scale=scale,
        modifier=Modifier(mask, score),
        interpreter=interpreter,
        interior=(*logits.path, *interior),
    )


def _same_shape(a: Node, b: Node) -> bool:
    return all(same(x, y) for x, y in zip(shape_of(a), shape_of(b), strict=True))


def _split_to(trace: ViewTrace, atom: Atom, sizes: list[Any]) -> list[Atom]:
    """Split ``atom`` into factors of the given sizes (their product is its size)."""
    parts: list[Atom] = []
    for size in sizes[:-1]:
        outer, atom = trace.split(atom, size, atom.size // size)
        parts.append(outer)
    return [*parts, atom] if sizes else []


def _apply(step: Node, previous: Node, expression: Expr, interpreter: IndexInterpreter, index: list[Expr]) -> Expr:
    """The expression after one element-wise operator whose operand ``previous`` has the value ``expression``."""

    def value(argument: Any) -> Expr:
        if argument is previous:
            return expression
        return interpreter.operand(argument, index)

    target, args = step.target, step.args
    if target in _BINARY:
        if step.kwargs.get("rounding_mode"):
            raise Mismatch("the scores are rounded", step)
        left, right = (value(a) for a in args[:2])
        alpha = step.kwargs.get("alpha", 1)
        if alpha != 1:
            if not isinstance(alpha, (int, float)):
                raise Mismatch("a scale of the scores is not a literal", step)
            right = make("mul", const(alpha), right)
        return make(_BINARY[target], left, right)
    if target in _UNARY:
        return make(_UNARY[target], value(args[0]))
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return make("where", value(args[1]), value(args[2]), value(args[0]))
    return make("where", *(value(a) for a in args))


def _find_values(softmax: Node, trace: ViewTrace, roles: list[tuple[Expr, list[Atom]]]):
    """Forward from the softmax to the product with the values: ``(product, value trace, value roles, nodes between)``."""
    interior: list[Node] = [softmax]
    node = softmax
    while True:
        users = list(node.users)
        if len(users) != 1:
            others = ", ".join(sorted(u.name for u in users)) or "nothing"
            raise Mismatch(f"the attention weights are used by {others}", node, len(interior))
        user = users[0]
        if user.target in VIEW_OPS:
            VIEW_OPS[user.target](trace, user)
        elif user.target is aten.bmm.default and user.args[0] is node and user.args[1] is not node:
            break
        elif not is_float_cast(user):
            raise Mismatch(f"the attention weights are changed by {user.target}", user, len(interior))
        node = user
        interior.append(node)
    output = user
    kept = [[a for a in d if not is_one(a.size)] for d in trace.dims]
    batch = [a for _, atoms in roles[:2] for a in atoms if not is_one(a.size)]
    if kept != [batch, *([a for a in roles[i][1] if not is_one(a.size)] for i in (2, 3))]:
        raise Mismatch("the attention weights reach the values along other axes", output, len(interior))
    value = trace_views(output.args[1], scales=True)  # type: ignore[arg-type]
    own = ViewTrace(output)
    factors = _split_to(own, own.base_dims[0][0], [a.size for a in batch])
    pairs = refine(own, factors, value, value.dims[0])
    count = len([a for a in roles[0][1] if not is_one(a.size)])
    # The batch's atoms may have been split to pair up; they are the first whose sizes multiply to the batch.
    v_batch: list[Atom] = []
    v_heads: list[Atom] = []
    size: Any = 1
    whole = product([a for a in roles[0][1]])
    for _, atom in pairs:
        if count and not same(size, whole):
            v_batch.append(atom)
            size = size * atom.size
        else:
            v_heads.append(atom)
    return output, value, [v_batch, value.dims[1], group_heads(v_heads), value.dims[2]], interior


# ---- what both forms share ----------------------------------------------------------------------------------------------


def _operand(trace: ViewTrace, roles: Dims, what: str) -> Operand:
    kept = [[a for a in role if not a.broadcast] for role in roles]
    layout = Layout.build(trace.base_dims, kept)
    if layout is None:
        raise Mismatch(f"axes of the {what} could not be told apart", trace.base)
    return Operand(trace.base, layout, trace.factor)


def _site(
    anchor: Node,
    output: Node,
    *,
    traces: tuple[ViewTrace, ViewTrace, ViewTrace],
    roles: tuple[Dims, Dims, Dims],
    output_sizes: list[list[int]] | None,
    scale: float,
    modifier: Modifier,
    interpreter: IndexInterpreter,
    interior: tuple[Node, ...],
) -> AttentionSite:
    q_trace, k_trace, v_trace = traces
    q_roles, k_roles, v_roles = roles
    dtype = dtype_of(output)
    if dtype not in FLOATS or any(dtype_of(t.base) not in FLOATS for t in traces):
        raise Mismatch(f"attention in {dtype}; float32, bfloat16 and float16 are matched", anchor)
    if modifier.mask == FALSE:
        raise Mismatch("every key is masked", anchor)
    sizes = [product(q_roles[2]), product(k_roles[2]), product(v_roles[2]), product(k_roles[3]), product(v_roles[3])]
    if not all(isinstance(s, int) for s in sizes):
        raise Mismatch("head counts or head dims are symbolic", anchor)
    heads, kv_heads, v_heads, head_dim, value_dim = sizes
    if kv_heads != v_heads or heads % kv_heads:
        raise Mismatch(f"{heads} query heads cannot share {kv_heads} key and {v_heads} value heads", anchor)
    query = _operand(q_trace, q_roles, "query")
    key = _operand(k_trace, k_roles, "key")
    value = _operand(v_trace, v_roles, "value")
    scale = scale * query.factor * key.factor
    query, key = replace(query, factor=1.0), replace(key, factor=1.0)  # both are in the scale now

    if output_sizes is None:
        own = ViewTrace(output)
        factors = _split_to(own, own.base_dims[0][0], [a.size for r in (0, 2) for a in q_roles[r] if not is_one(a.size)])
        count = len([a for a in q_roles[0] if not is_one(a.size)])
        out_roles = [factors[:count], own.base_dims[1], factors[count:], own.base_dims[2]]
    else:
        own = ViewTrace(output)
        out_roles = [[a for d in dims for a in own.base_dims[d]] for dims in output_sizes]
    output_layout = Layout.build(own.base_dims, out_roles)
    if output_layout is None:
        raise Mismatch("axes of the output could not be told apart", output)

    key_cache = match_cache(k_trace, k_roles)
    value_cache = match_cache(v_trace, v_roles)
    if (key_cache is None) != (value_cache is None):
        raise Mismatch("keys are cached and values are not, or the other way round", anchor)
    if key_cache is not None and value_cache is not None:
        if key_cache.slots is not value_cache.slots or key_cache.capacity != value_cache.capacity:
            raise Mismatch("keys and values are written at different slots", anchor)
        if key_cache.read != value_cache.read:
            raise Mismatch("keys and values are read to different lengths", anchor)
        if key_cache.read is not None:
            bound = interpreter.scalar(key_cache.read)
            if bound is None:
                raise Mismatch("the length read from the cache is not an integer of the graph", anchor)
            modifier = replace(modifier, mask=make("and", make("lt", KV, bound), modifier.mask))
        if value.factor != 1.0:
            raise Mismatch("cached values are scaled when read", anchor)
        k_trace, k_roles = _written(key_cache, k_trace, k_roles)
        v_trace, v_roles = _written(value_cache, v_trace, v_roles)
        key, value = _operand(k_trace, k_roles, "written key"), _operand(v_trace, v_roles, "written value")
    key_rotary, _ = match_rotary(k_trace, k_roles)
    query_rotary, _ = match_rotary(q_trace, q_roles)
    if key_rotary is not None and key.factor != 1.0:
        key_rotary = None
    site = AttentionSite(
        name="",
        output=output,
        output_layout=output_layout,
        anchor=anchor,
        query=query,
        key=key,
        value=value,
        scale=scale,
        modifier=modifier,
        modifier_tensors=tuple(interpreter.tensors),
        modifier_integers=tuple(interpreter.integers),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
        key_rotary=key_rotary,
        query_rotary=query_rotary if key_rotary is not None else None,
        key_cache=key_cache,
        value_cache=value_cache,
        interior=tuple(dict.fromkeys((*interior, output))),
    )
    return replace(site, projection=match_projection(site.key_pre))


def _written(cache: CacheWrite, trace: ViewTrace, roles: Dims) -> tuple[ViewTrace, Dims]:
    """The tokens written, traced back further, with the roles that their axes have in the buffer."""
    inner = trace_views(cache.new, scales=True)
    inherited = inherit_roles(trace, roles, inner)
    if inherited is None:
        raise Mismatch("axes of the tokens written could not be told apart", cache.new)
    return inner, inherited
