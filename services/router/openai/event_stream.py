"""Server-sent events to one client: begun with the first event, so that what fails before it still
has a status of its own.

A slow client holds its writer up, with at most the socket's buffer between them; what the request
makes meanwhile is merged where it waits. One request; one asyncio loop.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web

_LAST_WORD_S = 1.0
"""For the event of an error: a client that has stopped reading is not waited for."""
_END_S = 60.0
"""For the end of an answer: guessed, far above what a slow line needs for what is buffered."""

_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # proxies of the nginx kind would collect them
}
_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class EventStream:
    """See the module."""

    def __init__(self, request: web.Request, headers: Mapping[str, str]) -> None:
        self._request = request
        self._response = web.StreamResponse(headers={**_HEADERS, **headers})
        self.has_begun = False
        """Whether the status went out."""

    @property
    def response(self) -> web.StreamResponse:
        """What the handler returns."""
        return self._response

    async def send(self, event: Mapping[str, Any]) -> None:
        """One event. Raises: ConnectionError when the client is gone."""
        if not self.has_begun:
            self.has_begun = True
            await self._response.prepare(self._request)
        await self._response.write(f"data: {_encode(event)}\n\n".encode())

    async def end(self, last: Mapping[str, Any] | None = None) -> None:
        """All was said, `last` the last of it. A client that does not take it in time has its
        connection closed: the request's own deadline is no more. Raises: ConnectionError.
        """
        try:
            async with asyncio.timeout(_END_S):
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

    def _abort(self) -> None:
        if self._request.transport is not None:
            self._request.transport.abort()
