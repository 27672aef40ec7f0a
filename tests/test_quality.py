"""The quality and needle benchmarks: their metrics, and their whole path on a tiny model."""

from __future__ import annotations

import json
import random

import pytest
import torch
from tiny import llama, rollout, static_cache

import sals_compile
from sals_compile.bench import needles, quality
from sals_compile.calibrate import calibrate
from sals_compile.kernels import reference

SMALL = {"budget": 40, "sinks": 2, "recents": 16, "skip_layers": (0,)}


class Letters:
    """A tokenizer of single characters, without a chat template."""

    bos_token = None
    eos_token_id = 1000

    def __call__(self, text, return_tensors=None, **_):
        ids = [ord(c) % 64 for c in text]
        return type("Encoding", (dict,), {"input_ids": property(lambda self: self["input_ids"])})(
            input_ids=torch.tensor([ids]) if return_tensors else ids
        )

    def decode(self, ids, **_):
        return "".join(chr(64 + int(i)) for i in ids)


def text(length=3000, seed=0):
    draw = random.Random(seed)
    return "".join(chr(draw.randrange(64, 128)) for _ in range(length))


def test_the_distances_of_a_distribution_to_itself_are_none():
    logits = torch.randn(5, 20).log_softmax(-1)
    found = quality.compare(logits, logits, torch.randint(0, 20, (5,)))
    assert {k: float(v.mean()) for k, v in found.items()} == {"nll": 0.0, "kl": 0.0, "top1": 1.0, "top_p": 1.0}


def test_the_distances_of_two_known_distributions():
    dense = torch.tensor([[0.5, 0.45, 0.05]]).log()
    other = torch.tensor([[0.25, 0.7, 0.05]]).log()
    found = quality.compare(dense, other, torch.tensor([0]))
    expected = 0.5 * torch.tensor(2.0).log() + 0.45 * torch.tensor(0.45 / 0.7).log()
    torch.testing.assert_close(found["kl"], expected[None])
    torch.testing.assert_close(found["nll"], torch.tensor(2.0).log()[None])  # worse by log 2 on the true token
    assert float(found["top1"]) == 0 and float(found["top_p"]) == 1.0


def test_the_nucleus_is_the_smallest_set_that_reaches_its_share():
    sets = quality.nucleus(torch.tensor([[0.1, 0.6, 0.3], [0.05, 0.94, 0.01]]).log())
    assert sets.tolist() == [[False, True, True], [False, True, False]]


def test_exact_mass_is_the_causal_softmax():
    query, key = torch.randn(1, 3, 4, 8), torch.randn(1, 10, 2, 8)
    mass = quality.exact_mass(query, key, torch.tensor([[4, 5, 6]]), 0.5)
    head = (query[0, 1, 3] @ key[0, :6, 1].T * 0.5).softmax(-1)
    torch.testing.assert_close(mass[0, 1, 3, :6], head)
    assert bool((mass[0, 1, :, 6:] == 0).all())


@pytest.fixture(scope="module")
def results():
    rows = {
        "score": ("a", dict(SMALL)),
        "exact": (
            "b",
            SMALL | {"rank": 1.0, "latent_bits": 16, "value_bits": 16, "selection": "oracle", "budget": 122},
        ),
        "oracle": ("c", SMALL | {"selection": "oracle"}),
        "random": ("d", SMALL | {"selection": "random"}),
        "two-bit": ("f", SMALL | {"value_bits": 2}),
        "plain": ("f", SMALL | {"value_bits": 2, "values": "min-max"}),
        "auto": ("e", {"sinks": 2, "recents": 16, "budget": "auto", "auto_mass": 0.5, "skip_layers": ["auto", 0]}),
    }
    torch.manual_seed(0)
    corpora = {"letters": (text(), text(seed=1))}
    model = llama()
    return quality.run(
        model, Letters(), rows, tokens=160, depths=[124, 140], positions=10, chunk=4, texts=corpora, progress=False
    )


def test_every_row_is_measured_at_every_depth(results):
    for result in results:
        assert result.positions == 20 and list(result.kl_by_depth) == ["letters0@124", "letters0@140"]
        assert result.kl >= 0 and 0 <= result.top1 <= 1
        assert list(result.retained_by_layer) == ["model.layers.1.self_attn"]


def test_selections_order_as_they_must(results):
    by_name = {r.name: r for r in results}
    assert by_name["oracle"].recall == 1.0
    assert by_name["score"].recall > by_name["random"].recall
    assert by_name["oracle"].retained > by_name["random"].retained
    assert by_name["exact"].kl < 0.2 * by_name["random"].kl


def test_plain_values_reach_from_minimum_to_maximum(results):
    value = torch.randn(50, 2, 64)

    def stored():
        return reference.dequantize_values(*reference.quantize_values(value, 2), 64)

    fitted = stored()
    with quality._plain_values():
        plain = stored()
    grouped = value.unflatten(-1, (2, 32))
    for extreme in (torch.amin, torch.amax):
        found = extreme(plain.unflatten(-1, (2, 32)), -1)
        torch.testing.assert_close(found, extreme(grouped, -1), rtol=2e-3, atol=2e-3)
    assert (plain - value).square().mean() > 1.2 * (fitted - value).square().mean()
    torch.testing.assert_close(stored(), fitted)
    by_name = {r.name: r for r in results}
    assert by_name["plain"].options["values"] == "min-max"
    assert by_name["plain"].kl != by_name["two-bit"].kl


def test_storage_counts_everything(results):
    """One dense layer, one sparse: latents, scales, value codes and scales, rings, rotary rows, block means."""
    result = results[0]
    slots, width = 256, 2  # padded to whole blocks of 128; stored for a 16-bit model
    latent = slots * (14 + 2)
    values = slots * (2 * 8 + 2 * 2 * width)
    rings = 2 * 16 * 32 * width
    rows = 2 * slots * 16 * width + 2 * 2 * 16 * 4 + 16 * 4
    assert result.bytes == pytest.approx((latent + values + rings + rows) / 160 + 2 * 32 * width)
    assert result.dense_bytes == 2 * 2 * 32 * width
    assert result.key_share == pytest.approx(0.25)
    assert result.layer_ratio == pytest.approx(2 * 32 * width / (14 + 2 + 2 * 8 + 2 * 2 * width))


def test_a_shared_prefill_is_the_rows_own(results):
    """What start_at() hands to a row equals what that row's own compiled prefill makes."""
    torch.manual_seed(0)
    model = llama()
    tokens = quality.windows_of(Letters(), text(seed=1), 160, 1, "test")[0]
    pieces = quality.windows_of(Letters(), text(), 160, 4, "calibration")
    made = calibrate(model, pieces, progress=False)
    torch._dynamo.reset()
    options = SMALL | {"lowering": "eager", "calibration": made}
    run = torch.compile(model.forward, backend="sals", options=options, dynamic=False)
    cuts = [124, *range(128, 132, 4), 132, 134]
    own = rollout(run, tokens, cuts, static_cache(model, 160))[0, 124:134].log_softmax(-1)
    dense = rollout(model.forward, tokens, cuts, static_cache(model, 160))[0, 124:134].log_softmax(-1)
    kl = float(quality.divergence(dense, own).mean())
    assert kl == pytest.approx(results[0].kl_by_depth["letters0@124"], rel=0.02)


@pytest.fixture(scope="module")
def stateless():
    torch.manual_seed(0)
    model = llama()
    tokens = quality.windows_of(Letters(), text(seed=1), 300, 1, "test")[0]
    made = calibrate(model, quality.windows_of(Letters(), text(), 300, 4, "calibration"), progress=False)
    # A block has twelve runs of two queries.
    options = {"budget": 96, "sinks": 2, "recents": 8, "query_block": 24, "skip_layers": (), "head_score": "sum"}
    return quality.stateless(model, tokens, made, options, positions=100, rules=quality.BLOCK_RULES)


def test_every_rule_of_a_block_is_measured(stateless):
    assert list(stateless) == list(quality.BLOCK_RULES)
    for rule, row in stateless.items():
        assert row["kl"] >= 0 and 0 < row["retained"] <= 1, rule
        assert row["retained"] <= stateless["oracle"]["retained"] + 1e-6
    for rule in ("mean", "query-mass"):
        assert stateless[rule]["retained"] > stateless["random"]["retained"]


def test_the_operators_rule_is_the_one_of_its_name(stateless):
    """The bench's own statement of the rule, run by run and head by head, chooses what the operator chooses."""
    operator, own = stateless["operator"], stateless["run-max"]
    assert operator == pytest.approx(own, rel=1e-3, abs=1e-6)
    assert operator != pytest.approx(stateless["mean"], rel=1e-3, abs=1e-6)


def test_a_rule_that_is_none_is_named():
    with pytest.raises(quality.QualityError, match="rule 'nearest': allowed are operator"):
        quality.stateless(llama(), torch.zeros(1, 300, dtype=torch.long), None, {}, rules=["nearest"])


def test_impossible_measurements_say_why():
    for arguments, words in (
        ({"depths": [155]}, "do not fit a window"),
        ({"depths": [30]}, "does not exceed its budget"),
        ({"tokens": 5000}, "give a longer text"),
    ):
        with pytest.raises(quality.QualityError, match=words):
            quality.run(
                llama(),
                Letters(),
                {"a": ("a", dict(SMALL))},
                **({"tokens": 160, "positions": 10, "progress": False, "texts": {"x": (text(), text())}} | arguments),
            )


def test_every_position_of_the_default_depths_has_a_successor():
    depths = quality.default_depths(4096, 128)
    assert depths[0] == 2048 and len(depths) == 4 and depths[-1] + 128 == 4095


def test_bad_arguments_exit_with_two(capsys):
    assert quality.main(["--rows", "nothing"]) == 2
    assert "no row 'nothing'" in capsys.readouterr().err
    assert quality.main(["--row", "a"]) == 2
    assert "NAME:option=value" in capsys.readouterr().err


def test_a_row_is_parsed():
    name, (method, options) = quality.parse_row("mine:rank=0.25,basis=pca,budget=1024")
    assert (name, method, options) == ("mine", "mine", {"rank": 0.25, "basis": "pca", "budget": 1024})
    sals_compile.SalsConfig.from_options(options)


def test_a_plot_is_drawn(results, tmp_path):
    pytest.importorskip("matplotlib")
    quality.plot(results, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000
    quality.table(results, "title")
    json.dumps([vars(r) for r in results])


# ---- needles --------------------------------------------------------------------------------------------------------


def test_a_text_is_exactly_as_long_as_asked_and_holds_its_values():
    class Plain(Letters):
        def __call__(self, text, **_):
            return {"input_ids": [ord(c) for c in text]}

    made = needles.build(Plain(), text(6000), 3000, seed=3)
    assert made.tokens.shape == (1, 3000)
    whole = "".join(chr(i) for i in made.tokens[0].tolist())
    assert [q.task for q in made.questions] == ["passkey", *["multi-key"] * 4, "multi-value"]
    for question in made.questions:
        asked = "".join(map(chr, question.tail))
        assert all(value in whole and value not in asked for value in question.values)
        assert any(abs(whole.index(value) / 3000 - question.depth) < 0.1 for value in question.values)
        assert "?" in asked and asked.endswith(" is" if len(question.values) == 1 else " are")
    # The key asked for is the one that the value stands beside.
    for question in made.questions[1:5]:
        key = "".join(map(chr, question.tail)).rsplit(" ", 2)[1]
        assert f"number for {key} is {question.values[0]}." in whole


def test_found_values():
    assert needles.found_in(" 123 4567, and", ["1234567"]) == 1.0
    assert needles.found_in("1234567 and 7654320", ["1234567", "7654321"]) == 0.5


def test_needles_run_on_both_models():
    scores = needles.run(
        llama(),
        Letters(),
        SMALL | {"budget": 64},
        tasks=["passkey", "multi-value"],
        tokens=700,
        count=1,
        steps=3,
        text=text(),
        progress=False,
    )
    assert [a.task for a in scores.answers] == ["passkey", "multi-value"]
    assert scores.summary()["all"]["prompts"] == 2
    json.dumps(scores.summary())


def test_scores_have_their_spread():
    pairs = [(1.0, 1.0)] * 5 + [(1.0, 0.0)] + [(0.0, 0.0)] * 4  # of ten prompts the dense model answers six
    scores = needles.Scores({}, [needles.Answers("passkey", 0.5, ["1"], *pair, "", "") for pair in pairs])
    row = scores.summary()["passkey"]
    assert row == scores.summary()["all"]
    assert (row["dense"], row["sals"], row["ratio"]) == pytest.approx((0.6, 0.5, 5 / 6))
    assert row["dense_error"] == pytest.approx((0.6 * 0.4 / 10) ** 0.5)
    assert row["sals_error"] == pytest.approx((0.5 * 0.5 / 10) ** 0.5)
    # Pairs: five answers of 1 for an expected 5/6, one of 0 for it, four of 0 for 0.
    assert row["ratio_error"] == pytest.approx(((5 * (1 / 6) ** 2 + (5 / 6) ** 2) / 9 / 10) ** 0.5 / 0.6)
    same = needles.Scores({}, [needles.Answers("passkey", 0.5, ["1"], 1.0, 1.0, "", "")] * 3)
    assert same.summary()["all"]["ratio_error"] == 0


def test_needles_of_the_dense_model_are_those_of_generate():
    """What "dense" answers here is what plain greedy decoding of the whole prompt answers."""
    model = llama()
    made = needles.build(Letters(), text(), 700, 0, ["passkey"])
    scores = needles.run(
        model,
        Letters(),
        SMALL | {"budget": 64},
        tasks=["passkey"],
        tokens=700,
        count=1,
        steps=4,
        text=text(),
        progress=False,
    )
    tokens = torch.cat((made.tokens, torch.tensor([made.questions[0].tail])), 1)
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat((tokens, model(tokens).logits[:, -1:].argmax(-1)), 1)
    assert scores.answers[0].dense_text == Letters().decode(tokens[0, -4:].tolist())


def test_bad_needles():
    with pytest.raises(needles.QualityError, match="allowed are passkey"):
        needles.build(Letters(), text(), 700, 0, ["haystack"])
    with pytest.raises(needles.QualityError, match="the text has 3000 tokens"):
        needles.build(Letters(), text(), 9000, 0)
