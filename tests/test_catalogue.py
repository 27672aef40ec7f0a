"""Every model of the catalogue: its sites rewritten and verified, or declined as expected, and exact mode equal to
eager."""

from __future__ import annotations

import cProfile
import dataclasses
import json
import os
import pstats
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sals_compile
from sals_compile import catalogue, cli
from sals_compile.catalogue import ENTRIES, PROFILES, Entry

DEEP = os.environ.get("SALS_TEST_PROFILE") == "deep"

# In CI each model runs once, in the implementation that shows the compiler the most (eager), and a few of them in bf16
# and with symbolic sizes; the deep profile runs all in each.
SOME = {
    "fp32": tuple(e.name for e in ENTRIES),
    "bf16": ("Llama", "gpt-oss", "T5", "Llama, original complex form", "nn.TransformerEncoderLayer", "FlexAttention"),
    "fp32-dynamic": ("ViT", "nn.MultiheadAttention", "nn.TransformerEncoder, causal and padded"),
    "bf16-dynamic": ("nn.MultiheadAttention",),
}
CASES = [
    (entry, implementation, profile)
    for entry, implementation, profile in catalogue.cases(ENTRIES, list(PROFILES))
    if DEEP
    or (
        entry.name in SOME[profile]
        and (implementation == entry.implementations[-1] or (entry.name == "Llama" and profile == "fp32"))
    )
]


@pytest.mark.parametrize(
    ("entry", "implementation", "profile"), CASES, ids=lambda v: v.name if isinstance(v, Entry) else str(v)
)
def test_model(entry: Entry, implementation: str | None, profile: str) -> None:
    rows = catalogue.examine(entry, implementation, profile)
    assert [r.phase for r in rows] == (["prefill", "decode"] if entry.cached else ["forward"])
    for row in rows:
        assert row.verdict == ("declined" if entry.declined else "rewritten"), row


def test_table_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("above\n<!-- table:models -->\nold\n<!-- /table:models -->\nbelow\n")
    names = ["nn.multihead", "original complex"]
    assert cli.main(["doctor", "--models", *names, "--profiles", "fp32", "bf16", "--markdown", str(document)]) == 0
    out = capsys.readouterr().out
    assert "2 models, 6 rows: 6 rewritten" in out
    text = document.read_text()
    assert text.startswith("above\n<!--") and text.endswith("-->\nbelow\n") and "old" not in text
    assert "| Llama, original complex form | own | prefill 1 of 1, decode 1 of 1 |" in text


def test_verdicts_of_the_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong expectation fails; a model that this transformers does not have, or no transformers, skips."""
    layer = next(e for e in ENTRIES if e.name == "nn.MultiheadAttention")
    absent = Entry("absent", catalogue._transformers("NoSuchModel"), catalogue.decode, 2)
    monkeypatch.setattr(catalogue, "ENTRIES", (dataclasses.replace(layer, sites=2), absent))
    assert cli.main(["doctor", "--models", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    failed, skipped = found["models"]
    assert not found["ok"] and (failed["verdict"], skipped["verdict"]) == ("failed", "skipped")
    assert "rewritten per graph [1], expected 2" in failed["detail"] and "has no NoSuchModel" in skipped["detail"]
    monkeypatch.setitem(sys.modules, "transformers", None)
    (row,) = next(catalogue.rows([(absent, None, "fp32")]))
    assert row.verdict == "skipped" and "pip install 'sals-compile[transformers]'" in row.detail
    for arguments, message in ((["no such"], "no such model"), (["--profiles", "fp8"], "choose from fp32")):
        assert cli.main(["doctor", "--models", *arguments]) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["doctor", "--profiles", "bf16"]) == 2


def test_readme_has_every_model() -> None:
    """Its table is made by `sals doctor --models --profiles all --markdown README.md`."""
    readme = (Path(__file__).resolve().parent.parent / "README.md").read_text()
    table = readme.partition("<!-- table:models -->")[2].partition("<!-- /table:models -->")[0]
    listed = dict.fromkeys(line.split(" | ")[0][2:] for line in table.strip().splitlines()[2:] if line.startswith("| "))
    assert list(listed) == [e.name for e in ENTRIES]
    assert "failed" not in table and "skipped" not in table


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
