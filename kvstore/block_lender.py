"""BlockLender: serves blocks of a worker's own KV cache to other workers, without a store between:
attachments, the bytes that go out, and blocks to measure the link with.

Life: made with the worker -> `start` -> attachments come and go, reads and pushes run -> `stop`
ends all leases and waits, a bounded time, for what is held: transfers under way, and what readers
copy. Leases travel with handles, so they do not end with an attachment.

Laws: at most `max_waiting` readers wait for a lease to grow, none longer than `max_wait_s`; a
lease is watched by those that wait and by no others. An attachment has one lease of blocks to
measure with at most, which ends with it.

A lender is read only: nothing here writes into a block. Knows no engine: its owner says which
blocks are lent, and is called when they are free (`ExportedBlocks`). No stubs. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import NoReturn

from kvstore.attached_workers import AttachmentTable
from kvstore.block_refs import Block, PackedBlocks
from kvstore.block_source import (
    MatchResult,
    ReadPiece,
    StoreInfo,
    StoreStats,
    WorkerInfo,
    own_host_id,
    read_pieces,
)
from kvstore.errors import CHECKSUM, GENERATION, LEASE_LAPSED, LeaseLapsed, StoreIntegrityError
from kvstore.exported_blocks import ExportedBlocks, ExportOffer, LeaseUpdate
from kvstore.link_quality import num_blocks_wanted
from kvstore.nixl_push import BlockPusher, Frames, PushOutcome, Target
from kvstore.node_ids import PROBE_HASH
from kvstore.transport.base import CUDA_IPC, DIRECT_TRANSPORTS, BlockMemory
from kvstore.transport.device import PinnedStaging, Shared
from kvstore.transport.nixl import region_of
from process import logs
from process.background_tasks import complete_despite_cancel, end_tasks, start_task
from process.deadline import Clock, Deadline
from process.rpc_errors import FailedPrecondition, InvalidArgument, NoCapacity, NotFound

logger = logging.getLogger(__name__)

ATTACHMENT_TTL_S = 60.0
"""Time without a call after which a reader counts as gone and its attachment ends."""

SWEEP_S = 0.25
"""Time between two sweeps that end lapsed leases: a lease may end that much late."""

MAX_PROBE_WAIT_S = 1.0
"""Longest wait for free blocks to measure a link with: the engine may be in a long step."""

PROBE_TTL_S = 10.0
"""Time after which a lease of blocks to measure a link with lapses, if its reader does not release
it."""


@dataclass(frozen=True)
class LenderLimits:
    """Bounds of one lender, for all of its readers together."""

    max_waiting: int = 256
    """Most readers that wait at once for the rest of a lease. Each has a prompt under way here.
    Guessed: far more than a worker computes at once."""

    max_wait_s: float = 5.0
    """Longest time that one reader waits for the rest of a lease; then it must ask again. Guessed:
    many chunks of a prompt."""

    max_holds: int = 256
    """Most holds at once of readers that copy out of mapped memory by themselves. Guessed: as many
    as may wait."""

    max_hold_s: float = 1.0
    """Longest time of one such hold. Guessed: a hundred times what the copy of a chunk takes, and
    no long time to do without blocks that are not read."""


LENDER_LIMITS = LenderLimits()


class BlockReader:
    """Reads the bytes of a worker's blocks, one block after the other, to send them: as views where
    the blocks lie in host memory, as copies through page-locked rows of its own where they lie on a
    device. The caller keeps the blocks in place. One asyncio loop; the device copies in a thread.
    """

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._staging: PinnedStaging | None = None
        self._turn = asyncio.Lock()
        if memory.device is not None:
            self._staging = PinnedStaging(
                memory.device, memory.address, memory.block_bytes, memory.num_blocks
            )

    async def blocks(self, block_ids: Sequence[int]) -> AsyncIterator[memoryview]:
        """Yield the bytes of each block, in order; each is valid until the next one is asked for.

        Raises: TransferFailed when the device failed.
        """
        if self._staging is None:
            for block_id in block_ids:
                yield self._memory.view[block_id].data
            return
        num_rows = self._staging.num_rows
        for start in range(0, len(block_ids), num_rows):
            batch = await self._fetch(self._staging, block_ids[start : start + num_rows])
            for block in batch:
                yield memoryview(block)

    async def close(self) -> None:
        """Free the page-locked staging memory. No read may be under way."""
        if self._staging is not None:
            await asyncio.to_thread(self._staging.close)

    async def _fetch(self, staging: PinnedStaging, block_ids: Sequence[int]) -> list[bytes]:
        """Copies: a reader that is slow must not keep the rows from others."""

        def fetch() -> list[bytes]:
            staging.fetch(block_ids)
            return [row.tobytes() for row in staging.rows[: len(block_ids)]]

        async with self._turn:
            fetching = asyncio.ensure_future(asyncio.to_thread(fetch))
            await complete_despite_cancel(fetching)  # the rows are in use until then
        return fetching.result()


FindFree = Callable[[int, float], Awaitable[Sequence[int]]]
"""A function of (most blocks, most seconds) that finds free blocks of the worker and keeps them in
place until `ExportedBlocks` calls `on_free` for them. Returns: their ids, none where there is no
room."""


class BlockLender:
    """Serves the blocks that a worker lends to its readers: a BlockSource. `loans` is the truth
    about what is lent."""

    def __init__(
        self,
        node_id: str,
        incarnation: bytes,
        memory: BlockMemory,
        loans: ExportedBlocks,
        find_free: FindFree,
        *,
        fingerprint: bytes,
        nixl_net_devices: str = "lo",
        lets_map: bool = False,
        limits: LenderLimits = LENDER_LIMITS,
        clock: Clock = time.monotonic,
    ) -> None:
        """Args: fingerprint: of the worker's model; a reader must have the same. lets_map: whether
        readers on this host may map the whole memory (transport cuda_ipc)."""
        self.node_id = node_id
        self.incarnation = incarnation
        self.memory = memory
        self.loans = loans
        self.attachments = AttachmentTable()
        self.limits = limits
        """Bounds of this lender; each call reads them again."""
        self.num_waiting = 0
        """Readers that wait now for the rest of a lease."""
        self.unsealed_probes: set[str] = set()
        """Ids of leases of measuring blocks whose checksums are being computed. No reader knows
        them yet, so they do not lapse."""
        self._probes: dict[str, str] = {}  # attachment -> its lease of blocks to measure with
        self._find_free = find_free
        self.shared: Shared | None = None
        """The IPC handle of the worker's memory, which readers of transport cuda_ipc are given;
        made for the first of them."""
        self._fingerprint = fingerprint
        self._lets_map = lets_map
        self._clock = clock
        self._reader = BlockReader(memory)
        device = memory.device
        self.peers = BlockPusher(
            loans,
            Frames(region_of(memory), memory.block_bytes),
            nixl_net_devices,
            name="lender",
            before=device.use_in_this_thread if device is not None else lambda: None,
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._is_stopped = False

    # -- life

    def start(self) -> None:
        """Start the task that ends lapsed leases and attachments."""
        self._sweeper = start_task(self._sweep_for_ever(), "lender")

    async def stop(self, timeout_s: float) -> None:
        """Lend no more, end all leases, and wait at most `timeout_s` for transfers that still read
        the blocks. Blocks of a push that is not over by then stay out of use."""
        self._is_stopped = True
        await end_tasks([self._sweeper])
        self.loans.end_all()
        try:
            async with asyncio.timeout(timeout_s):
                await self.quiet()
            await self._reader.close()
        except TimeoutError:
            logs.event(logger, "lender_still_read", level=logging.WARNING)
        await self.peers.close(timeout_s)

    async def quiet(self) -> None:
        """Wait until no block is lent any more. Has no limit of its own: the caller bounds it."""
        while self.loans.num_lent:
            self.loans.lapse(self._clock())
            await asyncio.sleep(SWEEP_S / 10)

    def now_s(self) -> float:
        """The time on the lender's clock, in seconds."""
        return self._clock()

    # -- lending

    def enter(
        self, offers: Iterable[ExportOffer], lease_id: str = "", *, is_computed: bool = True
    ) -> str:
        """Lend blocks whose bytes are complete and do not change, under a lease; an empty
        `lease_id` makes one. Blocks without a checksum can be read from now on, and are to be
        sealed. is_computed: False: their bytes are still to come, and no reader gets them until
        `ExportedBlocks.computed` says that they have.

        Returns: the lease's id. Raises: LeaseLapsed; NotFound when the lender has stopped: nothing
            was lent then.
        """
        self._check_open()
        return self.loans.lend(offers, lease_id, is_computed=is_computed)[0]

    async def seal(self, lease_id: str) -> PackedBlocks:
        """Compute the checksums of the blocks that a lease lends without one, and enter them. One
        call at a time for each lease.

        Returns: these blocks, in the order in which they were lent.
        Raises: LeaseLapsed, NotFound when the lender has stopped, TransferFailed when the device
            failed: the lease is of no use then, and the caller ends it.
        """
        block_ids = self.loans.unsealed_of(lease_id)
        loop = asyncio.get_running_loop()
        checksums = await loop.run_in_executor(None, self.memory.checksums, block_ids)
        self._check_open()
        return self.loans.seal(lease_id, dict(zip(block_ids, checksums, strict=True)))

    # -- readers come and go

    async def attach(self, worker: WorkerInfo) -> StoreInfo:
        """Attach a reader: another worker, with the same model and block size, that reads over one
        of DIRECT_TRANSPORTS. Earlier starts of the same worker are detached.

        Raises: InvalidArgument; FailedPrecondition when reader and lender do not fit.
        """
        self._check_open()
        if not worker.worker_id:
            raise InvalidArgument("worker_id", "must be given")
        if worker.transport not in DIRECT_TRANSPORTS:
            raise FailedPrecondition(
                f"transport {worker.transport}: this node lends its blocks; they are read over "
                f"{' or '.join(DIRECT_TRANSPORTS)}"
            )
        if worker.block_bytes != self.memory.block_bytes:
            raise FailedPrecondition(
                f"block_bytes: this worker's blocks have {self.memory.block_bytes} bytes, the "
                f"reader's {worker.block_bytes}"
            )
        if worker.model_fingerprint != self._fingerprint:
            raise FailedPrecondition("model_fingerprint: this worker serves another model")
        shared: Shared | None = None
        target: Target | None = None
        if worker.transport == CUDA_IPC:
            shared = self._share(worker.host_id)
        if worker.transport == "nixl":
            if worker.peer is None:
                raise InvalidArgument("region_address", "must be given for transport nixl")
            target = await self.peers.meet(worker.peer)
        for earlier in self.attachments.earlier_lives(worker.worker_id, worker.worker_incarnation):
            self.attachments.remove(earlier)
        attachment = self.attachments.add(
            worker.worker_id, worker.worker_incarnation, worker.transport, False, self._clock()
        )
        if target is not None:
            self.peers.add(attachment.attachment_id, target)
        self._forget_gone()
        logs.event(logger, "reader_attached", worker_id=worker.worker_id)
        return StoreInfo(
            attachment_id=attachment.attachment_id,
            node_id=self.node_id,
            incarnation=self.incarnation,
            frame_bytes=self.memory.block_bytes,
            num_frames=self.memory.num_blocks,
            nixl_metadata=self.peers.metadata if target is not None else b"",
            shared=shared,
        )

    def detach(self, attachment_id: str) -> None:
        """End a reader's attachment, and the lease of blocks that it measured its link with. Its
        other leases stay: they travel with handles."""
        self.attachments.remove(attachment_id)
        self._forget_gone()

    def seen(self, attachment_id: str) -> float:
        """Note that a reader made a call. Returns: the time of the call. Raises:
        UnknownAttachment."""
        now_s = self._clock()
        self.attachments.get(attachment_id, now_s)
        return now_s

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
        """Note that a reader lives. A lender is no store, so it finds no blocks; only for chain
        hashes that are all PROBE_HASH it lends free blocks, one for each, to measure the link with.

        Raises: UnknownAttachment.
        """
        self.seen(attachment_id)
        if not (pin and set(chain_hashes) == {PROBE_HASH}):
            return MatchResult((), "")
        return await self._lend_probes(
            attachment_id, len(chain_hashes), min(MAX_PROBE_WAIT_S, budget_s / 2)
        )

    async def _lend_probes(
        self, attachment_id: str, num_blocks: int, budget_s: float
    ) -> MatchResult:
        """Free blocks to measure the link with, if there are any; what the reader had for that
        before is given back."""
        self._release(self._probes.pop(attachment_id, ""))
        max_blocks = num_blocks_wanted(self.memory.block_bytes) // 2
        block_ids = await self._find_free(min(num_blocks, max_blocks), budget_s)
        if not block_ids:
            return MatchResult((), "")
        lease_id, _ = self.loans.lend(ExportOffer(each, PROBE_HASH, None, 1) for each in block_ids)
        self.unsealed_probes.add(lease_id)
        try:
            blocks = await self.seal(lease_id)
        except BaseException:
            self._release(lease_id)
            raise
        finally:
            self.unsealed_probes.discard(lease_id)
        self.loans.hand_over(lease_id, PROBE_TTL_S, self._clock())
        former = self._probes.get(attachment_id, "")  # of a call beside this one
        self._probes[attachment_id] = lease_id
        self._release(former)
        return MatchResult(blocks, lease_id)

    def _release(self, *lease_ids: str) -> None:
        self.loans.release(lease_ids, self._clock())

    def pin(self, *_: object, **__: object) -> NoReturn:
        """Refuse: handles of a lender come with their leases. Raises: FailedPrecondition."""
        raise FailedPrecondition(
            "this node lends its blocks for reading; it pins nothing: its handles come with their "
            "leases"
        )

    def renew(self, lease_id: str, *, ttl_s: float, num_bytes_read: int) -> None:
        """Let a lease live `ttl_s` from now; add `num_bytes_read` to the sum of bytes read. Raises:
        LeaseLapsed."""
        self.loans.counters.num_bytes_read += num_bytes_read
        self.loans.renew(lease_id, ttl_s, self._clock())

    def release(self, lease_ids: Iterable[str], *, num_bytes_read: int) -> int:
        """End leases; add `num_bytes_read` to the sum of bytes read. Returns: how many leases were
        ended."""
        self.loans.counters.num_bytes_read += num_bytes_read
        return self.loans.release(lease_ids, self._clock())

    async def await_lent(
        self,
        attachment_id: str,
        lease_id: str,
        num_known: int,
        num_wanted: int,
        budget_s: float,
        *,
        hold_s: float = 0.0,
    ) -> LeaseUpdate:
        """Wait until a lease that still grows lends `num_wanted` blocks or is handed over, at most
        `budget_s`, so that the last blocks of a prompt are copied while the handle is on its way.
        The answer says where bytes lie, and lets no reader use them: the handle does that. So it
        also names blocks whose checksums are still computed.

        Args: hold_s: hold them for so long, if the reader has mapped the memory: for all others we
            copy ourselves, under holds of our own.
        Returns: what it lends by then beyond the first `num_known`.
        Raises: LeaseLapsed when it ends; NoCapacity when too many wait; InvalidArgument where no
            more is wanted than is known: that would be all of it at any time.
        """
        now_s = self._clock()
        is_mapped = self.attachments.get(attachment_id, now_s).transport == CUDA_IPC
        self._need_lease(lease_id, now_s)
        if num_wanted <= num_known:
            raise InvalidArgument("num_wanted", f"{num_wanted} is not more than {num_known} known")
        if self.num_waiting >= self.limits.max_waiting:
            raise NoCapacity(f"{self.num_waiting} readers wait for this lender already")
        news = asyncio.Event()
        self.loans.watch(lease_id, news.set)
        self.num_waiting += 1
        try:
            is_all = await _until(
                lambda: self.loans.is_whole(lease_id, num_wanted),
                min(budget_s, self.limits.max_wait_s),
                news,
            )
        finally:
            self.num_waiting -= 1
            self.loans.unwatch(lease_id, news.set)
        blocks = self.loans.blocks_of(lease_id, num_known)
        num_sealed = max(0, self.loans.num_sealed(lease_id) - num_known)
        held_s = self._hold_s(hold_s) if is_all and is_mapped else 0.0
        waited_s = self._clock() - now_s  # before the hold begins: a reader adds both
        if held_s:  # in the turn in which they were looked up: nothing comes in between
            self.loans.pin_from(lease_id, num_known, held_s, self._clock())
            self._lapse_in(held_s)
        return LeaseUpdate(blocks, is_all, max(0, len(blocks) - num_sealed), waited_s, held_s)

    def hold(
        self,
        attachment_id: str,
        lease_id: str,
        pairs: Sequence[tuple[int, int]],
        ttl_s: float,
    ) -> tuple[float, list[int]]:
        """Hold (block id, generation) for a reader that copies them out of the memory, which it has
        mapped; as ExportedBlocks.pin, within the limits: beyond these they are not held, and still
        looked up. `ttl_s` 0 asks for no more than that.

        Raises: LeaseLapsed, UnknownAttachment, FailedPrecondition of a reader that has mapped
            nothing.
        """
        now_s = self._clock()
        if self.attachments.get(attachment_id, now_s).transport != CUDA_IPC:
            raise FailedPrecondition(
                f"hold: only for a reader of transport {CUDA_IPC}; for others we copy ourselves"
            )
        self._need_lease(lease_id, now_s)
        held_s, stale = self.loans.pin(lease_id, pairs, self._hold_s(ttl_s), now_s)
        if stale:
            self.loans.refused[GENERATION] += len(stale)
        if held_s:
            self._lapse_in(held_s)
        return held_s, stale

    def _hold_s(self, wanted_s: float) -> float:
        """Seconds that a new hold of a reader lasts; 0: there is no room for one."""
        has_room = self.loans.num_pins < self.limits.max_holds
        return min(wanted_s, self.limits.max_hold_s) if has_room else 0.0

    def _lapse_in(self, seconds: float) -> None:
        """A hold ends then: sooner than by the sweep, which would keep its blocks five times as
        long. A timer that is a moment early leaves it to the sweep."""
        asyncio.get_running_loop().call_later(seconds, lambda: self.loans.lapse(self._clock()))

    # -- bytes

    async def copy_out(
        self, attachment_id: str, lease_id: str, blocks: Sequence[Block], chunk_bytes: int
    ) -> AsyncGenerator[ReadPiece, None]:
        """Yield pieces of at most `chunk_bytes` of lent blocks (transport grpc). The blocks are
        held until the generator is closed.

        Raises: LeaseLapsed, UnknownAttachment, InvalidArgument, TransferFailed.
        """
        self._need_lease(lease_id, self.seen(attachment_id))
        pieces = read_pieces(self.loans, blocks, chunk_bytes, self._reader.blocks)
        async with aclosing(pieces):
            async for piece in pieces:
                yield piece
                self.loans.counters.num_bytes_read += len(piece.data)

    async def push(
        self,
        attachment_id: str,
        lease_id: str,
        push_id: str,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        budget_s: float,
    ) -> PushOutcome:
        """Write lent blocks into the reader's own blocks (transport nixl).

        Raises: LeaseLapsed, UnknownAttachment, and as BlockPusher.push.
        """
        self._need_lease(lease_id, self.seen(attachment_id))
        outcome = await self.peers.push(
            attachment_id, push_id, blocks, destinations, Deadline.after(budget_s)
        )
        self.loans.counters.num_bytes_read += outcome.num_bytes
        return outcome

    def close_push(self, push_id: str) -> bool:
        """Whether no byte of this push moves, now and later: a push that is not known is refused
        from here on."""
        return self.peers.close_push(push_id)

    async def report(self, attachment_id: str, blocks: Sequence[Block]) -> int:
        """A reader found wrong bytes in these blocks: compute their checksums again, and end the
        leases that name a block whose bytes are not what was lent. Returns: how many blocks were
        bad."""
        self.seen(attachment_id)
        hold_id, _ = self.loans.hold(blocks)
        try:
            expected = self.loans.checksums_of(blocks)
            wanted = [block.frame for block, known in zip(blocks, expected, strict=True) if known]
            found = dict(
                zip(wanted, await asyncio.to_thread(self.memory.checksums, wanted), strict=True)
            )
            bad = {
                (block.frame, checksum)
                for block, known in zip(blocks, expected, strict=True)
                for checksum in known
                if checksum != found[block.frame]
            }
            self.loans.drop(bad)
        finally:
            self.loans.unhold(hold_id)
        num_bad = len({block_id for block_id, _ in bad})
        if num_bad:
            self.loans.refused[CHECKSUM] += num_bad
            logs.event(logger, "lent_blocks_damaged", level=logging.ERROR, num_blocks=num_bad)
        return num_bad

    def present(self, num_hashes: int) -> Iterator[list[bytes]]:
        """Yield one empty list: a lender has no chain hashes to list."""
        return iter([[]])

    async def status(self, *, check_integrity: bool) -> StoreStats:
        """The lender's numbers of now. check_integrity: recompute the invariants first."""
        loans = self.loans
        return StoreStats(
            frame_bytes=loans.frame_bytes,
            num_frames=loans.num_blocks,
            num_pinned=loans.num_lent,
            num_leases=loans.num_leases,
            num_attachments=len(self.attachments),
            num_bytes_read=loans.counters.num_bytes_read,
            num_leases_lapsed=loans.counters.num_leases_lapsed,
            refused=loans.refused,
            integrity_error=self.check_integrity() if check_integrity else "",
        )

    def check_integrity(self) -> str:
        """Recompute every invariant of the lender and its leases. Returns: the one that does not
        hold; empty when all do."""
        try:
            self.loans.lapse(self._clock())
            self.loans.check_integrity()
            num_watchers = self.loans.num_watchers
            if num_watchers > self.num_waiting:  # fewer: of leases that have just ended
                raise StoreIntegrityError(f"{num_watchers} watch leases, {self.num_waiting} wait")
        except StoreIntegrityError as error:
            logs.event(logger, "integrity_error", level=logging.ERROR, error=str(error))
            return str(error)
        return ""

    # -- inside

    def _share(self, host_id: str) -> Shared:
        """Get the IPC handle by which a reader on the host `host_id` maps the memory. Raises:
        FailedPrecondition."""
        device = self.memory.device
        if not self._lets_map:
            raise FailedPrecondition(
                "transport cuda_ipc: this worker does not share its cache; set lend_mapped=true "
                "there, or direct_transport to nixl or grpc here"
            )
        if not host_id or host_id != own_host_id():
            raise FailedPrecondition(
                "transport cuda_ipc: this worker is on another host, or a kernel does not say "
                "which: its memory cannot be mapped; set direct_transport to nixl or grpc"
            )
        if device is None:
            raise FailedPrecondition(
                "transport cuda_ipc: this worker's cache lies in host memory; set "
                "direct_transport to nixl or grpc"
            )
        if self.shared is None:
            self.shared = device.share(self.memory.address)
        return self.shared

    def _check_open(self) -> None:
        if self._is_stopped:
            raise NotFound("this worker is stopping: it lends no more")

    def _need_lease(self, lease_id: str, now_s: float) -> None:
        self._check_open()
        try:
            self.loans.check_lease(lease_id, now_s)
        except LeaseLapsed:
            self.loans.refused[LEASE_LAPSED] += 1
            raise

    def _forget_gone(self) -> None:
        attached = {attachment.attachment_id for attachment in self.attachments}
        self.peers.keep(attached)
        self._release(*(self._probes.pop(each) for each in self._probes.keys() - attached))

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._clock()
            self.loans.lapse(now_s)
            for attachment_id in self.attachments.silent_since(now_s - ATTACHMENT_TTL_S):
                self.attachments.remove(attachment_id)
            self._forget_gone()


async def _until(is_whole: Callable[[], bool], budget_s: float, news: asyncio.Event) -> bool:
    """Wait until `is_whole`, at most `budget_s`; `news` is set whenever it may have changed.
    Returns: whether it is."""
    try:
        async with asyncio.timeout(budget_s):
            while not is_whole():
                news.clear()
                await news.wait()
    except TimeoutError:
        return is_whole()
    return True
