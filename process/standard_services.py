"""gRPC's own two services beside ours: health, for probes and balancers, and reflection, for tools
that ask a server what it serves.

Health says what a process's own check says at that moment: "" is the process itself, any other name
is a service. Reflection answers under both names that clients try (the messages are the same).
Knows no Baton service. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from process import serving
from process.errors import NotFound

HEALTH = "grpc.health.v1.Health"
REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
_LOOK_S = 0.5
"""Between two looks of a watch."""

Context = grpc.aio.ServicerContext[Any, Any]
_Status: Any = health_pb2.HealthCheckResponse

Checks = Mapping[str, Callable[[], bool]]
"""Whether each service can serve now."""


class Health:
    """grpc.health.v1.Health."""

    def __init__(self, checks: Checks) -> None:
        self._checks: Checks = {"": lambda: True, **checks}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the methods."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self.check,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=_Status.SerializeToString,
            ),
            "List": grpc.unary_unary_rpc_method_handler(
                self.list,
                request_deserializer=health_pb2.HealthListRequest.FromString,
                response_serializer=health_pb2.HealthListResponse.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.watch,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=_Status.SerializeToString,
            ),
        }
        server.add_registered_method_handlers(HEALTH, handlers)

    @serving.unary
    async def check(self, request: Any, context: Context) -> Any:
        """One service now."""
        if request.service not in self._checks:
            raise NotFound(f"service: '{request.service[:128]}' is not served here")
        return self._status(request.service)

    @serving.unary
    async def list(self, request: Any, context: Context) -> Any:
        """All services now."""
        return health_pb2.HealthListResponse(
            statuses={name: self._status(name) for name in self._checks}
        )

    @serving.unary
    async def watch(self, request: Any, context: Context) -> None:
        """One service now and after each change, until the client leaves."""
        last = None
        while True:
            status = self._status(request.service)
            if status.status != last:
                last = status.status
                await context.write(status)
            await asyncio.sleep(_LOOK_S)

    def _status(self, service: str) -> Any:
        check = self._checks.get(service)
        if check is None:
            return _Status(status=_Status.SERVICE_UNKNOWN)
        return _Status(status=_Status.SERVING if check() else _Status.NOT_SERVING)


class Reflection:
    """What a server serves, and the descriptors of it."""

    def __init__(self, services: tuple[str, ...]) -> None:
        """`services`: full names; those of this module come by themselves."""
        self._inner: Any = reflection.aio.ReflectionServicer((*services, HEALTH, *REFLECTIONS))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the method under both names."""
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self.info,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        for name in REFLECTIONS:
            server.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})

    @serving.streaming
    async def info(self, requests: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        """One answer for each question."""
        async for answer in self._inner.ServerReflectionInfo(requests, context):
            yield answer
