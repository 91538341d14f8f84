"""The decode role, as `services.worker.main` runs it."""

from __future__ import annotations

import grpc.aio

from process.deadline import Deadline
from protos import decode_pb2_grpc
from services.decode.server import DecodeServicer
from services.decode.worker import DecodeWorker
from services.worker.core import WorkerCore


class DecodeRole:
    """Worker and servicer of one core."""

    def __init__(self, core: WorkerCore) -> None:
        self.worker = DecodeWorker(core)
        self._servicer = DecodeServicer(core, self.worker)

    def start(self) -> None:
        """Begin to run the engine."""
        self.worker.start()

    def add_service(self, server: grpc.aio.Server) -> None:
        """Register with a server that is not started yet."""
        decode_pb2_grpc.add_DecodeServicer_to_server(self._servicer, server)

    def leave(self, by: Deadline) -> None:
        """Streams go on elsewhere."""
        self.worker.leave(by)

    async def stop(self) -> None:
        """Nothing waits outside of a stream, and streams end with the server."""
