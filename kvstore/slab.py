"""Slab: a shared, memory-mapped file of block frames (slots for one KV block each): the memory of a
store, mapped by the store and by the workers of its host.

    byte 0                     header: magic, version, incarnation, sizes and offsets
    generations_offset         uint64[num_frames]: the generation of each frame
    frames_offset              frames, each at a multiple of 4096 bytes

The store writes the header and the generations; a worker writes only frames reserved for it, and
reads frames by the seqlock rule: generation even and as expected before the copy, the same after
it. On machines with weak memory order the checksum is what decides; the generations only make the
common case cheap.

Two kinds of kernel locks show which processes live, across PID namespaces: the store holds flock()
on its file as long as it lives, so that a later store can remove files of dead ones; a worker holds
an open file description lock on one byte of its own, so that the store knows when that process is
gone.

The mapping is never shrunk or unmapped while its process lives: peers may hold its address.

In a folder of huge pages (hugetlbfs) the file is whole huge pages; where things lie in it is the
same. write(2) is refused there, and a mapped page that cannot be had ends the process that touches
it by SIGBUS. statvfs() says 0 free where the mount has no size of its own, so room is found out by
reserving it: that takes no page and counts all limits (the host's pool, the mount's size, a
container's limit).

64-bit Linux. Any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from process import host_memory, logs
from process.rpc_errors import FailedPrecondition, NoCapacity

logger = logging.getLogger(__name__)

PAGE_BYTES = 4096
"""Page size of all file systems but hugetlbfs; a slab's layout is made of such pages."""
FAULT_AROUND_BYTES = 64 * 1024
"""Bytes that one read fault maps (Linux's default), if the pages exist. A write fault maps one
page: 2.3 ms instead of 0.6 for 6 MiB (measured)."""
MIN_DEFAULT_FRAMES = 1024
"""Least number of frames of a store that chooses its size itself: blocks of 16 tokens for two
prompts of 8,192. Below that a store evicts what it has just taken in."""
MAX_DEFAULT_BYTES = 8 << 30
"""Most memory of a store that chooses its size itself: the kernel takes 0.3 s a GiB to clear the
pages (measured), and the first worker waits 3 s."""
MAX_DEFAULT_FRAMES = 1 << 17
"""Most frames of a store that chooses its size itself: its bookkeeping takes 60 bytes and a check
of its invariants 8 us for each (measured), and blocks of a few kilobytes, as of test models, would
make millions."""
MIN_FRAMES = 64
"""Least number of frames with which a store that chooses its size itself starts."""
MAGIC = b"BATONSLB"
VERSION = 1
SUFFIX = ".baton-slab"
_HEADER = struct.Struct("<8sI4x16sQQQQQ")
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux
# Lock bytes lie far behind any data; locks may be taken behind the end of a file.
_LOCK_BASE = 1 << 56
_LOCK_MASK = (1 << 48) - 1
_FOLDER_LOCK_WAIT_S = 10.0
_FOLDER_LOCK_POLL_S = 0.02
_HUGETLBFS_MAGIC = 0x958458F6  # linux/magic.h
_NUM_STATFS_WORDS = 32  # struct statfs has 15 words of 64 bits; more does no harm
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class SlabLayout:
    """Sizes and offsets in a slab's file. frame_bytes: of one block."""

    frame_bytes: int
    num_frames: int

    @property
    def stride_bytes(self) -> int:
        """Bytes from one frame to the next: a block's, rounded up to whole pages."""
        return round_up(self.frame_bytes)

    @property
    def generations_offset(self) -> int:
        return PAGE_BYTES

    @property
    def frames_offset(self) -> int:
        return PAGE_BYTES + round_up(8 * self.num_frames)

    @property
    def total_bytes(self) -> int:
        return self.frames_offset + self.num_frames * self.stride_bytes

    @classmethod
    def fitting(
        cls, capacity_bytes: int, frame_bytes: int, page_bytes: int = PAGE_BYTES
    ) -> SlabLayout:
        """The layout with as many frames as go into `capacity_bytes`. On huge pages the header,
        too, has to go into it once it is rounded up to whole pages: one more would be lost for a
        few kilobytes.

        Raises: NoCapacity if there is not one frame.
        """
        stride_bytes = round_up(frame_bytes)
        num_frames = capacity_bytes // stride_bytes
        if page_bytes > PAGE_BYTES:
            room = round_up(capacity_bytes, page_bytes) - 2 * PAGE_BYTES
            num_frames = min(num_frames, room // (stride_bytes + 8))
        if num_frames < 1:
            raise NoCapacity(
                f"capacity_bytes = {capacity_bytes} holds no block of {frame_bytes} bytes; "
                "raise the store's capacity_bytes"
            )
        return cls(frame_bytes, num_frames)


def default_capacity_bytes(
    frame_bytes: int, *, free_memory_bytes: int, free_folder_bytes: int
) -> int:
    """The memory that a store takes which was given no size: a tenth of the free memory,
    MIN_DEFAULT_FRAMES at least, MAX_DEFAULT_BYTES (unless those frames are more) and
    MAX_DEFAULT_FRAMES at most, and never more than half of what is free in memory and in the slab's
    folder.

    Raises: NoCapacity where that is less than MIN_FRAMES.
    """
    stride_bytes = round_up(frame_bytes)
    most_bytes = min(MAX_DEFAULT_BYTES, MAX_DEFAULT_FRAMES * stride_bytes)
    wanted = max(min(free_memory_bytes // 10, most_bytes), MIN_DEFAULT_FRAMES * stride_bytes)
    capacity_bytes = min(wanted, free_memory_bytes // 2, free_folder_bytes // 2)
    if capacity_bytes < MIN_FRAMES * stride_bytes:
        raise NoCapacity(
            f"slab_dir: half of what is free ({free_folder_bytes} bytes there, {free_memory_bytes} "
            f"of memory) holds {capacity_bytes // stride_bytes} blocks of {frame_bytes} bytes, and "
            f"a store needs {MIN_FRAMES}; give the folder more (containers: the size of the "
            "shared-memory mount), or set the store's capacity_bytes"
        )
    return capacity_bytes


class Slab:
    """One mapping of a slab's file (a store's frames and their generations), in the store or in a
    worker.

    frames: uint8 [num_frames, stride_bytes]. generations: uint64 [num_frames]. num_bytes: of the
    whole file, in pages of page_bytes.
    """

    def __init__(self, path: Path, fd: int, layout: SlabLayout, incarnation: bytes) -> None:
        self.path = path
        self.layout = layout
        self.incarnation = incarnation
        self.page_bytes = page_bytes_of(fd)
        self.num_bytes = round_up(layout.total_bytes, self.page_bytes)
        self._fd = fd
        self._map = mmap.mmap(fd, self.num_bytes)
        whole = np.frombuffer(self._map, dtype=np.uint8)[: layout.total_bytes]
        self.frames: npt.NDArray[np.uint8] = whole[layout.frames_offset :].reshape(
            layout.num_frames, layout.stride_bytes
        )
        end = layout.generations_offset + 8 * layout.num_frames
        self.generations: npt.NDArray[np.uint64] = whole[layout.generations_offset : end].view(
            np.uint64
        )

    @property
    def frames_address(self) -> int:
        """Address of frame 0 in this process."""
        return int(self.frames.ctypes.data)

    def block(self, frame: int) -> npt.NDArray[np.uint8]:
        """The bytes of one frame, without its padding: uint8 [frame_bytes], a view."""
        return self.frames[frame, : self.layout.frame_bytes]

    def touch(self, start: int, end: int, every_bytes: int = PAGE_BYTES) -> None:
        """Have the kernel allocate the pages of frames [start, end) now (pre-fault them): reads a
        byte in each.

        The first touch of a page costs 1 to 35 us (measured; virtual machines are slow at it), a
        hundred times the copy into it. Once any process touched them, a read every
        FAULT_AROUND_BYTES maps them here. Releases the GIL. Harmless while others write.
        """
        self.frames[start:end].reshape(-1)[::every_bytes].max(initial=0)

    def publish(self, frame: int, generation: int) -> None:
        """Show a frame's generation to readers: one aligned 8-byte store."""
        self.generations[frame] = generation

    @classmethod
    def create(cls, folder: Path, node_id: str, incarnation: bytes, layout: SlabLayout) -> Slab:
        """Make, fill and lock a slab's file, then give it its name. Blocks while memory is taken.

        Raises: NoCapacity naming the settings when the folder has too little room.
        """
        path = folder / f"{node_id}-{incarnation.hex()}{SUFFIX}"
        check_room(folder, layout.total_bytes)
        # Without a name until it is locked: no store takes it for a dead store's file.
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            page_bytes = page_bytes_of(fd)
            try:
                # Really taken now: a sparse file would end some process with SIGBUS later.
                os.posix_fallocate(fd, 0, round_up(layout.total_bytes, page_bytes))
            except OSError as error:
                raise NoCapacity(_no_room(folder, layout.total_bytes, page_bytes)) from error
            slab = cls(path, fd, layout, incarnation)
            # By the mapping: files on huge pages cannot be written otherwise.
            slab._map[: _HEADER.size] = _pack_header(layout, incarnation)
            _give_name(fd, path)
            return slab
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def allocate(
        cls,
        folder: Path,
        node_id: str,
        incarnation: bytes,
        block_bytes: int,
        capacity_bytes: int,
    ) -> Slab:
        """Make the slab of a store, one store of a folder after the other, so that each counts as
        free what is. capacity_bytes: 0 for default_capacity_bytes. Blocks while memory is taken.

        Raises: NoCapacity naming the settings.
        """
        page_bytes = page_bytes_in(folder)
        with _locked(folder):
            capacity_bytes = capacity_bytes or default_capacity_bytes(
                block_bytes,
                free_memory_bytes=host_memory.available_bytes(),
                free_folder_bytes=free_bytes(folder),
            )
            layout = SlabLayout.fitting(capacity_bytes, block_bytes, page_bytes)
            return cls.create(folder, node_id, incarnation, layout)

    @classmethod
    def open(cls, path: Path, incarnation: bytes) -> Slab:
        """Map a store's slab in a worker.

        Raises: FailedPrecondition when it is not on this host, not ours to write, or that
            of another start of a store.
        """
        hint = (
            "is the worker on the store's host, with the same slab_dir? "
            "Otherwise set transport to grpc or nixl"
        )
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError as error:
            raise FailedPrecondition(
                f"transport shm: cannot map {path}: {error.strerror}; {hint}"
            ) from error
        try:
            layout, found = _unpack_header(os.pread(fd, _HEADER.size, 0), path)
            if found != incarnation:
                raise FailedPrecondition(
                    f"transport shm: {path} belongs to another start of a store (incarnation "
                    f"{found.hex()}), not to the one that this worker attached to; {hint}"
                )
            page_bytes = page_bytes_of(fd)
            if os.fstat(fd).st_size < round_up(layout.total_bytes, page_bytes):
                raise FailedPrecondition(f"transport shm: {path} is shorter than its header says")
            return cls(path, fd, layout, found)
        except BaseException:
            os.close(fd)
            raise

    def unlink(self) -> None:
        """Remove the file's name; mappings stay."""
        self.path.unlink(missing_ok=True)

    def lock_byte(self, attachment_id: str) -> None:
        """Lock the attachment's byte of the file. A worker calls it to show the store that this
        process lives, until it ends or `close`."""
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _lock(fcntl.F_RDLCK, attachment_id))

    def is_locked(self, attachment_id: str) -> bool:
        """Whether the attachment's byte is locked, that is, its process lives. The store calls
        it."""
        answer = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _lock(fcntl.F_WRLCK, attachment_id))
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Close the file, which ends its locks. The mapping stays as long as this process lives."""
        if self._fd >= 0:
            # The mapping holds a duplicate of the descriptor, so closing alone would keep the
            # locks.
            unlock = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0)
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, unlock)
            fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = -1


def remove_stale(folder: Path) -> list[Path]:
    """Remove slab files in `folder` whose stores are dead. Returns: the removed files. Files of
    living stores and of other users are left."""
    removed: list[Path] = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            fd = os.open(path, os.O_RDWR)
        except OSError:
            continue  # gone by now, or another user's
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EPERM):
                raise
        finally:
            os.close(fd)
    return removed


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system that `folder` lies in. Raises: NoCapacity where the folder is
    missing, or lies on huge pages, whose free bytes statvfs() does not say."""
    if page_bytes_in(folder) > PAGE_BYTES:
        raise NoCapacity(
            f"capacity_bytes: needed where slab_dir ({folder}) is on huge pages; say how much"
        )
    try:
        found = os.statvfs(folder)
    except OSError as error:
        raise NoCapacity(f"slab_dir: {folder}: {error.strerror}") from error
    return found.f_bavail * found.f_frsize


def check_room(folder: Path, num_bytes: int) -> None:
    """Check that `folder` has room for `num_bytes`. Raises: NoCapacity naming the settings when it
    is missing or has less."""
    page_bytes = page_bytes_in(folder)
    if page_bytes > PAGE_BYTES:
        if num_bytes:
            _check_huge_pages(folder, num_bytes, page_bytes)
        return
    if free_bytes(folder) < num_bytes:
        raise NoCapacity(_no_room(folder, num_bytes, page_bytes))


def page_bytes_of(fd: int) -> int:
    """Page size of the file system that an open file lies in: on hugetlbfs that of its huge pages,
    else PAGE_BYTES."""
    words = (ctypes.c_long * _NUM_STATFS_WORDS)()
    if _libc.fstatfs(fd, words):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    kind, block_bytes = int(words[0]), int(words[1])
    return block_bytes if kind == _HUGETLBFS_MAGIC else PAGE_BYTES


def page_bytes_in(folder: Path) -> int:
    """Page size of the file system that `folder` lies in: on hugetlbfs that of its huge pages, else
    PAGE_BYTES. Raises: NoCapacity naming the setting when there is no such folder."""
    fd = _open_folder(folder)
    try:
        return page_bytes_of(fd)
    finally:
        os.close(fd)


def round_up(num_bytes: int, page_bytes: int = PAGE_BYTES) -> int:
    """`num_bytes` rounded up to whole pages of `page_bytes`."""
    return -(-num_bytes // page_bytes) * page_bytes


def _open_folder(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise NoCapacity(f"slab_dir: {folder}: {error.strerror}") from error


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """No other store takes memory in this folder while the body runs. Where another store keeps
    the lock for _FOLDER_LOCK_WAIT_S, as one that was stopped does, the body runs without it, and
    the log says so."""
    fd = _open_folder(folder)
    try:
        ends_s = time.monotonic() + _FOLDER_LOCK_WAIT_S
        while time.monotonic() < ends_s:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(_FOLDER_LOCK_POLL_S)
            else:
                break
        else:
            logs.event(logger, "slab_dir_not_locked", level=logging.WARNING, path=str(folder))
        yield
    finally:
        os.close(fd)


def _check_huge_pages(folder: Path, num_bytes: int, page_bytes: int) -> None:
    try:
        _reserve(folder, round_up(num_bytes, page_bytes))
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOSPC):
            raise NoCapacity(_no_room(folder, num_bytes, page_bytes)) from error
        raise NoCapacity(f"slab_dir: {folder}: {error.strerror}") from error


def _reserve(folder: Path, num_bytes: int) -> None:
    """Reserve huge pages for a file without a name, and give them back."""
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, num_bytes)
        mmap.mmap(fd, num_bytes).close()
    finally:
        os.close(fd)


def _give_name(fd: int, path: Path) -> None:
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        # With a folder's descriptor Python calls linkat(AT_SYMLINK_FOLLOW), which /proc needs here.
        os.link(f"/proc/self/fd/{fd}", path.name, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _no_room(folder: Path, num_bytes: int, page_bytes: int) -> str:
    if page_bytes > PAGE_BYTES:
        return (
            f"slab_dir: {folder} has no room for {round_up(num_bytes, page_bytes)} bytes in huge "
            f"pages of {page_bytes}; lower the store's capacity_bytes, or give it more (the host's "
            "vm.nr_hugepages, the mount's size, containers: the limit on huge pages)"
        )
    return (
        f"slab_dir: {folder} has no room for {num_bytes} bytes; lower the store's capacity_bytes, "
        "or give the folder more (containers: the size of the shared-memory mount)"
    )


def _pack_header(layout: SlabLayout, incarnation: bytes) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        incarnation,
        layout.frame_bytes,
        layout.num_frames,
        layout.generations_offset,
        layout.frames_offset,
        layout.stride_bytes,
    )


def _unpack_header(header: bytes, path: Path) -> tuple[SlabLayout, bytes]:
    if len(header) < _HEADER.size or not header.startswith(MAGIC):
        raise FailedPrecondition(f"transport shm: {path} is no slab of this program")
    _, version, incarnation, frame_bytes, num_frames, *rest = _HEADER.unpack(header)
    layout = SlabLayout(frame_bytes, num_frames)
    expected = [layout.generations_offset, layout.frames_offset, layout.stride_bytes]
    if version != VERSION or rest != expected:
        raise FailedPrecondition(
            f"transport shm: {path} has slab version {version}, this worker speaks {VERSION}"
        )
    return layout, incarnation


def _lock(kind: int, attachment_id: str) -> bytes:
    offset = _LOCK_BASE + (int(attachment_id[:12], 16) & _LOCK_MASK)
    return _FLOCK.pack(kind, os.SEEK_SET, offset, 1, 0)
