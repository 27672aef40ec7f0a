"""Bad options fail with the option's name, its value, what is allowed and the nearest valid name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_exact import compiled
from tiny import Attention, llama, rollout, static_cache

import sals_compile
from sals_compile import OptionError, SalsConfig
from sals_compile.config import PRESETS
from sals_compile.kernels import reference


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"atention": "sals"}, ["'atention'", "'sals'", "did you mean 'attention'"]),
        ({"attention": "salz"}, ["attention='salz'", "'reconstruct'", "did you mean 'sals'"]),
        ({"budget": "512"}, ["budget='512'", "str", "int"]),
        ({"budget": True}, ["budget=True", "bool"]),
        ({"budget": 100, "sinks": 16, "recents": 128}, ["budget=100", "sinks + recents", "144"]),
        ({"rank": 1.5}, ["rank=1.5", "(0, 1]"]),
        ({"rank": 0}, ["rank=0", "at least 1"]),
        ({"latent_bits": 3}, ["latent_bits=3", "8, 16"]),
        ({"decoder_bits": 4}, ["decoder_bits=4", "8, 16"]),
        ({"decoder_bits": 8, "latent_bits": 16}, ["decoder_bits=8", "latent_bits is 16"]),
        ({"recents": 4}, ["decode_tokens=8", "recents=4"]),
        ({"skip_layers": 3.5}, ["skip_layers", "indices"]),
        ({"lowering": "indutcor"}, ["did you mean 'inductor'"]),
    ],
)
def test_bad_options(options, parts):
    with pytest.raises(OptionError) as failure:
        SalsConfig.from_options(options)
    for part in parts:
        assert part in str(failure.value)


def test_a_decoder_in_int8():
    """Given, it is what keys are rebuilt from, close to the decoder itself; by default on a GPU alone."""
    half, gpu, cpu = torch.bfloat16, torch.device("cuda"), torch.device("cpu")
    assert SalsConfig().decoder_in_int8(half, gpu)
    assert not SalsConfig().decoder_in_int8(half, cpu) and not SalsConfig().decoder_in_int8(torch.float32, gpu)
    assert not SalsConfig(latent_bits=16).decoder_in_int8(half, gpu)
    assert not SalsConfig(attention="exact").decoder_in_int8(half, gpu)
    model, tokens, cuts = llama(layers=1), torch.randint(0, 64, (1, 44)), [40, 41, 42, 43, 44]
    found = []
    for bits in (None, 16, 8):
        run = compiled(model.forward, budget=24, sinks=2, recents=8, decoder_bits=bits)
        found.append(rollout(run, tokens, cuts, static_cache(model, 64)))
        variants = [v for r in sals_compile.compiled_reports() for v in r._compiled.variants.items()]
        taken = {i.field for (name, _), v in variants if name == "sparse" for i in v.rewritten.inputs}
        assert "decoder" in taken
        assert ("decoder_codes" in taken) == (bits == 8)
    assert torch.equal(found[0], found[1])
    error = (found[2] - found[1]).norm() / found[1].norm()
    assert 0 < error < 1e-2


def test_bad_option_fails_at_the_first_call():
    module = Attention(2, 2, 8, False, True, False)
    with torch.no_grad(), pytest.raises(Exception, match="did you mean 'budget'"):
        compiled(module, buget=8)(torch.randn(1, 4, 16))


def test_rank_over_the_joint_width_names_both():
    with pytest.raises(OptionError, match=r"rank=4096.*E=192"):
        SalsConfig(rank=4096).resolve_rank(192)
    with pytest.raises(OptionError, match="score_rank"):
        SalsConfig(rank=8, score_rank=16).resolve_rank(192)


def test_fractions_and_defaults():
    assert SalsConfig().resolve_rank(192) == (94, 24)
    assert SalsConfig(attention="exact").resolve_rank(192) == (192, 192)


@given(
    fraction=st.floats(0.01, 1, exclude_max=True), width=st.integers(1, 128).map(lambda n: 32 * n),
    bits=st.sampled_from([8, 16]),
)  # fmt: skip
def test_a_fraction_of_the_key_holds_the_scale_too(fraction, width, bits):
    rank, score_rank = SalsConfig(rank=fraction, score_rank=fraction, latent_bits=bits).resolve_rank(width)
    scale = 16 if bits == 8 else 0
    assert 1 <= score_rank <= rank <= width
    # A fraction is rounded as it always was; a scale under a hundredth of the row is forgiven.
    assert rank == 1 or rank * bits + scale <= 1.01 * (fraction * width + 0.5) * bits
    # No more is given away than the scale and the alignment of a row ask for.
    assert rank * bits + scale > (fraction * width - (16 if width >= 512 else 2) - 0.5) * bits


def test_ranks_by_fraction():
    ranks = {width: [SalsConfig(rank=r).resolve_rank(width)[0] for r in (0.5, 0.25)] for width in (192, 1024, 4096)}
    assert ranks == {192: [94, 46], 1024: [512, 256], 4096: [2048, 1024]}
    assert SalsConfig(rank=1.0).resolve_rank(192)[0] == 192
    assert SalsConfig(rank=96).resolve_rank(192)[0] == 96
    assert SalsConfig(rank=0.125).resolve_rank(192) == (22, 22)
    with pytest.raises(OptionError, match="score_rank"):
        SalsConfig(rank=0.125, score_rank=0.25).resolve_rank(192)


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_options_that_can_be_overridden(preset):
    given = SalsConfig.from_options({"preset": preset, "budget": 700})
    assert given.budget == 700
    assert {name: getattr(given, name) for name in PRESETS[preset]} == PRESETS[preset]


@pytest.mark.parametrize(("width", "dim"), [(192, 64), (1024, 128), (4096, 128)])
def test_the_compact_preset_is_as_small_as_the_papers_smallest(width, dim):
    """6.4 times less than 16-bit keys and values, scales counted: what the paper's smallest setting stores."""
    config = SalsConfig.from_options({"preset": "compact"})
    rank, _ = config.resolve_rank(width)
    scales = 2 + 4 * width / reference.value_group(dim)
    stored = rank + width * config.value_bits / 8 + scales
    assert 4 * width / stored >= 6.4


def test_skip_layers_and_dense():
    model = llama(layers=3)
    tokens, cuts = torch.randint(0, 64, (1, 46)), [40, *range(41, 47)]
    small = {"budget": 24, "sinks": 2, "recents": 8}
    for skip, expected in (((0, -1), ["dense", "sals", "dense"]), ("layers.1", ["sals", "dense", "sals"])):
        rollout(compiled(model.forward, skip_layers=skip, **small), tokens, cuts, static_cache(model, 60))
        assert [s.status for s in sals_compile.compiled_reports()[-1].sites] == expected
    run = compiled(model.forward, attention="dense", **small)
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 60))
    torch.testing.assert_close(rollout(run, tokens, cuts, static_cache(model, 60)), expected)


def test_on_decline_error_lists_the_sites():
    model = llama(layers=1, dtype=torch.float64)
    with torch.no_grad(), pytest.raises(Exception, match=r"declined[\s\S]*float64"):
        compiled(model.forward, on_decline="error")(torch.randint(0, 64, (1, 8)), use_cache=False)


@pytest.mark.parametrize("options", [{"attention": "reconstruct"}, {"head_score": "max"}, {"head_score": "mass"},
                                     {"scoring": "rope_free"}, {"basis": "pca"}, {"basis": "weights"},
                                     {"value_bits": 8}, {"value_bits": 16, "latent_bits": 16}])  # fmt: skip
def test_every_mode_decodes_near_dense(options):
    """With most tokens attended and full rank, each mode differs from dense by rounding of codes."""
    model = llama()
    tokens, cuts = torch.randint(0, 64, (1, 56)), [48, *range(49, 57)]
    expected = rollout(model.forward, tokens, cuts, static_cache(model, 80))
    common = {"budget": 47, "sinks": 2, "recents": 8, "rank": 1.0, "score_rank": 1.0}
    actual = rollout(compiled(model.forward, **common | options), tokens, cuts, static_cache(model, 80))
    error = float((actual - expected)[:, 48:].norm() / expected[:, 48:].norm())
    assert 0 < error < 0.12
