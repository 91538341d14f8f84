"""The live page's routes on the router's HTTP port: a few fixed files, and what they show.

    /live                the page; its files lie beside it, by name
    /live/data.json      one snapshot
    /live/events         a stream of them (server-sent events), one every INTERVAL_S
    /live/explain.json   why one request went where it did: ?request_id=...&tenant=...

The files say nothing about the cluster and are open; the data is an administrator's where keys are
asked for. Nothing is loaded from elsewhere, and the page may be put into no frame (CSP). Where no
keys are asked for, on loopback, only a browser that was sent here by a name of loopback is told
anything: a name elsewhere that points at this machine reaches nothing.

Bounded: MAX_VIEWERS streams, each for STREAM_S at most, ended by a reader that takes nothing for
WRITE_S and by the server's own end. Errors are raised, and answered by the server. One asyncio
loop.
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
"""Then the page asks again."""
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
    """See the module."""

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
        """status: of the cluster. authorize: who sent this Authorization header; raises BatonError
        when nobody may. explain: one request's choices; raises NotFound. is_on_loopback: where the
        port listens. stream_s, write_s: of one stream, and of one event until it is let go.
        """
        self._snapshots = Snapshots(status)
        self._authorize = authorize
        self._explain = explain
        self._is_on_loopback = is_on_loopback
        self._stream_s, self._write_s, self._interval_s = stream_s, write_s, interval_s
        self._is_ending = asyncio.Event()
        self.num_viewers = 0

    def add_to(self, app: web.Application) -> None:
        """Add the routes."""
        app.router.add_get(PATH, _file("page.html"))
        folder = resources.files(__package__).joinpath("static")
        for entry in folder.iterdir():
            app.router.add_get(f"{PATH}/{entry.name}", _file(entry.name))
        app.router.add_get(f"{PATH}/data.json", self._data)
        # An answer to HEAD would have no body, and this one is nothing else.
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
            # The reader is gone, or takes nothing: what is not written yet is thrown away.
            if request.transport is not None:
                request.transport.abort()
        return response

    def _check(self, request: web.Request) -> None:
        """Raises: BatonError unless this request may be told about the cluster."""
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
    """A handler that answers with one of our own files, read once."""
    content = resources.files(__package__).joinpath("static", name).read_bytes()
    content_type = _TYPES[name.rpartition(".")[2]]

    async def answer(request: web.Request) -> web.Response:
        return web.Response(
            body=content, content_type=content_type, charset="utf-8", headers=_HEADERS
        )

    return answer


def _host(header: str) -> str:
    """The name in a Host header."""
    name, colon, port = header.rpartition(":")
    return name if colon and port.isdecimal() else header
