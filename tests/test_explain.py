"""explain(): what it reports, and that it leaves the caller's things alone."""

from __future__ import annotations

import dataclasses
import json
import logging
import subprocess

import networkx
import pytest
import torch
from tiny import Attention, CachedAttention, llama, static_cache
from torch import nn

import sals_compile
from sals_compile import SiteReport, explain
from sals_compile.report import format_sites

SMALL = {"budget": 24, "sinks": 2, "recents": 8}


@pytest.fixture(scope="module")
def model():
    return llama()


@pytest.fixture(scope="module")
def found(model):
    return explain(
        model.forward, torch.zeros(1, 1, dtype=torch.int64), past_key_values=static_cache(model, 60), options=SMALL
    )


class Growing(nn.Module):
    """Dropout makes its attention one that is declined."""

    def forward(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


@pytest.fixture(scope="module")
def declined():
    q = torch.randn(1, 2, 8, 16)
    return explain(Growing(), q, q, q)


def test_sites(found):
    names = [s.name for s in found.sites]
    assert names == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    for site in found.sites:
        assert site.status == "sals"
        assert site.reason == "24 of 60 cached tokens attended per query"
        assert (site.heads, site.rotary, site.mask) == ("4/2x16", "half", "kv <= a0")
        assert (site.rank, site.score_rank, site.budget) == (14, 4, 24)
        assert 0 <= site.verified_error < 1e-4
        assert 0 < site.kv_bytes_per_token < site.dense_bytes_per_token == 2 * 32 * 4
    (graph,) = found.graphs
    assert graph.rewritten == graph.verified == 2
    assert set(graph.timings) >= {"canonicalize", "match", "verify", "plan"}
    assert graph.kv_bytes_per_token()["dense"] == 2 * 2 * 32 * 4


def test_graphs_before_and_after(found):
    before = [str(n.target) for n in found.graph_before.graph.nodes]
    after = [str(n.target) for n in found.graph_after.graph.nodes]
    assert sum("scaled_dot_product" in t for t in before) == 2
    assert not any("scaled_dot_product" in t for t in after)
    assert sum("sals.attend" in t for t in after) == 2
    found.graph_after.graph.lint()
    extra = [n for n in found.graph_after.graph.nodes if n.op == "placeholder" and n.name.startswith("sals_")]
    assert len(extra) == len(found.graphs[0].state_inputs)


def test_the_table_folds_equal_sites(found):
    text = str(found)
    assert "model.layers.0.self_attn" in text and "24 of 60 cached tokens" in text
    assert text == str(found.graphs[0])
    assert len(text.splitlines()) in (3, 4)  # a header, a rule, and one or two lines: the measured errors may differ


def test_nothing_of_the_callers_changes(model):
    cache = static_cache(model, 60)
    tokens = torch.randint(0, 64, (1, 40))
    kept = len(sals_compile.compiled_reports())
    explain(model.forward, tokens, past_key_values=cache, options=SMALL)
    assert all(int(layer.cumulative_length) == 0 for layer in cache.layers)
    assert not any(layer.keys.any() or layer.values.any() for layer in cache.layers)
    assert len(sals_compile.compiled_reports()) == kept
    # Nor are the model's sites taught from these arguments.
    from sals_compile.backend import registry_for

    config = sals_compile.SalsConfig.from_options(SMALL)
    for memories in registry_for(config).memories.values():
        for memory in memories.values():
            assert memory.key_moment is None or not memory.key_moment.any()
            assert memory.query_moment is None or not memory.query_moment.any()


def test_explaining_often_meets_no_recompile_limit():
    module = Attention(2, 2, 8, True, True, False).eval()
    for length in range(20, 32):
        (site,) = explain(module, torch.randn(1, length, 16), options={"attention": "exact"}).sites
        assert site.status == "exact"


def test_declined_sites_say_where_and_why(declined):
    (site,) = declined.sites
    assert site.status == "declined"
    assert "dropout is active; call model.eval()" in site.reason
    assert site.node in site.reason and site.node
    assert declined.graphs[0].rewritten == 0
    assert "declined" in str(declined)


def test_networkx(found):
    graph = found.to_networkx()
    assert isinstance(graph, networkx.DiGraph) and networkx.is_directed_acyclic_graph(graph)
    for _, data in graph.nodes(data=True):
        assert set(data) == {"op", "shape", "dtype", "site", "before", "after"}
        assert data["before"] or data["after"]
    attend = [d for _, d in graph.nodes(data=True) if d["op"] == "sals.attend"]
    assert [d["site"] for d in attend] == [s.name for s in found.sites]
    assert all(d["shape"] == (1, 1, 4, 16) and d["dtype"] == "float32" and not d["before"] for d in attend)
    gone = [d for _, d in graph.nodes(data=True) if d["op"] == "sals.scaled_dot_product_attention"]
    assert len(gone) == 2 and all(d["before"] and not d["after"] for d in gone)
    assert any(d["before"] and d["after"] for _, _, d in graph.edges(data=True))


def test_networkx_of_a_declined_graph(declined):
    graph = declined.to_networkx()
    assert all(d["before"] == d["after"] for _, d in graph.nodes(data=True))


def test_every_tensor_of_the_rewritten_graph_has_a_shape(found):
    for node in found.graphs[0].rewritten_with_values().gm.graph.nodes:
        silent = node.op == "output" or not node.users
        assert silent or isinstance(node.meta.get("val"), torch.Tensor), node.name


def test_draw(found, tmp_path, monkeypatch):
    pytest.importorskip("pydot")
    found.draw(tmp_path / "graph.dot")
    assert "sals.attend" in (tmp_path / "graph.dot").read_text()
    with pytest.raises(ValueError, match=r"\.svg, \.png, \.pdf or \.dot"):
        found.draw(tmp_path / "graph.jpeg")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match="Graphviz's `dot` program"):
        found.draw(tmp_path / "graph.svg")


def test_draw_without_pydot_names_the_remedy(found, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "pydot", None)
    with pytest.raises(ImportError, match=r"pip install 'sals-compile\[plots\]'"):
        found.draw(tmp_path / "graph.svg")


def test_draw_an_svg(found, tmp_path):
    pytest.importorskip("pydot")
    try:
        subprocess.run(["dot", "-V"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("Graphviz's `dot` is not installed")
    found.draw(tmp_path / "graph.svg")
    assert "<svg" in (tmp_path / "graph.svg").read_text()


def test_json(found):
    text = json.dumps(found.as_dict())
    (graph,) = json.loads(text)["graphs"]
    assert [s["status"] for s in graph["sites"]] == ["sals", "sals"]
    assert graph["rewritten"] == 2 and graph["kv_bytes_per_token"]["dense"] == 512


def test_logging(caplog):
    module = CachedAttention(4, 2, 16, True, "bool", False, 0.25).eval()
    keys = torch.zeros(1, 2, 64, 16)
    with caplog.at_level(logging.DEBUG, logger="sals_compile"):
        explain(module, torch.randn(1, 1, 64), torch.tensor(9), keys, keys.clone(), options=SMALL)
    info = [r for r in caplog.records if r.name == "sals_compile" and r.levelno == logging.INFO]
    assert len(info) == 1
    assert "1 attention sites, 1 rewritten, 0 left dense, 0 declined, 1 verified" in info[0].getMessage()
    debug = [r.getMessage() for r in caplog.records if r.name == "sals_compile" and r.levelno == logging.DEBUG]
    assert any("24 of 64 cached tokens attended per query" in m for m in debug)


def test_nothing_to_trace():
    found = explain(torch.compiler.disable(lambda: 3))
    assert found.sites == [] and str(found).startswith("no attention found")
    with pytest.raises(ValueError, match="nothing was traced"):
        _ = found.graph_before


def test_the_table_folds_layers_and_shared_reasons():
    site = SiteReport("layers.0", "sals", "512 of 4096", heads="8/4x16", budget=512, verified_error=1e-6)
    later = [dataclasses.replace(site, name=f"layers.{i}", verified_error=2e-6) for i in (1, 2)]
    text = format_sites([site, *later])
    assert "layers.0 .. layers.2 (3)" in text and "2e-06" in text and text.endswith("\nwhy: 512 of 4096")
    other = dataclasses.replace(site, name="layers.3", status="declined", reason="dropout", verified_error=None)
    lines = format_sites([site, *later, other]).splitlines()
    assert len(lines) == 4 and lines[2].endswith("512 of 4096") and lines[3].endswith("dropout")


def test_a_bad_option_is_named():
    with pytest.raises(sals_compile.OptionError, match=r"unknown option 'buget'.*did you mean 'budget'"):
        explain(nn.Linear(4, 4), torch.zeros(1, 4), options={"buget": 3})
