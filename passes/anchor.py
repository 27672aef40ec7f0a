"""Before AOT: attention calls become opaque operators that survive tracing.

``scaled_dot_product_attention`` is composite: AOT would decompose it into a device-specific operator whose mask is already converted. Its
anchored twin ``sals::scaled_dot_product_attention`` has the same schema and meaning and stays whole, so that the match sees what the model
wrote. (``flex_attention`` is a higher-order operator that tracing keeps by itself.)
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from ..kernels import ops

_SDPA = (torch._C._nn.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def anchor(gm: GraphModule) -> int:
    """Anchor every ``scaled_dot_product_attention`` of a Dynamo graph, in place, nested graphs included. Returns how many."""
    count = 0
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in _SDPA:
                _anchor_node(node)
                count += 1
        if count:
            module.recompile()
    return count


def _anchor_node(node: Node) -> None:
    arguments = dict(zip(_POSITIONAL, node.args, strict=False)) | dict(node.kwargs)
    keyword = {k: arguments.pop(k) for k in ("scale", "enable_gqa") if k in arguments}
    positional = tuple(
        arguments.get(n, d) for n, d in zip(_POSITIONAL, (None, None, None, None, 0.0, False), strict=True)
    )
    node.target = ops.operator("scaled_dot_product_attention")
    node.args, node.kwargs = positional, keyword


_WRITES = ("index_copy_", "index_put_", "scatter_", "slice_scatter_", "copy_", "__setitem__")


def pin_capacities(gm: GraphModule) -> int:
    """Specialise the shapes of KV buffers, batch aside, so that a second cache of another length does not make them symbolic.

    A static cache's capacity is a constant of the compiled code (the latents beside it have the same number of slots); without this, Dynamo's
    automatic dynamic shapes would turn it into a symbol and the site would be declined. Adds guards, so another capacity recompiles. Returns how
    many sizes were pinned.
    """
    pinned = 0
    for node in gm.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name not in _WRITES and name != "setitem":
            continue
        buffer = node.args[0]
        while isinstance(buffer, Node) and buffer.op in ("call_function", "call_method") and buffer.args:
            buffer = buffer.args[0]  # a view of the buffer is written
        value = buffer.meta.get("example_value") if isinstance(buffer, Node) and buffer.op == "placeholder" else None
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            for size in value.shape[1:]:
                if isinstance(size, torch.SymInt):
                    int(size)  # guards on the value
                    pinned += 1
    return pinned
