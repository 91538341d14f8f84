"""A long copy out of a mapped cache is asked about while it runs, for a promise to keep its blocks:
what that says must be as much as a look behind the copy would, or there is one. Over real gRPC;
devices are fakes."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.lending.limits import LenderLimits
from kvstore.lending.told import Word
from kvstore.transport import mapped
from kvstore.transport.device import PeerCopies
from tests.harness.sources import MAPPED, Lending, lending
from tests.harness.store import BLOCK_BYTES, Worker
from tests.harness.waiting import Clock, within

NewWorker = Callable[..., Any]
ALL_ARE_LONG = PeerCopies(ask_early_bytes=0, hold_s=1e3)
LIMITS = LenderLimits(max_hold_s=1e3)
WAIT_S = 20.0


class Asked:
    """A lender, a reader whose copies are all long, and what the lender was asked.

    Attributes:
        num_asked, num_confirmed: for a promise, and behind a copy.
        has_answered: once it was asked for a promise.
    """

    def __init__(self, lent: Lending, reader: Worker) -> None:
        self.lent, self.reader = lent, reader
        self.num_asked = self.num_confirmed = 0
        self.has_answered = threading.Event()
        confirm, await_lent = lent.lender.confirm, lent.lender.await_lent

        def confirmed(*arguments: Any) -> list[int]:
            self.num_confirmed += 1
            return confirm(*arguments)

        async def awaited(*arguments: Any, **options: Any) -> Any:
            self.num_asked += 1
            try:
                return await await_lent(*arguments, **options)
            finally:
                self.has_answered.set()

        lent.lender.confirm = confirmed  # type: ignore[method-assign]
        lent.lender.await_lent = awaited  # type: ignore[method-assign]

    def while_copied(self, then: Callable[[], object] = lambda: None) -> None:
        """The next copy goes on when the lender has answered and `then` was called on the loop."""
        loop, is_done = asyncio.get_running_loop(), threading.Event()

        def move(*_: int) -> None:
            self.reader.device.on_move = lambda *_: None
            if self.has_answered.wait(WAIT_S):
                loop.call_soon_threadsafe(lambda: (then(), is_done.set()))
                is_done.wait(WAIT_S)

        self.reader.device.on_move = move

    def release(self, lease_id: str) -> None:
        self.lent.loans.release([lease_id], self.lent.lender.now_s())

    def let_go(self) -> None:
        """All promises have ended."""
        holds = self.lent.lender.reader_holds
        for hold_id, timer in list(holds._ends.items()):
            timer.cancel()
            holds._end(hold_id, 0.0)


@pytest.fixture
async def asked(new_worker: NewWorker, seed: int) -> Any:
    async with lending(seed, is_on_device=True, limits=LIMITS) as lent:
        made = Asked(lent, await new_worker(lent.address, MAPPED, peer_copies=ALL_ARE_LONG))
        yield made
        made.let_go()


async def test_a_long_copy_is_asked_about_while_it_runs(asked: Asked) -> None:
    """And not behind it; the lender hears how much was read when it hears of the lease."""
    lent, reader = asked.lent, asked.reader
    lease_id, blocks = await lent.lend(range(6))
    seen: list[bool] = []
    asked.while_copied(lambda: seen.append(True))
    assert await reader.get(lease_id, blocks[1:5], [23, 20, 21, 22]) == {}
    assert seen and (asked.num_asked, asked.num_confirmed) == (1, 0)
    assert np.array_equal(reader.view[[23, 20, 21, 22]], lent.view[1:5])
    assert lent.loans.counters.num_bytes_read == 0
    await reader.client.release([lease_id], deadline=within())
    assert lent.loans.counters.num_bytes_read == 4 * BLOCK_BYTES


async def test_a_short_copy_is_only_confirmed(new_worker: NewWorker, seed: int) -> None:
    async with lending(seed, is_on_device=True) as lent:
        long = PeerCopies(ask_early_bytes=3 * BLOCK_BYTES)
        asked = Asked(lent, await new_worker(lent.address, MAPPED, peer_copies=long))
        lease_id, blocks = await lent.lend([1, 2, 3])
        assert await asked.reader.get(lease_id, blocks[:2], [4, 5]) == {}
        assert (asked.num_asked, asked.num_confirmed) == (0, 1)
        assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == {}
        assert asked.num_asked == 1
        asked.let_go()


async def test_what_is_given_back_behind_the_promise_stays_until_it_is_copied(
    asked: Asked,
) -> None:
    lent = asked.lent
    lease_id, blocks = await lent.lend([1, 2, 3])
    asked.while_copied(lambda: asked.release(lease_id))
    assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == {}
    assert lent.loans.num_leases == 0 and lent.loans.num_lent == 3
    assert np.array_equal(asked.reader.view[4:7], lent.view[1:4])
    asked.let_go()
    assert lent.loans.num_lent == 0
    failed = await asked.reader.get(lease_id, blocks, [4, 5, 6])
    assert failed == dict.fromkeys(range(3), errors.LEASE_LAPSED)


async def test_a_promise_that_ends_before_the_copy_is_no_promise(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is asked about as ever, and what was given back is found."""
    clock = Clock(1000.0)
    monkeypatch.setattr(mapped, "time", clock)
    clock.now_s = time.monotonic()

    def over() -> None:
        clock.now_s += 1e4
        asked.let_go()

    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    asked.while_copied(over)
    assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == {}
    assert (asked.num_asked, asked.num_confirmed) == (1, 1)
    clock.now_s = time.monotonic()
    other, _ = await asked.lent.lend([2])
    asked.has_answered.clear()
    asked.while_copied(lambda: (over(), asked.release(lease_id)))
    failed = await asked.reader.get(lease_id, blocks, [4, 5, 6])
    assert failed == dict.fromkeys(range(3), errors.LEASE_LAPSED)
    clock.now_s = time.monotonic()
    failed = await asked.reader.get(other, blocks, [4, 5, 6])
    assert failed == {0: errors.GENERATION, 2: errors.GENERATION}


async def test_only_what_the_promise_names_at_its_generation_is_promised(asked: Asked) -> None:
    lent, reader = asked.lent, asked.reader
    lease_id, blocks = await lent.lend([1, 2, 3])
    beside, others = await lent.lend([7])
    assert await reader.get(lease_id, [*blocks, *others], [4, 5, 6, 8]) == {}
    assert (asked.num_asked, asked.num_confirmed) == (1, 1), "lent, but not under this lease"
    old = dataclasses.replace(blocks[1], generation=blocks[1].generation - 2)
    failed = await reader.get(lease_id, [blocks[0], old], [4, 5])
    assert failed == {1: errors.GENERATION} and asked.num_confirmed == 2
    asked.release(lease_id)
    asked.release(beside)
    asked.let_go()
    lent.view[1] ^= 1
    again, newer = await lent.lend([1, 2, 3])
    failed = await reader.get(again, blocks, [4, 5, 6])
    assert failed == dict.fromkeys(range(3), errors.GENERATION) and asked.num_confirmed == 3
    assert await reader.get(again, newer, [4, 5, 6]) == {} and asked.num_confirmed == 3


async def test_who_lends_nothing_any_more_is_not_asked_twice(asked: Asked) -> None:
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    asked.release(lease_id)
    failed = await asked.reader.get(lease_id, blocks, [4, 5, 6])
    assert failed == dict.fromkeys(range(3), errors.LEASE_LAPSED)
    assert (asked.num_asked, asked.num_confirmed) == (1, 0)
    assert asked.lent.loans.refused[errors.LEASE_LAPSED] == 1


@pytest.mark.parametrize("why", ["no room for holds", "too many ask", "an earlier version"])
async def test_without_a_promise_it_is_asked_about_as_ever(asked: Asked, why: str) -> None:
    transport = asked.reader.client._transport
    if why == "no room for holds":
        asked.lent.bound(max_holds=0)
    elif why == "too many ask":
        asked.lent.bound(max_followers=0)
    else:
        transport._attached = dataclasses.replace(transport._attached, tells_when_lent=False)
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == {}
    assert (asked.num_asked, asked.num_confirmed) == (why != "an earlier version", 1)
    assert asked.reader.client.broken is None
    assert asked.lent.loans.counters.num_bytes_read == 3 * BLOCK_BYTES


async def test_a_promise_that_was_kept_is_not_taken_back(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy ends within its promise while the loop is busy; when the loop looks, the promise has
    ended, and no other is to be had. Nobody is asked about what was kept, and nobody waits."""
    asked.lent.bound(max_holds=0)
    clock = Clock(1000.0)
    monkeypatch.setattr(mapped, "time", clock)
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    is_here, goes_on = threading.Event(), threading.Event()
    checksums = asked.reader.memory.checksums

    def slowly(block_ids: Any) -> Any:
        is_here.set()  # the last byte was, before
        assert goes_on.wait(WAIT_S)
        return checksums(block_ids)

    object.__setattr__(asked.reader.memory, "checksums", slowly)

    async def answered() -> None:
        while not asked.has_answered.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # its answer has come
        goes_on.set()

    def busy() -> None:
        assert is_here.wait(WAIT_S)
        clock.now_s += 100.0

    items = list(zip(blocks, (4, 5, 6), strict=True))
    word = Word(0, clock.now_s + 50.0)
    getting = asyncio.create_task(
        asked.reader.client.get_blocks(lease_id, items, within(WAIT_S), word=word)
    )
    asyncio.get_running_loop().call_soon(busy)
    answering = asyncio.create_task(answered())
    done, _ = await asyncio.wait([getting], timeout=WAIT_S)
    getting.cancel()
    answering.cancel()
    assert done and getting.result().failed == {}
    assert np.array_equal(asked.reader.view[4:7], asked.lent.view[1:4])
    assert (asked.num_asked, asked.num_confirmed) == (1, 0)


async def test_a_promise_is_not_asked_for_where_there_is_one(asked: Asked) -> None:
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    items = list(zip(blocks, (4, 5, 6), strict=True))
    word = Word(0, time.monotonic() + WAIT_S)
    client = asked.reader.client
    got = await client.get_blocks(lease_id, items, within(), word=word)
    assert got.failed == {}
    assert (asked.num_asked, asked.num_confirmed) == (0, 0)


async def test_a_copy_that_fails_leaves_nobody_waiting_for_it(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_id, blocks = await asked.lent.lend([1, 2, 3])

    def fails(*_: Any) -> None:
        raise errors.TransferFailed("no such memory")

    monkeypatch.setattr(mapped.MappedTransport, "_copies_between", fails)
    before = asyncio.all_tasks()
    assert set(await asked.reader.get(lease_id, blocks, [4, 5, 6])) == {0, 1, 2}
    for _ in range(1000):
        left = [task for task in asyncio.all_tasks() - before if "vouch" in repr(task)]
        if not left:
            break
        await asyncio.sleep(0.001)
    assert not left


async def test_a_promise_says_nothing_of_the_bytes(asked: Asked) -> None:
    """Their checksums are compared as ever."""
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    asked.lent.view[2, 77] ^= 1
    assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == {1: errors.CHECKSUM}
    assert (asked.num_asked, asked.num_confirmed) == (1, 0)


async def test_a_lender_that_died_before_it_answered_promises_nothing(
    new_worker: NewWorker, seed: int
) -> None:
    async with lending(seed, is_on_device=True) as lent:
        reader = await new_worker(lent.address, MAPPED, peer_copies=ALL_ARE_LONG)
        lease_id, blocks = await lent.lend([1, 2])
    failed = await reader.get(lease_id, blocks, [1, 2], 2.0)
    assert set(failed) == {0, 1}
    assert set(failed.values()) <= {errors.STORE_UNAVAILABLE, errors.DEADLINE}
