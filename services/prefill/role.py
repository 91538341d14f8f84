"""The prefill role, as `services.worker.main` runs it."""

from __future__ import annotations

import grpc.aio

from protos import prefill_pb2_grpc
from services.prefill.server import PrefillServicer
from services.prefill.worker import PrefillWorker
from services.worker.core import WorkerCore


class PrefillRole:
    """Worker and servicer of one core."""

    def __init__(self, core: WorkerCore) -> None:
        self.worker = PrefillWorker(core)
        self._servicer = PrefillServicer(core, self.worker)

    def start(self) -> None:
        """Begin to run the engine."""
        self.worker.start()

    def add_service(self, server: grpc.aio.Server) -> None:
        """Register with a server that is not started yet."""
        prefill_pb2_grpc.add_PrefillServicer_to_server(self._servicer, server)

    async def stop(self) -> None:
        """Refuse who still waits for room."""
        await self.worker.stop()
