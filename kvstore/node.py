"""One life of a store: its slab, its truth, its NIXL agent, and what is looked after in the
background.

Life: made at start with nothing taken -> the first `attach` tells how large a block is and takes
the memory -> `stop` unlinks the slab. A background task ends lapsed leases, notices workers that
are gone and recomputes the conservation laws when nothing is under way.

Knows no stubs (server.py) and no Redis (index.py). One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore import memory, reports
from kvstore.answers import Match
from kvstore.attachments import Attachment
from kvstore.block import Block
from kvstore.config import KvStoreSettings
from kvstore.errors import (
    GENERATION,
    LEASE_LAPSED,
    IntegrityError,
    LeaseLapsed,
    UnknownAttachment,
)
from kvstore.finishing import finish
from kvstore.memory import Memory
from kvstore.nixl_agent import NixlAgent, Region
from kvstore.pushes import PushOutcome, PushTable, Target
from kvstore.slab import Slab, check_room, remove_stale
from kvstore.store import Store
from kvstore.tiers.file_tier import FileTier
from kvstore.transport.base import TRANSPORTS
from process import incarnation, logs
from process.deadline import Clock, Deadline
from process.errors import FailedPrecondition, Internal, InvalidArgument, NoCapacity
from process.tasks import end_tasks

logger = logging.getLogger(__name__)

NIXL_START_S = 30.0
MAX_CHUNK_BYTES = 16 * 1024 * 1024
_QUIET_S = 1.0


@dataclass(frozen=True)
class Newcomer:
    """What a worker says about itself. The NIXL fields are empty for other transports."""

    worker_id: str
    worker_incarnation: bytes
    model_fingerprint: bytes
    block_bytes: int
    transport: str
    nixl_metadata: bytes = b""
    region: Region | None = None
    num_blocks: int = 0


class StoreNode:
    """See the module."""

    def __init__(
        self,
        settings: KvStoreSettings,
        node_id: str,
        *,
        on_change: Callable[[bool, bytes], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """on_change: told of every block that comes or goes, in order; see Catalog."""
        self.settings = settings
        self.node_id = node_id
        self.incarnation = incarnation.new()
        self.integrity_error = ""
        self.memory: Memory | None = None
        self.pushes: PushTable | None = None
        self.nixl: NixlAgent | None = None
        self.nixl_metadata = b""
        self._on_change = on_change
        self._clock = clock
        self._targets: dict[str, Target] = {}  # attachment -> its blocks, of NIXL workers
        self._attaching = asyncio.Lock()
        self._sweeper: asyncio.Task[None] | None = None
        self._forgetting: set[asyncio.Task[None]] = set()
        self._num_calls = 0
        self._checked_at = (0, -1.0)  # (num_calls, time) of the last integrity check

    def start(self) -> None:
        """Clean up after dead stores, see that there is room, begin the background work.

        Raises: NoCapacity naming the settings.
        """
        folder = Path(self.settings.slab_dir)
        check_room(folder, 0)
        for path in remove_stale(folder):
            logs.event(logger, "stale_slab_removed", path=str(path))
        check_room(folder, self.settings.capacity_bytes)
        if self.settings.file_tier_dir and not Path(self.settings.file_tier_dir).is_dir():
            raise NoCapacity(f"file_tier_dir: {self.settings.file_tier_dir} is not a folder")
        self._sweeper = asyncio.create_task(self._sweep_for_ever())

    async def stop(self) -> None:
        """End the background work and take the slab's name away. Its memory stays mapped: peers may
        hold its address until this process is gone."""
        await end_tasks([self._sweeper])
        if self.nixl is not None:
            await self.nixl.close(Deadline.after(_QUIET_S))
        if self.memory is not None:
            await self.memory.close()

    @property
    def store(self) -> Store | None:
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
        self._num_calls += 1
        return self._clock()

    # -- workers come and go

    async def attach(self, newcomer: Newcomer) -> Attachment:
        """Let a worker in. Raises: InvalidArgument, FailedPrecondition, NoCapacity."""
        if not newcomer.worker_id:
            raise InvalidArgument("worker_id", "must be given")
        if newcomer.transport not in TRANSPORTS:
            raise InvalidArgument("transport", f"one of {', '.join(TRANSPORTS)}")
        if newcomer.block_bytes < 1:
            raise InvalidArgument("block_bytes", "must be positive")
        async with self._attaching:
            taken = await self._take_memory(newcomer.block_bytes)
            store, slab = taken.store, taken.slab
            if newcomer.block_bytes != store.frame_bytes:
                raise FailedPrecondition(
                    f"block_bytes: this store's frames have {store.frame_bytes} bytes, the "
                    f"worker's blocks {newcomer.block_bytes}; another KV layout needs another store"
                )
            target: Target | None = None
            if newcomer.transport == "nixl":
                target = await self._meet(newcomer, store, slab)
        one_sided = newcomer.transport != "grpc"
        attachment = store.attach(
            newcomer.worker_id,
            newcomer.worker_incarnation,
            newcomer.transport,
            one_sided,
            self.now_s(),
        )
        if target is not None:
            self._targets[attachment.attachment_id] = target
        self._forget_gone(store)
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
            self._forget_gone(self.store)

    def present(self) -> list[bytes]:
        """Every chain hash that is there now, parents before children."""
        if self.store is None:
            return []
        return [entry.chain_hash for entry in self.store.catalog]

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
    ) -> Match:
        """The longest prefix; with `pin` what lies in the file tier only is brought into memory, as
        far as that goes within `budget_s`.

        Raises: UnknownAttachment, LeaseLapsed.
        """
        store, now_s = self.seen(attachment_id)
        match = store.match(chain_hashes, pin=pin, lease_id=lease_id, ttl_s=ttl_s, now_s=now_s)
        if not (pin and match.in_file):
            return match
        is_of_use = False
        try:
            if self.tier is not None:
                await self.tier.promote(match.entries, Deadline.after(budget_s))
            store.settle(match, self._clock())
            is_of_use = bool(match.entries)
        finally:
            if not lease_id and not is_of_use:  # it pins nothing, or nobody will learn of it
                store.release([match.lease_id], now_s=self._clock())
                match.lease_id = ""
        return match

    def seen(self, attachment_id: str) -> tuple[Store, float]:
        """The store and the time of this call, for a worker that is attached.

        Raises: UnknownAttachment.
        """
        now_s = self.now_s()
        if self.store is None:
            raise UnknownAttachment(f"attachment {attachment_id}: nobody is attached; attach again")
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
        store.writes.check_reservation(attachment_id, lease_id, frame, generation, now_s)
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
        self._need_lease(store, lease_id)
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
                store.counters.num_bytes_read += store.frame_bytes
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
        target = self._targets.get(attachment_id)
        if target is None or self.pushes is None:
            raise FailedPrecondition("push: this worker is not attached with transport nixl")
        self._need_lease(store, lease_id)
        return await self.pushes.push(
            push_id, target, blocks, destinations, Deadline.after(budget_s)
        )

    async def report(self, attachment_id: str, blocks: Sequence[Block]) -> int:
        """Somebody read bad bytes out of these: look, and drop those that are bad with all below.

        Returns: how many blocks went.
        """
        store, _ = self.seen(attachment_id)
        return await reports.drop_bad(store, self.slab, blocks) if self.slab else 0

    def is_push_terminal(self, push_id: str) -> bool:
        """See PushTable; a store without NIXL moves nothing."""
        return self.pushes is None or self.pushes.is_terminal(push_id)

    def look_for_room(self) -> None:
        """Something was stored: see whether older blocks should go to the file tier. Never
        waits."""
        if self.tier is not None:
            self.tier.kick()

    def check_integrity(self) -> str:
        """Recompute every law. Returns: what failed, empty when all held."""
        if self.store is None:
            return ""
        try:
            self.store.lapse(self._clock())
            self.store.check_integrity()
            self.integrity_error = ""
        except IntegrityError as error:
            self.integrity_error = str(error)
            logs.event(logger, "integrity_error", level=logging.ERROR, error=str(error))
        return self.integrity_error

    # -- inside

    async def _take_memory(self, block_bytes: int) -> Memory:
        if self.memory is None:
            making = asyncio.ensure_future(
                asyncio.to_thread(
                    memory.make, self.settings, self.node_id, self.incarnation, block_bytes
                )
            )
            try:
                await finish(making)
            finally:
                # A worker that left meanwhile does not take the memory along: the next one needs
                # it.
                if making.done() and making.exception() is None:
                    self.memory = Memory(self.settings, *making.result(), self._on_change)
            making.result()
        if self.memory is None:
            raise Internal("the memory was made and is not there")
        return self.memory

    async def _meet(self, newcomer: Newcomer, store: Store, slab: Slab) -> Target:
        """Bring the two NIXL agents together; the store's is made for the first such worker."""
        if newcomer.region is None:
            raise InvalidArgument("region_address", "must be given for transport nixl")
        if newcomer.region.num_bytes < newcomer.num_blocks * newcomer.block_bytes:
            raise InvalidArgument("region_num_blocks", "more blocks than the region holds")
        if self.nixl is None:
            starting = asyncio.ensure_future(self._start_nixl(store, slab))
            await finish(starting)
            starting.result()
        if self.nixl is None:
            raise Internal("NIXL was started and is not there")
        peer = await self.nixl.add_peer(newcomer.nixl_metadata)
        return Target(peer, newcomer.region, newcomer.num_blocks)

    async def _start_nixl(self, store: Store, slab: Slab) -> None:
        name = f"store-{secrets.token_hex(16)}"
        deadline = Deadline.after(NIXL_START_S)
        nixl = await NixlAgent.start(name, self.settings.nixl_net_devices, deadline)
        region = Region(slab.frames_address, slab.frames.nbytes)
        self.nixl_metadata = await nixl.register(region)
        self.pushes = PushTable(store, slab, nixl)
        self.nixl = nixl

    def _need_lease(self, store: Store, lease_id: str) -> None:
        try:
            store.lapse(self._clock())
            store.leases.get(lease_id)
        except LeaseLapsed:
            store.refused[LEASE_LAPSED] += 1
            raise

    def _forget_gone(self, store: Store) -> None:
        """Take the NIXL peers of attachments that are gone out, once nothing moves to them."""
        for attachment_id in list(self._targets):
            if store.attachments.find(attachment_id) is None:
                task = asyncio.create_task(self._forget(self._targets.pop(attachment_id).peer))
                self._forgetting.add(task)
                task.add_done_callback(self._forgetting.discard)

    async def _forget(self, peer: str) -> None:
        if self.pushes is not None and self.nixl is not None:
            await self.pushes.quiet(peer)
            await self.nixl.remove_peer(peer)

    async def _sweep_for_ever(self) -> None:
        num_calls = 0
        while True:
            await asyncio.sleep(self.settings.sweep_interval_s)
            if self.memory is None:
                continue
            now_s = self._clock()
            self.memory.store.lapse(now_s)
            self._notice_gone(self.memory.store, self.memory.slab, now_s)
            self.look_for_room()
            self.memory.touch_ahead()
            is_idle, num_calls = num_calls == self._num_calls, self._num_calls
            checked_calls, checked_s = self._checked_at
            due = now_s - checked_s >= self.settings.integrity_interval_s
            if is_idle and due and checked_calls != num_calls:
                self.check_integrity()
                self._checked_at = (num_calls, now_s)

    def _notice_gone(self, store: Store, slab: Slab, now_s: float) -> None:
        """Detach workers that are dead (their lock is gone) or silent for too long."""
        for attachment in list(store.attachments):
            # Before its first call the worker may not have taken its lock yet.
            has_called = attachment.last_seen_s > attachment.attached_at_s
            silent_s = now_s - attachment.last_seen_s
            is_silent = silent_s >= self.settings.attachment_ttl_s
            if attachment.transport == "shm":
                if (has_called or is_silent) and not slab.is_locked(attachment.attachment_id):
                    self._gone(store, attachment, 0.0, "its process ended")
            elif is_silent:
                self._gone(store, attachment, None, f"silent for {silent_s:.0f} s")
        self._forget_gone(store)

    def _gone(self, store: Store, attachment: Attachment, grace_s: float | None, why: str) -> None:
        logs.event(logger, "worker_gone", worker_id=attachment.worker_id, why=why)
        store.detach(attachment.attachment_id, self._clock(), grace_s)
