"""One spelling for what has several: a table of rewrites that change no value.

The matcher tracks axes and scales itself, so this pass only removes what does nothing (aliases, casts to the same type, expands to the same
shape, dropout that is off) and gives composite operators their one ATen name. Each rule returns the node that replaces the one given, or None.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from .graph import aten, dtype_of, same, shape_of

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
    extra = {k: v for k, v in node.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory", "non_blocking")}
    kept = dtype_of(source) == dtype_of(node) and source.meta["val"].device == node.meta["val"].device
    return source if kept and not any(v is not None for v in extra.values()) else None


def _same_shape(node: Node) -> Node | None:
    source = _source(node)
    a, b = shape_of(source), shape_of(node)
    return source if len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True)) else None


def _no_dropout(node: Node) -> Node | None:
    """``dropout`` in eval mode or with p = 0."""
    return _source(node) if not node.args[2] or node.args[1] == 0 else None


def _softmax(node: Node) -> Node | None:
    dtype = node.args[2] if len(node.args) > 2 else node.kwargs.get("dtype")
    if dtype not in (None, dtype_of(_source(node))):
        return None
    with node.graph.inserting_before(node):
        new = node.graph.call_function(aten._softmax.default, (_source(node), node.args[1], False))
    new.meta = dict(node.meta)
    return new


RULES: dict[object, Rule] = {
    aten.alias.default: _identity,
    aten.detach.default: _identity,
    aten.lift_fresh_copy.default: _identity,
    aten._to_copy.default: _same_type,
    aten.expand.default: _same_shape,
    aten.dropout.default: _no_dropout,
    aten.softmax.int: _softmax,
}


def canonicalize(gm: GraphModule) -> GraphModule:
    """Apply :data:`RULES` in graph order, in place, and drop dead nodes."""
    outputs = {a for n in gm.graph.nodes if n.op == "output" for a in n.all_input_nodes}
    for node in list(gm.graph.nodes):
        rule = RULES.get(node.target) if node.op == "call_function" else None
        if rule is None or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        # An output must stay a tensor of its own: returning a graph input is another contract.
        if node in outputs and rule is not _softmax:
            continue
        replacement = rule(node)
        if replacement is not None:
            node.replace_all_uses_with(replacement)
            gm.graph.erase_node(node)
    gm.graph.eliminate_dead_code()
    gm.recompile()
    return gm
