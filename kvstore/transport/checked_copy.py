"""CheckedCopy: blocks copied between a worker's memory and a slab, their checksums computed on the
way over the worker's bytes.

Copying and hashing take turns, a piece at a time, so that each byte comes out of memory once: what
was just hashed is copied out of the core's cache, what was just copied is hashed there. Hashing
64 MiB in one go after they were copied costs half to three quarters of the copy itself; in turns, a
fifth to a third (measured).

Knows no leases, generations or deadlines: whoever calls it looks at these before and after. Blocks
its thread; releases the GIL in each piece.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvstore import block_hash

PIECE_BYTES = 256 * 1024
"""Both sides of a piece fit into a core's second-level cache. Best of 64 KiB to 1 MiB for blocks of
64 KiB, 256 KiB and 2 MiB (measured)."""

Bytes2D = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]


class CheckedCopy:
    """See the module. One worker's memory, uint8 [num_blocks, block_bytes], and one slab's frames,
    uint8 [num_frames, stride_bytes]."""

    def __init__(self, own: Bytes2D, frames: Bytes2D) -> None:
        self._own = own
        self._frames = frames
        self._block_bytes = own.shape[1]
        self._flat = own.data.cast("B")
        # Equal strides: neighbouring frames and blocks can be copied as one array.
        can_merge = frames.shape[1] == self._block_bytes
        self._piece_blocks = max(1, PIECE_BYTES // self._block_bytes) if can_merge else 1

    def put(self, frames: Ids, blocks: Ids) -> list[int]:
        """Copy `blocks` into `frames`. Returns: checksums of the blocks, in order, read before the
        copy of the same piece."""
        checksums: list[int] = []
        for frame, block, num in self._pieces(frames, blocks):
            if self._block_bytes > PIECE_BYTES:
                checksums.append(self._put_large(frame, block))
                continue
            checksums += self._checksums(block, num)
            to = self._frames[frame : frame + num, : self._block_bytes]
            np.copyto(to, self._own[block : block + num])
        return checksums

    def get(self, blocks: Ids, frames: Ids) -> list[int]:
        """Copy `frames` into `blocks`. Returns: checksums of the blocks, in order, read after the
        copy of the same piece."""
        checksums: list[int] = []
        for frame, block, num in self._pieces(frames, blocks):
            if self._block_bytes > PIECE_BYTES:
                checksums.append(self._get_large(block, frame))
                continue
            source = self._frames[frame : frame + num, : self._block_bytes]
            np.copyto(self._own[block : block + num], source)
            checksums += self._checksums(block, num)
        return checksums

    # -- inside

    def _pieces(self, frames: Ids, blocks: Ids) -> Iterator[tuple[int, int, int]]:
        """(frame, block, how many) that continue one another on both sides."""
        if not len(frames):
            return
        breaks = np.flatnonzero((np.diff(frames) != 1) | (np.diff(blocks) != 1)) + 1
        edges = [0, *breaks.tolist(), len(frames)]
        for start, end in pairwise(edges):
            frame, block = int(frames[start]), int(blocks[start])
            for at in range(0, end - start, self._piece_blocks):
                yield frame + at, block + at, min(self._piece_blocks, end - start - at)

    def _checksums(self, block: int, num: int) -> list[int]:
        size, flat = self._block_bytes, self._flat
        first = block * size
        return [
            block_hash.checksum(flat[at : at + size])
            for at in range(first, first + num * size, size)
        ]

    def _put_large(self, frame: int, block: int) -> int:
        running = block_hash.RunningChecksum()
        source, target = self._own[block], self._frames[frame]
        for at in range(0, self._block_bytes, PIECE_BYTES):
            end = min(at + PIECE_BYTES, self._block_bytes)
            running.update(source[at:end])
            np.copyto(target[at:end], source[at:end])
        return running.value

    def _get_large(self, block: int, frame: int) -> int:
        running = block_hash.RunningChecksum()
        source, target = self._frames[frame], self._own[block]
        for at in range(0, self._block_bytes, PIECE_BYTES):
            end = min(at + PIECE_BYTES, self._block_bytes)
            np.copyto(target[at:end], source[at:end])
            running.update(target[at:end])
        return running.value
