"""The real path on CPU: reference meanings compiled by Inductor."""

from __future__ import annotations

import pytest
import sympy
import torch
from test_exact import assert_close, compiled
from tiny import CachedAttention, llama, rollout, static_cache

import sals_compile


@pytest.mark.parametrize("eager", [False, True])
def test_exact_decode(eager):
    module = CachedAttention(4, 2, 16, True, "bool", eager, 0.25).eval()
    x, cuts = torch.randn(2, 40, 64), [33, 34, 35, 36]
    expected = module.rollout(module, x[:, :36], cuts, 48)
    assert_close(
        module.rollout(compiled(module, attention="exact", lowering="inductor"), x[:, :36], cuts, 48),
        expected,
        torch.float32,
    )


def test_sparse_decode_equals_the_eager_lowering():
    module = CachedAttention(4, 2, 32, True, "bool", False, 0.2).eval()
    x, cuts = torch.randn(1, 64, 128), [60, 61, 62, 63, 64]
    options = {"budget": 24, "sinks": 2, "recents": 8}
    eager = module.rollout(compiled(module, **options), x, cuts, 80)
    inductor = module.rollout(compiled(module, lowering="inductor", **options), x, cuts, 80)
    # The same arithmetic; a token on the edge of the selection or of a code may fall the other way.
    assert (eager - inductor).norm() / eager.norm() < 1e-2


def test_layers_share_an_operator_s_kernel():
    from sals_compile.kernels import inductor

    model = llama(layers=3)
    tokens = torch.randint(0, 64, (1, 52))
    options = {"lowering": "inductor", "budget": 24, "sinks": 2, "recents": 8}
    before = set(inductor._compiled)
    rollout(compiled(model.forward, **options), tokens, [48, 49, 50, 51, 52], static_cache(model, 64))
    made = [name for name, *_ in set(inductor._compiled) - before]
    decode = {"encode", "score_select", "attend"}
    assert decode <= set(made)
    # Rows are recorded and queries observed by both graphs; what decodes is compiled once, for three layers.
    assert all(made.count(name) == 1 for name in decode)


def test_a_call_that_the_compiled_graph_assumed_away_runs_unspecialised():
    module = CachedAttention(4, 2, 16, True, "bool", False, 0.25).eval()
    x, cuts = torch.randn(1, 40, 64), [33, 34, 35, 36]
    expected = module.rollout(module, x[:, :36], cuts, 48)
    forward = compiled(module, attention="exact")
    module.rollout(forward, x[:, :36], cuts, 48)
    for report in sals_compile.compiled_reports():
        for variant in report._compiled.variants.values():
            variant.guards = [sympy.false]
    assert_close(module.rollout(forward, x[:, :36], cuts, 48), expected, torch.float32)
