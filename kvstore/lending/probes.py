"""Probes: free blocks of a lender that readers measure the way with, each for a while.

Law: an attachment has one lease of them at most, which ends with it. Knows no wire. One asyncio
loop.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from kvstore.blocks import Block, PackedBlocks
from kvstore.lending import PROBE_HASH
from kvstore.lending.loans import LoanTable, Offer
from process.deadline import Clock

PROBE_TTL_S = 10.0
"""A reader gives back what it measures with; one that does not has it no longer."""

FindFree = Callable[[int, float], Awaitable[Sequence[int]]]
"""(at most so many, within so many seconds): blocks that nobody uses, kept in place until they are
free again (`LoanTable`'s `on_free`); none where there is no room."""

Seal = Callable[[str], Awaitable[PackedBlocks]]
"""`Lender.seal`."""


class Probes:
    """See the module."""

    def __init__(
        self, loans: LoanTable, find_free: FindFree, seal: Seal, max_blocks: int, clock: Clock
    ) -> None:
        """max_blocks: that one reader is given."""
        self._loans = loans
        self._find_free = find_free
        self._seal = seal
        self._max_blocks = max_blocks
        self._clock = clock
        self._leases: dict[str, str] = {}  # attachment -> what it may measure with
        self.unsealed: set[str] = set()
        """Leases that nobody was told of yet: they have no end until their blocks are sealed."""

    async def lend(
        self, attachment_id: str, num_blocks: int, budget_s: float
    ) -> tuple[str, Sequence[Block]]:
        """Free blocks to measure the way with, if there are any; what the reader had for that
        before is given back. Returns: their lease and they, or nothing."""
        self._release(self._leases.pop(attachment_id, ""))
        block_ids = await self._find_free(min(num_blocks, self._max_blocks), budget_s)
        if not block_ids:
            return "", ()
        lease_id, _ = self._loans.lend(Offer(each, PROBE_HASH, None, 1) for each in block_ids)
        self.unsealed.add(lease_id)
        try:
            blocks = await self._seal(lease_id)
        except BaseException:
            self._release(lease_id)
            raise
        finally:
            self.unsealed.discard(lease_id)
        self._loans.hand_over(lease_id, PROBE_TTL_S, self._clock())
        former = self._leases.get(attachment_id, "")  # of a call beside this one
        self._leases[attachment_id] = lease_id
        self._release(former)
        return lease_id, blocks

    def keep(self, attachments: Collection[str]) -> None:
        """These are there; all others are gone, and have nothing any more."""
        self._release(*(self._leases.pop(each) for each in self._leases.keys() - attachments))

    def _release(self, *lease_ids: str) -> None:
        self._loans.release(lease_ids, self._clock())
