"""PageFile: the file of a store's disk tier. A page of it is a slot for one KV block, not a page of
the operating system; each has a header with a checksum.

    offset 0      file header, 4096 bytes: layout, a random id of the file, a checksum
    4096          one header of 256 bytes for each page
    data_offset   the pages, block_bytes each, each at a multiple of 4096 bytes

A page's bytes are written first, its header after them; both are checked when they are read: the
header (with the file's id and its own place in it) when the file is opened, the bytes against the
header's checksum when they are needed. So a process killed, or a machine that lost power, at any
moment leaves pages that verify and pages that do not. Nothing is synced: what was lost is computed
again.

A header is never erased. The header of a page that was given to another block stays true until the
page is written again (a chain hash names its contents); from then on its checksum fails.

The file is locked for life: two stores never share it. Knows nothing of the tree or of tenants'
shares. Any thread; different pages at once.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvstore import block_hash
from kvstore.block_refs import StoredPage
from process.rpc_errors import FailedPrecondition, NoCapacity

MAGIC = b"BATONPGS"
VERSION = 1
SUFFIX = ".baton-pages"
HEADER_BYTES = 256
_ALIGN = 4096
_ID_BYTES = 16
_FILE = struct.Struct("<8sI16sQQQQ")
# index, serial, chain hash, parent, has parent, num_tokens, checksum, tenant's length, tenant
_PAGE = struct.Struct("<QQ16s16sBIQB128s")
_SUM = struct.Struct("<Q")
_LOCK_WAIT_S = 5.0
"""A store that was killed may take a moment to be gone."""
_LOCK_POLL_S = 0.05

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class PageLayout:
    """Sizes and offsets in a page file, in bytes."""

    block_bytes: int
    num_pages: int

    @property
    def stride_bytes(self) -> int:
        """Bytes from one page to the next: a block's, rounded up to 4096."""
        return _round_up(self.block_bytes)

    @property
    def data_offset(self) -> int:
        """Offset of the first page, after the headers."""
        return _ALIGN + _round_up(HEADER_BYTES * self.num_pages)

    @property
    def total_bytes(self) -> int:
        """Size of the whole file."""
        return self.data_offset + self.num_pages * self.stride_bytes

    @classmethod
    def fitting(cls, capacity_bytes: int, block_bytes: int) -> PageLayout:
        """The layout with as many pages as go into `capacity_bytes`. Raises: NoCapacity if there is
        not one."""
        per_page = _round_up(block_bytes) + HEADER_BYTES
        num_pages = (capacity_bytes - 2 * _ALIGN) // per_page
        if num_pages < 1:
            raise NoCapacity(
                f"file_tier_bytes = {capacity_bytes} holds no block of {block_bytes} bytes; "
                "raise the store's file_tier_bytes"
            )
        return cls(block_bytes, num_pages)


class PageFile:
    """The open page file of a store; `open` makes it."""

    def __init__(self, path: Path, fd: int, layout: PageLayout, file_id: bytes) -> None:
        self.path = path
        self.layout = layout
        self.cleared = ""
        """Why the content of the file that was there could not be used and was cleared; empty: it
        was not cleared."""
        self._fd = fd
        self._file_id = file_id

    @classmethod
    def open(
        cls,
        path: Path,
        layout: PageLayout,
        *,
        lock_wait_s: float = _LOCK_WAIT_S,
    ) -> PageFile:
        """Open or make the file, with all of its room taken. Blocks the thread.

        Raises: NoCapacity (no room, naming the settings); FailedPrecondition (another store has
            it); OSError.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(fd, path, lock_wait_s)
            found = os.pread(fd, _FILE.size + _SUM.size, 0)
            why = _why_not(found, layout, os.fstat(fd).st_size)
            if why is None:
                return cls(path, fd, layout, _FILE.unpack(found[: _FILE.size])[2])
            _check_room(fd, path, layout)
            made = cls(path, fd, layout, _make(fd, path, layout))
            made.cleared = why if found else ""
            return made
        except BaseException:
            os.close(fd)
            raise

    def scan(self) -> tuple[list[StoredPage], int]:
        """Read all headers. Returns: the pages whose headers verify, and how many headers are torn.
        Reads no page."""
        table = _read(self._fd, HEADER_BYTES * self.layout.num_pages, _ALIGN)
        stored: list[StoredPage] = []
        num_torn = 0
        blank = bytes(HEADER_BYTES)
        for index in range(self.layout.num_pages):
            header = table[index * HEADER_BYTES : (index + 1) * HEADER_BYTES]
            if header == blank:
                continue
            page = self._unpack(header, index)
            if page is None:
                num_torn += 1
            else:
                stored.append(page)
        return stored, num_torn

    def write(self, page: StoredPage, data: Bytes) -> None:
        """Write a block's bytes and then its header. Raises: OSError."""
        _write(self._fd, data.data, self._offset(page.index))
        _write(self._fd, memoryview(self._pack(page)), _ALIGN + page.index * HEADER_BYTES)

    def read(self, index: int, checksum: int, into: Bytes) -> bool:
        """Read a page into `into`. Returns: whether the checksum of its bytes is the expected one;
        a page that cannot be read counts as bad."""
        try:
            num_bytes = _read_into(self._fd, into.data, self._offset(index))
        except OSError:
            return False
        return num_bytes == into.nbytes and block_hash.checksum(into) == checksum

    def close(self) -> None:
        """Close the file and end its lock. No read or write may be under way."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _offset(self, index: int) -> int:
        if not 0 <= index < self.layout.num_pages:
            raise IndexError(f"page {index}: there are {self.layout.num_pages}")
        return self.layout.data_offset + index * self.layout.stride_bytes

    def _pack(self, page: StoredPage) -> bytes:
        tenant = page.tenant.encode()
        body = _PAGE.pack(
            page.index,
            page.serial,
            page.chain_hash,
            page.parent,
            bool(page.parent),
            page.num_tokens,
            page.checksum,
            len(tenant),
            tenant,
        ).ljust(HEADER_BYTES - _SUM.size, b"\0")
        return body + _SUM.pack(block_hash.checksum(self._file_id + body))

    def _unpack(self, header: bytes, index: int) -> StoredPage | None:
        body, tail = header[: -_SUM.size], header[-_SUM.size :]
        if len(header) != HEADER_BYTES:
            return None
        if _SUM.unpack(tail)[0] != block_hash.checksum(self._file_id + body):
            return None
        at, serial, chain_hash, parent, has_parent, num_tokens, checksum, length, tenant = (
            _PAGE.unpack(body[: _PAGE.size])
        )
        if at != index:
            return None
        return StoredPage(
            index,
            chain_hash,
            parent if has_parent else b"",
            checksum,
            num_tokens,
            tenant[:length].decode(),
            serial,
        )


def _make(fd: int, path: Path, layout: PageLayout) -> bytes:
    """Take the room, all zeros, then write the file's header: without it no store uses the file."""
    os.ftruncate(fd, 0)
    try:
        os.posix_fallocate(fd, 0, layout.total_bytes)
    except OSError as error:
        os.ftruncate(fd, 0)
        raise NoCapacity(_no_room(path, layout)) from error
    file_id = secrets.token_bytes(_ID_BYTES)
    header = _pack_file(layout, file_id)
    _write(fd, memoryview(header), 0)
    return file_id


def _check_room(fd: int, path: Path, layout: PageLayout) -> None:
    """Whether there is room, where that of the file as it is counts as free. Raises: NoCapacity."""
    free = os.statvfs(path.parent)
    if free.f_bavail * free.f_frsize + os.fstat(fd).st_blocks * 512 < layout.total_bytes:
        raise NoCapacity(_no_room(path, layout))


def _pack_file(layout: PageLayout, file_id: bytes) -> bytes:
    body = _FILE.pack(
        MAGIC,
        VERSION,
        file_id,
        layout.block_bytes,
        layout.num_pages,
        layout.stride_bytes,
        layout.data_offset,
    )
    return body + _SUM.pack(block_hash.checksum(body))


def _why_not(found: bytes, layout: PageLayout, num_bytes: int) -> str | None:
    """Why a file cannot be used as it is; None: it can."""
    if len(found) < _FILE.size + _SUM.size or not found.startswith(MAGIC):
        return "not a page file, or one that was never finished"
    file_id = found[len(MAGIC) + 4 :][:_ID_BYTES]
    if found == _pack_file(layout, file_id):
        return None if num_bytes >= layout.total_bytes else "shorter than its header says"
    body, tail = found[: _FILE.size], found[_FILE.size :]
    if _SUM.unpack(tail)[0] != block_hash.checksum(body):
        return "its header is damaged"
    _, version, _, block_bytes, num_pages, *_ = _FILE.unpack(body)
    return (
        f"version {version}, {num_pages} pages of {block_bytes} bytes; now version {VERSION}, "
        f"{layout.num_pages} of {layout.block_bytes}"
    )


def _lock(fd: int, path: Path, wait_s: float) -> None:
    give_up_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() >= give_up_s:
                raise FailedPrecondition(
                    f"file_tier_dir: {path} is another store's; give each store its own node_id"
                ) from error
        time.sleep(_LOCK_POLL_S)


def _write(fd: int, data: memoryview, offset: int) -> None:
    while data:
        num_bytes = os.pwrite(fd, data, offset)
        data, offset = data[num_bytes:], offset + num_bytes


def _read_into(fd: int, into: memoryview, offset: int) -> int:
    """Read at `offset` until `into` is full or the file ends. Returns: how many bytes there
    were."""
    total = 0
    while total < len(into):
        num_bytes = os.preadv(fd, [into[total:]], offset + total)
        if num_bytes == 0:
            break
        total += num_bytes
    return total


def _read(fd: int, num_bytes: int, offset: int) -> bytes:
    whole = bytearray(num_bytes)
    return bytes(whole[: _read_into(fd, memoryview(whole), offset)])


def _no_room(path: Path, layout: PageLayout) -> str:
    return (
        f"file_tier_dir: {path.parent} has no room for {layout.total_bytes} bytes; lower the "
        "store's file_tier_bytes, or give the folder more"
    )


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN) * _ALIGN
