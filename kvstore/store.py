"""The truth about a store's blocks: frames, catalog, leases and attachments acting as one object.

Life of a frame: FREE -> (reserve) WRITING -> (commit) COMMITTED -> (evicted, or a tail whose last
lease ended) FREE. A reservation that ends without a commit leaves its frame FREE when the store
writes by itself (gRPC), QUARANTINED when the worker writes one-sided (shm, nixl) and has not said
that its transfer is over.

Two writers of one block each write a frame of their own; the first to commit wins, the other's
frame is freed and its lease pins the winner.

Knows nothing of bytes, sockets, hashing or fingerprints: a chain hash is an opaque key. The clock
is an argument (`now_s`), so that time is a value in tests. Plain and synchronous: one thread, one
loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvstore import integrity
from kvstore.attachments import Attachment, AttachmentTable, QuarantineList
from kvstore.block import Block
from kvstore.block_hash import CHAIN_HASH_BYTES
from kvstore.catalog import Catalog, Entry
from kvstore.errors import IntegrityError, LeaseLapsed
from kvstore.frames import FramePool
from kvstore.leases import Lease, LeaseTable, Reservation
from process.errors import FailedPrecondition, InvalidArgument


@dataclass(frozen=True, slots=True)
class Reserved:
    """What became of one block asked for. `block` is set when it was PRESENT; frame and generation
    when it was RESERVED; none of them when there was NO ROOM."""

    block: Block | None = None
    frame: int = -1
    generation: int = -1

    @property
    def has_room(self) -> bool:
        return self.block is not None or self.frame >= 0


NO_ROOM = Reserved()


@dataclass(frozen=True, slots=True)
class Written:
    """A frame whose bytes are complete, at the odd generation that it was reserved at."""

    frame: int
    generation: int
    checksum: int = 0
    num_tokens: int = 0


@dataclass(frozen=True)
class StoreLimits:
    """max_ttl_s: longest lease. quarantine_grace_s: how long after its worker is gone a quarantined
    frame stays out of use."""

    max_ttl_s: float = 300.0
    quarantine_grace_s: float = 30.0


@dataclass
class StoreCounters:
    """Sums since the store began."""

    num_lookups: int = 0
    num_blocks_asked: int = 0
    num_blocks_matched: int = 0
    num_bytes_written: int = 0
    num_bytes_read: int = 0
    num_evictions: int = 0
    num_leases_lapsed: int = 0


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
    ) -> None:
        """publish: as in FramePool. on_change: as in Catalog."""
        self.frame_bytes = frame_bytes
        self.limits = limits
        self.counters = StoreCounters()
        self.refused: Counter[str] = Counter()
        self.frames = FramePool(num_frames, publish)
        self.catalog = Catalog(on_change)
        self.leases = LeaseTable(limits.max_ttl_s)
        self.attachments = AttachmentTable()
        self.quarantined = QuarantineList()
        self._committed: dict[int, Entry] = {}  # frame -> entry, tails among them
        self._tails: dict[int, str] = {}  # frame -> the name it was reserved under

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
                self._end_reservation(lease.drop_reservation(frame))
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
    ) -> tuple[list[Block], str]:
        """The longest prefix present; with `pin` held by a lease (a new one if `lease_id` is
        empty).

        Returns: the blocks and the lease's id, which is empty when nothing was pinned.
        """
        self.lapse(now_s)
        lease = self.leases.get(lease_id) if lease_id else None
        entries = self.catalog.longest_prefix(chain_hashes)
        if chain_hashes:
            self.counters.num_lookups += 1
            self.counters.num_blocks_asked += len(chain_hashes)
            self.counters.num_blocks_matched += len(entries)
        self.catalog.touch(entries)
        if pin and entries and lease is None:
            lease = self.leases.create(now_s, ttl_s)
        if lease is not None:
            self.leases.renew(lease, now_s, ttl_s)
            if pin:
                self._pin_all(lease, entries)
        return [entry.block for entry in entries], lease.lease_id if lease else ""

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
        self._pin_all(lease, entries)
        return lease.lease_id, len(entries)

    def hold(self, blocks: Sequence[Block]) -> tuple[str, list[bool]]:
        """Keep frames from being reused while the store itself copies out of them.

        Returns: an id for `unhold`, and for each block whether it still is what it says.
        """
        lease = self.leases.create_hold()
        entries = [self._entry_of(block) for block in blocks]
        self._pin_all(lease, (entry for entry in entries if entry is not None))
        return lease.lease_id, [entry is not None for entry in entries]

    def unhold(self, hold_id: str) -> None:
        """The store is done copying."""
        lease = self.leases.remove(hold_id)
        if lease is not None:
            self._let_go(lease)

    # -- writing

    def reserve(
        self,
        attachment_id: str,
        parent: bytes,
        chain_hashes: Sequence[bytes],
        *,
        tail_name: str = "",
        lease_id: str = "",
        ttl_s: float,
        now_s: float,
    ) -> tuple[str, list[Reserved], Reserved | None]:
        """A frame for each block that is not there yet, as far as room goes, under one lease.

        Returns: the lease's id, one answer per hash, and one for the tail if one was asked for.
        Raises: InvalidArgument; LeaseLapsed; UnknownAttachment; FailedPrecondition when `parent` is
            neither present nor being written under this lease. Nothing is taken then.
        """
        self.lapse(now_s)
        attachment = self.attachments.get(attachment_id, now_s)
        lease = self.leases.get(lease_id) if lease_id else None
        _check_hashes(parent, chain_hashes)
        above = self.catalog.find(parent) if parent else None
        if parent and above is None and (lease is None or parent not in lease.writing):
            raise FailedPrecondition(
                f"parent {parent.hex()}: neither present nor being written under this lease"
            )
        if lease is None:
            lease = self.leases.create(now_s, ttl_s)
        else:
            self.leases.renew(lease, now_s, ttl_s)
        if above is not None:
            self._pin_all(lease, [above])
        answers: list[Reserved] = []
        for chain_hash in chain_hashes:
            answer = self._reserve_one(lease, attachment, parent, chain_hash)
            if not answer.has_room:
                break
            answers.append(answer)
            parent = chain_hash
        answers += [NO_ROOM] * (len(chain_hashes) - len(answers))
        tail: Reserved | None = None
        if tail_name:
            tail = NO_ROOM
            if not answers or answers[-1].has_room:
                tail = self._reserve_frame(lease, attachment, b"", b"", tail_name)
        return lease.lease_id, answers, tail

    def check_reservation(
        self, attachment_id: str, lease_id: str, frame: int, generation: int, now_s: float
    ) -> None:
        """Whether the caller may write into the frame now. Raises: LeaseLapsed,
        UnknownAttachment."""
        self.lapse(now_s)
        self.attachments.get(attachment_id, now_s)
        reservation = self.leases.get(lease_id).reservations.get(frame)
        if reservation is None or (reservation.generation, reservation.attachment_id) != (
            generation,
            attachment_id,
        ):
            raise LeaseLapsed(f"frame {frame}: not reserved at generation {generation}")

    def commit(
        self, attachment_id: str, lease_id: str, written: Sequence[Written], now_s: float
    ) -> list[Block]:
        """Make written frames visible, parents first; all of them or none.

        Returns: the blocks as they stand; the other writer's where somebody was faster.
        Raises: LeaseLapsed; UnknownAttachment; FailedPrecondition when a parent is not present.
        """
        self.lapse(now_s)
        coming: set[bytes] = set()
        for each in written:
            self.check_reservation(attachment_id, lease_id, each.frame, each.generation, now_s)
            reservation = self.leases.get(lease_id).reservations[each.frame]
            parent = reservation.parent
            if parent and parent not in coming and self.catalog.find(parent) is None:
                raise FailedPrecondition(f"frame {each.frame}: its parent was never committed")
            coming.add(reservation.chain_hash)
        if len({each.frame for each in written}) != len(written):
            raise InvalidArgument("blocks", "a frame is named twice")
        lease = self.leases.get(lease_id)
        return [self._commit_one(lease, each) for each in written]

    def abort(
        self,
        attachment_id: str,
        lease_id: str,
        written: Sequence[Written],
        *,
        quarantine: bool,
        now_s: float,
    ) -> None:
        """Give reservations up. With `quarantine` a transfer may still write: a second call without
        it says when that is over. What is not reserved or quarantined (any more) is passed over."""
        self.lapse(now_s)
        self.attachments.get(attachment_id, now_s)
        lease = self.leases.find(lease_id)
        for each in written:
            if not quarantine and self.quarantined.take(each.frame, each.generation, attachment_id):
                self.frames.free(each.frame)
                continue
            reservation = lease.reservations.get(each.frame) if lease else None
            if (
                lease is None
                or reservation is None
                or (reservation.generation, reservation.attachment_id)
                != (each.generation, attachment_id)
            ):
                continue
            lease.drop_reservation(each.frame)
            if quarantine:
                self.frames.quarantine(each.frame)
                self.quarantined.add(each.frame, each.generation, attachment_id)
            else:
                self.frames.free(each.frame)

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
            self.frames.free(frame)

    # -- account

    @property
    def num_tails(self) -> int:
        return len(self._tails)

    def num_pinned(self) -> int:
        """Frames that at least one lease pins. O(n)."""
        return sum(1 for entry in self._committed.values() if entry.num_pins)

    def check_integrity(self) -> None:
        """Recompute every conservation law. Raises: IntegrityError naming the first that fails."""
        self.frames.check_integrity()
        self.catalog.check_integrity()
        self.leases.check_integrity()
        integrity.check_committed(self.frames, self.catalog, self._committed, self._tails)
        integrity.check_writing(self.frames, self.leases, self.attachments, self.quarantined)
        integrity.check_pins(self.leases, self._committed)

    # -- inside

    def _entry_of(self, block: Block) -> Entry | None:
        entry = self._committed.get(block.frame)
        if entry is None or entry.block.chain_hash != block.chain_hash:
            return None
        return entry if entry.block.generation == block.generation else None

    def _pin_all(self, lease: Lease, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.block.frame not in lease.pins:
                lease.pins[entry.block.frame] = entry
                self.catalog.pin(entry)

    def _reserve_one(
        self, lease: Lease, attachment: Attachment, parent: bytes, chain_hash: bytes
    ) -> Reserved:
        entry = self.catalog.find(chain_hash)
        if entry is not None:
            self._pin_all(lease, [entry])
            self.catalog.touch([entry])
            return Reserved(block=entry.block)
        if chain_hash in lease.writing:  # asked for twice under one lease: the same frame
            frame = lease.writing[chain_hash]
            return Reserved(frame=frame, generation=lease.reservations[frame].generation)
        return self._reserve_frame(lease, attachment, parent, chain_hash, "")

    def _reserve_frame(
        self,
        lease: Lease,
        attachment: Attachment,
        parent: bytes,
        chain_hash: bytes,
        tail_name: str,
    ) -> Reserved:
        frame = self.frames.take()
        if frame is None:
            victim = self.catalog.evict()
            if victim is None:
                return NO_ROOM
            self.counters.num_evictions += 1
            self._free_committed(victim)
            frame = self.frames.take()
            if frame is None:
                raise IntegrityError("an evicted frame did not come free")
        generation = self.frames.generation(frame)
        lease.add_reservation(
            Reservation(frame, generation, attachment.attachment_id, chain_hash, parent, tail_name)
        )
        return Reserved(frame=frame, generation=generation)

    def _commit_one(self, lease: Lease, written: Written) -> Block:
        reservation = lease.drop_reservation(written.frame)
        chain_hash = reservation.chain_hash
        winner = self.catalog.find(chain_hash) if chain_hash else None
        if winner is not None:
            self.frames.free(written.frame)  # its writer said that it is done writing
            self._pin_all(lease, [winner])
            return winner.block
        generation = self.frames.commit(written.frame)
        block = Block(chain_hash, written.frame, generation, written.checksum, written.num_tokens)
        if chain_hash:
            parent = self.catalog.find(reservation.parent) if reservation.parent else None
            entry = self.catalog.insert(block, parent)
        else:
            entry = Entry(block, None, 0)
            self._tails[written.frame] = reservation.tail_name
        self._committed[written.frame] = entry
        self._pin_all(lease, [entry])
        self.counters.num_bytes_written += self.frame_bytes
        return block

    def _let_go(self, lease: Lease) -> None:
        for frame in list(lease.reservations):
            self._end_reservation(lease.drop_reservation(frame))
        used: list[Entry] = []
        for entry in lease.pins.values():
            self.catalog.unpin(entry)
            if entry.block.chain_hash:
                used.append(entry)
            elif entry.num_pins == 0:
                self._free_committed(entry)
        lease.pins.clear()
        self.catalog.touch(used)

    def _end_reservation(self, reservation: Reservation) -> None:
        """Its lease or its worker is gone, and nobody said that the writing is over."""
        attachment = self.attachments.find(reservation.attachment_id)
        if attachment is not None and not attachment.one_sided:
            self.frames.free(reservation.frame)
            return
        self.frames.quarantine(reservation.frame)
        self.quarantined.add(reservation.frame, reservation.generation, reservation.attachment_id)

    def _free_committed(self, entry: Entry) -> None:
        frame = entry.block.frame
        del self._committed[frame]
        self._tails.pop(frame, None)
        self.frames.free(frame)


def _check_hashes(parent: bytes, chain_hashes: Sequence[bytes]) -> None:
    if parent and len(parent) != CHAIN_HASH_BYTES:
        raise InvalidArgument("parent", f"a chain hash has {CHAIN_HASH_BYTES} bytes")
    if any(len(chain_hash) != CHAIN_HASH_BYTES for chain_hash in chain_hashes):
        raise InvalidArgument("chain_hashes", f"a chain hash has {CHAIN_HASH_BYTES} bytes")
    if len(set(chain_hashes)) != len(chain_hashes) or parent in chain_hashes:
        raise InvalidArgument("chain_hashes", "a hash appears twice in one chain")
