"""A file that holds secrets: read at once, bounded, and only if nobody else may read it.

Its owner may, and, for secrets that a pod mounts, its group. Knows nothing of what is inside.
Blocking; any thread.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from process.settings import SettingsError

_FORBIDDEN_MODE = stat.S_IRWXO | stat.S_IWGRP | stat.S_IXGRP


def read(path: Path, *, what: str, max_bytes: int, fix: str) -> bytes:
    """The file's content.

    Args: what: names the file in errors. fix: what to do when there is none.
    Raises: SettingsError naming the file and the fix; never with a part of its content.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            # Of the open file: nobody can put another one in its place between check and read.
            _check_mode(path, what, os.fstat(file.fileno()))
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise SettingsError(f"{what} {path}: {error.strerror}; {fix}") from error
    if len(content) > max_bytes:
        raise SettingsError(f"{what} {path}: is longer than {max_bytes} bytes")
    return content


def _open_at_once(path: str, flags: int) -> int:
    """A pipe is not waited for, but found to be none."""
    return os.open(path, flags | os.O_NONBLOCK)


def _check_mode(path: Path, what: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise SettingsError(f"{what} {path}: is no file")
    mode = stat.S_IMODE(found.st_mode)
    if mode & _FORBIDDEN_MODE:
        raise SettingsError(
            f"{what} {path}: mode {mode:o} lets others at it; run `chmod 600 {path}`"
        )
