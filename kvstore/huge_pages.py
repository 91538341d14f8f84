"""Huge pages (hugetlbfs): whether a folder is made of them, and has as many as a file needs.

A file there is whole huge pages, write(2) is refused, and a mapped page that cannot be had ends
whoever touches it by SIGBUS. What statvfs() calls free is 0 where the mount has no size of its own,
so room is asked for by reserving it, which takes no page and counts whatever limits there are: the
host's pool, the mount's size, a container's limit.

64-bit Linux. Any thread.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from process.errors import NoCapacity

PAGE_BYTES = 4096
"""Of everything that is not hugetlbfs: what a slab's layout goes by."""
_HUGETLBFS_MAGIC = 0x958458F6  # linux/magic.h
_NUM_WORDS = 32  # struct statfs has 15 words of 64 bits; more does no harm
_libc = ctypes.CDLL(None, use_errno=True)


def page_bytes_of(fd: int) -> int:
    """Of the file system behind a descriptor: its huge page's size, or PAGE_BYTES."""
    words = (ctypes.c_long * _NUM_WORDS)()
    if _libc.fstatfs(fd, words):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    kind, block_bytes = int(words[0]), int(words[1])
    return block_bytes if kind == _HUGETLBFS_MAGIC else PAGE_BYTES


def page_bytes_in(folder: Path) -> int:
    """The same of a folder. Raises: NoCapacity naming the setting when it is not there."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise NoCapacity(f"slab_dir: {folder}: {error.strerror}") from error
    try:
        return page_bytes_of(fd)
    finally:
        os.close(fd)


def round_up(num_bytes: int, page_bytes: int) -> int:
    """To whole pages."""
    return -(-num_bytes // page_bytes) * page_bytes


def check_room(folder: Path, num_bytes: int, page_bytes: int) -> None:
    """See that a file of so many bytes may be had in `folder`, on huge pages, now.

    Raises: NoCapacity naming the settings when it may not.
    """
    try:
        _reserve(folder, round_up(num_bytes, page_bytes))
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise NoCapacity(no_room(folder, num_bytes, page_bytes)) from error
        raise NoCapacity(f"slab_dir: {folder}: {error.strerror}") from error


def no_room(folder: Path, num_bytes: int, page_bytes: int) -> str:
    """What to say when the pages do not suffice."""
    return (
        f"slab_dir: {folder} has no room for {round_up(num_bytes, page_bytes)} bytes in huge pages "
        f"of {page_bytes}; lower the store's capacity_bytes, or give it more (the host's "
        "vm.nr_hugepages, the mount's size, containers: the limit on huge pages)"
    )


def _reserve(folder: Path, num_bytes: int) -> None:
    """Reserve pages for a file without a name, and give them back."""
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, num_bytes)
        mmap.mmap(fd, num_bytes).close()
    finally:
        os.close(fd)
