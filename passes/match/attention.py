"""Attention itself: an anchored ``scaled_dot_product_attention`` or ``flex_attention``, or a softmax between two matrix
products.

A softmax is followed back through element-wise operators and views to the product ``q @ k^T`` (giving the logit's
expression: scale, softcap, bias, mask) and forward to the product with ``v``. Axes are tracked from the products
outwards, so that a softmax over another axis, a permuted key or a reused score is seen, not assumed away. Each part of
the site is matched in its own file of this folder.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
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
    emit,
    inherit_roles,
    is_float_cast,
    is_one,
    same,
    shape_of,
    trace_views,
)
from ..ir import AttentionSite, CacheWrite, Declined, MatchResult, Mismatch, Operand, module_path
from .carried import match_carried
from .flex import FLEX, flex_arguments, flex_modifier, flex_output
from .heads import fold_batch, group_heads, product, refine, split_batch, split_rows
from .kv_cache import GROWING, grows, match_cache, tokens_written
from .mask import _BINARY, _UNARY, IndexInterpreter, clamp, fold_scale, split_mask, spread
from .projection import match_projection
from .rotary import match_rotary

log = logging.getLogger("sals_compile")

SDPA = ops.operator("scaled_dot_product_attention")
SOFTMAX = (aten._softmax.default, aten._safe_softmax.default)
PRODUCTS = (aten.bmm.default, aten.baddbmm.default)
#: Products of one head without a batch; also what every learned map is, so they count where no batched product is.
FLAT_PRODUCTS = (aten.mm.default, aten.addmm.default)
Roles = list[tuple[Expr, list[Atom]]]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def match_graph(gm: GraphModule) -> MatchResult:
    """Every attention site of a canonical ATen graph, or the reason why it was declined."""
    result = MatchResult()
    names: dict[str, int] = {}
    for node in gm.graph.nodes:
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is None:
            continue
        name = module_path(node)
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name}#{names[name]}"
        try:
            result.sites.append(replace(rule(node), name=name))
        except Exception as failure:
            # A fault of ours at one site must not cost the model its compilation.
            miss = failure if isinstance(failure, Mismatch) else _fault(failure, node)
            if node.target in SOFTMAX and not _looks_like_attention(node):
                continue
            where = miss.node or node
            anchor = (
                "softmax" if node.target in SOFTMAX else str(node.target).split(".")[-2 if node.target is SDPA else -1]
            )
            result.declined.append(Declined(name, anchor, miss.reason, node=where.name, depth=miss.depth))
    return result


def _fault(failure: Exception, node: Node) -> Mismatch:
    log.debug("matching %s failed", node.name, exc_info=failure)
    return Mismatch(
        f"internal error while matching ({type(failure).__name__}); please report it with the traceback that "
        f"logging.getLogger('sals_compile') gives at DEBUG",
        node,
    )


#: Where the search for the scores of a softmax ends: learned maps and what chooses or normalises.
_BARRIERS = (
    aten.mm.default,
    aten.addmm.default,
    aten.linear.default,
    aten.convolution.default,
    aten.embedding.default,
    aten.native_layer_norm.default,
    aten.topk.default,
)


def _looks_like_attention(softmax: Node) -> bool:
    """Whether a softmax that did not match is worth reporting: a product of two computed tensors is near its input (a
    router's or a classifier's is one of a parameter)."""
    stack, seen = [softmax], {softmax}
    while stack and len(seen) < 256:
        for source in stack.pop().all_input_nodes:
            if source.target in PRODUCTS:
                return True
            if source.target in FLAT_PRODUCTS and trace_views(source.args[-1]).base.op != "placeholder":  # type: ignore[arg-type]
                return True
            if source not in seen and source.op == "call_function" and source.target not in _BARRIERS:
                seen.add(source)
                stack.append(source)
    return False


# ---- the anchored operator -------------------------------------------------------------------------------------------


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
    interpreter = IndexInterpreter()

    def modifier(index: tuple[Expr, ...]) -> Modifier:
        mask, score = TRUE, SCORE
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
        return Modifier(mask, score)

    return _from_operator(node, node, (query, key, value), float(scale), modifier, interpreter)


def _from_flex(node: Node) -> AttentionSite:
    operands, scale = flex_arguments(node)
    interpreter = IndexInterpreter()

    def modifier(index: tuple[Expr, ...]) -> Modifier:
        mask, changed = flex_modifier(node, interpreter)
        filled, score = split_mask(spread(changed))
        return Modifier(make("and", mask, filled), score)

    return _from_operator(node, flex_output(node), operands, scale, modifier, interpreter)


def _from_operator(
    node: Node,
    output: Node,
    operands: Sequence[Node],
    scale: float,
    modifier: Callable[[tuple[Expr, ...]], Modifier],
    interpreter: IndexInterpreter,
) -> AttentionSite:
    """A site from ``[B,H,L,D]`` (or ``[B,L,D]``) operands; ``modifier`` is given the indices of one element of the
    scores."""
    q, k, v = (trace_views(t, scales=True) for t in operands)
    if not same(product(k.dims[-2]), product(v.dims[-2])):
        growing = grows(k.base) and grows(v.base)  # each by a length of its own, once lengths are symbols
        raise Mismatch(GROWING if growing else "keys and values differ in length", node)
    own = ViewTrace(output)
    if len(q.dims) == 4:
        lead, heads = [q.dims[0], k.dims[0], v.dims[0]], [q.dims[1], group_heads(k.dims[1]), group_heads(v.dims[1])]
        out_roles = [own.base_dims[d] for d in (0, 2, 1, 3)]
        index: tuple[Expr, ...] = (B, H, Q, KV)
    else:
        lead, heads = fold_batch(q, k, v)
        split = _split_to(own, own.base_dims[0][0], [a.size for a in (*lead[0], *heads[0])])
        out_roles = [split[: len(lead[0])], own.base_dims[1], split[len(lead[0]) :], own.base_dims[2]]
        index = (_role_index([*lead[0], *heads[0]], [(B, lead[0]), (H, heads[0])]), Q, KV)
    return _site(
        node,
        output,
        traces=(q, k, v),
        roles=tuple([lead[i], t.dims[-2], heads[i], t.dims[-1]] for i, t in enumerate((q, k, v))),  # type: ignore[arg-type]
        own=own,
        out_roles=out_roles,
        scale=scale,
        modifier=modifier(index),
        interpreter=interpreter,
        interior=(node,),
    )


# ---- softmax between two products ------------------------------------------------------------------------------------


@dataclass
class _Logits:
    """The path from ``q @ k^T`` to the softmax: nodes in order and what they compute."""

    product: Node
    path: list[Node]


def _operands(node: Node) -> list[Any]:
    return list(node.args[0]) if node.target is aten.cat.default else list(node.args)  # type: ignore[arg-type]


def _leads_to_product(node: Any, products: Sequence[Any], memo: dict[Node, bool]) -> bool:
    if not isinstance(node, Node) or node.op != "call_function":
        return False
    if node not in memo:
        memo[node] = False
        if node.target in products:
            memo[node] = True
        elif node.target in _ELEMENTWISE or node.target in VIEW_OPS or is_float_cast(node):
            memo[node] = any(_leads_to_product(a, products, memo) for a in _operands(node))
    return memo[node]


_ELEMENTWISE = {
    *_BINARY,
    *_UNARY,
    aten.where.self,
    aten.where.ScalarSelf,
    aten.where.ScalarOther,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.clamp.default,
    aten.cat.default,  # of a sink's column
}


def _find_logits(softmax: Node) -> _Logits:
    memo: dict[Node, bool] = {}
    path: list[Node] = []
    node = softmax.args[0]
    products = PRODUCTS if _leads_to_product(node, PRODUCTS, {}) else FLAT_PRODUCTS
    while True:
        assert isinstance(node, Node)
        if node.op != "call_function":
            raise Mismatch("the softmax's input is not a product of queries and keys", node, len(path))
        if node.target in products:
            path.append(node)
            break
        candidates = [a for a in _operands(node) if _leads_to_product(a, products, memo)]
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
    turned = _normalises_rows(node, logits)
    if turned is not None:
        return _from_logits(node, logits, turned)
    try:
        return _from_logits(node, logits, False)
    except Mismatch:
        return _from_logits(node, logits, True)


def _from_logits(node: Node, logits: _Logits, turned: bool) -> AttentionSite:
    """The site of a softmax over ``q @ k^T``, or (``turned``) over ``k @ q^T``."""
    depth = len(logits.path)
    first = logits.product
    biased = first.target in (aten.baddbmm.default, aten.addmm.default)
    left, right = (_batched(trace_views(a, scales=True)) for a in first.args[biased : biased + 2])  # type: ignore[arg-type]
    query, key = left, right
    if turned:
        query, key = right, left
        for operand in (query, key):
            operand.dims[1], operand.dims[2] = operand.dims[2], operand.dims[1]
    q_batch, q_heads, k_batch, k_heads = split_batch(query, query.dims[0], key, key.dims[0], batch_first=True)
    row_heads, tokens = split_rows(query.dims[1], q_heads, query.dims[2], tokens_written(key.base))
    q_roles = [q_batch, tokens, [*q_heads, *row_heads], query.dims[2]]
    k_roles = [k_batch, key.dims[2], k_heads, key.dims[1]]

    # The logit's expression, replayed from the product to the softmax over tracked axes.
    trace = ViewTrace(first)
    *batch_axis, first_axis, last_axis = (dim[0] for dim in trace.base_dims)
    row_axis, key_axis = (last_axis, first_axis) if turned else (first_axis, last_axis)
    in_batch = _split_to(trace, batch_axis[0], [a.size for a in (*q_batch, *q_heads)]) if batch_axis else []
    in_rows = _split_to(trace, row_axis, [a.size for a in query.dims[1]])
    is_head = dict(zip(in_rows, [a in row_heads for a in query.dims[1]], strict=True))
    roles: Roles = [
        (B, in_batch[: len(q_batch)]),
        (H, [*in_batch[len(q_batch) :], *(a for a in in_rows if is_head[a])]),
        (Q, [a for a in in_rows if not is_head[a]]),
        (KV, [key_axis]),
    ]
    interpreter = IndexInterpreter()
    expression: Expr = SCORE
    sinks: Node | None = None

    def index() -> list[Expr]:
        return [_role_index(d, roles) for d in trace.dims]

    if biased:
        beta, alpha = first.kwargs.get("beta", 1), first.kwargs.get("alpha", 1)
        expression = make("mul", SCORE, const(alpha))
        if beta != 0:
            bias = make("mul", interpreter.operand(first.args[0], index()), const(beta))
            expression = make("add", expression, bias)
    for previous, step in zip(logits.path, logits.path[1:], strict=False):
        if is_float_cast(step):
            continue
        if sinks is not None:
            raise Mismatch("the scores are changed after the sinks joined them", step, depth)
        if step.target in VIEW_OPS:
            VIEW_OPS[step.target](trace, step)
        elif step.target is aten.cat.default:
            sinks = _sink_logits(step, previous, trace, roles, index())
        else:
            if len(shape_of(step)) != len(trace.dims) or not _same_shape(step, previous):
                raise Mismatch("the scores are broadcast to another shape before the softmax", step, depth)
            expression = _apply(step, previous, expression, interpreter, index())
    if not _is_role(trace.dims[int(node.args[1]) % len(trace.dims)], roles[3]):  # type: ignore[arg-type]
        raise Mismatch("the softmax is not over the keys", node, depth)
    scale, expression = fold_scale(spread(expression))
    mask, score = split_mask(expression)

    output, value, v_roles, own, out_roles, interior = _find_values(node, trace, roles, mask, interpreter, sinks)
    return _site(
        node,
        output,
        traces=(query, key, value),
        roles=(q_roles, k_roles, v_roles),
        own=own,
        out_roles=out_roles,
        scale=scale,
        modifier=Modifier(mask, score),
        interpreter=interpreter,
        interior=(*logits.path, *interior),
        sinks=sinks,
    )


def _batched(trace: ViewTrace) -> ViewTrace:
    """An operand of a product as ``[batch, rows, columns]``; that of a flat one has no batch."""
    if len(trace.dims) == 2:
        trace.dims.insert(0, [])
    return trace


def _normalises_rows(softmax: Node, logits: _Logits) -> bool | None:
    """Whether the softmax runs over what the product's first operand brought: the keys, where scores are ``k @ q^T``.
    None where it runs over a single key, which either may have brought.

    (A softmax over the queries looks the same up to here; its weights then meet the values along another axis.)
    """
    trace = ViewTrace(logits.product)
    for step in logits.path[1:]:
        if step.target in VIEW_OPS:
            VIEW_OPS[step.target](trace, step)
    dim = _kept(trace.dims[int(softmax.args[1]) % len(trace.dims)])  # type: ignore[arg-type]
    return all(a.dim == len(trace.base_dims) - 2 for a in dim) if dim else None


def _kept(atoms: Dims | list[Atom]) -> list[Atom]:
    """Factors that are not of size one."""
    return [a for a in atoms if not is_one(a.size)]  # type: ignore[union-attr]


def _is_role(dim: list[Atom], role: tuple[Expr, list[Atom]]) -> bool:
    return _kept(dim) == _kept(role[1])


def _sink_logits(step: Node, previous: Node, trace: ViewTrace, roles: Roles, index: list[Expr]) -> Node:
    """The per-head logits ``[H]`` that join the scores as one more column (gpt-oss)."""
    parts, rank = list(step.args[0]), len(trace.dims)  # type: ignore[arg-type]
    axis = (int(step.args[1]) if len(step.args) > 1 else 0) % rank  # type: ignore[arg-type]
    column = parts[-1]
    if len(parts) != 2 or parts[0] is not previous or not _is_role(trace.dims[axis], roles[3]):
        raise Mismatch("something other than one column of sinks joins the scores", step)
    if not is_one(shape_of(column)[axis]):
        raise Mismatch("more than one column of sinks joins the scores", step)
    reader = IndexInterpreter()
    found = reader.operand(column, [*index[:axis], const(0), *index[axis + 1 :]])
    if found.op == "const":
        like = column.meta["val"]
        return emit(
            step, aten.full.default, [product(roles[1][1])], found.args[0], dtype=like.dtype, device=like.device
        )
    if found.op == "load":
        source, where = reader.tensors[found.args[0]], found.args[1:]
        heads = product(roles[1][1])
        varying = [i for i, e in enumerate(where) if e != const(0)]
        shared = not varying and heads == 1
        own = len(varying) == 1 and where[varying[0]] == H and shape_of(source)[varying[0]] == heads
        if (shared or own) and all(is_one(s) for i, s in enumerate(shape_of(source)) if i not in varying):
            return source if len(where) == 1 else emit(step, aten.reshape.default, source, [-1])
    raise Mismatch("the sinks are not one logit per head", column)


def _same_shape(a: Node, b: Node) -> bool:
    return all(same(x, y) for x, y in zip(shape_of(a), shape_of(b), strict=True))


def _split_to(trace: ViewTrace, atom: Atom, sizes: list[Any]) -> list[Atom]:
    """Split ``atom`` into factors of the given sizes (their product is its size)."""
    if not sizes:
        return []
    parts: list[Atom] = []
    for position, size in enumerate(sizes[:-1]):
        rest: Any = 1
        for other in sizes[position + 1 :]:
            rest = rest * other
        outer, atom = trace.split(atom, size, rest)
        parts.append(outer)
    return [*parts, atom]


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
    if target is aten.clamp.default:
        return clamp(step, value)
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return make("where", value(args[1]), value(args[2]), value(args[0]))
    return make("where", *(value(a) for a in args))


def _find_values(
    softmax: Node, trace: ViewTrace, roles: Roles, mask: Expr, interpreter: IndexInterpreter, sinks: Node | None
) -> tuple[Node, ViewTrace, Dims, ViewTrace, Dims, list[Node]]:
    """Forward from the softmax to the product with the values: the product, the values and their roles, the output's
    axes and theirs, and the nodes between."""
    interior: list[Node] = [softmax]
    node = softmax
    dropped = sinks is None
    while True:
        users = [u for u in node.users if u.target is not aten.isnan.default]
        if len(users) != 1:
            others = ", ".join(sorted(u.name for u in users)) or "nothing"
            raise Mismatch(f"the attention weights are used by {others}", node, len(interior))
        user = users[0]
        if not dropped and _drops_sinks(user, trace, roles):
            dropped = True
        elif user.target in VIEW_OPS and dropped:
            VIEW_OPS[user.target](trace, user)
        elif user.target in (aten.bmm.default, aten.mm.default) and dropped and user.args[0] is not user.args[1]:
            break
        elif not is_float_cast(user) and not _guards(
            user, node, mask, [_role_index(d, roles) for d in trace.dims], interpreter
        ):
            raise Mismatch(f"the attention weights are changed by {user.target}", user, len(interior))
        node = user
        interior.append(node)
    output = user
    weights_first = output.args[0] is node  # else ``v^T @ weights^T``
    *lead, rows, keys = (_kept(d) for d in trace.dims)
    if not weights_first:
        rows, keys = keys, rows
    batch = lead[0] if lead else []
    role_of = {a: r for r, (_, atoms) in enumerate(roles) for a in atoms}
    ordered = [a for a in (*batch, *rows) if role_of[a] == 1]
    if keys != _kept(roles[3][1]) or ordered != _kept(roles[1][1]) or any(role_of[a] == 2 for a in batch):
        raise Mismatch("the attention weights reach the values along other axes", output, len(interior))
    if [role_of[a] for a in batch] != sorted(role_of[a] for a in batch) or any(role_of[a] == 0 for a in rows):
        raise Mismatch("the attention weights reach the values along other axes", output, len(interior))
    value = _batched(trace_views(output.args[weights_first], scales=True))  # type: ignore[arg-type]
    own = ViewTrace(output)
    *own_lead, own_rows, own_dim = (dim[0] for dim in own.base_dims)
    if not weights_first:
        own_rows, own_dim = own_dim, own_rows
        value.dims[1], value.dims[2] = value.dims[2], value.dims[1]
    in_batch = _split_to(own, own_lead[0], [a.size for a in batch]) if own_lead else []
    in_rows = _split_to(own, own_rows, [a.size for a in rows])
    pairs = refine(own, in_batch, value, value.dims[0])
    out_roles: Dims = [[], [], [], [own_dim]]
    v_roles: Dims = [[], value.dims[1], [], value.dims[2]]
    for atom in batch:  # its factors may have been split to pair up with the values'
        size: Any = 1
        while not same(size, atom.size):
            mine, theirs = pairs.pop(0)
            out_roles[2 * role_of[atom]].append(mine)
            v_roles[2 * role_of[atom]].append(theirs)
            size = size * mine.size
    for atom, mine in zip(rows, in_rows, strict=True):
        out_roles[2 if role_of[atom] == 1 else 1].append(mine)
    v_roles[2] = group_heads(v_roles[2])
    return output, value, v_roles, own, out_roles, interior


def _drops_sinks(user: Node, trace: ViewTrace, roles: Roles) -> bool:
    """``weights[..., :-1]``: the sinks' column has done its work."""
    if user.target is not aten.slice.Tensor:
        return False
    axis = (int(user.args[1]) if len(user.args) > 1 else 0) % len(trace.dims)  # type: ignore[arg-type]
    start, step = (user.args[i] if len(user.args) > i else d for i, d in ((2, 0), (4, 1)))
    whole, kept = shape_of(user.args[0])[axis], shape_of(user)[axis]  # type: ignore[arg-type]
    return _is_role(trace.dims[axis], roles[3]) and bool(start in (0, None) and step == 1 and same(kept, whole - 1))


def _conjuncts(expr: Expr) -> set[Expr]:
    return set().union(*(_conjuncts(a) for a in expr.args)) if expr.op == "and" else {expr}


def _guards(user: Node, weights: Node, mask: Expr, index: list[Expr], interpreter: IndexInterpreter) -> bool:
    """Whether the node only zeroes weights that are zero already, or rows with every key masked (NaN, or undefined)."""
    if user.target is aten.nan_to_num.default:
        return (user.args[1] if len(user.args) > 1 else None) in (None, 0, 0.0)
    reader = IndexInterpreter()
    reader.tensors, reader.integers = list(interpreter.tensors), list(interpreter.integers)
    if user.target is aten.masked_fill.Scalar and user.args[0] is weights and user.args[2] == 0:
        condition, zeroed = user.args[1], True
    elif user.target in (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther):
        condition, kept, other = user.args
        zeroed = other is weights
        fill = kept if zeroed else other
        if (kept if not zeroed else other) is not weights or reader.operand(fill, index) not in (const(0), const(0.0)):
            return False
    elif user.target is aten.mul.Tensor:
        factor = user.args[1] if user.args[0] is weights else user.args[0]
        found = reader.operand(factor, index)
        if (
            found.op != "where"
            or [a.op for a in found.args[1:]] != ["const", "const"]
            or found.args[1].args[0] != 1
            or found.args[2].args[0] != 0
        ):
            return False
        return _conjuncts(found.args[0]) <= _conjuncts(mask)
    else:
        return False
    if isinstance(condition, Node) and condition.target is aten.isnan.default and condition.args[0] is weights:
        return zeroed
    if isinstance(condition, Node) and _whole_rows(condition, zeroed, mask, index, reader):
        return True
    found = reader.operand(condition, index)
    attended = make("not", found) if zeroed else found
    return _conjuncts(attended) <= _conjuncts(mask)


def _whole_rows(condition: Node, zeroed: bool, mask: Expr, index: list[Expr], reader: IndexInterpreter) -> bool:
    """``not any(mask, -1)`` or ``all(not mask, -1)``: the rows with nothing to attend."""
    while condition.target in (aten.logical_not.default, aten.bitwise_not.default):
        condition, zeroed = condition.args[0], not zeroed  # type: ignore[assignment]
    if condition.target not in (aten.any.dim, aten.all.dim) or not (len(condition.args) > 2 and condition.args[2]):
        return False
    every = condition.target is aten.all.dim
    if every != zeroed or len(shape_of(condition)) != len(index):
        return False
    axis = int(condition.args[1]) % len(index)  # type: ignore[arg-type]
    found = reader.operand(condition.args[0], index)
    attended = make("not", found) if every else found
    return index[axis] == KV and _conjuncts(attended) <= _conjuncts(mask)


#: Where a site is anchored, and how it is read from there.
RULES: dict[Any, Callable[[Node], AttentionSite]] = {
    SDPA: _from_sdpa,
    FLEX: _from_flex,
    **dict.fromkeys(SOFTMAX, _from_softmax),
}


# ---- what all forms share --------------------------------------------------------------------------------------------


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
    own: ViewTrace,
    out_roles: Dims,
    scale: float,
    modifier: Modifier,
    interpreter: IndexInterpreter,
    interior: tuple[Node, ...],
    sinks: Node | None = None,
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
    # Both factors are in the scale now; operators answer in the query's type, which is to be the output's.
    query, key = replace(query, factor=1.0, dtype=dtype), replace(key, factor=1.0)

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
        if not same(product(q_roles[1]), shape_of(key_cache.slots)[-1]):
            raise Mismatch("queries are not the tokens that are written to the cache", anchor)
        k_trace, k_roles = _written(key_cache, k_trace, k_roles)
        v_trace, v_roles = _written(value_cache, v_trace, v_roles)
        key, value = _operand(k_trace, k_roles, "written key"), _operand(v_trace, v_roles, "written value")
    note = ""
    key_rotary, _ = match_rotary(k_trace, k_roles)
    query_rotary, _ = match_rotary(q_trace, q_roles)
    if key_rotary is None:
        key_rotary, note = match_carried(k_trace, k_roles)
    if key_rotary is not None and query_rotary is None:
        query_rotary, _ = match_carried(q_trace, q_roles)
    if key_rotary is not None and key.factor != 1.0:  # a rotation commutes with a factor
        key_rotary = replace(key_rotary, source=replace(key_rotary.source, factor=key.factor))
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
        sink_logits=sinks,
        note=note,
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
