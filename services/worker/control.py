"""WorkerControlServicer: the WorkerControl gRPC service, by which operators change a worker of
either role. The only module here that imports its stub.

The only module here that knows the stub. A change of role that has begun continues when its caller
disconnects.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from process import rpc
from protos import worker_control_pb2, worker_control_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

SetRole = Callable[[str], Awaitable[worker_control_pb2.SetRoleReply]]


class WorkerControlServicer(worker_control_pb2_grpc.WorkerControlServicer):
    """gRPC servicer of WorkerControl: changes the role of one worker."""

    def __init__(self, set_role: SetRole) -> None:
        self._set_role = set_role
        self._changes: set[asyncio.Future[worker_control_pb2.SetRoleReply]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with a gRPC server that has not been started yet."""
        worker_control_pb2_grpc.add_WorkerControlServicer_to_server(self, server)

    @rpc.unary
    async def SetRole(
        self, request: worker_control_pb2.SetRoleRequest, context: Context
    ) -> worker_control_pb2.SetRoleReply:
        change = asyncio.ensure_future(self._set_role(request.role))
        self._changes.add(change)
        change.add_done_callback(self._over)
        return await asyncio.shield(change)

    def _over(self, change: asyncio.Future[worker_control_pb2.SetRoleReply]) -> None:
        self._changes.discard(change)
        if not change.cancelled():
            change.exception()  # seen, also where the caller has gone
