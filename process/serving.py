"""gRPC at a process's border: a server with a clean end, channels, and errors to status codes and
back.

This is the only module that knows status codes. A servicer wraps its methods in `unary` or
`streaming`; a client turns what it catches with `error_from_rpc`. Everything in between speaks
`process.errors`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from grpc_status import rpc_status

from process import access, error_details, errors, grpc_server, logs
from process.access import Role, Rules
from process.intake import Intake
from process.late_reading import Door
from process.settings import UNIX
from process.tls import Identity

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Reply = TypeVar("Reply")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Between our own processes; the router's client port has a smaller bound of its own."""

MAX_METADATA_BYTES = 16 * 1024
"""Of a call's headers; gRPC refuses more with RESOURCE_EXHAUSTED."""

MAX_CONCURRENT_CALLS = 4096
"""On one connection; more wait at their client."""

_METADATA_BOUNDS = (
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)

CallOver = grpc_server.ExecuteBatchError
"""What a write raises on a call that is over."""

HANDSHAKE_S = 10.0
"""For the TLS handshake of a client's connection, over gRPC as over HTTP."""

ABORT_S = 5.0
"""For a status to go out. One whose client has stopped reading waits behind what it did not read:
that call is given up without."""

# Most specific first: the first that matches decides.
_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.NoCapacity, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled, grpc.StatusCode.CANCELLED),
)

_ERRORS: dict[grpc.StatusCode, type[errors.BatonError]] = {
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: errors.FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.NoCapacity,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: errors.Cancelled,
}


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The status a client sees. What we did not expect is INTERNAL and does not leak its text."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error)
    if isinstance(error, errors.BatonError):
        return grpc.StatusCode.INTERNAL, str(error)
    return (
        grpc.StatusCode.INTERNAL,
        f"internal error ({type(error).__name__}); see the server's log",
    )


def code_number(code: grpc.StatusCode) -> int:
    """The google.rpc.Code number of a status, for messages that carry it as a field."""
    return int(code.value[0])


def error_of_code(
    number: int, message: str, retry_after_s: float | None = None
) -> errors.BatonError:
    """The error behind a code that travelled as a field."""
    for code in grpc.StatusCode:
        if code_number(code) == number:
            return _error(code, message, retry_after_s, field=None)
    return errors.Internal(f"unknown status {number}: {message}")


def error_from_rpc(error: grpc.aio.AioRpcError) -> errors.BatonError:
    """The error that the server raised, or what the failed connection means."""
    field, retry_after_s = error_details.read(error.trailing_metadata() or ())
    return _error(error.code(), error.details() or "", retry_after_s, field)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the RPC with the status of `error`: code, message, and details (the wrong field, when to
    retry)."""
    code, message = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        logs.event(logger, "rpc_failed", level=logging.ERROR, exc_info=True, message=message)
    status = error_details.status(code_number(code), message, error)
    try:
        async with asyncio.timeout(ABORT_S):
            await context.abort_with_status(rpc_status.to_status(status))
    except (TimeoutError, CallOver):
        # What gRPC takes for a call that is over: it forgets it, and tells the client so.
        raise asyncio.CancelledError from None
    raise AssertionError("abort_with_status returned")


async def write_first(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    """Write an answer's first message, which takes the call's headers along. A cancel waits for it:
    gRPC (1.85) cannot send a status while headers are on their way, and its client would wait until
    its own deadline."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing], timeout=ABORT_S)
        if not writing.cancel() and not writing.cancelled():
            writing.exception()  # seen: whoever cancelled has a reason of his own
        raise


Unary = Callable[[Any, Request, grpc.aio.ServicerContext[Any, Any]], Awaitable[Reply]]
Streaming = Callable[[Any, Request, grpc.aio.ServicerContext[Any, Any]], AsyncIterator[Reply]]


def unary(handler: Unary[Request, Reply]) -> Unary[Request, Reply]:
    """Wrap a servicer's unary method: what it raises becomes a status."""

    @functools.wraps(handler)
    async def wrapped(
        self: Any, request: Request, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Reply:
        try:
            grpc_server.check_readable(request)
            return await handler(self, request, context)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await abort(context, error)

    return wrapped


def streaming(handler: Streaming[Request, Reply]) -> Streaming[Request, Reply]:
    """Wrap a servicer's streaming method (an async generator): what it raises becomes a status."""

    @functools.wraps(handler)
    async def wrapped(
        self: Any, request: Request, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Reply]:
        try:
            grpc_server.check_readable(request)
            async for reply in handler(self, request, context):
                yield reply
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            await abort(context, error)

    return wrapped


def channel(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    identity: Identity | None = None,
    server_name: str = "",
) -> grpc.aio.Channel:
    """A channel of its own connection (channels to one address do not share a broken one), with
    keepalive.

    Args: identity: over TLS, as this one. server_name: that the server's certificate must have;
        empty: the address's host.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        *_METADATA_BOUNDS,
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 5_000),
        ("grpc.http2.max_pings_without_data", 0),
        # A peer that restarts is met again within a second instead of gRPC's default of up to
        # two minutes.
        ("grpc.initial_reconnect_backoff_ms", 100),
        # This one is the least time that a handshake gets: a busy peer takes its while, and a
        # call would fail for it. One that is away refuses at once.
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]
    if identity is None:
        return grpc.aio.insecure_channel(address, options=options)
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return grpc.aio.secure_channel(address, identity.channel_credentials(), options=options)


class Dialer:
    """How this process opens channels to its peers: as whom, and expecting whom."""

    def __init__(self, identity: Identity | None = None) -> None:
        """None: in the clear."""
        self._identity = identity

    @property
    def num_reloads(self) -> int:
        """How often our certificate has changed: channels made before have the old one."""
        return self._identity.num_reloads if self._identity is not None else 0

    def __call__(self, address: str, role: Role) -> grpc.aio.Channel:
        """A channel to the process of that role at `address`; over TLS any other is refused."""
        return channel(address, identity=self._identity, server_name=role.server_name)


PLAIN = Dialer()
"""In the clear."""

Authenticate = Callable[[str, grpc.aio.ServicerContext[Any, Any]], str]
"""Told a method's path and its call: whose it is. Raises: Unauthenticated, PermissionDenied."""


@dataclass(frozen=True)
class Strangers:
    """Bounds of a port that is open to others than our own processes. None, or 0: no bound."""

    authenticate: Authenticate | None = None
    """Asked before a call's message is read."""
    intake: Intake | None = None
    """Room for messages."""
    read_s: float = 60.0
    """For a message to arrive."""
    max_connections: int = 0
    """At the same time; the next one is closed at once."""
    idle_s: float = 0.0
    """A connection without calls is closed after so long."""
    handshake_s: float = HANDSHAKE_S
    """A connection whose TLS handshake takes longer is closed; it counts as one until then."""

    @property
    def options(self) -> list[tuple[str, int]]:
        """As gRPC has them."""
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
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    max_reply_bytes: int | None = None,
    identity: Identity | None = None,
    rules: Rules | None = None,
    strangers: Strangers | None = None,
) -> tuple[grpc.aio.Server, str]:
    """Start a server on `host:port` (port 0: a free one), or on `unix:/path`, which only this user
    may connect to. A socket file that an earlier process left there is replaced.

    Args: max_reply_bytes: None: as `max_message_bytes`. identity: over TLS, as this one. rules: who
        may call what, by the certificates that such an identity asks for; looked at with each call.
        strangers: bounds, where others than our own processes call.
    Returns: the started server (its owner stops it) and the address it listens on.
    Raises: Unavailable naming the address when it is taken or not ours.
    """
    server = grpc_server.make(
        [
            # Without this a second process shares the port in silence.
            ("grpc.so_reuseport", 0),
            ("grpc.max_send_message_length", max_reply_bytes or max_message_bytes),
            ("grpc.max_receive_message_length", max_message_bytes),
            *_METADATA_BOUNDS,
            ("grpc.max_concurrent_streams", MAX_CONCURRENT_CALLS),
            ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
            ("grpc.keepalive_permit_without_calls", 1),
            *(strangers.options if strangers is not None else ()),
        ],
        _door(
            rules if identity is not None and identity.asks_clients else None,
            strangers,
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
        raise errors.Unavailable(
            f"cannot listen on {listen_address}: the port is taken, the address is not this "
            "machine's, or the folder cannot be written; choose another"
        ) from error
    await server.start()
    if listen_address.startswith(UNIX):
        return server, listen_address
    return server, f"{listen_address.rsplit(':', 1)[0]}:{port}"


def _door(rules: Rules | None, strangers: Strangers | None, max_bytes: int) -> Door | None:
    """Role before key, and both before a message is read. None: anybody may call anything."""
    if rules is None and strangers is None:
        return None
    bounds = strangers or Strangers()

    async def guard(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> str:
        if rules is not None:
            await _check_role(rules, method, context)
        if bounds.authenticate is None:
            return ""
        try:
            return bounds.authenticate(method, context)
        except errors.BatonError as error:
            await abort(context, error)

    return Door(guard, abort, bounds.intake, max_bytes, bounds.read_s)


async def _check_role(
    rules: Rules, method: str, context: grpc.aio.ServicerContext[Any, Any]
) -> None:
    uris = context.auth_context().get("peer_uri", ())
    roles = access.roles_of(uri.decode(errors="replace") for uri in uris)
    problem = access.refusal(rules, method, roles)
    if problem:
        logs.event(
            logger,
            "call_refused",
            level=logging.WARNING,
            method=method,
            role=access.names_of(roles),
            peer=context.peer(),
        )
        await abort(context, errors.PermissionDenied(problem))


def _error(
    code: grpc.StatusCode, message: str, retry_after_s: float | None, field: str | None
) -> errors.BatonError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        name, _, problem = message.partition(": ")
        return errors.InvalidArgument(field or name, problem if field in (None, name) else message)
    kind = _ERRORS.get(code)
    if kind is None:
        return errors.Internal(f"{code.name}: {message}")
    return kind(message, retry_after_s=retry_after_s)
