"""The router's HTTP port: connections, bounds, and errors in one form. Knows no route of its own.

A client that goes away cancels its handler; one that only sends no more gets its answer. Headers
and bodies are bounded in bytes, connections in number, and one that does not finish a request's
head in time, or does not take its answer, is closed. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError
from prometheus_client.metrics_core import Metric

from process import logs
from process.errors import Unavailable
from process.grpc_server import HANDSHAKE_S
from process.metrics import Labels, counter
from process.settings import split_host_port
from services.router.http_connections import HttpConnections
from services.router.http_errors import HttpError, http_error_of, http_error_of_status
from services.router.http_half_open import half_open_of

logger = logging.getLogger(__name__)

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
