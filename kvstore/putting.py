"""Putter: a worker's blocks into one store: reserve, write, commit.

A put that fails, is late or is cancelled leaves no reservation behind: what it reserved is given
back in the background, and frames that its transfer may still write into first go out of use at the
store. Checksums are the transport's, over the worker's memory. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore import answer_checks, wire
from kvstore.block import Block
from kvstore.finishing import Background
from kvstore.lease_calls import LeaseCalls
from kvstore.rpc import Attached, StoreRpc
from kvstore.transport.base import PutItem, PutUnsettled, Transport
from process.deadline import Deadline
from process.errors import BatonError, DeadlineExceeded
from protos import kvstore_pb2

_RESERVE_TIMEOUT_S = 10.0  # of the call itself; the caller waits for its own deadline only
_ABORT_TIMEOUT_S = 2.0


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
class Wanted:
    """One reserved frame to write: which block, how many filled slots, under which name (none for a
    tail)."""

    block_id: int
    num_tokens: int
    frame: int
    generation: int
    chain_hash: bytes = b""


class Putter:
    """See the module."""

    def __init__(
        self,
        rpc: StoreRpc,
        attached: Attached,
        transport: Transport,
        leases: LeaseCalls,
        background: Background,
    ) -> None:
        self._rpc = rpc
        self._attachment_id = attached.attachment_id
        self._frame_bytes = attached.frame_bytes
        self._num_frames = attached.num_frames
        self._transport = transport
        self._leases = leases
        self._background = background

    async def put(
        self,
        lease_id: str | None,
        parent: bytes,
        blocks: Sequence[tuple[bytes, int]],
        tail: tuple[str, int, int] | None,
        ttl_s: float,
        deadline: Deadline,
        *,
        num_tokens: int,
        tenant: str,
        is_probe: bool = False,
    ) -> PutResult:
        """See StoreClient.put_blocks. is_probe: of a lease that this makes, see Lease."""
        request = kvstore_pb2.ReserveRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id or "",
            ttl_ms=wire.ttl_ms(ttl_s),
            parent=parent,
            chain_hashes=[chain_hash for chain_hash, _ in blocks],
            tail_name=tail[0] if tail else "",
            tenant=tenant,
            is_probe=is_probe,
        )
        owns_lease = not lease_id
        reply = await self._reserve(request, owns_lease, deadline)
        wanted, answers = _wanted(reply, blocks, tail, num_tokens)
        try:
            committed = await self._write(reply.lease_id, wanted, deadline)
        except BaseException as error:
            cause = self.undo_later(reply.lease_id, wanted, error, owns_lease=owns_lease)
            raise cause from (None if cause is error else error)
        refs = [_ref(answer, committed) for answer in answers]
        stored = tuple(ref for ref in refs[: len(blocks)] if ref is not None)
        tail_ref = refs[-1] if tail else None
        return PutResult(
            lease_id=reply.lease_id,
            refs=stored,
            tail=tail_ref,
            num_bytes=len(wanted) * self._frame_bytes,
            not_stored=len(answers) - len(stored) - (tail_ref is not None),
        )

    # -- its steps, for who needs them one by one

    async def reserve_tail(
        self, lease_id: str, tail: tuple[str, int, int], ttl_s: float, deadline: Deadline
    ) -> list[Wanted]:
        """A private frame under a lease; (name, block id, filled slots) as in `put`. What becomes
        of it is the caller's: written and `commit`, or `undo_later`. Returns: none without room."""
        request = kvstore_pb2.ReserveRequest(
            attachment_id=self._attachment_id,
            lease_id=lease_id,
            ttl_ms=wire.ttl_ms(ttl_s),
            tail_name=tail[0],
        )
        reply = await self._reserve(request, False, deadline)
        return _wanted(reply, (), tail, 0)[0]

    async def commit(
        self, lease_id: str, wanted: Sequence[Wanted], checksums: Sequence[int], deadline: Deadline
    ) -> dict[int, Block]:
        """All bytes are there. Returns: reserved frame -> the block as it stands."""
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
        with self._rpc.reading():
            chain_hashes = [each.chain_hash for each in wanted]
            answer_checks.check_written(reply, request, chain_hashes, self._num_frames)
        blocks = wire.blocks_from_proto(reply.blocks)
        return {each.frame: block for each, block in zip(wanted, blocks, strict=True)}

    def undo_later(
        self, lease_id: str, wanted: Sequence[Wanted], error: BaseException, *, owns_lease: bool
    ) -> BaseException:
        """Give back what was reserved, in the background, after `error`. Returns: what to raise."""
        cause, settled = error, None
        if isinstance(error, PutUnsettled):
            cause, settled = error.cause, error.settled
        self._background.spawn(self._undo(lease_id, wanted, settled, owns_lease))
        return cause

    # -- inside

    async def _reserve(
        self, request: kvstore_pb2.ReserveRequest, owns_lease: bool, deadline: Deadline
    ) -> kvstore_pb2.ReserveReply:
        """Reserve. A caller that leaves early leaves nothing behind: the call goes on by itself,
        and what it reserved is given back."""
        self._rpc.check()
        if deadline.expired:
            raise DeadlineExceeded("put: no time is left")
        call = self._background.spawn(self._reserved(request, Deadline.after(_RESERVE_TIMEOUT_S)))
        try:
            await asyncio.wait([call], timeout=deadline.left_s())
        except asyncio.CancelledError:
            self._background.spawn(self._undo_reserve(call, owns_lease))
            raise
        if not call.done():
            self._background.spawn(self._undo_reserve(call, owns_lease))
            raise DeadlineExceeded("reserve: the time for it ran out")
        reply: kvstore_pb2.ReserveReply = call.result()
        return reply

    async def _reserved(
        self, request: kvstore_pb2.ReserveRequest, deadline: Deadline
    ) -> kvstore_pb2.ReserveReply:
        reply: kvstore_pb2.ReserveReply = await self._rpc.call(
            self._rpc.stub.Reserve, request, deadline
        )
        with self._rpc.reading():
            answer_checks.check_reserved(reply, request, self._num_frames)
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
        self, lease_id: str, wanted: Sequence[Wanted], deadline: Deadline
    ) -> dict[int, Block]:
        """Bytes and checksums, then the commit. Returns: reserved frame -> the block as it
        stands."""
        if not wanted:
            return {}
        items = [PutItem(each.block_id, each.frame, each.generation) for each in wanted]
        checksums = await self._transport.put(lease_id, items, deadline)
        return await self.commit(lease_id, wanted, checksums, deadline)

    async def _undo(
        self,
        lease_id: str,
        wanted: Sequence[Wanted],
        settled: asyncio.Future[None] | None,
        owns_lease: bool,
    ) -> None:
        """Give frames back after a failed put; those still being written first go out of use."""
        if settled is not None:
            await self._abort(lease_id, wanted, quarantine=True)
            await asyncio.wait([settled])
        await self._abort(lease_id, wanted, quarantine=False)
        if owns_lease and not self._rpc.broken:
            try:
                await self._leases.release([lease_id], Deadline.after(_ABORT_TIMEOUT_S))
            except BatonError:
                return  # it lapses by itself

    async def _abort(self, lease_id: str, wanted: Sequence[Wanted], *, quarantine: bool) -> None:
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
        while wanted and not self._rpc.broken:
            try:
                await self._rpc.call(
                    self._rpc.stub.Abort, request, Deadline.after(_ABORT_TIMEOUT_S)
                )
                return
            except DeadlineExceeded:
                await asyncio.sleep(_ABORT_TIMEOUT_S)
            except BatonError:
                return


def _wanted(
    reply: kvstore_pb2.ReserveReply,
    blocks: Sequence[tuple[bytes, int]],
    tail: tuple[str, int, int] | None,
    num_tokens: int,
) -> tuple[list[Wanted], list[kvstore_pb2.ReservedBlock]]:
    """What is to be written, and all answers in order (the tail's last, if one was asked for)."""
    answers = list(reply.blocks)
    sources = [(block_id, num_tokens) for _, block_id in blocks]
    if reply.HasField("tail"):
        answers.append(reply.tail)
        sources.append((tail[1], tail[2]) if tail else (0, 0))
    if len(sources) < len(answers):
        sources = [(0, 0)] * len(answers)  # only the frames matter: they are given back
    reserved = [
        Wanted(
            block_id,
            filled,
            answer.block.frame,
            answer.block.generation,
            answer.block.chain_hash,
        )
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
