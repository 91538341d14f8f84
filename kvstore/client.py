"""KvStoreClient: a worker puts KV blocks into one store and gets them from it, or from another
worker that lends its cache. Control goes over gRPC (kvstore/store_connection.py), bytes over the
transport that the caller names.

Life: `attach` -> match, put_blocks, get_blocks, renew, release ... -> `close`. When the store is
away or was restarted, the client is `broken` for good: its owner attaches again.
Nothing here retries, and no transport is replaced by another.

Guarantees:
- no block is used whose checksum was not compared: the transport computes it over the worker's
  bytes, `get_blocks` compares, and nothing else does;
- a put that fails, is late or is cancelled leaves no reservation behind: it is undone in the
  background, and frames that its transfer may still write into are quarantined at the store first;
- blocks of the worker that a transfer may still write into are named by the error
  (`kvstore.errors.quarantine_of`);
- a block that arrived damaged is reported to the store, which checks its own bytes, drops what is
  bad and repairs damaged generations, so that no reader meets the same damage again.

One asyncio loop; large copies and checksums run on threads.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kvstore import link_quality, wire
from kvstore.block_refs import Block, PackedBlocks
from kvstore.block_source import MatchResult, StoreInfo, own_host_id
from kvstore.errors import (
    CANCELLED,
    CHECKSUM,
    DEADLINE,
    GENERATION,
    INCARNATION,
    LEASE_LAPSED,
    MISSING,
    LeaseLapsed,
    TransferTimeout,
    reason_of,
)
from kvstore.exported_blocks import LeaseUpdate
from kvstore.link_quality import LinkRates
from kvstore.slab import Slab
from kvstore.store_connection import DETACH_S, HEARTBEAT_S, StoreConnection
from kvstore.transport.base import (
    CUDA_IPC,
    DIRECT_TRANSPORTS,
    TRANSPORTS,
    BlockMemory,
    GetItems,
    GetResult,
    PutItem,
    PutUnsettled,
    Transport,
)
from kvstore.transport.cuda_ipc import CudaIpcTransport
from kvstore.transport.grpc import GrpcTransport, StagedTransport
from kvstore.transport.nixl import NixlTransport, region_of
from kvstore.transport.nixl_agent import NixlAgent
from kvstore.transport.shm import DeviceShmTransport, ShmTransport
from process import logs, rpc, trace_spans
from process.authorization import PeerRole
from process.background_tasks import BackgroundTasks
from process.deadline import Deadline
from process.rpc import Dialer
from process.rpc_errors import BatonError, DeadlineExceeded, FailedPrecondition, Unavailable
from process.trace_spans import SpanKind, Value
from protos import kvstore_pb2

logger = logging.getLogger(__name__)

MAX_VERIFIED_BLOCKS = 65_536
"""Most verified blocks that the client keeps for its next Renew or Release, which tells the store's
history of them; the store does not learn of further ones."""

MAX_COMMITTED_BLOCKS = 512
"""Most blocks of one Commit call: about 5 ms of the store's loop."""

_RESERVE_TIMEOUT_S = 10.0  # of the call itself; the caller waits for its own deadline only
_UNDO_TIMEOUT_S = 2.0
_REPORT_TIMEOUT_S = 10.0
_CLOSE_S = 2.0


@dataclass(frozen=True)
class PutChain:
    """Consecutive blocks of one prompt or answer that are to be stored.

    parent: chain hash before the first of `blocks`; empty at the start of a prompt. blocks: (chain
    hash, block id) in order. num_tokens: slots of a full block. tail: (name, block id, filled
    slots) of the unfilled last block; None: there is none. tenant: whose share of the store the
    blocks are charged to. puts_again: when the store lacks the parent, the caller puts the blocks
    again with it: that is not counted as a failure.
    """

    parent: bytes
    blocks: Sequence[tuple[bytes, int]]
    num_tokens: int
    tail: tuple[str, int, int] | None = None
    tenant: str = ""
    puts_again: bool = False

    @property
    def num_blocks(self) -> int:
        """The number of blocks, the tail included."""
        return len(self.blocks) + (self.tail is not None)


@dataclass(frozen=True)
class PutResult:
    """The outcome of a put.

    refs: of blocks[: len(refs)]; the store had no room for the rest. tail: None if none was given
    or the store had no room. num_bytes: written by this call; blocks that were present cost none.
    not_stored: number of blocks, tail included, that the store had no room for. lacks_parent:
    nothing was stored, since the store lacks the block before the first.
    """

    lease_id: str
    refs: PackedBlocks
    tail: Block | None
    num_bytes: int
    not_stored: int
    lacks_parent: bool = False


@dataclass(frozen=True)
class TransferStats:
    """Statistics of one put or get as its caller sees it.

    num_bytes: usable bytes, those of failed blocks not counted. seconds: of the whole call:
    control, bytes, checksums and their comparison. failed: number of blocks by reason.
    num_put_again: blocks of a put that the store refused because it lacks their parent and that the
    caller puts again with it; that is no failure.
    """

    direction: Literal["read", "write"]
    transport: str
    num_bytes: int
    seconds: float
    failed: Mapping[str, int] = field(default_factory=dict)
    num_put_again: int = 0


class KvStoreClient:
    """A worker's client of one store or lender: one attachment over one transport. `attach` makes
    it."""

    def __init__(
        self,
        connection: StoreConnection,
        store: StoreInfo,
        memory: BlockMemory,
        transport: Transport,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.address = connection.address
        self.node_id = store.node_id
        self.incarnation = store.incarnation
        self.frame_bytes = store.frame_bytes
        self.num_frames = store.num_frames
        self.memory = memory
        self.transport = transport
        self.transport_name = transport.name
        self.num_uses = 0
        """Calls about blocks and leases since `attach`, without heartbeats, status and
        measurements."""
        self.num_bad_blocks = 0
        """Blocks that arrived with a wrong checksum; each was reported to the store."""
        self.on_transfer: Callable[[TransferStats], None] = lambda stats: None
        """Called with the statistics of every put and get, failed ones included. Must not raise."""
        self._connection = connection
        self._store = store
        self._attachment_id = store.attachment_id
        self._background = BackgroundTasks()
        self._num_transfers = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        # For the store, with the next Renew or Release.
        self._num_bytes_unreported = 0
        self._verified: list[kvstore_pb2.VerifiedBlocks] = []
        self._num_verified = 0
        self._to_report: dict[tuple[int, int], Block] = {}
        self._is_reporting = False
        # Not part of the trace of the request that caused this attachment.
        self._heartbeat = asyncio.create_task(
            connection.send_heartbeats(store, heartbeat_s), context=trace_spans.without_span()
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
        dial: Dialer = rpc.PLAIN,
        role: PeerRole = PeerRole.KVSTORE,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> KvStoreClient:
        """Attach this process of a worker to the store at `address`.

        Args: fingerprint: of the worker's model, hex. transport: one of TRANSPORTS, or of
            DIRECT_TRANSPORTS for a lender; no other is tried. nixl_net_devices: as UCX_NET_DEVICES,
            for transport nixl. dial: how to connect. role: what the peer's certificate must name.
            heartbeat_s: between two heartbeats.
        Raises: FailedPrecondition (another layout; the transport cannot be used here), Unavailable,
            NoCapacity (the store has no room for a slab), DeadlineExceeded. Nothing stays attached
            then.
        """
        known = dict.fromkeys((*TRANSPORTS, *DIRECT_TRANSPORTS))
        if transport not in known:
            raise ValueError(f"transport: one of {', '.join(known)}, got {transport!r}")
        request = kvstore_pb2.AttachRequest(
            worker_id=worker_id,
            worker_incarnation=worker_incarnation,
            model_fingerprint=bytes.fromhex(fingerprint),
            block_bytes=memory.block_bytes,
            transport=transport,
        )
        connection = StoreConnection(address, dial, role)
        with trace_spans.current_span().child(
            "kv_attach", trace_spans.server_attributes(address), kind=SpanKind.CLIENT
        ) as span:
            store, connected = await _handshake(
                connection, request, memory, nixl_net_devices, Deadline.after(timeout_s)
            )
            span.set({"baton.store.node_id": store.node_id, "baton.transport": connected.name})
        return cls(connection, store, memory, connected, heartbeat_s)

    @property
    def broken(self) -> str | None:
        """Why this client is of no use any more, so that its owner attaches again; None while it
        works."""
        return self._connection.broken

    @property
    def is_busy(self) -> bool:
        """Whether a put, a get or a measurement of this client is under way."""
        return self._num_transfers > 0

    # -- blocks and leases

    async def match(
        self,
        chain_hashes: Sequence[bytes],
        *,
        lease_id: str | None = None,
        pin: bool = True,
        ttl_s: float,
        deadline: Deadline,
    ) -> MatchResult:
        """Ask the store for the longest prefix of the chain that it holds, pinned for `ttl_s` under
        `lease_id`, or under a new lease if that is None.

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
        with trace_spans.current_span().child("kv_match", kind=SpanKind.CLIENT) as span:
            reply = await self._connection.call(self._connection.stub.Match, request, deadline)
            with self._connection.checking_reply():
                match = wire.read_matched(reply, request, self.num_frames)
            if span.is_recording:
                span.set(trace_spans.server_attributes(self.address))
                span.set(_match_attributes(self.node_id, chain_hashes, match.blocks))
        return match

    async def pin(
        self, blocks: Sequence[Block], *, ttl_s: float, deadline: Deadline
    ) -> tuple[str, int]:
        """Ask the store to pin the longest prefix of `blocks` that is still valid. Returns: the new
        lease's id (empty when no block is valid) and how many blocks it pins."""
        self.num_uses += 1
        request = kvstore_pb2.PinRequest(
            attachment_id=self._attachment_id,
            blocks=[wire.block_to_proto(block) for block in blocks],
            ttl_ms=wire.ttl_ms(ttl_s),
        )
        reply = await self._connection.call(self._connection.stub.Pin, request, deadline)
        with self._connection.checking_reply():
            return wire.read_pinned(reply, request)

    async def renew(self, lease_id: str, *, ttl_s: float, deadline: Deadline) -> None:
        """Ask the store to let the lease live at least `ttl_s` from now. Raises: LeaseLapsed."""
        self.num_uses += 1
        await self._renew(lease_id, ttl_s, deadline)

    async def release(self, lease_ids: Sequence[str], *, deadline: Deadline) -> int:
        """Ask the store to end leases; empty ids and leases that are over are skipped. Returns: how
        many ended."""
        request = kvstore_pb2.ReleaseRequest(
            lease_ids=[lease_id for lease_id in lease_ids if lease_id]
        )
        reply = await self._call_and_tell(self._connection.stub.Release, request, deadline)
        return int(reply.num_released)

    async def await_lent(
        self, lease_id: str, *, num_known: int, num_wanted: int, wait_s: float, deadline: Deadline
    ) -> tuple[LeaseUpdate, float]:
        """Ask a lender for the blocks that a lease lends beyond the first `num_known`. The answer
        comes as soon as it lends `num_wanted` in all or grows no more, after `wait_s` at the
        latest; blocks whose checksum is not computed yet are included.

        Args: num_wanted: more than `num_known`.
        Returns: the blocks, none of which may be used unless a handle names exactly it; and until
            when the lender holds them, on this process' monotonic clock, 0: not at all.
        Raises: LeaseLapsed, InvalidArgument, NoCapacity, Unavailable, DeadlineExceeded.
        """
        self.num_uses += 1
        device = self.memory.device
        hold_s = 0.0
        if device is not None and self.transport_name == CUDA_IPC:
            hold_s = device.peer_copies.hold_s
        request = kvstore_pb2.AwaitLentRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id,
            num_known=num_known,
            num_wanted=num_wanted,
            budget_ms=wire.ttl_ms(wait_s),
            hold_ms=int(hold_s * 1000),
        )
        asked_s = time.monotonic()
        reply = await self._connection.call(self._connection.stub.AwaitLent, request, deadline)
        with self._connection.checking_reply():
            return wire.read_lease_update(reply, request, asked_s, time.monotonic())

    async def status(
        self, *, check_integrity: bool = False, deadline: Deadline
    ) -> kvstore_pb2.GetStatusReply:
        """Ask the store for its numbers. check_integrity: it recomputes its invariants first."""
        request = kvstore_pb2.GetStatusRequest(check_integrity=check_integrity)
        reply: kvstore_pb2.GetStatusReply = await self._connection.call(
            self._connection.stub.GetStatus, request, deadline
        )
        return reply

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
    ) -> PutResult:
        """Store consecutive blocks of one prompt, and optionally its tail, under one lease.

        A call that is cancelled or late while its Reserve is under way does not stop the Reserve:
        it goes on for 10 s and is undone when the answer comes. Without an answer the connection
        breaks.

        Args:
            lease_id: adds to this lease; None makes one, which the caller releases or passes on.
            parent: chain hash before blocks[0]; empty at the start of a prompt.
            blocks: (chain hash, block id) in order. They must not change until this returns.
            tail: (name, block id, filled slots) of the unfilled last block; None: there is none.
            num_tokens: slots of a full block.
            tenant: whose share of the store the blocks are charged to.
        Returns: what was stored. Blocks that the store had no room for are counted there; they are
            no error.
        Raises: LeaseLapsed; FailedPrecondition when the store lacks the parent; Unavailable;
            DeadlineExceeded; TransferFailed. Nothing of this call stays reserved then. Of more than
            512 blocks the first ones may be in the store by then, and under the given lease; they
            are counted as failed.
        """
        chain = PutChain(parent, blocks, num_tokens, tail, tenant)
        with self._transferring(), self._recorded("write", chain.num_blocks) as record:
            (put,) = await self._put([chain], ttl_s, deadline, lease_id=lease_id or "")
            if put.lacks_parent:
                raise FailedPrecondition(f"parent {parent.hex()}: not in the store")
            record.num_bytes, record.failed = put.num_bytes, Counter(no_room=put.not_stored)
            return put

    async def put_chains(
        self, chains: Sequence[PutChain], ttl_s: float, deadline: Deadline
    ) -> list[PutResult]:
        """Store blocks of several prompts and answers, and keep no lease: one Reserve for all of
        them, and a Commit for each 512 blocks. Chains may begin alike, or one may continue another.

        Returns: one result for each chain, also where the store lacks its parent.
        Raises: FailedPrecondition when the store lost a parent after the Reserve; LeaseLapsed;
            Unavailable; DeadlineExceeded; TransferFailed. Nothing stays reserved then, and of more
            than 512 blocks the first ones may be in the store; they are counted as failed. As
            `put_blocks` while its Reserve is under way.
        """
        num_blocks = sum(chain.num_blocks for chain in chains)
        with self._transferring(), self._recorded("write", num_blocks) as record:
            record.puts_again = True
            puts = await self._put(chains, ttl_s, deadline, ends_lease=True)
            for chain, put in zip(chains, puts, strict=True):
                record.num_bytes += put.num_bytes
                record.failed["no_room"] += put.not_stored
                if put.lacks_parent and chain.puts_again:
                    record.num_put_again += chain.num_blocks
                elif put.lacks_parent:
                    record.failed[MISSING] += chain.num_blocks
            return puts

    async def get_blocks(
        self,
        lease_id: str,
        items: Sequence[tuple[Block, int]],
        deadline: Deadline,
        *,
        incarnation: bytes | None = None,
        num_unsealed: int = 0,
        held_until_s: float = 0.0,
    ) -> GetResult:
        """Copy blocks out of the store and verify each: generation before and after, checksum.

        Args:
            items: (ref, block id to copy into).
            incarnation: of the store that the refs are from, when another process named them.
            num_unsealed: so many of the last items have no checksum (`await_lent`): the caller
                compares those.
            held_until_s: a lender holds all of them until then (`await_lent`).
        Returns: what arrived and, by index, why a block must not be used, and the checksums of
            items that are not sealed. A failure of the store is a reason, too, not an exception.
        Raises: TransferTimeout, TransferCancelled: the blocks named by their `quarantine` must not
            be used until it is settled.
        """
        with self._transferring(), self._recorded("read", len(items)) as record:
            if trace_spans.current_span().is_recording:
                trace_spans.current_span().set(_block_attributes([block for block, _ in items]))
            got = await self.get_unrecorded(
                lease_id,
                items,
                deadline,
                incarnation,
                num_unsealed=num_unsealed,
                held_until_s=held_until_s,
            )
            if self.transport.counts_own_reads:
                self._num_bytes_unreported += got.num_bytes
            record.num_bytes, record.failed = got.num_bytes, Counter(got.failed.values())
            return got

    async def measure(self, block_ids: Sequence[int], deadline: Deadline) -> LinkRates:
        """Measure how fast this client's transport is, with worker blocks that the caller gives for
        it (`links.num_blocks_wanted` says how many) and that are written into.

        Raises: NoCapacity (no frames, no blocks), DeadlineExceeded, Unavailable, TransferFailed;
            TransferTimeout, TransferCancelled: no block may be used until its quarantine is
            settled.
        """
        with self._transferring(is_use=False):
            return await link_quality.measure(self, block_ids, deadline)

    # -- the end

    async def settle(self) -> None:
        """Wait for this client's background work: reservations that are undone, reports of bad
        blocks. Each has a deadline of its own."""
        await self._background.settle()

    async def close(self) -> None:
        """Detach from the store and close the connection. Waits at most 2 s; what a stalled
        transfer still needs (its agent, this connection) stays until that transfer is over."""
        self._heartbeat.cancel()
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
            _closing.add(self._closing)
            self._closing.add_done_callback(_closing.discard)
        await asyncio.wait([self._closing], timeout=_CLOSE_S)

    async def _close(self) -> None:
        await asyncio.wait([self._heartbeat])
        # All copies must be over before the store may take this worker for gone: it would give
        # their frames to another worker. Every copy has a deadline of its own.
        await self._is_idle.wait()
        await self._background.settle()
        try:
            await self.transport.close()
        finally:
            await self._connection.detach(self._attachment_id)
            await self._connection.close()

    # -- statistics

    @contextmanager
    def _transferring(self, *, is_use: bool = True) -> Iterator[None]:
        if self._closing is not None:
            raise Unavailable(f"store {self.address}: this client is closed")
        self._num_transfers += 1
        self._is_idle.clear()
        self.num_uses += is_use
        try:
            yield
        finally:
            self._num_transfers -= 1
            if self._num_transfers == 0:
                self._is_idle.set()

    @contextmanager
    def _recorded(
        self, direction: Literal["read", "write"], num_blocks: int
    ) -> Iterator[_TransferRecord]:
        """Makes the statistics and the span of a transfer from what the caller enters."""
        began_s, record = time.perf_counter(), _TransferRecord()
        # A read through mapped memory calls no server.
        is_call = direction == "write" or self.transport_name not in ("shm", CUDA_IPC)
        kind = SpanKind.CLIENT if is_call else SpanKind.INTERNAL
        with trace_spans.current_span().child(f"kv_{direction}", kind=kind) as span:
            try:
                yield record
            except BaseException as error:
                reason = reason_of(error)
                if record.puts_again and reason in (MISSING, CANCELLED):
                    record.num_put_again = num_blocks
                else:
                    record.failed = Counter({reason: num_blocks})
                raise
            finally:
                stats = TransferStats(
                    direction,
                    self.transport_name,
                    record.num_bytes,
                    time.perf_counter() - began_s,
                    +record.failed,
                    record.num_put_again,
                )
                self.on_transfer(stats)
                if span.is_recording:
                    if is_call:
                        span.set(trace_spans.server_attributes(self.address))
                    span.set(_transfer_attributes(self.node_id, stats, num_blocks))

    # -- put: reserve, write, commit

    async def _put(
        self,
        chains: Sequence[PutChain],
        ttl_s: float,
        deadline: Deadline,
        *,
        lease_id: str = "",
        ends_lease: bool = False,
        is_probe: bool = False,
    ) -> list[PutResult]:
        """Reserve frames for the chains, write the blocks into them and commit them.

        Args: lease_id: empty makes a lease. ends_lease: the lease ends with this put. is_probe: the
            lease that this makes is a measurement's: the store counts none of its bytes.
        """
        request = kvstore_pb2.ReserveRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id,
            ttl_ms=wire.ttl_ms(ttl_s),
            chains=[
                kvstore_pb2.ReserveChain(
                    parent=chain.parent,
                    chain_hashes=b"".join([chain_hash for chain_hash, _ in chain.blocks]),
                    tail_name=chain.tail[0] if chain.tail else "",
                    tenant=chain.tenant,
                )
                for chain in chains
            ],
            is_probe=is_probe,
        )
        owns_lease = not lease_id
        reply = await self._reserve(request, owns_lease, deadline)
        places = list(map(_with_num_tokens, reply.chains, chains))
        sources = _sources(chains, places)
        reserved = PackedBlocks.of_rows(sources)
        committed: dict[bytes, bytes] = {}
        try:
            if reserved or (ends_lease and reply.lease_id):
                frames, generations = reserved.frames.tolist(), reserved.generations.tolist()
                items = list(map(PutItem, sources.values(), frames, generations))
                checksums = await self.transport.put(reply.lease_id, items, deadline)
                written = await self.commit(
                    reply.lease_id, reserved, checksums, deadline, ends_lease=ends_lease
                )
                committed = dict(zip(reserved.rows, written.rows, strict=True))
        except BaseException as error:
            cause = self.undo_later(reply.lease_id, reserved, error, owns_lease=owns_lease)
            raise cause from (None if cause is error else error)
        results = []
        for chain, answer, blocks in zip(chains, reply.chains, places, strict=True):
            rows = blocks.rows
            refs = PackedBlocks.of_rows(committed.get(row, row) for row in rows)
            num_full = min(len(refs), len(chain.blocks))
            results.append(
                PutResult(
                    reply.lease_id,
                    refs[:num_full],
                    refs[num_full] if len(refs) > num_full else None,
                    # A block that two chains have is written once, for the first.
                    sum(sources.pop(row, None) is not None for row in rows) * self.frame_bytes,
                    0 if answer.lacks_parent else chain.num_blocks - len(refs),
                    answer.lacks_parent,
                )
            )
        return results

    # -- kvstore/link_quality.py takes the steps of a put one by one, and is in no statistics

    async def put_probe(
        self, tail: tuple[str, int, int], ttl_s: float, deadline: Deadline
    ) -> PutResult:
        """Store one private block, to measure the link with, under a new lease whose bytes the
        store does not count; `tail` as in `PutChain`."""
        (put,) = await self._put([PutChain(b"", (), 1, tail)], ttl_s, deadline, is_probe=True)
        return put

    async def reserve_tails(
        self, lease_id: str, names: Sequence[str], ttl_s: float, deadline: Deadline
    ) -> PackedBlocks:
        """Reserve a frame for each of several private blocks of one slot, by name, under a lease.
        The caller writes the frames and calls `commit`, or calls `undo_later`. Returns: the
        reserved frames; fewer when the store has no room for all."""
        request = kvstore_pb2.ReserveRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id,
            ttl_ms=wire.ttl_ms(ttl_s),
            chains=[kvstore_pb2.ReserveChain(tail_name=name) for name in names],
        )
        reply = await self._reserve(request, False, deadline)
        return wire.to_be_written(reply).with_num_tokens(1)

    async def commit(
        self,
        lease_id: str,
        reserved: PackedBlocks,
        checksums: Sequence[int],
        deadline: Deadline,
        *,
        ends_lease: bool = False,
    ) -> PackedBlocks:
        """Commit frames whose bytes are all written, MAX_COMMITTED_BLOCKS in one call: the store
        works off each call in one turn of its loop. reserved: with their numbers of filled slots,
        parents first. ends_lease: the lease ends with the last call. Returns: the blocks as the
        store has them."""
        sent = reserved.with_checksums(0, checksums)
        rows: list[bytes] = []
        for at in range(0, max(1, len(sent)), MAX_COMMITTED_BLOCKS):
            part = sent[at : at + MAX_COMMITTED_BLOCKS]
            is_last = at + len(part) == len(sent)
            request = kvstore_pb2.CommitRequest(
                attachment_id=self._attachment_id,
                lease_id=lease_id,
                blocks=part.data,
                ends_lease=ends_lease and is_last,
            )
            reply = await self._connection.call(self._connection.stub.Commit, request, deadline)
            with self._connection.checking_reply():
                rows += wire.read_written(reply, part, self.num_frames).rows
        return PackedBlocks.of_rows(rows)

    def undo_later(
        self,
        lease_id: str,
        reserved: PackedBlocks,
        error: BaseException,
        *,
        owns_lease: bool,
    ) -> BaseException:
        """Give the reserved frames of a put back to the store, in the background, after `error`
        ended the put. Returns: the error to raise."""
        cause, settled = error, None
        if isinstance(error, PutUnsettled):
            cause, settled = error.cause, error.settled
        self._background.spawn(self._undo(lease_id, reserved, settled, owns_lease))
        return cause

    def release_later(self, lease_id: str) -> asyncio.Task[int]:
        """Release a lease in the background. A lease whose release fails lapses by itself."""
        return self._background.spawn(
            self.release([lease_id], deadline=Deadline.after(_UNDO_TIMEOUT_S))
        )

    async def _reserve(
        self, request: kvstore_pb2.ReserveRequest, owns_lease: bool, deadline: Deadline
    ) -> kvstore_pb2.ReserveReply:
        """Call Reserve. The call outlives a caller that leaves early; what it reserved is then
        given back."""
        self._connection.check()
        if deadline.expired:
            raise DeadlineExceeded("put: no time is left")
        call = self._background.spawn(self._call_reserve(request))
        try:
            await asyncio.wait([call], timeout=deadline.left_s())
        except asyncio.CancelledError:
            self._background.spawn(self._undo_reserve(call, owns_lease))
            raise
        if not call.done():
            self._background.spawn(self._undo_reserve(call, owns_lease))
            raise DeadlineExceeded("reserve: the time for it ran out")
        return call.result()

    async def _call_reserve(self, request: kvstore_pb2.ReserveRequest) -> kvstore_pb2.ReserveReply:
        reply: kvstore_pb2.ReserveReply = await self._connection.call(
            self._connection.stub.Reserve, request, Deadline.after(_RESERVE_TIMEOUT_S)
        )
        with self._connection.checking_reply():
            wire.check_reserved(reply, request, self.num_frames)
        return reply

    async def _undo_reserve(
        self, call: asyncio.Task[kvstore_pb2.ReserveReply], owns_lease: bool
    ) -> None:
        try:
            reply = await call
        except BatonError as error:
            if isinstance(error, DeadlineExceeded):
                # What was reserved is unknown; a new attachment lets the store clean up.
                self._connection.mark_broken("the store did not answer a reservation")
            return
        await self._undo(reply.lease_id, wire.to_be_written(reply), None, owns_lease)

    async def _undo(
        self,
        lease_id: str,
        reserved: PackedBlocks,
        settled: asyncio.Future[None] | None,
        owns_lease: bool,
    ) -> None:
        """Give frames back after a failed put. Frames that are still being written are quarantined
        first, and given back when `settled` is done."""
        if settled is not None:
            await self._abort(lease_id, reserved, quarantine=True)
            await asyncio.wait([settled])
        await self._abort(lease_id, reserved, quarantine=False)
        if owns_lease and not self._connection.broken:
            try:
                await self.release([lease_id], deadline=Deadline.after(_UNDO_TIMEOUT_S))
            except BatonError:
                return  # it lapses by itself

    async def _abort(self, lease_id: str, reserved: PackedBlocks, *, quarantine: bool) -> None:
        """Call Abort until the store has answered. A broken connection ends that: the store gives
        back an attachment's reservations when the attachment is over."""
        request = kvstore_pb2.AbortRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id,
            quarantine=quarantine,
            blocks=reserved.data,
        )
        while reserved and not self._connection.broken:
            try:
                await self._connection.call(
                    self._connection.stub.Abort, request, Deadline.after(_UNDO_TIMEOUT_S)
                )
                return
            except DeadlineExceeded:
                await asyncio.sleep(_UNDO_TIMEOUT_S)
            except BatonError:
                return

    # -- get: copy, verify, report

    async def get_unrecorded(
        self,
        lease_id: str,
        items: Sequence[tuple[Block, int]],
        deadline: Deadline,
        incarnation: bytes | None = None,
        *,
        num_unsealed: int = 0,
        held_until_s: float = 0.0,
    ) -> GetResult:
        """Copy blocks as `get_blocks` does, without statistics and spans."""
        if incarnation is not None and incarnation != self.incarnation:
            return GetResult(0, dict.fromkeys(range(len(items)), INCARNATION))
        if deadline.expired:
            return GetResult(0, dict.fromkeys(range(len(items)), DEADLINE))
        wanted = GetItems(items, held_until_s)
        try:
            got = await self.transport.get(lease_id, wanted, deadline)
        except TransferTimeout:
            raise
        except BatonError as error:
            return GetResult(0, dict.fromkeys(range(len(items)), reason_of(error)))
        failed = await self._explain(lease_id, got.failed, deadline)
        self._report_later([wanted[i][0] for i, r in failed.items() if r == GENERATION])
        num_sealed = len(items) - num_unsealed
        failed |= self._verify(wanted, num_sealed, got, failed)
        if self._store.keeps_history:
            self._note_verified(
                [ref for index, (ref, _) in enumerate(wanted[:num_sealed]) if index not in failed]
            )
        found = got.checksums
        unsealed = [index for index in range(num_sealed, len(items)) if index not in failed]
        failed |= {index: CHECKSUM for index in unsealed if index not in found}
        return GetResult(
            (len(items) - len(failed)) * self.frame_bytes,
            failed,
            {index: found[index] for index in unsealed if index in found},
        )

    async def _explain(
        self, lease_id: str, failed: dict[int, str], deadline: Deadline
    ) -> dict[int, str]:
        """A stale generation has a better reason if the lease has lapsed: ask the store by a Renew
        of 0 s."""
        if GENERATION in failed.values() and lease_id:
            try:
                await self._renew(lease_id, 0.0, deadline)
            except LeaseLapsed:
                return {i: LEASE_LAPSED if r == GENERATION else r for i, r in failed.items()}
            except BatonError:
                pass  # the first reason stands
        return dict(failed)

    def _verify(
        self, wanted: GetItems, num_sealed: int, got: GetResult, failed: dict[int, str]
    ) -> dict[int, str]:
        """Compare the checksums of the first `num_sealed` items that arrived. Returns: index ->
        reason of those that differ."""
        expected = wanted.checksums[:num_sealed]
        found = list(map(got.checksums.get, range(num_sealed)))
        bad: list[int] = []
        if found != expected:  # almost never
            bad = [
                index
                for index, (ours, theirs) in enumerate(zip(found, expected, strict=True))
                if ours != theirs and index not in failed
            ]
        self.num_bad_blocks += len(bad)
        self._report_later([wanted[index][0] for index in bad])
        return dict.fromkeys(bad, CHECKSUM)

    def _report_later(self, refs: Sequence[Block]) -> None:
        """Report blocks to the store whose checksum is wrong, or whose generation is stale although
        their lease lives."""
        self._to_report |= {(ref.frame, ref.generation): ref for ref in refs}
        if self._to_report and not self._is_reporting:
            self._is_reporting = True
            self._background.spawn(self._report())

    async def _report(self) -> None:
        """Report the bad blocks, one call at a time; blocks that come while one is under way share
        the next."""
        try:
            while self._to_report and not self._connection.broken:
                refs, self._to_report = list(self._to_report.values()), {}
                request = kvstore_pb2.ReportRequest(
                    attachment_id=self._attachment_id,
                    blocks=[wire.block_to_proto(ref) for ref in refs],
                )
                reply = await self._connection.call(
                    self._connection.stub.Report, request, Deadline.after(_REPORT_TIMEOUT_S)
                )
                self._log_reported(len(refs), num_dropped=reply.num_dropped)
        except BatonError as error:
            self._log_reported(len(refs), why=str(error))
        finally:
            self._is_reporting = False

    def _log_reported(self, num_blocks: int, **fields: Any) -> None:
        logs.event(
            logger,
            "bad_blocks_reported",
            level=logging.WARNING,
            node_id=self.node_id,
            num_blocks=num_blocks,
            **fields,
        )

    # -- what the store cannot see by itself travels with Renew and Release

    def _note_verified(self, blocks: Sequence[Block]) -> None:
        """Note, for the store's history, that these blocks arrived and their checksums are
        right."""
        if not blocks:
            return
        self._num_verified += len(blocks)
        if self._num_verified <= MAX_VERIFIED_BLOCKS:
            self._verified.append(
                kvstore_pb2.VerifiedBlocks(
                    frames=[block.frame for block in blocks],
                    generations=[block.generation for block in blocks],
                    traceparent=trace_spans.current_span().traceparent,
                )
            )

    async def _renew(self, lease_id: str, ttl_s: float, deadline: Deadline) -> None:
        request = kvstore_pb2.RenewRequest(lease_id=lease_id, ttl_ms=wire.ttl_ms(ttl_s))
        await self._call_and_tell(self._connection.stub.Renew, request, deadline)

    async def _call_and_tell(
        self,
        method: Callable[..., Any],
        request: kvstore_pb2.RenewRequest | kvstore_pb2.ReleaseRequest,
        deadline: Deadline,
    ) -> Any:
        """A call that also tells the store, once, how many bytes were read without a call of it,
        and which blocks were verified."""
        request.num_bytes_read, self._num_bytes_unreported = self._num_bytes_unreported, 0
        if self._verified:
            request.attachment_id = self._attachment_id
            request.verified.extend(self._verified)
            self._verified, self._num_verified = [], 0
        try:
            return await self._connection.call(method, request, deadline)
        except LeaseLapsed:
            raise  # the store has counted the bytes all the same
        except (BatonError, asyncio.CancelledError):
            self._num_bytes_unreported += request.num_bytes_read
            raise


@dataclass
class _TransferRecord:
    """The amounts that a transfer moved, entered while it runs."""

    num_bytes: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    puts_again: bool = False
    num_put_again: int = 0


_closing: set[asyncio.Task[None]] = set()
"""Keeps tasks that outlive their client from being garbage-collected."""


async def _handshake(
    connection: StoreConnection,
    request: kvstore_pb2.AttachRequest,
    memory: BlockMemory,
    nixl_net_devices: str,
    deadline: Deadline,
) -> tuple[StoreInfo, Transport]:
    """Attach, and connect the transport that the request names. After a failure nothing stays
    attached, and `connection` is closed."""
    agent: NixlAgent | None = None
    store: StoreInfo | None = None
    try:
        async with deadline.timeout(f"attaching to store {connection.address}"):
            if request.transport == "nixl":
                # A new name for each attachment: the store never takes it for an earlier one's.
                name = f"worker-{secrets.token_hex(16)}"
                agent = await NixlAgent.start(name, nixl_net_devices, deadline)
                await _describe_region(request, agent, memory)
            if request.transport == CUDA_IPC:
                request.host_id = own_host_id()
            request.checksum = wire.checksum_of(request)
            reply = await connection.call(connection.stub.Attach, request, deadline)
            with connection.checking_reply():
                store = wire.read_attached(reply, request)
            name = request.transport
            return store, await connect_transport(name, memory, connection, agent, store)
    except BaseException:
        if agent is not None:
            await agent.close(Deadline.after(DETACH_S))
        if store is not None:
            await connection.detach(store.attachment_id)
        await connection.close()
        raise


async def connect_transport(
    transport: str,
    memory: BlockMemory,
    connection: StoreConnection,
    agent: NixlAgent | None,
    store: StoreInfo,
) -> Transport:
    """Make the transport of that name between a worker's memory and an attached store.

    Args: transport: one of TRANSPORTS, or of DIRECT_TRANSPORTS to a lender. agent: for nixl, with
        `memory` registered.
    Raises: FailedPrecondition when the transport cannot be used here.
    """
    if transport == "shm":
        if memory.device is not None:
            return await DeviceShmTransport.connect(memory, store)
        return await ShmTransport.connect(memory, store)
    if transport == CUDA_IPC:
        return await CudaIpcTransport.connect(memory, connection, store)
    if transport == "nixl" and agent is not None:
        if memory.device is not None and memory.device.memory == "VRAM":
            await _refuse_store_of_this_host(store)
        return await NixlTransport.connect(memory, connection, agent, store)
    if transport == "grpc":
        if memory.device is not None:
            return await StagedTransport.over(
                memory, lambda rows: GrpcTransport(rows, connection, store)
            )
        return GrpcTransport(memory, connection, store)
    raise ValueError(f"transport: {transport!r}, with{'' if agent else 'out'} an agent")


async def _refuse_store_of_this_host(store: StoreInfo) -> None:
    """Refuse NIXL between a device and a store on this host: to another process' host memory it
    falls to under 1 GB/s, without an error (measured). A lender has no slab, and its blocks lie on
    a device as a rule."""
    if not store.slab_path:
        return
    try:
        slab = await asyncio.to_thread(Slab.open, Path(store.slab_path), store.incarnation)
    except FailedPrecondition:
        return  # another host's, as far as can be seen from here; a slow link shows as degraded
    slab.close()
    raise FailedPrecondition(
        "transport nixl: the store is on this host, where NIXL moves a device's blocks 100 times "
        "below the bus; set transport to shm"
    )


async def _describe_region(
    request: kvstore_pb2.AttachRequest, agent: NixlAgent, memory: BlockMemory
) -> None:
    """Register the worker's cache with the agent, for the store to write into."""
    region = region_of(memory)
    device = memory.device
    if device is None:
        request.nixl_metadata = await agent.register(region)
    else:
        request.nixl_metadata = await agent.register(region, before=device.use_in_this_thread)
    request.region_address = region.address
    request.region_num_blocks = memory.num_blocks
    request.region_device_id = region.device_id
    request.region_memory = region.memory


def _with_num_tokens(answer: kvstore_pb2.ReservedChain, chain: PutChain) -> PackedBlocks:
    """The blocks of a chain that the store has or reserved; the reserved ones with the caller's
    numbers of filled slots, which the store does not know yet."""
    blocks = PackedBlocks(answer.blocks)
    num_tokens = np.where(blocks.are_reserved, chain.num_tokens, blocks.num_tokens)
    if chain.tail is not None and len(blocks) > len(chain.blocks):
        num_tokens[-1] = chain.tail[2]
    return blocks.with_num_tokens(num_tokens)


def _sources(chains: Sequence[PutChain], places: Sequence[PackedBlocks]) -> dict[bytes, int]:
    """The rows of `places` that are to be written, each once and in order, with the block of the
    worker that each is written with."""
    sources: dict[bytes, int] = {}
    for chain, blocks in zip(chains, places, strict=True):
        block_ids = [block_id for _, block_id in chain.blocks]
        if chain.tail is not None:
            block_ids.append(chain.tail[1])
        is_reserved = blocks.are_reserved.tolist()
        for row, block_id, is_new in zip(blocks.rows, block_ids, is_reserved, strict=False):
            if is_new:
                sources.setdefault(row, block_id)
    return sources


# ---- what spans say of blocks. Chain hashes are keyed by tenant: they say nothing of a prompt.


def _match_attributes(
    node_id: str, asked: Sequence[bytes], found: Sequence[Block]
) -> dict[str, Value]:
    about: dict[str, Value] = {
        "baton.store.node_id": node_id,
        "baton.num_blocks_asked": len(asked),
        "baton.num_blocks": len(found),
    }
    return about | _block_attributes(found)


def _transfer_attributes(node_id: str, stats: TransferStats, num_blocks: int) -> dict[str, Value]:
    about: dict[str, Value] = {
        "baton.store.node_id": node_id,
        "baton.transport": stats.transport,
        "baton.num_bytes": stats.num_bytes,
        "baton.num_blocks": num_blocks,
    }
    for reason, num_failed in stats.failed.items():
        about[f"baton.not_usable.{reason}"] = num_failed
    return about


def _block_attributes(blocks: Sequence[Block]) -> dict[str, Value]:
    """Which blocks: by the first and the last, and by tier."""
    hashes = [block.chain_hash for block in blocks if block.chain_hash]
    about: dict[str, Value] = {}
    if hashes:
        about |= {"baton.block.first": hashes[0].hex(), "baton.block.last": hashes[-1].hex()}
    for tier, num_blocks in Counter(block.tier for block in blocks).items():
        about[f"baton.tier.{tier.name.lower()}"] = num_blocks
    return about
