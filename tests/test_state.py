"""Caches over their life: phases, reset, foreign writes, two at once, full. Each bad input gives a clear error or a
right dense result.
"""

from __future__ import annotations

import logging

import pytest
import torch
from test_exact import assert_close, compiled
from tiny import CachedAttention, llama, rollout, static_cache

import sals_compile

SMALL = {"budget": 24, "sinks": 2, "recents": 8}


@pytest.fixture(scope="module")
def model():
    return llama()


def caches_of(run_options):
    """The adopted caches of a configuration."""
    from sals_compile.backend import registry_for

    config = sals_compile.SalsConfig.from_options({"lowering": "eager", **run_options})
    return registry_for(config).caches.values()


def test_phase_stays_dense_below_the_budget(model):
    tokens = torch.randint(0, 64, (1, 30))
    cuts = [10, *range(11, 24)]
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 60))
    actual = rollout(compiled(model.forward, **SMALL), tokens, cuts, static_cache(model, 60))
    assert_close(actual, expected, torch.float32)  # never more cached than T: exactly dense


def test_short_prompt_goes_sparse_when_it_outgrows_the_budget(model, caplog):
    tokens = torch.randint(0, 64, (1, 50))
    cuts = [10, *range(11, 51)]
    with caplog.at_level(logging.INFO, logger="sals_compile"):
        expected = rollout(model.forward, tokens, cuts, static_cache(model, 60))
        actual = rollout(compiled(model.forward, **SMALL), tokens, cuts, static_cache(model, 60))
    assert caplog.text.count("imported") == 1
    assert_close(actual[:, :24], expected[:, :24], torch.float32)
    assert (actual - expected)[:, 30:].abs().max() > 1e-4


def test_capacity_within_budget_stays_dense_and_says_why(model):
    run = compiled(model.forward, **SMALL)
    rollout(run, torch.randint(0, 64, (1, 12)), [10, 11, 12], static_cache(model, 24))
    site = sals_compile.compiled_reports()[0].sites[0]
    assert site.status == "dense"
    assert "capacity 24 does not exceed the budget of 24" in site.reason


def test_reset_is_honoured(model):
    tokens = torch.randint(0, 64, (1, 50))
    cuts = [40, *range(41, 46)]
    run = compiled(model.forward, attention="exact")
    cache = static_cache(model, 60)
    rollout(run, tokens, cuts, cache)
    cache.reset()
    other = torch.randint(0, 64, (1, 30))
    expected = rollout(model.forward, other, [20, *range(21, 31)], static_cache(model, 60))
    assert_close(rollout(run, other, [20, *range(21, 31)], cache), expected, torch.float32)


@pytest.mark.parametrize("padded", [False, True])
def test_an_uncompiled_prefill_is_imported(model, caplog, padded):
    """``generate(compile_config=...)`` compiles the decode steps alone: the second of them imports the prompt."""
    tokens = torch.randint(0, 64, (2, 50))
    positions = torch.arange(50).expand(2, -1)
    mask = torch.ones(2, 60, dtype=torch.bool)
    if padded:  # the first row begins with padding
        positions = torch.stack((torch.arange(50) - 7, torch.arange(50))).clamp_min(0)
        mask[0, :7] = False

    def step(forward, cache, start, end):
        seen = (torch.arange(60)[None, :] <= torch.arange(start, end)[:, None])[None, None] & mask[:, None, None, :]
        return forward(
            tokens[:, start:end],
            past_key_values=cache,
            position_ids=positions[:, start:end],
            attention_mask=seen,
        ).logits

    results = {}
    for name, options in (("dense", None), ("exact", {"attention": "exact"}), ("sals", SMALL)):
        run = model.forward if options is None else compiled(model.forward, **options)
        cache = static_cache(model, 60, 2)
        with torch.no_grad(), caplog.at_level(logging.INFO, logger="sals_compile"):
            step(model.forward, cache, 0, 40)
            results[name] = torch.cat([step(run, cache, i, i + 1) for i in range(40, 50)], 1)
    assert_close(results["exact"], results["dense"], torch.float32)
    error = (results["sals"] - results["dense"]).norm() / results["dense"].norm()
    assert 1e-4 < error < 0.5  # sparse, and no nonsense
    assert caplog.text.count("40 of 41 cached tokens were written by somebody else") == 2
    assert caplog.text.count("imported 41 cached tokens") == 2


def test_positions_that_cannot_be_recalled_stay_dense(model, caplog):
    """Rotary rows that come into the graph as they are say nothing of other tokens' positions."""
    layer = model.model.layers[0].self_attn

    def forward(hidden, cos, sin, mask, cache):
        return layer(hidden, (cos, sin), mask, cache)[0]

    hidden = torch.randn(1, 50, 64)
    cos, sin = model.model.rotary_emb(hidden, torch.arange(50)[None])
    results = []
    for run in (forward, compiled(forward, **SMALL)):
        cache = static_cache(model, 60)

        def step(function, start, end, cache=cache):
            rows = torch.arange(60)[None, :] <= torch.arange(start, end)[:, None]
            piece = slice(start, end)
            return function(hidden[:, piece], cos[:, piece], sin[:, piece], rows[None, None], cache)

        with torch.no_grad(), caplog.at_level(logging.WARNING, logger="sals_compile"):
            step(forward, 0, 40)
            results.append(torch.cat([step(run, i, i + 1) for i in range(40, 50)], 1))
    assert_close(results[1], results[0], torch.float32)
    assert "were not written by this compiled model" in caplog.text


def test_foreign_write_between_calls_is_honoured(model):
    """Somebody permutes the batch of the buffers (beam search): the next call sees the new contents."""
    tokens = torch.randint(0, 64, (2, 50))
    run = compiled(model.forward, attention="exact")
    mine, theirs = static_cache(model, 60, 2), static_cache(model, 60, 2)
    order = torch.tensor([1, 0])
    results = []
    for forward, cache in ((run, mine), (model.forward, theirs)):
        rollout(forward, tokens, [40, *range(41, 46)], cache)
        for layer in cache.layers:
            layer.keys.copy_(layer.keys[order].clone())
            layer.values.copy_(layer.values[order].clone())
        pieces = []
        with torch.no_grad():
            for i in range(45, 50):
                pieces.append(forward(tokens[order][:, i : i + 1], past_key_values=cache).logits)
        results.append(torch.cat(pieces, 1))
    assert_close(results[0], results[1], torch.float32)


def test_two_caches_alternate(model):
    run = compiled(model.forward, attention="exact")
    prompts = [torch.randint(0, 64, (1, 50)) for _ in range(2)]
    expected = [rollout(model.forward, p, [40, *range(41, 51)], static_cache(model, 60)) for p in prompts]
    caches = [static_cache(model, 60) for _ in prompts]
    actual = [[], []]
    with torch.no_grad():
        for i, p in enumerate(prompts):
            actual[i].append(run(p[:, :40], past_key_values=caches[i]).logits)
        for t in range(40, 50):
            for i, p in enumerate(prompts):
                actual[i].append(run(p[:, t : t + 1], past_key_values=caches[i]).logits)
    for a, e in zip(actual, expected, strict=True):
        assert_close(torch.cat(a, 1), e, torch.float32)


def test_caches_of_different_capacity(model):
    run = compiled(model.forward, attention="exact")
    tokens, cuts = torch.randint(0, 64, (1, 36)), [30, *range(31, 37)]
    for capacity in (40, 56, 48):
        expected = rollout(model.forward, tokens, cuts, static_cache(model, capacity))
        assert_close(rollout(run, tokens, cuts, static_cache(model, capacity)), expected, torch.float32)
    assert all(s.status == "exact" for r in sals_compile.compiled_reports() for s in r.sites)


def test_two_models_do_not_mix(model):
    other = llama(layers=2)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.1)
    tokens = torch.randint(0, 64, (1, 50))
    cuts = [40, *range(41, 51)]
    alone = rollout(compiled(other.forward, **SMALL), tokens, cuts, static_cache(other, 60))
    rollout(compiled(model.forward, **SMALL), tokens, cuts, static_cache(model, 60))
    again = rollout(
        torch.compile(other.forward, backend="sals", options={"lowering": "eager", **SMALL}),
        tokens,
        cuts,
        static_cache(other, 60),
    )
    torch.testing.assert_close(again[:, :40], alone[:, :40])


def test_second_prefill_into_a_filled_cache(model):
    tokens = torch.randint(0, 64, (1, 80))
    cuts = [30, *range(31, 41), 60, *range(61, 71)]
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 90))
    run = compiled(model.forward, attention="exact")
    assert_close(rollout(run, tokens, cuts, static_cache(model, 90)), expected, torch.float32)


def test_decoding_past_the_capacity_raises(model):
    tokens = torch.randint(0, 64, (1, 44))
    run = compiled(model.forward, **SMALL)
    cache = static_cache(model, 42)
    rollout(run, tokens, [40, 41, 42], cache)
    with pytest.raises(IndexError, match=r"KV cache is full.*larger max_cache_len"), torch.no_grad():
        run(tokens[:, 42:43], past_key_values=cache)


def test_state_goes_with_the_buffers(model):
    options = dict(SMALL, query_block=32)  # a configuration of its own
    cache = static_cache(model, 60)
    rollout(compiled(model.forward, **options), torch.randint(0, 64, (1, 45)), [40, *range(41, 46)], cache)
    assert len(caches_of(options)) > 0
    torch._dynamo.reset()
    sals_compile.report._reports.clear()
    del cache
    import gc

    gc.collect()
    assert len(caches_of(options)) == 0


def test_a_buffer_that_something_else_reads_too(model):
    """The dense buffer stays a true mirror, so another reader in the same graph sees what it would have seen."""

    def forward(tokens, past_key_values):
        out = model(tokens, past_key_values=past_key_values)
        return out.logits, past_key_values.layers[0].keys.abs().sum()

    tokens = torch.randint(0, 64, (1, 46))
    results = []
    for run in (compiled(forward, attention="exact"), forward):
        cache = static_cache(model, 60)
        with torch.no_grad():
            parts = [run(tokens[:, :40], cache), *(run(tokens[:, i : i + 1], cache) for i in range(40, 46))]
        results.append((torch.cat([p[0] for p in parts], 1), torch.stack([p[1] for p in parts])))
    assert_close(results[0][0], results[1][0], torch.float32)
    torch.testing.assert_close(results[0][1], results[1][1])


def test_autograd_stays_dense_and_says_so_once():
    model = llama(layers=1)
    tokens = torch.randint(0, 64, (1, 8))
    import sals_compile.backend as backend

    backend._training_noticed = False
    run = compiled(model.forward)
    with pytest.warns(UserWarning, match="for inference"):
        out = run(tokens, use_cache=False).logits
    out.sum().backward()
    assert all(p.grad is not None for p in model.model.layers.parameters())
    torch.testing.assert_close(out, model(tokens, use_cache=False).logits)


@pytest.mark.parametrize("dtype", [torch.float64])
def test_other_dtypes_are_declined(dtype):
    model = llama(layers=1, dtype=dtype)
    tokens = torch.randint(0, 64, (1, 8))
    run = compiled(model.forward)
    with torch.no_grad():
        torch.testing.assert_close(run(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)
    (site,) = sals_compile.compiled_reports()[0].sites
    assert site.status == "declined"
    assert "float64" in site.reason


def test_a_cache_of_inference_tensors_stays_dense_and_says_why(model, caplog):
    tokens = torch.randint(0, 64, (1, 50))
    cuts = [40, *range(41, 51)]
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 60))
    run = compiled(model.forward, **SMALL)
    with torch.inference_mode(), caplog.at_level(logging.WARNING, logger="sals_compile"):
        cache = static_cache(model, 60)
        pieces = [run(tokens[:, :40], past_key_values=cache).logits]
        pieces += [run(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(40, 50)]
    assert_close(torch.cat(pieces, 1), expected, torch.float32)
    assert "inference_mode" in caplog.text and "no_grad" in caplog.text


def test_inference_mode_with_an_ordinary_cache(model):
    tokens = torch.randint(0, 64, (1, 50))
    cuts = [40, *range(41, 51)]
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 60))
    run, cache = compiled(model.forward, attention="exact"), static_cache(model, 60)
    with torch.inference_mode():
        pieces = [run(tokens[:, :40], past_key_values=cache).logits]
        pieces += [run(tokens[:, i : i + 1], past_key_values=cache).logits for i in range(40, 50)]
    assert_close(torch.cat(pieces, 1), expected, torch.float32)


def test_layers_share_one_row_group(model):
    """transformers' StaticCache counts tokens per layer; rows are recorded once all the same."""
    run = compiled(model.forward, **SMALL)
    rollout(run, torch.randint(0, 64, (1, 45)), [40, *range(41, 46)], static_cache(model, 60))
    for report in sals_compile.compiled_reports():
        assert len(report._compiled.groups) == 1
        rows = report.kv_bytes_per_token()["sals"] - sum(s.kv_bytes_per_token for s in report.sites)
        once = 2 * 16 * 4 * 128 / 60  # cos and sin, 16 dims, fp32, 128 slots for 60 tokens
        assert once < rows < 1.1 * once  # block means and the ring's slots beside them


def test_layers_at_different_positions_stay_dense(model, caplog):
    tokens = torch.randint(0, 64, (1, 50))
    results = []
    run = compiled(model.forward, **SMALL)
    for forward in (model.forward, run):
        cache = static_cache(model, 70)
        pieces = [rollout(forward, tokens, [40], cache)]
        cache.layers[1].cumulative_length.add_(3)  # a hole in one layer: odd, but dense attention is well defined
        with caplog.at_level(logging.WARNING, logger="sals_compile"):
            pieces.append(rollout(forward, tokens[:, 40:], list(range(1, 11)), cache))
        results.append(torch.cat(pieces, 1))
    assert_close(results[1], results[0], torch.float32)
    assert "different positions" in caplog.text


@pytest.mark.parametrize("basis", ["query_weighted", "weights"])
def test_blocks_that_share_a_graph_have_a_basis_each(basis):
    """Dynamo gives modules of one class one graph, since their weights are inputs of it."""
    options = {**SMALL, "rank": 0.25, "basis": basis}
    blocks = [CachedAttention(4, 2, 32, True, "bool", False, 0.2).eval() for _ in range(2)]
    inputs, cuts = [torch.randn(1, 64, 128) for _ in blocks], [60, 61, 62, 63, 64]

    def apart(block, x):
        torch._dynamo.reset()
        return block.rollout(compiled(block, **options), x, cuts, 80)

    expected = [apart(block, x) for block, x in zip(blocks, inputs, strict=True)]
    torch._dynamo.reset()
    before = len(sals_compile.compiled_reports())
    forward = torch.compile(
        lambda block, *args: block(*args), backend="sals", options={"lowering": "eager", "sinks": 2, **options}
    )
    for _ in range(2):  # taken in turns, too
        for block, x, wanted in zip(blocks, inputs, expected, strict=True):
            assert torch.equal(block.rollout(lambda *a, block=block: forward(block, *a), x, cuts, 80), wanted)
    assert len(sals_compile.compiled_reports()) - before == 2  # a prefill's and a decode step's


def test_a_cache_handed_to_another_model_is_read_anew():
    """What the dense model would do with the buffers, no matter whose latents lie beside them."""
    models = [llama(), llama()]
    for parameter in models[1].parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens = torch.randint(0, 64, (1, 60))

    def run(forwards):
        cache = static_cache(models[0], 80)
        first = rollout(forwards[0], tokens[:, :44], [40, 41, 42, 43, 44], cache)
        with torch.no_grad():
            second = [forwards[1](tokens[:, i : i + 1], past_key_values=cache).logits for i in range(44, 48)]
        return torch.cat((first, *second), 1)

    expected = run([m.forward for m in models])
    exact = run([compiled(m.forward, attention="exact") for m in models])
    assert_close(exact, expected, torch.float32)
    sparse = run([compiled(m.forward, **SMALL) for m in models])
    assert torch.isfinite(sparse).all()
