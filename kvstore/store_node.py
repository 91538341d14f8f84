"""StoreNode: the state of a running KV store process: its memory, the workers attached to it, and
the loop that maintains both.

Life: made at start with nothing taken -> the first `attach` says how large a block is and takes the
memory, with it the file tier, the NIXL peers and the maintenance loop -> `stop` unlinks the slab.
The mapping stays as long as the process lives: peers may hold its address.

Every `sweep_interval_s` the loop ends what has lapsed, detaches workers that are gone, demotes
blocks if frames are short, and has the kernel allocate memory for the next frames. The conservation
laws are recomputed if calls came since the last time and none comes now.

Knows no stubs (service.py) and no Redis (index_publisher.py). One asyncio loop.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn

import numpy as np

from kvstore import block_hash
from kvstore.attached_workers import Attachment
from kvstore.block_changes import ChangeLog, NullLog
from kvstore.block_history import PULLED, REFUSED, BlockHistory
from kvstore.block_refs import Block
from kvstore.block_source import (
    ChainToReserve,
    MatchResult,
    PastBlock,
    ReadPiece,
    ReservedChain,
    StoreInfo,
    StoreStats,
    WorkerInfo,
    read_pieces,
)
from kvstore.block_store import (
    NO_ROOM,
    BlockStore,
    PrefixMatch,
    Reserved,
    StoreLimits,
    WrittenFrame,
    check_chain,
)
from kvstore.config import KvStoreSettings
from kvstore.errors import LEASE_LAPSED, LeaseLapsed, UnknownAttachment
from kvstore.file_tier import FileTier, OpenedPages, open_pages
from kvstore.invariants import SlicedCheck
from kvstore.leases import Lease
from kvstore.nixl_push import BlockPusher, Frames, PushOutcome, Target
from kvstore.slab import MAX_DEFAULT_FRAMES, Slab, check_room, free_bytes, remove_stale
from kvstore.tenant_shares import TenantShares
from kvstore.transport.base import TRANSPORTS
from kvstore.transport.nixl_agent import Region
from kvstore.turn_budget import TurnBudget
from process import entrypoint, logs
from process.background_tasks import complete_despite_cancel, end_tasks, start_task
from process.deadline import Clock, Deadline
from process.rpc_errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoCapacity,
    Unavailable,
)
from process.trace_spans import TraceContext, current_span
from process.tracing import OFF, Tracing

logger = logging.getLogger(__name__)

TOUCH_AHEAD_BYTES = 64 * 1024 * 1024
"""Memory that the kernel has allocated ahead of the frames in use: a quarter of a second of writes
at 256 MB/s."""
_TOUCH_STEP_BYTES = 8 * 1024 * 1024
FREEZE_EVERY = 256
"""New blocks after which gc.freeze() takes all blocks out of the garbage collector's passes: 1 to 2
ms of the loop (measured)."""
BLOCKS_A_TURN = 128
"""Blocks that all calls together reserve or commit in one turn of the loop: 1 to 4 ms where others
must be evicted."""
MATCHED_PER_WRITTEN = 8
"""Blocks that a match handles in the time in which one block is reserved or committed."""
_DRAIN_POLL_S = 0.05
_CLOSE_PEERS_S = 1.0
_ATTACHING_S = 30.0
"""Time that `stop` waits for an attach that is taking memory."""


class StoreNode:
    """A store without its gRPC server and its index: a BlockSource and a BlockSink. `store`,
    `slab`, `peers` and, if asked for, `tier` are there from the first attach on."""

    def __init__(
        self,
        settings: KvStoreSettings,
        node_id: str,
        *,
        changes: ChangeLog | None = None,
        clock: Clock = time.monotonic,
        tracing: Tracing = OFF,
    ) -> None:
        """Args: changes: gets each block that comes or goes; None: the store is in no index."""
        self.settings = settings
        self.node_id = node_id
        self.incarnation = entrypoint.new_incarnation()
        self.tracing = tracing
        self.store: BlockStore | None = None
        self.slab: Slab | None = None
        self.tier: FileTier | None = None
        self.peers: BlockPusher | None = None
        self.num_touched = 0
        """The number of frames whose memory the kernel has allocated."""
        self.is_draining = False
        """Whether `drain` was called: no new block is stored, those present are served until the
        last lease ends."""
        self.turns = TurnBudget(BLOCKS_A_TURN)
        """Bounds the blocks that calls handle in one turn of the loop."""
        self._changes = NullLog() if changes is None else changes
        self._clock = clock
        self._attaching = asyncio.Lock()
        self._is_stopping = False
        self._tier_problem = ""
        self._check: SlicedCheck | None = None
        self._num_beats = 0  # heartbeats: they may change what is checked, and are no work
        self._num_frozen = 0  # of PrefixTree.num_inserted
        self._maintenance: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._toucher: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Remove slabs of dead stores, and check that there is room for this one. Raises:
        NoCapacity naming the settings."""
        folder = Path(self.settings.slab_dir)
        check_room(folder, 0)
        for path in remove_stale(folder):
            logs.event(logger, "stale_slab_removed", path=str(path))
        check_room(folder, self.settings.capacity_bytes)
        if not self.settings.capacity_bytes:
            free_bytes(folder)  # raises where the folder cannot say it
        if self.settings.file_tier_dir and not Path(self.settings.file_tier_dir).is_dir():
            raise NoCapacity(f"file_tier_dir: {self.settings.file_tier_dir} is not a folder")

    async def stop(self) -> None:
        """End the background work, and remove the slab's name."""
        self._is_stopping = True
        try:
            async with asyncio.timeout(_ATTACHING_S), self._attaching:
                pass  # no attach takes memory from here on
        except TimeoutError:
            logs.event(logger, "attaching_not_ended", level=logging.ERROR)
        await end_tasks([self._maintenance, self._checking, self._toucher])
        if self._check is not None:
            await self._check.stop()
        if self.peers is not None:
            await self.peers.close(_CLOSE_PEERS_S)
        if self.tier is not None:
            await self.tier.close()
        if self.slab is not None:
            self.slab.unlink()
            self.slab.close()

    async def drain(self, deadline: Deadline) -> bool:
        """Store nothing new, and wait until the last lease ends. Returns: whether that was in
        time."""
        self.is_draining = True
        if self.store is not None:
            self.store.is_closed = True
        try:
            async with deadline.timeout("leases to end"):
                while self.store is not None and len(self.store.leases):
                    await asyncio.sleep(_DRAIN_POLL_S)
        except DeadlineExceeded:
            return False
        return True

    @property
    def integrity_error(self) -> str:
        """The invariant of the store that the last complete check, or a call, found violated;
        empty: none is known to be."""
        return self._check.error if self._check is not None else ""

    @property
    def file_tier_problem(self) -> str:
        """Why the file tier that was asked for is not used; empty: it is used, or none was asked
        for."""
        return self.tier.problem if self.tier is not None else self._tier_problem

    async def check_integrity(self) -> str:
        """Recompute every invariant, within a bounded time. Returns: the one that does not hold;
        empty when all do, and before the first attach."""
        return await self._check.check() if self._check is not None else ""

    def stats(self) -> StoreStats:
        """The store's numbers of now."""
        stats = StoreStats.of(self.store) if self.store is not None else StoreStats()
        return replace(
            stats, integrity_error=self.integrity_error, file_tier_problem=self.file_tier_problem
        )

    async def status(self, *, check_integrity: bool) -> StoreStats:
        """The store's numbers of now. check_integrity: recompute the invariants first."""
        if check_integrity:
            await self.check_integrity()
        return self.stats()

    # -- workers

    async def attach(self, worker: WorkerInfo) -> StoreInfo:
        """Attach a worker over one transport. The first one says how large a block is, and the
        store takes its memory.

        Raises: InvalidArgument; FailedPrecondition for another block size; NoCapacity; Unavailable
            when the store is stopping.
        """
        if not worker.worker_id:
            raise InvalidArgument("worker_id", "must be given")
        if worker.transport not in TRANSPORTS:
            raise InvalidArgument("transport", f"one of {', '.join(TRANSPORTS)}")
        if worker.block_bytes < 1:
            raise InvalidArgument("block_bytes", "must be positive")
        async with self._attaching:
            if self._is_stopping:
                raise Unavailable("the store is stopping")
            store, slab, peers = await self._with_memory(worker.block_bytes)
            if worker.block_bytes != store.frame_bytes:
                raise FailedPrecondition(
                    f"block_bytes: this store's frames have {store.frame_bytes} bytes, the "
                    f"worker's blocks {worker.block_bytes}; another KV layout needs another store"
                )
            target: Target | None = None
            if worker.transport == "nixl":
                if worker.peer is None:
                    raise InvalidArgument("region_address", "must be given for transport nixl")
                target = await peers.meet(worker.peer)
        one_sided = worker.transport != "grpc"
        attachment = store.attach(
            worker.worker_id, worker.worker_incarnation, worker.transport, one_sided, self.now_s()
        )
        if target is not None:
            peers.add(attachment.attachment_id, target)
        self._forget_peers()
        logs.event(
            logger,
            "attached",
            worker_id=worker.worker_id,
            transport=worker.transport,
            fingerprint=worker.model_fingerprint.hex(),
        )
        return StoreInfo(
            attachment_id=attachment.attachment_id,
            node_id=self.node_id,
            incarnation=self.incarnation,
            frame_bytes=store.frame_bytes,
            num_frames=slab.layout.num_frames,
            slab_path=str(slab.path),
            nixl_metadata=peers.metadata if target is not None else b"",
            region_address=slab.frames_address if target is not None else 0,
            keeps_history=self.keeps_history,
        )

    def detach(self, attachment_id: str) -> None:
        """End the attachment of a worker that leaves by itself: no transfer of it is under way."""
        if self.store is not None:
            self.store.detach(attachment_id, self.now_s(), grace_s=0.0)
            self._forget_peers()

    def now_s(self) -> float:
        """The time on the store's clock. Counts a call that may change what `check_integrity`
        checks: a check that is under way begins again."""
        if self._check is not None:
            self._check.num_calls += 1
        return self._clock()

    def seen(self, attachment_id: str, *, is_beat: bool = False) -> tuple[BlockStore, float]:
        """Note that an attached worker lives. Returns: the store and the time of this call.

        Raises: UnknownAttachment.
        """
        if self.store is None or self._check is None:
            raise UnknownAttachment(
                f"attachment {attachment_id}: no worker is attached; attach again"
            )
        if is_beat:
            self._num_beats += 1
        else:
            self._check.num_calls += 1
        now_s = self._clock()
        self.store.attachments.get(attachment_id, now_s)
        return self.store, now_s

    # -- blocks

    def present(self, num_hashes: int) -> Iterator[list[bytes]]:
        """Yield every chain hash that is present, in no order, in lists of `num_hashes`, each of
        the moment in which it is asked for."""
        return (
            iter([[]]) if self.store is None else self.store.tree.nodes.keys_in_pieces(num_hashes)
        )

    def snapshot(self, num_hashes: int) -> Iterator[list[bytes]]:
        """Yield every chain hash that is present, in lists of `num_hashes`, and clear the log of
        changes: what it holds from here on brings the lists up to date."""
        if self.store is None:
            self._changes.clear()
            return iter([[]])
        return self.store.tree.snapshot(num_hashes)

    async def match(
        self,
        attachment_id: str,
        chain_hashes: Sequence[bytes],
        *,
        pin: bool,
        lease_id: str,
        ttl_s: float,
        budget_s: float,
    ) -> MatchResult:
        """Find the longest prefix of the chain that is present. With `pin` it is pinned under a
        lease, and blocks that lie in the file tier only are brought into memory, as far as that
        goes within `budget_s`.

        Raises: UnknownAttachment, LeaseLapsed.
        """
        deadline = Deadline.after(budget_s)
        match = PrefixMatch([], lease_id, 0)
        is_of_use = False
        size = self.turns.max_blocks * MATCHED_PER_WRITTEN
        try:
            for at in range(0, max(1, len(chain_hashes)), size):
                piece = chain_hashes[at : at + size]
                if piece:
                    await self.turns.take(1 + len(piece) // MATCHED_PER_WRITTEN)
                store, now_s = self.seen(attachment_id, is_beat=not piece)
                match = store.match(
                    piece,
                    pin=pin,
                    lease_id=match.lease_id,
                    ttl_s=ttl_s,
                    now_s=now_s,
                    after=match if at else None,
                )
                if len(match.nodes) < at + len(piece):  # what follows is absent
                    store.counters.num_blocks_asked += len(chain_hashes) - at - len(piece)
                    break
            if pin and match.in_file:
                if self.tier is not None:
                    await self.tier.promote(match.nodes, deadline)
                store.settle(match, self._clock())
            is_of_use = bool(match.nodes)
        finally:
            is_own = match.lease_id != lease_id
            if is_own and not is_of_use:  # it pins nothing, or its caller is gone
                store.release([match.lease_id], now_s=self._clock())
                match.lease_id = ""
        blocks, span = match.blocks, current_span()
        if span.is_recording:
            for link in store.history.links(block.chain_hash for block in blocks):
                span.link(link.context, link.attributes)
        return MatchResult(blocks, match.lease_id, match.num_hits)

    def pin(self, attachment_id: str, blocks: Sequence[Block], *, ttl_s: float) -> tuple[str, int]:
        """Pin the longest prefix of `blocks` that is still valid. Returns: the new lease's id,
        empty for none, and how many blocks it pins. Raises: UnknownAttachment."""
        store, now_s = self.seen(attachment_id)
        return store.pin(blocks, ttl_s=ttl_s, now_s=now_s)

    def renew(self, lease_id: str, *, ttl_s: float, num_bytes_read: int) -> None:
        """Let a lease live at least `ttl_s` from now. Raises: LeaseLapsed."""
        if self.store is None:
            raise LeaseLapsed(f"lease {lease_id}: no worker is attached")
        self.store.renew(lease_id, ttl_s=ttl_s, num_bytes_read=num_bytes_read, now_s=self.now_s())

    def release(self, lease_ids: Iterable[str], *, num_bytes_read: int) -> int:
        """End leases; those that are over are passed over. Returns: how many were ended."""
        if self.store is None:
            return 0
        return self.store.release(lease_ids, num_bytes_read=num_bytes_read, now_s=self.now_s())

    async def await_lent(self, *_: object, **__: object) -> NoReturn:
        """Refuse: a store's leases do not grow. Raises: FailedPrecondition."""
        raise FailedPrecondition("await_lent: this node is a store; only a lender's leases grow")

    def hold(self, *_: object) -> NoReturn:
        """Refuse: a store's slab shows the generations. Raises: FailedPrecondition."""
        raise FailedPrecondition("hold: this node is a store, whose slab says its generations")

    # -- writing

    async def reserve(
        self,
        attachment_id: str,
        lease_id: str,
        chains: Sequence[ChainToReserve],
        *,
        is_probe: bool,
        ttl_s: float,
    ) -> tuple[str, list[ReservedChain | None]]:
        """Reserve frames for the blocks of all chains under one lease, as BlockStore.reserve does
        for one. A call that fails or is cancelled leaves nothing of it reserved.

        Returns: the lease, empty where none was given or made; and for each chain its answers, None
            where its parent is missing.
        """
        self.seen(attachment_id)
        for chain in chains:  # all of them before anything is taken
            check_chain(chain.parent, chain.chain_hashes, chain.tenant)
        call = _ReserveCall(attachment_id, lease_id, is_probe, ttl_s)
        try:
            reserved = [await self._reserve_chain(call, chain) for chain in chains]
        except BaseException:
            self._undo_reserve(call, owns_lease=not lease_id)
            raise
        return call.lease_id, reserved

    async def _reserve_chain(
        self, call: _ReserveCall, chain: ChainToReserve
    ) -> ReservedChain | None:
        """`reserve` of one chain, piece by piece as turns of the loop have room. Between two turns
        the blocks reserved so far cannot be evicted: the lease pins them, or has them written."""
        parent, chain_hashes, tail_name, tenant = chain
        answers: list[Reserved] = []
        tail: Reserved | None = None
        for at in range(0, max(1, len(chain_hashes)), self.turns.max_blocks):
            piece = chain_hashes[at : at + self.turns.max_blocks]
            await self.turns.take(len(piece) or 1)
            store, now_s = self.seen(call.attachment_id)
            is_last = at + len(piece) == len(chain_hashes)
            lease = store.leases.find(call.lease_id)
            earlier = set[int]() if lease is None else {*map(lease.writing.get, piece)}
            try:
                call.lease_id, found, tail = store.reserve(
                    call.attachment_id,
                    parent,
                    piece,
                    tail_name=tail_name if is_last else "",
                    tenant=tenant,
                    lease_id=call.lease_id,
                    is_probe=call.is_probe,
                    ttl_s=call.ttl_s,
                    now_s=now_s,
                )
            except FailedPrecondition:
                if not answers:
                    return None
                break  # what this piece follows was found damaged since the last turn
            call.taken += [
                WrittenFrame(each.frame, each.generation)
                for each in (*found, tail or NO_ROOM)
                if each.frame >= 0 and each.frame not in earlier
            ]
            answers += found
            if answers and not answers[-1].has_room:
                break
            parent = piece[-1] if piece else parent
        num_left = len(chain_hashes) - len(answers)
        if num_left and tail_name:
            tail = NO_ROOM
        return ReservedChain([*answers, *([NO_ROOM] * num_left)], tail)

    def _undo_reserve(self, call: _ReserveCall, *, owns_lease: bool) -> None:
        """Free what an unfinished Reserve has taken. The worker got no answer that names
        these frames, so nothing is written into them: a worker has one Reserve under way for each
        lease. owns_lease: the call made its lease."""
        store, now_s = self.store, self.now_s()
        if store is None or store.attachments.find(call.attachment_id) is None:
            return  # what it had reserved ended with the attachment
        store.abort(call.attachment_id, call.lease_id, call.taken, quarantine=False, now_s=now_s)
        if owns_lease:
            store.release([call.lease_id], now_s=now_s)

    async def commit(
        self,
        attachment_id: str,
        lease_id: str,
        written: Sequence[WrittenFrame],
        *,
        ends_lease: bool,
    ) -> list[Block]:
        """Make written frames visible, as BlockStore.commit does, piece by piece as turns of the
        loop have room. What was visible when a call fails or is cancelled stays so, under its
        lease. ends_lease: the lease ends once the blocks are visible."""
        blocks: list[Block] = []
        for at in range(0, max(1, len(written)), self.turns.max_blocks):
            piece = written[at : at + self.turns.max_blocks]
            await self.turns.take(len(piece) or 1)
            store, now_s = self.seen(attachment_id)
            blocks += store.commit(attachment_id, lease_id, piece, now_s)
            await self._freeze_blocks(store)
        if ends_lease:
            store.release([lease_id], num_bytes_read=0, now_s=self.now_s())
        self.look_for_room()
        return blocks

    def abort(
        self,
        attachment_id: str,
        lease_id: str,
        written: Sequence[WrittenFrame],
        *,
        quarantine: bool,
    ) -> None:
        """Give reserved frames back, as BlockStore.abort."""
        store, now_s = self.seen(attachment_id)
        store.abort(attachment_id, lease_id, written, quarantine=quarantine, now_s=now_s)

    # -- history

    @property
    def keeps_history(self) -> bool:
        """Whether the events of blocks are kept."""
        return self.settings.max_history_blocks > 0

    def note_verified(
        self,
        attachment_id: str,
        frames: Sequence[int],
        generations: Sequence[int],
        trace: TraceContext | None,
    ) -> None:
        """Note that a worker has read these frames and compared their checksums."""
        if self.store is not None:
            self.store.note_verified(attachment_id, frames, generations, trace)

    def history(self, prefix: bytes, max_blocks: int) -> list[PastBlock]:
        """The latest events of at most `max_blocks` blocks whose chain hash begins with `prefix`,
        and where each lies now."""
        store = self.store
        if store is None:
            return []
        found = store.history.find(prefix, max_blocks)
        return [PastBlock(each, past, store.tree.find(each)) for each, past in found]

    # -- bytes

    def copy_in(
        self,
        attachment_id: str,
        lease_id: str,
        frame: int,
        generation: int,
        offset: int,
        data: bytes,
    ) -> None:
        """Write a piece of a block into a reserved frame (gRPC transport). Raises: LeaseLapsed,
        UnknownAttachment, InvalidArgument."""
        store, now_s = self.seen(attachment_id)
        store.check_reservation(attachment_id, lease_id, frame, generation, now_s)
        if offset + len(data) > store.frame_bytes or self.slab is None:
            raise InvalidArgument("offset", f"a frame has {store.frame_bytes} bytes")
        target = self.slab.block(frame)[offset : offset + len(data)]
        np.copyto(target, np.frombuffer(data, dtype=np.uint8))

    async def copy_out(
        self, attachment_id: str, lease_id: str, blocks: Sequence[Block], chunk_bytes: int
    ) -> AsyncGenerator[ReadPiece, None]:
        """Yield pieces of blocks of at most `chunk_bytes` (transport grpc). The blocks are held
        until the generator is closed. Raises: LeaseLapsed, UnknownAttachment, InvalidArgument."""
        store, _ = self.seen(attachment_id)
        lease = self._need_lease(store, lease_id)
        sent: dict[int, Block] = {}
        pieces = read_pieces(store, blocks, chunk_bytes, self._contents)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
                if not piece.is_stale:
                    sent[piece.at] = blocks[piece.at]
                    store.counters.num_bytes_read += 0 if lease.is_probe else len(piece.data)
        store.note_read(PULLED, list(sent.values()), self._name_of(store, attachment_id))

    async def _contents(self, frames: Sequence[int]) -> AsyncIterator[memoryview]:
        if self.slab is None:
            raise Internal("there are attachments and no memory")
        for frame in frames:
            yield self.slab.block(frame).data

    async def push(
        self,
        attachment_id: str,
        lease_id: str,
        push_id: str,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        budget_s: float,
    ) -> PushOutcome:
        """Write blocks into the worker's own blocks (NIXL transport). Raises: as BlockPusher.push,
        LeaseLapsed, UnknownAttachment."""
        store, _ = self.seen(attachment_id)
        lease = self._need_lease(store, lease_id)
        if self.peers is None:
            raise Internal("there are attachments and no memory")
        outcome = await self.peers.push(
            attachment_id, push_id, blocks, destinations, Deadline.after(budget_s)
        )
        if not lease.is_probe:
            store.counters.num_bytes_read += outcome.num_bytes
        if outcome.terminal:
            stale = set(outcome.stale)
            sent = [block for index, block in enumerate(blocks) if index not in stale]
            store.note_read(PULLED, sent, self._name_of(store, attachment_id))
        return outcome

    async def report(self, attachment_id: str, blocks: Sequence[Block]) -> int:
        """A reader refused these blocks. The store looks for itself: a report alone changes
        nothing, for a worker that is wrong would empty the store. A block whose bytes do not have
        the checksum that it was committed with is dropped, with all blocks below. A generation in
        the slab that is not the store's own is written again: readers that map the slab would
        refuse the block for ever.

        Returns: how many blocks were dropped; 0 also when they were dropped before.
        """
        store, _ = self.seen(attachment_id)
        store.note_read(REFUSED, blocks, self._name_of(store, attachment_id))
        return await _repair(store, self.slab, blocks, self.turns) if self.slab is not None else 0

    def close_push(self, push_id: str) -> bool:
        """Whether no byte of this push moves, now and later: a push that is not known is refused
        from here on."""
        return self.peers is None or self.peers.close_push(push_id)

    # -- maintenance

    def look_for_room(self) -> None:
        """Start to demote blocks to the file tier if frames are short. Called when blocks were
        stored, and every `sweep_interval_s`. Never waits for a move."""
        if self.tier is not None:
            self.tier.kick()

    async def _maintain(self, store: BlockStore, slab: Slab, check: SlicedCheck) -> None:
        while True:
            await asyncio.sleep(self.settings.sweep_interval_s)
            with check.in_use():
                store.lapse(self._clock())
            with check.in_use():
                self._detach_gone(store, slab)
            while store.leases.ending:
                await self.turns.take(self.turns.max_blocks)
                check.num_calls += 1
                with check.in_use():
                    store.let_go()
            self.look_for_room()
            await self._freeze_blocks(store)
            self._touch_ahead(store, slab)

    async def _check_when_idle(self, check: SlicedCheck) -> None:
        """Check the laws when no calls come, in a task of its own: of a million blocks a check
        takes ten seconds."""
        num_calls = 0
        checked_heard, checked_s = 0, -1.0  # calls and beats, and time, of the last check
        while True:
            await asyncio.sleep(self.settings.sweep_interval_s)
            now_s = self._clock()
            is_idle, num_calls = num_calls == check.num_calls, check.num_calls
            num_heard = num_calls + self._num_beats
            is_due = now_s - checked_s >= self.settings.integrity_interval_s
            # A beat is no work: a store with many idle workers gets beats all the time.
            if is_idle and is_due and checked_heard != num_heard and await check.run(math.inf):
                checked_heard, checked_s = num_heard, now_s

    def _detach_gone(self, store: BlockStore, slab: Slab) -> None:
        """Detach workers that are dead (their lock is gone) or silent for too long."""
        now_s = self._clock()
        for attachment in list(store.attachments):
            # Before its first call the worker may not have taken its lock yet.
            has_called = attachment.last_seen_s > attachment.attached_at_s
            silent_s = now_s - attachment.last_seen_s
            is_silent = silent_s >= self.settings.attachment_ttl_s
            if attachment.transport == "shm":
                if (has_called or is_silent) and not slab.is_locked(attachment.attachment_id):
                    self._detach_worker(store, attachment, 0.0, "its process ended")
            elif is_silent:
                self._detach_worker(store, attachment, None, f"silent for {silent_s:.0f} s")
        self._forget_peers()

    def _detach_worker(
        self, store: BlockStore, attachment: Attachment, grace_s: float | None, why: str
    ) -> None:
        logs.event(logger, "worker_gone", worker_id=attachment.worker_id, why=why)
        store.detach(attachment.attachment_id, self._clock(), grace_s)

    def _touch_ahead(self, store: BlockStore, slab: Slab) -> None:
        """Have the kernel allocate memory for the next frames: free ones are taken lowest first."""
        ahead = TOUCH_AHEAD_BYTES // slab.layout.stride_bytes
        goal = min(store.frames.num_slots, store.frames.num_ever_taken + ahead)
        is_busy = self._toucher is not None and not self._toucher.done()
        if goal > self.num_touched and not is_busy:
            self._toucher = start_task(self._touch(slab, goal), "touch memory")

    async def _freeze_blocks(self, store: BlockStore) -> None:
        """Keep Python's garbage collector from looking at the blocks that are here, in a turn of
        the loop without other work on blocks: a million of them would stop the loop for a second
        now and then. They are freed all the same, for they are in no cycles."""
        if store.tree.num_inserted - self._num_frozen >= FREEZE_EVERY:
            self._num_frozen = store.tree.num_inserted
            await self.turns.take(self.turns.max_blocks)
            gc.collect()
            gc.freeze()

    async def _touch(self, slab: Slab, goal: int) -> None:
        step = max(1, _TOUCH_STEP_BYTES // slab.layout.stride_bytes)
        while self.num_touched < goal:
            end = min(goal, self.num_touched + step)
            await asyncio.to_thread(slab.touch, self.num_touched, end)
            self.num_touched = end

    # -- inside

    async def _with_memory(self, block_bytes: int) -> tuple[BlockStore, Slab, BlockPusher]:
        """Take the memory, if that was not done yet. Raises: NoCapacity."""
        if self.store is None:
            # A worker that leaves meanwhile does not take the memory along: the next one needs it.
            taking = asyncio.ensure_future(self._take_memory(block_bytes))
            taking.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
            await complete_despite_cancel(taking)
            taking.result()
        if self.store is None or self.slab is None or self.peers is None:
            raise Internal("the memory was taken and is not there")
        return self.store, self.slab, self.peers

    async def _take_memory(self, block_bytes: int) -> None:
        settings = self.settings
        slab, opened = await asyncio.to_thread(
            take_memory, settings, self.node_id, self.incarnation, block_bytes
        )
        # In a thread, for a million frames take 0.2 s.
        store = await asyncio.to_thread(self._make_store, slab)
        if slab.layout.num_frames > MAX_DEFAULT_FRAMES:
            gc.freeze()  # a look of the garbage collector at lists of a million frames takes 30 ms
        logs.event(
            logger,
            "slab",
            path=str(slab.path),
            num_frames=slab.layout.num_frames,
            frame_bytes=slab.layout.frame_bytes,
            num_bytes=slab.num_bytes,
            page_bytes=slab.page_bytes,
        )
        self._tier_problem = opened.problem
        if opened.pages is not None:
            self.tier = FileTier(
                store,
                slab,
                opened.pages,
                opened.stored,
                num_torn=opened.num_torn,
                num_threads=settings.num_file_io_threads,
                demote_below_free=settings.demote_below_free,
            )
            self.tier.start()
        self.slab, self.store = slab, store
        self.peers = BlockPusher(
            store,
            Frames(Region(slab.frames_address, slab.frames.nbytes), slab.layout.stride_bytes),
            settings.nixl_net_devices,
            name="store",
        )
        self._check = SlicedCheck(store, self._clock)
        self._touch_ahead(store, slab)
        self._maintenance = start_task(self._maintain(store, slab, self._check), "maintenance")
        self._checking = start_task(self._check_when_idle(self._check), "integrity")

    def _make_store(self, slab: Slab) -> BlockStore:
        settings = self.settings
        shares = TenantShares.parse(settings.tenant_shares)
        return BlockStore(
            slab.layout.num_frames,
            slab.layout.frame_bytes,
            StoreLimits(settings.max_lease_s, settings.quarantine_grace_s, shares),
            published=slab.generations,
            changes=self._changes,
            history=BlockHistory(settings.max_history_blocks),
        )

    def _name_of(self, store: BlockStore, attachment_id: str) -> str:
        """The worker's id; empty when it is gone by now."""
        attachment = store.attachments.find(attachment_id)
        return attachment.worker_id if attachment is not None else ""

    def _need_lease(self, store: BlockStore, lease_id: str) -> Lease:
        try:
            store.lapse(self._clock())
            return store.leases.get(lease_id)
        except LeaseLapsed:
            store.refused[LEASE_LAPSED] += 1
            raise

    def _forget_peers(self) -> None:
        """Forget the NIXL peers of attachments that are gone."""
        if self.store is not None and self.peers is not None:
            self.peers.keep([each.attachment_id for each in self.store.attachments])


@dataclass
class _ReserveCall:
    """A Reserve that is under way. lease_id: empty until it has one. taken: frames that this call
    has reserved."""

    attachment_id: str
    lease_id: str
    is_probe: bool
    ttl_s: float
    taken: list[WrittenFrame] = field(default_factory=list)


def take_memory(
    settings: KvStoreSettings, node_id: str, incarnation: bytes, block_bytes: int
) -> tuple[Slab, OpenedPages]:
    """Make the slab of a store, and open its file tier if one was asked for. May take seconds: call
    it in a thread.

    Raises: NoCapacity when the memory cannot be had; a file tier that cannot be had has a
        `problem`.
    """
    slab = Slab.allocate(
        Path(settings.slab_dir), node_id, incarnation, block_bytes, settings.capacity_bytes
    )
    if not settings.file_tier_dir:
        return slab, OpenedPages(None)
    folder = Path(settings.file_tier_dir)
    return slab, open_pages(folder, node_id, settings.file_tier_bytes, block_bytes)


async def _repair(store: BlockStore, slab: Slab, blocks: Sequence[Block], turns: TurnBudget) -> int:
    """Write generations again that changed in the slab, and drop blocks whose bytes changed.
    Checksums are computed in a thread. Returns: how many blocks were dropped."""
    hold_id, is_held = store.hold(blocks)
    try:
        held = [block for block, holds in zip(blocks, is_held, strict=True) if holds]
        repaired = [each for each in held if int(slab.generations[each.frame]) != each.generation]
        for block in repaired:
            slab.publish(block.frame, block.generation)
        store.counters.num_damaged += len(repaired)
        expected = store.checksums_of(held)
        found = await asyncio.to_thread(_checksums, slab, held, expected)
        bad = [
            block for block, known, now in zip(held, expected, found, strict=True) if now != known
        ]
        num_dropped, num_below, at_once = 0, 1, turns.max_blocks
        while num_below:  # most of a store may hang on one block
            await turns.take(at_once)
            num_below = store.drop_below(bad, at_once)
            num_dropped += num_below
        num_dropped += store.drop(bad)
    finally:
        store.unhold(hold_id)
    if repaired or num_dropped:
        logs.event(
            logger,
            "blocks_damaged",
            level=logging.ERROR,
            frames=[block.frame for block in bad],
            num_dropped=num_dropped,
            generations_of_frames=[block.frame for block in repaired],
        )
    return num_dropped


def _checksums(
    slab: Slab, blocks: Sequence[Block], expected: Sequence[int | None]
) -> list[int | None]:
    """Checksums of the frames' bytes as they are now; None where none is expected."""
    return [
        None if known is None else block_hash.checksum(slab.block(block.frame))
        for block, known in zip(blocks, expected, strict=True)
    ]
