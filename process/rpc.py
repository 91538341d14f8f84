"""gRPC between processes: channels to peers, and errors to status codes and back.

The only module that knows status codes. A servicer wraps its methods in `unary` or `streaming`; a
client converts what it catches with `error_from_rpc`. Everything in between raises and catches
`process.rpc_errors`. Which field is wrong and when to retry travel in the details of a
`google.rpc.Status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Iterable,
)
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc._cython import cygrpc
from grpc_status import rpc_status

from process import logs, rpc_errors
from process.authorization import PeerRole
from process.tls import TlsIdentity

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Reply = TypeVar("Reply")

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest gRPC message between processes of a cluster; the router's client port has a smaller bound
of its own."""

MAX_METADATA_BYTES = 16 * 1024
"""Most bytes of a call's headers; gRPC refuses more with RESOURCE_EXHAUSTED."""

METADATA_OPTIONS = (
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
)
"""Channel arguments of gRPC that bound a call's headers."""

CallOver: type[Exception] = cygrpc.ExecuteBatchError
"""The exception of a write on a call that is over, or that can send nothing after a write that
hangs."""

ABORT_S = 5.0
"""Time limit for a status to go out. If the client has stopped reading, the status waits behind
what it did not read: then the call ends without one."""

UNREADABLE = object()
"""Stands for a request that cannot be parsed, where a handler expects a request
(process.grpc_server)."""

_MAX_RETRY_AFTER_S = 3600.0
"""Longest pause that a process of ours asks for; a longer one is a damaged message's."""

_DETAILS_KEY = "grpc-status-details-bin"

# Most specific first: the first that matches decides.
_CODES: tuple[tuple[type[BaseException], grpc.StatusCode], ...] = (
    (rpc_errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (rpc_errors.Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (rpc_errors.PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (rpc_errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (rpc_errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (rpc_errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (rpc_errors.NoCapacity, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (rpc_errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (rpc_errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (rpc_errors.Cancelled, grpc.StatusCode.CANCELLED),
)

_ERRORS: dict[grpc.StatusCode, type[rpc_errors.BatonError]] = {
    grpc.StatusCode.UNAUTHENTICATED: rpc_errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: rpc_errors.PermissionDenied,
    grpc.StatusCode.NOT_FOUND: rpc_errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: rpc_errors.AlreadyExists,
    grpc.StatusCode.FAILED_PRECONDITION: rpc_errors.FailedPrecondition,
    grpc.StatusCode.RESOURCE_EXHAUSTED: rpc_errors.NoCapacity,
    grpc.StatusCode.UNAVAILABLE: rpc_errors.Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: rpc_errors.DeadlineExceeded,
    grpc.StatusCode.CANCELLED: rpc_errors.Cancelled,
}


def status_of(error: BaseException) -> tuple[grpc.StatusCode, str]:
    """The gRPC status and message that a client sees for an error. An error that was not expected
    is INTERNAL and does not leak its text."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error)
    if isinstance(error, rpc_errors.BatonError):
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
) -> rpc_errors.BatonError:
    """The BatonError for a google.rpc.Code number that a message carries as a field."""
    for code in grpc.StatusCode:
        if code_number(code) == number:
            return _error(code, message, retry_after_s, field=None)
    return rpc_errors.Internal(f"unknown status {number}: {message}")


def error_from_rpc(error: grpc.aio.AioRpcError) -> rpc_errors.BatonError:
    """The BatonError of a failed call: the one that the server raised, as far as status and
    trailing metadata name it, or that of the failed connection."""
    field, retry_after_s = _read_details(error.trailing_metadata() or ())
    return _error(error.code(), error.details() or "", retry_after_s, field)


def _error(
    code: grpc.StatusCode, message: str, retry_after_s: float | None, field: str | None
) -> rpc_errors.BatonError:
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        name, _, problem = message.partition(": ")
        return rpc_errors.InvalidArgument(
            field or name, problem if field in (None, name) else message
        )
    kind = _ERRORS.get(code)
    if kind is None:
        return rpc_errors.Internal(f"{code.name}: {message}")
    return kind(message, retry_after_s=retry_after_s)


def _status(error: BaseException) -> status_pb2.Status:
    """The code and message of `error`, with the wrong field and the retry time as details."""
    code, message = status_of(error)
    details = []
    if isinstance(error, rpc_errors.InvalidArgument):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=str(error)
        )
        details.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
    if isinstance(error, rpc_errors.BatonError) and error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=code_number(code), message=message, details=details)


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed


def _read_details(trailers: Iterable[tuple[str, Any]]) -> tuple[str | None, float | None]:
    """The wrong field and the retry time in a call's trailing metadata. Details that cannot be
    parsed or are out of range are ignored: the status itself says what is wrong."""
    field: str | None = None
    retry_after_s: float | None = None
    bad_request, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    packed = next((value for key, value in trailers if key == _DETAILS_KEY), b"")
    with contextlib.suppress(DecodeError):
        for detail in status_pb2.Status.FromString(packed).details:
            if detail.Unpack(bad_request) and bad_request.field_violations:
                field = bad_request.field_violations[0].field
            elif detail.Unpack(retry):
                delay_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
                retry_after_s = delay_s if 0 <= delay_s <= _MAX_RETRY_AFTER_S else None
    return field, retry_after_s


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: BaseException) -> NoReturn:
    """End the RPC with the status of `error`: code, message, and details (the wrong field, when to
    retry)."""
    code, message = status_of(error)
    if code is grpc.StatusCode.INTERNAL:
        logs.event(logger, "rpc_failed", level=logging.ERROR, exc_info=True, message=message)
    try:
        async with asyncio.timeout(ABORT_S):
            await context.abort_with_status(rpc_status.to_status(_status(error)))
    except (TimeoutError, CallOver):
        # gRPC takes this for a cancelled call: it forgets the call and resets the client's stream.
        raise asyncio.CancelledError from None
    raise AssertionError("abort_with_status returned")


async def write_first(context: grpc.aio.ServicerContext[Any, Any], message: Any) -> None:
    """Write the first message of an answer, which takes the call's headers along. A cancel waits
    for it: gRPC (1.85) cannot send a status while headers are on their way, and its client would
    wait until its own deadline."""
    writing = asyncio.ensure_future(context.write(message))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing], timeout=ABORT_S)
        if not writing.cancel() and not writing.cancelled():
            writing.exception()  # retrieved; the cancel below is what counts
        raise


Unary = Callable[[Any, Request, grpc.aio.ServicerContext[Any, Any]], Awaitable[Reply]]
Streaming = Callable[
    [Any, Request, grpc.aio.ServicerContext[Any, Any]], AsyncGenerator[Reply, None]
]


def unary(handler: Unary[Request, Reply]) -> Unary[Request, Reply]:
    """Wrap a servicer's unary method: what it raises becomes a status."""

    @functools.wraps(handler)
    async def wrapped(
        self: Any, request: Request, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Reply:
        try:
            _check_readable(request)
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
    ) -> AsyncGenerator[Reply, None]:
        try:
            _check_readable(request)
            # A caller that leaves closes what the handler holds now, not when it is collected.
            async with contextlib.aclosing(handler(self, request, context)) as replies:
                async for reply in replies:
                    yield reply
        except (asyncio.CancelledError, GeneratorExit, grpc.aio.AbortError):
            raise
        except Exception as error:
            await abort(context, error)

    return wrapped


def unreadable() -> rpc_errors.InvalidArgument:
    """The InvalidArgument for a request that cannot be parsed."""
    return rpc_errors.InvalidArgument("request", "cannot be read")


def _check_readable(request: object) -> None:
    if request is UNREADABLE:
        raise unreadable()


def channel(
    address: str,
    *,
    identity: TlsIdentity | None = None,
    server_name: str = "",
) -> grpc.aio.Channel:
    """Open a gRPC channel on a connection of its own (channels to one address do not share a broken
    one), with keepalive.

    Args: identity: over TLS, as this one. server_name: that the server's certificate must have;
        empty: the address's host.
    """
    options: list[tuple[str, str | int]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        *METADATA_OPTIONS,
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
    """Opens channels to this process's peers, with its own certificate, and expecting the peer's
    role in the peer's."""

    def __init__(self, identity: TlsIdentity | None = None) -> None:
        """Args: identity: this process's certificate; None: without TLS."""
        self._identity = identity

    @property
    def num_reloads(self) -> int:
        """The number of times that this process's certificate has changed: channels made before
        have the old one."""
        return self._identity.num_reloads if self._identity is not None else 0

    def __call__(self, address: str, role: PeerRole) -> grpc.aio.Channel:
        """A channel to the process of that role at `address`; over TLS any other is refused."""
        return channel(address, identity=self._identity, server_name=role.server_name)


PLAIN = Dialer()
"""Opens channels without TLS."""
