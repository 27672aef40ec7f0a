"""``sals bench drift``: its divergence is that of the definition, and exact mode has none."""

from __future__ import annotations

import pytest
import torch
from tiny import llama

from sals_compile.bench import drift

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model():
    return llama()


def test_exact_mode_does_not_drift(model, monkeypatch):
    monkeypatch.setattr(drift, "CHUNK", 7)  # several pieces, the last one short
    prompt = torch.randint(0, 64, (1, 20))
    found = drift.run(model, prompt, {"lowering": "eager", "attention": "exact"}, steps=24, window=8)
    assert len(found["kl"]) == 3 and len(set(found["tokens"])) > 4
    assert max(map(abs, found["kl"])) < 1e-6
    assert found["top1"] == [1.0] * 3


@torch.no_grad()
def test_divergence_follows_the_definition(model):
    prompt, written = torch.randint(0, 64, (1, 20)), torch.randint(0, 64, (1, 9))
    seen = torch.randn(9, 64).log_softmax(-1)
    kl, agree = drift.divergence(model, prompt, written, seen)
    dense = model(torch.cat((prompt, written), 1)).logits[0, 19:28].log_softmax(-1)
    expected = torch.nn.functional.kl_div(seen, dense, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(kl, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(agree.bool(), dense.argmax(-1) == seen.argmax(-1))


def test_sparse_decoding_has_a_divergence(model):
    prompt = torch.randint(0, 64, (1, 40))
    options = {"lowering": "eager", "budget": 24, "sinks": 2, "recents": 8}
    found = drift.run(model, prompt, options, steps=20, window=10)
    assert min(found["kl"]) > 1e-6 and found["ratio"] == pytest.approx(found["kl"][1] / found["kl"][0])


def test_too_few_steps_are_refused(model):
    with pytest.raises(ValueError, match="at least 20"):
        drift.run(model, torch.zeros(1, 4, dtype=torch.long), {}, steps=19, window=10)
