"""Scratch: memory on a CPU that a model's steps write gathered keys and values into, layer after
layer, step after step.

Allocated and freed in each layer instead, it goes back to the kernel and is zeroed and mapped in
again, page by page, whenever the C library thinks that nobody wants it any more; what it thinks
depends on all that the process allocates, a draft model's steps among it. On a device the caching
allocator keeps memory, and nobody needs this. Engine thread only.

Law (`check_integrity`): what it holds is at most `limit_bytes`, and of each place at most twice
what was once asked for there, rounded up to a page; nothing, once closed.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass

import torch

from engine.errors import IntegrityError
from engine.kv.memory import TORCH_DTYPES, KvMemory

_GROWTH = 2
_PADDING = 2
"""Sequences of a group are padded to twice their blocks at most, but for short ones."""


@dataclass
class _Place:
    pages: torch.Tensor
    """[bytes] uint8."""
    asked_bytes: int
    """The most, of those that it had room for."""
    newest: torch.Tensor
    """What `take` gave last."""


class Scratch:
    """See the module.

    Args:
        limit_bytes: that it ever holds; what does not fit is allocated and freed as anything else.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._places: dict[str, _Place] = {}
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Held now, address space of pages that were not written yet included."""
        return sum(len(one.pages) for one in self._places.values())

    def take(self, place: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of this shape, contiguous, with anything in it. The next one that is taken of
        this place is the same memory."""
        one = self._places.get(place)
        if one is not None and one.newest.shape == shape and one.newest.dtype is dtype:
            return one.newest
        num_bytes = math.prod(shape) * dtype.itemsize
        if one is None or num_bytes > len(one.pages):
            one = self._grow(place, num_bytes)
        if one is None:
            return torch.empty(shape, dtype=dtype)
        one.asked_bytes = max(one.asked_bytes, num_bytes)
        one.newest = one.pages[:num_bytes].view(dtype).view(shape)
        return one.newest

    def _grow(self, place: str, num_bytes: int) -> _Place | None:
        """None: it does not fit."""
        old = self._places.get(place)
        old_bytes = 0 if old is None else len(old.pages)
        room_bytes = 0 if self._is_closed else self.limit_bytes - self.num_bytes + old_bytes
        wanted_bytes = max(num_bytes, min(_GROWTH * old_bytes, room_bytes))
        if not 0 < num_bytes <= room_bytes:
            return None
        self._places.pop(place, None)  # before there are others in its stead
        pages = _pages(min(_whole_pages(wanted_bytes), room_bytes))
        one = self._places[place] = _Place(pages, num_bytes, pages[:0])
        return one

    def close(self) -> None:
        """Give all of it back: with the last tensor that was taken. Idempotent; what is taken
        afterwards is not held."""
        self._is_closed = True
        self._places.clear()

    def check_integrity(self) -> None:
        """Raises: IntegrityError. See the module."""
        if self.num_bytes > self.limit_bytes:
            raise IntegrityError(f"scratch: {self.num_bytes} bytes, beyond {self.limit_bytes}")
        if self._is_closed and self._places:
            raise IntegrityError(f"scratch: {self.num_bytes} bytes are held by a closed one")
        for name, one in self._places.items():
            most = _whole_pages(_GROWTH * one.asked_bytes)
            if not one.asked_bytes <= len(one.pages) <= most:
                raise IntegrityError(
                    f"scratch: {name} has {len(one.pages)} bytes for {one.asked_bytes}"
                )
            inside = one.pages.untyped_storage().data_ptr()
            if len(one.newest) and one.newest.untyped_storage().data_ptr() != inside:
                raise IntegrityError(f"scratch: {name} gave memory that is not its own")


def scratch_for(memory: KvMemory, dtype: str) -> Scratch | None:
    """For a model that computes in `dtype` on this cache; None: on its device nobody needs one.

    It has room for the keys and values of one layer of all that the cache holds, padded, and takes
    no more than the cache does: automatic sizing leaves a CPU that much (kv/sizing.py).
    """
    if torch.device(memory.device).type != "cpu":
        return None
    layout = memory.record
    item_bytes = TORCH_DTYPES[dtype].itemsize
    if layout.dtype != dtype:  # as stored, before as computed
        item_bytes += TORCH_DTYPES[layout.dtype].itemsize
    most = max(
        one.num_k_heads * one.k_head_dim + one.num_v_heads * one.v_head_dim for one in layout.layers
    )
    block_bytes = _PADDING * layout.block_size * most * item_bytes
    return Scratch(memory.num_blocks * min(block_bytes, layout.block_bytes))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _pages(num_bytes: int) -> torch.Tensor:
    """[bytes] uint8, page-aligned; in use from when they are first written."""
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: slower, nothing else
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=torch.uint8)
