"""Small models for tests: a Llama of transformers with random weights, and a bare attention module of our own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

warnings.filterwarnings("ignore", message=".*past_key_values.*")


def llama(heads: int = 4, kv_heads: int = 2, dim: int = 16, layers: int = 2, impl: str = "sdpa", dtype=torch.float32):
    """A random Llama: hidden size ``heads * dim``, vocabulary 64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=heads * dim,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        vocab_size=64,
        max_position_embeddings=512,
        attn_implementation=impl,
    )
    return LlamaForCausalLM(config).eval().to(dtype)


def static_cache(model: Any, capacity: int, batch: int | None = 1) -> StaticCache:
    """A static cache; allocated now unless ``batch`` is None (then the first call allocates it)."""
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    if batch is not None:
        c = model.config
        cache.early_initialization(batch, c.num_key_value_heads, c.head_dim, model.dtype, "cpu")
    return cache


@torch.no_grad()
def rollout(forward: Any, tokens: Tensor, cuts: list[int], cache: Any, **kwargs: Any) -> Tensor:
    """Logits of ``tokens [B, S]`` fed in pieces that end at ``cuts``, through one cache."""
    pieces, start = [], 0
    for end in cuts:
        # CUDA graphs write every call's outputs to the same memory.
        pieces.append(forward(tokens[:, start:end], past_key_values=cache, **kwargs).logits.clone())
        start = end
    return torch.cat(pieces, 1)


class Attention(nn.Module):
    """Self-attention over a whole sequence ``[B, S, heads*dim]``, half-split rotary or none, SDPA or eager."""

    def __init__(self, heads: int, kv_heads: int, dim: int, rotary: bool, causal: bool, eager: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, dim
        self.rotary, self.causal, self.eager = rotary, causal, eager
        self.q = nn.Linear(heads * dim, heads * dim, bias=False)
        self.k = nn.Linear(heads * dim, kv_heads * dim, bias=True)
        self.v = nn.Linear(heads * dim, kv_heads * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query = self.q(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        key = self.k(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        value = self.v(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        if self.rotary:
            inverse = 1.0 / 1000 ** (torch.arange(0, self.dim, 2) / self.dim)
            angles = torch.arange(length)[:, None] * inverse
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            query, key = ((t * cos) + (_turn(t) * sin) for t in (query, key))
        groups = self.heads // self.kv_heads
        if not self.eager:
            gqa = groups > 1
            out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal, enable_gqa=gqa)
        else:
            key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
            scores = query @ key.transpose(-1, -2) / self.dim**0.5
            if self.causal:
                mask = torch.ones(length, length, dtype=torch.bool).tril()
                scores = scores.masked_fill(~mask, float("-inf"))
            out = scores.softmax(-1) @ value
        return out.transpose(1, 2).flatten(2)


def _turn(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class CachedAttention(nn.Module):
    """Self-attention with a static KV cache of its own arguments, as a decoder layer has: ``(x, start, keys, values) ->
    out``.

    ``mask``: ``bool``, ``additive`` or ``none`` (single-token calls only). Buffers are ``[B, N, S, D]``.
    """

    def __init__(self, heads: int, kv_heads: int, dim: int, rotary: bool, mask: str, eager: bool, scale: float) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.scale = heads, kv_heads, dim, scale
        self.rotary, self.mask, self.eager = rotary, mask, eager
        self.q = nn.Linear(heads * dim, heads * dim, bias=False)
        self.k = nn.Linear(heads * dim, kv_heads * dim, bias=False)
        self.v = nn.Linear(heads * dim, kv_heads * dim, bias=True)

    def forward(self, x: Tensor, start: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        batch, length, _ = x.shape
        slots = torch.arange(length) + start
        query = self.q(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        key = self.k(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        value = self.v(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2)
        if self.rotary:
            inverse = 1.0 / 1000 ** (torch.arange(0, self.dim, 2) / self.dim)
            angles = slots[:, None] * inverse
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            query, key = ((t * cos) + (_turn(t) * sin) for t in (query, key))
        keys.index_copy_(2, slots, key)
        values.index_copy_(2, slots, value)
        allowed = torch.arange(keys.shape[2])[None, :] <= slots[:, None]
        mask = allowed[None, None]
        if self.mask == "additive":
            mask = torch.where(mask, 0.0, torch.finfo(x.dtype).min).to(x.dtype)
        groups = self.heads // self.kv_heads
        if not self.eager:
            out = nn.functional.scaled_dot_product_attention(
                query, keys, values, mask, scale=self.scale, enable_gqa=groups > 1
            )
        else:
            wide, width = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
            scores = query @ wide.transpose(-1, -2) * self.scale
            scores = scores.masked_fill(~mask, float("-inf")) if self.mask == "bool" else mask + scores
            out = scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ width
        return out.transpose(1, 2).flatten(2)

    def rollout(self, forward: Any, x: Tensor, cuts: list[int], capacity: int) -> Tensor:
        """Outputs of ``x [B, S, C]`` fed in pieces that end at ``cuts`` through fresh buffers."""
        keys = torch.zeros(x.shape[0], self.kv_heads, capacity, self.dim, dtype=x.dtype)
        values, pieces, start = torch.zeros_like(keys), [], 0
        with torch.no_grad():
            for end in cuts:
                pieces.append(forward(x[:, start:end], torch.tensor(start), keys, values))
                start = end
        return torch.cat(pieces, 1)
