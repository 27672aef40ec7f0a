"""Each example runs unchanged, in a process and a folder of its own, and prints what it promises."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sals_compile

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PROMISES = {
    "quickstart.py": ("256 of 2048 cached tokens", "relative difference of the logits to dense"),
    "inspect_graph.py": ("'sals.attend.default': 2", "the whole story"),
    "your_own_attention.py": ("rotary 'interleaved'", "(kv <= a0) & (kv > (a0 - 800))", "tanh"),
    "verify_your_model.py": ("exact", "reconstruct", "sals, budget 256", "same token"),
    "figure_time_per_module.py": ("sals ", "reconstruct ", "ms per decode step"),
    "figure_rotary_pca.py": ("blocks.1: rank for 90 %", "before", "after, of 64"),
    "figure_speedup.py": ("dense", "query rank 32 keeps", "4096 cached tokens, SALS"),
    "calibrate_and_reload.py": ("2 sites in", "blocks.0, blocks.1", "256 of 1024 cached tokens"),
}
ELSEWHERE = {"generate.py"}  # `make demo` runs it on a real model


def test_every_example_is_tested():
    assert {p.name for p in EXAMPLES.glob("*.py")} == set(PROMISES) | ELSEWHERE


@pytest.mark.parametrize("name", PROMISES)
def test_is_short(name):
    assert len((EXAMPLES / name).read_text().splitlines()) < 80


@pytest.mark.parametrize("name", PROMISES)
def test_runs(name, tmp_path):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for promise in PROMISES[name]:
        assert promise in done.stdout, done.stdout
    assert "Traceback" not in done.stderr


def test_readme_names_every_option_and_links_to_what_exists():
    text = (EXAMPLES.parent / "README.md").read_text()
    table = text.split("## Options")[1].split("\n## ")[0]
    for option in dataclasses.fields(sals_compile.SalsConfig):
        assert f"`{option.name}`" in table, option.name
        line = next(row for row in table.splitlines() if f"`{option.name}`" in row.split(" | ")[0])
        shown = f"`{option.default!r}`".replace("'", '"')
        assert shown in line or option.default is dataclasses.MISSING, line
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (EXAMPLES.parent / target).exists(), target
