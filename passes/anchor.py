"""Before AOT: attention calls become opaque operators that survive tracing.

``scaled_dot_product_attention`` is composite: AOT would decompose it into a device-specific operator whose mask is
already converted. Its anchored twin ``sals::scaled_dot_product_attention`` has the same schema and meaning and stays
whole, so that the match sees what the model wrote. (``flex_attention`` is a higher-order operator that tracing keeps by
itself.)
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..kernels import ops

_SDPA = (torch._C._nn.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention)
_POSITIONAL = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def anchor(gm: GraphModule) -> int:
    """Anchor every ``scaled_dot_product_attention`` of a Dynamo graph, in place, nested graphs included. Returns how
    many."""
    count = 0
    for module in gm.modules():
        if not isinstance(module, GraphModule):
            continue
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in _SDPA:
                _anchor_node(node)
                count += 1
            elif node.op == "call_function" and node.target is torch._transformer_encoder_layer_fwd:
                node.target = _encoder_layer
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


#: How a cache that the graph itself creates (transformers' lazy initialisation) comes to be.
_CREATED = (torch.zeros, "new_zeros")

_WRITES = ("index_copy_", "index_put_", "scatter_", "slice_scatter_", "copy_", "__setitem__")


def pin_capacities(gm: GraphModule) -> int:
    """Specialise the shapes of KV buffers, batch aside, so that a second cache of another length does not make them
    symbolic.

    A static cache's capacity is a constant of the compiled code (the latents beside it have the same number of slots);
    without this, Dynamo's automatic dynamic shapes would turn it into a symbol and the site would be declined. Adds
    guards, so another capacity recompiles. Returns how many sizes were pinned.
    """
    pinned = 0
    for node in gm.graph.nodes:
        name = node.target if node.op == "call_method" else getattr(node.target, "__name__", "")
        if name not in _WRITES and name != "setitem":
            continue
        buffer = node.args[0]
        while isinstance(buffer, Node) and buffer.op in ("call_function", "call_method") and buffer.args:
            if not isinstance(buffer.args[0], Node) or buffer.target in _CREATED:
                break
            buffer = buffer.args[0]  # a view of the buffer is written
        made = isinstance(buffer, Node) and (buffer.op == "placeholder" or buffer.target in _CREATED)
        value = buffer.meta.get("example_value") if made else None
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            for size in value.shape[1:]:
                if isinstance(size, torch.SymInt):
                    int(size)  # guards on the value
                    pinned += 1
    return pinned


@contextlib.contextmanager
def anchoring() -> Iterator[None]:
    """While AOT traces, functions that call attention themselves (``nn.MultiheadAttention``) call the anchored
    operator."""
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention
    anchored, tracing = ops.operator("scaled_dot_product_attention"), threading.get_ident()

    def attention(*args: Any, **kwargs: Any) -> Any:
        # Other threads may be training: theirs stays PyTorch's own.
        return (anchored if threading.get_ident() == tracing else original)(*args, **kwargs)

    functional.scaled_dot_product_attention = attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _encoder_layer(
    x: Tensor,
    width: int,
    heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    gelu: bool,
    norm_first: bool,
    eps: float,
    norm1_weight: Tensor,
    norm1_bias: Tensor,
    norm2_weight: Tensor,
    norm2_bias: Tensor,
    in_weight: Tensor,
    in_bias: Tensor,
    up_weight: Tensor,
    up_bias: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """``nn.TransformerEncoderLayer``'s fused inference operator, written out
    (aten/native/transformers/transformer.cpp)."""
    functional = torch.nn.functional

    def norm(y: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.layer_norm(y, (width,), weight, bias, eps)

    def attention(y: Tensor) -> Tensor:
        batch, length, _ = y.shape
        q, k, v = (
            t.view(batch, length, heads, -1).transpose(1, 2)
            for t in functional.linear(y, qkv_weight, qkv_bias).chunk(3, -1)
        )
        attended = None
        if mask is not None:  # true (or any other number than zero): masked
            attended = ~mask.to(torch.bool)
            if mask_type == 1:
                attended = attended[:, None, None, :]
        out = ops.operator("scaled_dot_product_attention")(q, k, v, attended)
        return functional.linear(out.transpose(1, 2).reshape(batch, length, width), out_weight, out_bias)

    def feed_forward(y: Tensor) -> Tensor:
        inner = functional.linear(y, in_weight, in_bias)
        return functional.linear(functional.gelu(inner) if gelu else functional.relu(inner), up_weight, up_bias)

    if norm_first:
        x = x + attention(norm(x, norm1_weight, norm1_bias))
        return x + feed_forward(norm(x, norm2_weight, norm2_bias))
    x = norm(x + attention(x), norm1_weight, norm1_bias)
    return norm(x + feed_forward(x), norm2_weight, norm2_bias)
