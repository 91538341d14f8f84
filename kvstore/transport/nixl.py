"""NixlTransport (`nixl`): one-sided writes (RDMA) by NIXL. The worker WRITEs its KV blocks into
reserved frames; the store WRITEs frames into the worker's blocks when asked (Push). NIXL's READ is
not used: a reader that dies can take down the process that it reads from.

A transfer outlives its deadline. A push that was not answered in time may still write into the
worker's blocks, so they go into a `Quarantine` until the store says that the push is terminal (or
is dead); a put that was not over in time may still write into the store's frames: `PutUnsettled`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Sequence

from kvstore import wire
from kvstore.block_source import StoreInfo
from kvstore.errors import (
    GENERATION,
    Quarantine,
    TransferCancelled,
    TransferFailed,
    TransferTimeout,
)
from kvstore.slab import SlabLayout
from kvstore.store_connection import StoreConnection
from kvstore.transport.base import (
    BlockMemory,
    GetItems,
    GetResult,
    PutItem,
    PutUnsettled,
    UnsettledTransfers,
)
from kvstore.transport.nixl_agent import NixlAgent, Region, merge_runs
from process.deadline import Deadline
from process.rpc_errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
)
from protos import kvstore_pb2

SETTLE_AT_ONCE_S = 0.05
"""Time within which a transfer must be over, after its waiter left, to need no quarantine. A guess:
ten times what one piece takes."""
HASH_THREADS = min(4, os.cpu_count() or 1)
"""Threads that compute checksums of what a push brought. It lies in memory, not in a cache of this
core: one thread hashes 14 to 25 GB/s of it, four 60 to 80 (measured)."""
HASH_PART_BYTES = 4 * 1024 * 1024
"""Least bytes that are worth another thread's turn: 0.2 ms of one thread."""
_ANSWER_MARGIN_S = 0.02  # the store answers "not over yet" so long before our own deadline
_POLL_S, _POLL_MAX_S, _POLL_TIMEOUT_S = 0.002, 0.5, 1.0
_CLOSE_AGENT_S = 5.0


class NixlTransport:
    """The transport `nixl`: a worker's blocks are written into frames, and frames into its blocks,
    by one-sided writes of two NIXL agents."""

    name = "nixl"
    counts_own_reads = False

    def __init__(
        self,
        memory: BlockMemory,
        connection: StoreConnection,
        agent: NixlAgent,
        peer: str,
        store: StoreInfo,
    ) -> None:
        self._memory = memory
        self._connection = connection
        self._agent = agent
        self._peer = peer
        self._store = store
        self._layout = SlabLayout(store.frame_bytes, store.num_frames)
        self._own = region_of(memory)
        self._frames = Region(
            store.region_address, self._layout.num_frames * self._layout.stride_bytes
        )
        self._unsettled = UnsettledTransfers()

    @classmethod
    async def connect(
        cls, memory: BlockMemory, connection: StoreConnection, agent: NixlAgent, store: StoreInfo
    ) -> NixlTransport:
        """Make the store's agent known to the worker's. agent: with `memory` registered; the
        transport closes it."""
        peer = await agent.add_peer(store.nixl_metadata)
        return cls(memory, connection, agent, peer, store)

    async def put(
        self, lease_id: str, items: Sequence[PutItem], deadline: Deadline
    ) -> Sequence[int]:
        """WRITE blocks into reserved frames, as Transport.put. Raises: PutUnsettled when bytes may
        still land in the frames."""
        if not items:
            return []
        block_ids = [item.block_id for item in items]
        runs = merge_runs(
            (
                (
                    self._own.address + item.block_id * self._memory.block_bytes,
                    self._frames.address + item.frame * self._layout.stride_bytes,
                )
                for item in items
            ),
            self._memory.block_bytes,
        )
        transfer = self._agent.write(
            self._peer, runs, deadline, local=self._own, remote=self._frames
        )
        hashing: asyncio.Future[list[int]] | None = None
        if self._memory.device is None:  # a device's bus is the transfer's own while it lasts
            hashing = self._hash(block_ids)
        cause: BaseException | None
        try:
            cause = await asyncio.shield(transfer.done)
        except asyncio.CancelledError as cancelled:
            transfer.abandon()
            cause = cancelled
        if cause is None:
            return await (hashing or self._hash(block_ids))
        if isinstance(cause, TransferFailed):
            # The agents have lost each other; only a new attachment brings them together again.
            self._connection.mark_broken(f"NIXL transfer failed: {cause}")
        cause = await _settling(transfer.settled, cause)
        if transfer.settled.done():
            raise cause
        self._unsettled.add(transfer.settled)
        raise PutUnsettled(cause, transfer.settled) from cause

    async def get(self, lease_id: str, items: GetItems, deadline: Deadline) -> GetResult:
        """Have the store or lender push blocks into the worker's own, as Transport.get."""
        if not items:
            return GetResult(0)
        block_ids = items.block_ids
        push_id = secrets.token_hex(16)
        budget_s = max(0.001, deadline.left_s() - _ANSWER_MARGIN_S)
        request = kvstore_pb2.PushRequest(
            attachment_id=self._store.attachment_id,
            lease_id=lease_id,
            blocks=[wire.block_to_proto(ref) for ref, _ in items],
            destinations=block_ids,
            budget_ms=wire.ttl_ms(budget_s),
            push_id=push_id,
        )
        request.checksum = wire.checksum_of(request)
        self._connection.check()
        try:
            reply = await self._connection.call(self._connection.stub.Push, request, deadline)
            with self._connection.checking_reply():
                wire.check_pushed(reply, request, self._memory.block_bytes)
        except (BatonError, asyncio.CancelledError) as error:
            # Whatever came back, or nothing: the push may be under way. A refusal, too, may be an
            # answer that was spoiled; but as a rule it is one, and then what it says is the reason.
            is_refusal = isinstance(error, NotFound | FailedPrecondition | InvalidArgument)
            patience_s = SETTLE_AT_ONCE_S
            if is_refusal:
                patience_s = max(patience_s, min(deadline.left_s(), _POLL_TIMEOUT_S))
            raise await self._give_up(push_id, block_ids, error, patience_s) from None
        if not reply.terminal:
            late = DeadlineExceeded("push: the time for it ran out")
            raise await self._give_up(push_id, block_ids, late)
        failed = {index: GENERATION for index in reply.stale}
        came = [index for index in range(len(items)) if index not in failed]
        checksums = await self._hash_all([block_ids[index] for index in came])
        num_bytes = len(came) * self._memory.block_bytes
        return GetResult(num_bytes, failed, dict(zip(came, checksums, strict=True)))

    async def close(self) -> None:
        """Wait until no transfer is under way, then end the agent."""
        await self._unsettled.wait()
        await self._agent.remove_peer(self._peer)
        await self._agent.close(Deadline.after(_CLOSE_AGENT_S))

    async def _give_up(
        self,
        push_id: str,
        block_ids: Sequence[int],
        error: BaseException,
        patience_s: float = SETTLE_AT_ONCE_S,
    ) -> BaseException:
        """Wait up to `patience_s` for the end of a push that failed or is late. Returns: the error
        to raise, `error` or a cancellation that came meanwhile. Raises: TransferTimeout or
        TransferCancelled with a quarantine when the push is not over by then."""
        settled = asyncio.ensure_future(self._settle(push_id))
        self._unsettled.add(settled)
        error = await _settling(settled, error, patience_s)
        if settled.done():
            return error
        quarantine = Quarantine(tuple(block_ids), settled)
        message = f"push {push_id} may still write: {error}"
        if isinstance(error, asyncio.CancelledError):
            raise TransferCancelled(message, quarantine) from error
        raise TransferTimeout(message, quarantine) from error

    async def _settle(self, push_id: str) -> None:
        """Ask until the push is terminal, or the store's process known to be dead."""
        request = kvstore_pb2.GetPushRequest(push_id=push_id)
        pause_s = _POLL_S
        while True:
            try:
                reply = await self._connection.call(
                    self._connection.stub.GetPush,
                    request,
                    Deadline.after(_POLL_TIMEOUT_S),
                    even_if_broken=True,
                )
                if reply.terminal:
                    return
            except BatonError:
                if await self._agent.is_gone(self._peer):
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)

    def _hash(self, block_ids: Sequence[int]) -> asyncio.Future[list[int]]:
        """Checksums over the worker's memory, on a thread."""
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(None, self._memory.checksums, block_ids)

    async def _hash_all(self, block_ids: Sequence[int]) -> list[int]:
        """Compute checksums as `_hash`, with nothing else under way: by several threads where that
        pays."""
        part = max(len(block_ids), 1)
        if self._memory.device is None:
            least = max(1, HASH_PART_BYTES // self._memory.block_bytes)
            part = max(least, -(-part // HASH_THREADS))
        parts = [block_ids[at : at + part] for at in range(0, len(block_ids), part)]
        return [each for some in await asyncio.gather(*map(self._hash, parts)) for each in some]


def region_of(memory: BlockMemory) -> Region:
    """Describe the worker's whole cache as one region to register with NIXL."""
    num_bytes = memory.num_blocks * memory.block_bytes
    if memory.device is None:
        return Region(memory.address, num_bytes)
    return Region(memory.address, num_bytes, memory.device.memory, memory.device.device_id)


async def _settling(
    settled: asyncio.Future[None], cause: BaseException, patience_s: float = SETTLE_AT_ONCE_S
) -> BaseException:
    """Wait for `settled`, `patience_s` at most. Returns: `cause`; if that is no cancellation and
    the wait was cancelled, the cancellation: the caller is gone.
    """
    try:
        await asyncio.wait([settled], timeout=patience_s)
    except asyncio.CancelledError as cancelled:
        return cause if isinstance(cause, asyncio.CancelledError) else cancelled
    return cause
