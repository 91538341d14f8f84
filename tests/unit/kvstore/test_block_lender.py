"""A lender's readers: one that waits for the rest of a lease hears of it once, whatever becomes of
the lease; what is held for one stays exactly as long, whatever becomes of the lease."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvstore.block_lender import LENDER_LIMITS, BlockLender, LenderLimits
from kvstore.errors import LeaseLapsed
from kvstore.exported_blocks import ExportedBlocks, ExportOffer
from kvstore.transport.base import BlockMemory
from process.rpc_errors import FailedPrecondition, InvalidArgument, NoCapacity
from tests.harness.waiting import Clock, settled, until

WAIT_S = 20.0
FOR_EVER_S = 1e9
SHORT_S = 0.01


def offers(*block_ids: int, is_sealed: bool = True) -> list[ExportOffer]:
    return [
        ExportOffer(each, b"%16d" % each, each if is_sealed else None, 16) for each in block_ids
    ]


class Watched(Clock):
    """Counts how often it is looked at."""

    num_looks = 0

    def __call__(self) -> float:
        self.num_looks += 1
        return self.now_s


class Place:
    """A lease on two blocks that is to grow to four, and a reader of each kind. Unless a test says
    so, no answer comes because a time was over."""

    def __init__(self, *, clock: Any = None, **limits: Any) -> None:
        self.clock = Watched() if clock is None else clock
        self.loans = ExportedBlocks(32, 64, 10.0, lambda block_ids: None)
        self.lender = BlockLender(
            "w/lent",
            bytes(16),
            BlockMemory.of(np.zeros((32, 64), np.uint8)),
            self.loans,
            self._find_free,
            fingerprint=b"",
            limits=LenderLimits(**{"max_wait_s": FOR_EVER_S} | limits),
            clock=self.clock,
        )
        self.reader, self.mapping = (
            self.lender.attachments.add(
                "w", bytes(16), transport, False, self.clock()
            ).attachment_id
            for transport in ("grpc", "cuda_ipc")
        )
        self.lease_id, self.blocks = self.loans.lend(offers(7, 3))

    async def _find_free(self, num_blocks: int, budget_s: float) -> Sequence[int]:
        return ()

    async def ask(self, num_known: int = 2, budget_s: float = FOR_EVER_S) -> asyncio.Task[Any]:
        rest = self.lender.await_lent(self.reader, self.lease_id, num_known, 4, budget_s)
        task = asyncio.create_task(rest)
        await settled()
        return task

    def hold(self, seconds: float, reader: str = "") -> float:
        """What is lent to begin with. Returns: for how long it is held."""
        pairs = [(block.frame, block.generation) for block in self.blocks]
        held_s, stale = self.lender.hold(reader or self.mapping, self.lease_id, pairs, seconds)
        assert stale == []
        return held_s

    async def is_looked(self) -> None:
        """Timers fire, each of which looks whether it is time."""
        wanted = self.clock.num_looks + 2
        await until(lambda: self.clock.num_looks >= wanted)

    def check(self) -> None:
        assert self.lender.check_integrity() == ""
        assert self.lender.num_waiting == self.loans.num_watchers == 0


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    made = Place()
    made.lender.start()
    yield made
    made.clock.now_s += FOR_EVER_S
    await made.lender.stop(WAIT_S)
    assert made.loans.num_lent == 0


# ---- who waits


async def test_all_who_wait_hear_of_the_last_block_and_not_before(place: Place) -> None:
    one, other = await place.ask(), await place.ask(num_known=0)
    place.loans.lend(offers(9), place.lease_id)
    await settled()
    assert not one.done() and place.lender.num_waiting == 2
    _, (last,) = place.loans.lend(offers(1), place.lease_id)
    told = await asyncio.wait_for(one, WAIT_S)
    assert told.is_all and [block.frame for block in told.blocks] == [9, 1]
    assert told.blocks[1] == last
    assert [block.frame for block in (await other).blocks] == [7, 3, 9, 1]
    place.check()


async def test_blocks_without_a_checksum_are_named_and_counted(place: Place) -> None:
    one = await place.ask()
    late = await place.ask(num_known=3)
    place.loans.lend(offers(9, 1, is_sealed=False), place.lease_id)
    told = await asyncio.wait_for(one, WAIT_S)
    assert told.is_all and told.num_unsealed == 2
    assert [(block.frame, block.checksum) for block in told.blocks] == [(9, 0), (1, 0)]
    told = await asyncio.wait_for(late, WAIT_S)
    assert told.num_unsealed == 1 and [block.frame for block in told.blocks] == [1]
    place.loans.seal(place.lease_id, {9: 9})
    assert (await (await place.ask())).num_unsealed == 1
    place.loans.seal(place.lease_id, {1: 1})
    told = await (await place.ask())
    assert told.is_all and told.num_unsealed == 0
    assert [(block.frame, block.checksum) for block in told.blocks] == [(9, 9), (1, 1)]
    place.check()


async def test_who_comes_late_is_told_at_once(place: Place) -> None:
    place.loans.lend(offers(9, 1), place.lease_id)
    told = await (await place.ask(num_known=3))
    assert told.is_all and [block.frame for block in told.blocks] == [1]
    place.check()


@pytest.mark.parametrize("num_known", [4, 9])
async def test_who_knows_all_that_it_wants_is_not_told_that_it_is_all(
    place: Place, num_known: int
) -> None:
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="num_wanted: 4 is not more than"):
            await (await place.ask(num_known=num_known, budget_s=0.0))
        place.check()
        place.loans.hand_over(place.lease_id, 5.0, place.clock.now_s)


async def test_a_lease_that_is_handed_over_grows_no_more(place: Place) -> None:
    asking = await place.ask(num_known=1)
    place.loans.hand_over(place.lease_id, 5.0, place.clock.now_s)
    told = await asyncio.wait_for(asking, WAIT_S)
    assert told.is_all and [block.frame for block in told.blocks] == [3]
    place.check()


@pytest.mark.parametrize(("budget_s", "max_wait_s"), [(0.0, FOR_EVER_S), (FOR_EVER_S, 0.0)])
async def test_whose_time_is_over_is_told_what_there_is(budget_s: float, max_wait_s: float) -> None:
    """Its own, or what the lender gives anybody."""
    place = Place(max_wait_s=max_wait_s)
    told = await (await place.ask(num_known=0, budget_s=budget_s))
    assert not told.is_all and len(told.blocks) == 2
    place.check()


@pytest.mark.parametrize("how", ["released", "all end"])
async def test_a_lease_that_ends_is_an_error(place: Place, how: str) -> None:
    asking = await place.ask()
    if how == "released":
        place.loans.release([place.lease_id], now_s=0.0)
    else:
        place.loans.end_all()
    assert place.lender.check_integrity() == ""
    with pytest.raises(LeaseLapsed):
        await asyncio.wait_for(asking, WAIT_S)
    with pytest.raises(LeaseLapsed):
        await (await place.ask())
    place.check()


async def test_only_so_many_wait_and_who_leaves_makes_room() -> None:
    place = Place(max_waiting=2)
    waiting = [await place.ask(), await place.ask()]
    with pytest.raises(NoCapacity, match="2 readers wait"):
        await (await place.ask())
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert place.lender.num_waiting == place.loans.num_watchers == 1
    again = await place.ask()
    place.loans.lend(offers(9, 1), place.lease_id)
    assert (await again).is_all and (await waiting[1]).is_all
    place.check()


async def test_a_watcher_that_nobody_is_breaks_the_law() -> None:
    place = Place()
    place.loans.watch(place.lease_id, lambda: None)
    assert "1 watch leases, 0 wait" in place.lender.check_integrity()


# ---- what is held for readers


async def test_a_hold_lasts_as_long_as_was_promised(place: Place) -> None:
    """Its lease ends, and the timer that is to end it is early by the lender's clock."""
    assert place.hold(SHORT_S) == SHORT_S
    place.loans.release([place.lease_id], now_s=0.0)
    await place.is_looked()
    place.clock.now_s += 0.9 * SHORT_S
    await place.is_looked()
    place.check()
    assert place.loans.num_lent == 2
    place.clock.now_s += 0.2 * SHORT_S
    await until(lambda: place.loans.num_lent == 0)
    place.check()


async def test_a_hold_ends_by_itself_and_not_with_the_next_sweep() -> None:
    """Nothing sweeps here."""
    place = Place(clock=asyncio.get_running_loop().time)
    place.hold(SHORT_S)
    place.loans.release([place.lease_id], now_s=0.0)
    await until(lambda: place.loans.num_lent == 0)
    await place.lender.stop(WAIT_S)


async def test_a_lender_that_stops_waits_for_what_it_holds() -> None:
    place = Place()
    place.hold(SHORT_S)
    stopping = asyncio.create_task(place.lender.stop(WAIT_S))
    await settled()
    assert (place.loans.num_leases, place.loans.num_lent) == (0, 2)
    place.clock.now_s += SHORT_S
    await stopping
    assert place.loans.num_lent == 0


async def test_nothing_is_held_for_longer_than_a_lender_may(place: Place) -> None:
    assert place.hold(0.0) == 0.0 and place.loans.num_pins == 0
    assert place.hold(1e9) == LENDER_LIMITS.max_hold_s and place.loans.num_pins == 1


async def test_only_so_many_are_held_and_whose_time_is_over_makes_room(place: Place) -> None:
    """A reader that finds no room still learns what is stale (`hold` looks)."""
    place.lender.limits = LenderLimits(max_holds=2)
    assert [place.hold(SHORT_S) for _ in range(3)] == [SHORT_S, SHORT_S, 0.0]
    place.clock.now_s += SHORT_S
    await until(lambda: place.loans.num_pins == 0)
    assert place.hold(SHORT_S) == SHORT_S


async def test_a_lease_that_is_over_holds_nothing(place: Place) -> None:
    place.loans.release([place.lease_id], now_s=0.0)
    with pytest.raises(LeaseLapsed):
        place.hold(SHORT_S)
    assert place.loans.num_lent == 0


async def test_a_reader_that_has_mapped_nothing_holds_nothing(place: Place) -> None:
    """Neither by a question of its own nor with the rest of a lease."""
    with pytest.raises(FailedPrecondition, match="hold: only for a reader of transport cuda_ipc"):
        place.hold(SHORT_S, place.reader)
    place.loans.lend(offers(9, 1), place.lease_id)
    for reader, num_held in ((place.reader, 0), (place.mapping, 1)):
        told = await place.lender.await_lent(reader, place.lease_id, 1, 4, 1.0, hold_s=SHORT_S)
        assert told.held_s == SHORT_S * num_held and place.loans.num_pins == num_held
    place.loans.release([place.lease_id], now_s=0.0)
    assert place.loans.num_lent == 3, "what was known before is not held"
