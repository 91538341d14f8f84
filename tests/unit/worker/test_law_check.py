"""When a worker's laws are looked at again, and what is told in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from process.rpc_errors import Internal
from services.worker.runtime import SHARE, InvariantCheck


class _Laws:
    def __init__(self) -> None:
        self.now_s = 1000.0
        self.broken = ""
        self.held_s = 0.04
        self.num_at_once = self.most_at_once = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.check = InvariantCheck(self._look, lambda: self.now_s)

    async def _look(self) -> float:
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        await self.gate.wait()
        self.num_at_once -= 1
        if self.broken:
            raise Internal(self.broken)
        return self.held_s

    async def open_later(self) -> None:
        await _turn()
        self.gate.set()


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


async def _turn() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _gather(asked: list[Awaitable[str]]) -> None:
    await asyncio.gather(*asked)


async def _give_up(asked: list[Awaitable[str]]) -> None:
    tasks = [asyncio.ensure_future(one) for one in asked]
    await _turn()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("ask", [_gather, _give_up])
async def test_many_who_ask_at_once_have_one_share_together(
    ask: Callable[[list[Awaitable[str]]], Awaitable[None]],
) -> None:
    """Also those who do not wait for the answer: the engine is held all the same."""
    laws, begun_s, num_steps = _Laws(), 1000.0, 1000
    for _ in range(num_steps):
        laws.gate.clear()
        asked = [laws.check.problem(is_busy=True) for _ in range(8)]
        await asyncio.gather(ask(asked), laws.open_later())
        await _turn()
        laws.now_s += 0.01
    spent_s = laws.now_s - begun_s
    assert laws.most_at_once == 1
    assert laws.check.num_looks * laws.held_s <= SHARE * spent_s + laws.held_s
    assert laws.check.num_looks >= 5


async def test_an_idle_one_looks_once_for_all_who_came_before_it() -> None:
    laws = _Laws()
    laws.gate.clear()
    first = asyncio.ensure_future(laws.check.problem(is_busy=False))
    await _turn()
    others = [asyncio.ensure_future(laws.check.problem(is_busy=False)) for _ in range(8)]
    await _turn()
    laws.broken = "block 7 has 2 references"  # behind the first look's back, perhaps
    laws.gate.set()
    assert await asyncio.gather(first, *others) == [laws.broken] * 9
    assert (laws.check.num_looks, laws.most_at_once) == (2, 1)


@pytest.mark.parametrize("is_busy", [True, False])
async def test_a_look_under_way_counts_in_the_next_role_and_its_finding_does_not(
    is_busy: bool,
) -> None:
    """Its engine's thread is over, say: that is no law of the role that begins."""
    laws, refused = _Laws(), asyncio.Event()

    async def old_look() -> float:
        held_s = await laws._look()
        if refused.is_set():
            raise Internal("the worker is stopping")
        return held_s

    check = InvariantCheck(old_look, lambda: laws.now_s)
    laws.gate.clear()
    before = asyncio.ensure_future(check.problem(is_busy=is_busy))
    await _turn()
    after = asyncio.ensure_future(check.hand_over(laws._look).problem(is_busy=is_busy))
    await _turn()
    assert laws.num_at_once == 1 and not after.done()
    refused.set()
    laws.gate.set()
    assert await asyncio.gather(before, after) == ["", ""]
    assert laws.most_at_once == 1
    assert check.num_looks == (1 if is_busy else 2)


async def test_the_end_of_a_role_waits_for_the_look_and_counts_its_time() -> None:
    laws = _Laws()
    laws.gate.clear()
    asked = asyncio.ensure_future(laws.check.problem(is_busy=True))
    await _turn()
    ended = asyncio.ensure_future(laws.check.settle(timeout_s=60.0))
    await _turn()
    assert not ended.done()
    laws.gate.set()
    await ended
    assert laws.num_at_once == 0
    assert laws.check.due_s == laws.now_s + laws.held_s / SHARE
    await asked
    await laws.check.settle(timeout_s=60.0)  # none is under way
