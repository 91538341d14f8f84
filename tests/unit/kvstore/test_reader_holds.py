"""What a lender promises to keep stays exactly as long, whatever becomes of its lease, and of a
timer that is early."""

from __future__ import annotations

import pytest

from kvstore.block_lender import LENDER_LIMITS, LenderLimits, ReadPins
from kvstore.errors import IntegrityError, LeaseLapsed
from kvstore.exported_blocks import ExportedBlocks, ExportOffer
from tests.harness.waiting import Clock, until

SHORT_S = 0.01


class Watched(Clock):
    """Counts how often somebody looks."""

    num_looks = 0

    def __call__(self) -> float:
        self.num_looks += 1
        return self.now_s


class Place:
    """Three blocks under a lease.

    Attributes: told: of holds that begin, +1, and end, -1.
    """

    def __init__(self) -> None:
        self.clock = Watched()
        self.told: list[int] = []
        self.loans = ExportedBlocks(32, 64, 10.0, lambda block_ids: None)
        self.holds = ReadPins(
            self.loans, lambda: self.told.append(1), lambda: self.told.append(-1), clock=self.clock
        )
        offers = [ExportOffer(each, b"%16d" % each, each, 16) for each in (7, 3, 5)]
        self.lease_id, _ = self.loans.lend(offers)

    async def is_looked(self) -> None:
        """Timers fire, each of which looks whether it is time."""
        wanted = self.clock.num_looks + 4
        await until(lambda: self.clock.num_looks >= wanted)


async def test_a_hold_lasts_as_long_as_was_promised() -> None:
    """Its lease ends, and the timer that is to end it is early by the lender's clock."""
    place = Place()
    assert place.holds.keep(place.lease_id, 1, SHORT_S) == SHORT_S
    assert place.told == [1]
    place.loans.release([place.lease_id], now_s=0.0)
    assert place.loans.num_lent == 2, "from the second block on"
    await place.is_looked()
    place.clock.now_s += 0.9 * SHORT_S
    await place.is_looked()
    place.holds.check_integrity()
    assert place.loans.num_lent == 2 and place.told == [1]
    place.clock.now_s += 0.2 * SHORT_S
    await until(lambda: place.loans.num_lent == 0)
    assert place.told == [1, -1]
    place.holds.check_integrity()


async def test_nothing_is_promised_for_longer_than_a_lender_may() -> None:
    place = Place()
    assert place.holds.keep(place.lease_id, 0, 0.0) == 0.0
    assert place.told == []
    assert place.holds.keep(place.lease_id, 0, 1e9) == LENDER_LIMITS.max_hold_s
    place.clock.now_s += LENDER_LIMITS.max_hold_s
    await until(lambda: place.told == [1, -1])


async def test_only_so_many_are_promised_and_whose_time_is_over_makes_room() -> None:
    place = Place()
    place.holds.limits = LenderLimits(max_holds=2)
    assert [place.holds.keep(place.lease_id, 0, SHORT_S) for _ in range(3)] == [SHORT_S] * 2 + [0.0]
    place.clock.now_s += SHORT_S
    await until(lambda: place.told == [1, 1, -1, -1])
    assert place.holds.keep(place.lease_id, 0, SHORT_S) == SHORT_S
    place.clock.now_s += SHORT_S
    await until(lambda: sum(place.told) == 0)


async def test_a_lease_that_is_over_is_not_promised() -> None:
    place = Place()
    place.loans.release([place.lease_id], now_s=0.0)
    with pytest.raises(LeaseLapsed):
        place.holds.keep(place.lease_id, 0, SHORT_S)
    assert place.told == []


async def test_a_promise_that_is_not_held_breaks_the_law() -> None:
    place = Place()
    held: list[str] = []
    hold_lease = place.loans.hold_lease

    def noted(*arguments: int) -> str:
        held.append(hold_lease(*arguments))  # type: ignore[arg-type]
        return held[-1]

    place.loans.hold_lease = noted  # type: ignore[method-assign, assignment]
    place.holds.keep(place.lease_id, 0, SHORT_S)
    place.holds.check_integrity()
    place.loans.unhold(held[0])
    with pytest.raises(IntegrityError, match="promised blocks that are not held"):
        place.holds.check_integrity()
