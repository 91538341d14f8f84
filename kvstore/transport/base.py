"""Transport: the interface by which a worker moves the bytes of KV blocks: put its own blocks into
reserved frames of a store, get frames into its own blocks.

A transport moves bytes and nothing else: leases, commits and checksums are the client's. It is
chosen by name in the worker's settings and never falls back to another. One instance per (worker,
store), used on one asyncio loop.

The caller sees to it that no kernel that reads or writes the blocks is under way.

Contract, held by every implementation (tests/conformance/test_transport.py):
- bytes are pushed: no process reads another one's memory over a network;
- generation is checked before and after a copy out of a frame; a block whose generation did not
  hold is in `failed`;
- when `get` returns or raises anything without a `Quarantine`, nothing writes into the destinations
  any more;
- `get` raises `TransferTimeout` or `TransferCancelled` with a `Quarantine` when the transfer may
  still write;
- `put` raises `PutUnsettled` when its bytes may still land in the frames: the client then has them
  quarantined there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt

from kvstore import block_hash
from kvstore.block_refs import Block, PackedItems
from kvstore.transport.device import Device, DeviceChecksums, PinnedStaging
from process.deadline import Deadline

Bytes2D = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]
Generations = npt.NDArray[np.uint64]

TRANSPORTS = ("shm", "nixl", "grpc")
"""The transports between a worker and a store."""

CUDA_IPC = "cuda_ipc"
DIRECT_TRANSPORTS = (CUDA_IPC, "nixl", "grpc")
"""The transports out of the cache of a worker that lends."""


@dataclass(frozen=True)
class BlockMemory:
    """A worker's device cache as the transports see it: [num_blocks, block_bytes] bytes without
    gaps, which outlive every client made over them.

    host: the bytes themselves, writable, where they are host memory; else None. address: of the
    first byte, in this process or on the device. staging: the device's own, where there is one.
    device_checksums: of blocks, computed where they lie; None: they are copied to the host for it.
    """

    host: Bytes2D | None
    address: int
    block_bytes: int
    num_blocks: int
    staging: PinnedStaging | None = None
    device_checksums: DeviceChecksums | None = None

    @classmethod
    def of(cls, view: Bytes2D) -> BlockMemory:
        """Describe blocks in host memory: a uint8 [num_blocks, block_bytes] array. Raises:
        ValueError for any other shape, type or order."""
        if view.ndim != 2 or view.dtype != np.uint8 or not view.flags.c_contiguous:
            raise ValueError("view: expected a C-contiguous uint8 array [num_blocks, block_bytes]")
        if not view.flags.writeable:
            raise ValueError("view: must be writable")
        num_blocks, block_bytes = view.shape
        return cls(view, int(view.ctypes.data), int(block_bytes), int(num_blocks))

    @classmethod
    def on_device(
        cls,
        device: Device,
        address: int,
        block_bytes: int,
        num_blocks: int,
        device_checksums: DeviceChecksums | None = None,
    ) -> BlockMemory:
        """Describe blocks in a device's memory at `address`. Some host memory is taken for staging
        when that is first used."""
        staging = PinnedStaging(device, address, block_bytes, num_blocks)
        return cls(None, address, block_bytes, num_blocks, staging, device_checksums)

    @property
    def view(self) -> Bytes2D:
        """The blocks as uint8 [num_blocks, block_bytes], the memory itself. Raises: TypeError on a
        device."""
        if self.host is None:
            raise TypeError("the blocks lie on a device: they have an address, but no host view")
        return self.host

    @property
    def device(self) -> Device | None:
        """The GPU whose memory holds the blocks; None: they lie in host memory."""
        return self.staging.device if self.staging is not None else None

    def checksums(self, block_ids: Sequence[int]) -> list[int]:
        """Checksums of blocks as they lie in this memory now. Blocks its thread; any thread.

        Raises: TransferFailed when the device failed or does not answer.
        """
        if self.device_checksums is not None:
            return self.device_checksums.begin(block_ids).result()
        if self.staging is not None:
            return self.staging.checksums(block_ids)
        view = self.view
        return [block_hash.checksum(view[block_id]) for block_id in block_ids]


class PutItem(NamedTuple):
    """One block of a put: block `block_id` of the worker is written into `frame`, reserved at (odd)
    `generation`."""

    block_id: int
    frame: int
    generation: int


class GetItems(Sequence[tuple[Block, int]]):
    """The blocks of a get: committed blocks, each with the worker's block that it is copied into.
    held_until_s: until when their owner holds all of them, on this process' monotonic clock; 0: it
    does not."""

    def __init__(self, items: Sequence[tuple[Block, int]], held_until_s: float = 0.0) -> None:
        """Args: items: pairs of (ref, block id of the worker)."""
        self._items = items
        self.held_until_s = held_until_s

    @overload
    def __getitem__(self, index: int) -> tuple[Block, int]: ...
    @overload
    def __getitem__(self, index: slice) -> GetItems: ...
    def __getitem__(self, index: int | slice) -> tuple[Block, int] | GetItems:
        if isinstance(index, slice):
            return GetItems(self._items[index], self.held_until_s)
        return self._items[index]

    def __iter__(self) -> Iterator[tuple[Block, int]]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def block_ids(self) -> list[int]:
        """Ids of the worker's blocks that the items are copied into, in order."""
        if isinstance(self._items, PackedItems):
            return list(self._items.places)
        return [block_id for _, block_id in self._items]

    @property
    def checksums(self) -> list[int]:
        """The checksums that the items' references name, in order."""
        if isinstance(self._items, PackedItems):
            checksums: list[int] = self._items.blocks.checksums.tolist()
            return checksums
        return [ref.checksum for ref, _ in self._items]

    def columns(self) -> tuple[Ids, Ids, Generations]:
        """The items as three arrays, [items] each: frames, block ids, generations; without a Python
        object for each item."""
        items, count = self._items, len(self._items)
        if isinstance(items, PackedItems):
            blocks = items.blocks
            frames, generations = blocks.frames.astype(np.int64), blocks.generations
            return frames, np.array(items.places, np.int64), generations
        return (
            np.fromiter((ref.frame for ref, _ in items), np.int64, count),
            np.fromiter((block_id for _, block_id in items), np.int64, count),
            np.fromiter((ref.generation for ref, _ in items), np.uint64, count),
        )


@dataclass(frozen=True)
class GetResult:
    """The outcome of a get.

    num_bytes: bytes that came and may be used. failed: index into the items -> reason
    (kvstore.errors.REASONS). checksums: index into the items -> checksum of what came, over the
    bytes as the worker has them (a device's: as they lie in host memory); an item without one is
    bad.
    """

    num_bytes: int
    failed: dict[int, str] = field(default_factory=dict)
    checksums: Mapping[int, int] = field(default_factory=dict)


class PutUnsettled(Exception):
    """A put ended early (`cause`) while its bytes may still land in the reserved frames, until
    `settled` is done."""

    def __init__(self, cause: BaseException, settled: asyncio.Future[None]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.settled = settled


class UnsettledTransfers:
    """Transfers of one transport that may still move bytes although their callers have left."""

    def __init__(self) -> None:
        self._settled: set[asyncio.Future[None]] = set()

    def add(self, settled: asyncio.Future[None]) -> None:
        """Add a transfer. settled: done when nothing of it moves any more."""
        self._settled.add(settled)
        settled.add_done_callback(self._settled.discard)

    async def wait(self) -> None:
        """Wait until nothing moves any more, however long that takes."""
        while self._settled:
            await asyncio.wait(self._settled)


class Transport(Protocol):
    """The worker's side of one way to move the bytes of blocks between its memory and a store or
    lender. The contract at the top of this file holds for every implementation."""

    @property
    def name(self) -> str:
        """The transport's name, one of TRANSPORTS or DIRECT_TRANSPORTS, as provenance and metrics
        show it."""

    @property
    def counts_own_reads(self) -> bool:
        """Whether the owner of the frames cannot see the bytes that `get` copies, so that the
        client must tell it."""

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        """Write blocks into reserved frames. They must not change until this is over.

        Returns: the items' checksums, in order, of the bytes as the worker has them (a device's: as
            they lie in host memory): what is lost between there and the frame is found by the next
            reader of the frame.
        Raises: LeaseLapsed, DeadlineExceeded, Unavailable, TransferFailed; PutUnsettled when its
            bytes may still land in the frames.
        """

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """Copy committed blocks into the worker's blocks. Checksums are not compared here.

        Raises: LeaseLapsed, DeadlineExceeded, Unavailable, TransferFailed; TransferTimeout,
            TransferCancelled.
        """

    async def close(self) -> None:
        """Give back what the transport holds (mappings, locked memory, connections), once no
        transfer is under way. A device or a peer may never end a transfer: the caller bounds its
        wait."""
