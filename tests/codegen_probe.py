"""Runs generated mask and score functions in Triton's interpreter, next to what they mean in PyTorch."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from sals_compile.kernels import codegen
from sals_compile.kernels.index_expr import KV, SCORE, B, H, Modifier, Q, const, evaluate, integer, load, make

_PAST = make("add", Q, load(0))
_CAUSAL = make("le", KV, _PAST)

MODIFIERS = {
    "none": Modifier(),
    "causal, softcap": Modifier(_CAUSAL, make("mul", const(3.0), make("tanh", make("div", SCORE, const(3.0))))),
    "window, padding, bias": Modifier(
        make("and", make("and", _CAUSAL, make("gt", KV, make("sub", _PAST, integer(0)))), make("not", load(2, B, KV))),
        make("add", SCORE, load(1, B, H, Q, KV)),
    ),
    "chunks, alibi": Modifier(
        make("eq", make("floordiv", KV, const(16)), make("floordiv", _PAST, const(16))),
        make("sub", SCORE, make("mul", load(3, H), make("abs", make("sub", KV, Q)))),
    ),
    "remainders of negatives": Modifier(
        make("or", make("lt", make("mod", make("sub", Q, KV), const(5)), const(2)), make("ge", H, const(3))),
        make("where", make("lt", KV, const(9)), make("exp", make("neg", SCORE)), const(-math.inf)),
    ),
    "booleans": Modifier(
        make("xor", load(2, B, KV), make("ne", H, const(1))), make("max", SCORE, make("log", const(2.5)))
    ),
    "nothing": Modifier(const(False)),
}


@triton.jit
def _probe(
    scores, allowed, bounds, capacity, args, MASK_FN: tl.constexpr, SCORE_FN: tl.constexpr, UPPER_FN: tl.constexpr,
    LOWER_FN: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    q = tl.program_id(1)
    h = tl.arange(0, 4)[:, None]
    kv = tl.arange(0, 64)[None, :]
    inside = tl.minimum(kv, capacity - 1)
    at = ((b * tl.num_programs(1) + q) * 4 + h) * 64 + kv
    tl.store(scores + at, SCORE_FN(tl.load(scores + at), b, h, q, inside, args) + tl.zeros((4, 64), tl.float32))
    tl.store(allowed + at, ((kv < capacity) & MASK_FN(b, h, q, inside, args) & (h >= 0)).to(tl.int8))
    tl.store(bounds + (b * tl.num_programs(1) + q) * 2, LOWER_FN(b, q, args))
    tl.store(bounds + (b * tl.num_programs(1) + q) * 2 + 1, UPPER_FN(b, q, capacity, args))


def check(capacity: int = 60) -> None:
    """Every modifier: the functions agree with ``evaluate``, and the bounds hold."""
    tensors = [torch.tensor(30), torch.randn(2, 4, 3, 64), torch.rand(2, 64) < 0.3, torch.randn(4)]
    integers = [13]
    indices = {
        "b": torch.arange(2).view(-1, 1, 1, 1),
        "q": torch.arange(3).view(1, -1, 1, 1),
        "h": torch.arange(4).view(1, 1, -1, 1),
        "kv": torch.arange(64).clamp_max(capacity - 1).view(1, 1, 1, -1),
    }
    for name, modifier in MODIFIERS.items():
        generated = codegen.generate(modifier.serialized, tensors)
        before = torch.randn(2, 3, 4, 64)
        scores, allowed = before.clone(), torch.empty(2, 3, 4, 64, dtype=torch.int8)
        bounds = torch.empty(2, 3, 2, dtype=torch.int32)
        _probe[(2, 3)](
            scores, allowed, bounds, capacity, codegen.arguments(tensors, integers), generated.mask_fn,
            generated.score_fn, generated.upper_fn, generated.lower_fn,
        )  # fmt: skip
        expected = evaluate(modifier.score, indices | {"score": before}, tensors, integers).expand_as(before)
        torch.testing.assert_close(scores, expected.float(), msg=name)
        mask = evaluate(modifier.mask, indices, tensors, integers) & (torch.arange(64) < capacity)
        mask = mask.expand_as(before)
        assert torch.equal(allowed.bool(), mask), name
        kv, some = torch.arange(64), mask.any(2)
        assert not (some & ((kv < bounds[..., :1]) | (kv >= bounds[..., 1:]))).any(), name
