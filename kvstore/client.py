"""A worker's view of one KV store: control over gRPC, bytes over the transport that was asked for.

Life: `attach` -> match, put_blocks, get_blocks, renew, release ... -> `close`. When the store is
away or another life answers, the client is `broken` for good: its owner attaches again. Nothing
here retries, and no transport is replaced by another.

What is verified here and nowhere else: the checksum of every block that came, over the receiver's
own memory. What is guaranteed: a put that fails, is late or is cancelled leaves no reservation
behind, and blocks that a transfer may still write into are named by the error
(`kvstore.errors.quarantine_of`).

One asyncio loop; copies and checksums run in the loop's default executor.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore import block_hash, wire
from kvstore.block import Block
from kvstore.errors import (
    CHECKSUM,
    DEADLINE,
    GENERATION,
    INCARNATION,
    LEASE_LAPSED,
    STORE_UNAVAILABLE,
    TRANSPORT,
    LeaseLapsed,
    TransferFailed,
    TransferTimeout,
)
from kvstore.nixl_agent import NixlAgent
from kvstore.rpc import Attached, StoreRpc
from kvstore.transport.base import (
    TRANSPORTS,
    BlockMemory,
    GetItem,
    GetResult,
    PutItem,
    PutUnsettled,
    Transport,
)
from kvstore.transport.grpc_chunks import GrpcTransport
from kvstore.transport.nixl import NixlTransport, region_of
from kvstore.transport.shm import ShmTransport
from process import logs
from process.deadline import Deadline
from process.errors import BatonError, DeadlineExceeded, Unavailable
from protos import kvstore_pb2

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
"""A twelfth of the store's default attachment_ttl_s."""
_HEARTBEAT_TIMEOUT_S = 5.0
_RESERVE_TIMEOUT_S = 10.0  # of the call itself; the caller waits for its own deadline only
_ABORT_TIMEOUT_S = 2.0
_CLOSE_S = 2.0


@dataclass(frozen=True)
class Matched:
    """The longest prefix present, in order. lease_id is empty when nothing was pinned."""

    blocks: tuple[Block, ...]
    lease_id: str


@dataclass(frozen=True)
class PutResult:
    """refs: of blocks[: len(refs)]; the rest had no room. tail: None if none was asked for or there
    was no room. num_bytes: written by this call (blocks that were there already cost none).
    not_stored: blocks and tail that had no room."""

    lease_id: str
    refs: tuple[Block, ...]
    tail: Block | None
    num_bytes: int
    not_stored: int


@dataclass(frozen=True)
class _Wanted:
    """One frame to write: which block, how many filled slots."""

    block_id: int
    num_tokens: int
    frame: int
    generation: int


class StoreClient:
    """See the module. Made by `attach`."""

    def __init__(
        self, rpc: StoreRpc, attached: Attached, memory: BlockMemory, transport: Transport
    ) -> None:
        self.address = rpc.address
        self.node_id = attached.node_id
        self.incarnation = attached.incarnation
        self.frame_bytes = attached.frame_bytes
        self.num_frames = attached.num_frames
        self.transport_name = transport.name
        self._rpc = rpc
        self._attachment_id = attached.attachment_id
        self._memory = memory
        self._transport = transport
        self._num_bytes_untold = 0
        self._background: set[asyncio.Task[Any]] = set()
        self._heartbeat = asyncio.create_task(self._beat())
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def attach(
        cls,
        address: str,
        *,
        worker_id: str,
        worker_incarnation: bytes,
        fingerprint: str,
        memory: BlockMemory,
        transport: str,
        timeout_s: float,
        nixl_net_devices: str = "lo",
    ) -> StoreClient:
        """Introduce this life of a worker to the store.

        Args: fingerprint: hex. transport: shm, nixl or grpc, and no other is tried.
        Raises: FailedPrecondition (another layout; the transport cannot be used here), Unavailable,
            NoCapacity (the store has no room for a slab), DeadlineExceeded.
        """
        if transport not in TRANSPORTS:
            raise ValueError(f"transport: one of {', '.join(TRANSPORTS)}, got {transport!r}")
        deadline = Deadline.after(timeout_s)
        rpc = StoreRpc(address)
        agent: NixlAgent | None = None
        attached: Attached | None = None
        request = kvstore_pb2.AttachRequest(
            worker_id=worker_id,
            worker_incarnation=worker_incarnation,
            model_fingerprint=bytes.fromhex(fingerprint),
            block_bytes=memory.block_bytes,
            transport=transport,
        )
        try:
            async with deadline.timeout(f"attaching to store {address}"):
                if transport == "nixl":
                    name = f"worker-{secrets.token_hex(16)}"
                    agent = await NixlAgent.start(name, nixl_net_devices, deadline)
                    await _describe_region(request, agent, memory)
                attached = Attached.of(await rpc.call(rpc.stub.Attach, request, deadline))
                connected = await _connect(transport, memory, rpc, agent, attached)
            return cls(rpc, attached, memory, connected)
        except BaseException:
            if agent is not None:
                await agent.close(Deadline.after(_CLOSE_S))
            if attached is not None:
                await _detach(rpc, attached.attachment_id)
            await rpc.close()
            raise

    @property
    def broken(self) -> str | None:
        """Why this client is of no use any more (attach again); None while it is."""
        return self._rpc.broken

    # -- control

    async def match(
        self,
        chain_hashes: Sequence[bytes],
        *,
        lease_id: str | None = None,
        pin: bool = True,
        ttl_s: float,
        deadline: Deadline,
    ) -> Matched:
        """The longest prefix of the chain that the store holds; pinned under `lease_id`, or under a
        new lease if that is None, for `ttl_s`.

        Raises: LeaseLapsed, Unavailable, DeadlineExceeded.
        """
        request = kvstore_pb2.MatchRequest(
            attachment_id=self._attachment_id,
            chain_hashes=chain_hashes,
            pin=pin,
            lease_id=lease_id or "",
            ttl_ms=wire.ttl_ms(ttl_s),
        )
        reply = await self._rpc.call(self._rpc.stub.Match, request, deadline)
        return Matched(tuple(wire.blocks_from_proto(reply.blocks)), reply.lease_id)

    async def pin(
        self, blocks: Sequence[Block], *, ttl_s: float, deadline: Deadline
    ) -> tuple[str, int]:
        """Pin the longest prefix of `blocks` that still holds. Returns: the new lease's id (empty
        when nothing holds) and how many blocks it pins."""
        request = kvstore_pb2.PinRequest(
            attachment_id=self._attachment_id,
            blocks=[wire.block_to_proto(block) for block in blocks],
            ttl_ms=wire.ttl_ms(ttl_s),
        )
        reply = await self._rpc.call(self._rpc.stub.Pin, request, deadline)
        return reply.lease_id, reply.num_pinned

    async def renew(self, lease_id: str, *, ttl_s: float, deadline: Deadline) -> None:
        """Let the lease live at least `ttl_s` from now. Raises: LeaseLapsed."""
        await self._renew(lease_id, ttl_s, deadline)

    async def release(self, lease_ids: Sequence[str], *, deadline: Deadline) -> int:
        """End leases; empty ids and leases that are over are passed over. Returns: how many
        ended."""
        request = kvstore_pb2.ReleaseRequest(
            lease_ids=[lease_id for lease_id in lease_ids if lease_id]
        )
        reply = await self._tell(self._rpc.stub.Release, request, deadline)
        return int(reply.num_released)

    async def status(
        self, *, check_integrity: bool = False, deadline: Deadline
    ) -> kvstore_pb2.GetStatusReply:
        """The store's own account of itself."""
        request = kvstore_pb2.GetStatusRequest(check_integrity=check_integrity)
        reply: kvstore_pb2.GetStatusReply = await self._rpc.call(
            self._rpc.stub.GetStatus, request, deadline
        )
        return reply

    # -- blocks

    async def put_blocks(
        self,
        lease_id: str | None,
        parent: bytes,
        blocks: Sequence[tuple[bytes, int]],
        tail: tuple[str, int, int] | None,
        ttl_s: float,
        deadline: Deadline,
        *,
        num_tokens: int,
    ) -> PutResult:
        """Store consecutive blocks of one prompt, and perhaps its tail, under one lease.

        Args:
            lease_id: adds to this lease; None makes one, which the caller releases or hands on.
            parent: chain hash before blocks[0]; empty at the start of a prompt.
            blocks: (chain hash, block id) in order. They must not change until this returns.
            tail: (name, block id, filled slots) of the unfilled last block; None: there is none.
            num_tokens: slots of a full block.
        Raises: LeaseLapsed; FailedPrecondition when the parent is not there; Unavailable;
            DeadlineExceeded; TransferFailed. Nothing of this call stays reserved then.
        """
        request = kvstore_pb2.ReserveRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id or "",
            ttl_ms=wire.ttl_ms(ttl_s),
            parent=parent,
            chain_hashes=[chain_hash for chain_hash, _ in blocks],
            tail_name=tail[0] if tail else "",
        )
        owns_lease = not lease_id
        reply = await self._reserve(request, owns_lease, deadline)
        wanted, answers = _wanted(reply, blocks, tail, num_tokens)
        try:
            committed = await self._write(reply.lease_id, wanted, deadline)
        except BaseException as error:
            cause, settled = error, None
            if isinstance(error, PutUnsettled):
                cause, settled = error.cause, error.settled
            self._spawn(self._undo(reply.lease_id, wanted, settled, owns_lease))
            raise cause from (None if cause is error else error)
        refs = [_ref(answer, committed) for answer in answers]
        stored = tuple(ref for ref in refs[: len(blocks)] if ref is not None)
        tail_ref = refs[-1] if tail else None
        return PutResult(
            lease_id=reply.lease_id,
            refs=stored,
            tail=tail_ref,
            num_bytes=len(wanted) * self.frame_bytes,
            not_stored=len(answers) - len(stored) - (tail_ref is not None),
        )

    async def get_blocks(
        self,
        lease_id: str,
        items: Sequence[tuple[Block, int]],
        deadline: Deadline,
        *,
        incarnation: bytes | None = None,
    ) -> GetResult:
        """Copy blocks out of the store and verify each: generation before and after, checksum.

        Args: items: (ref, block id to copy into). incarnation: of the store that the refs are from,
            when they came from somebody else.
        Returns: what arrived and, by index, why something must not be used. A store that fails is a
            reason, too, not an exception.
        Raises: TransferTimeout, TransferCancelled: the blocks named by their `quarantine` must not
            be used until it is settled.
        """
        if incarnation is not None and incarnation != self.incarnation:
            return GetResult(0, dict.fromkeys(range(len(items)), INCARNATION))
        if deadline.expired:
            return GetResult(0, dict.fromkeys(range(len(items)), DEADLINE))
        wanted = [GetItem(ref, block_id) for ref, block_id in items]
        try:
            got = await self._transport.get(lease_id, wanted, deadline)
        except TransferTimeout:
            raise
        except BatonError as error:
            return GetResult(0, dict.fromkeys(range(len(items)), _reason(error)))
        if self._transport.counts_own_reads:
            self._num_bytes_untold += got.num_bytes
        failed = await self._explain(lease_id, got.failed, deadline)
        failed |= await self._verify(wanted, failed)
        return GetResult((len(items) - len(failed)) * self.frame_bytes, failed)

    async def close(self) -> None:
        """Say goodbye. Waits a bounded time; what a stalled transfer still needs (its agent, this
        connection) stays until that transfer is over."""
        self._heartbeat.cancel()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            _closing.add(self._closing)
            self._closing.add_done_callback(_closing.discard)
        await asyncio.wait([self._closing], timeout=_CLOSE_S)

    # -- inside

    async def _reserve(
        self, request: kvstore_pb2.ReserveRequest, owns_lease: bool, deadline: Deadline
    ) -> kvstore_pb2.ReserveReply:
        """Reserve. A caller that leaves early leaves nothing behind: the call goes on by itself,
        and what it reserved is given back."""
        self._rpc.check()
        if deadline.expired:
            raise DeadlineExceeded("put: no time is left")
        call = self._spawn(
            self._rpc.call(self._rpc.stub.Reserve, request, Deadline.after(_RESERVE_TIMEOUT_S))
        )
        try:
            await asyncio.wait([call], timeout=deadline.left_s())
        except asyncio.CancelledError:
            self._spawn(self._undo_reserve(call, owns_lease))
            raise
        if not call.done():
            self._spawn(self._undo_reserve(call, owns_lease))
            raise DeadlineExceeded("reserve: the time for it ran out")
        reply: kvstore_pb2.ReserveReply = call.result()
        return reply

    async def _undo_reserve(
        self, call: asyncio.Task[kvstore_pb2.ReserveReply], owns_lease: bool
    ) -> None:
        try:
            reply = await call
        except BatonError as error:
            if isinstance(error, DeadlineExceeded):
                # Nobody knows what was reserved; a new attachment lets the store clean up.
                self._rpc.mark_broken("the store did not answer a reservation")
            return
        wanted, _ = _wanted(reply, (), None, 0)
        await self._undo(reply.lease_id, wanted, None, owns_lease)

    async def _write(
        self, lease_id: str, wanted: Sequence[_Wanted], deadline: Deadline
    ) -> dict[int, Block]:
        """Bytes and checksums, then the commit. Returns: reserved frame -> the block as it
        stands."""
        if not wanted:
            return {}
        items = [PutItem(each.block_id, each.frame, each.generation) for each in wanted]
        block_ids = [each.block_id for each in wanted]
        loop = asyncio.get_running_loop()
        hashing = loop.run_in_executor(None, self._checksums, block_ids)
        await self._transport.put(lease_id, items, deadline)
        checksums = await hashing
        request = kvstore_pb2.CommitRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id,
            blocks=[
                kvstore_pb2.CommitBlock(
                    frame=each.frame,
                    generation=each.generation,
                    checksum=checksum,
                    num_tokens=each.num_tokens,
                )
                for each, checksum in zip(wanted, checksums, strict=True)
            ],
        )
        reply = await self._rpc.call(self._rpc.stub.Commit, request, deadline)
        blocks = wire.blocks_from_proto(reply.blocks)
        return {each.frame: block for each, block in zip(wanted, blocks, strict=True)}

    async def _undo(
        self,
        lease_id: str,
        wanted: Sequence[_Wanted],
        settled: asyncio.Future[None] | None,
        owns_lease: bool,
    ) -> None:
        """Give frames back after a failed put; those still being written first go out of use."""
        if settled is not None:
            await self._abort(lease_id, wanted, quarantine=True)
            await asyncio.wait([settled])
        await self._abort(lease_id, wanted, quarantine=False)
        if owns_lease and not self.broken:
            try:
                await self.release([lease_id], deadline=Deadline.after(_ABORT_TIMEOUT_S))
            except BatonError:
                return  # it lapses by itself

    async def _abort(self, lease_id: str, wanted: Sequence[_Wanted], *, quarantine: bool) -> None:
        """Until the store has heard it, or the attachment is over and the store knows by that."""
        request = kvstore_pb2.AbortRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id,
            quarantine=quarantine,
            blocks=[
                kvstore_pb2.CommitBlock(frame=each.frame, generation=each.generation)
                for each in wanted
            ],
        )
        while wanted and not self.broken:
            try:
                await self._rpc.call(
                    self._rpc.stub.Abort, request, Deadline.after(_ABORT_TIMEOUT_S)
                )
                return
            except DeadlineExceeded:
                await asyncio.sleep(_ABORT_TIMEOUT_S)
            except BatonError:
                return

    async def _renew(self, lease_id: str, ttl_s: float, deadline: Deadline) -> None:
        request = kvstore_pb2.RenewRequest(lease_id=lease_id, ttl_ms=wire.ttl_ms(ttl_s))
        await self._tell(self._rpc.stub.Renew, request, deadline)

    async def _tell(
        self,
        method: Callable[..., Any],
        request: kvstore_pb2.RenewRequest | kvstore_pb2.ReleaseRequest,
        deadline: Deadline,
    ) -> Any:
        """A call that also tells the store, once, how much was copied without it."""
        request.num_bytes_read, self._num_bytes_untold = self._num_bytes_untold, 0
        try:
            return await self._rpc.call(method, request, deadline)
        except LeaseLapsed:
            raise  # it was heard all the same
        except (BatonError, asyncio.CancelledError):
            self._num_bytes_untold += request.num_bytes_read
            raise

    async def _explain(
        self, lease_id: str, failed: dict[int, str], deadline: Deadline
    ) -> dict[int, str]:
        """A generation that did not hold means that the lease had lapsed, if it has: ask."""
        if GENERATION not in failed.values() or not lease_id:
            return dict(failed)
        try:
            await self._renew(lease_id, 0.0, deadline)
        except LeaseLapsed:
            return {i: LEASE_LAPSED if r == GENERATION else r for i, r in failed.items()}
        except BatonError:
            return dict(failed)  # the first reason stands
        return dict(failed)

    async def _verify(self, wanted: Sequence[GetItem], failed: dict[int, str]) -> dict[int, str]:
        """Checksums of what arrived, over the worker's own memory."""
        arrived = [index for index in range(len(wanted)) if index not in failed]
        block_ids = [wanted[index].block_id for index in arrived]
        checksums = await asyncio.to_thread(self._checksums, block_ids)
        return {
            index: CHECKSUM
            for index, checksum in zip(arrived, checksums, strict=True)
            if checksum != wanted[index].ref.checksum
        }

    def _checksums(self, block_ids: Sequence[int]) -> list[int]:
        view = self._memory.view
        return [block_hash.checksum(view[block_id]) for block_id in block_ids]

    async def _beat(self) -> None:
        """Tell the store that this worker lives, and learn whether the store does."""
        request = kvstore_pb2.MatchRequest(attachment_id=self._attachment_id)
        while not self.broken:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                reply = await self._rpc.call(
                    self._rpc.stub.Match, request, Deadline.after(_HEARTBEAT_TIMEOUT_S)
                )
            except BatonError as error:
                self._rpc.mark_broken(f"no heartbeat: {error}")
            else:
                if reply.incarnation != self.incarnation:
                    self._rpc.mark_broken("another life of the store answers")

    def _spawn(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        """Work that outlives its caller; its errors are seen by whoever awaits it, or by nobody."""

        async def run() -> Any:
            return await work

        task = asyncio.create_task(run())
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def _close(self) -> None:
        await asyncio.wait([self._heartbeat])
        while self._background:
            await asyncio.wait(self._background)
        await self._transport.close()
        await _detach(self._rpc, self._attachment_id)
        await self._rpc.close()


_closing: set[asyncio.Task[None]] = set()  # keeps what outlives its client from being collected


async def _detach(rpc: StoreRpc, attachment_id: str) -> None:
    """Tell the store, if it listens; otherwise it notices by itself."""
    if rpc.broken:
        return
    request = kvstore_pb2.DetachRequest(attachment_id=attachment_id)
    try:
        await rpc.call(rpc.stub.Detach, request, Deadline.after(_CLOSE_S))
    except BatonError as error:
        logs.event(logger, "detach_failed", level=logging.DEBUG, why=str(error))


async def _describe_region(
    request: kvstore_pb2.AttachRequest, agent: NixlAgent, memory: BlockMemory
) -> None:
    region = region_of(memory)
    request.nixl_agent = agent.name
    request.nixl_metadata = await agent.register(region)
    request.region_address = region.address
    request.region_num_blocks = memory.num_blocks
    request.region_device_id = region.device_id
    request.region_memory = region.memory


async def _connect(
    transport: str,
    memory: BlockMemory,
    rpc: StoreRpc,
    agent: NixlAgent | None,
    attached: Attached,
) -> Transport:
    if transport == "shm":
        return await ShmTransport.connect(memory, attached)
    if agent is not None:
        return await NixlTransport.connect(memory, rpc, agent, attached)
    return GrpcTransport(memory, rpc, attached)


def _wanted(
    reply: kvstore_pb2.ReserveReply,
    blocks: Sequence[tuple[bytes, int]],
    tail: tuple[str, int, int] | None,
    num_tokens: int,
) -> tuple[list[_Wanted], list[kvstore_pb2.ReservedBlock]]:
    """What is to be written, and all answers in order (the tail's last, if one was asked for)."""
    answers = list(reply.blocks)
    sources = [(block_id, num_tokens) for _, block_id in blocks]
    if reply.HasField("tail"):
        answers.append(reply.tail)
        sources.append((tail[1], tail[2]) if tail else (0, 0))
    if len(sources) < len(answers):
        sources = [(0, 0)] * len(answers)  # only the frames matter: they are given back
    reserved = [
        _Wanted(block_id, filled, answer.block.frame, answer.block.generation)
        for answer, (block_id, filled) in zip(answers, sources, strict=True)
        if answer.state == kvstore_pb2.RESERVE_STATE_RESERVED
    ]
    return reserved, answers


def _ref(answer: kvstore_pb2.ReservedBlock, committed: dict[int, Block]) -> Block | None:
    """Where a block lies after the put; None when there was no room for it."""
    if answer.state == kvstore_pb2.RESERVE_STATE_PRESENT:
        return wire.block_from_proto(answer.block)
    if answer.state == kvstore_pb2.RESERVE_STATE_RESERVED:
        return committed[answer.block.frame]
    return None


def _reason(error: BatonError) -> str:
    if isinstance(error, LeaseLapsed):
        return LEASE_LAPSED
    if isinstance(error, DeadlineExceeded):
        return DEADLINE
    if isinstance(error, Unavailable):
        return STORE_UNAVAILABLE
    if isinstance(error, TransferFailed):
        return TRANSPORT
    return TRANSPORT
