"""Work that must come to its end although whoever asked for it has gone. One asyncio loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any


async def finish(work: asyncio.Future[Any]) -> None:
    """Wait until `work` (which must be bounded) is done; only then be cancelled, if we were.

    Its result or error is left for the caller to take.
    """
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class Background:
    """Work that outlives its callers; its owner waits for it with `settle`."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Its errors are seen by whoever awaits it, or by nobody."""

        async def run() -> Any:
            return await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def settle(self) -> None:
        """Wait until there is none; what each piece waits for is its own bound."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))
