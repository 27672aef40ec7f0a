"""Every model of the catalogue: its sites rewritten and verified, or declined as expected, and exact mode equal to
eager."""

from __future__ import annotations

import os

import pytest
import torch
from catalogue import ENTRIES, Entry, examine

DEEP = os.environ.get("SALS_TEST_PROFILE") == "deep"

# In CI each model runs once, in the implementation that shows the compiler the most (eager); the deep profile runs all,
# in bf16 too.
CASES = [(e, i) for e in ENTRIES for i in (e.implementations if DEEP or e.name == "Llama" else e.implementations[-1:])]


@pytest.mark.parametrize(("entry", "implementation"), CASES, ids=lambda v: v.name if isinstance(v, Entry) else str(v))
def test_model(entry: Entry, implementation: str | None) -> None:
    row = examine(entry, implementation)
    assert not row.problem, row
    assert row.error < 1e-4, row


@pytest.mark.skipif(not DEEP, reason="the deep profile only")
@pytest.mark.parametrize(("entry", "implementation"), CASES, ids=lambda v: v.name if isinstance(v, Entry) else str(v))
def test_model_bf16(entry: Entry, implementation: str | None) -> None:
    row = examine(entry, implementation, torch.bfloat16)
    assert not row.problem, row
    assert row.error < 5e-2, row
