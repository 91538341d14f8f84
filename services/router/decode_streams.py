"""The streams to all decode workers, kept in step with the registry. One asyncio loop.

A worker that is new gets a stream at once, so that the first request need not wait for a
connection. Another incarnation under a known id: the old stream is closed, its requests fail. Gone
from the registry: no new request goes there, and when it stays away for the grace time its stream
is closed as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from process.deadline import Clock, Deadline
from process.errors import Unavailable
from protos import decode_pb2
from services.router.config import RouterTimes
from services.router.decode_leg import DecodeLeg
from services.router.decode_stream import DecodeStream, StepLoad
from services.router.views import WorkerView


class DecodeStreams:
    """One stream per decode worker."""

    def __init__(self, times: RouterTimes, clock: Clock) -> None:
        self._times = times
        self._clock = clock
        self._streams: dict[str, DecodeStream] = {}
        self._gone_since: dict[str, float] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._progress = asyncio.Event()

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """Have a stream for each of `workers` (the decode workers known now), and for no other
        life.
        """
        known = {worker.worker_id: worker for worker in workers}
        for worker_id, stream in list(self._streams.items()):
            worker = known.get(worker_id)
            if worker is None:
                since = self._gone_since.setdefault(worker_id, self._clock())
                if self._clock() - since >= self._times.lapse_grace_s:
                    self._drop(worker_id, f"decode worker {worker_id} has no heartbeat")
            elif (worker.incarnation, worker.address) != (stream.incarnation, stream.address):
                self._drop(worker_id, f"decode worker {worker_id} restarted")
            else:
                self._gone_since.pop(worker_id, None)
        for worker_id, worker in known.items():
            if worker_id not in self._streams:
                self._streams[worker_id] = DecodeStream(
                    worker,
                    connect_timeout_s=self._times.connect_timeout_s,
                    on_progress=self._progress.set,
                )

    def load(self, worker_id: str) -> StepLoad | None:
        """The worker's load by its last step."""
        stream = self._streams.get(worker_id)
        return stream.load if stream is not None else None

    def num_legs(self, worker_id: str) -> int:
        """Requests of this router on that worker."""
        stream = self._streams.get(worker_id)
        return stream.num_legs if stream is not None else 0

    @property
    def num_open_legs(self) -> int:
        """Keys on all streams that wait for their worker's last word."""
        return sum(stream.num_legs for stream in self._streams.values())

    def is_up(self, worker_id: str) -> bool:
        """Whether the worker's stream stands."""
        stream = self._streams.get(worker_id)
        return stream is not None and stream.is_up

    async def open(
        self, worker_id: str, reserve: decode_pb2.ReserveDecode, deadline: Deadline
    ) -> DecodeLeg:
        """Send a reservation; see `DecodeStream.open`. Raises: Unavailable."""
        stream = self._streams.get(worker_id)
        if stream is None:
            raise Unavailable(f"decode worker {worker_id} is gone")
        return await stream.open(reserve, deadline)

    async def wait_for_progress(self, timeout_s: float) -> None:
        """Until some leg ended somewhere, so that there may be room; at most `timeout_s`."""
        self._progress.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._progress.wait()
        except TimeoutError:
            return

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
        self._gone_since.pop(worker_id, None)
        task = asyncio.create_task(stream.close(why))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
