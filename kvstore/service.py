"""KvStoreServicer: the gRPC service `baton.v1.KvStore` of a store, or of a worker that lends its
cache: protobuf messages to values and back, nothing else. One asyncio loop."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc.aio

from kvstore import store_status, wire
from kvstore.block_refs import PackedBlocks, Tier, row, row_of
from kvstore.block_source import BlockSink, BlockSource, ReservedChain
from kvstore.block_store import NO_ROOM, Reserved, WrittenFrame
from process import rpc
from process.rpc_errors import FailedPrecondition, InvalidArgument
from process.trace_spans import (
    NOOP_SPAN,
    Span,
    parse_headers,
    parse_traceparent,
    rpc_attributes,
    trace_headers,
)
from process.tracing import OFF, Tracing
from protos import kvstore_pb2, kvstore_pb2_grpc

Request = TypeVar("Request")
Reply = TypeVar("Reply")
Context = grpc.aio.ServicerContext[Any, Any]

MATCH_S = 30.0
"""Longest time that a match may take: to bring blocks in from the file tier, or for free blocks of
a lender."""
MATCH_PART = 0.8
"""Part of the caller's time that a match may take, so that the answer still arrives."""
MAX_BYTES_READ = 1 << 44
"""Most bytes that one call may report as read: 16 TB, minutes of the fastest link."""
FEW_HISTORIES = 8
"""Histories of blocks in one reply to a caller that says no number."""

MAX_HISTORIES = 256
"""Most histories of blocks in one reply: 500 kB at most."""
LIST_CHUNK = 4096
"""Most chain hashes in one message of `List`: 74 kB, and 2 ms of the loop."""
_MATCHED_A_TURN = 1024
"""Most blocks of the answer to a Match that are converted in one turn of the loop: 1 to 2 ms."""


def _traced_unary(
    handler: Callable[[Any, Request, Context], Awaitable[Reply]],
) -> Callable[[Any, Request, Context], Awaitable[Reply]]:
    """Wrap a handler as rpc.unary does; while it runs, the span of the call is the current one."""
    name = handler.__name__

    @functools.wraps(handler)
    async def wrapped(self: KvStoreServicer, request: Request, context: Context) -> Reply:
        with self.span_of(name, context):
            return await handler(self, request, context)

    return rpc.unary(wrapped)


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    """Serves the gRPC service `baton.v1.KvStore` over a BlockSource; protos/kvstore.proto says what
    each call promises. Without a sink (a lender) every write is refused by name."""

    def __init__(
        self,
        source: BlockSource,
        sink: BlockSink | None = None,
        *,
        tracing: Tracing = OFF,
        index_state: Callable[[], tuple[int, bool]] = lambda: (0, False),
        list_chunk: int = LIST_CHUNK,
    ) -> None:
        """Args: source: what blocks are read from. sink: what blocks are written into; the source
        itself, where that is a store. index_state: (sequence, whether the index has
        everything), for the status. list_chunk: chain hashes in one message of `List`."""
        self._source = source
        self._sink = sink
        self._tracing = tracing
        self._index_state = index_state
        self._list_chunk = list_chunk

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with a gRPC server."""
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self, server)

    @contextmanager
    def span_of(self, name: str, context: Context) -> Iterator[None]:
        """Context in which the span of one call is the current one; it lies within the caller's
        span. Does nothing where the caller's request is not traced."""
        span: Span = NOOP_SPAN
        if self._tracing.is_on:
            headers = trace_headers(context.invocation_metadata() or ())
            about = {
                "baton.store.node_id": self._source.node_id,
                **rpc_attributes("KvStore", name),
            }
            span = self._tracing.follow(f"kvstore {name}", parse_headers(headers), about)
        with span:
            try:
                yield
            except Exception as error:
                span.set({"rpc.response.status_code": rpc.status_of(error)[0].name})
                raise
            span.set({"rpc.response.status_code": "OK"})

    # -- workers come and go

    @rpc.unary
    async def Attach(
        self, request: kvstore_pb2.AttachRequest, context: Context
    ) -> kvstore_pb2.AttachReply:
        wire.need_whole(request)
        return wire.info_to_proto(await self._source.attach(wire.worker_from_proto(request)))

    @rpc.unary
    async def Detach(
        self, request: kvstore_pb2.DetachRequest, context: Context
    ) -> kvstore_pb2.DetachReply:
        self._source.detach(request.attachment_id)
        return kvstore_pb2.DetachReply()

    # -- leases

    @_traced_unary
    async def Match(
        self, request: kvstore_pb2.MatchRequest, context: Context
    ) -> kvstore_pb2.MatchReply:
        if request.pin and not request.lease_id:
            _check_ttl(request.ttl_ms)
        left_s = context.time_remaining()
        match = await self._source.match(
            request.attachment_id,
            request.chain_hashes,
            pin=request.pin,
            lease_id=request.lease_id,
            ttl_s=request.ttl_ms / 1000,
            budget_s=MATCH_S if left_s is None else min(MATCH_S, MATCH_PART * left_s),
        )
        reply = kvstore_pb2.MatchReply(
            lease_id=match.lease_id,
            incarnation=self._source.incarnation,
            num_hits=match.num_hits,
        )
        try:
            for at in range(0, len(match.blocks), _MATCHED_A_TURN):
                if at:
                    await asyncio.sleep(0)
                wire.add_blocks(reply.blocks, match.blocks[at : at + _MATCHED_A_TURN])
        except asyncio.CancelledError:  # the worker does not learn of a lease that was made for it
            if match.lease_id != request.lease_id:
                self._source.release([match.lease_id], num_bytes_read=0)
            raise
        return reply

    @rpc.unary
    async def Pin(self, request: kvstore_pb2.PinRequest, context: Context) -> kvstore_pb2.PinReply:
        _check_ttl(request.ttl_ms)
        lease_id, num_pinned = self._source.pin(
            request.attachment_id,
            wire.blocks_from_proto(request.blocks),
            ttl_s=request.ttl_ms / 1000,
        )
        return kvstore_pb2.PinReply(lease_id=lease_id, num_pinned=num_pinned)

    @_traced_unary
    async def Renew(
        self, request: kvstore_pb2.RenewRequest, context: Context
    ) -> kvstore_pb2.RenewReply:
        self._note_reads(request)
        self._source.renew(
            request.lease_id,
            ttl_s=request.ttl_ms / 1000,
            num_bytes_read=request.num_bytes_read,
        )
        return kvstore_pb2.RenewReply()

    @_traced_unary
    async def Release(
        self, request: kvstore_pb2.ReleaseRequest, context: Context
    ) -> kvstore_pb2.ReleaseReply:
        self._note_reads(request)
        num_released = self._source.release(
            request.lease_ids, num_bytes_read=request.num_bytes_read
        )
        return kvstore_pb2.ReleaseReply(num_released=num_released)

    def _note_reads(self, request: kvstore_pb2.RenewRequest | kvstore_pb2.ReleaseRequest) -> None:
        """Pass on which blocks a worker has verified. Raises: InvalidArgument for a number of bytes
        that might not fit into the status' sum."""
        if request.num_bytes_read > MAX_BYTES_READ:
            raise InvalidArgument("num_bytes_read", f"at most {MAX_BYTES_READ} at once")
        if self._sink is None:
            return
        for each in request.verified:
            self._sink.note_verified(
                request.attachment_id,
                each.frames,
                each.generations,
                parse_traceparent(each.traceparent) if each.traceparent else None,
            )

    @rpc.unary
    async def AwaitLent(
        self, request: kvstore_pb2.AwaitLentRequest, context: Context
    ) -> kvstore_pb2.AwaitLentReply:
        update = await self._source.await_lent(
            request.attachment_id,
            request.lease_id,
            request.num_known,
            request.num_wanted,
            request.budget_ms / 1000,
            hold_s=request.hold_ms / 1000,
        )
        reply = kvstore_pb2.AwaitLentReply(
            blocks=update.blocks.data,
            is_all=update.is_all,
            num_unsealed=update.num_unsealed,
            held_ms=int(update.held_s * 1000),  # rounded down: it is a promise
            waited_us=int(update.waited_s * 1e6),
        )
        if reply.held_ms:
            reply.checksum = wire.checksum_of(reply)
        return reply

    @rpc.unary
    async def Hold(
        self, request: kvstore_pb2.HoldRequest, context: Context
    ) -> kvstore_pb2.HoldReply:
        if len(request.generations) != len(request.frames):
            raise InvalidArgument("generations", "must be one for each of frames")
        held_s, stale = self._source.hold(
            request.attachment_id,
            request.lease_id,
            list(zip(request.frames, request.generations, strict=True)),
            request.ttl_ms / 1000,
        )
        reply = kvstore_pb2.HoldReply(stale=stale, held_ms=int(held_s * 1000))
        reply.checksum = wire.checksum_of(reply)
        return reply

    # -- bytes out

    @_traced_unary
    async def Push(
        self, request: kvstore_pb2.PushRequest, context: Context
    ) -> kvstore_pb2.PushReply:
        wire.need_whole(request)
        outcome = await self._source.push(
            request.attachment_id,
            request.lease_id,
            request.push_id,
            wire.blocks_from_proto(request.blocks),
            request.destinations,
            request.budget_ms / 1000,
        )
        return kvstore_pb2.PushReply(
            push_id=request.push_id,
            terminal=outcome.terminal,
            num_bytes=outcome.num_bytes,
            stale=outcome.stale,
        )

    @rpc.unary
    async def GetPush(
        self, request: kvstore_pb2.GetPushRequest, context: Context
    ) -> kvstore_pb2.GetPushReply:
        return kvstore_pb2.GetPushReply(terminal=self._source.close_push(request.push_id))

    @rpc.streaming
    async def Read(
        self, request: kvstore_pb2.ReadRequest, context: Context
    ) -> AsyncGenerator[kvstore_pb2.ReadChunk, None]:
        with self.span_of("Read", context):
            pieces = self._source.copy_out(
                request.attachment_id,
                request.lease_id,
                wire.blocks_from_proto(request.blocks),
                request.chunk_bytes,
            )
            async with aclosing(pieces):  # the blocks are held until it is closed
                async for piece in pieces:
                    yield kvstore_pb2.ReadChunk(
                        index=piece.at,
                        offset=piece.offset,
                        data=piece.data,
                        stale=piece.is_stale,
                    )

    @_traced_unary
    async def Report(
        self, request: kvstore_pb2.ReportRequest, context: Context
    ) -> kvstore_pb2.ReportReply:
        num_dropped = await self._source.report(
            request.attachment_id, wire.blocks_from_proto(request.blocks)
        )
        return kvstore_pb2.ReportReply(num_dropped=num_dropped)

    # -- bytes in

    def _need_sink(self, what: str) -> BlockSink:
        """The sink of the service. Raises: FailedPrecondition, saying what a source that is no
        store does not do."""
        if self._sink is None:
            raise FailedPrecondition(f"this node lends its blocks for reading; it {what}")
        return self._sink

    @_traced_unary
    async def Reserve(
        self, request: kvstore_pb2.ReserveRequest, context: Context
    ) -> kvstore_pb2.ReserveReply:
        sink = self._need_sink("reserves no frames")
        _check_ttl(request.ttl_ms)
        if not request.chains:
            raise InvalidArgument("chains", "nothing to reserve, or a worker of another version")
        chains = wire.chains_from_proto(request)
        lease_id, reserved = await sink.reserve(
            request.attachment_id,
            request.lease_id,
            chains,
            is_probe=request.is_probe,
            ttl_s=request.ttl_ms / 1000,
        )
        reply = kvstore_pb2.ReserveReply(lease_id=lease_id, incarnation=self._source.incarnation)
        for chain, answer in zip(chains, reserved, strict=True):
            if answer is None:
                reply.chains.add(lacks_parent=True)
            else:
                reply.chains.add(blocks=_rows(chain.chain_hashes, answer))
        reply.checksum = wire.checksum_of(reply)
        return reply

    @_traced_unary
    async def Commit(
        self, request: kvstore_pb2.CommitRequest, context: Context
    ) -> kvstore_pb2.CommitReply:
        sink = self._need_sink("commits nothing")
        written = _written(request.blocks)
        if any(each.num_tokens < 1 for each in written):
            raise InvalidArgument("num_tokens", "a block has at least one filled slot")
        blocks = await sink.commit(
            request.attachment_id, request.lease_id, written, ends_lease=request.ends_lease
        )
        return kvstore_pb2.CommitReply(blocks=PackedBlocks.of(blocks).data)

    @_traced_unary
    async def Abort(
        self, request: kvstore_pb2.AbortRequest, context: Context
    ) -> kvstore_pb2.AbortReply:
        self._need_sink("has no reservations to abort").abort(
            request.attachment_id,
            request.lease_id,
            _written(request.blocks),
            quarantine=request.quarantine,
        )
        return kvstore_pb2.AbortReply()

    @_traced_unary
    async def Write(
        self, request: AsyncIterator[kvstore_pb2.WriteChunk], context: Context
    ) -> kvstore_pb2.WriteReply:
        sink = self._need_sink("takes no bytes")
        num_bytes = 0
        async for chunk in request:
            sink.copy_in(
                chunk.attachment_id,
                chunk.lease_id,
                chunk.frame,
                chunk.generation,
                chunk.offset,
                chunk.data,
            )
            num_bytes += len(chunk.data)
        return kvstore_pb2.WriteReply(num_bytes=num_bytes)

    # -- what there is

    @rpc.streaming
    async def List(
        self, request: kvstore_pb2.ListRequest, context: Context
    ) -> AsyncGenerator[kvstore_pb2.ListReply, None]:
        sequence, _ = self._index_state()
        for chain_hashes in self._source.present(self._list_chunk):
            yield kvstore_pb2.ListReply(
                incarnation=self._source.incarnation,
                index_sequence=sequence,
                chain_hashes=chain_hashes,
            )

    @rpc.unary
    async def GetBlockHistory(
        self, request: kvstore_pb2.GetBlockHistoryRequest, context: Context
    ) -> kvstore_pb2.GetBlockHistoryReply:
        sink = self._need_sink("keeps no history")
        max_blocks = min(request.max_blocks or FEW_HISTORIES, MAX_HISTORIES)
        return kvstore_pb2.GetBlockHistoryReply(
            node_id=self._source.node_id,
            incarnation=self._source.incarnation,
            keeps_history=sink.keeps_history,
            blocks=map(store_status.past_to_proto, sink.history(request.chain_hash, max_blocks)),
        )

    @rpc.unary
    async def GetStatus(
        self, request: kvstore_pb2.GetStatusRequest, context: Context
    ) -> kvstore_pb2.GetStatusReply:
        stats = await self._source.status(check_integrity=request.check_integrity)
        sequence, synced = self._index_state()
        reply = kvstore_pb2.GetStatusReply(
            node_id=self._source.node_id,
            incarnation=self._source.incarnation,
            index_sequence=sequence,
            index_synced=synced,
        )
        store_status.fill(reply, stats)
        return reply


def _rows(chain_hashes: Sequence[bytes], reserved: ReservedChain) -> bytes:
    """Rows of where the blocks of a chain and its tail lie or are to be written; none for blocks
    that have no room."""
    rows = [*map(_row, chain_hashes, reserved.blocks), _row(b"", reserved.tail or NO_ROOM)]
    return b"".join(rows)


def _row(chain_hash: bytes, answer: Reserved) -> bytes:
    if answer.block is not None:
        return row_of(answer.block)
    if not answer.has_room:
        return b""
    return row(chain_hash, answer.frame, answer.generation, 0, 0, Tier.UNSPECIFIED)


def _written(data: bytes) -> list[WrittenFrame]:
    """Unpack the written frames of a request. Raises: InvalidArgument."""
    blocks = wire.packed_from_proto(data)
    return [
        WrittenFrame(block.frame, block.generation, block.checksum, block.num_tokens)
        for block in blocks
    ]


def _check_ttl(ttl_ms: int) -> None:
    if ttl_ms < 1:
        raise InvalidArgument("ttl_ms", "must be positive")
