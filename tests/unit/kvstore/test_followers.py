"""Who waits at a lender for the rest of a lease hears of it once, whatever becomes of the lease."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.block_lender import LeaseWatchers, LenderLimits
from kvstore.errors import IntegrityError, LeaseLapsed
from kvstore.exported_blocks import ExportedBlocks, ExportOffer
from process.errors import InvalidArgument, NoCapacity
from tests.harness.waiting import settled

WAIT_S = 20.0
FOR_EVER_S = 1e9


def offers(*block_ids: int, is_sealed: bool = True) -> list[ExportOffer]:
    return [
        ExportOffer(each, b"%16d" % each, each if is_sealed else None, 16) for each in block_ids
    ]


class Place:
    """A lease on two blocks that is to grow to four. Unless a test says so, nobody is told of
    anything because a time was over."""

    def __init__(self, *, max_followers: int = 256, max_wait_s: float = FOR_EVER_S) -> None:
        self.loans = ExportedBlocks(32, 64, 10.0, lambda block_ids: None)
        limits = LenderLimits(max_followers=max_followers, max_wait_s=max_wait_s)
        self.followers = LeaseWatchers(self.loans, limits)
        self.lease_id, _ = self.loans.lend(offers(7, 3))

    async def ask(
        self, num_known: int = 2, budget_s: float = FOR_EVER_S, *, takes_unsealed: bool = False
    ) -> asyncio.Task:
        rest = self.followers.rest(
            self.lease_id, num_known, 4, budget_s, takes_unsealed=takes_unsealed
        )
        task = asyncio.create_task(rest)
        await settled()
        return task

    def check(self) -> None:
        self.loans.check_integrity()
        self.followers.check_integrity()
        assert self.followers.num_waiting == self.loans.num_watchers == 0


async def test_all_who_wait_hear_of_the_last_block_and_not_before() -> None:
    place = Place()
    one, other = await place.ask(), await place.ask(num_known=0)
    place.loans.lend(offers(9), place.lease_id)
    await settled()
    assert not one.done() and place.followers.num_waiting == 2
    _, (last,) = place.loans.lend(offers(1), place.lease_id)
    told = await asyncio.wait_for(one, WAIT_S)
    assert told.is_all and [block.frame for block in told.blocks] == [9, 1]
    assert told.blocks[1] == last
    assert [block.frame for block in (await other).blocks] == [7, 3, 9, 1]
    place.check()


async def test_who_takes_them_hears_of_blocks_without_a_checksum_and_nobody_else_does() -> None:
    place = Place()
    takes, does_not = await place.ask(takes_unsealed=True), await place.ask()
    late = await place.ask(num_known=3, takes_unsealed=True)
    place.loans.lend(offers(9, 1, is_sealed=False), place.lease_id)
    told = await asyncio.wait_for(takes, WAIT_S)
    assert told.is_all and told.num_unsealed == 2
    assert [(block.frame, block.checksum) for block in told.blocks] == [(9, 0), (1, 0)]
    told = await asyncio.wait_for(late, WAIT_S)
    assert told.num_unsealed == 1 and [block.frame for block in told.blocks] == [1]
    place.loans.seal(place.lease_id, {9: 9})
    told = await (await place.ask(budget_s=0.0))
    assert not told.is_all and [block.frame for block in told.blocks] == [9]
    assert not does_not.done()
    place.loans.seal(place.lease_id, {1: 1})
    told = await asyncio.wait_for(does_not, WAIT_S)
    assert told.is_all and told.num_unsealed == 0
    assert [(block.frame, block.checksum) for block in told.blocks] == [(9, 9), (1, 1)]
    told = await (await place.ask(takes_unsealed=True))
    assert told.is_all and told.num_unsealed == 0
    place.check()


async def test_who_comes_late_is_told_at_once() -> None:
    place = Place()
    place.loans.lend(offers(9, 1), place.lease_id)
    told = await (await place.ask(num_known=3))
    assert told.is_all and [block.frame for block in told.blocks] == [1]
    place.check()


@pytest.mark.parametrize("num_known", [4, 9])
async def test_who_knows_all_that_it_wants_is_not_told_that_it_is_all(num_known: int) -> None:
    place = Place()
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="num_wanted: 4 is not more than"):
            await (await place.ask(num_known=num_known, budget_s=0.0))
        place.check()
        place.loans.hand_over(place.lease_id, 5.0, now_s=0.0)


async def test_a_lease_that_is_handed_over_grows_no_more() -> None:
    place = Place()
    asking = await place.ask(num_known=1)
    place.loans.hand_over(place.lease_id, 5.0, now_s=0.0)
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
async def test_a_lease_that_ends_is_an_error(how: str) -> None:
    place = Place()
    asking = await place.ask()
    if how == "released":
        place.loans.release([place.lease_id], now_s=0.0)
    else:
        place.loans.end_all()
    place.followers.check_integrity()
    with pytest.raises(LeaseLapsed):
        await asyncio.wait_for(asking, WAIT_S)
    with pytest.raises(LeaseLapsed):
        await (await place.ask())
    place.check()


async def test_only_so_many_wait_and_who_leaves_makes_room() -> None:
    place = Place(max_followers=2)
    waiting = [await place.ask(), await place.ask()]
    with pytest.raises(NoCapacity, match="2 readers wait"):
        await (await place.ask())
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert place.followers.num_waiting == place.loans.num_watchers == 1
    again = await place.ask()
    place.loans.lend(offers(9, 1), place.lease_id)
    assert (await again).is_all and (await waiting[1]).is_all
    place.check()


async def test_a_watcher_that_nobody_is_breaks_the_law() -> None:
    place = Place()
    place.loans.watch(place.lease_id, lambda: None)
    with pytest.raises(IntegrityError, match="1 watch leases, 0 wait"):
        place.followers.check_integrity()
