"""Waiting for work that must come to its end although the waiter was cancelled. One asyncio
loop."""

from __future__ import annotations

import asyncio
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
