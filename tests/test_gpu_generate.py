"""A SalsCache on a GPU: Triton operators, CUDA graphs, memory by the allocator."""

from __future__ import annotations

import pytest
import torch
from test_exact import compiled
from test_gpu_decode import CUTS, SMALL, run
from tiny import llama, rollout

from sals_compile.integrations.transformers import SalsCache

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def through(model, tokens, cuts, capacity=320, **options):
    cache = SalsCache(model.config, capacity, device="cuda")
    return rollout(compiled(model.forward, **options), tokens, cuts, cache), cache


@pytest.fixture
def tokens():
    return torch.randint(0, 64, (2, 260), device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lowering", ["eager", "inductor"])
def test_exact_equals_dense(tokens, dtype, lowering):
    model = llama(8, 2, 64, dtype=dtype).cuda()
    expected = run(model, model.forward, tokens, CUTS)
    actual, _ = through(model, tokens, CUTS, attention="exact", lowering=lowering)
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < (5e-3 if dtype == torch.float32 else 4e-2), float(error)  # tf32 products in fp32 kernels


def test_cuda_graphs_change_nothing(tokens):
    model = llama(8, 2, 64, dtype=torch.bfloat16).cuda()
    plain, _ = through(model, tokens, CUTS, lowering="inductor", **SMALL)
    graphed, _ = through(model, tokens, CUTS, lowering="inductor", cudagraphs=True, **SMALL)
    error = (plain - graphed).float().norm() / plain.float().norm()
    assert error < 2e-2, float(error)


@torch.no_grad()
def test_a_generation_waits_for_nothing_and_compiles_nothing(tokens):
    """After warm-up, decode steps neither synchronise with the device nor compile."""
    model = llama(8, 2, 64, dtype=torch.bfloat16).cuda()
    forward = compiled(model.forward, lowering="inductor", cudagraphs=True, **SMALL)
    cache = SalsCache(model.config, 320, device="cuda")
    forward(tokens[:, :240], past_key_values=cache)
    token = tokens[:, 240:241].clone()
    for _ in range(4):
        forward(token, past_key_values=cache)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(8):
            forward(token, past_key_values=cache)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


@torch.no_grad()
def test_memory_by_the_allocator():
    """The cache's own bytes and the transient of one layer are all that a session adds, and they return."""
    model = llama(8, 8, 128, layers=8, dtype=torch.bfloat16).cuda()
    capacity = 16384
    layer = 2 * 8 * capacity * 128 * 2
    forward = compiled(model.forward, lowering="eager")
    calls = [torch.randint(0, 64, (1, n), device="cuda") for n in (600, 300, 1, 1)]

    def session():
        cache = SalsCache(model.config, capacity, device="cuda")
        for call in calls:
            forward(call, past_key_values=cache, logits_to_keep=1)
        return cache

    session()  # compiles, makes the bases
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    cache = session()
    own = cache.nbytes()
    assert own < 8 * layer / 3  # rows are shared by few layers here, and fewer heads share a latent
    assert torch.cuda.memory_allocated() - before < 1.05 * own + (4 << 20)
    assert torch.cuda.max_memory_allocated() - before < own + 6 * layer
    del cache
    assert torch.cuda.memory_allocated() - before < (4 << 20)
