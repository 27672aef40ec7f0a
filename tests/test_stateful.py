"""Histories of a cache, drawn by Hypothesis: whatever is done to it, exact mode goes on as the dense model does."""

from __future__ import annotations

import copy

import hypothesis.stateful as stateful
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from test_exact import TOLERANCE
from tiny import llama

import sals_compile  # noqa: F401  (registers the backend)
from sals_compile.integrations.transformers import SalsCache

CAPACITY = 40
PREFILLS = (5, 11)
STEPS = (1, 3)

MODEL = llama(layers=2)
#: one compiled callable for all histories, so that each shape is compiled once
COMPILED = torch.compile(MODEL.forward, backend="sals", options={"lowering": "eager", "attention": "exact"})


class _History:
    """A cache and, per row of its batch, the tokens that it should hold."""

    def __init__(self, batch: int) -> None:
        self.cache = SalsCache(MODEL.config, CAPACITY)
        self.tokens = torch.empty((batch, 0), dtype=torch.long)

    @property
    def room(self) -> int:
        return CAPACITY - self.tokens.shape[1]


class CacheHistories(stateful.RuleBasedStateMachine):
    """Two caches are kept; each rule acts on one of them and compares where it computes something."""

    def __init__(self) -> None:
        super().__init__()
        self.histories = [_History(1), _History(2)]
        self.generator = torch.Generator().manual_seed(0)

    which = st.integers(0, 1)

    def _call(self, history: _History, length: int) -> None:
        if length > history.room:
            return
        new = torch.randint(0, 64, (history.tokens.shape[0], length), generator=self.generator)
        history.tokens = torch.cat((history.tokens, new), 1)
        with torch.no_grad():
            actual = COMPILED(new, past_key_values=history.cache).logits
            expected = MODEL.forward(history.tokens, use_cache=False).logits[:, -length:]
        error = float((actual - expected).norm() / expected.norm())
        assert error < TOLERANCE[torch.float32], f"relative error {error:.2e}"

    @stateful.rule(which=which, length=st.sampled_from(PREFILLS))
    def prefill(self, which: int, length: int) -> None:
        self._call(self.histories[which], length)

    @stateful.rule(which=which, length=st.sampled_from(STEPS))
    def decode(self, which: int, length: int) -> None:
        self._call(self.histories[which], length)

    @stateful.rule(which=which)
    def reset(self, which: int) -> None:
        history = self.histories[which]
        history.cache.reset()
        history.tokens = history.tokens[:, :0]

    @stateful.rule(which=which, batch=st.sampled_from((1, 2)))
    def reset_to_another_batch(self, which: int, batch: int) -> None:
        history = self.histories[which]
        history.cache.reset()
        history.tokens = torch.empty((batch, 0), dtype=torch.long)

    @stateful.rule(which=which, count=st.integers(0, 12))
    def crop(self, which: int, count: int) -> None:
        history = self.histories[which]
        count = min(count, history.tokens.shape[1])
        history.cache.crop(-count)
        history.tokens = history.tokens[:, : history.tokens.shape[1] - count]

    @stateful.rule(which=which, order=st.permutations((0, 1)), copy=st.booleans())
    def reorder(self, which: int, order: list[int], copy: bool) -> None:
        history = self.histories[which]
        if history.tokens.shape[0] == 2:
            index = torch.tensor([order[0], order[0] if copy else order[1]])
            history.cache.reorder_cache(index)
            history.tokens = history.tokens[index]

    @stateful.rule(which=which)
    def repeat(self, which: int) -> None:
        history = self.histories[which]
        if history.tokens.shape[0] == 1:
            history.cache.batch_repeat_interleave(2)
            history.tokens = history.tokens.repeat_interleave(2, 0)

    @stateful.rule(which=which, row=st.integers(0, 1))
    def select(self, which: int, row: int) -> None:
        history = self.histories[which]
        if history.tokens.shape[0] == 2:
            history.cache.batch_select_indices(torch.tensor([row]))
            history.tokens = history.tokens[row : row + 1]

    @stateful.rule(which=which)
    def begin_another_cache(self, which: int) -> None:
        self.histories[which] = _History(self.histories[which].tokens.shape[0])

    @stateful.rule(which=which)
    def fork(self, which: int) -> None:
        self.histories[1 - which] = copy.deepcopy(self.histories[which])

    @stateful.invariant()
    def counts_agree(self) -> None:
        for history in self.histories:
            assert history.cache.state.tokens == history.tokens.shape[1]
            assert int(history.cache.get_seq_length()) == history.tokens.shape[1]


TestCacheHistories = CacheHistories.TestCase
TestCacheHistories.settings = settings(max_examples=25, stateful_step_count=25)
TestCacheHistories.pytestmark = [pytest.mark.filterwarnings("ignore")]
