"""One life of a store: its slab, its truth, the workers that it reaches, and the watch over them.

Life: made at start with nothing taken -> the first `attach` tells how large a block is and takes
the memory; with it come the peers (push_peers.py) and the watch (watch.py) -> `stop` unlinks the
slab.

Knows no stubs (server.py) and no Redis (index.py). One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np

from kvstore import memory, reports
from kvstore.attachments import Attachment
from kvstore.block_store import BlockStore, PrefixMatch
from kvstore.blocks import Block
from kvstore.change_log import ChangeLog, NullLog
from kvstore.config import KvStoreSettings
from kvstore.errors import (
    GENERATION,
    LEASE_LAPSED,
    LeaseLapsed,
    UnknownAttachment,
)
from kvstore.file_tier import FileTier
from kvstore.history import PULLED, REFUSED
from kvstore.leases import Lease
from kvstore.memory import Memory
from kvstore.newcomer import Newcomer
from kvstore.push import Frames, PushOutcome, PushPeers, Target
from kvstore.slab import Slab, check_room, free_bytes, remove_stale
from kvstore.transport.nixl_agent import Region
from kvstore.watch import StoreWatch
from process import entrypoint, logs
from process.deadline import Clock, Deadline
from process.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NoCapacity,
    Unavailable,
)
from process.tasks import complete_despite_cancel
from process.tracing import OFF, Tracing

logger = logging.getLogger(__name__)

MAX_CHUNK_BYTES = 16 * 1024 * 1024
_DRAIN_LOOK_S = 0.05
_QUIET_S = 1.0
_ATTACHING_S = 30.0
"""For memory that is being taken while the store stops."""


class StoreNode:
    """See the module."""

    def __init__(
        self,
        settings: KvStoreSettings,
        node_id: str,
        *,
        changes: ChangeLog | None = None,
        clock: Clock = time.monotonic,
        tracing: Tracing = OFF,
    ) -> None:
        """changes: gets each block that comes or goes; None: the store is in no index."""
        self.settings = settings
        self.node_id = node_id
        self.incarnation = entrypoint.new_incarnation()
        self.memory: Memory | None = None
        self.peers: PushPeers | None = None
        self.watch: StoreWatch | None = None
        self.tracing = tracing
        self._changes = NullLog() if changes is None else changes
        self._clock = clock
        self._attaching = asyncio.Lock()
        self._is_stopping = False
        self.is_draining = False
        """Nothing new is stored; what is there is served while somebody has a lease on it."""

    def start(self) -> None:
        """Clean up after dead stores, and see that there is room.

        Raises: NoCapacity naming the settings.
        """
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
        """End the background work and take the slab's name away. Its memory stays mapped: peers may
        hold its address until this process is gone."""
        self._is_stopping = True
        try:
            async with asyncio.timeout(_ATTACHING_S), self._attaching:
                pass  # nobody takes memory from here on
        except TimeoutError:
            logs.event(logger, "attaching_not_ended", level=logging.ERROR)
        if self.watch is not None:
            await self.watch.stop()
        if self.peers is not None:
            await self.peers.close(_QUIET_S)
        if self.memory is not None:
            await self.memory.close()

    @property
    def store(self) -> BlockStore | None:
        """None until the first worker attached."""
        return self.memory.store if self.memory is not None else None

    @property
    def slab(self) -> Slab | None:
        return self.memory.slab if self.memory is not None else None

    @property
    def tier(self) -> FileTier | None:
        return self.memory.tier if self.memory is not None else None

    def now_s(self) -> float:
        """The store's clock, for one call."""
        if self.watch is not None:
            self.watch.heard_call()
        return self._clock()

    @property
    def integrity_error(self) -> str:
        """See StoreWatch."""
        return self.watch.integrity_error if self.watch is not None else ""

    async def drain(self, deadline: Deadline) -> bool:
        """Have no room for anything new, and wait until nobody has a lease any more. Returns:
        whether that was in time."""
        self.is_draining = True
        if self.store is not None:
            self.store.is_closed = True
        try:
            async with deadline.timeout("leases to end"):
                while self.store is not None and len(self.store.leases):
                    await asyncio.sleep(_DRAIN_LOOK_S)
        except DeadlineExceeded:
            return False
        return True

    # -- workers come and go

    async def attach(self, newcomer: Newcomer) -> Attachment:
        """Let a worker in. Raises: InvalidArgument, FailedPrecondition, NoCapacity."""
        newcomer.check()
        async with self._attaching:
            if self._is_stopping:
                raise Unavailable("the store is stopping")
            taken = await self._take_memory(newcomer.block_bytes)
            store = taken.store
            if newcomer.block_bytes != store.frame_bytes:
                raise FailedPrecondition(
                    f"block_bytes: this store's frames have {store.frame_bytes} bytes, the "
                    f"worker's blocks {newcomer.block_bytes}; another KV layout needs another store"
                )
            target: Target | None = None
            if newcomer.transport == "nixl":
                if newcomer.peer is None or self.peers is None:
                    raise InvalidArgument("region_address", "must be given for transport nixl")
                target = await self.peers.meet(newcomer.peer)
        one_sided = newcomer.transport != "grpc"
        attachment = store.attach(
            newcomer.worker_id,
            newcomer.worker_incarnation,
            newcomer.transport,
            one_sided,
            self.now_s(),
        )
        if target is not None and self.peers is not None:
            self.peers.add(attachment.attachment_id, target)
        self._forget_gone()
        logs.event(
            logger,
            "attached",
            worker_id=newcomer.worker_id,
            transport=newcomer.transport,
            fingerprint=newcomer.model_fingerprint.hex(),
        )
        return attachment

    def detach(self, attachment_id: str) -> None:
        """The worker says goodbye: nothing of it is under way any more."""
        if self.store is not None:
            self.store.detach(attachment_id, self.now_s(), grace_s=0.0)
            self._forget_gone()

    def present(self) -> list[bytes]:
        """Every chain hash that is there now, parents before children."""
        if self.store is None:
            return []
        return list(self.store.tree.nodes)

    def snapshot(self) -> list[bytes]:
        """See PrefixTree."""
        if self.store is None:
            self._changes.clear()
            return []
        return self.store.tree.snapshot()

    @property
    def file_tier_problem(self) -> str:
        """See Memory."""
        return self.memory.file_tier_problem if self.memory is not None else ""

    async def match(
        self,
        attachment_id: str,
        chain_hashes: Sequence[bytes],
        *,
        pin: bool,
        lease_id: str,
        ttl_s: float,
        budget_s: float,
    ) -> PrefixMatch:
        """The longest prefix; with `pin` what lies in the file tier only is brought into memory, as
        far as that goes within `budget_s`.

        Raises: UnknownAttachment, LeaseLapsed.
        """
        store, now_s = self.seen(attachment_id, is_beat=not chain_hashes)
        match = store.match(chain_hashes, pin=pin, lease_id=lease_id, ttl_s=ttl_s, now_s=now_s)
        if not (pin and match.in_file):
            return match
        is_of_use = False
        try:
            if self.tier is not None:
                await self.tier.promote(match.nodes, Deadline.after(budget_s))
            store.settle(match, self._clock())
            is_of_use = bool(match.nodes)
        finally:
            if not lease_id and not is_of_use:  # it pins nothing, or nobody will learn of it
                store.release([match.lease_id], now_s=self._clock())
                match.lease_id = ""
        return match

    def seen(self, attachment_id: str, *, is_beat: bool = False) -> tuple[BlockStore, float]:
        """The store and the time of this call, for a worker that is attached.

        Raises: UnknownAttachment.
        """
        if self.store is None or self.watch is None:
            raise UnknownAttachment(f"attachment {attachment_id}: nobody is attached; attach again")
        if is_beat:
            self.watch.heard_beat()
        else:
            self.watch.heard_call()
        now_s = self._clock()
        self.store.attachments.get(attachment_id, now_s)
        return self.store, now_s

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
        """Write a piece of a block into a reserved frame (gRPC transport)."""
        store, now_s = self.seen(attachment_id)
        store.check_reservation(attachment_id, lease_id, frame, generation, now_s)
        if offset + len(data) > store.frame_bytes or self.slab is None:
            raise InvalidArgument("offset", f"a frame has {store.frame_bytes} bytes")
        target = self.slab.block(frame)[offset : offset + len(data)]
        np.copyto(target, np.frombuffer(data, dtype=np.uint8))

    async def copy_out(
        self, attachment_id: str, lease_id: str, blocks: Sequence[Block], chunk_bytes: int
    ) -> AsyncIterator[tuple[int, int, bytes, bool]]:
        """Pieces of blocks (gRPC transport): (index, offset, bytes, is stale); a stale one has
        none.

        Raises: LeaseLapsed, UnknownAttachment.
        """
        store, _ = self.seen(attachment_id)
        lease = self._need_lease(store, lease_id)
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES or self.slab is None:
            raise InvalidArgument("chunk_bytes", f"between 1 and {MAX_CHUNK_BYTES}")
        hold_id, held = store.hold(blocks)
        try:
            for index, (block, holds) in enumerate(zip(blocks, held, strict=True)):
                if not holds:
                    store.refused[GENERATION] += 1
                    yield index, 0, b"", True
                    continue
                frame = self.slab.block(block.frame)
                for offset in range(0, store.frame_bytes, chunk_bytes):
                    yield index, offset, frame[offset : offset + chunk_bytes].tobytes(), False
                if not lease.is_probe:
                    store.counters.num_bytes_read += store.frame_bytes
            sent = [block for block, holds in zip(blocks, held, strict=True) if holds]
            store.note_read(PULLED, sent, self._name_of(store, attachment_id))
        finally:
            store.unhold(hold_id)

    async def push(
        self,
        attachment_id: str,
        lease_id: str,
        push_id: str,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        budget_s: float,
    ) -> PushOutcome:
        """Write blocks into the worker's own (NIXL transport)."""
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
        """A reader refused these: look, repair or drop those that are bad (kvstore/reports.py).

        Returns: how many blocks went.
        """
        store, _ = self.seen(attachment_id)
        store.note_read(REFUSED, blocks, self._name_of(store, attachment_id))
        return await reports.mend(store, self.slab, blocks) if self.slab else 0

    def is_push_terminal(self, push_id: str) -> bool:
        """See PushPeers; a store without memory moves nothing."""
        return self.peers is None or self.peers.is_terminal(push_id)

    def look_for_room(self) -> None:
        """See Memory."""
        if self.memory is not None:
            self.memory.look_for_room()

    async def check_integrity(self) -> str:
        """See StoreWatch."""
        return await self.watch.check_integrity() if self.watch is not None else ""

    # -- inside

    async def _take_memory(self, block_bytes: int) -> Memory:
        if self.memory is None:
            # A worker that leaves meanwhile does not take the memory along: the next one needs it.
            making = asyncio.ensure_future(self._make_memory(block_bytes))
            making.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen
            await complete_despite_cancel(making)
            making.result()
        if self.memory is None:
            raise Internal("the memory was made and is not there")
        return self.memory

    async def _make_memory(self, block_bytes: int) -> None:
        made = await asyncio.to_thread(
            memory.make, self.settings, self.node_id, self.incarnation, block_bytes
        )
        self.memory = Memory(self.settings, *made, self._changes, self.tracing)
        slab = self.memory.slab
        self.peers = PushPeers(
            self.memory.store,
            Frames(Region(slab.frames_address, slab.frames.nbytes), slab.layout.stride_bytes),
            self.settings.nixl_net_devices,
            name="store",
        )
        self.watch = StoreWatch(self.memory, self.settings, self._clock, self._forget_gone)
        self.watch.start()

    def _name_of(self, store: BlockStore, attachment_id: str) -> str:
        """Of the worker; empty: it is gone by now."""
        attachment = store.attachments.find(attachment_id)
        return attachment.worker_id if attachment is not None else ""

    def _need_lease(self, store: BlockStore, lease_id: str) -> Lease:
        try:
            store.lapse(self._clock())
            return store.leases.get(lease_id)
        except LeaseLapsed:
            store.refused[LEASE_LAPSED] += 1
            raise

    def _forget_gone(self) -> None:
        """Attachments may be gone: so are their peers."""
        if self.store is not None and self.peers is not None:
            self.peers.keep([each.attachment_id for each in self.store.attachments])
