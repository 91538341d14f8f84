"""What a start needs: Phases times its parts, closed_on_failure closes what it has opened."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Generator

logger = logging.getLogger(__name__)

_DIGITS = 3


class Phases:
    """Seconds by phase of a start."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Generator[None, None, None]:
        """Count the time of the body for this phase."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """(phase, seconds), in the order in which they first began."""
        return tuple((name, round(value, _DIGITS)) for name, value in self._seconds.items())


@contextlib.contextmanager
def closed_on_failure() -> Generator[list[Callable[[], None]], None, None]:
    """Gives a list to the body. If the body fails, the callables in the list are called, the last
    first. Their exceptions are only logged, because the body's is the one to report."""
    closes: list[Callable[[], None]] = []
    try:
        yield closes
    except BaseException:
        for close in reversed(closes):
            try:
                close()
            except Exception:
                logger.exception("a start has failed, and not all of it could be closed")
        raise
