"""Phases: how long each part of a start took. Start-up only."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator

_DIGITS = 3


class Phases:
    """See the module."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def timed(self, name: str) -> Generator[None, None, None]:
        """What is done meanwhile counts for this phase."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun

    @property
    def seconds(self) -> tuple[tuple[str, float], ...]:
        """(phase, seconds), in the order of their first beginnings."""
        return tuple((name, round(value, _DIGITS)) for name, value in self._seconds.items())
