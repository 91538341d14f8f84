"""What heartbeats show of a worker's load beyond this router's own part of it.

A heartbeat was written up to BEAT_AGE_S before it is read: what this router had there at some
moment of that time may be in it, though it has ended since. So the most that was there within it is
taken off, and what is left is other routers'. Where that is too much for a moment, the next look
puts it right. One role; no I/O. One asyncio loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from process.deadline import Clock
from process.registry import BEAT_EVERY_S
from services.router.views import WorkerView

BEAT_AGE_S = 2 * BEAT_EVERY_S
"""A heartbeat that is read may be so old: one beat, and as long again for a busy process."""


class OthersLoad:
    """See the module."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ours: dict[str, deque[tuple[float, int]]] = {}
        """By worker id: when we had how much there, the oldest first; it held until the next."""
        self._others: dict[str, int] = {}

    def note(self, worker_id: str, num_ours: int) -> None:
        """So much of ours is there now."""
        now_s = self._clock()
        past = self._ours.setdefault(worker_id, deque())
        past.append((now_s, num_ours))
        while len(past) > 1 and past[1][0] <= now_s - BEAT_AGE_S:
            past.popleft()

    def reckon(
        self,
        workers: Iterable[WorkerView],
        told: Callable[[WorkerView], int],
        num_ours: Callable[[str], int],
    ) -> list[str]:
        """The registry was looked at. `told`: of a worker, by its heartbeat; `num_ours`: now, by
        id. Returns: ids of workers of which something else is known than before."""
        others, ours = {}, {}
        for worker in workers:
            name = worker.worker_id
            self.note(name, num_ours(name))
            ours[name] = self._ours[name]
            others[name] = max(0, told(worker) - max(num for _, num in ours[name]))
        before, self._others, self._ours = self._others, others, ours
        return [name for name, num in others.items() if before.get(name) != num]

    def of(self, worker_id: str) -> int | None:
        """What others have there; None: no heartbeat was seen."""
        return self._others.get(worker_id)
