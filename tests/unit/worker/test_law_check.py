"""When a worker's laws are looked at again, and what is told in between."""

from __future__ import annotations

from process.errors import Internal
from services.worker.law_check import SHARE, LawCheck


class _Laws:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.broken = ""
        self.held_s = 0.04
        self.check = LawCheck(self._look, lambda: self.now_s)

    async def _look(self) -> float:
        if self.broken:
            raise Internal(self.broken)
        return self.held_s


async def test_an_engine_that_works_is_held_for_its_share_at_most() -> None:
    laws, begun_s, num_steps = _Laws(), 1000.0, 10_000
    for _ in range(num_steps):
        assert await laws.check.problem(is_busy=True) == ""
        laws.now_s += 0.001
    spent_s = laws.now_s - begun_s
    assert laws.check.num_looks * laws.held_s <= SHARE * spent_s + laws.held_s
    assert laws.check.num_looks >= 5


async def test_an_idle_one_looks_whenever_it_is_asked() -> None:
    laws = _Laws()
    for _ in range(10):
        await laws.check.problem(is_busy=False)
    assert laws.check.num_looks == 10


async def test_what_was_found_is_told_until_it_is_found_otherwise() -> None:
    laws = _Laws()
    assert await laws.check.problem(is_busy=True) == ""
    laws.broken = "block 7 has 2 references"
    assert await laws.check.problem(is_busy=True) == "", "not due"
    laws.now_s += 10.0
    assert await laws.check.problem(is_busy=True) == laws.broken
    # A worker whose laws are broken looks again at once: nobody's answers are worth sparing.
    laws.broken = ""
    assert await laws.check.problem(is_busy=True) == ""
