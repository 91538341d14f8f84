"""DecodeRole: the decode role of a worker."""

from __future__ import annotations

import grpc.aio

from process.deadline import Deadline
from protos import decode_pb2_grpc
from services.decode.server import DecodeServicer
from services.decode.worker import DecodeWorker
from services.worker.runtime import WorkerCore


class DecodeRole:
    """Decode worker and gRPC servicer of one core."""

    def __init__(self, core: WorkerCore) -> None:
        self.worker = DecodeWorker(core)
        self._servicer = DecodeServicer(core, self.worker)

    def start(self) -> None:
        """Start the engine's thread."""
        self.worker.start()

    def add_service(self, server: grpc.aio.Server) -> None:
        """Register the Decode service with a gRPC server that has not been started yet."""
        decode_pb2_grpc.add_DecodeServicer_to_server(self._servicer, server)

    def leave(self, by: Deadline) -> None:
        """Move all requests to other workers by the time `by`."""
        self.worker.leave(by)

    async def stop(self) -> None:
        """Do nothing: requests belong to streams, which end with the server."""
