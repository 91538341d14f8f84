"""GrpcTransport (`grpc`): KV blocks travel as chunks in gRPC messages; in both directions the store
copies them.

The explicit choice where neither shared memory nor NIXL can be had: about 0.8 GB/s and 1 ms of CPU
per MiB on each side (measured). Nothing is one-sided: when a call is over, nothing moves any more,
so there is never a quarantine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import grpc.aio
import numpy as np

from kvstore import block_hash, wire
from kvstore.block_source import StoreInfo
from kvstore.errors import GENERATION, TRANSPORT, TransferFailed
from kvstore.store_connection import StoreConnection
from kvstore.transport.base import BlockMemory, GetItems, GetResult, PutItem, Transport
from kvstore.transport.copy_pipeline import IsStopped, Unsettled, raise_if_stopped, run_copy
from kvstore.transport.device import PinnedStaging
from process import trace_spans
from process.deadline import Deadline
from protos import kvstore_pb2

CHUNK_BYTES = 1024 * 1024
"""Bytes of a block in one gRPC message: the best of 64 KiB to 4 MiB in both directions
(measured)."""


class GrpcTransport:
    """The transport `grpc` for blocks in host memory."""

    name = "grpc"
    counts_own_reads = False

    def __init__(self, memory: BlockMemory, connection: StoreConnection, store: StoreInfo) -> None:
        self._memory = memory
        self._connection = connection
        self._attachment_id = store.attachment_id

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        """Send blocks to the store in chunks of one stream, as Transport.put. Checksums are
        computed on the way."""
        checksums: list[int] = []
        if items:
            chunks = self._chunks(lease_id, items, checksums)
            await self._connection.call(self._connection.stub.Write, chunks, deadline)
        if len(checksums) < len(items):
            raise TransferFailed("the store did not wait for all blocks")
        return checksums

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """Receive blocks from the store or lender in chunks of one stream, as Transport.get."""
        if not items:
            return GetResult(0)
        self._connection.check()
        request = kvstore_pb2.ReadRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id,
            blocks=[wire.block_to_proto(ref) for ref, _ in items],
            chunk_bytes=CHUNK_BYTES,
        )
        received = [_Received(block_id) for block_id in items.block_ids]
        failed: dict[int, str] = {}
        call = self._connection.stub.Read(
            request, timeout=deadline.left_s(), metadata=trace_spans.current_span().headers
        )
        try:
            with self._connection.closing_is_unavailable():
                async for chunk in call:
                    if chunk is None:  # what gRPC makes of a message that is none
                        call.cancel()
                        raise TransferFailed("a message came that cannot be read")
                    if chunk.index >= len(received):
                        call.cancel()
                        raise TransferFailed("the store sent a block that was not asked for")
                    if chunk.stale:
                        failed[chunk.index] = GENERATION
                    elif not self._take(chunk, received):
                        failed[chunk.index] = TRANSPORT
        except grpc.aio.AioRpcError as error:
            raise self._connection.translate(error) from error
        except asyncio.CancelledError:
            call.cancel()
            raise
        for index, block in enumerate(received):
            if block.num_bytes != self._memory.block_bytes:
                failed.setdefault(index, TRANSPORT)
        checksums = {
            index: block.running.value
            for index, block in enumerate(received)
            if index not in failed
        }
        return GetResult(len(checksums) * self._memory.block_bytes, failed, checksums)

    async def close(self) -> None:
        """Do nothing: the connection is not the transport's."""

    async def _chunks(
        self, lease_id: str, items: Sequence[PutItem], checksums: list[int]
    ) -> AsyncIterator[kvstore_pb2.WriteChunk]:
        """The blocks in pieces. `checksums` gets each block's when its last piece is made: a piece
        that was just hashed is copied out of the cache."""
        for item in items:
            block = self._memory.view[item.block_id]
            running = block_hash.RunningChecksum()
            for offset in range(0, self._memory.block_bytes, CHUNK_BYTES):
                piece = block[offset : offset + CHUNK_BYTES]
                running.update(piece)
                if offset + CHUNK_BYTES >= self._memory.block_bytes:
                    checksums.append(running.value)
                yield kvstore_pb2.WriteChunk(
                    attachment_id=self._attachment_id,
                    lease_id=lease_id,
                    frame=item.frame,
                    generation=item.generation,
                    offset=offset,
                    data=piece.tobytes(),
                )

    def _take(self, chunk: kvstore_pb2.ReadChunk, received: list[_Received]) -> bool:
        """Copy one chunk where it belongs, and hash it there. Returns: False when it is not the one
        expected next."""
        block = received[chunk.index]
        data = np.frombuffer(chunk.data, dtype=np.uint8)
        end = chunk.offset + len(data)
        if end > self._memory.block_bytes or chunk.offset != block.num_bytes:
            return False
        target = self._memory.view[block.block_id, chunk.offset : end]
        np.copyto(target, data)
        block.running.update(target)
        block.num_bytes = end
        return True


class _Received:
    """The part of one block that has come. block_id: of the worker, where it goes."""

    __slots__ = ("block_id", "num_bytes", "running")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.num_bytes = 0
        self.running = block_hash.RunningChecksum()


class StagedTransport:
    """Blocks on a device, for a transport that moves host memory: through page-locked rows of this
    process, a batch of rows at a time.

    Only for transports without one-sided writes (grpc): when a call of the inner one is over,
    nothing moves into the rows any more. Checksums are the inner transport's, over the rows. Puts
    take turns, and so do gets: each direction has one set of rows. One asyncio loop.
    """

    def __init__(
        self,
        memory: BlockMemory,
        outgoing: PinnedStaging,
        incoming: PinnedStaging,
        make_inner: Callable[[BlockMemory], Transport],
    ) -> None:
        self._block_bytes = memory.block_bytes
        self._outgoing, self._incoming = outgoing, incoming
        self._put_inner = make_inner(BlockMemory.of(outgoing.rows))
        self._get_inner = make_inner(BlockMemory.of(incoming.rows))
        self._put_turn, self._get_turn = _Turn(), _Turn()

    @classmethod
    async def over(
        cls, memory: BlockMemory, make_inner: Callable[[BlockMemory], Transport]
    ) -> StagedTransport:
        """Make a transport for the device's blocks in `memory`, through page-locked rows of host
        memory, which are taken here. make_inner: makes the transport of such host memory.

        Raises: FailedPrecondition when the device cannot use host memory of this process.
        """
        device = memory.device
        if device is None:
            raise TypeError("the blocks lie in host memory: no staging")
        shape = (device, memory.address, memory.block_bytes, memory.num_blocks)
        stagings = PinnedStaging(*shape), PinnedStaging(*shape)
        await asyncio.to_thread(lambda: [staging.rows for staging in stagings])
        return cls(memory, *stagings, make_inner)

    @property
    def name(self) -> str:
        """The name of the inner transport."""
        return self._put_inner.name

    @property
    def counts_own_reads(self) -> bool:
        """Whether the owner of the frames cannot see the bytes that `get` copies: as for the inner
        transport."""
        return self._get_inner.counts_own_reads

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        """Copy blocks from the device into the rows, a batch at a time, and put them through the
        inner transport."""
        staging = self._outgoing
        checksums: list[int] = []
        await self._put_turn.take(deadline)
        settled: asyncio.Future[None] | None = None
        try:
            for start in range(0, len(items), staging.num_rows):
                batch = items[start : start + staging.num_rows]

                def fetch(is_stopped: IsStopped, batch: Sequence[PutItem] = batch) -> None:
                    raise_if_stopped(is_stopped)
                    staging.fetch([item.block_id for item in batch])

                await run_copy(fetch, deadline)
                rows = [PutItem(row, item.frame, item.generation) for row, item in enumerate(batch)]
                checksums += await self._put_inner.put(lease_id, rows, deadline)
        except Unsettled as error:
            # The device writes into our rows, not into frames: nothing to quarantine at the store.
            settled = error.settled
            raise error.cause from error
        finally:
            self._put_turn.end(settled)
        return checksums

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """Get blocks through the inner transport into the rows, a batch at a time, and copy them to
        the device. Raises: as Transport.get."""
        failed: dict[int, str] = {}
        checksums: dict[int, int] = {}
        await self._get_turn.take(deadline)
        settled: asyncio.Future[None] | None = None
        try:
            for start in range(0, len(items), self._incoming.num_rows):
                batch = items[start : start + self._incoming.num_rows]
                await self._get_batch(lease_id, start, batch, deadline, failed, checksums)
        except Unsettled as error:
            settled = error.settled
            raise error.with_quarantine(items.block_ids) from error
        finally:
            self._get_turn.end(settled)
        return GetResult(len(checksums) * self._block_bytes, failed, checksums)

    async def close(self) -> None:
        """Wait for the calls under way, then close the inner transport and free the rows."""
        for turn in (self._put_turn, self._get_turn):
            await turn.quiet()
        await self._put_inner.close()
        await self._get_inner.close()
        for staging in (self._outgoing, self._incoming):
            await asyncio.to_thread(staging.close)

    async def _get_batch(
        self,
        lease_id: str,
        start: int,
        batch: GetItems,
        deadline: Deadline,
        failed: dict[int, str],
        checksums: dict[int, int],
    ) -> None:
        staging = self._incoming
        rows = GetItems([(ref, row) for row, (ref, _) in enumerate(batch)])
        got = await self._get_inner.get(lease_id, rows, deadline)
        failed |= {start + row: why for row, why in got.failed.items()}
        came = [row for row in range(len(batch)) if row not in got.failed]
        block_ids = batch.block_ids

        def store(is_stopped: IsStopped) -> None:
            raise_if_stopped(is_stopped)
            staging.store(came, [block_ids[row] for row in came])

        if came:
            await run_copy(store, deadline)
            checksums |= {start + row: got.checksums[row] for row in came}


class _Turn:
    """The turns of callers at one set of rows. One asyncio loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def take(self, deadline: Deadline) -> None:
        """Wait for the turn. Raises: DeadlineExceeded."""
        async with deadline.timeout("copy: waiting for its turn"):
            await self._lock.acquire()

    def end(self, settled: asyncio.Future[None] | None) -> None:
        """Let the next one in; not before the device is done with the rows."""
        if settled is None:
            self._lock.release()
        else:
            settled.add_done_callback(lambda _: self._lock.release())

    async def quiet(self) -> None:
        """Wait until they are not in use; they may not be used from then on."""
        await self._lock.acquire()
