"""A worker's view of one KV store: control over gRPC, bytes over the transport that was asked for.

Life: `attach` -> match, put_blocks, get_blocks, renew, release ... -> `close`. When the store is
away or another life answers, the client is `broken` for good: its owner attaches again. Nothing
here retries, and no transport is replaced by another.

The parts: kvstore/attaching.py handshake and heartbeat, kvstore/putting.py blocks into the store,
kvstore/getting.py blocks out of it and their verification, kvstore/lease_calls.py leases,
kvstore/link_meter.py how fast it all is.

What is guaranteed: no block is used whose checksum was not compared; a put that fails, is late or
is cancelled leaves no reservation behind; blocks that a transfer may still write into are named by
the error (`kvstore.errors.quarantine_of`).

One asyncio loop; what copies much runs on threads, and checksums with it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from kvstore import answer_checks, attaching, traced, wire
from kvstore.attaching import HEARTBEAT_S, Introduction
from kvstore.block import Block
from kvstore.errors import MISSING, reason_of
from kvstore.finishing import Background
from kvstore.getting import Getter
from kvstore.lease_calls import LeaseCalls
from kvstore.lending.told import NO_WORD, Told, Word
from kvstore.link import Rates
from kvstore.link_meter import LinkMeter
from kvstore.moved import Moved
from kvstore.putting import PutResult, Putter
from kvstore.rpc import Attached, StoreRpc
from kvstore.transport.base import CUDA_IPC, BlockMemory, GetResult, Transport
from process import serving, spans
from process.access import Role
from process.deadline import Deadline
from process.errors import Unavailable
from process.serving import Dialer
from process.spans import Kind
from protos import kvstore_pb2

_CLOSE_S = 2.0


@dataclass(frozen=True)
class Matched:
    """The longest prefix present, in order. lease_id is empty when nothing was pinned. num_hits:
    how often the last of the blocks was matched before."""

    blocks: tuple[Block, ...]
    lease_id: str
    num_hits: int = 0


class StoreClient:
    """See the module. Made by `attach`."""

    def __init__(
        self,
        rpc: StoreRpc,
        attached: Attached,
        memory: BlockMemory,
        transport: Transport,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.address = rpc.address
        self.node_id = attached.node_id
        self.incarnation = attached.incarnation
        self.frame_bytes = attached.frame_bytes
        self.num_frames = attached.num_frames
        self.transport_name = transport.name
        self._rpc = rpc
        self._memory = memory
        self._attached = attached
        self._attachment_id = attached.attachment_id
        self._transport = transport
        self._background = Background()
        self._leases = LeaseCalls(rpc, attached)
        parts = (rpc, attached, transport, self._leases, self._background)
        self._putter, self._getter = Putter(*parts), Getter(*parts)
        self._meter = LinkMeter(
            attached,
            memory,
            transport,
            self._leases,
            self._putter,
            self._getter,
            self._background,
            self.match,
        )
        self._num_moving = 0
        self._still = asyncio.Event()
        self._still.set()
        self.num_uses = 0
        """Calls about blocks and leases since it was attached; heartbeats, looks and measurements
        are none."""
        self.on_moved: Callable[[Moved], None] = _unwatched
        """Told of each put and get when it is over, whatever came of it; must not raise."""
        # Of no request, though one may be why this store was met.
        self._heartbeat = asyncio.create_task(
            attaching.beat(rpc, attached, heartbeat_s), context=spans.detached()
        )
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
        dial: Dialer = serving.PLAIN,
        role: Role = Role.KVSTORE,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> StoreClient:
        """Introduce this life of a worker to the store.

        Args: fingerprint: hex. transport: shm, nixl or grpc, and no other is tried.
            dial: how to connect. role: of who answers there. heartbeat_s: between two words to it.
        Raises: FailedPrecondition (another layout; the transport cannot be used here), Unavailable,
            NoCapacity (the store has no room for a slab), DeadlineExceeded.
        """
        who = Introduction(
            worker_id, worker_incarnation, fingerprint, memory, transport, nixl_net_devices
        )
        rpc = StoreRpc(address, dial, role)
        with spans.current().child("kv_attach", spans.server_of(address), kind=Kind.CLIENT) as span:
            attached, connected = await attaching.meet(rpc, who, Deadline.after(timeout_s))
            span.set({"baton.store.node_id": attached.node_id, "baton.transport": connected.name})
        return cls(rpc, attached, memory, connected, heartbeat_s)

    @property
    def broken(self) -> str | None:
        """Why this client is of no use any more (attach again); None while it is."""
        return self._rpc.broken

    @property
    def is_busy(self) -> bool:
        """Whether somebody waits for bytes to move."""
        return self._num_moving > 0

    @property
    def num_bad_blocks(self) -> int:
        """Blocks that arrived with a wrong checksum; each was told to the store."""
        return self._getter.num_bad_blocks

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
        self.num_uses += 1
        request = kvstore_pb2.MatchRequest(
            attachment_id=self._attachment_id,
            chain_hashes=chain_hashes,
            pin=pin,
            lease_id=lease_id or "",
            ttl_ms=wire.ttl_ms(ttl_s),
        )
        with spans.current().child("kv_match", kind=Kind.CLIENT) as span:
            reply = await self._rpc.call(self._rpc.stub.Match, request, deadline)
            with self._rpc.reading():
                answer_checks.check_matched(reply, request, self.num_frames)
            blocks = tuple(wire.blocks_from_proto(reply.blocks))
            if span.is_recording:
                span.set(spans.server_of(self.address))
                span.set(traced.of_match(self.node_id, chain_hashes, blocks))
        return Matched(blocks, reply.lease_id, reply.num_hits)

    async def pin(
        self, blocks: Sequence[Block], *, ttl_s: float, deadline: Deadline
    ) -> tuple[str, int]:
        """Pin the longest prefix of `blocks` that still holds. Returns: the new lease's id (empty
        when nothing holds) and how many blocks it pins."""
        self.num_uses += 1
        request = kvstore_pb2.PinRequest(
            attachment_id=self._attachment_id,
            blocks=[wire.block_to_proto(block) for block in blocks],
            ttl_ms=wire.ttl_ms(ttl_s),
        )
        reply = await self._rpc.call(self._rpc.stub.Pin, request, deadline)
        with self._rpc.reading():
            answer_checks.check_pinned(reply, request)
        return reply.lease_id, reply.num_pinned

    async def renew(self, lease_id: str, *, ttl_s: float, deadline: Deadline) -> None:
        """Let the lease live at least `ttl_s` from now. Raises: LeaseLapsed."""
        self.num_uses += 1
        await self._leases.renew(lease_id, ttl_s, deadline)

    async def release(self, lease_ids: Sequence[str], *, deadline: Deadline) -> int:
        """End leases; empty ids and leases that are over are passed over. Returns: how many
        ended."""
        return await self._leases.release(lease_ids, deadline)

    @property
    def tells_when_lent(self) -> bool:
        """Whether `await_lent` can be asked."""
        return self._attached.tells_when_lent

    async def await_lent(
        self, lease_id: str, *, num_known: int, num_wanted: int, wait_s: float, deadline: Deadline
    ) -> tuple[Told, Word]:
        """Of a lender: what a lease lends beyond the first `num_known` blocks, as soon as it lends
        `num_wanted` in all or grows no more, after `wait_s` at the latest; also what it has not
        computed the checksums of.

        Args: num_wanted: more than `num_known`.
        Returns: they, for which nothing vouches: no block may be used that no handle names just so;
            and what may be relied on when they are copied.
        Raises: LeaseLapsed, InvalidArgument, NoCapacity, Unavailable, DeadlineExceeded.
        """
        self.num_uses += 1
        device = self._memory.device
        hold_s = 0.0
        if device is not None and self.transport_name == CUDA_IPC:
            hold_s = device.peer_copies.hold_s
        return await self._leases.await_lent(
            lease_id, num_known, num_wanted, wait_s, hold_s, deadline
        )

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
        tenant: str = "",
        puts_again: bool = False,
    ) -> PutResult:
        """Store consecutive blocks of one prompt, and perhaps its tail, under one lease.

        Args:
            lease_id: adds to this lease; None makes one, which the caller releases or hands on.
            parent: chain hash before blocks[0]; empty at the start of a prompt.
            blocks: (chain hash, block id) in order. They must not change until this returns.
            tail: (name, block id, filled slots) of the unfilled last block; None: there is none.
            num_tokens: slots of a full block.
            tenant: whose share of the store the blocks are charged to.
            puts_again: when the parent is not there, the caller puts the blocks again with it: that
                is not counted as a failure.
        Raises: LeaseLapsed; FailedPrecondition when the parent is not there; Unavailable;
            DeadlineExceeded; TransferFailed. Nothing of this call stays reserved then.
        """
        num_blocks = len(blocks) + (tail is not None)
        with self._moving(), self._watched("write", num_blocks) as seen:
            seen.puts_again = puts_again
            result = await self._putter.put(
                lease_id,
                parent,
                blocks,
                tail,
                ttl_s,
                deadline,
                num_tokens=num_tokens,
                tenant=tenant,
            )
            seen.num_bytes, seen.failed = result.num_bytes, Counter(no_room=result.not_stored)
            return result

    async def get_blocks(
        self,
        lease_id: str,
        items: Sequence[tuple[Block, int]],
        deadline: Deadline,
        *,
        incarnation: bytes | None = None,
        word: Word = NO_WORD,
    ) -> GetResult:
        """Copy blocks out of the store and verify each: generation before and after, checksum.

        Args: items: (ref, block id to copy into). incarnation: of the store that the refs are from,
            when they came from somebody else. word: of blocks that nobody but a lender has named
            (`await_lent`): of those that are not sealed the caller compares the checksums.
        Returns: what arrived and, by index, why something must not be used, and the checksums of
            items that are not sealed. A store that fails is a reason, too, not an exception.
        Raises: TransferTimeout, TransferCancelled: the blocks named by their `quarantine` must not
            be used until it is settled.
        """
        with self._moving(), self._watched("read", len(items)) as seen:
            if spans.current().is_recording:
                spans.current().set(traced.of_blocks([block for block, _ in items]))
            result = await self._getter.get(lease_id, items, deadline, incarnation, word)
            self._leases.num_bytes_untold += result.num_bytes_untold
            seen.num_bytes, seen.failed = result.num_bytes, Counter(result.failed.values())
            return result

    async def measure(self, block_ids: Sequence[int], deadline: Deadline) -> Rates:
        """How fast this client's own transport is, with blocks that are lent for it and are
        written into (kvstore/link_meter.py; `num_blocks_wanted` says how many).

        Raises: NoCapacity (no frames, no blocks), DeadlineExceeded, Unavailable, TransferFailed;
            TransferTimeout, TransferCancelled: no block may be used until it is settled.
        """
        with self._moving(is_use=False):
            return await self._meter.measure(block_ids, deadline)

    # -- the end

    async def settle(self) -> None:
        """Wait for what goes on in the background: reservations that are given back, reports of
        bad blocks. Each has its own bound."""
        await self._background.settle()

    async def close(self) -> None:
        """Say goodbye. Waits a bounded time; what a stalled transfer still needs (its agent, this
        connection) stays until that transfer is over."""
        self._heartbeat.cancel()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            _closing.add(self._closing)
            self._closing.add_done_callback(_closing.discard)
        await asyncio.wait([self._closing], timeout=_CLOSE_S)

    @contextmanager
    def _moving(self, *, is_use: bool = True) -> Iterator[None]:
        if self._closing is not None:
            raise Unavailable(f"store {self.address}: this client is closed")
        self._num_moving += 1
        self._still.clear()
        self.num_uses += is_use
        try:
            yield
        finally:
            self._num_moving -= 1
            if self._num_moving == 0:
                self._still.set()

    @contextmanager
    def _watched(self, direction: Literal["read", "write"], num_blocks: int) -> Iterator[_Seen]:
        began_s, seen = time.perf_counter(), _Seen()
        # A read through mapped memory asks no server.
        is_call = direction == "write" or self.transport_name not in ("shm", CUDA_IPC)
        kind = Kind.CLIENT if is_call else Kind.INTERNAL
        with spans.current().child(f"kv_{direction}", kind=kind) as span:
            try:
                yield seen
            except BaseException as error:
                reason = reason_of(error)
                if seen.puts_again and reason == MISSING:
                    seen.num_put_again = num_blocks
                else:
                    seen.failed = Counter({reason: num_blocks})
                raise
            finally:
                seconds = time.perf_counter() - began_s
                moved = Moved(
                    direction,
                    self.transport_name,
                    seen.num_bytes,
                    seconds,
                    +seen.failed,
                    seen.num_put_again,
                )
                self.on_moved(moved)
                if span.is_recording:
                    if is_call:
                        span.set(spans.server_of(self.address))
                    span.set(traced.of_move(self.node_id, moved, num_blocks))

    async def _close(self) -> None:
        await asyncio.wait([self._heartbeat])
        # What copies must be over before the store may think that this worker is gone: it would
        # give the frames to somebody else. Every copy has a deadline of its own.
        await self._still.wait()
        await self._background.settle()
        try:
            await self._transport.close()
        finally:
            await attaching.say_goodbye(self._rpc, self._attachment_id)
            await self._rpc.close()


@dataclass
class _Seen:
    """What a call turns out to have moved."""

    num_bytes: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    puts_again: bool = False
    num_put_again: int = 0


def _unwatched(moved: Moved) -> None:
    """Nobody measures."""


_closing: set[asyncio.Task[None]] = set()  # keeps what outlives its client from being collected
