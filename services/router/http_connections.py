"""The open connections of an HTTP port: how many there may be, and which are given up.

A connection counts from its accept, through the TLS handshake, to its end. One more than `most` is
closed at once: after a 503, or, over TLS, without one, for that would cost a handshake. A handshake
that is not over after `handshake_s` ends its connection. A connection whose client lets bytes wait
and takes none of them for `stall_s` is aborted, whatever its answer is: its handler sees it as a
client that went away. (One that waits for a request is closed by aiohttp.) Knows connections, no
request. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from process import logs
from process.background_tasks import end_tasks, start_task
from process.errors import NoCapacity
from services.router.http_errors import http_error_of
from services.router.http_half_open import HalfOpen

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
