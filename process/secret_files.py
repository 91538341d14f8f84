"""Files of secrets and other small files: secrets are read only if no other user can read them,
files are read again when they change (`WatchedFile`), and written as a whole (`replace_file`).
Blocking; any thread.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import stat
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
"""Time after which changed files that could not be read are tried again."""

_FORBIDDEN_MODE = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP


def read_secret(path: Path, *, what: str, max_bytes: int, fix: str) -> bytes:
    """Read a file that only its owner may read and, for secrets that a pod mounts, its group.

    Args: what: names the file in errors. fix: what to do when there is none.
    Returns: its content.
    Raises: SettingsError naming the file and the fix; never with a part of its content.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            # Of the open file, which cannot be exchanged between check and read.
            _check_mode(path, what, os.fstat(file.fileno()))
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise SettingsError(f"{what} {path}: {error.strerror}; {fix}") from error
    if len(content) > max_bytes:
        raise SettingsError(f"{what} {path}: is longer than {max_bytes} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    """Open a file without waiting: a named pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_mode(path: Path, what: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SettingsError(f"{what} {path}: is no file")
    mode = stat.S_IMODE(found.st_mode)
    if mode & _FORBIDDEN_MODE:
        raise SettingsError(
            f"{what} {path}: mode {mode:o} lets others at it; run `chmod 600 {path}`"
        )


def replace_file(path: Path, content: str | bytes, *, mode: int | None = None) -> None:
    """Write a file, secret or not, as a whole: readers see the old content or the new one, never a
    part; the new file has its mode from the first moment, and after an error the old file is there.
    A symbolic link stays one.

    Args:
        mode: mode of the file, less the umask. None: owner, group and mode stay as they are; a new
            file gets 0600.
    Raises: OSError; PermissionError where the file is another user's and would not stay so.
    """
    try:
        path = path.resolve()
    except RuntimeError as error:  # links in a circle
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from error
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    found = path.stat() if mode is None and path.exists() else None
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        handle = os.open(scratch, flags, 0o600 if mode is None else mode)
    except OSError as error:
        raise type(error)(error.errno, error.strerror, str(path)) from error
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if found is not None:
                os.fchown(handle, found.st_uid, found.st_gid)
                os.fchmod(handle, stat.S_IMODE(found.st_mode))  # last: chown drops bits
            os.fsync(handle)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


_Stamp = tuple[tuple[int, ...] | None, ...]


class WatchedFile(Generic[Value]):
    """A value that is read from files, and read again when one of them has changed.

    Each `get` costs one `stat` a file, so that secrets and certificates that are rotated on disk
    are used without a restart. If the changed files cannot be read, `get` logs it, returns the last
    valid value, and tries again after RETRY_S.
    """

    def __init__(
        self,
        name: str,
        paths: Sequence[Path],
        read: Callable[[], Value],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the files for the first time.

        Args: name: of the value, in the log. read: reads the files; raises SettingsError.
        Raises: SettingsError as `read`.
        """
        self._name = name
        self._paths = tuple(paths)
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        # Taken before the read: a change in between is seen by the next `get`.
        self._stamp = _stamps(self._paths)
        self._value = read()
        self._retry_at_s = 0.0
        self.num_reloads = 0
        """The number of changes of the value since the start."""

    def get(self) -> Value:
        """The value as it is in the files now; if they cannot be read, as they last could be."""
        stamp = _stamps(self._paths)
        with self._lock:
            if stamp != self._stamp and self._clock() >= self._retry_at_s:
                self._take(stamp)
            return self._value

    def _take(self, stamp: _Stamp) -> None:
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
        self._stamp = stamp
        self.num_reloads += 1
        logs.event(logger, "file_reloaded", what=self._name)


def _stamps(paths: Sequence[Path]) -> _Stamp:
    """A value that changes when a file does; None for a missing one."""
    return tuple(_stamp_of(path) for path in paths)


def _stamp_of(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # A change of mode or owner, which may be the fix that an error asked for, shows in ctime alone.
    return (
        found.st_dev,
        found.st_ino,
        found.st_mtime_ns,
        found.st_ctime_ns,
        found.st_mode,
        found.st_size,
    )
