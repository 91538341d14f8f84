"""KEDA's external scaler: the plan's numbers for those who let KEDA act upon them.

One ScaledObject for each Deployment, with the metadata `role: prefill` or `role: decode`. The
metric is how many workers the plan wants of that role, the target 1 for each replica: so KEDA asks
for just as many, with the plan's own windows and budget in them. It is active while any are wanted.

KEDA keeps one connection to one replica, whichever that is: all of them answer with the leader's
numbers. Where those are not known the answer is UNAVAILABLE, upon which KEDA changes nothing and
asks again. Knows no Kubernetes. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc.aio

from process import rpc
from process.errors import InvalidArgument, NotFound, Unavailable
from protos import externalscaler_pb2, externalscaler_pb2_grpc
from services.autoscaler.signals import ByRole, Role

Context = grpc.aio.ServicerContext[Any, Any]

_STREAM_LOOK_S = 30.0
"""A stream says that it still holds after so long without a change."""


class ExternalScaler:
    """See the module."""

    def __init__(self, wanted: Callable[[], ByRole[int]]) -> None:
        """wanted: workers of each role, by the leader. Raises: Unavailable saying why nobody knows
        them."""
        self._wanted = wanted
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods."""
        add: Any = externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server
        add(self, server)

    def changed(self) -> None:
        """What is wanted may be another."""
        self._changed.set()
        self._changed = asyncio.Event()

    @rpc.unary
    async def IsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> externalscaler_pb2.IsActiveResponse:
        """Whether there shall be workers at all."""
        return externalscaler_pb2.IsActiveResponse(result=self._number(_role(request)) > 0)

    @rpc.streaming
    async def StreamIsActive(
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> AsyncGenerator[externalscaler_pb2.IsActiveResponse, None]:
        """The same at once, and whenever it changes. A while without a leader ends no stream: KEDA
        would come back after up to a minute."""
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
        self, request: externalscaler_pb2.ScaledObjectRef, context: Context
    ) -> externalscaler_pb2.GetMetricSpecResponse:
        """One worker for each that is wanted."""
        spec = externalscaler_pb2.MetricSpec(
            metricName=_name(_role(request)), targetSize=1, targetSizeFloat=1.0
        )
        return externalscaler_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    @rpc.unary
    async def GetMetrics(
        self, request: externalscaler_pb2.GetMetricsRequest, context: Context
    ) -> externalscaler_pb2.GetMetricsResponse:
        """How many are wanted."""
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
