"""The prefill role, as `services.worker.main` runs it."""

from __future__ import annotations

import grpc.aio

from process.deadline import Deadline
from protos import prefill_pb2_grpc
from services.prefill.server import PrefillServicer
from services.prefill.worker import PrefillWorker
from services.worker.core import WorkerCore


class PrefillRole:
    """Worker and servicer of one core."""

    def __init__(self, core: WorkerCore) -> None:
        self.worker = PrefillWorker(core)
        self._servicer = PrefillServicer(core, self.worker)
        self._lender = core.lender

    def start(self) -> None:
        """Begin to run the engine, and to end what was lent when its time is over."""
        self.worker.start()
        if self._lender is not None:
            self._lender.start()

    def add_service(self, server: grpc.aio.Server) -> None:
        """Register with a server that is not started yet."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, server)
        if self._lender is not None:
            self._lender.add_service(server)

    def leave(self, by: Deadline) -> None:
        """Nothing: what was taken in is answered, and lent prompts are waited for."""

    async def stop(self) -> None:
        """Refuse who still waits for room; puts behind end, or their time does."""
        await self.worker.stop()
