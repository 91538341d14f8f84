"""Connections whose client has ended its own direction: it sends no more, and its answer is owed.

On the wire a client that half-closed (shutdown) is the same as one that went away (close), until
something is written to it: one that went away resets the connection. So a client whose answer is
not there gets a word that it passes over, an interim response or, within an event stream, a
comment; and a connection that was reset for it is aborted: its handler sees a client that went
away. Not over TLS, where a client that sends no more cannot be answered. One asyncio loop.

The open connections of an HTTP port: how many there may be, and which are given up.

A connection counts from its accept, through the TLS handshake, to its end. One more than `most` is
closed at once: after a 503, or, over TLS, without one, for that would cost a handshake. A handshake
that is not over after `handshake_s` ends its connection. A connection whose client lets bytes wait
and takes none of them for `stall_s` is aborted, whatever its answer is: its handler sees it as a
client that went away. (One that waits for a request is closed by aiohttp.) Knows connections, no
request. One asyncio loop.

Which web pages may use an HTTP port that needs no API key: those of this machine, and of
the origins in the setting `cors_origins`.

Such a port is open to this machine only, and so to every page that a browser on it shows: a page
from elsewhere whose name was made to point at 127.0.0.1 (DNS rebinding) is of one origin with the
port, as the browser sees it. A browser says in `Origin` from which page a POST comes; other clients
send none. One asyncio loop.

Web pages from elsewhere that may use the API (CORS), by the setting `cors_origins`: a browser
asks before it sends a request that a page makes to another origin (a preflight), and shows the page
an answer only where the answer names the page's origin.

Only the paths of the API: what shows the cluster is for its own pages. Whether a request is served
at all, by its key, is not decided here. One asyncio loop.

Which certificates open the HTTP port, where clients are asked for one: those of clients and
admins; what shows the whole cluster, those of admins alone. A worker's or a store's opens nothing
here. One asyncio loop.

The router's HTTP port: connections, bounds, and errors in one form. Knows no route of its own.

A client that goes away cancels its handler; one that only sends no more gets its answer. Headers
and bodies are bounded in bytes, connections in number, and one that does not finish a request's
head in time, or does not take its answer, is closed. One asyncio loop.
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
"""For which an answer may not have begun before its client gets a word. Guessed: most whole answers
to a client that half-closes are there by then, and a worker that goes on for one that went away
does not so for long."""
_FIRST_LOOK_S, _LAST_LOOK_S = 0.001, 1.0
"""Between two looks whether the connection was reset: each is twice as long as the one before."""
_TURNS = 8
"""Of the loop, in which a request that has arrived is at its handler: aiohttp takes three."""
_INTERIM = b"HTTP/1.1 100 Continue\r\n\r\n"
_COMMENT = b"2\r\n:\n\r\n"
"""A chunk. Each write of an event stream is a whole one, of whole events."""


class HalfOpen(asyncio.Protocol):
    """One connection, around the protocol that serves it. `serving` says what it serves, from when
    its request is at a handler on; `response`, once that has begun, its answer.
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
        """The body makes the answer."""
        self._request, self.response = request, None
        try:
            yield
        finally:
            self._request = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
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
        """Returns: that the connection is not to be closed for it."""
        self._inner.eof_received()
        self.is_half_closed = True
        self._find_request(_TURNS)
        return True

    def _find_request(self, num_turns: int) -> None:
        """Close the connection, unless an answer is owed."""
        loop, transport, request = asyncio.get_running_loop(), self._transport, self._request
        if transport is None or transport.is_closing():
            return
        if request is None and num_turns:
            self._next = loop.call_soon(self._find_request, num_turns - 1)
        elif request is None or not request.content.is_eof():
            transport.close()  # nothing was asked, or not to its end
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
    """The connection of a request; None: it is closed, or one over TLS."""
    protocol = request.transport.get_protocol() if request.transport is not None else None
    return protocol if isinstance(protocol, HalfOpen) else None


logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_ACCEPT_PAUSE_S = 1.0
"""After an accept that failed, as where no file descriptor is left."""


@dataclass(frozen=True)
class _Look:
    """What waited for a client when its connection was looked at."""

    num_bytes: int
    since_s: float
    """Since when it has been as many."""


class HttpConnections:
    """See the module."""

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
        """`open_now`: protocols of connections, each with its `transport`; `make`: one more."""
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
        """Connections that were accepted and do not serve yet."""
        self._looks: dict[asyncio.BaseProtocol, _Look] = {}
        self._next_look: asyncio.TimerHandle | None = None

    def start(self, listening: Sequence[socket.socket]) -> None:
        """Accept connections from now on at these sockets, which do not block, and look after
        them."""
        self._listening = listening
        self._accepting = [
            start_task(self._accept(each), "http accept", is_for_many=True) for each in listening
        ]
        self._look_later()

    async def stop_accepting(self) -> None:
        """No new connection; those whose handshake is under way end. Idempotent."""
        await end_tasks([*self._accepting, *self._beginning.values()])
        for each in self._listening:
            each.close()

    def stop(self) -> None:
        """Look after none any more. Idempotent."""
        if self._next_look is not None:
            self._next_look.cancel()
        self._looks.clear()

    @property
    def num_open(self) -> int:
        """Connections, those in their handshake among them."""
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
        """A connection that was just accepted."""
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
        # A client that went away, or whose handshake failed or took too long: its connection is
        # closed, and there is no more to do.
        with contextlib.suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: served,
                peer,
                ssl=context,
                ssl_handshake_timeout=self._handshake_s if context is not None else None,
            )

    def look(self, now_s: float) -> None:
        """Abort those that have taken nothing for too long."""
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
    """A connection that is told to come again, and closed: it is not read from."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's is none by its class
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
        # What is written goes out at the end of the loop's turn.
        asyncio.get_running_loop().call_soon(stream.close)


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def add_origin_check(app: web.Application, others: Collection[str] = ()) -> None:
    """Check each request of `app` before its handler sees it. `others`: origins that are served,
    too."""
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
    """Whether the Origin headers of one request name pages of this machine, or none."""
    try:
        return all(urlsplit(origin).hostname in LOOPBACK_NAMES for origin in origins)
    except ValueError:
        return False


ANY = "*"

_PATHS = "/v1/"
_READABLE = "x-request-id, retry-after, retry-after-ms, x-should-retry"
"""Headers of an answer that a page may read, besides those that it always may."""
_MAX_AGE_S = 600
"""For which a browser need not ask again. Guessed: a setting that was changed holds soon."""


class Cors:
    """See the module."""

    def __init__(self, origins: Collection[str]) -> None:
        """`origins`: as `RouterSettings.cors_origins`."""
        self._origins = frozenset(origins)

    def add_to(self, app: web.Application) -> None:
        """Answer preflights, and name the origin in every answer to a page of it."""
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
            # Every header of a request may come: clients have their own, and none opens anything.
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
"""What shows the whole cluster."""


def add_role_check(app: web.Application) -> None:
    """Check each request of `app` before anything else looks at it."""
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
"""Of one header, and of the request line."""
MAX_HEADERS = 64
_BACKLOG = 128
"""Connections that wait to be accepted."""
_BEGUN = web.RequestKey("has_begun", bool)

AddRoutes = Callable[[web.Application], None]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """See the module."""

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
        """Seconds: `drain_s`, for which `stop` lets requests finish; `stall_s`, for which a client
        may take nothing of its answer; `idle_s`, for which a connection may ask for nothing;
        `handshake_s`, for a TLS handshake.
        """
        self.address = ""
        """host:port; known once started."""
        app = web.Application(middlewares=[_guarded], client_max_size=max_body_bytes)
        app.on_response_prepare.append(_sign)
        for add in add_routes:
            add(app)
        self.routes = list(app.router.routes())
        """Of every path; what a document of them must name."""
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
            # aiohttp waits so long twice: for the handlers, and for them to see their end.
            shutdown_timeout=drain_s / 2,
        )
        self._max_connections = max_connections
        self._stall_s = stall_s
        self._handshake_s = handshake_s
        self.connections: HttpConnections | None = None
        """Known once started."""

    async def start(self, listen: str, ssl_context: ssl.SSLContext | None = None) -> None:
        """Serve at `host:port` (port 0: a free one).

        Raises: Unavailable naming the address when it is taken or not ours.
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
        """For /metrics."""
        found = self.connections
        text = "Connections beyond limits.max_connections, closed at once."
        num_refused = found.num_refused if found is not None else 0
        yield counter("baton_router_http_connections_refused", text, labels, num_refused)
        text = "Connections closed since their client took nothing for times.stall_s."
        num_stalled = found.num_stalled if found is not None else 0
        yield counter("baton_router_http_connections_stalled", text, labels, num_stalled)

    async def stop(self) -> None:
        """Take no new connection, let requests under way finish for a while, then end them."""
        if self.connections is not None:
            await self.connections.stop_accepting()
        await self._runner.cleanup()
        if self.connections is not None:
            self.connections.stop()


class _ServerLog(logging.LoggerAdapter[logging.Logger]):
    """What aiohttp logs by itself: a malformed request is its client's mistake, one line, and
    everything else stays an error with its traceback."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **options: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            why = exc_info.message.partition("\n")[0].strip(" :")
            peer = str(args[0]) if args else ""
            logs.event(logger, "http_malformed", peer=peer, why=why[:200])
        else:
            super().exception(msg, *args, exc_info=exc_info, **options)


async def _bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen at each address of the host. Raises: OSError."""
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
    """Whatever goes wrong before an answer began is answered in one form."""
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
            # Another answer amid the first one's body would be read as a part of it.
            request.transport.abort()
        return error_response(found)


async def _sign(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Who answers; which versions of what we run is nobody's business. And that it has begun."""
    response.headers["server"] = "baton"
    request[_BEGUN] = True
    connection = half_open_of(request)
    if connection is not None:
        connection.response = response


def error_response(error: HttpError) -> web.Response:
    """A whole answer."""
    return web.json_response(error.body(), status=error.status, headers=error.headers())


def _said(error: web.HTTPException) -> str:
    if error.status == 404:
        return "there is nothing at this path; /openapi.json says what there is"
    return error.text or error.reason
