"""One attempt per (tenant, request id); cancel from waiting and running; the table's law."""

from __future__ import annotations

import asyncio

import pytest

from process.deadline import Deadline
from process.rpc_errors import Cancelled, NoCapacity, Unavailable
from services.router.attempts import Attempts
from tests.harness.waiting import settled

# Counted from when the tests are collected: a long run must not reach it.
FAR = Deadline.after(1e6)


def _table(**changes: float) -> Attempts:
    return Attempts(**{"max_requests": 8, "supersede_wait_s": 5.0, **changes})  # type: ignore[arg-type]


class _Runner:
    """A body that runs until told, and takes `ending` to clean up."""

    def __init__(self, table: Attempts, digest: bytes = b"x", request_id: str = "r") -> None:
        self.running, self.go_on, self.may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.may_end.set()
        self.task = asyncio.create_task(self._run(table, digest, request_id))

    async def _run(self, table: Attempts, digest: bytes, request_id: str) -> None:
        async with table.admit("t", request_id, digest, FAR):
            self.running.set()
            try:
                await self.go_on.wait()
            finally:
                while not self.may_end.is_set():
                    await self.may_end.wait()


async def test_an_old_attempt_that_does_not_end_bounds_the_wait() -> None:
    table = _table(supersede_wait_s=0.05)
    old = _Runner(table)
    await old.running.wait()
    old.may_end.clear()
    new = _Runner(table)
    with pytest.raises(Unavailable, match="has not ended"):
        await new.task
    table.check_integrity()
    old.may_end.set()
    with pytest.raises(Cancelled):
        await old.task
    assert table.num_attempts == 0


async def test_a_cancel_from_outside_stays_one() -> None:
    """Only our own cancel becomes a status; the client's own must end the task."""
    table = _table()
    runner = _Runner(table)
    await runner.running.wait()
    runner.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await runner.task
    both = _Runner(table)
    await both.running.wait()
    both.may_end.clear()
    newer = _Runner(table)
    await settled()
    both.task.cancel()
    both.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await both.task
    newer.go_on.set()
    await newer.task
    assert table.num_attempts == 0


async def test_too_many() -> None:
    table = _table(max_requests=2)
    runners = [_Runner(table, request_id=name) for name in "ab"]
    for runner in runners:
        await runner.running.wait()
    with pytest.raises(NoCapacity):
        await _Runner(table, request_id="c").task
    # A repeat takes the place of its predecessor.
    repeat = _Runner(table, request_id="a")
    await repeat.running.wait()
    with pytest.raises(Cancelled):
        await runners[0].task
    for runner in (repeat, runners[1]):
        runner.go_on.set()
        await runner.task
    assert table.num_attempts == 0
