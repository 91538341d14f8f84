"""The host's pool of huge pages, of which a test may have some more made and give those back."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TextIO


class HugePool:
    """Together with others who do so now: each change is made under the file's lock."""

    def __init__(self, file: Path = Path("/proc/sys/vm/nr_hugepages")) -> None:
        self._file = file

    def grow(self, num_pages: int) -> int:
        """Ask for so many more. Returns: how many there are more, which may be fewer: the kernel
        makes what it has room for, and says nothing. Raises: OSError where nobody may ask."""
        with self._file.open("r+") as pool:
            fcntl.flock(pool, fcntl.LOCK_EX)
            before = _read(pool)
            self._write(pool, before + num_pages)
            return max(0, _read(pool) - before)

    def shrink(self, num_pages: int) -> None:
        """Give back so many. Raises: OSError, as `grow`."""
        with self._file.open("r+") as pool:
            fcntl.flock(pool, fcntl.LOCK_EX)
            self._write(pool, max(0, _read(pool) - num_pages))

    def _write(self, pool: TextIO, num_pages: int) -> None:
        pool.seek(0)
        pool.write(f"{num_pages}\n")
        pool.flush()


def _read(pool: TextIO) -> int:
    pool.seek(0)
    return int(pool.read())
