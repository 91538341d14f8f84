"""Blocks on their way between frames and pages: what is planned, what is held meanwhile, how it
ends. The bytes are moved by others (file_tier.py), in threads.

Demotion: the oldest unpinned block that lies in a frame only, with all of its prefix that has no
page yet, the beginning first, so that the file tier stays prefix-closed at each moment. Frames are
kept afterwards as long as nobody needs them; they are `clean` then.

Promotion: a block that lies in a page only is read into a frame and checked there; when it is bad,
it is dropped with all below.

Conservation law: pages being written are those of the demotions under way; frames being read into
(`promoting`) those of the promotions under way. Plain synchronous values, one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvstore import integrity
from kvstore.blocks import Block, Page
from kvstore.catalog import Entry
from kvstore.errors import IntegrityError
from kvstore.history import DAMAGED, DEMOTED, PROMOTED
from kvstore.residency import Residency


@dataclass(frozen=True, slots=True)
class PageWrite:
    """One block to be written to page `index`."""

    entry: Entry
    block: Block
    index: int


@dataclass(eq=False, slots=True)
class Demotion:
    """writes: parents before children. above: the entry with a page that the first one follows."""

    writes: list[PageWrite]
    above: Entry | None


@dataclass(eq=False, slots=True)
class Promotion:
    """Page `page` of `entry` is being read into `frame`."""

    entry: Entry
    page: Page
    frame: int


class TierMoves:
    """See the module."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._demotions: set[Demotion] = set()
        self._promotions: dict[int, Promotion] = {}  # by frame
        self.num_demoted = 0
        self.num_promoted = 0
        self.num_pages_bad = 0

    @property
    def num_moving(self) -> int:
        return len(self._demotions) + len(self._promotions)

    def promoting(self) -> dict[int, int]:
        """frame -> its (odd) generation, of the promotions under way."""
        frames = self._residency.frames
        return {frame: frames.generation(frame) for frame in self._promotions}

    # -- demotion

    def begin_demotion(self, max_blocks: int) -> Demotion | None:
        """What to write next; None when nothing can go into the file tier. Its blocks are pinned
        and their pages taken until `end_demotion`."""
        if not self._residency.pages.num_pages:
            return None
        for oldest in self._residency.next_to_demote():
            path: list[Entry] = []
            entry: Entry | None = oldest
            while entry is not None and entry.page is None:
                path.append(entry)
                entry = entry.parent
            demotion = Demotion([], entry)
            if entry is not None:
                self._use_page(entry, 1)  # it must not give way to its own children
            for each in reversed(path[-max_blocks:]):
                index = self._residency.take_page(each) if each.block is not None else None
                if index is None or each.block is None:
                    break
                self._residency.catalog.pin(each)
                demotion.writes.append(PageWrite(each, each.block, index))
            if demotion.writes:
                self._demotions.add(demotion)
                return demotion
            if entry is not None:
                self._use_page(entry, -1)
        return None

    def end_demotion(self, demotion: Demotion, done: Sequence[bool]) -> None:
        """done: of each write in order, whether its bytes were good and are in the page."""
        self._demotions.remove(demotion)
        catalog = self._residency.catalog
        demoted: list[bytes] = []
        if demotion.above is not None:
            self._use_page(demotion.above, -1)
        for write, is_done in zip(demotion.writes, done, strict=True):
            entry = write.entry
            has_way = entry.parent is None or entry.parent.page is not None
            if is_done and has_way and catalog.is_present(entry) and entry.page is None:
                page = Page(write.index, write.block.checksum, write.block.num_tokens)
                self._residency.set_page(entry, page)
                self.num_demoted += 1
                demoted.append(entry.chain_hash)
            else:
                self._residency.free_page(write.index)
        self._residency.history.note(DEMOTED, demoted)
        for write in demotion.writes:
            self._residency.unpin(write.entry)

    # -- promotion

    def begin_promotion(self, entry: Entry) -> Promotion | None:
        """A frame for a block that lies in a page only; None when there is no room. Until
        `end_promotion` the entry is pinned and its page kept."""
        if entry.page is None or entry.block is not None:
            raise IntegrityError(f"{entry.chain_hash.hex()}: nothing to promote")
        frame = self._residency.take_frame(entry.tenant)
        if frame is None:
            return None
        promotion = Promotion(entry, entry.page, frame)
        self._residency.catalog.pin(entry)
        self._use_page(entry, 1)
        self._promotions[frame] = promotion
        return promotion

    def end_promotion(self, promotion: Promotion, is_good: bool) -> int:
        """is_good: the page's bytes are in the frame and their checksum is right. A bad page's
        block is dropped with all below. Returns: how many blocks were dropped."""
        entry, frame = promotion.entry, promotion.frame
        del self._promotions[frame]
        self._use_page(entry, -1)
        num_dropped = 0
        # Somebody may have dropped it, or written it again, meanwhile.
        is_wanted = self._residency.catalog.is_present(entry) and entry.block is None
        if is_good and is_wanted:
            self._residency.place(frame, entry, promotion.page.checksum, promotion.page.num_tokens)
            self.num_promoted += 1
            self._residency.history.note(PROMOTED, [entry.chain_hash])
        else:
            self._residency.free_frame(frame)
        if not is_good and entry.page is promotion.page:
            self.num_pages_bad += 1
            num_dropped = self._residency.lose([entry], DAMAGED)
        self._residency.unpin(entry)
        return num_dropped

    # -- account

    def pins(self) -> Counter[Entry]:
        """How often what moves pins each entry."""
        pinned = Counter(write.entry for d in self._demotions for write in d.writes)
        pinned.update(promotion.entry for promotion in self._promotions.values())
        return pinned

    def checks(self) -> Iterator[None]:
        """Raises: IntegrityError."""
        writing = {write.index for d in self._demotions for write in d.writes}
        if len(writing) != self._residency.pages.num_writing:
            raise IntegrityError("pages being written are not those of the demotions under way")
        uses = Counter(d.above for d in self._demotions if d.above is not None)
        uses.update(promotion.entry for promotion in self._promotions.values())
        yield from integrity.check_moves(self._residency.catalog, uses)

    # -- inside

    def _use_page(self, entry: Entry, step: int) -> None:
        entry.num_page_uses += step
        self._residency.catalog.changed(entry)
