"""The WorkerControl service: what those who run a cluster say to a worker of either role.

The only module here that knows the stub. A change of role that was begun goes on when its caller is
gone: half of one is no role.
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
    """See the proto."""

    def __init__(self, set_role: SetRole) -> None:
        self._set_role = set_role
        self._changes: set[asyncio.Future[worker_control_pb2.SetRoleReply]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register with a server that is not started yet."""
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
