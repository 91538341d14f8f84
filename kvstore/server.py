"""`baton.v1.KvStore` over gRPC: stubs to values and back, nothing else. One asyncio loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio

from kvstore import status, traced, wire
from kvstore.block_store import NO_ROOM, Reserved, WrittenFrame, check_chain
from kvstore.blocks import PackedBlocks, Tier, row, row_of
from kvstore.errors import LeaseLapsed
from kvstore.node import StoreNode, WorkerInfo
from process import rpc, spans
from process.errors import FailedPrecondition, InvalidArgument
from protos import kvstore_pb2, kvstore_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MATCH_S = 30.0
"""Longest time a match may take to bring blocks in from the file tier."""
MATCH_PART = 0.8
"""Of the time that the caller gives, so that the answer still arrives."""
MAX_BYTES_READ = 1 << 44
"""That one call may say were read: 16 TB, minutes of the fastest link."""
FEW_HISTORIES = 8
MAX_HISTORIES = 256
"""Of blocks, in one reply: 500 kB at most."""
LIST_CHUNK = 16_384
"""Chain hashes in one message: 300 kB, far below gRPC's limit of 4 MB."""


class KvStoreServicer(kvstore_pb2_grpc.KvStoreServicer):
    """See the proto for what each call promises."""

    def __init__(
        self,
        node: StoreNode,
        index_state: Callable[[], tuple[int, bool]] = lambda: (0, False),
        list_chunk: int = LIST_CHUNK,
    ) -> None:
        """index_state: (sequence, whether the index has everything), for the status. list_chunk:
        chain hashes in one message of `List`."""
        self._node = node
        self._index_state = index_state
        self._list_chunk = list_chunk
        self.tracing = node.tracing

    @property
    def node_id(self) -> str:
        """Known once the store listens."""
        return self._node.node_id

    def add_to(self, server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self, server)

    @rpc.unary
    async def Attach(
        self, request: kvstore_pb2.AttachRequest, context: Context
    ) -> kvstore_pb2.AttachReply:
        wire.need_whole(request)
        attachment = await self._node.attach(
            WorkerInfo(
                worker_id=request.worker_id,
                worker_incarnation=request.worker_incarnation,
                model_fingerprint=request.model_fingerprint,
                block_bytes=request.block_bytes,
                transport=request.transport,
                peer=wire.peer_from_proto(request),
            )
        )
        reply = kvstore_pb2.AttachReply(
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            attachment_id=attachment.attachment_id,
        )
        slab = self._node.slab
        if slab is not None:
            reply.frame_bytes = slab.layout.frame_bytes
            reply.num_frames = slab.layout.num_frames
            reply.slab_path = str(slab.path)
            reply.slab_bytes = slab.layout.total_bytes
            reply.frames_offset = slab.layout.frames_offset
            reply.generations_offset = slab.layout.generations_offset
            reply.keeps_history = self._node.settings.max_history_blocks > 0
            if request.transport == "nixl" and self._node.peers is not None:
                reply.nixl_agent = self._node.peers.name
                reply.nixl_metadata = self._node.peers.metadata
                reply.region_address = slab.frames_address
        reply.checksum = wire.checksum_of(reply)
        return reply

    @rpc.unary
    async def Detach(
        self, request: kvstore_pb2.DetachRequest, context: Context
    ) -> kvstore_pb2.DetachReply:
        self._node.detach(request.attachment_id)
        return kvstore_pb2.DetachReply()

    @rpc.unary
    @traced.call
    async def Match(
        self, request: kvstore_pb2.MatchRequest, context: Context
    ) -> kvstore_pb2.MatchReply:
        if request.pin and not request.lease_id:
            _check_ttl(request.ttl_ms)
        left_s = context.time_remaining()
        match = await self._node.match(
            request.attachment_id,
            request.chain_hashes,
            pin=request.pin,
            lease_id=request.lease_id,
            ttl_s=request.ttl_ms / 1000,
            budget_s=MATCH_S if left_s is None else min(MATCH_S, MATCH_PART * left_s),
        )
        reply = kvstore_pb2.MatchReply(
            lease_id=match.lease_id,
            incarnation=self._node.incarnation,
            num_hits=match.num_hits,
        )
        wire.add_blocks(reply.blocks, match.blocks)
        span = spans.current_span()
        if span.is_recording and self._node.store is not None:
            hashes = [block.chain_hash for block in match.blocks]
            for link in self._node.store.history.links(hashes):
                span.link(link.context, link.attributes)
        return reply

    @rpc.unary
    @traced.call
    async def Reserve(
        self, request: kvstore_pb2.ReserveRequest, context: Context
    ) -> kvstore_pb2.ReserveReply:
        self._node.seen(request.attachment_id)
        _check_ttl(request.ttl_ms)
        if not request.chains:
            raise InvalidArgument("chains", "nothing to reserve, or a worker of another version")
        chains = [(each, wire.hashes_from_proto(each.chain_hashes)) for each in request.chains]
        for chain, chain_hashes in chains:  # all of them before anything is taken
            check_chain(chain.parent, chain_hashes, chain.tenant)
        reply = kvstore_pb2.ReserveReply(
            lease_id=request.lease_id, incarnation=self._node.incarnation
        )
        for chain, chain_hashes in chains:
            try:
                reply.lease_id, answers, tail = await self._node.reserve(
                    request.attachment_id,
                    chain.parent,
                    chain_hashes,
                    tail_name=chain.tail_name,
                    tenant=chain.tenant,
                    lease_id=reply.lease_id,
                    is_probe=request.is_probe,
                    ttl_s=request.ttl_ms / 1000,
                )
            except FailedPrecondition:
                reply.chains.add(lacks_parent=True)
                continue
            rows = [*map(_row, chain_hashes, answers), _row(b"", tail or NO_ROOM)]
            reply.chains.add(blocks=b"".join(rows))
        reply.checksum = wire.checksum_of(reply)
        return reply

    @rpc.unary
    @traced.call
    async def Commit(
        self, request: kvstore_pb2.CommitRequest, context: Context
    ) -> kvstore_pb2.CommitReply:
        store, now_s = self._node.seen(request.attachment_id)
        written = _written(request.blocks)
        if any(each.num_tokens < 1 for each in written):
            raise InvalidArgument("num_tokens", "a block has at least one filled slot")
        blocks = store.commit(request.attachment_id, request.lease_id, written, now_s)
        reply = kvstore_pb2.CommitReply(blocks=PackedBlocks.of(blocks).data)
        if request.ends_lease:
            store.release([request.lease_id], num_bytes_read=0, now_s=now_s)
        self._node.look_for_room()
        return reply

    @rpc.unary
    @traced.call
    async def Abort(
        self, request: kvstore_pb2.AbortRequest, context: Context
    ) -> kvstore_pb2.AbortReply:
        store, now_s = self._node.seen(request.attachment_id)
        store.abort(
            request.attachment_id,
            request.lease_id,
            _written(request.blocks),
            quarantine=request.quarantine,
            now_s=now_s,
        )
        return kvstore_pb2.AbortReply()

    @rpc.unary
    async def Pin(self, request: kvstore_pb2.PinRequest, context: Context) -> kvstore_pb2.PinReply:
        store, now_s = self._node.seen(request.attachment_id)
        _check_ttl(request.ttl_ms)
        lease_id, num_pinned = store.pin(
            wire.blocks_from_proto(request.blocks), ttl_s=request.ttl_ms / 1000, now_s=now_s
        )
        return kvstore_pb2.PinReply(lease_id=lease_id, num_pinned=num_pinned)

    @rpc.unary
    @traced.call
    async def Renew(
        self, request: kvstore_pb2.RenewRequest, context: Context
    ) -> kvstore_pb2.RenewReply:
        _check_num_bytes_read(request.num_bytes_read)
        if self._node.store is None:
            raise LeaseLapsed(f"lease {request.lease_id}: nobody is attached")
        self._note_verified(request)
        self._node.store.renew(
            request.lease_id,
            ttl_s=request.ttl_ms / 1000,
            num_bytes_read=request.num_bytes_read,
            now_s=self._node.now_s(),
        )
        return kvstore_pb2.RenewReply()

    @rpc.unary
    @traced.call
    async def Release(
        self, request: kvstore_pb2.ReleaseRequest, context: Context
    ) -> kvstore_pb2.ReleaseReply:
        _check_num_bytes_read(request.num_bytes_read)
        if self._node.store is None:
            return kvstore_pb2.ReleaseReply()
        self._note_verified(request)
        num_released = self._node.store.release(
            request.lease_ids, num_bytes_read=request.num_bytes_read, now_s=self._node.now_s()
        )
        return kvstore_pb2.ReleaseReply(num_released=num_released)

    def _note_verified(
        self, request: kvstore_pb2.RenewRequest | kvstore_pb2.ReleaseRequest
    ) -> None:
        for each in request.verified:
            if self._node.store is not None:
                self._node.store.note_verified(
                    request.attachment_id,
                    each.frames,
                    each.generations,
                    spans.parse_traceparent(each.traceparent) if each.traceparent else None,
                )

    @rpc.unary
    @traced.call
    async def Push(
        self, request: kvstore_pb2.PushRequest, context: Context
    ) -> kvstore_pb2.PushReply:
        wire.need_whole(request)
        outcome = await self._node.push(
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
        return kvstore_pb2.GetPushReply(terminal=self._node.is_push_terminal(request.push_id))

    @rpc.unary
    @traced.call
    async def Write(
        self, request: AsyncIterator[kvstore_pb2.WriteChunk], context: Context
    ) -> kvstore_pb2.WriteReply:
        num_bytes = 0
        async for chunk in request:
            self._node.copy_in(
                chunk.attachment_id,
                chunk.lease_id,
                chunk.frame,
                chunk.generation,
                chunk.offset,
                chunk.data,
            )
            num_bytes += len(chunk.data)
        return kvstore_pb2.WriteReply(num_bytes=num_bytes)

    @rpc.streaming
    async def Read(
        self, request: kvstore_pb2.ReadRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.ReadChunk]:
        with traced.span_of(self, "Read", context):
            pieces = self._node.copy_out(
                request.attachment_id,
                request.lease_id,
                wire.blocks_from_proto(request.blocks),
                request.chunk_bytes,
            )
            async for index, offset, data, stale in pieces:
                yield kvstore_pb2.ReadChunk(index=index, offset=offset, data=data, stale=stale)

    @rpc.unary
    @traced.call
    async def Report(
        self, request: kvstore_pb2.ReportRequest, context: Context
    ) -> kvstore_pb2.ReportReply:
        num_dropped = await self._node.report(
            request.attachment_id, wire.blocks_from_proto(request.blocks)
        )
        return kvstore_pb2.ReportReply(num_dropped=num_dropped)

    @rpc.streaming
    async def List(
        self, request: kvstore_pb2.ListRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.ListReply]:
        sequence, _ = self._index_state()
        for chain_hashes in self._node.present(self._list_chunk):
            yield kvstore_pb2.ListReply(
                incarnation=self._node.incarnation,
                index_sequence=sequence,
                chain_hashes=chain_hashes,
            )

    @rpc.unary
    async def GetBlockHistory(
        self, request: kvstore_pb2.GetBlockHistoryRequest, context: Context
    ) -> kvstore_pb2.GetBlockHistoryReply:
        reply = kvstore_pb2.GetBlockHistoryReply(
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            keeps_history=self._node.settings.max_history_blocks > 0,
        )
        store = self._node.store
        if store is not None:
            max_blocks = min(request.max_blocks or FEW_HISTORIES, MAX_HISTORIES)
            for chain_hash, past in store.history.find(request.chain_hash, max_blocks):
                reply.blocks.append(status.history(chain_hash, past, store))
        return reply

    @rpc.unary
    async def GetStatus(
        self, request: kvstore_pb2.GetStatusRequest, context: Context
    ) -> kvstore_pb2.GetStatusReply:
        if request.check_integrity:
            await self._node.check_integrity()
        sequence, synced = self._index_state()
        reply = kvstore_pb2.GetStatusReply(
            node_id=self._node.node_id,
            incarnation=self._node.incarnation,
            index_sequence=sequence,
            index_synced=synced,
            integrity_error=self._node.integrity_error,
            file_tier_problem=self._node.file_tier_problem,
        )
        if self._node.store is not None:
            status.fill(reply, self._node.store)
        return reply


def _row(chain_hash: bytes, answer: Reserved) -> bytes:
    """Where the block lies, or is to be written; empty where it has no room."""
    if answer.block is not None:
        return row_of(answer.block)
    if not answer.has_room:
        return b""
    return row(chain_hash, answer.frame, answer.generation, 0, 0, Tier.UNSPECIFIED)


def _written(data: bytes) -> list[WrittenFrame]:
    """Raises: InvalidArgument."""
    blocks = wire.packed_from_proto(data)
    return [
        WrittenFrame(block.frame, block.generation, block.checksum, block.num_tokens)
        for block in blocks
    ]


def _check_num_bytes_read(num_bytes: int) -> None:
    """The sum of what is told must always fit into the status."""
    if num_bytes > MAX_BYTES_READ:
        raise InvalidArgument("num_bytes_read", f"at most {MAX_BYTES_READ} at once")


def _check_ttl(ttl_ms: int) -> None:
    if ttl_ms < 1:
        raise InvalidArgument("ttl_ms", "must be positive")
