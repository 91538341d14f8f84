"""CudaIpcTransport (`cuda_ipc`): reads KV blocks out of another worker's GPU memory on the same
host, mapped by CUDA IPC, by copies between the GPUs: over NVLink where there is one. For readers
that the lender trusts; the lender moves no byte.

A mapping lets its reader into the whole cache, so a lender gives one only where its setting
`lend_mapped` allows it, after the handshake, to its own host. It is unmapped when the transport
closes; until then the memory stays, also should its owner die.

How a copy is verified. The reader's device computes checksums over what arrived, while the copies
run, of each piece after its copy. And the lender must have lent each block, at the generation that
the handle names, until its last byte was here. Generations only grow, and a lent block does not
change. So a block that is lent after the copy as it was before was never anything else in between,
and neither was one that the lender holds until then. One call of the lender (Hold) says both:

- After a short copy the lender is asked, for no hold, which blocks are stale then.
- While a long copy runs (`ask_early_bytes`: it takes as long as an answer) the lender is asked for
  a hold; after it only where the hold was not given or ended too early.
- The lender is not asked about blocks that it holds already, and long enough
  (`GetItems.held_until_s`).

A lender that is gone answers for no block, and neither does one that was restarted.

A copy goes in pieces (copy_pipeline.py); deadline and cancellation as in `DeviceShmTransport`. Only
reads: a lender takes no bytes. One asyncio loop; copies are queued and waited for on threads. But
the first pieces are queued at once where they are few copies (`max_copies_at_once`) and a queue of
the device is free: that takes 0.1 ms (0.3 where the driver has no batches), and a thread takes
twice as long to begin.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstore import wire
from kvstore.block_source import StoreInfo
from kvstore.errors import GENERATION, MISSING, LeaseLapsed
from kvstore.store_connection import StoreConnection
from kvstore.transport.base import (
    CUDA_IPC,
    BlockMemory,
    Generations,
    GetItems,
    GetResult,
    Ids,
    PutItem,
    UnsettledTransfers,
)
from kvstore.transport.copy_pipeline import CopyPipeline, Flight, IsStopped, Unsettled, run_copy
from kvstore.transport.device import Copies, CopyQueue, Device, DeviceMark, PendingChecksums, Shared
from process.deadline import Deadline
from process.rpc_errors import BatonError, FailedPrecondition
from protos import kvstore_pb2

Breaks = npt.NDArray[np.bool_]


class CudaIpcTransport:
    """The transport `cuda_ipc`: reads a lender's blocks by copies out of its GPU memory, mapped
    into this process. The text at the top of this file says how the copies are verified."""

    name = CUDA_IPC
    counts_own_reads = True

    def __init__(
        self,
        memory: BlockMemory,
        device: Device,
        connection: StoreConnection,
        store: StoreInfo,
        shared: Shared,
        address: int,
    ) -> None:
        """Args: shared: the lender's memory. address: where it is mapped; the transport unmaps it
        when it closes."""
        self._memory = memory
        self._device = device
        self._connection = connection
        self._store = store
        self._shared = shared
        self._address = address
        self._copies = device.peer_copies
        sizes = (self._copies.piece_bytes, self._copies.least_piece_bytes)
        self._pipeline = CopyPipeline(
            device, *(max(1, size // memory.block_bytes) for size in sizes)
        )
        self._unsettled = UnsettledTransfers()

    @classmethod
    async def connect(
        cls, memory: BlockMemory, connection: StoreConnection, store: StoreInfo
    ) -> CudaIpcTransport:
        """Map the lender's cache and make the transport. Raises: FailedPrecondition when that
        cannot be done here."""
        device, shared = memory.device, store.shared
        if device is None:
            raise FailedPrecondition(
                "transport cuda_ipc: this worker's cache lies in host memory; set "
                "direct_transport to nixl or grpc"
            )
        if shared is None:
            raise FailedPrecondition("transport cuda_ipc: the lender gave nothing to map")
        mapping = asyncio.ensure_future(asyncio.to_thread(_map, device, shared))
        try:
            address = await asyncio.shield(mapping)
        except asyncio.CancelledError:
            mapping.add_done_callback(lambda done: _unmap_late(done, device, shared))
            raise
        return cls(memory, device, connection, store, shared, address)

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        """Refuse: a lender takes no bytes. Raises: FailedPrecondition."""
        raise FailedPrecondition("transport cuda_ipc: a lender takes no bytes")

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """Copy lent blocks into the worker's blocks, as Transport.get. A block that the lender does
        not vouch for until its last byte came is in `failed`."""
        frames, blocks, generations = items.columns()
        held_until_s, here_s = items.held_until_s, math.inf
        stale: set[int] = set()
        exists = frames < self._store.num_frames
        wanted = np.flatnonzero(exists)
        failed: dict[int, str] = {}
        if len(wanted) < len(frames):
            failed = dict.fromkeys(np.flatnonzero(~exists).tolist(), MISSING)
            frames, blocks, generations = frames[wanted], blocks[wanted], generations[wanted]
        if len(wanted) == 0:
            return GetResult(0, failed)
        self._connection.check()
        loop, is_here = asyncio.get_running_loop(), asyncio.Event()

        def is_held() -> bool:
            """The lender has said that they are what they were, and stay it until they are here."""
            return here_s < held_until_s

        def here() -> None:
            nonlocal here_s
            here_s = time.monotonic()
            if not is_held():  # else this loop is not woken for that
                loop.call_soon_threadsafe(is_here.set)

        is_break = _breaks(frames, blocks)

        def queue_piece(queue: CopyQueue, part: slice) -> None:
            edges = np.flatnonzero(is_break[part.start : part.stop - 1])
            queue.between(self._copies_between(edges, frames[part], blocks[part]))

        flight = Flight(self._pipeline, len(frames), queue_piece)

        def copy(is_stopped: IsStopped) -> list[int]:
            return self._copy_in(flight, blocks, is_stopped, here)

        async def vouch() -> None:
            nonlocal held_until_s
            if time.monotonic() >= held_until_s and self._asks_early(len(frames)):
                until_s, gone = await self._hold_early(lease_id, frames, generations, deadline)
                stale.update(gone)
                # Never earlier than before: `here` wakes this task only where nothing is held.
                held_until_s = max(held_until_s, until_s)
            await is_here.wait()  # this task is cancelled when the copy is over without it
            left = np.delete(np.arange(len(frames)), list(stale))
            if len(left) and not is_held():
                _, gone = await self._hold(lease_id, frames[left], generations[left], 0.0, deadline)
                stale.update(left[list(gone)].tolist())

        vouching = asyncio.create_task(vouch())
        vouching.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            num_early = self._num_early_pieces(is_break)
            begin = partial(flight.begin_early, num_pieces=num_early)
            checksums = await run_copy(copy, deadline, begin)
            if not is_held():
                await vouching
        except Unsettled as error:
            self._unsettled.add(error.settled)
            raise error.with_quarantine(blocks.tolist()) from error
        finally:
            vouching.cancel()
        found = dict(zip(wanted.tolist(), checksums, strict=True))
        for at in stale:
            index = int(wanted[at])
            failed[index] = GENERATION
            del found[index]
        return GetResult(len(found) * self._memory.block_bytes, failed, found)

    async def close(self) -> None:
        """Wait until no copy is under way, then unmap the lender's memory."""
        await self._unsettled.wait()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._pipeline.close()
        self._device.unmap_shared(self._shared, self._address)

    def _copy_in(
        self, flight: Flight, blocks: Ids, is_stopped: IsStopped, on_here: Callable[[], object]
    ) -> list[int]:
        """On the executor's thread: the end of a flight. Each piece's checksums follow it on the
        device: queueing that work takes as long as a piece, and would delay the result after the
        last one.

        Args: on_here: called when the last byte has come.
        """
        hasher = self._memory.device_checksums
        pending: list[PendingChecksums] = []

        def on_queued(part: slice, mark: DeviceMark) -> None:
            if hasher is not None:
                pending.append(hasher.begin(blocks[part].tolist(), mark))

        flight.finish(is_stopped, on_queued=on_queued)
        on_here()
        if hasher is None:
            return self._memory.checksums(blocks.tolist())
        return [checksum for part in pending for checksum in part.result()]

    def _asks_early(self, num_blocks: int) -> bool:
        return num_blocks * self._memory.block_bytes >= self._copies.ask_early_bytes

    async def _hold_early(
        self, lease_id: str, frames: Ids, generations: Generations, deadline: Deadline
    ) -> tuple[float, set[int]]:
        """`_hold` for as long as a copy may take. Where it fails nothing is held, and they are
        asked about when they are here. Raises: LeaseLapsed."""
        try:
            return await self._hold(lease_id, frames, generations, self._copies.hold_s, deadline)
        except LeaseLapsed:
            raise
        except BatonError:
            return 0.0, set()

    async def _hold(
        self,
        lease_id: str,
        frames: Ids,
        generations: Generations,
        ttl_s: float,
        deadline: Deadline,
    ) -> tuple[float, set[int]]:
        """Have the lender hold these blocks for `ttl_s`.

        Returns: until when they are held, on this process' monotonic clock, 0: they are not; and
            the indices of those that are not lent at their generation any more.
        Raises: LeaseLapsed, Unavailable, DeadlineExceeded.
        """
        request = kvstore_pb2.HoldRequest(
            attachment_id=self._store.attachment_id,
            lease_id=lease_id,
            frames=frames.tolist(),
            generations=generations.tolist(),
            ttl_ms=int(ttl_s * 1000),
        )
        asked_s = time.monotonic()
        reply = await self._connection.call(self._connection.stub.Hold, request, deadline)
        with self._connection.checking_reply():
            held_s, stale = wire.read_hold(reply, request)
        return asked_s + held_s if held_s else 0.0, stale

    def _num_early_pieces(self, is_break: Breaks) -> int:
        """Leading pieces that are `max_copies_at_once` copies at most, as far as may be under
        way."""
        num_items, end, num_pieces = len(is_break) + 1, 0, 0
        while end < num_items:
            end = self._pipeline.piece_end(end, num_items)
            num_copies = np.count_nonzero(is_break[: end - 1]) + 1
            if end > self._pipeline.most_items or num_copies > self._copies.max_copies_at_once:
                break
            num_pieces += 1
        return num_pieces

    def _copies_between(self, edges: Ids, frames: Ids, blocks: Ids) -> Copies:
        """The copies of a piece; neighbours that continue one another on both sides are one.

        Args:
            edges: the last items of all copies but the last.
        """
        num_bytes = self._memory.block_bytes
        copies: Copies = np.empty((len(edges) + 1, 3), dtype=np.uint64)
        copies[0] = blocks[0], frames[0], len(frames)
        if len(edges):
            starts = edges + 1
            copies[1:, 0], copies[1:, 1] = blocks[starts], frames[starts]
            copies[1:, 2] = len(frames) - starts
            copies[:-1, 2] -= copies[1:, 2]
        copies *= np.uint64(num_bytes)
        copies[:, 0] += np.uint64(self._memory.address)
        copies[:, 1] += np.uint64(self._address)
        return copies


def _breaks(frames: Ids, blocks: Ids) -> Breaks:
    """Whether another copy begins with a block, for each block but the first."""
    is_break: Breaks = (np.diff(frames) != 1) | (np.diff(blocks) != 1)
    return is_break


def _map(device: Device, shared: Shared) -> int:
    try:
        return device.map_shared(shared)
    except FailedPrecondition as error:
        raise FailedPrecondition(
            f"transport cuda_ipc: the lender's cache cannot be mapped here ({error}): both devices "
            "must be of this host and reach each other; set direct_transport to nixl or grpc"
        ) from error


def _unmap_late(done: asyncio.Future[int], device: Device, shared: Shared) -> None:
    """Unmap what an attempt mapped whose caller has left."""
    if not done.cancelled() and done.exception() is None:
        done.get_loop().run_in_executor(None, device.unmap_shared, shared, done.result())
