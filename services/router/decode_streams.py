"""The streams to all decode workers, and what the router knows of each worker's load by them.

Which streams there are: `worker_streams`. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from process import rpc
from process.authorization import PeerRole
from process.deadline import Clock, Deadline
from process.errors import Unavailable
from process.rpc import Dialer
from protos import decode_pb2
from services.router.config import RouterTimes
from services.router.decode_leg import DecodeLeg
from services.router.decode_stream import DecodeStream
from services.router.others_load import OthersLoad
from services.router.views import WorkerView
from services.router.worker_streams import WorkerStreams


@dataclass(frozen=True)
class DecodeLoad:
    """What a worker has, as far as one router can know."""

    num_free_blocks: int
    num_requests: int


class DecodeStreams:
    """One stream per decode worker."""

    def __init__(self, times: RouterTimes, clock: Clock, dial: Dialer = rpc.PLAIN) -> None:
        self._times = times
        self._dial = dial
        self._others = OthersLoad(clock)
        self._progress = asyncio.Event()
        self._streams = WorkerStreams(
            PeerRole.DECODE, lapse_grace_s=times.lapse_grace_s, clock=clock, make=self._make
        )

    @property
    def on_change(self) -> list[Callable[[str], None]]:
        """Called with the id of a worker of which more, or less, is known now."""
        return self._streams.on_change

    def reconcile(self, workers: Iterable[WorkerView]) -> None:
        """`workers` are those known now; see `WorkerStreams.reconcile`."""
        workers = list(workers)
        changed = self._others.reckon(workers, lambda worker: worker.num_requests, self.num_legs)
        for worker_id in changed:
            self._streams.tell(worker_id)
        self._streams.reconcile(workers)

    def load(self, worker: WorkerView) -> DecodeLoad:
        """The worker's load by its last news and what we have sent since; while it serves none of
        ours, by its heartbeat. (It sends no news then, and the last may be from before a cancel
        took effect.)
        """
        num_others = self._others.of(worker.worker_id)
        num_others = worker.num_requests if num_others is None else num_others
        stream = self._streams.find(worker.worker_id)
        if stream is None or not stream.num_legs:
            return DecodeLoad(worker.num_free_blocks, num_others)
        num_free = worker.num_free_blocks
        if stream.load is not None:
            num_free, num_others = stream.load.num_free_blocks, stream.load.num_others
        return DecodeLoad(
            max(0, num_free - stream.num_unanswered_blocks), num_others + stream.num_legs
        )

    def num_free_places(self, worker: WorkerView) -> int | None:
        """Places for samples of further requests at the worker, by its last news and what we have
        sent since; None: it does not say.

        While it serves none of ours it sends no news, so either of the last and the heartbeat may
        be the older one: the higher number is taken. If that is too high the first answer puts it
        right; one that is too low would hold requests back for as long.
        """
        stream = self._streams.find(worker.worker_id)
        if stream is None or stream.load is None:
            num_free = worker.num_free_places
        elif stream.num_legs or worker.num_free_places is None:
            num_free = stream.load.num_free_places
        else:
            num_free = max(stream.load.num_free_places or 0, worker.num_free_places)
        if num_free is None or stream is None:
            return num_free
        return max(0, num_free - stream.num_unanswered_places)

    def num_legs(self, worker_id: str) -> int:
        """Requests of this router on that worker."""
        stream = self._streams.find(worker_id)
        return stream.num_legs if stream is not None else 0

    @property
    def num_open_legs(self) -> int:
        """Keys on all streams that wait for their worker's last word."""
        return sum(stream.num_legs for stream in self._streams)

    def drop(self, worker_id: str, why: str) -> bool:
        """See `WorkerStreams.drop`."""
        return self._streams.drop(worker_id, why)

    def is_up(self, worker_id: str) -> bool:
        """Whether the worker's stream stands."""
        stream = self._streams.find(worker_id)
        return stream is not None and stream.is_up

    async def open(
        self,
        worker_id: str,
        reserve: decode_pb2.ReserveDecode,
        deadline: Deadline,
        num_blocks: int = 0,
        num_places: int = 1,
    ) -> DecodeLeg:
        """Send a reservation; see `DecodeStream.open`. Raises: Unavailable."""
        stream = self._streams.find(worker_id)
        if stream is None:
            raise Unavailable(f"decode worker {worker_id} is gone")
        leg = await stream.open(reserve, deadline, num_blocks, num_places)
        self._others.note(worker_id, stream.num_legs)
        return leg

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
        await self._streams.close()

    def check_integrity(self) -> None:
        """Raises: Internal when a stream breaks its law."""
        self._streams.check_integrity()

    def _make(self, worker: WorkerView) -> DecodeStream:
        return DecodeStream(
            worker,
            connect_timeout_s=self._times.connect_timeout_s,
            on_progress=self._progress.set,
            on_load=partial(self._streams.tell, worker.worker_id),
            dial=self._dial,
        )
