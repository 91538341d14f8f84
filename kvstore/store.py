"""The truth about a store's blocks: places, catalog, leases and attachments acting as one object.

Life of a frame: FREE -> (reserve) WRITING -> (commit) COMMITTED -> (evicted, or a tail whose last
lease ended) FREE. A reservation that ends without a commit leaves its frame FREE when the store
writes by itself (gRPC), QUARANTINED when the worker writes one-sided (shm, nixl) and has not said
that its transfer is over.

Two writers of one block each write a frame of their own; the first to commit wins, the other's
frame is freed and its lease pins the winner. A block that lies in the file tier only counts as
absent to a writer, who has its bytes at hand: that is faster than reading them.

Knows nothing of bytes, sockets, hashing or fingerprints: a chain hash is an opaque key. The clock
is an argument (`now_s`), so that time is a value in tests. Plain and synchronous: one thread, one
loop.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

from kvstore import history, integrity
from kvstore.answers import Match, StoreCounters, StoreLimits
from kvstore.attachments import Attachment, AttachmentTable, QuarantineList
from kvstore.block import Block
from kvstore.catalog import Entry
from kvstore.errors import CHECKSUM
from kvstore.history import BlockHistory
from kvstore.leases import Lease, LeaseTable
from kvstore.residency import Residency
from kvstore.tiers.moves import TierMoves
from kvstore.writes import Writes
from process.spans import TraceContext


class Store:
    """See the module."""

    def __init__(
        self,
        num_frames: int,
        frame_bytes: int,
        limits: StoreLimits,
        *,
        publish: Callable[[int, int], None] | None = None,
        on_change: Callable[[bool, bytes], None] | None = None,
        past: BlockHistory | None = None,
    ) -> None:
        """publish: as in FramePool. on_change: as in Catalog. past: where it is kept what happens
        to blocks; None: nowhere."""
        self.history = BlockHistory() if past is None else past
        self.frame_bytes = frame_bytes
        self.limits = limits
        self.counters = StoreCounters()
        self.refused: Counter[str] = Counter()
        self.places = Residency(
            num_frames,
            limits.shares,
            publish=publish,
            on_change=on_change,
            history=self.history,
        )
        self.frames = self.places.frames
        self.catalog = self.places.catalog
        self.moves = TierMoves(self.places)
        self.leases = LeaseTable(limits.max_ttl_s)
        self.attachments = AttachmentTable()
        self.quarantined = QuarantineList()
        self.writes = Writes(
            self.places,
            self.leases,
            self.attachments,
            self.quarantined,
            self.counters,
            frame_bytes,
            self.lapse,
            self.history,
        )

    # -- workers come and go

    def attach(
        self,
        worker_id: str,
        worker_incarnation: bytes,
        transport: str,
        one_sided: bool,
        now_s: float,
    ) -> Attachment:
        """A worker's new life; its earlier lives are gone by that."""
        self.lapse(now_s)
        for earlier in self.attachments.earlier_lives(worker_id, worker_incarnation):
            self.detach(earlier, now_s)
        return self.attachments.add(worker_id, worker_incarnation, transport, one_sided, now_s)

    def detach(self, attachment_id: str, now_s: float, grace_s: float | None = None) -> None:
        """The attachment is gone. Its reservations end; what it pinned lives on until the leases
        end, because leases travel with handles. grace_s: 0 when its process is known to be dead."""
        self.lapse(now_s)
        attachment = self.attachments.find(attachment_id)
        if attachment is None:
            return
        for lease in self.leases:
            own = [f for f, r in lease.reservations.items() if r.attachment_id == attachment_id]
            for frame in own:
                self.writes.end(lease.drop_reservation(frame))
        grace_s = self.limits.quarantine_grace_s if grace_s is None else grace_s
        self.quarantined.owner_gone(attachment_id, now_s + grace_s)
        self.attachments.remove(attachment_id)
        self.lapse(now_s)

    # -- reading

    def match(
        self,
        chain_hashes: Sequence[bytes],
        *,
        pin: bool,
        lease_id: str = "",
        ttl_s: float = 0.0,
        now_s: float,
    ) -> Match:
        """The longest prefix present in any tier; with `pin` held by a lease (a new one if
        `lease_id` is empty). Whoever pins blocks that lie in a page only has them promoted, then
        calls `settle`."""
        self.lapse(now_s)
        lease = self.leases.get(lease_id) if lease_id else None
        entries = self.catalog.longest_prefix(chain_hashes)
        if chain_hashes:
            self.counters.num_lookups += 1
            self.counters.num_blocks_asked += len(chain_hashes)
            self.counters.num_blocks_found += len(entries)
        num_hits = entries[-1].num_hits if entries else 0
        for entry in entries:
            entry.num_hits += 1
        match = Match(entries, "", num_hits, {entry for entry in entries if entry.block is None})
        if pin and entries and lease is None:
            lease = self.leases.create(now_s, ttl_s)
        if lease is not None:
            match.lease_id = lease.lease_id
            self.leases.renew(lease, now_s, ttl_s)
            if pin:
                match.newly_pinned = lease.pin_all(self.catalog, entries)
        self.catalog.touch(entries)
        return match

    def settle(self, match: Match, now_s: float) -> None:
        """Cut a match that pinned down to its longest prefix that lies in frames, and let go of
        what it pinned beyond. Raises: LeaseLapsed when its lease ended meanwhile."""
        self.lapse(now_s)
        num_held = 0
        for entry in match.entries:
            if entry.block is None or not self.catalog.is_present(entry):
                break
            num_held += 1
        lost = match.entries[num_held:]
        if not lost:
            self.leases.get(match.lease_id)
            return
        self.counters.num_blocks_lost += len(lost)
        match.entries = match.entries[:num_held]
        match.num_hits = match.entries[-1].num_hits - 1 if match.entries else 0
        lease = self.leases.get(match.lease_id)
        newly = set(match.newly_pinned)
        for entry in lost:
            if entry in newly and entry in lease.pins:
                del lease.pins[entry]
                self.places.unpin(entry)

    def pin(self, blocks: Sequence[Block], *, ttl_s: float, now_s: float) -> tuple[str, int]:
        """Pin the longest prefix of `blocks` that still is what it says, tails included.

        Returns: the new lease's id (empty when nothing was pinned) and how many were.
        """
        self.lapse(now_s)
        entries: list[Entry] = []
        for block in blocks:
            entry = self._entry_of(block)
            if entry is None:
                break
            entries.append(entry)
        if not entries:
            return "", 0
        lease = self.leases.create(now_s, ttl_s)
        lease.pin_all(self.catalog, entries)
        return lease.lease_id, len(entries)

    def hold(self, blocks: Sequence[Block]) -> tuple[str, list[bool]]:
        """Keep frames from being reused while the store itself copies out of them.

        Returns: an id for `unhold`, and for each block whether it still is what it says.
        """
        lease = self.leases.create_hold()
        entries = [self._entry_of(block) for block in blocks]
        lease.pin_all(self.catalog, (entry for entry in entries if entry is not None))
        return lease.lease_id, [entry is not None for entry in entries]

    def unhold(self, hold_id: str) -> None:
        """The store is done copying."""
        lease = self.leases.remove(hold_id)
        if lease is not None:
            self._let_go(lease)

    # -- damage

    def checksums_of(self, blocks: Sequence[Block]) -> list[int | None]:
        """The checksum each block was committed with; None for one that is not what it says."""
        entries = [self._entry_of(block) for block in blocks]
        return [entry.block.checksum if entry and entry.block else None for entry in entries]

    def drop(self, bad: Sequence[Block]) -> int:
        """Take blocks whose bytes are bad out, with all below them. A bad one's generation changes
        at once; frames that leases still pin come free when the last of these ends. Each is counted
        as refused once, whoever finds it bad, and however often.

        Returns: how many blocks went.
        """
        found = dict.fromkeys(self._entry_of(block) for block in bad)
        entries = [entry for entry in found if entry is not None]
        self.refused[CHECKSUM] += len(entries)
        self.counters.num_damaged += len(entries)
        num_tails = sum(1 for entry in entries if not entry.chain_hash)
        num_lost = self.places.lose(entries, history.DAMAGED)
        for entry in entries:
            self.places.condemn(entry)
        return num_lost + num_tails

    # -- what readers tell

    def note_read(self, what: str, blocks: Sequence[Block], worker_id: str) -> None:
        """For the history: blocks were sent, or refused by a reader."""
        self.history.note(what, [block.chain_hash for block in blocks], worker_id)

    def note_verified(
        self,
        attachment_id: str,
        frames: Sequence[int],
        generations: Sequence[int],
        trace: TraceContext | None,
    ) -> None:
        """For the history: a worker has these and compared their checksums. What is another block
        by now, and a worker that is gone, are passed over."""
        attachment = self.attachments.find(attachment_id)
        if attachment is None or not self.history.is_kept:
            return
        hashes: list[bytes] = []
        for frame, generation in zip(frames, generations, strict=False):
            entry = self.places.committed.get(frame)
            if entry and entry.block and entry.block.generation == generation:
                hashes.append(entry.chain_hash)
        self.history.note(history.VERIFIED, hashes, attachment.worker_id, trace)

    # -- leases

    def renew(self, lease_id: str, *, ttl_s: float, num_bytes_read: int = 0, now_s: float) -> None:
        """Let the lease live `ttl_s` from now (0: leave its end as it is). Raises: LeaseLapsed."""
        self.lapse(now_s)
        self.counters.num_bytes_read += num_bytes_read
        lease = self.leases.get(lease_id)
        if ttl_s > 0:
            self.leases.renew(lease, now_s, ttl_s)

    def release(self, lease_ids: Iterable[str], *, num_bytes_read: int = 0, now_s: float) -> int:
        """End leases; those that are over already are passed over. Returns: how many were ended."""
        self.lapse(now_s)
        self.counters.num_bytes_read += num_bytes_read
        num_released = 0
        for lease_id in lease_ids:
            lease = self.leases.remove(lease_id)
            if lease is not None:
                self._let_go(lease)
                num_released += 1
        return num_released

    def lapse(self, now_s: float) -> None:
        """End what is over by `now_s`: leases, and quarantines whose worker is gone."""
        while (lease := self.leases.pop_due(now_s)) is not None:
            self.counters.num_leases_lapsed += 1
            self._let_go(lease)
        while (frame := self.quarantined.pop_due(now_s)) is not None:
            self.places.free_frame(frame)

    # -- account

    @property
    def num_tails(self) -> int:
        return len(self.places.tails)

    def num_pinned(self) -> int:
        """Entries that at least one lease, or a move between tiers, pins."""
        return self.catalog.num_pinned

    def check_integrity(self) -> None:
        """Recompute every conservation law. Raises: IntegrityError naming the first that fails."""
        deque(self.checks(), maxlen=0)

    def checks(self) -> Iterator[None]:
        """The same in steps; the caller may do other things between two (kvstore/watch.py)."""
        places = self.places
        yield from places.checks()
        yield from self.moves.checks()
        yield from self.leases.checks()
        yield from integrity.check_writing(
            self.frames,
            self.leases,
            self.attachments,
            self.quarantined,
            places.condemned,
            self.moves.promoting(),
        )
        yield from integrity.check_pins(
            self.leases, self.catalog, places.committed, places.condemned, self.moves.pins()
        )

    # -- inside

    def _entry_of(self, block: Block) -> Entry | None:
        entry = self.places.committed.get(block.frame)
        if entry is None or entry.block is None or entry.chain_hash != block.chain_hash:
            return None
        return entry if entry.block.generation == block.generation else None

    def _let_go(self, lease: Lease) -> None:
        for frame in list(lease.reservations):
            self.writes.end(lease.drop_reservation(frame))
        self.catalog.touch([entry for entry in lease.pins if self.catalog.is_present(entry)])
        for entry in lease.pins:
            self.places.unpin(entry)
        lease.pins.clear()
