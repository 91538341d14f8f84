"""The gRPC server of a process: which calls it takes, before and after their message is read, and
the standard services health and reflection.

What it adds to gRPC's asyncio server (1.85):

- No malformed request ends it. gRPC decodes the path of a call of an unregistered method as UTF-8
  in its main loop: one such call whose path is not UTF-8 ends that loop, and with it the server. So
  calls of methods that are not registered are answered with UNIMPLEMENTED before, their path not
  decoded. A message that cannot be parsed becomes InvalidArgument.
- A `CallGate` authenticates a call and reserves memory before its message is read, in front of
  every method, also one that a servicer adds later. gRPC reads a unary request whole before any
  handler runs, a streamed one only as its handler asks. On the wire both are the same, so a unary
  method is registered as one that streams, of which one message is read. Until then a call costs
  the bytes that HTTP/2 lets its client send ahead.

It uses names of gRPC that are not public: pyproject.toml bounds grpcio to the minor version that
they were read in, and tests/unit/process/test_grpc_server.py lists them. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc
from grpc.aio import _server
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection, reflection_pb2  # type: ignore[import-untyped]

from process import authorization, logs, rpc, rpc_errors
from process.authorization import Rules
from process.memory_budget import MemoryBudget, MemoryGrant
from process.settings import UNIX
from process.tls import TlsIdentity

logger = logging.getLogger(__name__)

MAX_CONCURRENT_CALLS = 4096
"""Most calls at once on one connection; more wait at their client."""

HANDSHAKE_S = 10.0
"""Time limit of the TLS handshake of a client's connection, over gRPC as over HTTP."""

HEALTH = "grpc.health.v1.Health"
REFLECTIONS = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")

_WATCH_S = 0.5
"""Time between two checks of a health watch."""
_MAX_REFUSALS = 256
"""Calls of unregistered methods that are answered at the same time."""
_REFUSE_S = 5.0
"""Time limit for such an answer to go out."""

Context = grpc.aio.ServicerContext[Any, Any]

Authenticate = Callable[[str, Context], str]
"""A function of a method's path and its call. Returns: the call's owner. Raises: Unauthenticated,
PermissionDenied."""


@dataclass(frozen=True)
class PublicPortLimits:
    """Bounds of a gRPC port that clients may call, not only this cluster's own processes. None, or
    0: no bound."""

    authenticate: Authenticate | None = None
    """Authenticates a call before its message is read."""
    memory_budget: MemoryBudget | None = None
    """Budget of the memory that messages take."""
    read_s: float = 60.0
    """Time limit for a message to arrive."""
    max_connections: int = 0
    """Most connections at the same time; one more is closed at once."""
    idle_s: float = 0.0
    """Time without calls after which a connection is closed."""
    handshake_s: float = HANDSHAKE_S
    """Time limit of a connection's TLS handshake; until then it counts as a connection."""

    @property
    def options(self) -> list[tuple[str, int]]:
        """The bounds as channel arguments of gRPC."""
        found = [("grpc.server_handshake_timeout_ms", round(self.handshake_s * 1000))]
        if self.max_connections:
            found.append(("grpc.max_allowed_incoming_connections", self.max_connections))
        if self.idle_s:
            found.append(("grpc.max_connection_idle_ms", round(self.idle_s * 1000)))
        return found


async def listen(
    listen_address: str,
    add_services: Iterable[Callable[[grpc.aio.Server], None]],
    *,
    max_message_bytes: int = rpc.MAX_MESSAGE_BYTES,
    max_reply_bytes: int | None = None,
    identity: TlsIdentity | None = None,
    rules: Rules | None = None,
    limits: PublicPortLimits | None = None,
) -> tuple[grpc.aio.Server, str]:
    """Start a gRPC server on `host:port` (port 0: a free one), or on `unix:/path`, which only this
    user may connect to. A socket file that an earlier process left there is replaced.

    Args: max_reply_bytes: None: as `max_message_bytes`. identity: for TLS; None: in the clear.
        rules: roles that may call a method, where `identity` asks clients for certificates. limits:
        of a port that clients may call.
    Returns: the started server (its owner stops it) and the address it listens on.
    Raises: Unavailable naming the address when it is taken or not ours.
    """
    server = make(
        [
            # Without this a second process shares the port in silence.
            ("grpc.so_reuseport", 0),
            ("grpc.max_send_message_length", max_reply_bytes or max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            *rpc.METADATA_OPTIONS,
            ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            *(limits.options if limits is not None else ()),
        ],
        _call_gate(
            rules if identity is not None and identity.asks_clients else None,
            limits,
            max_message_bytes,
        ),
    )
    for add in add_services:
        add(server)
    try:
        if identity is None:
            port = server.add_insecure_port(listen_address)
        else:
            port = server.add_secure_port(listen_address, identity.server_credentials())
        if listen_address.startswith(UNIX):
            Path(listen_address.removeprefix(UNIX)).chmod(0o600)  # before the first call is taken
    except (RuntimeError, OSError) as error:
        raise rpc_errors.Unavailable(
            f"cannot listen on {listen_address}: the port is taken, the address is not this "
            "machine's, or the folder cannot be written; choose another"
        ) from error
    await server.start()
    if listen_address.startswith(UNIX):
        return server, listen_address
    return server, f"{listen_address.rsplit(':', 1)[0]}:{port}"


def _call_gate(
    rules: Rules | None, limits: PublicPortLimits | None, max_bytes: int
) -> CallGate | None:
    """Checks the role, then the key, before a message is read. None: any caller may call
    anything."""
    if rules is None and limits is None:
        return None
    bounds = limits or PublicPortLimits()

    async def guard(method: str, context: Context) -> str:
        if rules is not None:
            await _check_role(rules, method, context)
        if bounds.authenticate is None:
            return ""
        try:
            return bounds.authenticate(method, context)
        except rpc_errors.BatonError as error:
            await rpc.abort(context, error)

    return CallGate(guard, bounds.memory_budget, max_bytes, bounds.read_s)


async def _check_role(rules: Rules, method: str, context: Context) -> None:
    uris = context.auth_context().get("peer_uri", ())
    roles = authorization.roles_of(uri.decode(errors="replace") for uri in uris)
    problem = authorization.refusal(rules, method, roles)
    if problem:
        logs.event(
            logger,
            "call_refused",
            level=logging.WARNING,
            method=method,
            role=authorization.names_of(roles),
            peer=context.peer(),
        )
        await rpc.abort(context, rpc_errors.PermissionDenied(problem))


Guard = Callable[[str, Any], Awaitable[str]]
"""A function of a method's path and the call's context, called before the call is handled. Aborts
the call, or returns its owner."""

_KINDS = {
    "unary_unary": "stream_unary",
    "unary_stream": "stream_stream",
    "stream_unary": "stream_unary",
    "stream_stream": "stream_stream",
}


@dataclass(frozen=True)
class CallGate:
    """Authenticates each call of one server and reserves memory before the call's message is
    read."""

    guard: Guard
    memory_budget: MemoryBudget | None = None
    """Budget of the memory that messages take; None: without bound."""
    max_bytes: int = 0
    """Most bytes that one message may have, where there is a memory budget."""
    read_s: float = 60.0
    """Time limit for a message to arrive; less where other calls wait for its memory
    (`process.memory_budget`)."""

    def handler(self, handler: Any, path: str) -> Any:
        """Wrap a method's handler so that each of its calls passes this gate first."""
        (kind,) = [kind for kind in _KINDS if getattr(handler, kind) is not None]
        behaviour = getattr(handler, kind)
        is_one = not handler.request_streaming
        if inspect.isasyncgenfunction(behaviour):

            async def streaming(requests: Any, context: Any) -> AsyncIterator[Any]:
                async with self._asked(path, requests, context, is_one) as asked:
                    async for reply in behaviour(asked, context):
                        yield reply

            passed: Any = streaming
        else:

            async def unary(requests: Any, context: Any) -> Any:
                async with self._asked(path, requests, context, is_one) as asked:
                    if not inspect.iscoroutinefunction(behaviour):  # generated: not implemented
                        await context.abort(
                            grpc.StatusCode.UNIMPLEMENTED, f"{path} is not served here"
                        )
                    return await behaviour(asked, context)

            passed = unary
        changes = {kind: None, _KINDS[kind]: passed, "request_streaming": True}
        return handler._replace(**changes)

    @asynccontextmanager
    async def _asked(
        self, path: str, requests: Any, context: Any, is_one: bool
    ) -> AsyncIterator[Any]:
        """The request that the handler is called with."""
        owner = await self.guard(path, context)
        if not is_one:
            yield requests
        elif self.memory_budget is None:
            try:
                request = await self._read(context, nullcontext())
            except rpc_errors.BatonError as error:
                await rpc.abort(context, error)
            yield request
        else:
            grant = self.memory_budget.grant(owner, self.max_bytes)
            try:
                request = await self._read_within(context, grant)
            except rpc_errors.BatonError as error:
                # The memory is released already: a client that does not read delays its refusal.
                await rpc.abort(context, error)
            try:
                yield request
            finally:
                grant.release()

    async def _read_within(self, context: Any, grant: MemoryGrant) -> Any:
        """Read a message within a grant of memory, as `_read`; the grant is held where this
        returns, and only there. Raises: NoCapacity."""
        await grant.take()
        try:
            request = await self._read(context, grant.reading())
            # One that is written otherwise may come out longer than it was sent.
            grant.shrink(min(_num_bytes(request), grant.num_bytes))
        except BaseException:
            grant.release()
            raise
        return request

    async def _read(self, context: Any, reading: AbstractAsyncContextManager[None]) -> Any:
        """The one message. Raises: DeadlineExceeded; InvalidArgument; whatever `reading` does."""
        try:
            async with asyncio.timeout(self.read_s), reading:
                request = await context.read()
        except TimeoutError:
            problem = f"the request did not arrive within {self.read_s:g} s"
            raise rpc_errors.DeadlineExceeded(problem) from None
        if request is grpc.aio.EOF:
            raise rpc_errors.InvalidArgument("request", "there is none")
        return request


def _num_bytes(request: Any) -> int:
    if isinstance(request, bytes):
        return len(request)
    return request.ByteSize() if hasattr(request, "ByteSize") else 0


def _reading_one(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """gRPC ends a call here with a status of its own: so the handler raises instead."""

    def tolerant(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError:
            return rpc.UNREADABLE

    return tolerant


def _reading_many(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def telling(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            raise rpc.unreadable() from error

    return telling


class _Core(cygrpc.AioServer):  # type: ignore[misc]
    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any) -> None:
        super().__init__(loop, *args)
        self._serving_loop = loop
        self._no_methods = cygrpc._MethodResolver([], {})  # noqa: SLF001
        self._refusing: set[asyncio.Task[None]] = set()

    async def _request_call(self) -> Any:
        """The next call of an unregistered method, for gRPC's main loop: it gets none."""
        while True:
            call = await super()._request_call()
            if len(self._refusing) < _MAX_REFUSALS:
                task = self._serving_loop.create_task(self._refuse(call))
                self._refusing.add(task)
                task.add_done_callback(self._refusing.discard)
            # Beyond that many, dropping the call cancels it.

    async def _refuse(self, call: Any) -> None:
        """Answer UNIMPLEMENTED, as gRPC does for a method that it does not find."""
        # The client has gone or does not read, or its headers are no text: dropping the call
        # cancels it.
        with contextlib.suppress(TimeoutError, rpc.CallOver, UnicodeDecodeError):
            async with asyncio.timeout(_REFUSE_S):
                await cygrpc._handle_rpc(  # noqa: SLF001
                    "", self._no_methods, (), call, self._serving_loop, False
                )


class _Server(_server.Server):
    def __init__(self, options: Sequence[tuple[str, Any]], gate: CallGate | None) -> None:
        self._gate = gate
        self._loop = cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), None, tuple(options), None)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, Any]
    ) -> None:
        """Each handler with our deserializer around its own, and the gate before it."""
        readers = {True: _reading_many, False: _reading_one}
        tolerant = {
            name: handler._replace(
                request_deserializer=readers[handler.request_streaming](
                    handler.request_deserializer
                )
            )
            if handler.request_deserializer is not None  # else it takes bytes and reads them itself
            else handler
            for name, handler in method_handlers.items()
        }
        if self._gate is not None:
            tolerant = {
                name: self._gate.handler(handler, f"/{service_name}/{name}")
                for name, handler in tolerant.items()
            }
        super().add_registered_method_handlers(service_name, tolerant)


def make(options: Sequence[tuple[str, Any]], gate: CallGate | None = None) -> grpc.aio.Server:
    """Make a gRPC server of registered methods, as the generated `add_..._to_server` register them.

    Raises: RuntimeError when this gRPC keeps no registered methods apart: they would be dropped.
    """
    if not hasattr(cygrpc.AioServer, "_request_registered_call"):
        raise RuntimeError("this grpcio is too old: install 1.85")
    return cast(grpc.aio.Server, _Server(options, gate))


_HealthStatus: Any = health_pb2.HealthCheckResponse

Checks = Mapping[str, Callable[[], bool]]
"""Health checks, by service name: each says whether the service can serve now."""


class HealthServicer:
    """The standard service grpc.health.v1.Health: the empty name stands for the process itself, any
    other for a service."""

    def __init__(self, checks: Checks) -> None:
        self._checks: Checks = {"": lambda: True, **checks}

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service's methods with a server."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.unary_unary_rpc_method_handler(
                self.check,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=_HealthStatus.SerializeToString,
            ),
            "List": grpc.unary_unary_rpc_method_handler(
                self.list,
                request_deserializer=health_pb2.HealthListRequest.FromString,
                response_serializer=health_pb2.HealthListResponse.SerializeToString,
            ),
            "Watch": grpc.unary_stream_rpc_method_handler(
                self.watch,
                request_deserializer=health_pb2.HealthCheckRequest.FromString,
                response_serializer=_HealthStatus.SerializeToString,
            ),
        }
        server.add_registered_method_handlers(HEALTH, handlers)

    @rpc.unary
    async def check(self, request: Any, context: Context) -> Any:
        """Answer Check: whether one service can serve now."""
        if request.service not in self._checks:
            raise rpc_errors.NotFound(f"service: '{request.service[:128]}' is not served here")
        return self._status(request.service)

    @rpc.unary
    async def list(self, request: Any, context: Context) -> Any:
        """Answer List: whether each service can serve now."""
        return health_pb2.HealthListResponse(
            statuses={name: self._status(name) for name in self._checks}
        )

    @rpc.unary
    async def watch(self, request: Any, context: Context) -> None:
        """Answer Watch: whether one service can serve now, and again after each change, until the
        client leaves."""
        last = None
        while True:
            status = self._status(request.service)
            if status.status != last:
                last = status.status
                await context.write(status)
            await asyncio.sleep(_WATCH_S)

    def _status(self, service: str) -> Any:
        check = self._checks.get(service)
        if check is None:
            return _HealthStatus(status=_HealthStatus.SERVICE_UNKNOWN)
        return _HealthStatus(status=_HealthStatus.SERVING if check() else _HealthStatus.NOT_SERVING)


class ReflectionServicer:
    """The standard service of server reflection, under both names that clients try (the messages
    are the same)."""

    def __init__(self, services: tuple[str, ...]) -> None:
        """Args: services: full names of the services; health and reflection are added."""
        self._inner: Any = reflection.aio.ReflectionServicer((*services, HEALTH, *REFLECTIONS))

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service's method with a server, under both names."""
        handler: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            self.info,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
        for name in REFLECTIONS:
            server.add_registered_method_handlers(name, {"ServerReflectionInfo": handler})

    @rpc.streaming
    async def info(
        self, requests: AsyncIterator[Any], context: Context
    ) -> AsyncGenerator[Any, None]:
        """Answer ServerReflectionInfo: one answer for each question of the stream."""
        async for answer in self._inner.ServerReflectionInfo(requests, context):
            yield answer
