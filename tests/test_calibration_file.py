"""Calibration files: what is written is read, what is wrong is refused, and a failure leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sals_compile import basis
from sals_compile.calibrate import Calibration, CalibrationError, Fingerprint, SiteMoments, sample


def model(seed=0, width=6):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))


def moments(seed=0, heads=2, dim=4, rotary="half", tokens=30):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(tokens, heads * dim, generator=generator)
    queries = torch.randn(heads, tokens, dim, generator=generator)
    relative = {}
    if rotary != "none":
        angles = torch.arange(5).unsqueeze(1) * torch.tensor([1.0, 0.1]).repeat(2 if rotary == "half" else 1)
        angles = angles if rotary == "half" else angles.repeat_interleave(2, -1)
        relative = {"relative_cos": angles.cos(), "relative_sin": angles.sin()}
    return SiteMoments(
        keys.T @ keys,
        queries.transpose(1, 2) @ queries,
        rotary,
        weight_sample=sample(torch.ones(8, 3) * seed),
        **relative,
    )


def calibration(seed=0, names=("model.layers.0.self_attn", "model.layers.1.self_attn"), rotary="half", context=64):
    sites = {name: moments(seed + i, rotary=rotary) for i, name in enumerate(names)}
    return Calibration(sites, Fingerprint.of(model()), 30, context)


@given(st.sampled_from(["none", "half", "interleaved"]), st.integers(0, 1000), st.integers(1, 8))
def test_a_saved_calibration_gives_the_same_bases(tmp_path_factory, rotary, seed, rank):
    path = tmp_path_factory.mktemp("c") / "a.safetensors"
    made = calibration(seed, rotary=rotary)
    made.save(path)
    read = Calibration.load(path)
    assert read.fingerprint == made.fingerprint
    assert (read.tokens, read.context, list(read.sites)) == (made.tokens, made.context, list(made.sites))
    for name in made.sites:
        for method in ("query_weighted", "pca"):
            first, second = made.basis(name, method, rank), read.basis(name, method, rank)
            assert torch.equal(first.encoder, second.encoder) and torch.equal(first.decoder, second.decoder)
            assert first.method == method and first.rank == rank


def test_the_basis_is_that_of_the_moments():
    made = calibration()
    site = made.sites["model.layers.0.self_attn"]
    expected = basis.query_weighted(site.key_moment, site.query_moment, site.relative(), "half", 3)
    assert torch.equal(made.basis("model.layers.0.self_attn", "query_weighted", 3).encoder, expected.encoder)
    per_head = made.basis("model.layers.0.self_attn", "pca", 3, joint=False)
    assert bool(((per_head.encoder.view(2, 4, 3).abs().amax(1) > 0).sum(0) == 1).all())


@given(st.integers(0, 100), st.integers(101, 200))
def test_merging_adds_and_commutes(first, second):
    a, b = calibration(first, context=64), calibration(second, context=128)
    merged = a.merge(b)
    assert merged.tokens == 60 and merged.context == 128
    for name in a.sites:
        torch.testing.assert_close(merged.sites[name].key_moment, a.sites[name].key_moment + b.sites[name].key_moment)
        torch.testing.assert_close(merged.sites[name].query_moment, b.merge(a).sites[name].query_moment)


def test_a_cast_model_is_the_same_model_and_another_is_not():
    made = calibration()
    made.check(model())
    made.check(model().to(torch.bfloat16))
    made.check(model().to(torch.float16))
    for other in (model(seed=1), model(width=7)):
        with pytest.raises(CalibrationError) as error:
            made.check(other)
        assert str(Fingerprint.of(other)) in str(error.value) and str(made.fingerprint) in str(error.value)


def test_a_site_knows_its_weight():
    made = calibration(seed=3)
    name = "model.layers.0.self_attn"
    made.basis(name, "pca", 2, weight=torch.full((8, 3), 3.0, dtype=torch.bfloat16))
    for weight in (torch.full((8, 3), 4.0), torch.full((4, 3), 3.0)):
        with pytest.raises(CalibrationError, match="another model"):
            made.basis(name, "pca", 2, weight=weight)


def test_merging_different_models_names_both():
    a = calibration()
    b = dataclasses.replace(a, fingerprint=Fingerprint.of(model(seed=1)))
    with pytest.raises(CalibrationError) as error:
        a.merge(b)
    assert str(a.fingerprint) in str(error.value) and str(b.fingerprint) in str(error.value)
    with pytest.raises(CalibrationError, match="in one calibration only"):
        a.merge(calibration(names=("model.layers.0.self_attn",)))
    with pytest.raises(CalibrationError, match=r"half .* interleaved"):
        a.merge(calibration(rotary="interleaved"))


@pytest.mark.parametrize(
    ("site", "method", "rank", "words"),
    [
        ("model.layers.7.self_attn", "pca", 2, ["'model.layers.7.self_attn'", "nearest", "Calibrate this model"]),
        ("model.layers.0.self_attn", "weights", 2, ["takes no calibration"]),
        ("model.layers.0.self_attn", "magic", 2, ["'magic'", "'query_weighted'"]),
        ("model.layers.0.self_attn", "pca", 9, ["rank=9", "1 to 8"]),
    ],
)
def test_bad_requests(site, method, rank, words):
    with pytest.raises(ValueError) as error:
        calibration().basis(site, method, rank)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.safetensors"
    calibration().save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep) if isinstance(keep, float) else keep])
    with pytest.raises(CalibrationError, match=r"truncated.*sals calibrate"):
        Calibration.load(path)


def test_foreign_files_are_refused(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "a.safetensors"
    with pytest.raises(CalibrationError, match="no calibration file"):
        Calibration.load(path)
    path.write_text("not at all")
    with pytest.raises(CalibrationError, match="truncated or of another kind"):
        Calibration.load(path)
    save_file({"weight": torch.ones(2)}, str(path))
    with pytest.raises(CalibrationError, match="holds tensors but no calibration"):
        Calibration.load(path)
    save_file({"weight": torch.ones(2)}, str(path), {"format": "sals-calibration", "version": "99"})
    with pytest.raises(CalibrationError, match=r"version 99.*version 2"):
        Calibration.load(path)
    save_file({"weight": torch.ones(2)}, str(path), {"format": "sals-calibration", "version": "2"})
    with pytest.raises(CalibrationError, match="damaged"):
        Calibration.load(path)


@pytest.mark.parametrize("damage", ["missing", "shape", "nan", "rotary", "fingerprint"])
def test_inconsistent_files_are_refused(tmp_path, damage):
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    path = tmp_path / "a.safetensors"
    calibration().save(path)
    with safe_open(str(path), framework="pt") as opened:
        metadata = opened.metadata()
    tensors = load_file(str(path))
    name = "model.layers.0.self_attn/key_moment"
    description = json.loads(metadata["calibration"])
    if damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = torch.ones(8, 7)
    elif damage == "nan":
        tensors[name] = tensors[name] * torch.nan
    elif damage == "rotary":
        description["rotary"]["model.layers.0.self_attn"] = "spiral"
    else:
        del description["fingerprint"]["digest"]
    save_file(tensors, str(path), metadata | {"calibration": json.dumps(description)})
    with pytest.raises(CalibrationError, match="damaged"):
        Calibration.load(path)


def test_nothing_is_written_on_failure(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    good = calibration()
    good.save(path)
    before = path.read_bytes()
    name = "model.layers.0.self_attn"
    bad = dataclasses.replace(good.sites[name], key_moment=torch.full((8, 8), torch.inf))
    with pytest.raises(CalibrationError, match=r"layers\.0\.self_attn.*infinity.*nothing was written"):
        dataclasses.replace(good, sites={**good.sites, name: bad}).save(path)

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="no space"):
        calibration(seed=5).save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]
