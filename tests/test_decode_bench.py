"""``sals bench decode`` on a CPU: that it runs, and that its memory figures are those of the caches."""

from __future__ import annotations

import json

import pytest

from sals_compile.bench import decode

OPTIONS = {"lowering": "eager", "budget": 64, "sinks": 4, "recents": 16}


@pytest.mark.filterwarnings("ignore")
def test_one_point_counts_what_the_cache_holds():
    row = decode.run("tiny", 2, 600, steps=2, device="cpu", systems=("sals",), options=OPTIONS)
    entry = row["systems"]["sals"]
    assert row["dense_kv_bytes"] == 2 * 2 * 2 * 64 * 2 * 2 * 600  # K and V, layers, heads, dim, bf16, batch, context
    assert 0 < entry["kv_bytes"] < 0.6 * row["dense_kv_bytes"]
    assert entry["tokens_per_s"] > 0


@pytest.mark.filterwarnings("ignore")
def test_serving_takes_the_largest_batch_that_fits(tmp_path, capsys):
    path = tmp_path / "serve.json"
    options = [f"--option={k}={json.dumps(v)}" for k, v in OPTIONS.items()]
    arguments = ["--shape=tiny", "--memory-gib=0.005", "--contexts=600", "--steps=1", "--device=cpu", "--systems=sals"]
    assert decode.main([*arguments, *options, f"--json={path}"]) == 0
    (row,) = json.loads(path.read_text())["rows"]
    entry = row["systems"]["sals"]
    weights = decode.build("tiny", None, 600, "cpu", decode.torch.bfloat16).num_parameters() * 2
    assert entry["batch"] > 1
    # Rows shared by the batch make a larger batch cheaper than as many single ones.
    assert entry["kv_bytes"] + weights <= 0.005 * 2**30
    assert "0.005 GiB" in capsys.readouterr().out
