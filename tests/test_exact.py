"""Exact mode holds the rewritten graph to the dense one: full rank, not quantised, all tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import Attention, CachedAttention, llama, rollout, static_cache

import sals_compile
from sals_compile.passes import verify

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


def compiled(fn, **options):
    torch._dynamo.reset()
    sals_compile.report._reports.clear()
    return torch.compile(fn, backend="sals", options={"lowering": "eager", **options})


def assert_close(actual, expected, dtype):
    error = (actual.float() - expected.float()).norm() / expected.float().norm()
    assert error < TOLERANCE[dtype], f"relative error {error:.2e}"


def assert_rewritten(report, count):
    assert [s.status for s in report.sites] == ["exact"] * count, str(report)
    assert report.verified == count
    targets = {str(n.target) for n in report.graph_after.graph.nodes}
    assert not any("scaled_dot_product" in t or "softmax" in t for t in targets)
    assert any("sals.attend" in t for t in targets)


@given(
    groups=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    dim=st.sampled_from([8, 16, 32]),
    batch=st.integers(1, 3),
    prompt=st.integers(2, 40),
    steps=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    rotary=st.booleans(),
    mask=st.sampled_from(["bool", "additive"]),
    eager=st.booleans(),
    scale=st.sampled_from([0.25, 0.37, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    spare=st.integers(0, 20),
)
def test_cached_decode_equals_dense(groups, dim, batch, prompt, steps, rotary, mask, eager, scale, dtype, spare):
    module = CachedAttention(*groups, dim, rotary, mask, eager, scale).eval().to(dtype)
    cuts = [prompt]
    for step in steps:
        cuts.append(cuts[-1] + step)
    x = torch.randn(batch, cuts[-1], groups[0] * dim, dtype=dtype)
    expected = module.rollout(module, x, cuts, cuts[-1] + spare)
    actual = module.rollout(compiled(module, attention="exact"), x, cuts, cuts[-1] + spare)
    assert_close(actual, expected, dtype)
    for report in sals_compile.compiled_reports():
        assert_rewritten(report, 1)
        assert report.sites[0].rotary == ("half" if rotary else "none")


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize("born", [False, True])
def test_llama_with_a_static_cache(impl, born):
    model = llama(impl=impl)
    tokens, cuts = torch.randint(0, 64, (2, 40)), [30, 31, 32, 36, 37]
    allocate = None if born else 2
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 50, allocate))
    actual = rollout(compiled(model.forward, attention="exact"), tokens, cuts, static_cache(model, 50, allocate))
    assert_close(actual, expected, torch.float32)
    for report in sals_compile.compiled_reports():
        assert_rewritten(report, 2)


@given(
    groups=st.sampled_from([(4, 4), (4, 2), (2, 1)]),
    dim=st.sampled_from([8, 16]),
    batch=st.integers(1, 2),
    length=st.integers(2, 70),
    rotary=st.booleans(),
    causal=st.booleans(),
    eager=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_stateless_equals_dense(groups, dim, batch, length, rotary, causal, eager, dtype):
    module = Attention(*groups, dim, rotary, causal, eager).eval().to(dtype)
    x = torch.randn(batch, length, groups[0] * dim, dtype=dtype)
    with torch.no_grad():
        expected = module(x)
        run = compiled(module, attention="exact")
        assert_close(run(x), expected, dtype)
    (report,) = sals_compile.compiled_reports()
    assert [s.status for s in report.sites] == ["exact"], str(report)
    assert report.sites[0].rotary == ("half" if rotary else "none")
    assert report.sites[0].heads == f"{groups[0]}/{groups[1]}x{dim}"


@given(causal=st.booleans(), rotary=st.booleans(), length=st.integers(60, 140))
def test_block_selection_of_everything_equals_dense(causal, rotary, length):
    """The sparse stateless form with a budget that holds every key is dense attention."""
    module = Attention(4, 2, 16, rotary, causal, eager=False).eval()
    x = torch.randn(2, length, 64)
    with torch.no_grad():
        expected = module(x)
        run = compiled(module, budget=length - 1, sinks=1, recents=8, query_block=16, score_rank=1.0, rank=1.0)
        run(x)  # the first long call calibrates, dense
        actual = run(x)
    # One key of `length` is left out of each block; causal blocks see it only when it is the last.
    error = (actual - expected).norm() / expected.norm()
    assert error < 0.25
    assert sals_compile.compiled_reports()[0].sites[0].status == "sals"


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_batch_permutation_permutes_output(impl):
    model = llama(impl=impl)
    tokens = torch.randint(0, 64, (3, 50))
    cuts = [40, *range(41, 51)]
    options = {"budget": 24, "sinks": 2, "recents": 8}
    order = torch.tensor([2, 0, 1])
    first = rollout(compiled(model.forward, **options), tokens, cuts, static_cache(model, 60, 3))
    second = rollout(compiled(model.forward, **options), tokens[order], cuts, static_cache(model, 60, 3))
    # The basis comes from the moments of the whole batch, whose sum does not depend on the order.
    torch.testing.assert_close(second, first[order], rtol=2e-3, atol=2e-3)


def test_a_larger_budget_is_closer_to_dense():
    model = llama()
    tokens = torch.randint(0, 64, (1, 64))
    cuts = [48, *range(49, 65)]
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 80))
    errors = []
    for budget in (24, 40, 63):
        run = compiled(model.forward, budget=budget, sinks=4, recents=8, rank=1.0, score_rank=1.0, value_bits=8)
        actual = rollout(run, tokens, cuts, static_cache(model, 80))
        errors.append(float((actual - expected)[:, 48:].norm() / expected[:, 48:].norm()))
    # Nearly everything attended leaves only rounding of codes; less attended is worse.
    assert errors[0] > errors[1] > errors[2] > 0
    assert errors[2] < 0.03


def test_unequal_prompt_lengths_do_not_recompile_after_the_second():
    model = llama()
    run = compiled(model.forward, attention="exact")
    counters = torch._dynamo.utils.counters
    counters.clear()
    seen = []
    for length in (20, 33, 41, 27):
        tokens = torch.randint(0, 64, (1, length + 3))
        cuts = [length, length + 1, length + 2, length + 3]
        expected = rollout(model.forward, tokens, cuts, static_cache(model, 64))
        assert_close(rollout(run, tokens, cuts, static_cache(model, 64)), expected, torch.float32)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen[1] == seen[2] == seen[3]
    assert not counters["graph_break"]


def test_long_keys_are_verified_a_head_at_a_time(monkeypatch):
    """As many keys as a GPU's cache holds are not read in fp32 at once; what differs by head is then counted on."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(4, 1, 1)

    def attention(query, key, value):
        key, value = (t.repeat_interleave(2, dim=1) for t in (key, value))
        at = torch.arange(query.shape[2])
        logits = query @ key.mT * 0.3 + slopes * (at[None, :] - at[:, None])
        return (logits + torch.full((9, 9), -torch.inf).triu(1)).softmax(-1) @ value

    inputs = [torch.randn(2, heads, 9, 8) for heads in (4, 2, 2)]
    errors = []
    for limit in (verify.MAX_ELEMENTS, 0):
        monkeypatch.setattr(verify, "MAX_ELEMENTS", limit)
        (site,) = sals_compile.explain(attention, *inputs, options={"attention": "exact"}).sites
        assert site.status == "exact" and "h" in site.score
        errors.append(site.verified_error)
    assert errors[0] == pytest.approx(errors[1], abs=1e-6)
    monkeypatch.setattr(verify, "_from_head", lambda modifier, first: modifier)
    (site,) = sals_compile.explain(attention, *inputs, options={"attention": "exact"}).sites
    assert site.status == "declined" and "verification failed" in site.reason


def test_large_logits_in_half_precision_are_rounded_as_the_graph_rounds_them(monkeypatch):
    """Unscaled scores of a bf16 graph: its own rounding is over the tolerance, and no reason to decline."""

    def attention(query, key, value):
        return (query @ key.mT).softmax(-1) @ value

    torch.manual_seed(0)
    inputs = [3 * torch.randn(2, 4, 16, 8).bfloat16() for _ in range(3)]

    def site():
        return sals_compile.explain(attention, *inputs, options={"attention": "exact"}).sites[0]

    monkeypatch.setattr(verify, "TOLERANCE", verify.TOLERANCE | {torch.bfloat16: 2e-3})
    assert site().status == "exact"
    monkeypatch.setattr(verify, "rounded_attention", verify.reference.dense_attention)
    assert site().status == "declined"
