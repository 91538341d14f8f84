"""Connections whose client has ended its own direction: it sends no more, and its answer is owed.

On the wire a client that half-closed (shutdown) is the same as one that went away (close), until
something is written to it: one that went away resets the connection. So a client whose answer is
not there gets a word that it passes over, an interim response or, within an event stream, a
comment; and a connection that was reset for it is aborted: its handler sees a client that went
away. Not over TLS, where a client that sends no more cannot be answered. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from aiohttp import web
from aiohttp.http import HttpVersion11

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
