"""Checksums of blocks in a GPU's memory, computed there: what kvstore's transports compare, without
a copy to the host. On a stream of its own, beside the engine's kernels and whatever is copied.

`begin` gives the device its work and returns; the `Pending` that it gives waits for it. Any thread.
Knows no store.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import numpy as np
import torch
from baton_kernels.block_checksums import block_checksums, room

from kvstore import block_hash
from process.errors import FailedPrecondition
from services.worker.checksum_batches import ChecksumBatches, Pending

MAX_ROOM_BYTES = 64 * 1024 * 1024
"""Device memory for the sums of one batch: blocks of 2 MiB take 128 KiB each."""

NUM_SLOTS = 8
"""Batches that may be under way at once; who wants one more waits for the oldest."""


class DeviceChecksums:
    """See the module. Compiles the kernels, and compares what they say with the host.

    Args:
        cache: [num_blocks, ...] on CUDA.
    Raises: FailedPrecondition where they differ.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        blocks = cache.view(cache.shape[0], -1)
        num_bytes = blocks.shape[1] * cache.element_size()
        batch = max(1, min(cache.shape[0], MAX_ROOM_BYTES // (8 * room(1, num_bytes))))
        sums = torch.empty(room(batch, num_bytes), dtype=torch.int64, device=cache.device)
        stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        slots = [_Slot(blocks, sums, stream, batch) for _ in range(NUM_SLOTS)]
        self._batches = ChecksumBatches(slots, batch, str(cache.device))
        check_kernels(num_bytes, cache.device)
        torch.cuda.synchronize(cache.device)
        self.begin([0]).result()

    def begin(self, block_ids: Sequence[int]) -> Pending[_Slot]:
        """Start with blocks as they lie on the device now. Raises: TransferFailed."""
        return self._batches.begin(block_ids)


def check_kernels(num_bytes: int, device: torch.device) -> None:
    """Two blocks of random bytes: the device must say of them what the host says, or every block
    that crosses between them would be called spoiled.

    Raises: FailedPrecondition.
    """
    blocks = torch.randint(0, 256, (2, num_bytes), dtype=torch.uint8, device=device)
    ids = torch.tensor([1, 0], dtype=torch.int32, device=device)
    # Kernels are launched on the current device, not on that of their tensors.
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        found = [number % 2**64 for number in block_checksums(blocks, ids).tolist()]
    expected = [block_hash.checksum(row) for row in blocks.cpu().numpy()[::-1]]
    if found != expected:
        raise FailedPrecondition(
            f"checksums of blocks on {device} are not those of the host: this worker's kernels "
            "cannot be trusted there; set engine.device to another, or store_address to ''"
        )


class _Slot:
    """What one batch brings to the device and back, pinned and there. `sums` and the stream are all
    slots': the stream's order keeps them apart."""

    def __init__(
        self, blocks: torch.Tensor, sums: torch.Tensor, stream: torch.cuda.Stream, size: int
    ) -> None:
        self._blocks, self._sums, self._stream = blocks, sums, stream
        self._ids = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self._out = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self._device_ids = torch.empty(size, dtype=torch.int32, device=blocks.device)
        self._device_out = torch.empty(size, dtype=torch.int64, device=blocks.device)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def start(self, block_ids: Sequence[int]) -> None:
        """See Slot."""
        count = len(block_ids)
        self._ids.numpy()[:count] = block_ids
        ids, out = self._device_ids[:count], self._device_out[:count]
        with torch.cuda.device(self._blocks.device), torch.cuda.stream(self._stream):
            ids.copy_(self._ids[:count], non_blocking=True)
            block_checksums(self._blocks, ids, out=out, sums=self._sums)
            self._out[:count].copy_(out, non_blocking=True)
            self._done.record()

    def is_over(self) -> bool:
        """See Slot."""
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def values(self, count: int) -> list[int]:
        """See Slot."""
        found: list[int] = self._out[:count].numpy().view(np.uint64).tolist()
        return found
