"""Whom this router mistrusts, and until when: workers that failed a call.

    TRUSTED    nothing against it (and nothing is kept)
    PAUSED     it failed: the last choice, until its pause is over; each failure doubles the pause
    PROBING    the pause is over: it is asked whether it lives
    HALF_OPEN  it answered: the next request that is chosen for it may try
    TRIED      one request tries: what comes of it decides; others see it as the last choice

Only a request that a worker served clears it: one that greets well and fails at work comes back at
ever longer pauses. Another life under the same id is trusted. The clock is the caller's; no I/O.
One asyncio loop.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

from process.deadline import Clock
from process.errors import BatonError, Cancelled, DeadlineExceeded, Internal, Unavailable


class Standing(Enum):
    """See the module."""

    TRUSTED = "trusted"
    PAUSED = "paused"
    PROBING = "being probed"
    HALF_OPEN = "may be tried"
    TRIED = "being tried"


ALLOWED: dict[Standing, frozenset[Standing]] = {
    Standing.TRUSTED: frozenset({Standing.PAUSED}),
    Standing.PAUSED: frozenset({Standing.PAUSED, Standing.PROBING, Standing.TRUSTED}),
    Standing.PROBING: frozenset({Standing.PAUSED, Standing.HALF_OPEN, Standing.TRUSTED}),
    Standing.HALF_OPEN: frozenset({Standing.PAUSED, Standing.TRIED, Standing.TRUSTED}),
    Standing.TRIED: frozenset({Standing.PAUSED, Standing.HALF_OPEN, Standing.TRUSTED}),
}


@dataclass(frozen=True)
class _Record:
    """Of one life that is not trusted."""

    incarnation: str
    standing: Standing
    num_failures: int
    """Since it last served a request."""
    retry_at_s: float


class Probation:
    """See the module."""

    def __init__(
        self,
        *,
        first_s: float,
        most_s: float,
        clock: Clock,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.0),
    ) -> None:
        """first_s, most_s: the first pause, and the longest. jitter: a factor of each pause, so
        that routers do not probe together."""
        self._first_s = first_s
        self._most_s = most_s
        self._clock = clock
        self._jitter = jitter
        self._records: dict[str, _Record] = {}
        self.on_change: list[Callable[[str], None]] = []
        """Called with the id of a worker whose standing changed."""

    def standing(self, worker_id: str, incarnation: str) -> Standing:
        """Of this life."""
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            return Standing.TRUSTED
        return record.standing

    def is_suspect(self, worker_id: str, incarnation: str) -> bool:
        """Whether it should be the last choice."""
        if not self._records:
            return False
        standing = self.standing(worker_id, incarnation)
        return standing not in (Standing.TRUSTED, Standing.HALF_OPEN)

    @property
    def num_mistrusted(self) -> int:
        """Workers that are not trusted now."""
        return len(self._records)

    def failed(self, worker_id: str, incarnation: str) -> None:
        """A call to it failed."""
        record = self._records.get(worker_id)
        known = record is not None and record.incarnation == incarnation
        num_failures = record.num_failures + 1 if record is not None and known else 1
        pause_s = min(self._most_s, self._first_s * 2.0 ** min(num_failures - 1, 32))
        retry_at_s = self._clock() + pause_s * self._jitter()
        if record is not None and known:
            self._check_move(record.standing, Standing.PAUSED)
        self._records[worker_id] = _Record(incarnation, Standing.PAUSED, num_failures, retry_at_s)
        self._tell(worker_id)

    def served(self, worker_id: str, incarnation: str) -> None:
        """It answered a request, whatever it said."""
        if self.standing(worker_id, incarnation) is not Standing.TRUSTED:
            del self._records[worker_id]
            self._tell(worker_id)

    @contextmanager
    def trial(self, worker_id: str, incarnation: str) -> Iterator[None]:
        """A request's call to it runs in the body: how it ends counts for the worker, or for nobody
        where it ends by our own doing."""
        tries = self.standing(worker_id, incarnation) is Standing.HALF_OPEN
        if tries:
            self._move(worker_id, Standing.TRIED)
        try:
            yield
        except Unavailable:
            self.failed(worker_id, incarnation)
            raise
        except (DeadlineExceeded, Cancelled):
            self._let_go(worker_id, incarnation, tries)
            raise
        except BatonError:
            self.served(worker_id, incarnation)
            raise
        except BaseException:
            self._let_go(worker_id, incarnation, tries)
            raise
        self.served(worker_id, incarnation)

    def due(self) -> Sequence[tuple[str, str]]:
        """Those to be probed now, (id, incarnation); each is PROBING until `probed`."""
        now = self._clock()
        found = [
            (worker_id, record.incarnation)
            for worker_id, record in self._records.items()
            if record.standing is Standing.PAUSED and record.retry_at_s <= now
        ]
        for worker_id, _ in found:
            self._move(worker_id, Standing.PROBING)
        return found

    def probed(self, worker_id: str, incarnation: str, *, is_well: bool) -> None:
        """What came of a probe. Nothing when something else has decided meanwhile."""
        if self.standing(worker_id, incarnation) is not Standing.PROBING:
            return
        if is_well:
            self._move(worker_id, Standing.HALF_OPEN)
        else:
            self.failed(worker_id, incarnation)

    def reconcile(self, lives: Mapping[str, str]) -> None:
        """Forget whoever is not among `lives` (incarnation by id): gone, or another life."""
        for worker_id, record in list(self._records.items()):
            if lives.get(worker_id) != record.incarnation:
                del self._records[worker_id]
                self._tell(worker_id)

    def check_integrity(self) -> None:
        """Raises: Internal when a record says nothing, or waits for longer than it may."""
        latest_s = self._clock() + self._most_s
        for worker_id, record in self._records.items():
            if record.standing is Standing.TRUSTED or record.num_failures < 1:
                raise Internal(f"probation keeps {worker_id}, which is trusted")
            if record.retry_at_s > latest_s:
                raise Internal(f"probation pauses {worker_id} for too long")

    def _let_go(self, worker_id: str, incarnation: str, tries: bool) -> None:
        """The trial ended without a word about the worker: another may try."""
        if tries and self.standing(worker_id, incarnation) is Standing.TRIED:
            self._move(worker_id, Standing.HALF_OPEN)

    def _move(self, worker_id: str, standing: Standing) -> None:
        record = self._records[worker_id]
        self._check_move(record.standing, standing)
        self._records[worker_id] = replace(record, standing=standing)
        self._tell(worker_id)

    def _check_move(self, before: Standing, after: Standing) -> None:
        if after not in ALLOWED[before]:
            raise Internal(f"probation: {before.value} -> {after.value}")

    def _tell(self, worker_id: str) -> None:
        for tell in self.on_change:
            tell(worker_id)
