"""`baton.v1.KvStore` of a lender, over gRPC: what a store answers to readers, and every write
refused by name. Stubs to values and back, nothing else. One asyncio loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, NoReturn

import grpc.aio

from kvstore import wire
from kvstore.block_lender import BlockLender, ReaderInfo
from kvstore.node_ids import PROBE_HASH
from kvstore.transport.base import CUDA_IPC
from process import rpc
from process.errors import FailedPrecondition, InvalidArgument
from protos import kvstore_pb2, kvstore_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

MAX_PROBE_WAIT_S = 1.0
"""For free blocks of an engine that is in a long step; at most half of the caller's time."""


class LenderServicer(kvstore_pb2_grpc.KvStoreServicer):
    """See the proto for what each call promises."""

    def __init__(self, lender: BlockLender) -> None:
        self._lender = lender

    def add_to(self, server: grpc.aio.Server) -> None:
        kvstore_pb2_grpc.add_KvStoreServicer_to_server(self, server)

    # -- who reads

    @rpc.unary
    async def Attach(
        self, request: kvstore_pb2.AttachRequest, context: Context
    ) -> kvstore_pb2.AttachReply:
        wire.need_whole(request)
        lender = self._lender
        attachment = await lender.attach(_reader(request))
        memory, identity = lender.memory, lender.identity
        reply = kvstore_pb2.AttachReply(
            node_id=identity.node_id,
            incarnation=identity.incarnation,
            frame_bytes=memory.block_bytes,
            num_frames=memory.num_blocks,
            attachment_id=attachment.attachment_id,
            tells_when_lent=True,
        )
        if request.transport == "nixl":
            reply.nixl_agent = lender.peers.name
            reply.nixl_metadata = lender.peers.metadata
        if request.transport == CUDA_IPC and lender.shared is not None:
            reply.ipc_handle = lender.shared.handle
            reply.ipc_offset_bytes = lender.shared.offset_bytes
        reply.checksum = wire.checksum_of(reply)
        return reply

    @rpc.unary
    async def Detach(
        self, request: kvstore_pb2.DetachRequest, context: Context
    ) -> kvstore_pb2.DetachReply:
        self._lender.detach(request.attachment_id)
        return kvstore_pb2.DetachReply()

    @rpc.unary
    async def Match(
        self, request: kvstore_pb2.MatchRequest, context: Context
    ) -> kvstore_pb2.MatchReply:
        """A reader's sign of life: nothing is ever found here, for a lender is no store; but for
        blocks to measure the way with."""
        lender = self._lender
        lender.seen(request.attachment_id)
        reply = kvstore_pb2.MatchReply(incarnation=lender.identity.incarnation)
        if request.pin and set(request.chain_hashes) == {PROBE_HASH}:
            left_s = context.time_remaining()
            lease_id, blocks = await lender.probes.lend(
                request.attachment_id,
                len(request.chain_hashes),
                MAX_PROBE_WAIT_S if left_s is None else min(MAX_PROBE_WAIT_S, left_s / 2),
            )
            reply.lease_id = lease_id
            reply.blocks.extend(wire.block_to_proto(block) for block in blocks)
        return reply

    # -- leases

    @rpc.unary
    async def Renew(
        self, request: kvstore_pb2.RenewRequest, context: Context
    ) -> kvstore_pb2.RenewReply:
        lender = self._lender
        lender.was_read(request.num_bytes_read)
        lender.loans.renew(request.lease_id, request.ttl_ms / 1000, lender.now_s())
        return kvstore_pb2.RenewReply()

    @rpc.unary
    async def Release(
        self, request: kvstore_pb2.ReleaseRequest, context: Context
    ) -> kvstore_pb2.ReleaseReply:
        self._lender.was_read(request.num_bytes_read)
        num_released = self._lender.loans.release(request.lease_ids, self._lender.now_s())
        return kvstore_pb2.ReleaseReply(num_released=num_released)

    @rpc.unary
    async def AwaitLent(
        self, request: kvstore_pb2.AwaitLentRequest, context: Context
    ) -> kvstore_pb2.AwaitLentReply:
        told = await self._lender.await_lent(
            request.attachment_id,
            request.lease_id,
            request.num_known,
            request.num_wanted,
            request.budget_ms / 1000,
            takes_unsealed=request.takes_unsealed,
            hold_s=request.hold_ms / 1000,
        )
        reply = kvstore_pb2.AwaitLentReply(
            blocks=told.blocks.data,
            is_all=told.is_all,
            num_unsealed=told.num_unsealed,
            held_ms=int(told.held_s * 1000),
            waited_us=int(told.waited_s * 1e6),
        )
        if reply.held_ms:
            reply.checksum = wire.checksum_of(reply)
        return reply

    # -- bytes

    @rpc.unary
    async def Push(
        self, request: kvstore_pb2.PushRequest, context: Context
    ) -> kvstore_pb2.PushReply:
        wire.need_whole(request)
        outcome = await self._lender.push(
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
        return kvstore_pb2.GetPushReply(terminal=self._lender.peers.is_terminal(request.push_id))

    @rpc.unary
    async def Confirm(
        self, request: kvstore_pb2.ConfirmRequest, context: Context
    ) -> kvstore_pb2.ConfirmReply:
        if len(request.generations) != len(request.frames):
            raise InvalidArgument("generations", "must be one for each of frames")
        stale = self._lender.confirm(
            request.attachment_id,
            request.lease_id,
            list(zip(request.frames, request.generations, strict=True)),
            min(request.num_bytes_read, len(request.frames) * self._lender.memory.block_bytes),
        )
        return kvstore_pb2.ConfirmReply(stale=stale)

    @rpc.streaming
    async def Read(
        self, request: kvstore_pb2.ReadRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.ReadChunk]:
        pieces = self._lender.copy_out(
            request.attachment_id,
            request.lease_id,
            wire.blocks_from_proto(request.blocks),
            request.chunk_bytes,
        )
        async with aclosing(pieces):
            async for index, offset, data, stale in pieces:
                yield kvstore_pb2.ReadChunk(index=index, offset=offset, data=data, stale=stale)

    # -- accounts

    @rpc.unary
    async def Report(
        self, request: kvstore_pb2.ReportRequest, context: Context
    ) -> kvstore_pb2.ReportReply:
        blocks = wire.blocks_from_proto(request.blocks)
        num_dropped = await self._lender.report(request.attachment_id, blocks)
        return kvstore_pb2.ReportReply(num_dropped=num_dropped)

    @rpc.streaming
    async def List(
        self, request: kvstore_pb2.ListRequest, context: Context
    ) -> AsyncIterator[kvstore_pb2.ListReply]:
        yield kvstore_pb2.ListReply(incarnation=self._lender.identity.incarnation)

    @rpc.unary
    async def GetStatus(
        self, request: kvstore_pb2.GetStatusRequest, context: Context
    ) -> kvstore_pb2.GetStatusReply:
        lender, loans = self._lender, self._lender.loans
        reply = kvstore_pb2.GetStatusReply(
            node_id=lender.identity.node_id,
            incarnation=lender.identity.incarnation,
            frame_bytes=loans.frame_bytes,
            num_frames=loans.num_blocks,
            num_pinned=loans.num_lent,
            num_leases=loans.num_leases,
            num_attachments=len(lender.attachments),
            num_bytes_read=loans.counters.num_bytes_read,
            num_leases_lapsed=loans.counters.num_leases_lapsed,
            integrity_error=lender.check_integrity() if request.check_integrity else "",
        )
        for reason, num_blocks in sorted(loans.refused.items()):
            reply.refused.add(reason=reason, num_blocks=num_blocks)
        return reply

    # -- what a lender does not do

    @rpc.unary
    async def Reserve(
        self, request: kvstore_pb2.ReserveRequest, context: Context
    ) -> kvstore_pb2.ReserveReply:
        _refuse("reserves no frames")

    @rpc.unary
    async def Commit(
        self, request: kvstore_pb2.CommitRequest, context: Context
    ) -> kvstore_pb2.CommitReply:
        _refuse("commits nothing")

    @rpc.unary
    async def Abort(
        self, request: kvstore_pb2.AbortRequest, context: Context
    ) -> kvstore_pb2.AbortReply:
        _refuse("has no reservations to abort")

    @rpc.unary
    async def Pin(self, request: kvstore_pb2.PinRequest, context: Context) -> kvstore_pb2.PinReply:
        _refuse("pins nothing: its handles come with their leases")

    @rpc.unary
    async def Write(
        self, request: AsyncIterator[kvstore_pb2.WriteChunk], context: Context
    ) -> kvstore_pb2.WriteReply:
        _refuse("takes no bytes")


def _refuse(what: str) -> NoReturn:
    raise FailedPrecondition(f"this node lends its blocks for reading; it {what}")


def _reader(request: kvstore_pb2.AttachRequest) -> ReaderInfo:
    peer = wire.peer_from_proto(request) if request.transport == "nixl" else None
    return ReaderInfo(
        request.worker_id,
        request.worker_incarnation,
        request.model_fingerprint,
        request.block_bytes,
        request.transport,
        peer,
        request.host_id,
    )
