"""transformers' ``generate()`` through the compiler, with each kind of cache: in exact mode every way of generating
gives the dense model's tokens.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import transformers
from test_exact import assert_close, compiled
from tiny import llama, rollout, static_cache
from transformers import CompileConfig

import sals_compile
from sals_compile.integrations.transformers import SalsCache

pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"budget": 24, "sinks": 2, "recents": 8}
CAPACITY = 72


@pytest.fixture(scope="module")
def model():
    model = llama()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


@pytest.fixture
def prompt():
    """Two prompts of unequal length, padded on the left."""
    ids = torch.randint(2, 64, (2, 30))
    mask = torch.ones_like(ids)
    mask[0, :7] = ids[0, :7] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture
def through(model):
    """``through(**options)``: the model's forward compiled, until the test ends."""
    dense = model.forward

    def compile_forward(**options):
        model.forward = compiled(dense, **options)
        return model

    yield compile_forward
    model.forward = dense


def generated(model, inputs, **how):
    torch.manual_seed(3)
    return model.generate(**inputs, max_new_tokens=12, **how)


#: ways of generating, by the arguments of generate()
WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
    "sampled beams": {"do_sample": True, "num_beams": 3},
    "several sequences": {"do_sample": True, "num_return_sequences": 2},
    "chunked prefill": {"do_sample": False, "prefill_chunk_size": 8},
}


@pytest.mark.parametrize("cache", ["sals", "static"])
@pytest.mark.parametrize("way", WAYS)
def test_exact_mode_generates_what_the_dense_model_does(model, prompt, through, way, cache):
    expected = generated(model, prompt, **WAYS[way])
    through(attention="exact")
    given = {"cache_implementation": "static"}
    if cache == "sals":
        given = {"past_key_values": SalsCache(model.config, CAPACITY)}
    assert torch.equal(generated(model, prompt, **WAYS[way], **given), expected)
    sites = [s for r in sals_compile.compiled_reports() for s in r.sites]
    assert sites and all(s.status == "exact" for s in sites)


def test_the_default_growing_cache_stays_dense_and_says_so_once(model, prompt, through, caplog, monkeypatch):
    monkeypatch.setattr(sals_compile.report, "_growing_noticed", False)
    expected = generated(model, prompt, do_sample=False)
    through(**SMALL)
    with caplog.at_level("WARNING", logger="sals_compile"):
        assert torch.equal(generated(model, prompt, do_sample=False), expected)
    reasons = {s.reason for r in sals_compile.compiled_reports()[1:] for s in r.sites}
    assert reasons and all("grows by concatenation" in r for r in reasons)
    (record,) = [r for r in caplog.records if r.name == "sals_compile"]
    assert "2 attention sites stay dense" in record.getMessage()
    assert "SalsCache" in record.getMessage() and "cache_implementation='static'" in record.getMessage()


def test_assisted_decoding(model, prompt, through):
    inputs = {k: v[1:] for k, v in prompt.items()}
    how = {"do_sample": False, "prompt_lookup_num_tokens": 3}
    expected = generated(model, inputs, **how)
    through(attention="exact")
    cache = SalsCache(model.config, CAPACITY)
    assert torch.equal(generated(model, inputs, **how, past_key_values=cache), expected)


def test_a_chat_continues_and_streams(model, through):
    class Streamer:
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            pass

    turns = [torch.randint(2, 64, (1, n)) for n in (20, 7, 13)]
    results = []
    for compile_it in (False, True):
        if compile_it:
            through(attention="exact")
        cache = SalsCache(model.config, 120) if compile_it else static_cache(model, 120)
        text, streamed = torch.empty(1, 0, dtype=torch.long), []
        for turn in turns:
            streamer = Streamer()
            text = model.generate(
                torch.cat([text, turn], 1),
                past_key_values=cache,
                max_new_tokens=9,
                do_sample=False,
                streamer=streamer,
            )
            streamed += streamer.tokens[-9:]
        results.append((text, streamed))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


@pytest.mark.parametrize("cache", ["sals", "static"])
def test_compile_config(model, prompt, cache, caplog):
    """Its prefill is not compiled: a static cache is imported, a SalsCache needs a chunked prefill, which is."""
    expected = generated(model, prompt, do_sample=False)
    torch._dynamo.reset()
    options = {"lowering": "eager", "attention": "exact"}
    config = CompileConfig(backend="sals", mode=None, fullgraph=False, options=options)
    config._compile_all_devices = True  # transformers compiles by itself on accelerators alone
    given = {"cache_implementation": "static"}
    if cache == "sals":
        given = {"past_key_values": SalsCache(model.config, CAPACITY), "prefill_chunk_size": 16}
    with caplog.at_level("INFO", logger="sals_compile"):
        actual = generated(model, prompt, do_sample=False, compile_config=config, **given)
    assert torch.equal(actual, expected)
    assert cache == "sals" or "imported 31 cached tokens" in caplog.text


def test_an_uncompiled_pass_over_a_salscache_raises(model, prompt):
    with pytest.raises(RuntimeError, match=r"model.forward = torch.compile.*StaticCache"):
        generated(model, prompt, do_sample=False, past_key_values=SalsCache(model.config, CAPACITY))
    with pytest.raises(RuntimeError, match="only as latents"):
        _ = SalsCache(model.config, CAPACITY).layers[0].keys


# ---- what a SalsCache computes and holds -----------------------------------------------------------------------------


def test_short_contexts_and_prefills_past_the_budget_are_exact(model):
    """Up to the budget all is exact, and so is the prefill that leaves it, from empty or from a short context."""
    tokens = torch.randint(0, 64, (2, 60))
    for cuts in ([40], [10, 11, 12, 50], [24]):
        expected = rollout(model.forward, tokens, cuts, static_cache(model, CAPACITY, 2))
        cache = SalsCache(model.config, CAPACITY)
        assert_close(rollout(compiled(model.forward, **SMALL), tokens, cuts, cache), expected, torch.float32)
        assert cache.state.phase == ("short" if cuts[-1] <= 24 else "latent")


def test_inference_mode_on_and_off(model):
    tokens, cuts = torch.randint(0, 64, (1, 60)), [30, 31, 50, 51, 52]
    expected = rollout(model.forward, tokens, cuts, static_cache(model, CAPACITY))
    for made, modes in ((True, (False, False, True)), (False, (True, False, True))):
        run = compiled(model.forward, attention="exact")
        with torch.inference_mode(made):
            cache = SalsCache(model.config, CAPACITY)
        pieces, start = [], 0
        for end, mode in zip(cuts, (modes[0], *modes, modes[2]), strict=True):
            with torch.inference_mode(mode), torch.no_grad():
                pieces.append(run(tokens[:, start:end], past_key_values=cache).logits.clone())
            start = end
        assert_close(torch.cat(pieces, 1), expected, torch.float32)


TINY = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 512,
}
HYBRID = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}


@pytest.mark.parametrize(
    ("family", "options", "compressed"),
    [
        ("Gemma3", HYBRID, 1),  # sliding layers keep transformers' own cache
        ("GptOss", HYBRID | {"num_local_experts": 2, "num_experts_per_tok": 1}, 1),  # sinks
        ("GPTNeoX", {}, 2),  # a part of each head rotates
    ],
)
def test_other_models(family, options, compressed):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    model = getattr(transformers, f"{family}ForCausalLM")(config(**TINY, **options)).eval()
    tokens, cuts = torch.randint(1, 64, (2, 50)), [30, 31, 32, 44, 45]
    cache = SalsCache(model.config, 60)
    assert len(cache.state.handles) == compressed
    expected = rollout(model.forward, tokens, cuts, transformers.StaticCache(config=model.config, max_cache_len=60))
    assert_close(rollout(compiled(model.forward, attention="exact"), tokens, cuts, cache), expected, torch.float32)


@pytest.mark.parametrize("impl", ["eager", pytest.param("flex_attention", marks=pytest.mark.slow)])
def test_other_spellings_of_attention(impl):
    model = llama(impl=impl)
    tokens, cuts = torch.randint(0, 64, (1, 60)), [30, 31, 50, 51]
    expected = rollout(model.forward, tokens, cuts, static_cache(model, CAPACITY))
    actual = rollout(compiled(model.forward, attention="exact"), tokens, cuts, SalsCache(model.config, CAPACITY))
    assert_close(actual, expected, torch.float32)


def test_sparse_decoding_is_that_of_a_static_cache(model):
    """After one prefill both caches hold the same latents, so their decode steps agree; a basis is made once."""
    tokens, cuts = torch.randint(0, 64, (2, 60)), [50, *range(51, 61)]
    results = []
    for cache in (static_cache(model, CAPACITY, 2), SalsCache(model.config, CAPACITY)):
        sals_compile.backend._registries.clear()
        results.append(rollout(compiled(model.forward, **SMALL), tokens, cuts, cache))
    assert_close(results[1], results[0], torch.float32)


@pytest.mark.parametrize("skip", [(0,), (0, 1)])
def test_layers_left_dense_keep_exact_buffers(model, skip):
    tokens, cuts = torch.randint(0, 64, (2, 60)), [50, 51, 52, 59, 60]
    results = []
    for cache in (static_cache(model, CAPACITY, 2), SalsCache(model.config, CAPACITY)):
        sals_compile.backend._registries.clear()
        run = compiled(model.forward, **SMALL, skip_layers=skip, decode_tokens=7)
        results.append(rollout(run, tokens, cuts, cache))
    assert_close(results[1], results[0], torch.float32)


def test_no_recompilation_over_a_generation(model, through):
    through(**SMALL)
    counters = torch._dynamo.utils.counters
    counters.clear()
    ids = torch.randint(2, 64, (1, 30))
    for _ in range(2):
        cache = SalsCache(model.config, CAPACITY)
        model.generate(ids, past_key_values=cache, max_new_tokens=30, do_sample=False)
        assert counters["stats"]["unique_graphs"] == 2  # prefill and decode
        assert not counters["graph_break"]


def test_explain_shows_the_decode_step_of_a_salscache(model):
    cache = SalsCache(model.config, CAPACITY)
    token = torch.randint(0, 64, (1, 1))
    found = sals_compile.explain(model.forward, token, past_key_values=cache, options={**SMALL, "skip_layers": 0})
    assert [s.status for s in found.sites] == ["dense", "sals"]
    targets = [str(n.target) for n in found.graph_after.graph.nodes]
    assert targets.count("sals.attend.default") == 1
    assert not any("virtual_buffer" in t for t in targets)
    assert cache.state.tokens == int(cache.get_seq_length()) == 0


def test_low_rank_queries_work_with_it(model):
    tokens, cuts = torch.randint(0, 64, (2, 60)), [50, *range(51, 61)]
    results = []
    for cache in (static_cache(model, CAPACITY, 2), SalsCache(model.config, CAPACITY)):
        sals_compile.backend._registries.clear()
        results.append(rollout(compiled(model.forward, **SMALL, query_rank=0.75), tokens, cuts, cache))
    assert_close(results[1], results[0], torch.float32)


def test_a_declined_site_raises_with_the_remedy(model):
    def forward(tokens, past_key_values):
        out = model(tokens, past_key_values=past_key_values)
        handle = past_key_values.layers[0]
        new = torch.ones(1, 2, 1, 16)
        return out.logits, handle.update(new, new)[0].sum()

    with pytest.raises(Exception, match=r"SalsCache.*StaticCache"), torch.no_grad():
        compiled(forward, attention="exact")(torch.randint(0, 64, (1, 4)), SalsCache(model.config, CAPACITY))


def test_errors_name_the_remedy(model):
    run = compiled(model.forward, attention="exact")
    cache = SalsCache(model.config, 40)
    tokens = torch.randint(0, 64, (2, 45))
    rollout(run, tokens, [38, 39], cache)
    with pytest.raises(ValueError, match=r"holds a batch of 2 and the call has 1.*batch_select_indices"):
        rollout(run, tokens[:1, :1], [1], cache)
    rollout(run, tokens[:, :1], [1], cache)
    with pytest.raises(IndexError, match=r"KV cache is full.*max_cache_len"):
        rollout(run, tokens[:, :1], [1], cache)
    cache.crop(-5)
    with pytest.raises(RuntimeError, match=r"tokens of another model.*other options"):
        rollout(compiled(model.forward, **SMALL), tokens[:, :1], [1], cache)
    with pytest.raises(ValueError, match="cannot crop 50 tokens"):
        cache.crop(-50)
    cache.layers[0].cumulative_length.add_(1)
    with pytest.raises(RuntimeError, match=r"slot 36 on and the cache holds 35.*crop\(\) and reset\(\)"):
        rollout(run, tokens[:, :1], [1], cache)


def allocated(call):
    """``(held, peak)``: bytes that the CPU allocator gave while ``call()`` ran and had not got back, at its end and at
    most.
    """
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        kept = call()
        gc.collect()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del kept
    return held, peak


@torch.no_grad()
def test_no_dense_keys_are_allocated(model):
    """A long prefill, another into the filled cache, and decoding: the dense keys and values of one layer live at a
    time, and what stays is a fraction of dense, which goes with the cache.
    """
    model = llama(layers=8)
    capacity = 4096
    c = model.config
    layer = 2 * c.num_key_value_heads * capacity * c.head_dim * 4  # fp32 keys and values
    dense = c.num_hidden_layers * layer
    run = compiled(model.forward, **SMALL)
    calls = [torch.randint(0, 64, (1, length)) for length in (64, 48, 1)]

    def session(cache=None):
        cache = cache or SalsCache(model.config, capacity)
        for tokens in calls:
            run(tokens, past_key_values=cache, logits_to_keep=1)
        return cache

    session()  # compiles, makes the bases
    caches = []
    held, peak = allocated(lambda: caches.append(session()))
    own = caches[0].nbytes()
    assert 0 < own < 0.4 * dense  # int8 latents of half the width and 4-bit values of fp32 keys; rings, rotary rows
    assert held < own + (64 << 10)
    assert peak < own + 5 * layer  # one layer's keys and values, rebuilt in fp32, rotated, written to, laid out
    states = [weakref.ref(t) for t in caches[0].state.tensors()]
    assert all(s() is not None for s in states)
    caches.clear()
    gc.collect()
    assert not any(s() is not None for s in states)


def test_two_models_of_one_shape_keep_their_own_bases():
    models = [llama(), llama()]
    for parameter in models[1].parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tokens, cuts = torch.randint(0, 64, (1, 60)), [40, *range(41, 61)]

    def alone(model):
        torch._dynamo.reset()
        return rollout(compiled(model.forward, **SMALL), tokens, cuts, SalsCache(model.config, CAPACITY))

    expected = [alone(model) for model in models]
    torch._dynamo.reset()
    forward = torch.compile(
        lambda model, *args, **kwargs: model(*args, **kwargs), backend="sals", options={"lowering": "eager", **SMALL}
    )
    for model, wanted in zip(models, expected, strict=True):
        found = rollout(
            lambda *a, model=model, **k: forward(model, *a, **k), tokens, cuts, SalsCache(model.config, CAPACITY)
        )
        assert torch.equal(found, wanted)
