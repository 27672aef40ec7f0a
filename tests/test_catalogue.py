"""Every model of the catalogue: its sites rewritten and verified, or declined as expected, and exact mode equal to
eager."""

from __future__ import annotations

import cProfile
import os
import pstats
from types import SimpleNamespace

import pytest
import torch
from catalogue import ENTRIES, Entry, examine

import sals_compile

DEEP = os.environ.get("SALS_TEST_PROFILE") == "deep"

# In CI each model runs once, in the implementation that shows the compiler the most (eager), and a few of them in bf16
# and with symbolic sizes; the deep profile runs all in each.
CASES = [(e, i) for e in ENTRIES for i in (e.implementations if DEEP or e.name == "Llama" else e.implementations[-1:])]
ALSO_BF16 = ("Llama", "gpt-oss", "T5", "Llama, original complex form", "nn.TransformerEncoderLayer", "FlexAttention")
ALSO_DYNAMIC = ("ViT", "nn.MultiheadAttention", "nn.TransformerEncoder, causal and padded")

IDS = {"ids": lambda v: v.name if isinstance(v, Entry) else str(v)}


def cases(names: tuple[str, ...]) -> list[tuple[Entry, str | None]]:
    return CASES if DEEP else [(e, e.implementations[-1]) for e in ENTRIES if e.name in names]


@pytest.mark.parametrize(("entry", "implementation"), CASES, **IDS)
def test_model(entry: Entry, implementation: str | None) -> None:
    row = examine(entry, implementation)
    assert not row.problem, row
    assert row.error < 1e-4, row


@pytest.mark.parametrize(("entry", "implementation"), cases(ALSO_BF16), **IDS)
def test_model_bf16(entry: Entry, implementation: str | None) -> None:
    row = examine(entry, implementation, torch.bfloat16)
    assert not row.problem, row
    assert row.error < 5e-2, row


@pytest.mark.parametrize(("entry", "implementation"), cases(ALSO_DYNAMIC), **IDS)
def test_model_with_symbolic_sizes(entry: Entry, implementation: str | None) -> None:
    if entry.static:
        pytest.skip(entry.static)
    row = examine(entry, implementation, dynamic=True)
    assert not row.problem, row
    assert row.error < 1e-4, row


def test_matching_is_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python calls made by matching and verification, per node, in a model of 4 layers and in one of 16."""
    import transformers

    from sals_compile import backend

    def calls_per_node(layers: int) -> float:
        profile = cProfile.Profile()
        for name in ("match_graph", "verify"):
            original = getattr(transform, name)
            monkeypatch.setattr(backend, name, lambda *a, run=original: profile.runcall(run, *a))
        torch._dynamo.reset()
        sals_compile.report._reports.clear()
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        config = transformers.LlamaConfig(vocab_size=96, num_hidden_layers=layers, **sizes)
        model = transformers.LlamaForCausalLM(config).eval()
        cache = transformers.StaticCache(config=config, max_cache_len=32)
        options = {"attention": "exact", "lowering": "eager"}
        with torch.no_grad():
            torch.compile(model.forward, backend="sals", options=options)(
                torch.ones(1, 8, dtype=torch.long), past_key_values=cache
            )
        (report,) = sals_compile.compiled_reports()
        assert report.rewritten == layers
        return pstats.Stats(profile).total_calls / len(report._compiled.gm.graph.nodes)

    transform = SimpleNamespace(match_graph=backend.match_graph, verify=backend.verify)
    assert calls_per_node(16) < 1.2 * calls_per_node(4)
