"""Checksums of blocks computed in a GPU's memory, for kvstore's transports to compare without a
copy to the host.

`begin` starts the device's work and returns a `Pending` that waits for the result. A batch is
one launch, captured as a CUDA graph for some sizes: four launches from Python take as long as the
work itself, with the interpreter's lock held, while others wait for both. Any thread. Knows no
store.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from baton_kernels.block_checksums import block_checksums, room

from engine.decoder.graph_set import GraphMemory, GraphSet
from kvstore import block_hash
from kvstore.transport.device import DeviceMark
from process.errors import FailedPrecondition
from services.worker.checksum_batches import ChecksumBatches, Pending

MAX_ROOM_BYTES = 64 * 1024 * 1024
"""Most bytes of device memory for the sums of one batch; a block of 2 MiB takes 128 KiB."""

NUM_SLOTS = 8
"""Number of batches that may run at once; another one waits for the oldest."""


_STEP, _GROWTH = 16, 1.25
"""Largest distance between two captured batch sizes; a batch is padded to the next captured
size."""


def captured_sizes(batch_size: int) -> list[int]:
    """Return the batch sizes to capture as CUDA graphs, ascending up to `batch_size`."""
    sizes: list[int] = []
    size = _STEP
    while size < batch_size:
        sizes.append(size)
        size = -(-int(size * _GROWTH) // _STEP) * _STEP
        size = max(size, sizes[-1] + _STEP)
    return [*sizes, batch_size]


class DeviceChecksums:
    """Checksums of a KV cache's blocks on CUDA, compared with the host's at creation.

    Args:
        cache: [num_blocks, ...] on CUDA.
    Raises: FailedPrecondition where they differ.
    """

    def __init__(self, cache: torch.Tensor) -> None:
        blocks = cache.view(cache.shape[0], -1)
        num_bytes = blocks.shape[1] * cache.element_size()
        batch = max(1, min(cache.shape[0], MAX_ROOM_BYTES // (8 * room(1, num_bytes))))
        sums = torch.empty(room(batch, num_bytes), dtype=torch.int64, device=cache.device)
        with torch.cuda.device(cache.device):
            stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
            sizes = captured_sizes(batch)
            slots = [_Slot(at, blocks, sums, stream, sizes) for at in range(NUM_SLOTS)]
            check_kernels(num_bytes, cache.device)
            memory = GraphMemory()
            # Kernels keep the priority of the stream that they were captured on: an engine's go
            # before these.
            memory.stream = stream
            graphs = _graphs_of(slots)
            graphs.capture(((slot.number, size) for slot in slots for size in sizes), memory=memory)
            for slot in slots:
                slot.graphs = graphs
        self._batches = ChecksumBatches(slots, batch, str(cache.device))
        torch.cuda.synchronize(cache.device)
        self.begin([0]).result()

    def begin(self, block_ids: Sequence[int], after: DeviceMark | None = None) -> Pending[_Slot]:
        """Begin to checksum blocks as they lie on the device now, or after `after`. Raises:
        TransferFailed."""
        return self._batches.begin(block_ids, after)


def check_kernels(num_bytes: int, device: torch.device) -> None:
    """Compare the checksums of two blocks of random bytes on device and host: if they differed,
    every block transferred between them would be rejected. Raises: FailedPrecondition."""
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
    """Pinned and device buffers of one batch. `sums` and the stream are shared by all slots; the
    order of the stream keeps them apart."""

    def __init__(
        self,
        number: int,
        blocks: torch.Tensor,
        sums: torch.Tensor,
        stream: torch.cuda.Stream,
        sizes: Sequence[int],
    ) -> None:
        """Capture CUDA graphs of the batch sizes `sizes`, the largest last."""
        self.number = number
        self._blocks, self._sums, self._stream, self._sizes = blocks, sums, stream, sizes
        size = sizes[-1]
        self._ids = torch.zeros(size, dtype=torch.int32, pin_memory=True)
        self._out = torch.empty(size, dtype=torch.int64, pin_memory=True)
        self._device_ids = torch.zeros(size, dtype=torch.int32, device=blocks.device)
        self._device_out = torch.empty(size, dtype=torch.int64, device=blocks.device)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._wanted, self._found = self._ids.numpy(), self._out.numpy().view(np.uint64)
        self.graphs: GraphSet[tuple[int, int]]
        """Of all slots; given before the first start."""

    def start(self, block_ids: Sequence[int], after: DeviceMark | None) -> None:
        """Copy the block ids to the device and start the computation, after `after`."""
        if after is not None:
            after.before(self._stream.cuda_stream)
        count = len(block_ids)
        size = self._sizes[bisect.bisect_left(self._sizes, count)]
        self._wanted[:count] = block_ids
        self._wanted[count:size] = block_ids[0]
        with torch.cuda.stream(self._stream):
            self.graphs.run((self.number, size))
            self._done.record()

    def compute(self, size: int) -> None:
        """Enqueue the checksums of the first `size` block ids on the current stream."""
        ids, out = self._device_ids[:size], self._device_out[:size]
        ids.copy_(self._ids[:size], non_blocking=True)
        block_checksums(self._blocks, ids, out=out, sums=self._sums)
        self._out[:size].copy_(out, non_blocking=True)

    def is_over(self) -> bool:
        """Return whether the last started batch has finished."""
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def values(self, count: int) -> list[int]:
        """Return the first `count` checksums of the finished batch."""
        found: list[int] = self._found[:count].tolist()
        return found


def _graphs_of(slots: Sequence[_Slot]) -> GraphSet[tuple[int, int]]:
    """Return the CUDA graphs by slot number and size. They hold no reference to the slot, so that
    both are freed when the cache's life ends, not at the next garbage collection."""
    known = [weakref.ref(slot) for slot in slots]

    def compute(shape: tuple[int, int]) -> None:
        number, size = shape
        slot = known[number]()
        assert slot is not None, "captured while its slots are made"
        slot.compute(size)

    return GraphSet(compute, uses_graphs=True)
