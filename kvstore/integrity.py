"""The conservation laws that span frames, pages, catalog, leases and attachments, from scratch.

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
from kvstore.tiers.pages import PagePool


def check_committed(
    frames: FramePool, catalog: Catalog, committed: Mapping[int, Entry], tails: Mapping[int, str]
) -> None:
    """Committed frames are catalog entries, pinned tails, or pinned blocks that were dropped from
    the catalog; one each, at their own generation."""
    if len(committed) != frames.count(FrameState.COMMITTED):
        raise IntegrityError("committed frames and their entries differ in number")
    for frame, entry in committed.items():
        block = entry.block
        if block is None or frames.state(frame) is not FrameState.COMMITTED:
            raise IntegrityError(f"frame {frame}: has an entry but is not committed")
        if (block.frame, block.chain_hash) != (frame, entry.chain_hash):
            raise IntegrityError(f"frame {frame}: its entry is another's")
        if block.generation != frames.generation(frame):
            raise IntegrityError(f"frame {frame}: its entry has another generation")
        if (frame in tails) == bool(block.chain_hash):
            raise IntegrityError(f"frame {frame}: neither tail nor block, or both")
        if entry.num_pins == 0 and not catalog.is_present(entry):
            raise IntegrityError(f"frame {frame}: nobody pins it and it is not in the catalog")
    for entry in catalog:
        if entry.block is not None and committed.get(entry.block.frame) is not entry:
            raise IntegrityError(f"{entry.chain_hash.hex()}: its frame is not its own")


def check_pages(catalog: Catalog, pages: PagePool) -> None:
    """Used pages are those that catalog entries lie in, one each."""
    lying = [entry.page.index for entry in catalog if entry.page is not None]
    if len(lying) != len(set(lying)) or len(lying) != pages.num_used:
        raise IntegrityError(f"pages: {pages.num_used} are used, {len(lying)} entries lie in one")
    if not set(lying) <= pages.taken():
        raise IntegrityError("pages: an entry lies in a page that is free")


def check_writing(
    frames: FramePool,
    leases: LeaseTable,
    attachments: AttachmentTable,
    quarantined: QuarantineList,
    condemned: Mapping[int, Entry],
    promoting: Mapping[int, int],
) -> None:
    """Writing frames are reserved once, by a worker that is attached, or are being read into by the
    store (promoting: frame -> generation); quarantined ones have an end: their worker's, or that of
    the last lease on their bad bytes."""
    writing = dict(promoting)
    for lease in leases:
        for frame, reservation in lease.reservations.items():
            if frame in writing:
                raise IntegrityError(f"frame {frame}: reserved twice")
            if attachments.find(reservation.attachment_id) is None:
                raise IntegrityError(f"frame {frame}: reserved by a worker that is gone")
            writing[frame] = reservation.generation
    out_of_use = quarantined.frames()
    for frame, entry in condemned.items():
        if frame in out_of_use:
            raise IntegrityError(f"frame {frame}: quarantined twice")
        if entry.num_pins == 0:
            raise IntegrityError(f"frame {frame}: bad, and nobody pins it")
        if entry.block is not None:
            out_of_use[frame] = entry.block.generation + 1
    for state, held in ((FrameState.WRITING, writing), (FrameState.QUARANTINED, out_of_use)):
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


def check_pins(
    leases: LeaseTable,
    catalog: Catalog,
    committed: Mapping[int, Entry],
    condemned: Mapping[int, Entry],
    moving: Counter[Entry],
) -> None:
    """Each entry's pin count is the number of leases that hold it (and of moves between
    tiers), and none is lost sight of."""
    pins = moving + Counter(entry for lease in leases for entry in lease.pins)
    known = {*catalog, *committed.values(), *condemned.values()}
    for entry in known | pins.keys():
        if entry.num_pins != pins[entry]:
            raise IntegrityError(
                f"{entry.chain_hash.hex()}: {entry.num_pins} pins kept, {pins[entry]} are held"
            )
    for entry in pins.keys() - known:
        if entry.block is not None:
            raise IntegrityError(f"frame {entry.block.frame}: pinned but not committed")


def check_moves(catalog: Catalog, page_uses: Counter[Entry]) -> None:
    """Pages are kept from leaving by what moves, and by nothing else."""
    for entry in catalog:
        if entry.num_page_uses != page_uses[entry]:
            raise IntegrityError(f"{entry.chain_hash.hex()}: miscounts the uses of its page")
