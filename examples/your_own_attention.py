"""Attention written your own way is found too: this one uses matmul, a soft cap, a sliding window and interleaved
rotary pairs.

    python examples/your_own_attention.py
    sals explain examples/your_own_attention.py:example
"""

import torch
from torch import nn

import sals_compile


class MyAttention(nn.Module):
    """Causal attention within a window, over a static cache ``[B, S, N, D]``: tokens first, unlike most."""

    def __init__(self, heads=8, kv_heads=2, dim=32, window=800, cap=30.0):
        super().__init__()
        self.heads, self.kv_heads, self.dim, self.window, self.cap = heads, kv_heads, dim, window, cap
        self.qkv = nn.Linear(heads * dim, (heads + 2 * kv_heads) * dim)

    def rotate(self, t, position):
        angle = position[:, None] / 1000 ** (torch.arange(0, self.dim, 2) / self.dim)
        even, odd = t[..., 0::2], t[..., 1::2]
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def forward(self, x, start, keys, values):
        batch, length, _ = x.shape
        position = torch.arange(length) + start
        q, k, v = self.qkv(x).view(batch, length, -1, self.dim).split((self.heads, self.kv_heads, self.kv_heads), 2)
        keys.index_copy_(1, position, self.rotate(k, position))
        values.index_copy_(1, position, v)
        q = self.rotate(q, position).view(batch, length, self.kv_heads, -1, self.dim)
        scores = torch.einsum("blngd,bsnd->bngls", q, keys) * self.dim**-0.5
        scores = self.cap * torch.tanh(scores / self.cap)
        slot = torch.arange(keys.shape[1])
        seen = (slot <= position[:, None]) & (slot > position[:, None] - self.window)
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        return torch.einsum("bngls,bsnd->blngd", weights, values).reshape(batch, length, -1)


def example():
    """What ``sals explain FILE.py:example`` calls: a callable and its arguments."""
    torch.manual_seed(0)
    layer = MyAttention().eval()
    cache = [torch.zeros(1, 2048, layer.kv_heads, layer.dim) for _ in range(2)]
    return layer, (torch.randn(1, 1, layer.heads * layer.dim), torch.tensor(1500), *cache)


if __name__ == "__main__":
    layer, arguments = example()
    found = sals_compile.explain(layer, *arguments)
    print(found)
    (site,) = found.sites
    print(f"\nfound: rotary {site.rotary!r}; mask {site.mask}; score {site.score or 'as it is'}")
    print(f"proved: the record and your code agree to {site.verified_error:.0e} on random data")
    if site.status == "declined":
        raise SystemExit(f"declined: {site.reason}")
