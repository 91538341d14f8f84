"""A multiplexed stream at the worker's end, whatever its role: commands of one router come down,
and what has come since the last write goes up as one message.

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
"""Of one message: the largest, log probabilities of prompts, then take 48 MB of the 64 MiB that a
message may have."""


class Session(Protocol):
    """The requests of one stream."""

    async def wait_idle(self) -> None:
        """Until every request is over. Each has its own deadline."""

    def close(self) -> None:
        """The stream is gone: cancel all of them."""


class Outbox(Generic[EventT]):
    """Events in their order, until they are written."""

    def __init__(self) -> None:
        self._events: list[EventT] = []
        self._wake = asyncio.Event()
        self._is_ended = False
        self.num_unwritten = 0
        """Events that were put and are not written yet."""
        self.num_batches = 0
        """So many were taken to be written: what was put before the last one cannot be changed."""

    def put(self, event: EventT) -> None:
        """It waits for `flush`."""
        self.num_unwritten += 1
        self._events.append(event)

    def flush(self) -> None:
        """Have what waits written; never blocks."""
        self._wake.set()

    def end(self) -> None:
        """No event comes any more."""
        self._is_ended = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[list[EventT]]:
        """What is to be written together, until `end`."""
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
    """One stream, until it ends. `obey` answers a wrong command by itself.

    Args: open_ones: has the outbox in it while somebody reads it.
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
