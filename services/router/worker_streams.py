"""The streams to all workers of one role, kept in step with the registry. One asyncio loop.

A worker that is new gets a stream at once, so that the first request need not wait for a
connection. Another incarnation under a known id: the old stream is closed, its requests fail. Gone
from the registry: no new request goes there, and when it stays away for the grace time its stream
is closed as well. While Redis is away everybody known stays known, so nothing is given up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from process.authorization import PeerRole
from process.deadline import Clock
from services.router.views import WorkerView
from services.router.worker_stream import WorkerStream

StreamT = TypeVar("StreamT", bound=WorkerStream[Any])


class WorkerStreams(Generic[StreamT]):
    """One stream per worker."""

    def __init__(
        self,
        role: PeerRole,
        *,
        lapse_grace_s: float,
        clock: Clock,
        make: Callable[[WorkerView], StreamT],
    ) -> None:
        """lapse_grace_s: how long a worker without heartbeat keeps its stream."""
        self._role = role
        self._lapse_grace_s = lapse_grace_s
        self._clock = clock
        self._make = make
        self._streams: dict[str, StreamT] = {}
        self._gone_since: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.on_change: list[Callable[[str], None]] = []
        """Called with the id of a worker of which more, or less, is known now."""

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """Have a stream for each of `workers` (those of the role that are known now), and for no
        other life.
        """
        known = {worker.worker_id: worker for worker in workers}
        for worker_id, stream in list(self._streams.items()):
            worker = known.get(worker_id)
            who = f"{self._role.value} worker {worker_id}"
            if worker is None:
                since = self._gone_since.setdefault(worker_id, self._clock())
                if self._clock() - since >= self._lapse_grace_s:
                    self._drop(worker_id, f"{who} has no heartbeat")
            elif (worker.incarnation, worker.address) != (stream.incarnation, stream.address):
                self._drop(worker_id, f"{who} restarted")
            else:
                self._gone_since.pop(worker_id, None)
        for worker_id, worker in known.items():
            if worker_id not in self._streams:
                self._streams[worker_id] = self._make(worker)

    def drop(self, worker_id: str, why: str) -> bool:
        """Give up what runs on that worker's stream, whose requests fail with `why`; the next look
        at the registry makes another one. Returns: whether there was anything."""
        stream = self._streams.get(worker_id)
        if stream is None or not stream.num_legs:
            return False
        self._drop(worker_id, why)
        return True

    def find(self, worker_id: str) -> StreamT | None:
        """None: it is not known, or was given up."""
        return self._streams.get(worker_id)

    def __iter__(self) -> Iterator[StreamT]:
        return iter(self._streams.values())

    def tell(self, worker_id: str) -> None:
        """Something about that worker has changed."""
        for tell in self.on_change:
            tell(worker_id)

    async def close(self) -> None:
        """End every stream."""
        for worker_id in list(self._streams):
            self._drop(worker_id, "the router stops")
        await asyncio.gather(*self._closing, return_exceptions=True)

    def check_integrity(self) -> None:
        """Raises: Internal when a stream breaks its law."""
        for stream in self._streams.values():
            stream.check_integrity()

    def _drop(self, worker_id: str, why: str) -> None:
        stream = self._streams.pop(worker_id)
        self.tell(worker_id)
        self._gone_since.pop(worker_id, None)
        task = asyncio.create_task(stream.close(why))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
