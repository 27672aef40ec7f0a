"""Sparse decoding of a forty-line Llama-like model: its static KV cache is found and taken over. Run it as it is."""

import torch
from torch import nn
from torch.nn import functional as F

import sals_compile


class Block(nn.Module):
    """Pre-norm attention with rotary embedding, grouped heads and a static cache; then a SwiGLU MLP."""

    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_heads * self.dim, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x, cos, sin, slots, keys, values):
        def heads(t, n):
            return t.view(*x.shape[:2], n, self.dim).transpose(1, 2)

        def rotate(t):
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat((-second, first), -1) * sin

        y = self.norm1(x)
        keys.index_copy_(2, slots, rotate(heads(self.k(y), self.kv_heads)))
        values.index_copy_(2, slots, heads(self.v(y), self.kv_heads))
        mask = torch.arange(keys.shape[2])[None, :] <= slots[:, None]
        query = rotate(heads(self.q(y), self.heads))
        y = F.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.gate(self.norm2(x))) * self.up(self.norm2(x)))


class Model(nn.Module):
    """Embedding, blocks, tied output; ``cache`` is a list of (keys, values) per block, each ``[1, kv_heads, capacity,
    dim]``.
    """

    def __init__(self, vocabulary=256, width=128, layers=2, heads=8, kv_heads=4, capacity=2048) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, kv_heads) for _ in range(layers))
        self.cache_shape = (2, 1, kv_heads, capacity, width // heads)
        self.register_buffer("frequency", 1e4 ** -(torch.arange(0, width // heads, 2) * heads / width))

    def new_cache(self):
        return [tuple(torch.zeros(self.cache_shape)) for _ in self.blocks]

    def forward(self, tokens, start, cache):
        slots = torch.arange(tokens.shape[1]) + start
        angles = (slots[:, None] * self.frequency).repeat(1, 2)
        x = self.embed(tokens)
        for block, (keys, values) in zip(self.blocks, cache, strict=True):
            x = block(x, angles.cos(), angles.sin(), slots, keys, values)
        return x @ self.embed.weight.T


@torch.no_grad()
def generate(forward, cache, prompt, steps):
    """Greedy: prefill ``prompt [1, S]``, then token by token. Returns logits ``[steps, vocabulary]``."""
    rows = [forward(prompt, torch.tensor(0), cache)[:, -1]]
    for position in range(prompt.shape[1], prompt.shape[1] + steps - 1):
        rows.append(forward(rows[-1].argmax(-1, keepdim=True), torch.tensor(position), cache)[:, -1])
    return torch.cat(rows)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, prompt = Model().eval(), torch.randint(0, 256, (1, 1000))
    fast = torch.compile(model, backend="sals", options={"budget": 256, "lowering": "eager"})
    dense, sparse = (generate(f, model.new_cache(), prompt, 16) for f in (model, fast))
    print(sals_compile.compiled_reports()[-1])
    print(f"16 tokens; relative difference of the logits to dense: {(sparse - dense).norm() / dense.norm():.4f}")
