"""Deadline: the moment by which work must be over, made of a request's time limit and handed down
from wait to wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from process.rpc_errors import DeadlineExceeded

Clock = Callable[[], float]
"""A function that returns the time in seconds, as time.monotonic does."""


@dataclass(frozen=True)
class Deadline:
    """A moment by which work must be over, on this process's monotonic clock. Across processes only
    the rest of the time budget travels."""

    at_s: float
    clock: Clock = time.monotonic

    @classmethod
    def after(cls, seconds: float, clock: Clock = time.monotonic) -> Deadline:
        """The deadline `seconds` from now."""
        return cls(clock() + seconds, clock)

    def left_s(self) -> float:
        """Seconds left until the deadline, never negative."""
        return max(0.0, self.at_s - self.clock())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.clock() >= self.at_s

    def sooner(self, seconds: float) -> Deadline:
        """This deadline, or `seconds` from now if that is sooner."""
        return Deadline(min(self.at_s, self.clock() + seconds), self.clock)

    @asynccontextmanager
    async def timeout(self, what: str) -> AsyncIterator[None]:
        """Bound the body by this deadline. Raises: DeadlineExceeded naming `what` when time runs
        out inside it."""
        scope = asyncio.timeout(self.left_s())
        try:
            async with scope:
                yield
        except TimeoutError as error:
            # Not our own clock: uvloop's timers may come a millisecond early.
            if not scope.expired():
                raise  # another timeout
            raise DeadlineExceeded(f"{what}: the time for it ran out") from error
