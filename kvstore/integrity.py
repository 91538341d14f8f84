"""The conservation laws that span frames, catalog, leases and attachments, recomputed from scratch.

Each function raises IntegrityError naming the first law that fails. Read only, O(frames + leases).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvstore.attachments import AttachmentTable, QuarantineList
from kvstore.catalog import Catalog, Entry
from kvstore.errors import IntegrityError
from kvstore.frames import FramePool, FrameState
from kvstore.leases import LeaseTable


def check_committed(
    frames: FramePool, catalog: Catalog, committed: Mapping[int, Entry], tails: Mapping[int, str]
) -> None:
    """Committed frames are catalog entries or pinned tails, one each, at their own generation."""
    if len(committed) != frames.count(FrameState.COMMITTED):
        raise IntegrityError("committed frames and their entries differ in number")
    if len(catalog) + len(tails) != len(committed):
        raise IntegrityError("catalog and tails do not add up to the committed frames")
    for frame, entry in committed.items():
        block = entry.block
        if frames.state(frame) is not FrameState.COMMITTED or block.frame != frame:
            raise IntegrityError(f"frame {frame}: has an entry but is not committed")
        if block.generation != frames.generation(frame):
            raise IntegrityError(f"frame {frame}: its entry has another generation")
        is_tail = frame in tails
        if is_tail == bool(block.chain_hash):
            raise IntegrityError(f"frame {frame}: neither tail nor in the catalog, or both")
        if is_tail and entry.num_pins == 0:
            raise IntegrityError(f"frame {frame}: a tail that nobody pins")
        if not is_tail and catalog.find(block.chain_hash) is not entry:
            raise IntegrityError(f"frame {frame}: not what the catalog says")


def check_writing(
    frames: FramePool,
    leases: LeaseTable,
    attachments: AttachmentTable,
    quarantined: QuarantineList,
) -> None:
    """Writing frames are reserved once, by a worker that is attached; quarantined ones have an
    end."""
    writing: dict[int, int] = {}
    for lease in leases:
        for frame, reservation in lease.reservations.items():
            if frame in writing:
                raise IntegrityError(f"frame {frame}: reserved twice")
            if attachments.find(reservation.attachment_id) is None:
                raise IntegrityError(f"frame {frame}: reserved by a worker that is gone")
            writing[frame] = reservation.generation
    for state, held in (
        (FrameState.WRITING, writing),
        (FrameState.QUARANTINED, quarantined.frames()),
    ):
        if len(held) != frames.count(state):
            raise IntegrityError(f"{state.value} frames: {len(held)} are accounted for")
        for frame, generation in held.items():
            if frames.state(frame) is not state:
                raise IntegrityError(f"frame {frame}: is not {state.value}")
            if frames.generation(frame) != generation:
                raise IntegrityError(f"frame {frame}: {state.value} at another generation")
    for owner in quarantined.owners():
        if attachments.find(owner) is None:
            raise IntegrityError("a frame is quarantined for ever: its worker is gone")


def check_pins(leases: LeaseTable, committed: Mapping[int, Entry]) -> None:
    """Each entry's pin count is the number of leases that hold it."""
    pins: Counter[int] = Counter()
    for lease in leases:
        for frame, entry in lease.pins.items():
            if committed.get(frame) is not entry:
                raise IntegrityError(f"frame {frame}: pinned but not committed")
            pins[frame] += 1
    for frame, entry in committed.items():
        if entry.num_pins != pins[frame]:
            raise IntegrityError(
                f"frame {frame}: {entry.num_pins} pins kept, {pins[frame]} leases hold it"
            )
