"""`sals figures`: what is counted and computed is right, and the files are there. No timing is asserted."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import llama, static_cache

pytest.importorskip("matplotlib")

from sals_compile.bench import figures, modules
from sals_compile.bench.decode import SHAPES
from sals_compile.bench.figures import Decoder, Method, Point, Weights

CPU = torch.device("cpu")
DENSE, FULL, LOW = Method("dense", sals=False), Method("full-rank Q"), Method("low-rank Q = 64", 64)


def is_png(path):
    content = path.read_bytes()
    return content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 10_000


# ---- figure 2 --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=20), st.floats(0.05, 0.99))
def test_rank_for_is_the_smallest_that_keeps_the_share(variances, share):
    ordered = torch.tensor(sorted(variances, reverse=True), dtype=torch.float64)
    rank = figures.rank_for(ordered, share)
    assert ordered[:rank].sum() >= share * ordered.sum() * (1 - 1e-9)
    assert rank == 1 or ordered[: rank - 1].sum() < share * ordered.sum()


def test_spectrum_finds_the_directions_that_data_were_made_of():
    basis = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64)).Q
    wanted = torch.tensor([9.0, 4.0, 1.0, 0.25, 0.0, 0.0], dtype=torch.float64)
    white = torch.randn(50, 6, dtype=torch.float64)
    white = white - white.mean(0)
    white = white @ torch.linalg.inv(torch.linalg.cholesky(white.T @ white / 50)).T  # exactly white
    variances, directions = figures.spectrum(white * wanted.sqrt() @ basis.T + 7)
    torch.testing.assert_close(variances, wanted, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close((directions[:, :4].T @ basis[:, :4]).abs(), torch.eye(4, dtype=torch.float64))
    assert figures.rank_for(variances, 0.9) == 2


def test_keys_are_those_that_the_model_projects_and_caches():
    model, tokens, projected = llama(), torch.randint(0, 64, (1, 40)), {}

    def watch(number, module):
        return module.register_forward_hook(lambda m, i, o: projected.update({number: o[0]}))

    hooks = [watch(n, layer.self_attn.k_proj) for n, layer in enumerate(model.model.layers)]
    cache = static_cache(model, 40)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    keys = figures.observed_keys(model, tokens)
    assert list(keys) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for number, (before, after) in enumerate(keys.values()):
        torch.testing.assert_close(before, projected[number], rtol=1e-4, atol=1e-5)
        stored = cache.layers[number].keys[0].transpose(0, 1).flatten(1)
        torch.testing.assert_close(after, stored, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(before, after, atol=1e-2)


def test_figure_2_of_a_model(tmp_path):
    keys = figures.observed_keys(llama(), torch.randint(0, 64, (1, 60)))
    record = figures.rotary_and_pca(keys, 1, lambda _: None)
    about = modules.environment(CPU)
    figures.plot_rotary(record | {"model": "tiny", "environment": about}, tmp_path / "two.png")
    assert is_png(tmp_path / "two.png")
    assert (record["tokens"], record["width"], record["shown"]) == (60, 32, 1)
    for number, (layer, pair) in enumerate(zip(record["layers"], keys.values(), strict=True)):
        for when, rows in zip(("before", "after"), pair, strict=True):
            part = layer[when]
            assert part["total_variance"] == pytest.approx(float(rows.var(0, correction=0).sum()), rel=1e-4)
            assert 0 < part["leading_two"] < part["total_variance"] and 1 <= part["rank_90"] <= 32
            assert ("points" in part) == (number == 1)
    after = [la["after"]["rank_90"] > la["before"]["rank_90"] for la in record["layers"]]
    assert record["raised"] == sum(after)


# ---- figure 3 --------------------------------------------------------------------------------------------------------


def decoder(method, weights, batch=2, tokens=640, whole=True):
    return Decoder("tiny", method, weights, batch, tokens, 512, CPU, whole)


@pytest.mark.parametrize("method", [DENSE, FULL])
@pytest.mark.parametrize("tokens", [640, 1024])
def test_the_batch_is_the_largest_whose_bytes_fit(method, tokens):
    weights = [Weights.random("tiny", None, CPU) for _ in range(2)]
    held = sum(w.nbytes for w in weights)
    one = 2 * method.cache_bytes(figures.GEOMETRY["tiny"], tokens, 512)
    memory = held + figures.WORKSPACE["cpu"] + 5 * one + (1 << 20)
    batch, size = figures.largest_batch("tiny", method, 2, tokens, 512, memory, CPU, held)
    assert batch >= 5 and size <= memory < size + one
    # What was counted is what is allocated.
    made = decoder(method, weights, batch, tokens)
    stored = [t for la in made.layers for t in la.state.values()] + [t for pair in made.caches for t in pair]
    assert sum(t.nbytes for t in stored) == batch * one
    assert figures.largest_batch("tiny", method, 2, tokens, 512, held, CPU, held)[0] == 0


def test_both_lines_decode_the_same_model_where_the_factors_are_exact():
    torch.manual_seed(0)
    low = [Weights.random("tiny", 64, CPU) for _ in range(2)]
    full = [Weights(**(vars(w) | {"query": w.up @ w.down, "down": None, "up": None})) for w in low]
    with torch.no_grad():
        torch.manual_seed(1)
        first = decoder(LOW, low, whole=False)
        torch.manual_seed(1)
        second = decoder(FULL, full, whole=False)
        a, b = first.step(), second.step()
    assert (a - b).float().norm() < 0.05 * b.float().norm()  # bf16, and other tokens may be selected
    assert all(w.nbytes > f.nbytes for w, f in zip(low, full, strict=True))


def test_a_step_of_the_whole_model_picks_its_next_token():
    torch.manual_seed(0)
    with torch.no_grad():
        for method in (DENSE, FULL):
            made = decoder(method, [Weights.random("tiny", None, CPU)])
            made.step()
            assert made.token.shape == (2,) and 0 <= int(made.token.min()) <= int(made.token.max()) < SHAPES["tiny"][5]


def test_dense_attends_to_its_whole_cache_and_writes_the_new_token():
    torch.manual_seed(0)
    made = decoder(DENSE, [Weights.random("tiny", None, CPU)], whole=False)
    query, key, value = torch.randn(2, 1, 4, 64), torch.randn(2, 1, 2, 64), torch.randn(2, 1, 2, 64)
    query, key, value = (t.bfloat16() for t in (query, key, value))
    found = made.attend(0, query, key, key, value)
    keys, values = made.caches[0]
    torch.testing.assert_close(keys[:, :, -1], key[:, 0])
    wide = [t.float().repeat_interleave(2, 1) for t in (keys, values)]
    logits = torch.einsum("blhd,bhsd->bhls", query.float(), wide[0]) / 8
    expected = torch.einsum("bhls,bhsd->blhd", logits.softmax(-1), wide[1])
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)


def test_speedups_are_over_the_fastest_dense_kernel_that_ran():
    points = [
        Point("dense", 1024, 2, 100.0),
        Point("dense", 1024, 2, 50.0),
        Point("full-rank Q", 1024, 6, 30.0),
        Point("dense", 2048, 1, 0.0, error="OutOfMemoryError"),
        Point("full-rank Q", 2048, 1, 10.0),
        Point("low-rank Q = 64", 1024, 6, 0.0, error="OutOfMemoryError"),
    ]
    assert figures._ratios(points) == {"full-rank Q": {1024: pytest.approx(5.0)}}


def test_the_command_writes_pictures_and_the_numbers_behind_them(tmp_path, capsys):
    arguments = ["--only", "1", "3", "--device", "cpu", "--shape", "tiny", "--lengths", "640", "1024"]
    assert figures.main([*arguments, "--query-rank", "64", "--memory-gib", "0.08", "--out", str(tmp_path)]) == 0
    one, three = (json.loads((tmp_path / f).read_text()) for f in ("figure1_modules.json", "figure3_speedup.json"))
    assert is_png(tmp_path / "figure1_modules.png") and is_png(tmp_path / "figure3_speedup.png")
    assert {r["method"] for r in one["rows"]} == set(modules.METHODS)
    assert all(0 <= r["topk_share"] < 1 for r in one["rows"])
    for key in ("block", "serving"):
        assert [p["tokens"] for p in three[key]] == [640] * 3 + [1024] * 3
        assert not any(p["error"] for p in three[key]), three[key]
        assert set(three[f"{key}_speedup"]) == {"full-rank Q", "low-rank Q = 64"}
    assert all(p["bytes"] <= three["memory_bytes"] for p in three["serving"])
    assert three["environment"]["date"] and three["environment"]["device"]
    assert "figure3_speedup.png" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--lengths", "512"], ["--lengths", "1000"], ["--only", "4"], []])
def test_bad_arguments_say_so(arguments, tmp_path, capsys):
    out = ["--out", str(tmp_path)] if arguments else []
    with pytest.raises(SystemExit) as left:
        figures.main([*arguments, *out])
    assert left.value.code == 2
    assert (arguments or ["--out"])[0] in capsys.readouterr().err
