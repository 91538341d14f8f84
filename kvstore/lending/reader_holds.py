"""ReaderHolds: blocks that a lender keeps in place for a reader that has mapped its memory, for a
time that it promises with its word on them: what the reader has copied by then was what it was
told, and need not be asked about.

Law: a hold lasts exactly as long as was promised, whatever becomes of its lease, its reader or the
lender's readiness to lend. Bounded in number; who finds no room is promised nothing, and asks. One
asyncio loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from kvstore.errors import IntegrityError
from kvstore.lending.limits import LENDER_LIMITS, LenderLimits
from kvstore.lending.loans import LoanTable
from process.deadline import Clock


class ReaderHolds:
    """See the module.

    Attributes:
        limits: as they are when a promise is asked for.
    """

    def __init__(
        self,
        loans: LoanTable,
        on_begin: Callable[[], None],
        on_end: Callable[[], None],
        limits: LenderLimits = LENDER_LIMITS,
        clock: Clock = time.monotonic,
    ) -> None:
        """on_begin, on_end: told of each. clock: seconds, by which a hold is over."""
        self.limits = limits
        self._loans = loans
        self._on_begin = on_begin
        self._on_end = on_end
        self._clock = clock
        self._ends: dict[str, asyncio.TimerHandle] = {}

    def keep(self, lease_id: str, first: int, seconds: float) -> float:
        """Keep what a lease lends from its block `first` on for `seconds`, within the bound.

        Returns: for how long it is kept, from now; 0: it is not. Raises: LeaseLapsed.
        """
        seconds = min(seconds, self.limits.max_hold_s)
        if seconds <= 0 or len(self._ends) >= self.limits.max_holds:
            return 0.0
        hold_id = self._loans.hold_lease(lease_id, first)
        self._end_later(hold_id, self._clock() + seconds)
        self._on_begin()
        return seconds

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        if not self._loans.has_holds(self._ends):
            raise IntegrityError("a reader was promised blocks that are not held")

    def _end_later(self, hold_id: str, ends_s: float) -> None:
        left_s = ends_s - self._clock()
        loop = asyncio.get_running_loop()
        self._ends[hold_id] = loop.call_later(left_s, self._end, hold_id, ends_s)

    def _end(self, hold_id: str, ends_s: float) -> None:
        if self._clock() < ends_s:  # a loop's timer may be a moment early
            self._end_later(hold_id, ends_s)
            return
        del self._ends[hold_id]
        self._loans.unhold(hold_id)
        self._on_end()
