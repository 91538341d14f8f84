"""Asks workers under suspicion whether they live, when their pause is over: one status call with a
short deadline. What an answer is worth is `probation`'s business. One asyncio loop, one task.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from process import logs, rpc
from process.authorization import PeerRole
from process.background_tasks import end_tasks
from process.rpc import Dialer
from protos import common_pb2, decode_pb2_grpc, prefill_pb2_grpc
from services.router.policy import PREFILL
from services.router.probation import Probation
from services.router.views import WorkerView

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
