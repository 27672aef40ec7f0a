"""The whole path on a GPU: Triton operators under Inductor, CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from test_exact import compiled
from tiny import llama, rollout

import sals_compile
from sals_compile.kernels import dispatch

pytestmark = pytest.mark.gpu

SMALL = {"budget": 96, "sinks": 4, "recents": 32}


def cuda_cache(model, capacity, batch):
    from transformers import StaticCache

    c = model.config
    cache = StaticCache(config=c, max_cache_len=capacity)
    cache.early_initialization(batch, c.num_key_value_heads, c.head_dim, model.dtype, "cuda")
    return cache


def run(model, forward, tokens, cuts, capacity=320):
    return rollout(forward, tokens, cuts, cuda_cache(model, capacity, tokens.shape[0]))


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (2, 260), device="cuda")


CUTS = [240, *range(241, 250), 254, *range(255, 261)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_exact_equals_dense(tokens, dtype, lowering):
    model = llama(8, 2, 64, dtype=dtype).cuda()
    expected = run(model, model.forward, tokens, CUTS)
    actual = run(model, compiled(model.forward, attention="exact", lowering=lowering), tokens, CUTS)
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < (5e-3 if dtype == torch.float32 else 4e-2), float(error)  # tf32 products in fp32 kernels


@pytest.mark.parametrize("options", [{}, {"attention": "reconstruct"}, {"head_score": "max"}])
def test_triton_agrees_with_the_reference(tokens, options, monkeypatch):
    model = llama(8, 2, 64, dtype=torch.bfloat16).cuda()
    results = []
    for triton in (True, False):
        monkeypatch.setattr(dispatch, "has_triton", lambda kept=triton: kept)
        results.append(run(model, compiled(model.forward, **SMALL, **options), tokens, CUTS))
    error = (results[0] - results[1]).float().norm() / results[1].float().norm()
    assert error < 5e-2, float(error)


def test_cuda_graphs_change_nothing(tokens):
    model = llama(8, 2, 64, dtype=torch.bfloat16).cuda()
    plain = run(model, compiled(model.forward, lowering="inductor", **SMALL), tokens, CUTS)
    graphed = run(model, compiled(model.forward, lowering="inductor", cudagraphs=True, **SMALL), tokens, CUTS)
    error = (plain - graphed).float().norm() / plain.float().norm()
    assert error < 2e-2, float(error)


def test_prefill_then_decode_reports_sals(tokens):
    model = llama(8, 2, 64, dtype=torch.bfloat16).cuda()
    run(model, compiled(model.forward, lowering="inductor", **SMALL), tokens, CUTS)
    assert all(s.status == "sals" for r in sals_compile.compiled_reports() for s in r.sites)
