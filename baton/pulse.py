"""The pulse of a child process: whether its event loop turns, as heard from outside.

A Baton process writes a byte a second into the pipe that it got from its parent (process/pulse.py);
Redis, which knows no pipe, is asked with PING over its socket file. Never blocks. Belongs to the
thread that looks after the child.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Protocol

_READ_BYTES = 4096


class Pulse(Protocol):
    """One child's."""

    def has_beaten(self) -> bool:
        """Whether it has since it was asked last."""

    def close(self) -> None:
        """Hear no more. Idempotent."""


class PipePulse:
    """Of a Baton process."""

    def __init__(self) -> None:
        self._read: int | None
        self._read, self.write_fd = os.pipe()
        """The child's end; `started` closes ours of it."""
        os.set_blocking(self._read, False)

    def started(self) -> None:
        """The child has its end, or will never have it."""
        os.close(self.write_fd)

    def has_beaten(self) -> bool:
        """See Pulse."""
        if self._read is None:
            return False
        try:
            return bool(os.read(self._read, _READ_BYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """See Pulse."""
        if self._read is not None:
            os.close(self._read)
            self._read = None


class RedisPulse:
    """Of a Redis without a password, at a socket file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._socket: socket.socket | None = None

    def has_beaten(self) -> bool:
        """See Pulse. Asks for the next beat."""
        has_answered = False
        with self._failures():
            if self._socket is None:
                self._socket = socket.socket(socket.AF_UNIX)
                self._socket.setblocking(False)
                self._socket.connect(self._path)
            else:
                has_answered = bool(self._socket.recv(_READ_BYTES))
                if not has_answered:
                    raise ConnectionResetError("Redis closed the connection")
            self._socket.send(b"PING\r\n")
        return has_answered

    def close(self) -> None:
        """See Pulse."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """No answer yet is none; a connection that failed is made anew."""
        try:
            yield
        except BlockingIOError:
            return
        except OSError:
            self.close()
