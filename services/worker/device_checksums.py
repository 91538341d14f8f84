"""CudaChecksums: checksums of KV blocks, computed in the GPU's memory, so that KV transports can
compare them without a copy of the blocks to the host.

`begin` launches a batch and returns a `Pending` that waits for the result. For some batch sizes the
launch is a captured CUDA graph: separate launches from Python would take as long as the work itself
and hold the interpreter's lock.

ChecksumBatches schedules the batches, in order, over a fixed number of slots; it works with any
device. When all slots are in use, `begin` first reads the results of the oldest batch. So callers
may begin any number of batches before they read a result, and no caller waits for a slot that it
holds itself. Invariant: a slot is free, or belongs to one batch whose results have not been read.
Any thread.
"""

from __future__ import annotations

import bisect
import contextlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from baton_kernels.block_checksums import block_checksums, room

from engine.decoder.graph_set import GraphMemory, GraphSet
from kvstore import block_hash
from kvstore.errors import TransferFailed
from kvstore.transport.device import DeviceMark
from process.rpc_errors import FailedPrecondition

STALL_S = 10.0
"""Seconds after which a device that has not computed one batch counts as failed."""

_SPINS = 30
_NAP_S = 20e-6


class Slot(Protocol):
    """A buffer pair that carries one batch to the device and its checksums back. Raises:
    RuntimeError when the device failed."""

    def start(self, block_ids: Sequence[int], after: DeviceMark | None) -> None:
        """Start the computation on the device, after all work that was started before in any slot,
        and after `after`."""

    def is_over(self) -> bool:
        """Return whether the last started batch has finished."""

    def values(self, count: int) -> list[int]:
        """Return the first `count` checksums of the finished batch."""


S = TypeVar("S", bound=Slot)


@dataclass(eq=False)
class _Part(Generic[S]):
    """One batch of a `Pending`; `values` is set once its slot was given up."""

    slot: S | None
    count: int
    values: Sequence[int] = ()


class ChecksumBatches(Generic[S]):
    """Scheduler of checksum batches over a fixed number of slots.

    Args:
        batch_size: blocks that a slot holds.
        name: name of the device, for error messages.
    """

    def __init__(
        self, slots: Sequence[S], batch_size: int, name: str, stall_s: float = STALL_S
    ) -> None:
        self._free = list(slots)
        self._batch_size = batch_size
        self._name = name
        self._stall_s = stall_s
        self._busy: deque[_Part[S]] = deque()  # in the device's order
        self._turn = threading.Lock()
        self._failed = False

    def begin(self, block_ids: Sequence[int], after: DeviceMark | None = None) -> Pending[S]:
        """Begin to checksum blocks as they lie on the device now, or after `after`; all batches
        that begin later wait for that, too. Raises: TransferFailed."""
        parts: list[_Part[S]] = []
        for start in range(0, len(block_ids), self._batch_size):
            with self._turn:
                parts.append(self._start(block_ids[start : start + self._batch_size], after))
        return Pending(self, parts)

    def take(self, part: _Part[S]) -> Sequence[int]:
        """Wait for a batch and return its checksums. Raises: TransferFailed."""
        self._wait(part)  # without the lock: others begin meanwhile
        with self._turn:
            if part.slot is not None:
                self._free.append(self._land(part))
        return part.values

    def _start(self, block_ids: Sequence[int], after: DeviceMark | None) -> _Part[S]:
        if self._failed:
            raise TransferFailed(f"checksums on {self._name}: it did not answer before")
        slot = self._free.pop() if self._free else self._land(self._busy[0])
        part = _Part(slot, len(block_ids))
        self._busy.append(part)
        try:
            slot.start(block_ids, after)
        except RuntimeError as error:
            raise self._failure(error) from error
        except TransferFailed as error:  # the mark's: the slot was never started
            self._failed = True
            raise error
        return part

    def _land(self, part: _Part[S]) -> S:
        """Read the checksums out of a batch's slot, which becomes the caller's. `_turn` is held."""
        self._wait(part)
        slot = part.slot
        if slot is None:
            raise TransferFailed(f"checksums on {self._name}: a batch was taken out twice")
        part.values = slot.values(part.count)
        part.slot = None
        self._busy.remove(part)
        return slot

    def _wait(self, part: _Part[S]) -> None:
        """Wait until a batch has finished or another thread has read its checksums. Raises:
        TransferFailed."""
        num_spins, ends_s = 0, 0.0
        try:
            while (slot := part.slot) is not None and not slot.is_over():
                num_spins += 1
                if num_spins < _SPINS:
                    continue
                ends_s = ends_s or time.monotonic() + self._stall_s
                if time.monotonic() > ends_s:
                    raise self._failure("no answer in time")
                time.sleep(_NAP_S)
        except RuntimeError as error:
            raise self._failure(error) from error

    def _failure(self, why: RuntimeError | str) -> TransferFailed:
        self._failed = True
        line = str(why).partition("\n")[0]
        return TransferFailed(f"checksums on {self._name}: {line}")


class Pending(Generic[S]):
    """Checksums that the device is computing; one that is no longer needed can simply be
    dropped."""

    def __init__(self, owner: ChecksumBatches[S], parts: list[_Part[S]]) -> None:
        self._owner = owner
        self._parts = parts

    def result(self) -> list[int]:
        """Return the checksum of each block, in order; blocks the thread until they are computed.
        Raises: TransferFailed."""
        return [value for part in self._parts for value in self._owner.take(part)]


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


class CudaChecksums:
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
