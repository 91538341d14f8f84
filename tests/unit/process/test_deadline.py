"""Waits must end with the request's own budget, and only with that."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded


def test_left_never_negative_and_sooner_takes_the_nearer() -> None:
    now = 100.0
    deadline = Deadline.after(5, clock=lambda: now)
    assert deadline.left_s() == 5
    assert deadline.sooner(2).left_s() == 2
    assert deadline.sooner(9).left_s() == 5
    now = 106.0
    assert deadline.left_s() == 0
    assert deadline.expired


async def test_timeout_names_what_was_waited_for() -> None:
    with pytest.raises(DeadlineExceeded, match="the parcel"):
        async with Deadline.after(0.01).timeout("the parcel"):
            await asyncio.Event().wait()


async def test_a_timeout_of_the_body_stays_its_own() -> None:
    with pytest.raises(TimeoutError):
        async with Deadline.after(60).timeout("outer"), asyncio.timeout(0.01):
            await asyncio.Event().wait()


def test_uvloops_early_timers_are_deadlines_too() -> None:
    """uvloop fires up to a millisecond early: a raw TimeoutError then got past our translators."""

    async def run() -> None:
        for _ in range(100):
            with pytest.raises(DeadlineExceeded):
                async with Deadline.after(0.002).timeout("a short wait"):
                    await asyncio.Event().wait()

    uvloop.run(run())
