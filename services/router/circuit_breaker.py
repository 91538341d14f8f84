"""`Probation`: a circuit breaker per worker, for workers that failed a call of this router.

    TRUSTED    no failure (nothing is kept)
    PAUSED     it failed: the last choice until its pause is over; each failure doubles the pause
    PROBING    the pause is over: a health probe is under way
    HALF_OPEN  the probe succeeded: the next request that is placed there tries the worker
    TRIED      one request tries it and decides; for other requests it is the last choice

Only a request that the worker served makes it TRUSTED: a worker that answers probes and fails
requests comes back after ever longer pauses. A new incarnation under the same id is trusted.
`Probation` does no I/O, and its clock is given.

`Prober` is the task that probes workers after their pause: one status call each, with a short
deadline. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum

import grpc.aio

from process import logs, rpc
from process.authorization import PeerRole
from process.background_tasks import end_tasks
from process.deadline import Clock
from process.rpc import Dialer
from process.rpc_errors import BatonError, Cancelled, DeadlineExceeded, Internal, Unavailable
from protos import common_pb2, decode_pb2_grpc, prefill_pb2_grpc
from services.router.policies import PREFILL
from services.router.worker_views import WorkerView


class Suspicion(Enum):
    """State of a worker's circuit breaker; see the module docstring."""

    TRUSTED = "trusted"
    PAUSED = "paused"
    PROBING = "being probed"
    HALF_OPEN = "may be tried"
    TRIED = "being tried"


ALLOWED: dict[Suspicion, frozenset[Suspicion]] = {
    Suspicion.TRUSTED: frozenset({Suspicion.PAUSED}),
    Suspicion.PAUSED: frozenset({Suspicion.PAUSED, Suspicion.PROBING, Suspicion.TRUSTED}),
    Suspicion.PROBING: frozenset({Suspicion.PAUSED, Suspicion.HALF_OPEN, Suspicion.TRUSTED}),
    Suspicion.HALF_OPEN: frozenset({Suspicion.PAUSED, Suspicion.TRIED, Suspicion.TRUSTED}),
    Suspicion.TRIED: frozenset({Suspicion.PAUSED, Suspicion.HALF_OPEN, Suspicion.TRUSTED}),
}


@dataclass(frozen=True)
class _Record:
    """Record of one worker incarnation that is not trusted. A value."""

    incarnation: str
    standing: Suspicion
    num_failures: int
    """Failures since the worker last served a request."""
    retry_at_s: float


class Probation:
    """Circuit breakers of all workers, by worker id; see the module docstring."""

    def __init__(
        self,
        *,
        first_s: float,
        most_s: float,
        clock: Clock,
        jitter: Callable[[], float] = lambda: random.uniform(0.75, 1.0),
    ) -> None:
        """Args: first_s, most_s: first and longest pause. jitter: returns a factor for each pause,
        so that routers do not probe at the same time."""
        self._first_s = first_s
        self._most_s = most_s
        self._clock = clock
        self._jitter = jitter
        self._records: dict[str, _Record] = {}
        self.on_change: list[Callable[[str], None]] = []
        """Callbacks for a change of state, called with the worker id."""

    def standing(self, worker_id: str, incarnation: str) -> Suspicion:
        """Return the state of this incarnation."""
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            return Suspicion.TRUSTED
        return record.standing

    def is_suspect(self, worker_id: str, incarnation: str) -> bool:
        """Return whether the worker should be the last choice."""
        if not self._records:
            return False
        standing = self.standing(worker_id, incarnation)
        return standing not in (Suspicion.TRUSTED, Suspicion.HALF_OPEN)

    @property
    def num_mistrusted(self) -> int:
        """Number of workers that are not TRUSTED."""
        return len(self._records)

    def failed(self, worker_id: str, incarnation: str) -> None:
        """Record that a call to the worker failed."""
        record = self._records.get(worker_id)
        known = record is not None and record.incarnation == incarnation
        num_failures = record.num_failures + 1 if record is not None and known else 1
        pause_s = min(self._most_s, self._first_s * 2.0 ** min(num_failures - 1, 32))
        retry_at_s = self._clock() + pause_s * self._jitter()
        if record is not None and known:
            self._check_move(record.standing, Suspicion.PAUSED)
        self._records[worker_id] = _Record(incarnation, Suspicion.PAUSED, num_failures, retry_at_s)
        self._tell(worker_id)

    def served(self, worker_id: str, incarnation: str) -> None:
        """Record that the worker answered a request, even with an error status."""
        if self.standing(worker_id, incarnation) is not Suspicion.TRUSTED:
            del self._records[worker_id]
            self._tell(worker_id)

    @contextmanager
    def trial(self, worker_id: str, incarnation: str) -> Iterator[None]:
        """Run a request's call to the worker in the body and record how it ends.

        Unavailable counts as a failure. Success and any other error status count as an answer. A
        deadline, a cancellation or another exception says nothing about the worker. Exceptions
        pass through.
        """
        tries = self.standing(worker_id, incarnation) is Suspicion.HALF_OPEN
        if tries:
            self._move(worker_id, Suspicion.TRIED)
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
        """Return the workers to probe now as (id, incarnation); each is PROBING until `probed`."""
        now = self._clock()
        found = [
            (worker_id, record.incarnation)
            for worker_id, record in self._records.items()
            if record.standing is Suspicion.PAUSED and record.retry_at_s <= now
        ]
        for worker_id, _ in found:
            self._move(worker_id, Suspicion.PROBING)
        return found

    def probed(self, worker_id: str, incarnation: str, *, is_well: bool) -> None:
        """Record the result of a probe; ignored when the worker's state changed meanwhile."""
        if self.standing(worker_id, incarnation) is not Suspicion.PROBING:
            return
        if is_well:
            self._move(worker_id, Suspicion.HALF_OPEN)
        else:
            self.failed(worker_id, incarnation)

    def reconcile(self, lives: Mapping[str, str]) -> None:
        """Forget the workers that are gone or restarted. `lives`: live incarnations by id."""
        for worker_id, record in list(self._records.items()):
            if lives.get(worker_id) != record.incarnation:
                del self._records[worker_id]
                self._tell(worker_id)

    def check_integrity(self) -> None:
        """Check the records. Raises: Internal when one is trusted or pauses for too long."""
        latest_s = self._clock() + self._most_s
        for worker_id, record in self._records.items():
            if record.standing is Suspicion.TRUSTED or record.num_failures < 1:
                raise Internal(f"probation keeps {worker_id}, which is trusted")
            if record.retry_at_s > latest_s:
                raise Internal(f"probation pauses {worker_id} for too long")

    def _let_go(self, worker_id: str, incarnation: str, tries: bool) -> None:
        """End a trial that told nothing about the worker: another request may try."""
        if tries and self.standing(worker_id, incarnation) is Suspicion.TRIED:
            self._move(worker_id, Suspicion.HALF_OPEN)

    def _move(self, worker_id: str, standing: Suspicion) -> None:
        record = self._records[worker_id]
        self._check_move(record.standing, standing)
        self._records[worker_id] = replace(record, standing=standing)
        self._tell(worker_id)

    def _check_move(self, before: Suspicion, after: Suspicion) -> None:
        if after not in ALLOWED[before]:
            raise Internal(f"probation: {before.value} -> {after.value}")

    def _tell(self, worker_id: str) -> None:
        for tell in self.on_change:
            tell(worker_id)


logger = logging.getLogger(__name__)

_TICK_S = 0.1
"""Interval of the prober's checks; far below the shortest sensible pause."""

_MAX_AT_ONCE = 16


class Prober:
    """Background task that sends health probes to suspect workers after their pause."""

    def __init__(
        self,
        probation: Probation,
        find: Callable[[str], WorkerView | None],
        *,
        timeout_s: float,
        on_probe: Callable[[str], None] = lambda outcome: None,
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """Args: find: returns a worker of the registry by id. timeout_s: for one probe. on_probe:
        called with "ok" or "failed"."""
        self._probation = probation
        self._find = find
        self._timeout_s = timeout_s
        self._on_probe = on_probe
        self._dial = dial
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the probe task."""
        self._task = asyncio.create_task(self._probe_forever())

    async def stop(self) -> None:
        """Stop the probe task."""
        await end_tasks([self._task])
        self._task = None

    async def probe_due(self) -> None:
        """Probe all workers that are due now; return when all probes have ended."""
        due = self._probation.due()
        slots = asyncio.Semaphore(_MAX_AT_ONCE)

        async def one(worker_id: str, incarnation: str) -> None:
            is_well = False
            try:
                async with slots:
                    is_well = await self._answers(worker_id, incarnation)
            finally:
                self._probation.probed(worker_id, incarnation, is_well=is_well)
            self._on_probe("ok" if is_well else "failed")
            logs.event(logger, "worker_probed", worker_id=worker_id, is_well=is_well)

        await asyncio.gather(*(one(*life) for life in due))

    async def _probe_forever(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            try:
                await self.probe_due()
            except Exception:  # the task must go on: it ends suspicion
                logger.exception("probing_failed")

    async def _answers(self, worker_id: str, incarnation: str) -> bool:
        worker = self._find(worker_id)
        if worker is None or worker.incarnation != incarnation:
            return False
        is_prefill = worker.role == PREFILL
        stub = prefill_pb2_grpc.PrefillStub if is_prefill else decode_pb2_grpc.DecodeStub
        try:
            async with self._dial(
                worker.address, PeerRole.PREFILL if is_prefill else PeerRole.DECODE
            ) as channel:
                status: common_pb2.WorkerStatus = await stub(channel).GetWorkerStatus(
                    common_pb2.GetWorkerStatusRequest(), timeout=self._timeout_s
                )
        except grpc.aio.AioRpcError:
            return False
        return status.incarnation == incarnation and not status.integrity_error
