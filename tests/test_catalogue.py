"""Every model of the catalogue: its sites rewritten and verified, or declined as expected, and exact mode equal to
eager."""

from __future__ import annotations

import os

import pytest
import torch
from catalogue import ENTRIES, Entry, examine

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
    row = examine(entry, implementation, dynamic=True)
    assert not row.problem, row
    assert row.error < 1e-4, row
