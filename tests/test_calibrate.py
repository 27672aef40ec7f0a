"""calibrate(): the compiler's own sites, moments equal to sums written by hand, and decoding that uses them."""

from __future__ import annotations

import logging

import pytest
import torch
from test_exact import assert_close, compiled
from tiny import Attention, CachedAttention, llama, rollout, static_cache
from torch import nn

from sals_compile import basis
from sals_compile.backend import registry_for
from sals_compile.calibrate import Calibration, CalibrationError, calibrate
from sals_compile.config import SalsConfig

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
        expected = made.basis(name, "query_weighted", 16)
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
