"""The conservation laws that span frames, pages, catalog, leases and attachments, from scratch.

Each function is a generator that yields after each step of some microseconds, so that its caller
can stop between two of them, and raises IntegrityError naming the first law that fails. What it
found holds if nothing changed meanwhile. Read only, O(frames + leases).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain

from kvstore.attachments import AttachmentTable, QuarantineList
from kvstore.catalog import Catalog, Entry
from kvstore.errors import IntegrityError
from kvstore.frames import FramePool, FrameState
from kvstore.leases import LeaseTable
from kvstore.tiers.pages import PagePool


def check_committed(
    frames: FramePool, catalog: Catalog, committed: Mapping[int, Entry], tails: Mapping[int, str]
) -> Iterator[None]:
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
            raise IntegrityError(f"frame {frame}: no lease pins it and it is not in the catalog")
        yield
    for entry in catalog:
        if entry.block is not None and committed.get(entry.block.frame) is not entry:
            raise IntegrityError(f"{entry.chain_hash.hex()}: its frame is not its own")
        yield


def check_pages(catalog: Catalog, pages: PagePool) -> Iterator[None]:
    """Used pages are those that catalog entries lie in, one each."""
    lying: set[int] = set()
    for entry in catalog:
        if entry.page is not None:
            if entry.page.index in lying:
                raise IntegrityError(f"pages: two entries lie in page {entry.page.index}")
            if not pages.is_taken(entry.page.index):
                raise IntegrityError("pages: an entry lies in a page that is free")
            lying.add(entry.page.index)
        yield
    if len(lying) != pages.num_used:
        raise IntegrityError(f"pages: {pages.num_used} are used, {len(lying)} entries lie in one")


def check_writing(
    frames: FramePool,
    leases: LeaseTable,
    attachments: AttachmentTable,
    quarantined: QuarantineList,
    condemned: Mapping[int, Entry],
    promoting: Mapping[int, int],
) -> Iterator[None]:
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
            yield
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
            yield
    for owner in quarantined.owners():
        if attachments.find(owner) is None:
            raise IntegrityError("a frame is quarantined for ever: its worker is gone")


def check_pins(
    leases: LeaseTable,
    catalog: Catalog,
    committed: Mapping[int, Entry],
    condemned: Mapping[int, Entry],
    moving: Counter[Entry],
) -> Iterator[None]:
    """Each entry's pin count is the number of leases that hold it (and of moves between
    tiers), and none is lost sight of."""
    pins = Counter(moving)
    for lease in leases:
        for entry in lease.pins:
            pins[entry] += 1
            yield
    for entry in chain(catalog, committed.values(), condemned.values(), pins):
        if entry.num_pins != pins.get(entry, 0):
            raise IntegrityError(
                f"{entry.chain_hash.hex()}: {entry.num_pins} pins kept, {pins[entry]} are held"
            )
        yield
    num_pinned = 0
    for entry, num_pins in pins.items():
        num_pinned += num_pins > 0
        block = entry.block
        if block is not None and entry not in (
            committed.get(block.frame),
            condemned.get(block.frame),
        ):
            raise IntegrityError(f"frame {block.frame}: pinned but not committed")
        yield
    if num_pinned != catalog.num_pinned:
        raise IntegrityError(f"{num_pinned} entries are pinned, counted {catalog.num_pinned}")


def check_moves(catalog: Catalog, page_uses: Counter[Entry]) -> Iterator[None]:
    """Pages are kept from leaving by what moves, and by nothing else."""
    for entry in catalog:
        if entry.num_page_uses != page_uses[entry]:
            raise IntegrityError(f"{entry.chain_hash.hex()}: miscounts the uses of its page")
        yield
