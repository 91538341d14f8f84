"""HandleLedger: replay protection: a signed handle can be used once per worker.

A nonce is kept until its handle's deadline (and the slack of the clocks) has passed; from then on
the handle is refused as too old. So memory is bounded by the handles of one deadline's time, and by
`max_entries` above that: what does not fit is refused, never let in unseen.

A worker that restarts forgets; a handle is then still only good for its own request, tenant, model
and prompt, and for blocks that verify. Pure but for its memory; time comes in as an argument.
Belongs to the loop's thread.
"""

from __future__ import annotations

import heapq

from kvstore.errors import DEADLINE
from process.errors import Internal
from services.worker.handle import CLOCK_SLACK_S, REPLAYED, Handle, HandleRefused

LEDGER_FULL = "ledger_full"

MAX_ENTRIES = 65536
"""Most nonces that are kept: some 10 MiB; at a lease time of 30 s that is 2,000 handles per
second."""


class HandleLedger:
    """Nonces of the handles that were used and have not expired."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._nonces: set[bytes] = set()
        self._newest_over_ms = 0
        self._ends: list[tuple[int, bytes]] = []
        """(deadline_unix_ms, nonce), the next to end first."""

    def __len__(self) -> int:
        return len(self._nonces)

    def take(self, handle: Handle, now_s: float) -> None:
        """Use a verified handle, once. `now_s`: wall clock, seconds.

        Raises: HandleRefused with "replayed" for one that was used before, "deadline" for one that
        is too old, "ledger_full" when no more can be remembered.
        """
        # Never back: a clock that is set back must not let in again what was forgotten.
        newest_over_ms = max(self._newest_over_ms, int((now_s - CLOCK_SLACK_S) * 1000))
        self._newest_over_ms = newest_over_ms
        self._forget(newest_over_ms)
        if handle.nonce in self._nonces:
            raise HandleRefused(REPLAYED, "the handle was used before")
        if handle.deadline_unix_ms < newest_over_ms:
            raise HandleRefused(DEADLINE, "the handle's deadline has passed")
        if len(self._nonces) >= self._max_entries:
            raise HandleRefused(LEDGER_FULL, f"{self._max_entries} handles are remembered already")
        self._nonces.add(handle.nonce)
        heapq.heappush(self._ends, (handle.deadline_unix_ms, handle.nonce))

    def check_integrity(self) -> None:
        """Check the ledger's invariants. Raises: Internal when its two halves differ or the bound
        does not hold."""
        if {nonce for _, nonce in self._ends} != self._nonces or len(self._ends) != len(
            self._nonces
        ):
            raise Internal("handle ledger: nonces and their ends differ")
        if len(self._nonces) > self._max_entries:
            raise Internal("handle ledger: more entries than its bound")

    def _forget(self, newest_over_ms: int) -> None:
        while self._ends and self._ends[0][0] < newest_over_ms:
            _, nonce = heapq.heappop(self._ends)
            self._nonces.discard(nonce)
