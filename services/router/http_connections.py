"""The open connections of an HTTP port: how many there may be, and which are given up.

One more than `most` is told so and closed. One whose client lets bytes wait and takes none of them
for `stall_s` is aborted, whatever its answer is: its handler sees it as a client that went away.
(One that waits for a request is closed by aiohttp.) Knows connections, no request. One asyncio
loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from process import logs
from process.errors import NoCapacity
from services.router.http_errors import http_error_of

logger = logging.getLogger(__name__)

_RETRY_S = 1.0


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
    ) -> None:
        """`open_now`: protocols of connections, each with its `transport`; `make`: one more."""
        self.num_refused = 0
        self.num_stalled = 0
        self._open_now = open_now
        self._make = make
        self._most = most
        self._stall_s = stall_s
        self._looks: dict[asyncio.BaseProtocol, _Look] = {}
        self._next_look: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Look after them from now on."""
        loop = asyncio.get_running_loop()
        self._next_look = loop.call_later(self._stall_s / 8, self._turn)

    def stop(self) -> None:
        """No more. Idempotent."""
        if self._next_look is not None:
            self._next_look.cancel()
        self._looks.clear()

    def protocol(self) -> asyncio.BaseProtocol:
        """For a connection that has just come."""
        if len(self._open_now()) < self._most:
            return self._make()
        self.num_refused += 1
        return _Refusal()

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
        self.start()

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
