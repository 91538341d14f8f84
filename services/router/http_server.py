"""HttpServer: the aiohttp server of the router's HTTP port. It bounds connections, answers errors
in one form, and knows no route of its own. One asyncio loop.

Connections (`HttpConnections`): a connection counts from its accept, through the TLS handshake, to
its end. A connection beyond the limit is closed at once, after a 503 on a plain port; over TLS
without one, since a 503 would cost a handshake. A handshake that takes longer than `handshake_s`
ends its connection. A connection whose client reads nothing of the waiting bytes for `stall_s` is
aborted. aiohttp closes idle connections and bounds headers and bodies in bytes.

Half-closed connections (`HalfOpen`, not over TLS): a client that disconnects cancels its handler; a
client that only shuts down its sending side still gets its answer. On the wire the two look the
same until the server writes. So the server writes bytes that a client ignores (an interim response,
or a comment within an event stream). If the connection is reset after that, it is aborted, and the
handler is cancelled.

Access checks, which app.py adds as needed:
- `add_origin_check`: which web pages may use a port that needs no API key. Such a port listens on
  loopback, and every page in a browser on this machine can reach it, also a page of a foreign name
  that resolves to 127.0.0.1 (DNS rebinding). A browser names the page in `Origin`; other clients
  send none.
- `Cors`: preflight answers and response headers for the origins in `cors_origins`, for the paths of
  the API only. API keys are checked elsewhere.
- `add_role_check`: which client certificates may use the port. Clients and admins may; the paths
  that show the whole cluster are for admins. A worker's or a store's certificate is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from aiohttp import web
from aiohttp.http import HttpProcessingError, HttpVersion11
from aiohttp.typedefs import Middleware
from prometheus_client.metrics_core import Metric

from process import logs
from process.authorization import PeerRole, names_of, roles_of
from process.background_tasks import end_tasks, start_task
from process.grpc_server import HANDSHAKE_S
from process.metrics import Labels, counter
from process.rpc_errors import NoCapacity, PermissionDenied, Unavailable
from process.settings import split_host_port
from process.tls import uris_of
from services.router.http_errors import HttpError, http_error_of, http_error_of_status

_GRACE_S = 0.5
"""Seconds that an answer may take to begin before its half-closed client gets ignorable bytes.
Guessed: most whole answers are ready by then, and a worker computes only this long for a client
that disconnected.
"""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 1.0
"""Seconds between two checks whether the connection was reset: each pause is twice as long as the
one before, up to the second value.
"""
_TURNS = 8
"""Iterations of the loop within which a received request reaches its handler: aiohttp takes three.
"""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"2\r\n:\n\r\n"
"""A chunk with an SSE comment. Each write of an event stream is one whole chunk of whole events."""


class HalfOpen(asyncio.Protocol):
    """Protocol of one connection, wrapped around aiohttp's. It keeps a half-closed connection open
    while an answer is owed.

    `serving` marks the request that a handler works on. `response` is its answer, once that has
    begun.
    """

    def __init__(self, inner: asyncio.Protocol) -> None:
        self.is_half_closed = False
        self.response: web.StreamResponse | None = None
        self._inner = inner
        self._request: web.BaseRequest | None = None
        self._transport: asyncio.Transport | None = None
        self._next: asyncio.Handle | None = None

    @contextmanager
    def serving(self, request: web.BaseRequest) -> Iterator[None]:
        """Mark `request` as being served while the body runs."""
        self._request, self.response = request, None
        try:
            yield
        finally:
            self._request = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has no such base
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._next is not None:
            self._next.cancel()
        self._inner.connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def eof_received(self) -> bool:
        """Note that the client sends no more. Returns: True, which keeps the connection open."""
        self._inner.eof_received()
        self.is_half_closed = True
        self._find_request(_TURNS)
        return True

    def _find_request(self, num_turns: int) -> None:
        """Close the connection unless an answer is owed. `num_turns`: iterations of the loop to
        wait for a request that has arrived but is not at its handler yet.
        """
        loop, transport, request = asyncio.get_running_loop(), self._transport, self._request
        if transport is None or transport.is_closing():
            return
        if request is None and num_turns:
            self._next = loop.call_soon(self._find_request, num_turns - 1)
        elif request is None or not request.content.is_eof():
            transport.close()  # no request, or an incomplete one
        elif self.response is not None:
            self._say_a_word()
        else:
            self._next = loop.call_later(_GRACE_S, self._say_a_word)

    def _say_a_word(self) -> None:
        transport, request, response = self._transport, self._request, self.response
        if transport is None or request is None:
            return
        if response is None and request.version >= HttpVersion11:
            transport.write(_INTERIM)
        elif response is not None and _is_event_stream(response):
            transport.write(_COMMENT)
        self._look(_FIRST_LOOK_S)

    def _look(self, pause_s: float) -> None:
        transport = self._transport
        if transport is None:
            return
        peer = transport.get_extra_info("socket")
        if peer.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            transport.abort()
            return
        later_s = min(2 * pause_s, _LAST_LOOK_S)
        self._next = asyncio.get_running_loop().call_later(pause_s, self._look, later_s)


def _is_event_stream(response: web.StreamResponse) -> bool:
    is_chunked = response.headers.get("transfer-encoding") == "chunked"
    return is_chunked and response.content_type == "text/event-stream"


def half_open_of(request: web.BaseRequest) -> HalfOpen | None:
    """Return the connection of a request. None: it is closed, or uses TLS."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, HalfOpen) else None


logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_ACCEPT_PAUSE_S = 1.0
"""Seconds to pause after a failed accept, such as one without a free file descriptor."""


@dataclass(frozen=True)
class _Look:
    """Bytes that waited for a client when its connection was checked."""

    num_bytes: int
    since_s: float
    """Loop time since which the number has not changed."""


class HttpConnections:
    """The connections of an HTTP port: accepts them, refuses those beyond `most`, and aborts those
    whose client has stopped reading. Knows connections, not requests.
    """

    def __init__(
        self,
        open_now: Callable[[], Sequence[asyncio.BaseProtocol]],
        make: Callable[[], asyncio.BaseProtocol],
        *,
        most: int,
        stall_s: float,
        handshake_s: float,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        """Create the connections; `start` accepts them.

        Args:
            open_now: returns the protocols of open connections, each with its `transport`.
            make: creates the protocol of a new connection.
            most: limit of open connections.
            stall_s: seconds for which a client may read nothing of what waits for it.
            handshake_s: limit of a TLS handshake in seconds.
            ssl_context: of the port; None: no TLS.
        """
        self.num_refused = 0
        self.num_stalled = 0
        self._open_now = open_now
        self._make = make
        self._most = most
        self._stall_s = stall_s
        self._handshake_s = handshake_s
        self._ssl_context = ssl_context
        self._listening: Sequence[socket.socket] = ()
        self._accepting: list[asyncio.Task[None]] = []
        self._beginning: dict[asyncio.BaseProtocol, asyncio.Task[None]] = {}
        """Connections that were accepted and are not served yet."""
        self._looks: dict[asyncio.BaseProtocol, _Look] = {}
        self._next_look: asyncio.TimerHandle | None = None

    def start(self, listening: Sequence[socket.socket]) -> None:
        """Start to accept connections at these non-blocking sockets, and to abort stalled ones."""
        self._listening = listening
        self._accepting = [
            start_task(self._accept(each), "http accept", is_for_many=True) for each in listening
        ]
        self._look_later()

    async def stop_accepting(self) -> None:
        """Accept no new connection, and end those in their handshake. Idempotent."""
        await end_tasks([*self._accepting, *self._beginning.values()])
        for each in self._listening:
            each.close()

    def stop(self) -> None:
        """Stop the checks for stalled connections. Idempotent."""
        if self._next_look is not None:
            self._next_look.cancel()
        self._looks.clear()

    @property
    def num_open(self) -> int:
        """Number of connections, including those in their handshake."""
        return len({*self._open_now(), *self._beginning})

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                peer, _ = await asyncio.get_running_loop().sock_accept(listening)
            except OSError as error:
                logs.event(logger, "http_not_accepted", level=logging.WARNING, why=str(error))
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            self._take(peer)

    def _take(self, peer: socket.socket) -> None:
        """Serve or refuse a connection that was just accepted."""
        is_refused = self.num_open >= self._most
        self.num_refused += is_refused
        if is_refused and self._ssl_context is not None:
            peer.close()
            return
        protocol = _Refusal() if is_refused else self._make()
        task = start_task(self._begin(peer, protocol), "http connection", is_for_many=True)
        self._beginning[protocol] = task
        task.add_done_callback(lambda _: self._beginning.pop(protocol))

    async def _begin(self, peer: socket.socket, protocol: asyncio.BaseProtocol) -> None:
        context = self._ssl_context
        served = protocol
        if context is None and isinstance(protocol, asyncio.Protocol):
            served = HalfOpen(protocol)
        # The client disconnected, or its handshake failed or took too long: the connection is
        # closed already.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: served,
                peer,
                ssl=context,
                ssl_handshake_timeout=self._handshake_s if context is not None else None,
            )

    def look(self, now_s: float) -> None:
        """Abort the connections whose client has read nothing for `stall_s`. `now_s`: loop time."""
        looks: dict[asyncio.BaseProtocol, _Look] = {}
        for protocol in self._open_now():
            transport: asyncio.Transport | None = getattr(protocol, "transport", None)
            num_bytes = transport.get_write_buffer_size() if transport is not None else 0
            if transport is None or not num_bytes:
                continue
            look = self._looks.get(protocol)
            if look is None or look.num_bytes != num_bytes:
                look = _Look(num_bytes, now_s)
            if now_s - look.since_s >= self._stall_s:
                self._give_up(transport, num_bytes)
            else:
                looks[protocol] = look
        self._looks = looks

    def _turn(self) -> None:
        self.look(asyncio.get_running_loop().time())
        self._look_later()

    def _look_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(self._stall_s / 8, self._turn)

    def _give_up(self, transport: asyncio.Transport, num_bytes: int) -> None:
        self.num_stalled += 1
        logs.event(
            logger,
            "http_reader_stalled",
            level=logging.WARNING,
            peer=str(transport.get_extra_info("peername")),
            num_bytes_waiting=num_bytes,
            stall_s=self._stall_s,
        )
        transport.abort()


class _Refusal(asyncio.Protocol):
    """Protocol of a refused connection: it writes a 503 with retry headers and closes. It reads
    nothing.
    """

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's has no such base
        error = http_error_of(
            NoCapacity("too many connections are open at this port", retry_after_s=_RETRY_S)
        )
        body = json.dumps(error.body()).encode()
        lines = [
            "HTTP/1.1 503 Service Unavailable",
            "server: baton",
            "content-type: application/json; charset=utf-8",
            f"content-length: {len(body)}",
            "connection: close",
            *(f"{name}: {value}" for name, value in error.headers().items()),
        ]
        stream.write("\r\n".join([*lines, "", ""]).encode() + body)
        # The loop sends what was written at the end of this iteration.
        asyncio.get_running_loop().call_soon(stream.close)


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def add_origin_check(app: web.Application, others: Collection[str] = ()) -> None:
    """Check the `Origin` of each request of `app` before its handler runs. `others`: origins that
    are allowed besides this machine's.
    """
    app.middlewares.append(_checked_origin(frozenset(others)))


def _checked_origin(others: frozenset[str]) -> Middleware:
    @web.middleware
    async def checked(request: web.Request, handler: Handler) -> web.StreamResponse:
        origins = request.headers.getall("origin", [])
        if not is_from_here([origin for origin in origins if origin not in others]):
            raise PermissionDenied(
                "origin: this port serves pages of this machine only; have API keys asked for "
                "(api_keys_file), name the page's origin in cors_origins, or say "
                "allow_anonymous=true where a proxy protects it"
            )
        return await handler(request)

    return checked


def is_from_here(origins: list[str]) -> bool:
    """Return whether all Origin headers of one request name pages of this machine; True where there
    are none.
    """
    try:
        return all(urlsplit(origin).hostname in LOOPBACK_NAMES for origin in origins)
    except ValueError:
        return False


ANY = "*"

_PATHS = "/v1/"
_READABLE = "x-request-id, retry-after, retry-after-ms, x-should-retry"
"""Response headers that a page may read, besides those that CORS always allows."""
_MAX_AGE_S = 600
"""Seconds for which a browser may reuse a preflight answer. Guessed: short, so that a changed
setting takes effect soon.
"""


class Cors:
    """CORS for the paths of the API: answers preflights, and names an allowed origin in the
    response headers.
    """

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: as in `RouterSettings.cors_origins`."""
        self._origins = frozenset(origins)

    def add_to(self, app: web.Application) -> None:
        """Add the preflight middleware and the response headers to `app`; nothing where there are
        no origins.
        """
        if self._origins:
            app.middlewares.append(self._preflights())
            app.on_response_prepare.append(self._allow)

    def _is_allowed(self, request: web.BaseRequest) -> bool:
        if not request.path.startswith(_PATHS):
            return False
        origin = request.headers.get("origin", "")
        return bool(origin) and (ANY in self._origins or origin in self._origins)

    def _preflights(self) -> Middleware:
        @web.middleware
        async def answered(request: web.Request, handler: Handler) -> web.StreamResponse:
            asked = request.headers
            is_preflight = "access-control-request-method" in asked
            if request.method != "OPTIONS" or not (is_preflight and self._is_allowed(request)):
                return await handler(request)
            # All request headers are allowed: clients have their own, and none grants access.
            return web.Response(
                status=204,
                headers={
                    "access-control-allow-methods": "GET, POST",
                    "access-control-allow-headers": asked.get("access-control-request-headers", ""),
                    "access-control-max-age": str(_MAX_AGE_S),
                },
            )

        return answered

    async def _allow(self, request: web.BaseRequest, response: web.StreamResponse) -> None:
        if self._is_allowed(request):
            response.headers["access-control-allow-origin"] = request.headers["origin"]
            response.headers["access-control-expose-headers"] = _READABLE
            response.headers.add("vary", "origin")


ALLOWED = frozenset({PeerRole.CLIENT, PeerRole.ADMIN})
ADMIN_PATHS = ("/live",)
"""Prefixes of the paths that show the whole cluster."""


def add_role_check(app: web.Application) -> None:
    """Check the client certificate of each request of `app` before any other middleware."""
    app.middlewares.append(_checked_role)


@web.middleware
async def _checked_role(request: web.Request, handler: Handler) -> web.StreamResponse:
    transport = request.transport
    peer = transport.get_extra_info("peercert") if transport is not None else None
    roles = roles_of(uris_of(peer))
    if not roles & ALLOWED:
        named = f"role {names_of(roles)}" if roles else "no role of Baton's (or several)"
        raise PermissionDenied(f"certificate: names {named}, which this port does not serve")
    if PeerRole.ADMIN not in roles and request.path.startswith(ADMIN_PATHS):
        named = names_of(roles)
        raise PermissionDenied(f"{request.path[:128]}: not for a certificate of role {named}")
    return await handler(request)


MAX_HEADER_BYTES = 16 * 1024
"""Limit of one header, and of the request line, in bytes."""
MAX_HEADERS = 64
_BACKLOG = 128
"""Limit of connections that wait to be accepted."""
_BEGUN = web.RequestKey("has_begun", bool)

AddRoutes = Callable[[web.Application], None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """HTTP server of one port: an aiohttp application with bounded connections and errors in
    OpenAI's envelope.
    """

    def __init__(
        self,
        add_routes: Iterable[AddRoutes],
        *,
        max_body_bytes: int,
        drain_s: float,
        max_connections: int = 4096,
        stall_s: float = 30.0,
        idle_s: float = 75.0,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """Create the application; `start` serves it.

        Args:
            add_routes: functions that add routes and checks to the application.
            max_body_bytes: limit of one body.
            drain_s: seconds for which `stop` lets requests finish.
            max_connections: limit of open connections.
            stall_s: seconds for which a client may read nothing of its answer.
            idle_s: seconds for which a connection may have no request.
            handshake_s: limit of a TLS handshake in seconds.
        """
        self.address = ""
        """host:port; empty until `start`."""
        app = web.Application(middlewares=[_guarded], client_max_size=max_body_bytes)
        app.on_response_prepare.append(_sign)
        for add in add_routes:
            add(app)
        self.routes = list(app.router.routes())
        """Routes of all paths; the OpenAPI document must name each of them."""
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            logger=_ServerLog(logger),
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            keepalive_timeout=idle_s,
            auto_decompress=False,
            # aiohttp waits this long twice: for handlers to finish, then for cancelled ones to end.
            shutdown_timeout=drain_s / 2,
        )
        self._max_connections = max_connections
        self._stall_s = stall_s
        self._handshake_s = handshake_s
        self.connections: HttpConnections | None = None
        """None until `start`."""

    async def start(self, listen: str, ssl_context: ssl.SSLContext | None = None) -> None:
        """Serve at `listen`, a host:port (port 0: a free one).

        Raises: Unavailable naming the address when it is in use or not this machine's.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        self.connections = HttpConnections(
            lambda: server.connections,
            server,
            most=self._max_connections,
            stall_s=self._stall_s,
            handshake_s=self._handshake_s,
            ssl_context=ssl_context,
        )
        host, port = split_host_port(listen)
        try:
            listening = await _bound(host, port)
        except OSError as error:
            raise Unavailable(
                f"cannot listen on {listen}: the port is taken or the address is not this "
                "machine's; choose another"
            ) from error
        self.connections.start(listening)
        self.address = f"{host}:{listening[0].getsockname()[1]}"

    def families(self, labels: Labels) -> Iterator[Metric]:
        """Yield the metrics of the port for /metrics."""
        found = self.connections
        text = "Connections beyond limits.max_connections, closed at once."
        num_refused = found.num_refused if found is not None else 0
        yield counter("baton_router_http_connections_refused", text, labels, num_refused)
        text = "Connections closed since their client took nothing for times.stall_s."
        num_stalled = found.num_stalled if found is not None else 0
        yield counter("baton_router_http_connections_stalled", text, labels, num_stalled)

    async def stop(self) -> None:
        """Accept no new connection, let running requests finish for `drain_s`, then cancel them."""
        if self.connections is not None:
            await self.connections.stop_accepting()
        await self._runner.cleanup()
        if self.connections is not None:
            self.connections.stop()


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """Logger that aiohttp uses. A malformed request is the client's error and is logged as one
    line; other errors keep their traceback.
    """

    def exception(self, msg: object, *args: object, exc_info: Any = True, **options: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            why = exc_info.message.partition("\n")[0].strip(" :")
            peer = str(args[0]) if args else ""
            logs.event(logger, "http_malformed", peer=peer, why=why[:200])
        else:
            super().exception(msg, *args, exc_info=exc_info, **options)


async def _bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets that listen at each address of the host. Raises: OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    with contextlib.ExitStack() as stack:
        listening = []
        for family, _, _, _, address in dict.fromkeys(found):
            made = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
            listening.append(stack.enter_context(made))
            made.setblocking(False)
        stack.pop_all()
    return listening


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error that is raised before the answer has begun in one form."""
    connection = half_open_of(request)
    with connection.serving(request) if connection is not None else contextlib.nullcontext():
        response = await _answer(request, handler)
    if connection is not None and connection.is_half_closed:
        response.force_close()
    return response


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = error_response(http_error_of_status(error.status, _said(error)))
        if "allow" in error.headers:
            response.headers["allow"] = error.headers["allow"]
        return response
    except Exception as error:
        found = http_error_of(error)
        if found.status == 500:
            logs.event(
                logger, "http_failed", level=logging.ERROR, exc_info=True, path=request.path[:128]
            )
        if _BEGUN in request and request.transport is not None:
            # A client would read a second answer as a part of the first one's body.
            request.transport.abort()
        return error_response(found)


async def _sign(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Set the `server` header, without versions, and note that the answer has begun."""
    response.headers["server"] = "baton"
    request[_BEGUN] = True
    connection = half_open_of(request)
    if connection is not None:
        connection.response = response


def error_response(error: HttpError) -> web.Response:
    """Return the whole response for an error."""
    return web.json_response(error.body(), status=error.status, headers=error.headers())


def _said(error: web.HTTPException) -> str:
    if error.status == 404:
        return "there is nothing at this path; /openapi.json says what there is"
    return error.text or error.reason
