"""What a transport of block bytes is, seen from a worker: put own blocks into reserved frames, get
frames into own blocks.

A transport moves bytes and nothing else: leases, commits and checksums are the client's. It is
chosen by name in the worker's settings and never falls back to another. One instance per (worker,
store), used on one asyncio loop.

Contract, held by every implementation (tests/conformance/test_transport.py):
- bytes are pushed: nobody reads another process's memory over a network;
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstore.block import Block
from process.deadline import Deadline

Bytes2D = npt.NDArray[np.uint8]

TRANSPORTS = ("shm", "nixl", "grpc")


@dataclass(frozen=True)
class BlockMemory:
    """A worker's device cache as the transports see it.

    view: uint8 [num_blocks, block_bytes], C-contiguous, writable host memory that outlives every
    client made over it. address: of view[0, 0] in this process.
    """

    view: Bytes2D
    address: int
    block_bytes: int
    num_blocks: int

    @classmethod
    def of(cls, view: Bytes2D) -> BlockMemory:
        """Describe a uint8 [num_blocks, block_bytes] array. Raises: ValueError for any other shape,
        type or order."""
        if view.ndim != 2 or view.dtype != np.uint8 or not view.flags.c_contiguous:
            raise ValueError("view: expected a C-contiguous uint8 array [num_blocks, block_bytes]")
        if not view.flags.writeable:
            raise ValueError("view: must be writable")
        num_blocks, block_bytes = view.shape
        return cls(view, int(view.ctypes.data), int(block_bytes), int(num_blocks))


@dataclass(frozen=True, slots=True)
class PutItem:
    """Write block `block_id` of the worker into `frame`, reserved at (odd) `generation`."""

    block_id: int
    frame: int
    generation: int


@dataclass(frozen=True, slots=True)
class GetItem:
    """Copy the committed block `ref` into block `block_id` of the worker."""

    ref: Block
    block_id: int


@dataclass(frozen=True)
class GetResult:
    """num_bytes: bytes that came and may be used. failed: index into the items -> reason
    (kvstore.errors.REASONS)."""

    num_bytes: int
    failed: dict[int, str] = field(default_factory=dict)


class PutUnsettled(Exception):
    """A put ended early (`cause`) while its bytes may still land in the reserved frames, until
    `settled` is done."""

    def __init__(self, cause: BaseException, settled: asyncio.Future[None]) -> None:
        super().__init__(str(cause))
        self.cause = cause
        self.settled = settled


class Transport(Protocol):
    """Worker side of one way to move block bytes; see the module."""

    @property
    def name(self) -> str:
        """shm, nixl or grpc: what provenance and metrics say."""

    @property
    def counts_own_reads(self) -> bool:
        """True when the store cannot see the bytes that `get` copies, so that the client must tell
        it."""

    async def put(self, lease_id: str, items: Sequence[PutItem], deadline: Deadline) -> None:
        """Write blocks into reserved frames. They must not change until this is over.

        Raises: LeaseLapsed, DeadlineExceeded, Unavailable, TransferFailed; PutUnsettled as the
            module says.
        """

    async def get(self, lease_id: str, items: Sequence[GetItem], deadline: Deadline) -> GetResult:
        """Copy committed blocks into the worker's blocks. Checksums are not looked at here.

        Raises: LeaseLapsed, DeadlineExceeded, Unavailable, TransferFailed; TransferTimeout,
            TransferCancelled.
        """

    async def close(self) -> None:
        """Let everything go; waits a bounded time for transfers that are under way."""
