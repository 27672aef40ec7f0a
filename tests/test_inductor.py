"""The real path on CPU: reference meanings compiled by Inductor."""

from __future__ import annotations

import copy

import pytest
import sympy
import torch
from test_exact import assert_close, compiled
from tiny import CachedAttention, llama, rollout, static_cache

import sals_compile
from sals_compile import runtime
from sals_compile.kernels import ops
from sals_compile.passes import lower as lowering
from sals_compile.passes.lower import fuse_decode, lower


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


@pytest.mark.parametrize(
    "options, fused",
    [({"head_score": "sum"}, True), ({}, True), ({"scoring": "rope_free"}, False)],
)
def test_a_decode_step_becomes_one_operator(options, fused, monkeypatch):
    targets = []

    def beside(gm, *rest):
        """Every call also through the fused graph, on copies of its inputs."""
        run, graph = lower(gm, *rest), copy.deepcopy(gm)
        fuse_decode(graph)
        targets.extend(str(n.target) for n in graph.graph.nodes)

        def both(args):
            copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
            expected, found = run(args), graph(*copies)
            for a, b in zip((*expected, *args), (*found, *copies), strict=True):
                assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            return expected

        return both

    monkeypatch.setattr(runtime, "lower", beside)
    module = CachedAttention(4, 2, 32, True, "bool", False, 0.2).eval()
    module.rollout(
        compiled(module, budget=24, sinks=2, recents=8, **options), torch.randn(1, 64, 128), [60, 61, 62], 80
    )
    assert ("sals.decode.default" in targets) == fused == ("sals.encode.default" not in targets)


def test_operators_that_stay_opaque_under_inductor(monkeypatch):
    """What a GPU compiles: sals operators by name, a decode step as one of them."""
    decompose, fused = lowering.decompose, []

    def opaque(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(ops, "SCHEMAS", {})  # none becomes a kernel of the CPU's
            graph = decompose(*arguments)
        fused.extend(n for n in graph.graph.nodes if n.target is torch.ops.sals.decode.default)
        return graph

    module = CachedAttention(4, 2, 32, True, "bool", False, 0.2).eval()
    x, cuts, options = torch.randn(1, 64, 128), [60, 61, 62], {"budget": 24, "sinks": 2, "recents": 8}
    expected = module.rollout(compiled(module, **options), x, cuts, 80)
    monkeypatch.setattr(lowering, "decompose", opaque)
    found = module.rollout(compiled(module, lowering="inductor", **options), x, cuts, 80)
    assert fused
    assert (found - expected).norm() / expected.norm() < 1e-2  # as above


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
