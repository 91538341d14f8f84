"""A value that is read from files, and read again when one of them has changed.

Looked at whenever it is asked for, which costs one `stat` a file: secrets and certificates that are
rotated on disk are taken up, and dropped ones are of no use any more, without a restart. Files that
cannot be read then change nothing but the log, and are tried again after RETRY_S: the value that
was valid stays so. Knows nothing of what it reads. Any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from process import logs
from process.settings import SettingsError

logger = logging.getLogger(__name__)

Value = TypeVar("Value")

RETRY_S = 1.0
"""How soon changed files that could not be read are tried again."""

_Look = tuple[tuple[int, ...] | None, ...]


class Watched(Generic[Value]):
    """See the module."""

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        read: Callable[[], Value],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`read` reads the files and raises SettingsError, which also comes from here the first
        time. `name`: of the value, in the log.
        """
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        # Of before the read: a change in between is seen by the next look.
        self._look = _look(self._paths)
        self._value = read()
        self._retry_at_s = 0.0
        self.num_reloads = 0
        """How often the value has changed since the start."""

    def get(self) -> Value:
        """The value as the files have it now, or had it when they could last be read."""
        look = _look(self._paths)
        with self._lock:
            if look != self._look and self._clock() >= self._retry_at_s:
                self._take(look)
            return self._value

    def _take(self, look: _Look) -> None:
        try:
            self._value = self._read()
        except SettingsError as error:
            self._retry_at_s = self._clock() + RETRY_S
            logs.event(
                logger,
                "file_not_reloaded",
                level=logging.WARNING,
                what=self._name,
                problem=str(error),
            )
            return
        self._look = look
        self.num_reloads += 1
        logs.event(logger, "file_reloaded", what=self._name)


def _look(paths: Sequence[Path]) -> _Look:
    """What changes when a file does; None for one that is not there."""
    return tuple(_look_at(path) for path in paths)


def _look_at(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # Of a change of mode or owner only ctime tells, and it may be the fix that was asked for.
    return (
        found.st_dev,
        found.st_ino,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_mode,
        found.st_size,
    )
