"""A model in plain PyTorch, in gpt-fast's manner: KV buffers of its own, or a LatentCache in their place."""

from __future__ import annotations

import copy

import pytest
import torch
from test_exact import assert_close, compiled
from torch import nn

from sals_compile.integrations.modules import LatentCache

HEADS, KV_HEADS, DIM, CAPACITY = 4, 2, 16, 72
SMALL = {"budget": 24, "sinks": 2, "recents": 8}


class KVCache(nn.Module):
    def __init__(self, batch):
        super().__init__()
        shape = (batch, KV_HEADS, CAPACITY, DIM)
        self.register_buffer("k_cache", torch.zeros(shape))
        self.register_buffer("v_cache", torch.zeros(shape))

    def update(self, input_pos, k_val, v_val):
        self.k_cache[:, :, input_pos] = k_val
        self.v_cache[:, :, input_pos] = v_val
        return self.k_cache, self.v_cache


def rotate(x, angles):
    pairs = x.unflatten(-1, (-1, 2))
    cos, sin = angles.cos(), angles.sin()
    first, second = pairs[..., 0], pairs[..., 1]
    return torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)


class Attention(nn.Module):
    def __init__(self, kv_cache):
        super().__init__()
        self.wqkv = nn.Linear(HEADS * DIM, (HEADS + 2 * KV_HEADS) * DIM, bias=False)
        self.wo = nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)
        self.kv_cache = kv_cache

    def forward(self, x, angles, mask, input_pos):
        batch, length, _ = x.shape
        q, k, v = self.wqkv(x).split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], -1)
        q, k, v = (t.view(batch, length, -1, DIM).transpose(1, 2) for t in (q, k, v))
        q, k = rotate(q, angles), rotate(k, angles)
        k, v = self.kv_cache.update(input_pos, k, v)
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(batch, length, -1))


class Model(nn.Module):
    def __init__(self, caches):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(c) for c in caches)
        self.register_buffer("causal_mask", torch.ones(CAPACITY, CAPACITY, dtype=torch.bool).tril())
        self.register_buffer("freqs", 1.0 / 1000 ** (torch.arange(0, DIM, 2) / DIM))

    def forward(self, x, input_pos):
        mask = self.causal_mask[None, None, input_pos]
        angles = input_pos[:, None] * self.freqs
        for layer in self.layers:
            x = x + layer(x, angles, mask, input_pos)
        return x


@torch.no_grad()
def rolled(forward, x, cuts, start=0):
    pieces = []
    for end in cuts:
        pieces.append(forward(x[:, start:end], torch.arange(start, end)))
        start = end
    return torch.cat(pieces, 1)


def test_exact_mode_equals_the_models_own_buffers():
    x = torch.randn(2, 60, HEADS * DIM)
    dense = Model([KVCache(2), KVCache(2)])
    cache = LatentCache(2, CAPACITY)
    run = compiled(Model(cache.layers), attention="exact")
    cuts = [20, 21, 22, 40, 41]
    assert_close(rolled(run, x, cuts), rolled(dense, x, cuts), torch.float32)
    # A second text from slot 0 on, without a word to the cache: its prefill is read for its slots.
    other = torch.randn(2, 60, HEADS * DIM)
    assert_close(rolled(run, other, [20, 21]), rolled(dense, other, [20, 21]), torch.float32)
    assert cache.tokens == 21
    cache.crop(-5)
    again = torch.randn(2, 60, HEADS * DIM)
    again[:, :16] = other[:, :16]
    assert_close(rolled(run, again, [17, 18, 30], 16), rolled(dense, again, [17, 18, 30], 16), torch.float32)


def test_memory_and_forks():
    cache = LatentCache(2, 4096)
    model = Model(cache.layers)
    mask = torch.ones(4096, 4096, dtype=torch.bool).tril()
    model.causal_mask = mask
    run = compiled(model, **SMALL)
    x = torch.randn(1, 64, HEADS * DIM)
    rolled(run, x, [50, 51])
    dense = 2 * 2 * KV_HEADS * 4096 * DIM * 4
    rows = sum(t.nbytes for group in cache.rows for t in vars(group).values())  # fp32, once for all layers
    assert cache.phase == "latent" and rows < cache.nbytes() < rows + 0.45 * dense
    twin = copy.deepcopy(cache)
    assert isinstance(twin, LatentCache) and twin.tokens == 51
    for layer, own in zip(model.layers, twin.layers, strict=True):
        layer.kv_cache = own
    forked = rolled(run, x, [52, 53], 51)
    for layer, own in zip(model.layers, cache.layers, strict=True):
        layer.kv_cache = own
    torch.testing.assert_close(rolled(run, x, [52, 53], 51), forked)


def test_calls_that_rotate_differently_do_not_share_a_cache(monkeypatch):
    turn = rotate
    monkeypatch.setitem(globals(), "rotate", lambda x, angles: turn(x, angles) if x.shape[2] > 1 else x * 1.0)
    cache = LatentCache(2, CAPACITY)
    run = compiled(Model(cache.layers), **SMALL)
    x = torch.randn(1, 60, HEADS * DIM)
    with pytest.raises(RuntimeError, match=r"40 tokens.*interleaved of 16 dims.*rotates them as none.*StaticCache"):
        rolled(run, x, [40, 41])


def test_errors():
    cache = LatentCache(2, CAPACITY)
    model = Model(cache.layers)
    x = torch.randn(1, 60, HEADS * DIM)
    with pytest.raises(RuntimeError, match=r"LatentCache.*only as latents"):
        rolled(model, x, [20])
    run = compiled(model, attention="exact")
    with pytest.raises(RuntimeError, match=r"from slot 5 on and the cache holds 0 tokens.*no gap"):
        rolled(run, x, [25], 5)
