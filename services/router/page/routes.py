"""LivePage: the routes of the live page on the router's HTTP port: static files, and the data that
they show. One asyncio loop.

    /live                the page; its files are next to it, by name
    /live/data.json      one snapshot
    /live/events         snapshots as server-sent events, one every INTERVAL_S
    /live/explain.json   why one request was placed as it was: ?request_id=...&tenant=...

The files contain nothing about the cluster and need no key. The data needs an admin's key where API
keys are in use. Where they are not, and the port listens on loopback, only a Host header that names
loopback is accepted, so that a foreign name that resolves to this machine reads nothing. The page
loads nothing from other origins and cannot be framed (CSP).

At most MAX_VIEWERS streams are open. A stream ends after STREAM_S, when its reader takes no bytes
for WRITE_S, or when the server stops. Handlers raise errors; HttpServer answers them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from importlib import resources

from aiohttp import web

from process.rpc_errors import NoCapacity, PermissionDenied
from protos import inference_pb2
from services.router.callers import Caller
from services.router.page.snapshots import INTERVAL_S, Snapshots, Status, to_json

PATH = "/live"
MAX_VIEWERS = 16
STREAM_S = 600.0
"""Seconds after which a stream ends; the page then reconnects."""
WRITE_S = 5.0

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")

Authorize = Callable[[str], Caller]
Explain = Callable[[inference_pb2.ExplainRequest], inference_pb2.ExplainReply]


class LivePage:
    """Handlers of the live page."""

    def __init__(
        self,
        status: Status,
        authorize: Authorize,
        *,
        explain: Explain,
        is_on_loopback: bool,
        stream_s: float = STREAM_S,
        write_s: float = WRITE_S,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """Create the page; `add_to` registers its routes.

        Args:
            status: returns the cluster's status.
            authorize: returns the caller of an Authorization header; raises BatonError where it has
                no access.
            explain: returns one request's placement; raises NotFound.
            is_on_loopback: whether the port listens on loopback.
            stream_s: limit of one stream, in seconds.
            write_s: limit of writing one event, in seconds.
            interval_s: pause between two events, in seconds.
        """
        self._snapshots = Snapshots(status)
        self._authorize = authorize
        self._explain = explain
        self._is_on_loopback = is_on_loopback
        self._stream_s, self._write_s, self._interval_s = stream_s, write_s, interval_s
        self._is_ending = asyncio.Event()
        self.num_viewers = 0

    def add_to(self, app: web.Application) -> None:
        """Register the routes with `app`."""
        app.router.add_get(PATH, _file("page.html"))
        folder = resources.files(__package__).joinpath("static")
        for entry in folder.iterdir():
            app.router.add_get(f"{PATH}/{entry.name}", _file(entry.name))
        app.router.add_get(f"{PATH}/data.json", self._data)
        # No HEAD: the answer consists of its body only.
        app.router.add_get(f"{PATH}/events", self._events, allow_head=False)
        app.router.add_get(f"{PATH}/explain.json", self._why)
        app.on_shutdown.append(self._end)

    async def _data(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        text, _ = await self._snapshots.text()
        return web.Response(text=text, content_type="application/json", headers=_HEADERS)

    async def _why(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        asked = inference_pb2.ExplainRequest(
            request_id=request.query.get("request_id", ""), tenant=request.query.get("tenant", "")
        )
        text = to_json(self._explain(asked))
        return web.Response(text=text, content_type="application/json", headers=_HEADERS)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        self._check(request)
        if self.num_viewers >= MAX_VIEWERS:
            raise NoCapacity(f"{MAX_VIEWERS} pages are open on this router already")
        self.num_viewers += 1
        try:
            return await self._stream(request)
        finally:
            self.num_viewers -= 1

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        headers = {**_HEADERS, "Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        seen_ms, loop = 0, asyncio.get_running_loop()
        end_s = loop.time() + self._stream_s
        try:
            while loop.time() < end_s and not self._is_ending.is_set():
                text, seen_ms = await self._snapshots.text(seen_ms)
                async with asyncio.timeout(self._write_s):
                    await response.write(f"data: {text}\n\n".encode())
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._is_ending.wait()
        except (TimeoutError, ConnectionError):
            # The reader has disconnected or takes no bytes: drop what is not written yet.
            if request.transport is not None:
                request.transport.abort()
        return response

    def _check(self, request: web.Request) -> None:
        """Check that the request may read the cluster's status. Raises: BatonError."""
        caller = self._authorize(request.headers.get("Authorization", ""))
        caller.check_admin()
        is_open = not caller.key_id and self._is_on_loopback
        if is_open and _host(request.host) not in _LOOPBACK_NAMES:
            raise PermissionDenied(
                "the page is shown under a name of this machine only, such as 127.0.0.1"
            )

    async def _end(self, app: web.Application) -> None:
        self._is_ending.set()


def _file(name: str) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Return a handler that answers with a static file, which is read once."""
    content = resources.files(__package__).joinpath("static", name).read_bytes()
    content_type = _TYPES[name.rpartition(".")[2]]

    async def answer(request: web.Request) -> web.Response:
        return web.Response(
            body=content, content_type=content_type, charset="utf-8", headers=_HEADERS
        )

    return answer


def _host(header: str) -> str:
    """Return the name in a Host header, without the port."""
    name, colon, port = header.rpartition(":")
    return name if colon and port.isdecimal() else header
