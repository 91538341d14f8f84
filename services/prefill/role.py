"""PrefillRole: the prefill role of a worker."""

from __future__ import annotations

import grpc.aio

from process.deadline import Deadline
from protos import prefill_pb2_grpc
from services.prefill.server import PrefillServicer
from services.prefill.worker import PrefillWorker
from services.worker.runtime import WorkerCore


class PrefillRole:
    """Prefill worker and gRPC servicer of one core."""

    def __init__(self, core: WorkerCore) -> None:
        self.worker = PrefillWorker(core)
        self._servicer = PrefillServicer(core, self.worker)
        self._lender = core.lender

    def start(self) -> None:
        """Start the engine's thread and the expiry of leases."""
        self.worker.start()
        if self._lender is not None:
            self._lender.start()

    def add_service(self, server: grpc.aio.Server) -> None:
        """Register the Prefill service with a gRPC server that has not been started yet."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, server)
        if self._lender is not None:
            self._lender.add_service(server)

    def leave(self, by: Deadline) -> None:
        """Do nothing: accepted requests are answered, and readers of lent prompts are waited
        for."""

    async def stop(self) -> None:
        """Refuse requests that wait for room; wait for background puts, within their time
        budget."""
        await self.worker.stop()
