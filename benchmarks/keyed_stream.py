"""One multiplexed stream to a worker of either role, as a bare router has it: commands out under
keys of their own, and what comes back by key, with the moment when it came.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from typing import Any

import grpc.aio

Came = tuple[Any, float]
"""An event, and the monotonic clock's seconds when it came."""


class KeyedStream:
    """See the module."""

    def __init__(self, call: Any, command: Any) -> None:
        """`call` of a stub's `Stream`, `command`: the class of what goes out."""
        self._call = call
        self._command = command
        self._keys = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[Came]] = {}
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    def open(self) -> tuple[int, asyncio.Queue[Came]]:
        """A new key, and what comes for it."""
        key = next(self._keys)
        self._queues[key] = asyncio.Queue()
        return key, self._queues[key]

    def close(self, key: int) -> None:
        """Nothing more is wanted of it; what still comes is dropped."""
        del self._queues[key]

    async def send(self, key: int, **fields: Any) -> None:
        """One command."""
        async with self._writing:
            await self._call.write(self._command(key=key, **fields))

    async def end(self) -> None:
        """Break the stream."""
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # the worker ends first
            while (message := await self._call.read()) is not grpc.aio.EOF:
                came_s = time.monotonic()
                for event in message.events:
                    if (queue := self._queues.get(event.key)) is not None:
                        queue.put_nowait((event, came_s))
