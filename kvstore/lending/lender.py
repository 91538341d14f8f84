"""Lender: one worker's blocks as others read them: who is attached, the bytes that go out, and
blocks to measure the way with.

Life: made with the worker -> `start` -> attachments come and go, reads and pushes run -> `stop`
ends all leases and waits, a bounded time, for what still moves. Leases travel with handles, so they
do not end with an attachment.

A lender is read only: nothing here writes into a block. Knows no engine: whoever lends says which
blocks, and hears of it when they are free (`LoanTable`). No stubs (server.py). One asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace

from kvstore.attachments import Attachment, AttachmentTable
from kvstore.blocks import Block, PackedBlocks
from kvstore.errors import CHECKSUM, GENERATION, LEASE_LAPSED, IntegrityError, LeaseLapsed
from kvstore.lending.followers import Followers
from kvstore.lending.host import own_host_id
from kvstore.lending.limits import LENDER_LIMITS, LenderLimits
from kvstore.lending.loans import LoanTable, Offer
from kvstore.lending.outlet import Outlet
from kvstore.lending.probes import FindFree, Probes
from kvstore.lending.reader import LenderIdentity as LenderIdentity
from kvstore.lending.reader import Reader as Reader
from kvstore.lending.reader_holds import ReaderHolds
from kvstore.lending.told import Told
from kvstore.links import num_blocks_wanted
from kvstore.push import Frames, PushOutcome, PushPeers, Target
from kvstore.transport.base import CUDA_IPC, DIRECT_TRANSPORTS, BlockMemory
from kvstore.transport.device import Shared
from kvstore.transport.nixl import region_of
from process import logs
from process.deadline import Clock, Deadline
from process.errors import FailedPrecondition, InvalidArgument, NotFound
from process.tasks import end_tasks, start_task

logger = logging.getLogger(__name__)

ATTACHMENT_TTL_S = 60.0
"""A reader that was silent for so long is gone."""

SWEEP_S = 0.25
"""How late a lapsed lease may be noticed."""

MAX_CHUNK_BYTES = 16 * 1024 * 1024


class Lender:
    """See the module. `loans` is the truth about what is lent."""

    def __init__(
        self,
        identity: LenderIdentity,
        memory: BlockMemory,
        loans: LoanTable,
        find_free: FindFree,
        *,
        nixl_net_devices: str = "lo",
        lets_map: bool = False,
        limits: LenderLimits = LENDER_LIMITS,
        clock: Clock = time.monotonic,
    ) -> None:
        """lets_map: readers on this host may map the whole memory (transport cuda_ipc)."""
        self.identity = identity
        self.memory = memory
        self.loans = loans
        self.attachments = AttachmentTable()
        self.followers = Followers(loans, limits)
        max_probes = num_blocks_wanted(memory.block_bytes) // 2
        self.probes = Probes(loans, find_free, self.seal, max_probes, clock)
        self.shared: Shared | None = None
        """What readers of transport cuda_ipc are given; made for the first."""
        self._lets_map = lets_map
        self._clock = clock
        self._outlet = Outlet(memory)
        device = memory.device
        self.peers = PushPeers(
            loans,
            Frames(region_of(memory), memory.block_bytes),
            nixl_net_devices,
            name="lender",
            before=device.use_in_this_thread if device is not None else lambda: None,
        )
        self._sweeper: asyncio.Task[None] | None = None
        self._is_stopped = False
        self.reader_holds = ReaderHolds(loans, self._begin, self._end, limits)
        self._num_reading = 0
        self._still = asyncio.Event()
        self._still.set()

    # -- life

    def start(self) -> None:
        """Begin to end what lapses."""
        self._sweeper = start_task(self._sweep_for_ever(), "lender")

    async def stop(self, timeout_s: float) -> None:
        """Lend no more, and wait for what still moves. Blocks of a push that is not over by then
        stay out of use."""
        self._is_stopped = True
        await end_tasks([self._sweeper])
        self.loans.end_all()
        try:
            async with asyncio.timeout(timeout_s):
                await self._still.wait()
            await self._outlet.close()
        except TimeoutError:
            logs.event(logger, "lender_still_read", level=logging.WARNING)
        await self.peers.close(timeout_s)

    async def quiet(self) -> None:
        """Wait until nothing is lent any more; the caller bounds it."""
        while self.loans.num_lent:
            self.loans.lapse(self._clock())
            await asyncio.sleep(SWEEP_S / 10)

    def now_s(self) -> float:
        """The lender's clock."""
        return self._clock()

    # -- lending

    def enter(
        self, offers: Iterable[Offer], lease_id: str = "", *, is_computed: bool = True
    ) -> str:
        """Lend blocks whose bytes are complete and do not change; those without a checksum can be
        read from now on, and are to be sealed. is_computed: False: their bytes are still to come,
        and nobody can read them until `LoanTable.computed` says that they have.

        Returns: the lease. Raises: LeaseLapsed; NotFound when the lender has stopped: nothing was
            lent then.
        """
        self._check_open()
        return self.loans.lend(offers, lease_id, is_computed=is_computed)[0]

    async def seal(self, lease_id: str) -> PackedBlocks:
        """Compute and tell the checksums of what a lease lends without; one at a time of a lease.

        Returns: these blocks, in the order in which they were lent.
        Raises: LeaseLapsed, NotFound when the lender has stopped, TransferFailed of a device: the
            lease is of no use then, and the caller's to end.
        """
        block_ids = self.loans.unsealed_of(lease_id)
        loop = asyncio.get_running_loop()
        checksums = await loop.run_in_executor(None, self.memory.checksums, block_ids)
        self._check_open()
        return self.loans.seal(lease_id, dict(zip(block_ids, checksums, strict=True)))

    # -- readers come and go

    async def attach(self, reader: Reader) -> Attachment:
        """Let a reader in. Raises: InvalidArgument, FailedPrecondition."""
        self._check_open()
        if not reader.worker_id:
            raise InvalidArgument("worker_id", "must be given")
        if reader.transport not in DIRECT_TRANSPORTS:
            raise FailedPrecondition(
                f"transport {reader.transport}: this node lends its blocks; they are read over "
                f"{' or '.join(DIRECT_TRANSPORTS)}"
            )
        if reader.block_bytes != self.memory.block_bytes:
            raise FailedPrecondition(
                f"block_bytes: this worker's blocks have {self.memory.block_bytes} bytes, the "
                f"reader's {reader.block_bytes}"
            )
        if reader.fingerprint != self.identity.fingerprint:
            raise FailedPrecondition("model_fingerprint: this worker serves another model")
        target: Target | None = None
        if reader.transport == CUDA_IPC:
            self._let_map(reader.host_id)
        if reader.transport == "nixl":
            if reader.peer is None:
                raise InvalidArgument("region_address", "must be given for transport nixl")
            target = await self.peers.meet(reader.peer)
        for earlier in self.attachments.earlier_lives(reader.worker_id, reader.worker_incarnation):
            self.attachments.remove(earlier)
        attachment = self.attachments.add(
            reader.worker_id, reader.worker_incarnation, reader.transport, False, self._clock()
        )
        if target is not None:
            self.peers.add(attachment.attachment_id, target)
        self._forget_gone()
        logs.event(logger, "reader_attached", worker_id=reader.worker_id)
        return attachment

    def detach(self, attachment_id: str) -> None:
        """The reader says goodbye: it measures no more."""
        self.attachments.remove(attachment_id)
        self._forget_gone()

    def seen(self, attachment_id: str) -> float:
        """A call of a reader. Returns: the time of it. Raises: UnknownAttachment."""
        now_s = self._clock()
        self.attachments.get(attachment_id, now_s)
        return now_s

    async def await_lent(
        self,
        attachment_id: str,
        lease_id: str,
        num_known: int,
        num_wanted: int,
        budget_s: float,
        *,
        takes_unsealed: bool = False,
        hold_s: float = 0.0,
    ) -> Told:
        """What is lent beyond the blocks that a reader knows of; see Followers. hold_s: for how
        long it shall be kept for this reader, if it has mapped the memory: all others read by our
        own hand, under holds of their own."""
        begun_s = self._clock()
        is_mapped = self.attachments.get(attachment_id, begun_s).transport == CUDA_IPC
        self._need_lease(lease_id, begun_s)
        told = await self.followers.rest(
            lease_id, num_known, num_wanted, budget_s, takes_unsealed=takes_unsealed
        )
        # In the turn in which it was looked up: nothing comes between what is told and its hold.
        waited_s, held_s = self._clock() - begun_s, 0.0
        if told.is_all and is_mapped:
            held_s = self.reader_holds.keep(lease_id, num_known, hold_s)
        return replace(told, held_s=held_s, waited_s=waited_s)

    # -- bytes

    async def copy_out(
        self, attachment_id: str, lease_id: str, blocks: Sequence[Block], chunk_bytes: int
    ) -> AsyncGenerator[tuple[int, int, bytes, bool], None]:
        """Pieces of blocks (gRPC transport): (index, offset, bytes, is stale); a stale one has
        none.

        Raises: LeaseLapsed, UnknownAttachment, TransferFailed.
        """
        self._need_lease(lease_id, self.seen(attachment_id))
        if not 0 < chunk_bytes <= MAX_CHUNK_BYTES:
            raise InvalidArgument("chunk_bytes", f"between 1 and {MAX_CHUNK_BYTES}")
        hold_id, held = self.loans.hold(blocks)
        self._begin()
        try:
            for index, holds in enumerate(held):
                if not holds:
                    self.loans.refused[GENERATION] += 1
                    yield index, 0, b"", True
            indices = [index for index, holds in enumerate(held) if holds]
            block_ids = [blocks[index].frame for index in indices]
            at = iter(indices)
            async for content in self._outlet.blocks(block_ids):
                index = next(at)
                for offset in range(0, self.memory.block_bytes, chunk_bytes):
                    yield index, offset, bytes(content[offset : offset + chunk_bytes]), False
                self.loans.counters.num_bytes_read += self.memory.block_bytes
        finally:
            self._end()
            self.loans.unhold(hold_id)

    async def push(
        self,
        attachment_id: str,
        lease_id: str,
        push_id: str,
        blocks: Sequence[Block],
        destinations: Sequence[int],
        budget_s: float,
    ) -> PushOutcome:
        """Write blocks into the reader's own (NIXL transport)."""
        self._need_lease(lease_id, self.seen(attachment_id))
        outcome = await self.peers.push(
            attachment_id, push_id, blocks, destinations, Deadline.after(budget_s)
        )
        self.loans.counters.num_bytes_read += outcome.num_bytes
        return outcome

    def confirm(
        self,
        attachment_id: str,
        lease_id: str,
        pairs: Sequence[tuple[int, int]],
        num_bytes_read: int,
    ) -> list[int]:
        """A reader has copied these (block id, generation) out of the memory that it has mapped.

        Returns: the indices of those that were not lent any more. Raises: LeaseLapsed,
            UnknownAttachment.
        """
        self._need_lease(lease_id, self.seen(attachment_id))
        stale = self.loans.find_stale(pairs)
        if stale:
            self.loans.refused[GENERATION] += len(stale)
        self.loans.counters.num_bytes_read += num_bytes_read
        return stale

    def was_read(self, num_bytes: int) -> None:
        """A reader says so of bytes that it has not been confirmed; not more than there are."""
        num_bytes = min(num_bytes, self.memory.num_blocks * self.memory.block_bytes)
        self.loans.counters.num_bytes_read += num_bytes

    async def report(self, attachment_id: str, blocks: Sequence[Block]) -> int:
        """Somebody read bad bytes out of these: look, and end the leases that name bytes which are
        not there. Returns: how many blocks were bad."""
        self.seen(attachment_id)
        hold_id, _ = self.loans.hold(blocks)
        self._begin()
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
            self._end()
            self.loans.unhold(hold_id)
        num_bad = len({block_id for block_id, _ in bad})
        if num_bad:
            self.loans.refused[CHECKSUM] += num_bad
            logs.event(logger, "lent_blocks_damaged", level=logging.ERROR, num_blocks=num_bad)
        return num_bad

    def check_integrity(self) -> str:
        """Recompute every law. Returns: what failed, empty when all held."""
        try:
            self.loans.lapse(self._clock())
            self.loans.check_integrity()
            self.followers.check_integrity()
            self.reader_holds.check_integrity()
        except IntegrityError as error:
            logs.event(logger, "integrity_error", level=logging.ERROR, error=str(error))
            return str(error)
        return ""

    # -- inside

    def _let_map(self, host_id: str) -> None:
        """Make what a reader needs to map the memory. Raises: FailedPrecondition."""
        device = self.memory.device
        if not self._lets_map:
            raise FailedPrecondition(
                "transport cuda_ipc: this worker lets nobody map its cache; set lend_mapped=true "
                "there, or direct_transport to nixl or grpc here"
            )
        if not host_id or host_id != own_host_id():
            raise FailedPrecondition(
                "transport cuda_ipc: this worker is on another host, or a kernel tells none "
                "which: its memory cannot be mapped; set direct_transport to nixl or grpc"
            )
        if device is None:
            raise FailedPrecondition(
                "transport cuda_ipc: this worker's cache lies in host memory; set "
                "direct_transport to nixl or grpc"
            )
        if self.shared is None:
            self.shared = device.share(self.memory.address)

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

    def _begin(self) -> None:
        self._num_reading += 1
        self._still.clear()

    def _end(self) -> None:
        self._num_reading -= 1
        if self._num_reading == 0:
            self._still.set()

    def _forget_gone(self) -> None:
        attached = {attachment.attachment_id for attachment in self.attachments}
        self.peers.keep(attached)
        self.probes.keep(attached)

    async def _sweep_for_ever(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            now_s = self._clock()
            self.loans.lapse(now_s)
            for attachment_id in self.attachments.silent_since(now_s - ATTACHMENT_TTL_S):
                self.attachments.remove(attachment_id)
            self._forget_gone()
