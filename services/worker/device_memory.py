"""ShardedDevice: blocks whose bytes are spread over several devices, presented to the KV transports
as one device with whole blocks. For engines with tensor or pipeline parallelism, where each rank
keeps its own heads and layers of every block.

Whole blocks have virtual addresses, [BASE, BASE + num_blocks * block_bytes). A copy from or to them
becomes one copy for each device, on a queue of its own. Invariant: every byte of a block is on
exactly one device. Any thread.

`block_memory` makes the description of an engine's KV cache memory for the transports, on one
device or several.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from baton_kernels.block_checksums import fits

from kvstore.errors import TransferFailed
from kvstore.transport.base import CUDA_IPC, BlockMemory
from kvstore.transport.cuda_device import CudaDevice
from kvstore.transport.device import PEER_COPIES, Copies, CopyQueue, Device, DeviceMark, Shared
from process.rpc_errors import FailedPrecondition
from services.worker.device_checksums import CudaChecksums
from services.worker.engine_port import KvMemoryPort

BASE = 1 << 52
"""First virtual address, beyond what any device maps."""

_NOT_SHARED = (
    "blocks of several ranks lie on several devices: no other process can map them, nor they map "
    "another's"
)

NOWHERE = ""
"""NIXL memory type of such memory: none, since NIXL cannot address it."""


class RecordRun(NamedTuple):
    """Bytes that are contiguous in a whole block and in a part's record of it."""

    block_offset: int
    record_offset: int
    num_bytes: int


@dataclass(frozen=True)
class DevicePart:
    """One device's share of every block: block b's record begins at address + b * record_bytes."""

    device: Device
    address: int
    record_bytes: int
    runs: tuple[RecordRun, ...]


class _Piece(NamedTuple):
    run: RecordRun
    part: int


class ShardedDevice:
    """Virtual device of whole blocks over several real ones; implements
    `kvstore.transport.device.Device`.

    Args:
        parts: the engine's own device first: it provides the marks to wait for, and registers host
            memory for all.
    Raises: ValueError where parts do not make up a block.
    """

    memory = NOWHERE
    peer_copies = PEER_COPIES

    def __init__(self, parts: Sequence[DevicePart], block_bytes: int) -> None:
        self.parts = tuple(parts)
        self.block_bytes = block_bytes
        self.device_id = self.parts[0].device.device_id
        self._pieces = sorted(
            _Piece(run, number) for number, part in enumerate(self.parts) for run in part.runs
        )
        self._starts = [piece.run.block_offset for piece in self._pieces]
        end = 0
        for run, _ in self._pieces:
            if run.block_offset != end or run.num_bytes < 1:
                at = min(end, run.block_offset)
                raise ValueError(f"parts: byte {at} of a block is not on one device")
            end += run.num_bytes
        if end != block_bytes:
            raise ValueError(f"parts: {end} bytes of blocks of {block_bytes}")

    def register(self, address: int, num_bytes: int) -> None:
        """Register host memory through the engine's own device, for copies by all devices."""
        self.parts[0].device.register(address, num_bytes)

    def unregister(self, address: int) -> None:
        """Unregister host memory that was registered."""
        self.parts[0].device.unregister(address)

    def compute_mark(self) -> DeviceMark:
        """Return a mark of the kernels in progress on the engine's own device; those of other ranks
        have finished by then, since it needs their results."""
        return self.parts[0].device.compute_mark()

    def new_queue(self) -> CopyQueue:
        """Create a copy queue over all devices."""
        return _SpreadQueue(self)

    def use_in_this_thread(self) -> None:
        """Make the engine's own device current in this thread."""
        self.parts[0].device.use_in_this_thread()

    def share(self, address: int) -> Shared:
        """Refuse to share memory with other processes, since no block is contiguous."""
        raise FailedPrecondition(_NOT_SHARED)

    def map_shared(self, shared: Shared) -> int:
        """Refuse to map shared memory."""
        raise FailedPrecondition(_NOT_SHARED)

    def unmap_shared(self, shared: Shared, address: int) -> None:
        """Unmap shared memory; never called, since none is ever mapped."""

    def deal(self, copies: Copies) -> list[Copies]:
        """Split copies of whole blocks into copies between host memory and each part's device."""
        dealt: list[list[tuple[int, int, int]]] = [[] for _ in self.parts]
        for address, host, num_bytes in copies.tolist():
            at, end = address - BASE, address - BASE + num_bytes
            while at < end:
                block_id, offset = divmod(at, self.block_bytes)
                run, number = self._pieces[bisect.bisect_right(self._starts, offset) - 1]
                skipped = offset - run.block_offset
                length = min(run.num_bytes - skipped, end - at)
                part = self.parts[number]
                place = part.address + block_id * part.record_bytes + run.record_offset + skipped
                dealt[number].append((place, host, length))
                at, host = at + length, host + length
        return [np.array(rows, dtype=np.uint64).reshape(-1, 3) for rows in dealt]


class _SpreadQueue:
    """Copy queue that has one queue on each device."""

    def __init__(self, device: ShardedDevice) -> None:
        self._device = device
        self._queues = [part.device.new_queue() for part in device.parts]

    def to_host(self, copies: Copies) -> None:
        """Enqueue copies from blocks to host memory, on the device of each part."""
        for queue, own in zip(self._queues, self._device.deal(copies), strict=True):
            if len(own):
                queue.to_host(own)

    def to_device(self, copies: Copies) -> None:
        """Enqueue copies from host memory to blocks, on the device of each part."""
        for queue, own in zip(self._queues, self._device.deal(copies), strict=True):
            if len(own):
                queue.to_device(own)

    def between(self, copies: Copies) -> None:
        """Refuse copies between devices; never called, since no memory is mapped."""
        raise TransferFailed(_NOT_SHARED)

    def mark(self) -> DeviceMark:
        """Return a mark that is over when all copies enqueued so far are."""
        return _AllMarks([queue.mark() for queue in self._queues])

    def close(self) -> None:
        """Close the queues of all devices."""
        for queue in self._queues:
            queue.close()


class _AllMarks:
    """Mark that is over when the marks of all devices are."""

    def __init__(self, marks: Sequence[DeviceMark]) -> None:
        self._marks = marks

    def is_over(self) -> bool:
        """Return whether all marks are over."""
        return all(mark.is_over() for mark in self._marks)

    def wait(self) -> None:
        """Wait until all marks are over."""
        for mark in self._marks:
            mark.wait()

    def before(self, stream: int) -> None:
        """Make a stream wait for all marks."""
        for mark in self._marks:
            mark.before(stream)


def block_memory(kv: KvMemoryPort) -> BlockMemory:
    """Return the transport's view of the KV cache. Raises: FailedPrecondition for a device that has
    no transport, or whose driver is missing."""
    kind, _, number = kv.device.partition(":")
    if kind == "cpu":
        return BlockMemory.of(kv.host_view)
    if kind != "cuda":
        raise FailedPrecondition(
            f"engine.device: KV on {kv.device} cannot be moved to a store; use cpu or cuda, or "
            "leave store_address empty"
        )
    if not kv.is_whole:
        return _spread(kv)
    device = CudaDevice.open(int(number or 0))
    block_bytes = kv.layout.block_bytes
    checksums = CudaChecksums(kv.cache) if fits(block_bytes) else None
    return BlockMemory.on_device(device, kv.address, block_bytes, kv.num_blocks, checksums)


def _spread(kv: KvMemoryPort) -> BlockMemory:
    """Return a sharded view of the caches of several ranks, each with its part of every block on
    its own device."""
    if not kv.parts:
        raise FailedPrecondition(
            "engine.tensor_parallel, engine.pipeline_parallel: the other ranks' KV cannot be "
            "reached from this process (CUDA IPC; the log says why): leave store_address empty"
        )
    parts = [
        DevicePart(
            CudaDevice.open(part.device_id),
            part.address,
            part.record_bytes,
            tuple(RecordRun(*run) for run in part.runs),
        )
        for part in kv.parts
    ]
    block_bytes = kv.layout.block_bytes
    device = ShardedDevice(parts, block_bytes)
    return BlockMemory.on_device(device, BASE, block_bytes, kv.num_blocks)


def check_transports(kv: KvMemoryPort, *transports: str) -> None:
    """Check that the transport supports the cache. Raises: FailedPrecondition for NIXL and CUDA IPC
    where blocks are spread over devices, and for CUDA IPC without CUDA."""
    for name in ("nixl", CUDA_IPC):
        if not kv.is_whole and name in transports:
            raise FailedPrecondition(
                f"transport {name}: each block of several ranks lies on several devices, where it "
                "does not reach; set transport to shm or grpc, and remote_transport and "
                "direct_transport to grpc"
            )
    if CUDA_IPC in transports and kv.device.partition(":")[0] != "cuda":
        raise FailedPrecondition(
            f"direct_transport cuda_ipc: this worker's KV is on {kv.device}, and only CUDA devices "
            "can map one another's; set direct_transport to nixl or grpc"
        )


def kernel_wait(
    memory: BlockMemory | None, settle: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Return a function that waits until all kernels that the engine started have finished; it does
    nothing where no transport copies beside them.

    Args:
        settle: waits likewise for the engine's other processes.
    """
    device = memory.device if memory is not None else None
    if device is None:
        return lambda: None
    compute_mark = device.compute_mark

    def wait() -> None:
        settle()
        compute_mark().wait()  # as unbounded as a kernel: the engine itself waits like that

    return wait
