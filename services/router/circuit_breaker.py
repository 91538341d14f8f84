"""Whom this router mistrusts, and until when: workers that failed a call.

    TRUSTED    nothing against it (and nothing is kept)
    PAUSED     it failed: the last choice, until its pause is over; each failure doubles the pause
    PROBING    the pause is over: it is asked whether it lives
    HALF_OPEN  it answered: the next request that is chosen for it may try
    TRIED      one request tries: what comes of it decides; others see it as the last choice

Only a request that a worker served clears it: one that greets well and fails at work comes back at
ever longer pauses. Another life under the same id is trusted. The clock is the caller's; no I/O.
One asyncio loop.

Asks workers under suspicion whether they live, when their pause is over: one status call with a
short deadline. What an answer is worth is `probation`'s business. One asyncio loop, one task.
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
    """See the module."""

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
    """Of one life that is not trusted."""

    incarnation: str
    standing: Suspicion
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

    def standing(self, worker_id: str, incarnation: str) -> Suspicion:
        """Of this life."""
        record = self._records.get(worker_id)
        if record is None or record.incarnation != incarnation:
            return Suspicion.TRUSTED
        return record.standing

    def is_suspect(self, worker_id: str, incarnation: str) -> bool:
        """Whether it should be the last choice."""
        if not self._records:
            return False
        standing = self.standing(worker_id, incarnation)
        return standing not in (Suspicion.TRUSTED, Suspicion.HALF_OPEN)

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
            self._check_move(record.standing, Suspicion.PAUSED)
        self._records[worker_id] = _Record(incarnation, Suspicion.PAUSED, num_failures, retry_at_s)
        self._tell(worker_id)

    def served(self, worker_id: str, incarnation: str) -> None:
        """It answered a request, whatever it said."""
        if self.standing(worker_id, incarnation) is not Suspicion.TRUSTED:
            del self._records[worker_id]
            self._tell(worker_id)

    @contextmanager
    def trial(self, worker_id: str, incarnation: str) -> Iterator[None]:
        """A request's call to it runs in the body: how it ends counts for the worker, or for nobody
        where it ends by our own doing."""
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
        """Those to be probed now, (id, incarnation); each is PROBING until `probed`."""
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
        """What came of a probe. Nothing when something else has decided meanwhile."""
        if self.standing(worker_id, incarnation) is not Suspicion.PROBING:
            return
        if is_well:
            self._move(worker_id, Suspicion.HALF_OPEN)
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
            if record.standing is Suspicion.TRUSTED or record.num_failures < 1:
                raise Internal(f"probation keeps {worker_id}, which is trusted")
            if record.retry_at_s > latest_s:
                raise Internal(f"probation pauses {worker_id} for too long")

    def _let_go(self, worker_id: str, incarnation: str, tries: bool) -> None:
        """The trial ended without a word about the worker: another may try."""
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
"""Between two looks at who is due; far below the shortest pause that makes sense."""

_MAX_AT_ONCE = 16


class Prober:
    """See the module."""

    def __init__(
        self,
        probation: Probation,
        find: Callable[[str], WorkerView | None],
        *,
        timeout_s: float,
        on_probe: Callable[[str], None] = lambda outcome: None,
        dial: Dialer = rpc.PLAIN,
    ) -> None:
        """find: a worker by id, as the registry knows it. on_probe: told "ok" or "failed"."""
        self._probation = probation
        self._find = find
        self._timeout_s = timeout_s
        self._on_probe = on_probe
        self._dial = dial
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to probe whoever is due."""
        self._task = asyncio.create_task(self._probe_forever())

    async def stop(self) -> None:
        """Stop."""
        await end_tasks([self._task])
        self._task = None

    async def probe_due(self) -> None:
        """Probe whoever is due now, and see it to its end."""
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
            except Exception:  # the last line of defence: suspects must be met again
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
