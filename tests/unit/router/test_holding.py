"""Holding: who comes while there are no workers waits for them, a bounded time, not too many."""

from __future__ import annotations

import asyncio

import pytest

from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded, Internal, Unavailable
from services.router.admission import Holding, is_expected


class Workers:
    """Whether there are any."""

    def __init__(self) -> None:
        self.are_there = False

    def find(self) -> object:
        if not self.are_there:
            raise Unavailable("no decode worker is available")
        return self


class Bench:
    def __init__(self, hold_s: float = 10.0, max_requests: int = 8) -> None:
        self.holding = Holding(hold_s, max_requests)
        self.workers = Workers()
        self.num_told = 0
        self.are_coming = False

    def _on_held(self) -> None:
        self.num_told += 1

    def wait(self, budget_s: float = 20.0) -> asyncio.Task[bool]:
        deadline = Deadline.after(budget_s)
        wait = self.holding.wait(
            self.workers.find, deadline, self._on_held, lambda: self.are_coming
        )
        return asyncio.create_task(wait)

    async def held(self, num: int) -> None:
        async with asyncio.timeout(30):
            while self.holding.num_held != num:
                await asyncio.sleep(0.001)


async def test_all_that_are_held_go_on_when_workers_come() -> None:
    bench = Bench()
    tasks = [bench.wait() for _ in range(3)]
    await bench.held(3)
    bench.holding.check_integrity()
    bench.holding.look()  # nothing has changed
    await asyncio.sleep(0.01)
    assert bench.holding.num_held == 3
    bench.workers.are_there = True
    bench.holding.look()
    assert await asyncio.gather(*tasks) == [True, True, True]
    assert (bench.holding.num_held, bench.num_told) == (0, 3)


async def test_who_is_expected_is_waited_for_until_it_is_not_expected_any_more() -> None:
    bench = Bench(hold_s=0.0)
    bench.are_coming = True
    task = bench.wait()
    await bench.held(1)
    bench.holding.look()
    await asyncio.sleep(0.01)
    assert not task.done()
    bench.are_coming = False
    bench.holding.look()
    with pytest.raises(Unavailable, match="no decode worker is available"):
        await task


@pytest.mark.parametrize(
    ("seen_s", "here", "expected"),
    [
        ({}, (), False),
        ({"d0": 41.0}, (), True),
        ({"d0": 40.0}, (), False),  # away for as long as it is waited for
        ({"d0": 99.0}, ("d0",), False),  # it serves
        ({"d0": 99.0, "d1": 41.0}, ("d0",), True),  # its twin is away
        ({"d0": 99.0, "d1": 39.0}, ("d0",), False),
    ],
)
def test_a_worker_is_expected_for_a_time_after_it_was_seen(
    seen_s: dict[str, float], here: tuple[str, ...], expected: bool
) -> None:
    assert is_expected(seen_s, here, now_s=100.0, wait_s=60.0) is expected


async def test_the_request_s_own_time_ends_first() -> None:
    bench = Bench(hold_s=30.0)
    with pytest.raises(DeadlineExceeded):
        await bench.wait(budget_s=0.02)
    assert bench.holding.num_held == 0


async def test_who_waits_and_is_not_held_breaks_the_law() -> None:
    bench = Bench()
    task = bench.wait()
    await bench.held(1)
    bench.holding.num_held = 0
    with pytest.raises(Internal):
        bench.holding.check_integrity()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
