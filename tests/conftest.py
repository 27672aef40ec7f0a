"""What all tests share: reproducible randomness, and the skipping of tests whose device is not there."""

from __future__ import annotations

import os

import hypothesis
import pytest
import torch


class _TorchRandom:
    """torch's global generator, as Hypothesis wants it, so that it is seeded anew for every example."""

    seed = staticmethod(torch.manual_seed)
    getstate = staticmethod(torch.get_rng_state)
    setstate = staticmethod(torch.set_rng_state)


# Hypothesis keeps only a weak reference.
_torch_random = _TorchRandom()
hypothesis.register_random(_torch_random)

# No deadline: the first example of a test pays for tracing and compiling.
# CI does not shrink: a shrink recompiles hundreds of times, and the seed is fixed, so the deep profile finds the same
# example.
hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=12,
    print_blob=True,
    phases=(hypothesis.Phase.explicit, hypothesis.Phase.reuse, hypothesis.Phase.generate),
)
hypothesis.settings.register_profile("deep", deadline=None, max_examples=500, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("SALS_TEST_PROFILE", "ci"))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm device"))
