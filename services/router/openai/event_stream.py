"""Server-sent events to one client: begun with the first event, so that what fails before it still
has a status of its own. While no event comes for a while, a comment does, which clients pass over:
proxies close a connection that is silent for long, also before its first byte.

A slow client holds its writer up, with at most the socket's buffer between them; what the request
makes meanwhile is merged where it waits. One request; one asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from process.background_tasks import end_tasks, start_task

_LAST_WORD_S = 1.0
"""For the event of an error: a client that has stopped reading is not waited for."""
_END_S = 60.0
"""For the end of an answer: guessed, far above what a slow line needs for what is buffered."""

_COMMENT = b": keep-alive\n\n"

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies of the nginx kind would collect them
}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class EventStream:
    """See the module."""

    def __init__(
        self, request: web.Request, headers: Mapping[str, str], keep_alive_s: float
    ) -> None:
        """`keep_alive_s`: without an event, after which a comment is sent."""
        self._request = request
        self._keep_alive_s = keep_alive_s
        self._written_s = asyncio.get_running_loop().time()
        self._writing = asyncio.Lock()
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self.has_begun = False
        """Whether the status went out."""

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    async def send(self, event: Mapping[str, Any]) -> None:
        """One event. Raises: ConnectionError when the client is gone."""
        async with self._writing:
            await self._write(f"data: {_encode(event)}\n\n".encode())

    @contextlib.asynccontextmanager
    async def kept_alive(self) -> AsyncIterator[None]:
        """Send comments where nothing is sent while the body runs. The first one begins the stream:
        what fails behind it is an event.
        """
        commenting = start_task(self._comment(), "keep an event stream alive")
        try:
            yield
        finally:
            await end_tasks([commenting])

    async def end(self, last: Mapping[str, Any] | None = None, *, end_s: float = _END_S) -> None:
        """All was said, `last` the last of it. A client that does not take it in time has its
        connection closed: the request's own deadline is no more. Raises: ConnectionError.
        """
        try:
            async with asyncio.timeout(end_s):
                if last is not None:
                    await self.send(last)
                await self._response.write(b"data: [DONE]\n\n")
                await self._response.write_eof()
        except TimeoutError:
            self._abort()

    async def fail(self, event: Mapping[str, Any]) -> None:
        """End with an error, and without the word that all was said. Never raises; a client that
        does not take it has its connection closed.
        """
        try:
            async with asyncio.timeout(_LAST_WORD_S):
                await self.send(event)
                await self._response.write_eof()
        except (TimeoutError, ConnectionError):
            self._abort()

    async def _comment(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # gone: the next event finds that, too
            while True:
                await asyncio.sleep(self._written_s + self._keep_alive_s - loop.time())
                async with self._writing:
                    if loop.time() >= self._written_s + self._keep_alive_s:
                        await self._write(_COMMENT)

    async def _write(self, data: bytes) -> None:
        if not self.has_begun:
            self.has_begun = True
            await self._response.prepare(self._request)
        await self._response.write(data)
        self._written_s = asyncio.get_running_loop().time()

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
