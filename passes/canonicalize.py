"""One spelling for what has several: a table of rewrites that change no value.

The matcher tracks axes and scales itself, so this pass only removes what does nothing (aliases, casts to the same type,
expands and slices to the same shape, dropout that is off), gives composite operators their one ATen name, and writes
out what later passes need to see: a complex product as the real arithmetic it is, a softmax taken apart as a softmax.
Each rule returns the node that replaces the one given, or None.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .graph import aten, dtype_of, emit, is_float_cast, same, same_value, shape_of

Rule = Callable[[Node], Node | None]


def _source(node: Node) -> Node:
    source = node.args[0]
    assert isinstance(source, Node)
    return source


def _identity(node: Node) -> Node:
    return _source(node)


def _same_type(node: Node) -> Node | None:
    """A cast that keeps dtype, device and layout."""
    source = _source(node)
    extra = {
        k: v for k, v in node.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory", "non_blocking")
    }
    kept = dtype_of(source) == dtype_of(node) and source.meta["val"].device == node.meta["val"].device
    return source if kept and not any(v is not None for v in extra.values()) else None


def _converted(node: Node) -> Node:
    """A cast as torch's own passes spell it (where ``dynamic=True`` makes tensors of Python numbers)."""
    source = _source(node)
    if dtype_of(source) == dtype_of(node):
        return source
    return emit(node, aten._to_copy.default, source, dtype=node.args[1])


def _equal_shapes(a: Node, b: Node) -> bool:
    return len(shape_of(a)) == len(shape_of(b)) and all(
        same(x, y) for x, y in zip(shape_of(a), shape_of(b), strict=True)
    )


def _same_shape(node: Node) -> Node | None:
    source = _source(node)
    return source if _equal_shapes(source, node) else None


def _whole_slice(node: Node) -> Node | None:
    step = node.args[4] if len(node.args) > 4 else 1
    return _same_shape(node) if step == 1 else None


def _whole_scatter(node: Node) -> Node | None:
    """``x[:] = source`` of the whole of ``x``."""
    source, step = node.args[1], node.args[5] if len(node.args) > 5 else 1
    assert isinstance(source, Node)
    return source if step == 1 and _equal_shapes(source, node) and dtype_of(source) == dtype_of(node) else None


def _copy(node: Node) -> Node | None:
    """``copy(target, source)``: the source in the target's type and shape."""
    source = node.args[1]
    assert isinstance(source, Node)
    if source.meta["val"].device != node.meta["val"].device:
        return None
    if dtype_of(source) != dtype_of(node):
        source = emit(node, aten._to_copy.default, source, dtype=dtype_of(node))
    if _equal_shapes(source, node):
        return source
    if not all(isinstance(s, int) for s in shape_of(node)):
        return None
    return emit(node, aten.expand.default, source, list(shape_of(node)))


def _cat(node: Node) -> Node | None:
    """A ``cat`` without its empty parts (the untouched dims of a rotary embedding that rotates all of them)."""
    parts: Any = node.args[0]
    kept = [p for p in parts if not any(isinstance(s, int) and s == 0 for s in shape_of(p))]
    if len(kept) == len(parts) or not kept:
        return None
    if len(kept) == 1:
        return kept[0] if _equal_shapes(kept[0], node) and dtype_of(kept[0]) == dtype_of(node) else None
    return emit(node, aten.cat.default, kept, *node.args[1:])


def _no_dropout(node: Node) -> Node | None:
    """``dropout`` in eval mode or with p = 0."""
    return _source(node) if not node.args[2] or node.args[1] == 0 else None


def _softmax_function(node: Node) -> Node | None:
    dtype = node.args[2] if len(node.args) > 2 else node.kwargs.get("dtype")
    if dtype not in (None, dtype_of(_source(node))):
        return None
    return _softmax(node, _source(node), int(node.args[1]))  # type: ignore[arg-type]


def _softmax(node: Node, source: Node, dim: int) -> Node:
    return emit(node, aten._softmax.default, source, dim, False)


def _unshifted(node: Node, dim: int) -> Node | None:
    """``x`` when the node is ``x - max(x, dim)``, which no softmax sees."""
    if node.op != "call_function" or node.target is not aten.sub.Tensor or node.kwargs:
        return None
    source, top = node.args[:2]
    if not isinstance(source, Node) or not isinstance(top, Node):
        return None
    while is_float_cast(top):
        top = top.args[0]  # type: ignore[assignment]
    rank = len(shape_of(source))
    if top.target is operator.getitem and top.args[1] == 0:
        top = top.args[0]  # type: ignore[assignment]
        if top.target is not aten.max.dim:  # type: ignore[union-attr]
            return None
    elif top.target is not aten.amax.default:
        return None
    where = top.args[1] if len(top.args) > 1 else ()  # type: ignore[union-attr]
    dims = list(where) if isinstance(where, (list, tuple)) else [where]
    keep = len(top.args) > 2 and top.args[2]  # type: ignore[union-attr]
    if not keep or [int(d) % rank for d in dims] != [dim % rank]:  # type: ignore[arg-type]
        return None
    return source if same_value(source, top.args[0]) else None  # type: ignore[union-attr]


def _shifted_softmax(node: Node) -> Node | None:
    source = _unshifted(_source(node), int(node.args[1]))  # type: ignore[arg-type]
    return None if source is None else _softmax(node, source, int(node.args[1]))  # type: ignore[arg-type]


def _decomposed_softmax(node: Node) -> Node | None:
    """``exp(x) / sum(exp(x), dim)``, with or without the maximum taken off first."""
    top, total = node.args[:2]
    if not isinstance(top, Node) or not isinstance(total, Node) or node.kwargs:
        return None
    if top.target is not aten.exp.default or total.target is not aten.sum.dim_IntList or total.kwargs:
        return None
    dims, keep = total.args[1], len(total.args) > 2 and total.args[2]
    if len(dims) != 1 or not keep or not same_value(top, total.args[0]):  # type: ignore[arg-type]
        return None
    dim, source = int(dims[0]), _source(top)  # type: ignore[index,arg-type]
    return _softmax(node, _unshifted(source, dim) or source, dim)


def _complex_product(node: Node) -> Node | None:
    """``view_as_real(view_as_complex(x) * y)`` in real arithmetic (rotary embeddings after Llama's original code)."""
    product = _source(node)
    if product.op != "call_function" or product.target is not aten.mul.Tensor:
        return None
    for number, other in (product.args[:2], product.args[1::-1]):
        if isinstance(number, Node) and isinstance(other, Node) and number.target is aten.view_as_complex.default:
            if not dtype_of(other).is_complex:
                return None
            real = emit(node, aten.view_as_real.default, other)
            cos, sin = (emit(node, aten.select.int, real, -1, i) for i in (0, 1))
            x, y = (emit(node, aten.select.int, number.args[0], -1, i) for i in (0, 1))

            def mul(a: Node, b: Node) -> Node:
                return emit(node, aten.mul.Tensor, a, b)

            first = emit(node, aten.sub.Tensor, mul(x, cos), mul(y, sin))
            second = emit(node, aten.add.Tensor, mul(y, cos), mul(x, sin))
            return emit(node, aten.stack.default, [first, second], -1)
    return None


def _part(node: Node) -> Node | None:
    """One output of a split or unbind: a slice or a select."""
    whole, position = node.args
    if not isinstance(whole, Node) or whole.op != "call_function" or not isinstance(position, int):
        return None
    dim: Any
    if whole.target is aten.unbind.int:
        dim = whole.args[1] if len(whole.args) > 1 else 0
        return emit(node, aten.select.int, whole.args[0], dim, position)
    if whole.target in (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
        dim = whole.args[2] if len(whole.args) > 2 else whole.kwargs.get("dim", 0)
        widths = [v.shape[dim] for v in whole.meta["val"]]
        if not all(isinstance(w, int) for w in widths):
            return None
        start = sum(widths[:position])
        dim = int(dim) % len(shape_of(whole.args[0]))  # type: ignore[arg-type]
        return emit(node, aten.slice.Tensor, whole.args[0], dim, start, start + widths[position])
    return None


def _select(node: Node) -> Node | None:
    """A part of a tensor of which one part was replaced: the new part, or that of the tensor before (a pool of KV
    buffers that one layer after another writes to)."""
    source, dim, index = _source(node), node.args[1], node.args[2]
    rank = len(shape_of(source))
    part = (int(dim) % rank, index)  # type: ignore[arg-type]
    while source.op == "call_function" and source.target is aten.select_scatter.default:
        before, new, where, at = source.args
        if not isinstance(index, int) or not isinstance(at, int) or min(index, at) < 0:
            break
        if int(where) % rank != part[0]:  # type: ignore[arg-type]
            break
        assert isinstance(before, Node) and isinstance(new, Node)
        if at == index:
            return new if dtype_of(new) == dtype_of(node) else None
        source = before
    return None if source is node.args[0] else emit(node, aten.select.int, source, *node.args[1:])


RULES: dict[object, Rule] = {
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.lift_fresh_copy.default: _identity,
    aten._to_copy.default: _same_type,
    torch.ops.prims.convert_element_type.default: _converted,
    aten.expand.default: _same_shape,
    aten.slice.Tensor: _whole_slice,
    aten.slice_scatter.default: _whole_scatter,
    aten.copy.default: _copy,
    aten.cat.default: _cat,
    aten.dropout.default: _no_dropout,
    aten.softmax.int: _softmax_function,
    aten._softmax.default: _shifted_softmax,
    aten.div.Tensor: _decomposed_softmax,
    aten.view_as_real.default: _complex_product,
    aten.select.int: _select,
    operator.getitem: _part,
}


def _laid_out_as(node: Node, replacement: Node) -> Node:
    """``replacement`` with the strides of ``node``, for which the views after it were traced."""
    wanted, given = node.meta["val"], replacement.meta["val"]
    pairs = zip(wanted.shape, wanted.stride(), given.stride(), strict=True)
    if all(same(size, 1) or same(a, b) for size, a, b in pairs):
        return replacement
    order = sorted(range(wanted.dim()), key=lambda d: (-_hint(wanted.stride(d)), d))
    if order != sorted(order):
        replacement = emit(node, aten.permute.default, replacement, order)
    replacement = emit(node, aten.clone.default, replacement, memory_format=torch.contiguous_format)
    if order != sorted(order):
        inverse = [order.index(d) for d in range(len(order))]
        replacement = emit(node, aten.permute.default, replacement, inverse)
    return replacement


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else size.node.hint


def canonicalize(gm: GraphModule) -> GraphModule:
    """Apply :data:`RULES` in graph order, in place, and drop dead nodes."""
    outputs = {a for n in gm.graph.nodes if n.op == "output" for a in n.all_input_nodes}
    for node in list(gm.graph.nodes):
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        # An output must stay a tensor of its own: returning a graph input is another contract.
        if node in outputs and rule in (
            _identity,
            _same_type,
            _converted,
            _same_shape,
            _whole_slice,
            _whole_scatter,
            _copy,
            _cat,
            _no_dropout,
            _part,
            _select,
        ):
            continue
        replacement = rule(node)
        if replacement is not None:
            replacement = _laid_out_as(node, replacement)
            node.replace_all_uses_with(replacement)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
