"""Followers: readers who wait at a lender for the rest of a lease that still grows, so that the
last blocks of a prompt are on their way while the word about them is, too.

Life of one: `rest` -> all that was wanted is lent, or the lease is handed over with less, or the
time is over: it is told what there is; or the lease ends, or it is cancelled. What it is told says
where bytes lie and lets nobody use them: that is the handle's to say. So who takes them hears also
of blocks whose bytes are complete and whose checksums are still computed.

Laws: at most `max_followers` wait, none longer than `max_wait_s`; a lease is watched by those who
wait and nobody else (`check_integrity`). Knows no bytes and no stubs. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvstore.errors import IntegrityError
from kvstore.lending.limits import LENDER_LIMITS, LenderLimits
from kvstore.lending.loans import LoanTable
from kvstore.lending.told import Told
from process.errors import InvalidArgument, NoCapacity


class Followers:
    """See the module.

    Attributes:
        limits: as they are when a reader asks.
    """

    def __init__(self, loans: LoanTable, limits: LenderLimits = LENDER_LIMITS) -> None:
        self.limits = limits
        self._loans = loans
        self._num_waiting = 0

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    async def rest(
        self,
        lease_id: str,
        num_known: int,
        num_wanted: int,
        budget_s: float,
        *,
        takes_unsealed: bool = False,
    ) -> Told:
        """Wait until the lease lends `num_wanted` blocks or is handed over, at most `budget_s`.

        Args: takes_unsealed: blocks without a checksum count, too.
        Returns: what it lends by then beyond the first `num_known`.
        Raises: LeaseLapsed when it ends; NoCapacity when too many wait; InvalidArgument for who
            wants no more than it knows: that would be all of it at any time.
        """
        if num_wanted <= num_known:
            raise InvalidArgument("num_wanted", f"{num_wanted} is not more than {num_known} known")
        if self._num_waiting >= self.limits.max_followers:
            raise NoCapacity(f"{self._num_waiting} readers wait for this lender already")
        news = asyncio.Event()
        self._loans.watch(lease_id, news.set)
        self._num_waiting += 1

        def is_whole() -> bool:
            return self._loans.is_whole(lease_id, num_wanted, takes_unsealed=takes_unsealed)

        try:
            is_all = await _until(is_whole, min(budget_s, self.limits.max_wait_s), news)
        finally:
            self._num_waiting -= 1
            self._loans.unwatch(lease_id, news.set)
        blocks = self._loans.blocks_of(lease_id, num_known)
        num_sealed = max(0, self._loans.num_sealed(lease_id) - num_known)
        if not takes_unsealed:
            blocks = blocks[:num_sealed]
        return Told(blocks, is_all, max(0, len(blocks) - num_sealed))

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        num_watchers = self._loans.num_watchers
        if num_watchers > self._num_waiting:  # fewer: of leases that have just ended
            raise IntegrityError(f"{num_watchers} watch leases, {self._num_waiting} wait")


async def _until(is_whole: Callable[[], bool], budget_s: float, news: asyncio.Event) -> bool:
    """Returns: whether it is, when it is or the time is over."""
    try:
        async with asyncio.timeout(budget_s):
            while not is_whole():
                news.clear()
                await news.wait()
    except TimeoutError:
        return is_whole()
    return True
