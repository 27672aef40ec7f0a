"""calibrate(): the compiler's own sites, moments equal to sums written by hand, and decoding that uses them."""

from __future__ import annotations

import dataclasses
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exact import assert_close, compiled
from tiny import Attention, CachedAttention, llama, rollout, static_cache
from torch import nn

import sals_compile
from sals_compile import basis, explain
from sals_compile.backend import registry_for
from sals_compile.calibrate import (
    BUDGETS,
    QUERIES,
    STEP,
    Calibration,
    CalibrationError,
    Fingerprint,
    SiteMoments,
    calibrate,
)
from sals_compile.config import OptionError, SalsConfig

SMALL = {"budget": 24, "sinks": 2, "recents": 8}
NAMES = ["model.layers.0.self_attn", "model.layers.1.self_attn"]


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def made(model):
    torch.manual_seed(1)
    return calibrate(model, [torch.randint(0, 64, (1, 90)), torch.randint(0, 64, (2, 40))], progress=False)


def projected(model, tokens):
    """Pre-rotary queries and keys of every layer, by hooks on the projections: ``[tokens, features]``."""
    seen: dict[str, list[torch.Tensor]] = {}
    handles = [
        getattr(layer.self_attn, name).register_forward_hook(
            lambda _module, _inputs, output, key=f"{number}.{name}": seen.setdefault(key, []).append(
                output.flatten(0, 1)
            )
        )
        for number, layer in enumerate(model.model.layers)
        for name in ("q_proj", "k_proj")
    ]
    with torch.no_grad():
        for piece in tokens:
            model(piece)
    for handle in handles:
        handle.remove()
    return {key: torch.cat(values).double() for key, values in seen.items()}


def test_moments_are_the_sums_over_all_batches(model):
    tokens = [torch.randint(0, 64, (1, 90)), torch.randint(0, 64, (2, 40)), torch.randint(0, 64, (50,))]
    result = calibrate(model, tokens, progress=False)
    seen = projected(model, [t if t.dim() == 2 else t[None] for t in tokens])
    assert (result.tokens, result.context, list(result.sites)) == (220, 90, NAMES)
    for number, name in enumerate(NAMES):
        site = result.sites[name]
        key = seen[f"{number}.k_proj"]
        query = seen[f"{number}.q_proj"].view(-1, 2, 2, 16).transpose(0, 1).flatten(1, 2)  # [N, tokens*G, D]
        torch.testing.assert_close(site.key_moment.double(), key.T @ key, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(site.query_moment.double(), query.transpose(1, 2) @ query, rtol=1e-4, atol=1e-4)
        assert site.rotary == "half" and site.weight_sample.numel() == 16
        rotary = model.model.rotary_emb(torch.empty(1), torch.arange(90)[None])
        cos, sin = basis.relative_rows(rotary[0][0], rotary[1][0], "half", 64)
        torch.testing.assert_close(site.relative_cos, cos.float())
        torch.testing.assert_close(site.relative_sin, sin.float())


def test_a_context_cuts_sequences(model):
    tokens = torch.randint(0, 64, (1, 100))
    cut = calibrate(model, [tokens], context=40, progress=False)
    assert (cut.tokens, cut.context) == (100, 40)
    same = calibrate(model, [tokens[:, :40], tokens[:, 40:80], tokens[:, 80:]], progress=False)
    torch.testing.assert_close(cut.sites[NAMES[0]].key_moment, same.sites[NAMES[0]].key_moment)


def test_calibrations_of_two_texts_merge_to_that_of_both(model):
    first, second = (torch.randint(0, 64, (1, 80)) for _ in range(2))
    parts = [calibrate(model, [t], progress=False) for t in (first, second)]
    both = calibrate(model, [first, second], progress=False)
    merged = parts[0].merge(parts[1])
    for name in NAMES:
        torch.testing.assert_close(merged.sites[name].key_moment, both.sites[name].key_moment)


@pytest.mark.parametrize("form", ["object", "path"])
def test_decode_uses_the_bases_of_a_calibration(model, made, form, tmp_path, caplog):
    given = made
    if form == "path":
        given = tmp_path / "basis.safetensors"
        made.save(given)
        assert Calibration.load(given) is Calibration.load(str(given))
    tokens = torch.randint(0, 64, (1, 50))
    cuts = [40, *range(41, 51)]
    run = compiled(model.forward, calibration=given, **SMALL)
    with caplog.at_level(logging.INFO, logger="sals_compile"):
        cache = static_cache(model, 60)
        actual = rollout(run, tokens, cuts, cache)
    assert caplog.text.count("imported 40 cached tokens") == 1
    held = Calibration.load(given) if form == "path" else made
    registry = registry_for(SalsConfig.from_options({"calibration": held, **SMALL}))
    assert registry.caches.get(cache.layers[0].keys).phase == "sparse"
    for number, name in enumerate(NAMES):
        memory = registry.memory(model.model.layers[number].self_attn.k_proj.weight, name)
        expected = made.basis(name, "query_weighted", 14)
        torch.testing.assert_close(memory.tensors["encoder"], expected.encoder)
        assert memory.query_moment is None and memory.key_moment is None  # nothing was observed
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 60))
    assert_close(actual[:, :40], expected[:, :40], torch.float32)  # prefill is dense
    assert (actual - expected)[:, 40:].abs().max() > 1e-4  # decoding is not


def test_full_rank_of_a_calibration_is_exact(model, made):
    """With every coordinate kept and every token attended, whatever the basis: dense."""
    tokens = torch.randint(0, 64, (1, 50))
    cuts = [30, *range(31, 51)]
    options = {"rank": 1.0, "latent_bits": 16, "value_bits": 16, "attention": "reconstruct", **SMALL}
    actual = rollout(compiled(model.forward, calibration=made, **options), tokens, cuts, static_cache(model, 60))
    assert_close(actual, rollout(model.forward, tokens, cuts, static_cache(model, 60)), torch.float32)


def test_another_models_calibration_is_refused(made):
    other = llama()
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.k_proj.weight.mul_(1.5)
    run = compiled(other.forward, calibration=made, **SMALL)
    with pytest.raises(Exception, match="made for another model"):
        rollout(run, torch.randint(0, 64, (1, 40)), [40], static_cache(other, 60))


class Stack(nn.Module):
    """A model that is no transformers model: two bare attentions over embeddings."""

    def __init__(self, rotary: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 64)
        self.first = Attention(4, 2, 16, rotary, True, False)
        self.second = Attention(4, 4, 16, rotary, True, True)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.first(hidden)
        return hidden + self.second(hidden)


@pytest.mark.parametrize("rotary", [False, True])
def test_any_model_whose_sites_match(rotary):
    torch.manual_seed(0)
    model = Stack(rotary).eval()
    result = calibrate(model, [torch.randint(0, 64, (2, 80))], progress=False)
    assert list(result.sites) == ["first", "second"]
    assert [s.rotary for s in result.sites.values()] == ["half" if rotary else "none"] * 2
    assert result.tokens == 160
    tokens = torch.randint(0, 64, (1, 200))
    options = {"budget": 120, "sinks": 4, "recents": 16, "query_block": 16}
    run = compiled(model.forward, calibration=result, **options)
    with torch.no_grad():
        assert run(tokens).shape == (1, 200, 64)


def test_keys_that_go_to_a_cache_are_observed_too():
    """A model that always caches, called by keywords: the keys of the call count, not the buffer's empty slots."""
    model = CachedAttention(4, 2, 16, True, "bool", False, 0.25).eval()
    batch = {"x": torch.randn(1, 50, 64), "start": torch.tensor(0)}
    batch |= {"keys": torch.zeros(1, 2, 80, 16), "values": torch.zeros(1, 2, 80, 16)}
    result = calibrate(model, [batch], progress=False)
    (site,) = result.sites.values()
    with torch.no_grad():
        key = model.k(batch["x"])[0]
    torch.testing.assert_close(site.key_moment, key.T @ key, rtol=1e-4, atol=1e-4)
    assert result.tokens == 50 and site.rotary == "half"


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], ["batches is empty"]),
        ([torch.zeros(1, 90, dtype=torch.long), torch.zeros(1, 5, dtype=torch.long)], ["batch 1", "5 tokens", "16"]),
        ([torch.zeros(1, 20, dtype=torch.long)], ["20 tokens", "32 dims"]),
        ([torch.zeros(1, 50)], ["batch 0", "float32", "token ids"]),
        (torch.zeros(1, 50, dtype=torch.long), ["Tensor", "list"]),
        (["text"], ["batch 0", "str"]),
    ],
)
def test_bad_batches(model, batches, words):
    with pytest.raises(CalibrationError) as error:
        calibrate(model, batches, progress=False)
    for word in words:
        assert word in str(error.value)


def test_activations_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[3, 5] = torch.nan
    with pytest.raises(CalibrationError, match=r"batch 0.*key activations.*layers\.1\.self_attn.*NaN"):
        calibrate(model, [torch.randint(0, 64, (1, 80))], progress=False).save(tmp_path / "a.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_sites_says_so():
    with pytest.raises(CalibrationError, match="no attention site"):
        calibrate(nn.Embedding(64, 8), [torch.zeros(1, 50, dtype=torch.long)], progress=False)


def test_the_model_is_left_as_it_was(model):
    model.train()
    try:
        calibrate(model, [torch.randint(0, 64, (1, 80))], progress=False)
        assert model.training
    finally:
        model.eval()
    tokens = torch.randint(0, 64, (1, 20))
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, model(tokens).logits)


# ---- how concentrated attention is, and what "auto" makes of it ------------------------------------------------------


def test_the_kept_share_is_that_of_the_attention_weights():
    """Against the weights that the model itself returns: mean over heads, best tokens first, of the sampled queries."""
    model = llama(impl="eager")
    tokens = [torch.randint(0, 64, (1, 90)), torch.randint(0, 64, (2, 100))]
    made = calibrate(llama(), tokens, progress=False)
    for number, name in enumerate(NAMES):
        expected, queries = torch.zeros(len(BUDGETS)), 0
        for piece in tokens:
            length = piece.shape[1]
            at = torch.linspace(length // 2, length - 1, QUERIES).round().long().unique()
            with torch.no_grad():
                weights = model(piece, output_attentions=True).attentions[number][:, :, at].mean(1)
            best = weights.sort(-1, descending=True).values.flatten(0, 1)
            queries += len(best)
            expected += torch.stack([best[:, :budget].sum(-1).sum() for budget in BUDGETS])
        assert float(made.sites[name].queries) == queries == 3 * QUERIES
        torch.testing.assert_close(made.sites[name].kept, expected, rtol=1e-4, atol=1e-3)
        assert made.retained(name, 128) == pytest.approx(1.0, abs=1e-4)


def concentrated(made, *shares):
    """The calibration with other curves: site ``i`` keeps ``shares[i]`` up to 64 tokens and everything from 128 on."""
    sites = {
        name: dataclasses.replace(
            made.sites[name],
            kept=torch.tensor([share if budget <= 64 else 1.0 if budget >= 128 else 0.9 for budget in BUDGETS]),
            queries=torch.ones(1),
        )
        for name, share in zip(made.sites, shares, strict=True)
    }
    return dataclasses.replace(made, sites=sites, context=4096)


@given(st.lists(st.floats(0.0, 1.0), min_size=len(BUDGETS), max_size=len(BUDGETS)), st.floats(0.01, 0.99))
def test_a_budget_is_the_smallest_that_keeps_the_mass(shares, mass):
    curve = torch.tensor(sorted(shares))
    site = SiteMoments(torch.eye(4), torch.eye(4)[None], kept=curve * 3, queries=torch.tensor([3.0]))
    made = Calibration({"a": site}, Fingerprint("M", 1, "", ()), 100, 3000)
    budget = made.budget("a", mass)
    assert budget % STEP == 0 and STEP <= budget <= 3008
    assert budget == 3008 or made.retained("a", budget) >= mass
    assert budget == STEP or made.retained("a", budget - STEP) < mass
    for tokens, share in zip(BUDGETS, curve.tolist(), strict=True):
        assert made.retained("a", tokens) == pytest.approx(share, abs=1e-6)
    seen = [made.retained("a", t) for t in (1, 40, 41, 500, 10_000, 10**7)]
    assert seen == sorted(seen)


def test_automatic_budgets_go_by_site(model, made):
    curves = concentrated(made, 0.97, 0.5)
    tokens, cuts = torch.randint(0, 64, (1, 138)), [130, *range(131, 139)]
    run = compiled(model.forward, **(SMALL | {"budget": "auto", "auto_mass": 0.95, "calibration": curves}))
    actual = rollout(run, tokens, cuts, static_cache(model, 300))
    sites = sals_compile.compiled_reports()[-1].sites
    assert [(s.status, s.budget) for s in sites] == [("sals", 64), ("sals", 128)]
    assert "64 of 300" in sites[0].reason and "kept 0.970" in sites[0].reason
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 300))
    assert_close(actual[:, :130], expected[:, :130], torch.float32)
    assert (actual - expected)[:, 130:].abs().max() > 1e-4
    # The same as giving the budgets by hand.
    by_hand = {"budget": 64, "budget_by_site": {NAMES[1]: 128}, "calibration": curves}
    again = rollout(compiled(model.forward, **(SMALL | by_hand)), tokens, cuts, static_cache(model, 300))
    torch.testing.assert_close(actual, again)


def test_layers_that_attend_widely_are_left_dense(model, made):
    tokens, cuts = torch.randint(0, 64, (1, 82)), [80, 81, 82]
    for curves, statuses in ((concentrated(made, 0.94, 0.96), ["dense", "sals"]), (None, ["dense", "dense"])):
        options = (
            SMALL
            | {"budget": 64, "skip_layers": "auto", "auto_mass": 0.95}
            | ({"calibration": curves} if curves else {})
        )
        rollout(compiled(model.forward, **options), tokens, cuts, static_cache(model, 300))
        sites = sals_compile.compiled_reports()[-1].sites
        assert [s.status for s in sites] == statuses
        reason = "kept 0.940 of the attention" if curves else "without a calibration, the first two and the last"
        assert reason in sites[0].reason
    with pytest.raises(Exception, match="knows no attention of site"):
        mute = dataclasses.replace(made.sites[NAMES[0]], queries=torch.zeros(1))
        mute = dataclasses.replace(made, sites={**made.sites, NAMES[0]: mute})
        run = compiled(model.forward, **(SMALL | {"skip_layers": "auto", "calibration": mute}))
        rollout(run, tokens, cuts, static_cache(model, 300))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "auto"}, ["budget='auto'", "calibration is not set", "sals calibrate"]),
        ({"budget": "many"}, ["budget='many'", "'auto'"]),
        ({"auto_mass": 1.0}, ["auto_mass=1.0", "between 0 and 1"]),
        ({"budget_by_site": {"a": 20}}, ["budget_by_site['a']=20", "sinks + recents"]),
        ({"budget_by_site": {"a": "many"}}, ["budget_by_site['a']='many'", "int"]),
    ],
)
def test_bad_automatic_options(options, words):
    with pytest.raises(OptionError) as error:
        SalsConfig.from_options(options)
    for word in words:
        assert word in str(error.value)


def test_explain_predicts_the_mass_that_a_budget_keeps(model, made, tmp_path):
    step = {"input_ids": torch.zeros(1, 1, dtype=torch.int64), "past_key_values": static_cache(model, 60)}
    found = explain(model.forward, options={"calibration": made, **SMALL}, **step)
    assert [s.predicted_mass for s in found.sites] == [made.retained(n, SMALL["budget"]) for n in NAMES]
    found.save_html(tmp_path / "with.html")
    page = (tmp_path / "with.html").read_text()
    assert "predicted retained mass" in page and f"{found.sites[0].predicted_mass:.3f}" in page
    step["past_key_values"] = static_cache(model, 60)
    assert all(s.predicted_mass is None for s in explain(model.forward, options=SMALL, **step).sites)
