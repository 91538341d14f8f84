"""Worker side of a multiplexed gRPC stream, for either role: commands of one router arrive, and all
events since the last write are sent as one message.

While the reader keeps up that is one message per engine step; behind a slow one steps share a
message, up to MAX_EVENTS, so that what waits here is bounded by the requests' own lengths. The
stream ends when the router has no more commands and its last request is over; when it breaks, all
of them end.

Knows no stubs and no request. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

EventT = TypeVar("EventT")
CommandT = TypeVar("CommandT")


MAX_EVENTS = 256
"""Most events in one message: at the largest size of an event (prompt log-probabilities) they take
48 MB of the 64 MiB limit."""


class Session(Protocol):
    """Interface of the requests of one stream."""

    async def wait_idle(self) -> None:
        """Wait until every request is over. Each has its own deadline."""

    def close(self) -> None:
        """Cancel all requests because the stream has ended."""


class Outbox(Generic[EventT]):
    """Queue of events that wait to be written, in order."""

    def __init__(self) -> None:
        self._events: list[EventT] = []
        self._wake = asyncio.Event()
        self._is_ended = False
        self.num_unwritten = 0
        """Events that were put and are not written yet."""
        self.num_batches = 0
        """So many were taken to be written: what was put before the last one cannot be changed."""

    def put(self, event: EventT) -> None:
        """Queue an event until `flush`."""
        self.num_unwritten += 1
        self._events.append(event)

    def flush(self) -> None:
        """Make the queued events available for writing; never blocks."""
        self._wake.set()

    def end(self) -> None:
        """End the queue; no event may be added afterwards."""
        self._is_ended = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[EventT]]:
        """Yield the events to be written together, until `end`."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while events := self._events[:MAX_EVENTS]:
                del self._events[:MAX_EVENTS]
                self.num_batches += 1
                yield events
                self.num_unwritten -= len(events)
            if self._is_ended and not self._events:
                return


async def serve(
    commands: AsyncIterator[CommandT],
    obey: Callable[[CommandT], None],
    session: Session,
    outbox: Outbox[EventT],
    write: Callable[[list[EventT]], Awaitable[None]],
    open_ones: set[Outbox[Any]],
) -> None:
    """Serve one stream until it ends. `obey` answers an invalid command itself.

    Args: open_ones: contains the outbox while the stream is served.
    """

    async def read() -> None:
        try:
            async for command in commands:
                obey(command)
            await session.wait_idle()
        finally:
            outbox.end()

    reader = asyncio.create_task(read())
    open_ones.add(outbox)
    try:
        async for events in outbox.batches():
            await write(events)
        await reader
    finally:
        open_ones.discard(outbox)
        session.close()
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
