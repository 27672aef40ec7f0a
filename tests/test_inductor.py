"""The real path on CPU: reference meanings compiled by Inductor."""

from __future__ import annotations

import pytest
import torch
from test_exact import assert_close, compiled
from tiny import CachedAttention


@pytest.mark.parametrize("eager", [False, True])
def test_exact_decode(eager):
    module = CachedAttention(4, 2, 16, True, "bool", eager, 0.25).eval()
    x, cuts = torch.randn(2, 40, 64), [33, 34, 35, 36]
    expected = module.rollout(module, x[:, :36], cuts, 48)
    assert_close(
        module.rollout(compiled(module, attention="exact", lowering="inductor"), x[:, :36], cuts, 48),
        expected,
        torch.float32,
    )


def test_sparse_decode_equals_the_eager_lowering():
    module = CachedAttention(4, 2, 32, True, "bool", False, 0.2).eval()
    x, cuts = torch.randn(1, 64, 128), [60, 61, 62, 63, 64]
    options = {"budget": 24, "sinks": 2, "recents": 8}
    eager = module.rollout(compiled(module, **options), x, cuts, 80)
    inductor = module.rollout(compiled(module, lowering="inductor", **options), x, cuts, 80)
    # The same arithmetic; a token on the edge of the selection or of a code may fall the other way.
    assert (eager - inductor).norm() / eager.norm() < 1e-2
