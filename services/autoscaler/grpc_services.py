"""gRPC services of an autoscaler: baton.v1.Autoscaler, which reports decisions and their reasons to
`baton autoscale`, and KEDA's external scaler; and the limits of their port. One asyncio loop.

ExternalScaler gives the plan's numbers to KEDA: one ScaledObject for each Deployment, with the
metadata `role: prefill` or `role: decode`. The metric is the number of workers that the plan wants
of that role, and the target is 1 for each replica, so that KEDA asks for exactly as many. It is
active while any are wanted. KEDA keeps one connection to one replica: every replica answers with
the leader's numbers, and with UNAVAILABLE while these are unknown, upon which KEDA changes nothing
and asks again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc.aio

from process import rpc
from process.grpc_server import PublicPortLimits
from process.memory_budget import MemoryBudget
from process.rpc_errors import InvalidArgument, NotFound, Unavailable
from protos import autoscaler_pb2, autoscaler_pb2_grpc, externalscaler_pb2, externalscaler_pb2_grpc
from services.autoscaler.signals import ByRole, Role

# ---- baton.v1.Autoscaler

SERVICE = "baton.v1.Autoscaler"

_AutoscalerContext = grpc.aio.ServicerContext[Any, Any]


MAX_REQUEST_BYTES = 64 * 1024
"""Largest request. The names and the metadata of a ScaledObject take some hundred bytes."""

_DECISION_BYTES = 8 * 1024
"""Upper estimate of the size of one decision in a reply; its JSON with all terms has about
2 KiB."""


def max_reply_bytes(num_decisions_kept: int) -> int:
    """Return the maximal size of a reply with all kept decisions."""
    return _DECISION_BYTES * max(64, num_decisions_kept)


def callers() -> PublicPortLimits:
    """Return the limits of the autoscaler's port: few callers, and few small requests at once."""
    return PublicPortLimits(
        lambda method, context: context.peer().rpartition(":")[0],
        MemoryBudget(16 * MAX_REQUEST_BYTES, wait_s=2.0),
        read_s=5.0,
        max_connections=256,
        idle_s=300.0,
    )


class AutoscalerServicer:
    """The gRPC service baton.v1.Autoscaler."""

    def __init__(
        self,
        answer: Callable[[autoscaler_pb2.GetDecisionsRequest], autoscaler_pb2.GetDecisionsReply],
    ) -> None:
        """answer: makes the reply to a request."""
        self._answer = answer

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service at a server that has not started."""
        add: Any = autoscaler_pb2_grpc.add_AutoscalerServicer_to_server
        add(self, server)

    @rpc.unary
    async def GetDecisions(
        self, request: autoscaler_pb2.GetDecisionsRequest, context: _AutoscalerContext
    ) -> autoscaler_pb2.GetDecisionsReply:
        """Return the latest decisions and the present state of the pools."""
        return self._answer(request)


# ---- KEDA's external scaler

_ScalerContext = grpc.aio.ServicerContext[Any, Any]

_STREAM_LOOK_S = 30.0
"""Longest time in seconds between two checks of a stream without a notification."""


class ExternalScaler:
    """The gRPC service externalscaler.ExternalScaler of KEDA: the wanted numbers of workers."""

    def __init__(self, wanted: Callable[[], ByRole[int]]) -> None:
        """wanted: returns the leader's wanted number of workers of each role; raises Unavailable
        with the reason while it is not known."""
        self._wanted = wanted
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service at a server that has not started."""
        add: Any = externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server
        add(self, server)

    def changed(self) -> None:
        """Notify the open streams that the wanted numbers may have changed."""
        self._changed.set()
        self._changed = asyncio.Event()

    @rpc.unary
    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _ScalerContext
    ) -> externalscaler_pb2.IsActiveResponse:
        """Return whether any workers of the role are wanted.

        Raises: InvalidArgument for a bad role; Unavailable while the wanted number is unknown.
        """
        return externalscaler_pb2.IsActiveResponse(result=self._number(_role(request)) > 0)

    @rpc.streaming
    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _ScalerContext
    ) -> AsyncGenerator[externalscaler_pb2.IsActiveResponse, None]:
        """Send IsActive at once and at each change. The stream stays open while there is no leader
        for a time, since KEDA may take up to a minute to open it again.

        Raises: InvalidArgument for a bad role; Unavailable while the first value is unknown.
        """
        role = _role(request)
        told: bool | None = None
        while True:
            changed = self._changed
            try:
                is_active = self._number(role) > 0
            except Unavailable:
                if told is None:
                    raise
                is_active = told
            if is_active is not told:
                told = is_active
                yield externalscaler_pb2.IsActiveResponse(result=is_active)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STREAM_LOOK_S):
                    await changed.wait()

    @rpc.unary
    async def GetMetricSpec(
        self, request: externalscaler_pb2.ScaledObjectRef, context: _ScalerContext
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        """Return the metric of the role, with the target 1 for each replica.

        Raises: InvalidArgument for a bad role.
        """
        spec = externalscaler_pb2.MetricSpec(
            metricName=_name(_role(request)), targetSize=1, targetSizeFloat=1.0
        )
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    @rpc.unary
    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, context: _ScalerContext
    ) -> externalscaler_pb2.GetMetricsResponse:
        """Return the wanted number of workers of the role.

        Raises: InvalidArgument for a bad role; NotFound for another metric's name; Unavailable
            while the wanted number is unknown.
        """
        role = _role(request.scaledObjectRef)
        if request.metricName not in ("", _name(role)):
            raise NotFound(f"no metric {request.metricName[:128]!r}; there is {_name(role)!r}")
        wanted = self._number(role)
        value = externalscaler_pb2.MetricValue(
            metricName=_name(role), metricValue=wanted, metricValueFloat=float(wanted)
        )
        return externalscaler_pb2.GetMetricsResponse(metricValues=[value])

    def _number(self, role: Role) -> int:
        return self._wanted().of(role)


def _name(role: Role) -> str:
    return f"baton-{role.value}-workers"


def _role(request: externalscaler_pb2.ScaledObjectRef) -> Role:
    try:
        return Role(request.scalerMetadata.get("role", ""))
    except ValueError:
        raise InvalidArgument(
            "scalerMetadata.role", "is prefill or decode, whichever this ScaledObject scales"
        ) from None
