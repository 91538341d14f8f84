"""Frames being written: reserved, committed or given up; see Store for the life of a frame.

Knows leases and attachments, no bytes. Plain and synchronous, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvstore.answers import NO_ROOM, Reserved, StoreCounters, Written
from kvstore.attachments import Attachment, AttachmentTable, QuarantineList
from kvstore.block_hash import CHAIN_HASH_BYTES
from kvstore.blocks import Block
from kvstore.errors import IntegrityError, LeaseLapsed
from kvstore.history import WRITTEN, BlockHistory
from kvstore.leases import Lease, LeaseTable, Reservation
from kvstore.residency import Residency
from kvstore.tenancy import MAX_TENANT_BYTES
from process.errors import FailedPrecondition, InvalidArgument


class Writes:
    """See the module."""

    def __init__(
        self,
        places: Residency,
        leases: LeaseTable,
        attachments: AttachmentTable,
        quarantined: QuarantineList,
        counters: StoreCounters,
        frame_bytes: int,
        lapse: Callable[[float], None],
        history: BlockHistory,
    ) -> None:
        """lapse(now_s): ends what is over by then."""
        self._history = history
        self._places = places
        self._catalog = places.catalog
        self._leases = leases
        self._attachments = attachments
        self._quarantined = quarantined
        self._counters = counters
        self._frame_bytes = frame_bytes
        self._lapse = lapse
        self.is_closed = False
        """No room for anything new; what is there, or is being written, is not touched."""

    def reserve(
        self,
        attachment_id: str,
        parent: bytes,
        chain_hashes: Sequence[bytes],
        *,
        tail_name: str = "",
        tenant: str = "",
        lease_id: str = "",
        is_probe: bool = False,
        ttl_s: float,
        now_s: float,
    ) -> tuple[str, list[Reserved], Reserved | None]:
        """A frame for each block that is not there yet, as far as room goes, under one lease,
        charged to `tenant`'s share. is_probe: of a lease that this call makes, see Lease.

        Returns: the lease's id, one answer per hash, and one for the tail if one was asked for.
        Raises: InvalidArgument; LeaseLapsed; UnknownAttachment; FailedPrecondition when `parent` is
            neither present nor being written under this lease. Nothing is taken then.
        """
        self._lapse(now_s)
        attachment = self._attachments.get(attachment_id, now_s)
        lease = self._leases.get(lease_id) if lease_id else None
        _check_hashes(parent, chain_hashes)
        if len(tenant.encode()) > MAX_TENANT_BYTES:
            raise InvalidArgument("tenant", f"at most {MAX_TENANT_BYTES} bytes")
        above = self._catalog.find(parent) if parent else None
        if parent and above is None and (lease is None or parent not in lease.writing):
            raise FailedPrecondition(
                f"parent {parent.hex()}: neither present nor being written under this lease"
            )
        if lease is None:
            lease = self._leases.create(now_s, ttl_s)
            lease.is_probe = is_probe
        else:
            self._leases.renew(lease, now_s, ttl_s)
        if above is not None:
            lease.pin_all(self._catalog, [above])
        answers: list[Reserved] = []
        for chain_hash in chain_hashes:
            answer = self._reserve_one(lease, attachment, parent, chain_hash, tenant)
            if not answer.has_room:
                break
            answers.append(answer)
            parent = chain_hash
        answers += [NO_ROOM] * (len(chain_hashes) - len(answers))
        tail: Reserved | None = None
        if tail_name:
            tail = NO_ROOM
            if not answers or answers[-1].has_room:
                tail = self._reserve_frame(lease, attachment, b"", b"", tail_name, tenant)
        return lease.lease_id, answers, tail

    def check_reservation(
        self, attachment_id: str, lease_id: str, frame: int, generation: int, now_s: float
    ) -> None:
        """Whether the caller may write into the frame now. Raises: LeaseLapsed,
        UnknownAttachment."""
        self._lapse(now_s)
        self._attachments.get(attachment_id, now_s)
        _reservation(self._leases.get(lease_id), attachment_id, frame, generation)

    def commit(
        self, attachment_id: str, lease_id: str, written: Sequence[Written], now_s: float
    ) -> list[Block]:
        """Make written frames visible, parents first; all of them or none.

        Returns: the blocks as they stand; the other writer's where somebody was faster.
        Raises: LeaseLapsed; UnknownAttachment; FailedPrecondition when a parent is not present.
        """
        self._lapse(now_s)
        worker_id = self._attachments.get(attachment_id, now_s).worker_id
        lease = self._leases.get(lease_id)
        coming: set[bytes] = set()
        for each in written:
            reservation = _reservation(lease, attachment_id, each.frame, each.generation)
            parent = reservation.parent
            if parent and parent not in coming and self._catalog.find(parent) is None:
                raise FailedPrecondition(f"frame {each.frame}: its parent was never committed")
            coming.add(reservation.chain_hash)
        if len({each.frame for each in written}) != len(written):
            raise InvalidArgument("blocks", "a frame is named twice")
        blocks = [self._commit_one(lease, each) for each in written]
        ours = [
            block.chain_hash
            for block, each in zip(blocks, written, strict=True)
            if block.frame == each.frame
        ]
        self._history.note(WRITTEN, ours, worker_id)
        return blocks

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
        self._lapse(now_s)
        self._attachments.get(attachment_id, now_s)
        lease = self._leases.find(lease_id)
        for each in written:
            if not quarantine and self._quarantined.take(
                each.frame, each.generation, attachment_id
            ):
                self._places.free_frame(each.frame)
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
                self._places.frames.quarantine(each.frame)
                self._quarantined.add(each.frame, each.generation, attachment_id)
            else:
                self._places.free_frame(each.frame)

    def end(self, reservation: Reservation) -> None:
        """Its lease or its worker is gone, and nobody said that the writing is over."""
        attachment = self._attachments.find(reservation.attachment_id)
        if attachment is not None and not attachment.one_sided:
            self._places.free_frame(reservation.frame)
            return
        self._places.frames.quarantine(reservation.frame)
        self._quarantined.add(reservation.frame, reservation.generation, reservation.attachment_id)

    # -- inside

    def _reserve_one(
        self, lease: Lease, attachment: Attachment, parent: bytes, chain_hash: bytes, tenant: str
    ) -> Reserved:
        entry = self._catalog.find(chain_hash)
        if entry is not None:
            lease.pin_all(self._catalog, [entry])
            self._catalog.touch([entry])
            if entry.block is not None:
                return Reserved(block=entry.block)
        if chain_hash in lease.writing:  # asked for twice under one lease: the same frame
            frame = lease.writing[chain_hash]
            return Reserved(frame=frame, generation=lease.reservations[frame].generation)
        return self._reserve_frame(lease, attachment, parent, chain_hash, "", tenant)

    def _reserve_frame(
        self,
        lease: Lease,
        attachment: Attachment,
        parent: bytes,
        chain_hash: bytes,
        tail_name: str,
        tenant: str,
    ) -> Reserved:
        frame = None if self.is_closed else self._places.take_frame(tenant)
        if frame is None:
            return NO_ROOM
        generation = self._places.frames.generation(frame)
        lease.add_reservation(
            Reservation(
                frame, generation, attachment.attachment_id, chain_hash, parent, tail_name, tenant
            )
        )
        return Reserved(frame=frame, generation=generation)

    def _commit_one(self, lease: Lease, written: Written) -> Block:
        reservation = lease.drop_reservation(written.frame)
        chain_hash = reservation.chain_hash
        entry = self._catalog.find(chain_hash) if chain_hash else None
        if entry is not None and entry.block is not None:
            self._places.free_frame(written.frame)  # its writer said that it is done writing
            lease.pin_all(self._catalog, [entry])
            return entry.block
        numbers = (written.checksum, written.num_tokens)
        if not chain_hash:
            entry = self._places.place_tail(written.frame, reservation.tail_name, *numbers)
            lease.pin_all(self._catalog, [entry])
        else:
            if entry is None:
                parent = self._catalog.find(reservation.parent) if reservation.parent else None
                entry = self._catalog.insert(chain_hash, parent, tenant=reservation.tenant)
            lease.pin_all(self._catalog, [entry])
            self._places.place(written.frame, entry, *numbers)
        if not lease.is_probe:
            self._counters.num_bytes_written += self._frame_bytes
        if entry.block is None:
            raise IntegrityError(f"frame {written.frame}: committed and empty")
        return entry.block


def _reservation(lease: Lease, attachment_id: str, frame: int, generation: int) -> Reservation:
    """The frame's, if it is the caller's. Raises: LeaseLapsed."""
    reservation = lease.reservations.get(frame)
    if (
        reservation is None
        or reservation.generation != generation
        or reservation.attachment_id != attachment_id
    ):
        raise LeaseLapsed(f"frame {frame}: not reserved at generation {generation}")
    return reservation


def _check_hashes(parent: bytes, chain_hashes: Sequence[bytes]) -> None:
    if parent and len(parent) != CHAIN_HASH_BYTES:
        raise InvalidArgument("parent", f"a chain hash has {CHAIN_HASH_BYTES} bytes")
    if any(len(chain_hash) != CHAIN_HASH_BYTES for chain_hash in chain_hashes):
        raise InvalidArgument("chain_hashes", f"a chain hash has {CHAIN_HASH_BYTES} bytes")
    if len(set(chain_hashes)) != len(chain_hashes) or parent in chain_hashes:
        raise InvalidArgument("chain_hashes", "a hash appears twice in one chain")
