"""The ``sals::*`` operators: schema, shapes under tracing, and which implementation runs where.

An operator's meaning is the function of the same name in ``reference.py``, which is also its implementation wherever no
other is registered. ``kernels/inductor.py`` compiles it for CPU; on CUDA and HIP the Triton kernels are registered by
``kernels/dispatch.py``; :func:`decompositions` hands it to any other target (MLIR).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from . import reference

_LATENTS = "Tensor codes, Tensor scales, Tensor value_codes, Tensor value_scales"
_RING = "Tensor ring_key, Tensor ring_value, Tensor ring_slots"
_MODIFIER = "str modifier, Tensor[] tensors, SymInt[] integers"

SCHEMAS: dict[str, str] = {
    "record_rows": (
        "(Tensor(a!) cos, Tensor(b!) sin, Tensor(c!) block_cos, Tensor(d!) block_sin, Tensor(e!) ring_slots, "
        "Tensor new_cos, Tensor new_sin, Tensor slots) -> ()"
    ),
    "encode": (
        "(Tensor(a!) codes, Tensor(b!) scales, Tensor(c!) value_codes, Tensor(d!) value_scales, Tensor(e!) ring_key, "
        "Tensor(f!) ring_value, Tensor key_pre, Tensor key, Tensor value, Tensor encoder, Tensor value_transform, "
        "Tensor slots) -> ()"
    ),
    "observe": "(Tensor(a!) query_moment, Tensor query_pre) -> ()",
    "observe_keys": "(Tensor(a!) key_moment, Tensor key_pre) -> ()",
    "score": (
        "(Tensor query, Tensor codes, Tensor scales, Tensor decoder, Tensor block_cos, Tensor block_sin, "
        f"Tensor ring_slots, Tensor slots, {_MODIFIER}, int capacity, int score_rank, int sinks, str rotary, "
        "str head_score='sum', float scale=1.0) -> Tensor"
    ),
    "select": "(Tensor scores, int k) -> Tensor",
    "score_select": (
        "(Tensor query, Tensor codes, Tensor scales, Tensor decoder, Tensor block_cos, Tensor block_sin, "
        f"Tensor ring_slots, Tensor slots, {_MODIFIER}, int capacity, int score_rank, int sinks, str rotary, "
        "int k, str head_score='sum', float scale=1.0) -> Tensor"
    ),
    "attend": (
        f"(Tensor query, Tensor indices, {_LATENTS}, {_RING}, Tensor cos, Tensor sin, Tensor decoder, "
        f"Tensor value_transform, {_MODIFIER}, float scale, str rotary, Tensor? sink_logits=None, "
        "Tensor? decoder_codes=None, Tensor? decoder_scales=None) -> Tensor"
    ),
    "decode": (
        "(Tensor(a!) codes, Tensor(b!) scales, Tensor(c!) value_codes, Tensor(d!) value_scales, Tensor(e!) ring_key, "
        "Tensor(f!) ring_value, Tensor query, Tensor key_pre, Tensor key, Tensor value, Tensor encoder, "
        "Tensor decoder, Tensor value_transform, Tensor slots, Tensor ring_slots, Tensor cos, Tensor sin, "
        f"Tensor block_cos, Tensor block_sin, {_MODIFIER}, int capacity, int score_rank, int sinks, str rotary, int k, "
        "float scale, str head_score='sum', Tensor? sink_logits=None, Tensor? decoder_codes=None, "
        "Tensor? decoder_scales=None) -> Tensor"
    ),
    "reconstruct": (
        f"(Tensor query, {_LATENTS}, {_RING}, Tensor cos, Tensor sin, Tensor decoder, Tensor value_transform, "
        f"{_MODIFIER}, int capacity, float scale, str rotary, Tensor? sink_logits=None) -> Tensor"
    ),
    "materialize": (
        f"({_LATENTS}, {_RING}, Tensor cos, Tensor sin, Tensor decoder, Tensor value_transform, int capacity, "
        "str rotary) -> (Tensor, Tensor)"
    ),
    "dense_attention": (
        f"(Tensor query, Tensor key, Tensor value, {_MODIFIER}, float scale, Tensor? sink_logits=None) -> Tensor"
    ),
    "block_select": (
        "(Tensor query, Tensor key_pre, Tensor cos, Tensor sin, Tensor encoder, Tensor decoder, "
        f"{_MODIFIER}, int query_block, int k, int sinks, int recents, str rotary) -> Tensor"
    ),
    "block_attend": (
        f"(Tensor query, Tensor key, Tensor value, Tensor indices, {_MODIFIER}, int query_block, float scale, "
        "Tensor? sink_logits=None) -> Tensor"
    ),
    # torch._C._nn.scaled_dot_product_attention, kept whole through AOT tracing (passes/anchor.py).
    "scaled_dot_product_attention": (
        "(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, float dropout_p=0.0, bool is_causal=False, "
        "*, float? scale=None, bool enable_gqa=False) -> Tensor"
    ),
}

_library = Library("sals", "DEF")
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The anchored operator means PyTorch's own: ``[B,H,L,D]`` over keys and values ``[B,N,S,D]``."""
    # Not torch.nn.functional's: passes/anchor.py points that name here while it traces.
    out = torch._C._nn.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    # Views after it were traced for the layout that the shape function below promises; not every implementation returns
    # it.
    return out.transpose(1, 2).contiguous().transpose(1, 2) if out.dim() == 4 else out


def _fake_score(query: Tensor, codes: Tensor, *_: Any) -> Tensor:
    return query.new_empty((query.shape[0], query.shape[1], codes.shape[1]), dtype=torch.float32)


def _fake_select(scores: Tensor, k: int) -> Tensor:
    return scores.new_empty((*scores.shape[:-1], k), dtype=torch.int32)


def _fake_score_select(query: Tensor, *arguments: Any, **named: Any) -> Tensor:
    k = named["k"] if "k" in named else arguments[14]
    return query.new_empty((query.shape[0], query.shape[1], k), dtype=torch.int32)


def _fake_like_query(query: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_empty(query.shape)


def _fake_decode(*arguments: Any, **named: Any) -> Tensor:
    query = named["query"] if "query" in named else arguments[6]
    return query.new_empty(query.shape)


def _fake_value_width(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _fake_materialize(
    codes: Tensor,
    scales: Tensor,
    value_codes: Tensor,
    value_scales: Tensor,
    ring_key: Tensor,
    ring_value: Tensor,
    ring_slots: Tensor,
    cos: Tensor,
    sin: Tensor,
    decoder: Tensor,
    value_transform: Tensor,
    capacity: int,
    rotary: str,
) -> tuple[Tensor, Tensor]:
    shape = (ring_key.shape[0], capacity, *ring_key.shape[2:])
    return ring_key.new_empty(shape), ring_value.new_empty(shape)


def _fake_block_select(
    query: Tensor,
    key_pre: Tensor,
    cos: Tensor,
    sin: Tensor,
    encoder: Tensor,
    decoder: Tensor,
    modifier: str,
    tensors: Sequence[Tensor],
    integers: Sequence[int],
    query_block: int,
    k: int,
    *_: Any,
) -> Tensor:
    blocks = (query.shape[1] + query_block - 1) // query_block
    return query.new_empty((query.shape[0], blocks, k), dtype=torch.int32)


def _fake_sdpa(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    # Laid out [B, L, H, D] underneath, as PyTorch's fused kernels return it, so that views after it stay views.
    shape = (*query.shape[:-1], value.shape[-1])
    if query.dim() != 4:
        return query.new_empty(shape)
    return query.new_empty((shape[0], shape[2], shape[1], shape[3])).transpose(1, 2)


def _nothing(*_: Any, **__: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "record_rows": _nothing,
    "encode": _nothing,
    "observe": _nothing,
    "observe_keys": _nothing,
    "score": _fake_score,
    "select": _fake_select,
    "score_select": _fake_score_select,
    "attend": _fake_like_query,
    "decode": _fake_decode,
    "reconstruct": _fake_like_query,
    "materialize": _fake_materialize,
    "dense_attention": _fake_value_width,
    "block_select": _fake_block_select,
    "block_attend": _fake_value_width,
    "scaled_dot_product_attention": _fake_sdpa,
}


def meaning(name: str) -> Callable[..., Any]:
    """The reference function of operator ``sals::name``."""
    return scaled_dot_product_attention if name == "scaled_dot_product_attention" else getattr(reference, name)


for _name in SCHEMAS:
    _library.impl(_name, meaning(_name), "CompositeExplicitAutograd")
    register_fake(f"sals::{_name}", _FAKES[_name], lib=_library)


def shapes(name: str) -> Callable[..., Any]:
    """The function that gives operator ``sals::name``'s outputs under tracing: shapes and types, no values."""
    return _FAKES[name]


def operator(name: str) -> torch._ops.OpOverload:
    """``torch.ops.sals.<name>.default``."""
    return getattr(torch.ops.sals, name).default


def is_sals(target: Any) -> bool:
    """Whether a node's target is one of these operators."""
    return isinstance(target, torch._ops.OpOverload) and target.namespace == "sals"


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Every operator by its reference meaning, for a target without kernels of its own."""
    return {operator(name): meaning(name) for name in SCHEMAS}
