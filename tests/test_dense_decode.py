"""Sites left dense decode through ``sals::dense_attention`` on a GPU; here on the CPU, where its meaning runs."""

from __future__ import annotations

import pytest
import torch
from test_exact import assert_close, compiled
from tiny import llama, rollout, static_cache

import sals_compile
from sals_compile.integrations.transformers import SalsCache
from sals_compile.passes import rewrite

SMALL = {"budget": 24, "sinks": 2, "recents": 8}
CUTS = [30, 31, 32, 33]


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "options, virtual",
    [({"attention": "dense"}, False)] + [({"skip_layers": (0,), "attention": "exact"}, v) for v in (False, True)],
    ids=["all of a StaticCache", "one layer of a StaticCache", "one layer of a SalsCache"],
)
def test_decode_of_dense_sites(monkeypatch, impl, options, virtual):
    monkeypatch.setattr(rewrite, "_on_gpu", lambda site: True)
    model = llama(layers=2, impl=impl)
    tokens = torch.randint(0, 64, (1, CUTS[-1]))
    expected = rollout(model.forward, tokens, CUTS, static_cache(model, 64))
    cache = SalsCache(model.config, 64) if virtual else static_cache(model, 64)
    found = rollout(compiled(model.forward, **options, **SMALL), tokens, CUTS, cache)
    assert_close(found, expected, torch.float32)
    attended = {}
    for report in sals_compile.compiled_reports():
        graph = report._compiled
        length = graph.plans[0].site.key_cache.slots.meta["val"].shape[-1]
        for variant in graph.variants.values():
            targets = [str(n.target) for n in variant.rewritten.gm.graph.nodes]
            attended[length] = attended.get(length, 0) + targets.count("sals.dense_attention.default")
    assert attended[1] > 0, attended
    assert attended[30] == 0, attended  # a prefill stays as it was traced
