"""baton.v1.Autoscaler: what was decided and why, for `baton autoscale`; and the bounds of the port
that KEDA and people call. One asyncio loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc.aio

from process import rpc
from process.grpc_server import PublicPortLimits
from process.memory_budget import MemoryBudget
from protos import autoscaler_pb2, autoscaler_pb2_grpc

SERVICE = "baton.v1.Autoscaler"

Context = grpc.aio.ServicerContext[Any, Any]


MAX_REQUEST_BYTES = 64 * 1024
"""A name, a namespace and a ScaledObject's metadata have some hundred bytes."""

_DECISION_BYTES = 8 * 1024
"""That one decision takes in a reply, generously: its JSON, with every term, has some 2 KiB."""


def max_reply_bytes(num_decisions_kept: int) -> int:
    """For a reply with all decisions."""
    return _DECISION_BYTES * max(64, num_decisions_kept)


def callers() -> PublicPortLimits:
    """Bounds of a port with small requests: few of them at once, by few."""
    return PublicPortLimits(
        lambda method, context: context.peer().rpartition(":")[0],
        MemoryBudget(16 * MAX_REQUEST_BYTES, wait_s=2.0),
        read_s=5.0,
        max_connections=256,
        idle_s=300.0,
    )


class AutoscalerServicer:
    """See the module."""

    def __init__(
        self,
        answer: Callable[[autoscaler_pb2.GetDecisionsRequest], autoscaler_pb2.GetDecisionsReply],
    ) -> None:
        self._answer = answer

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the method."""
        add: Any = autoscaler_pb2_grpc.add_AutoscalerServicer_to_server
        add(self, server)

    @rpc.unary
    async def GetDecisions(
        self, request: autoscaler_pb2.GetDecisionsRequest, context: Context
    ) -> autoscaler_pb2.GetDecisionsReply:
        """The last decisions."""
        return self._answer(request)
