"""EarlyHandles: a partial handle is due when there is more to fetch, at most once per step."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.prefill.request import MIN_GROWTH, PartialHandleSchedule


class Schedule(RuleBasedStateMachine):
    """Puts commit, steps end and handles go out, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.early = PartialHandleSchedule(wanted=True)
        self.num_stored = 0
        self.told: list[int] = []
        self.num_steps = 0

    @rule(num_more=st.integers(0, 3))
    def stored(self, num_more: int) -> None:
        self.num_stored += num_more
        self.early.stored(self.num_stored)

    @rule()
    def stepped(self) -> None:
        self.num_steps += 1
        self.early.stepped()

    @rule()
    def look(self) -> None:
        """As the request does it: only when there was news."""
        if not self.early.news.is_set():
            return
        self.early.news.clear()
        if self.early.is_due:
            self.early.told(self.num_stored)
            self.told.append(self.num_stored)

    @invariant()
    def each_tells_more_than_the_one_before(self) -> None:
        assert self.told == sorted(set(self.told))
        assert 0 not in self.told

    @invariant()
    def at_most_one_per_step_beside_the_first(self) -> None:
        assert len(self.told) <= self.num_steps + 1

    @invariant()
    def what_is_due_is_news(self) -> None:
        if self.early.is_due:
            assert self.early.news.is_set()

    def teardown(self) -> None:
        """Whatever came before: one more step, and all that is stored is told."""
        self.stepped()
        self.look()
        num_told = max(self.told, default=0)
        assert num_told <= self.num_stored <= num_told + num_told // MIN_GROWTH


TestSchedule = Schedule.TestCase


@pytest.mark.parametrize("num_chunks", [1, 7, 100, 1000])
def test_a_long_prompt_costs_references_in_proportion_to_its_length(num_chunks: int) -> None:
    early = PartialHandleSchedule(wanted=True)
    told: list[int] = []
    for chunk in range(1, num_chunks + 1):
        early.stored(32 * chunk)
        early.stepped()
        if early.is_due:
            early.told(32 * chunk)
            told.append(32 * chunk)
    assert told[0] == 32
    assert told[-1] >= 32 * num_chunks * MIN_GROWTH / (MIN_GROWTH + 1)
    assert sum(told) <= (MIN_GROWTH + 1.5) * 32 * num_chunks
