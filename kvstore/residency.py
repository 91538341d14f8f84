"""Which block lies in which frame and page, whose places these are, and how room is made.

Frames and pages are the store's two kinds of places. A block that must leave its frame stays
present when it has a page; without one it leaves the store, and only as a leaf. A block that must
leave its page stays present while it has a frame. Who gives way is decided by tenants' shares
(tenancy.py) and then by age (eviction.py).

An entry that was dropped as damaged, or below a damaged one, is `lost`: not in the catalog any
more, its frame kept until the last lease on it ends; a damaged frame is out of use (QUARANTINED)
meanwhile.

Knows nothing of leases, workers or bytes. Plain synchronous values, one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter

from kvstore import integrity
from kvstore.blocks import Block, Page, StoredPage
from kvstore.catalog import Catalog, Entry
from kvstore.errors import IntegrityError
from kvstore.eviction import LruOrder
from kvstore.frames import FramePool, FrameState
from kvstore.history import EVICTED, LEFT_MEMORY, LOST, BlockHistory
from kvstore.tenancy import PlaceAccount, TenantShares
from kvstore.tiers.pages import PagePool


class Residency:
    """See the module."""

    def __init__(
        self,
        num_frames: int,
        shares: TenantShares,
        *,
        publish: Callable[[int, int], None] | None = None,
        on_change: Callable[[bool, bytes], None] | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        """publish: as in FramePool. on_change: as in Catalog."""
        self.history = BlockHistory() if history is None else history
        self.shares = shares
        self.frames = FramePool(num_frames, publish)
        self.frame_account = PlaceAccount(num_frames, shares)
        self.pages = PagePool(0)
        self.page_account = PlaceAccount(0, shares)
        self.catalog = Catalog(on_change, self._offer)
        self.committed: dict[int, Entry] = {}  # frame -> entry, tails and lost ones among them
        self.tails: dict[int, str] = {}  # frame -> the name it was reserved under
        self.condemned: dict[int, Entry] = {}  # frame -> entry with bad bytes that leases pin
        self.num_evictions = 0
        self._clean: set[Entry] = set()
        groups = self.frame_account.guaranteed
        self._clean_order = {g: LruOrder("clean", attrgetter("is_clean")) for g in groups}
        self._last_order = {g: LruOrder("eviction", attrgetter("may_be_evicted")) for g in groups}
        self._page_order = {g: LruOrder("pages", attrgetter("may_leave_page")) for g in groups}
        self._demotion_order = {
            g: LruOrder("demotion", attrgetter("may_be_demoted")) for g in groups
        }

    # -- frames

    @property
    def num_available(self) -> int:
        """Frames that can be given away at once without loss."""
        return self.frames.count(FrameState.FREE) + len(self._clean)

    def take_frame(self, tenant: str) -> int | None:
        """A frame to write into (WRITING), charged to `tenant`; None when nobody can give way."""
        frame = self.frames.take()
        if frame is None:
            for group in self.frame_account.giving_way(tenant):
                # Even a newer one that costs a reading goes before one that would be lost.
                entry = self._clean_order[group].first() or self._last_order[group].first()
                if entry is not None:
                    self._leave_frame(entry)
                    frame = self.frames.take()
                    break
        if frame is not None:
            self.frame_account.take(frame, tenant)
        return frame

    def free_frame(self, frame: int) -> None:
        """A frame without an entry comes free."""
        self.frames.free(frame)
        self.frame_account.give_back(frame)

    def place(self, frame: int, entry: Entry, checksum: int, num_tokens: int) -> Block:
        """WRITING -> COMMITTED: the entry's bytes are in the frame now."""
        generation = self.frames.commit(frame)
        block = Block(entry.chain_hash, frame, generation, checksum, num_tokens)
        self.committed[frame] = entry
        self.frame_account.charge_to(frame, entry.tenant)
        self.catalog.set_block(entry, block)
        return block

    def place_tail(self, frame: int, name: str, checksum: int, num_tokens: int) -> Entry:
        """As `place`, for the unfilled last block of a prompt."""
        entry = Entry(b"", None, 0, self.frame_account.tenant_of(frame))
        self.tails[frame] = name
        self.place(frame, entry, checksum, num_tokens)
        return entry

    # -- pages

    def open_pages(self, num_pages: int, stored: Sequence[StoredPage]) -> int:
        """A file tier is there from now on, with what an earlier life left in it (the newest header
        of each block; only what is prefix-closed is kept). Returns: how many blocks were kept."""
        if len(self.catalog):
            raise IntegrityError("a file tier is opened before anything is stored")
        kept = _prefix_closed(stored)
        self.pages = PagePool(num_pages, (each.index for each in kept))
        self.page_account = PlaceAccount(num_pages, self.shares)
        for each in kept:
            parent = self.catalog.find(each.parent) if each.parent else None
            page = Page(each.index, each.checksum, each.num_tokens)
            self.page_account.take(each.index, each.tenant)
            self.catalog.insert(each.chain_hash, parent, tenant=each.tenant, page=page)
        for each in sorted(kept, key=lambda page: page.serial):
            entry = self.catalog.find(each.chain_hash)
            if entry is not None:
                self.catalog.touch([entry])
        return len(kept)

    def close_pages(self) -> int:
        """The file tier is gone. Blocks that lay only there, and all below them, leave the store.
        Nothing may be moving. Returns: how many blocks went."""
        num_lost = self.lose([e for e in self.catalog if e.block is None])
        for entry in reversed(list(self.catalog)):
            if entry.page is not None:
                self._leave_page(entry)
        self.pages = PagePool(0)
        self.page_account = PlaceAccount(0, self.shares)
        return num_lost

    def take_page(self, entry: Entry) -> int | None:
        """A page to write `entry` into (WRITING); None when nobody can give way.

        Others beyond their share give way to a tenant below its own whatever their age; otherwise
        only what is older does, so that two who are beyond do not take pages from each other for
        ever.
        """
        page = self.pages.take()
        own = self.shares.group(entry.tenant)
        if page is None:
            is_entitled = self.page_account.is_below_share(own)
            for group in self.page_account.giving_way(entry.tenant):
                victim = self._page_order[group].first()
                if victim is None:
                    continue
                if victim.last_used >= entry.last_used and (group == own or not is_entitled):
                    continue
                self._give_page_away(victim)
                page = self.pages.take()
                break
        if page is not None:
            self.page_account.take(page, entry.tenant)
        return page

    def free_page(self, page: int) -> None:
        """A page without an entry comes free."""
        self.pages.free(page)
        self.page_account.give_back(page)

    def set_page(self, entry: Entry, page: Page) -> None:
        """WRITING -> USED: the entry's bytes are in the page now."""
        self.catalog.set_page(entry, page)
        self.pages.use(page.index)

    def next_to_demote(self) -> list[Entry]:
        """For each group, the first to give way first: the oldest block in a frame only."""
        groups = self.frame_account.giving_way("")
        found = [self._demotion_order[group].first() for group in groups]
        rest = [
            order.first() for group, order in self._demotion_order.items() if group not in groups
        ]
        return [entry for entry in [*found, *rest] if entry is not None]

    # -- damage

    def lose(self, entries: Sequence[Entry], why: str = LOST) -> int:
        """Entries and all below them leave the catalog; frames that are pinned stay until they are
        not. why: what happened to the entries, for the history. Returns: how many went."""
        lost = self.catalog.with_all_below(entries)
        first = set(entries)
        self.history.note(why, [entry.chain_hash for entry in entries])
        self.history.note(LOST, [entry.chain_hash for entry in lost if entry not in first])
        for entry in lost:
            if entry.page is not None:
                self._leave_page(entry)
            self.catalog.remove(entry)
            if entry.num_pins == 0:
                self.forget(entry)
        return len(lost)

    def condemn(self, entry: Entry) -> None:
        """The bytes in the entry's frame are bad: stale to every reader from now on."""
        block = entry.block
        if block is None or self.committed.get(block.frame) is not entry:
            return
        del self.committed[block.frame]
        self.tails.pop(block.frame, None)
        self.frames.quarantine(block.frame)
        self.condemned[block.frame] = entry
        if entry.num_pins == 0:
            self.forget(entry)

    def forget(self, entry: Entry) -> None:
        """Free the frame of an entry that nobody pins and that does not need it to be present."""
        block = entry.block
        if block is None:
            return
        if self.condemned.pop(block.frame, None) is None:
            del self.committed[block.frame]
            self.tails.pop(block.frame, None)
        self.catalog.set_block(entry, None)
        self.free_frame(block.frame)

    def unpin(self, entry: Entry) -> None:
        """One pin ends; with the last one the frame of a lost entry or a tail comes free."""
        self.catalog.unpin(entry)
        if entry.num_pins == 0 and not self.catalog.is_present(entry):
            self.forget(entry)

    def check_integrity(self) -> None:
        """Recompute every law of places. Raises: IntegrityError naming the first that fails."""
        deque(self.checks(), maxlen=0)

    def checks(self) -> Iterator[None]:
        """The same in steps; the caller may do other things between two (kvstore/watch.py)."""
        frames, pages = self.frames, self.pages
        yield from frames.checks()
        yield from pages.checks()
        yield from self.catalog.checks()
        yield from integrity.check_committed(frames, self.catalog, self.committed, self.tails)
        yield from integrity.check_pages(self.catalog, pages)
        yield from self.frame_account.checks(
            frames.num_frames - frames.count(FrameState.FREE),
            lambda frame: frames.state(frame) is not FrameState.FREE,
        )
        yield from self.page_account.checks(pages.num_taken, pages.is_taken)
        for frame, entry in chain(self.committed.items(), self.condemned.items()):
            if self.frame_account.tenant_of(frame) != entry.tenant:
                raise IntegrityError(f"frame {frame}: charged to another tenant than its block")
            yield
        num_clean = 0
        for entry in self.catalog:
            num_clean += entry.is_clean
            if entry.is_clean != (entry in self._clean):
                raise IntegrityError(f"{entry.chain_hash.hex()}: clean, or counted as clean")
            yield
        if num_clean != len(self._clean):
            raise IntegrityError("clean entries are miscounted")
        all_orders = [self._clean_order, self._last_order, self._page_order]
        if self.pages.num_pages:
            all_orders.append(self._demotion_order)
        for orders in all_orders:
            for group, order in orders.items():
                yield from order.checks(
                    entry for entry in self.catalog if self.shares.group(entry.tenant) == group
                )

    # -- inside

    def _leave_frame(self, entry: Entry) -> None:
        block = entry.block
        if block is None:
            raise IntegrityError(f"{entry.chain_hash.hex()} lies in no frame")
        if entry.page is None:
            self.num_evictions += 1
            self.catalog.remove(entry)
        self.history.note(EVICTED if entry.page is None else LEFT_MEMORY, [entry.chain_hash])
        self.forget(entry)

    def _leave_page(self, entry: Entry) -> None:
        if entry.page is None:
            raise IntegrityError(f"{entry.chain_hash.hex()} lies in no page")
        index = entry.page.index
        self.catalog.set_page(entry, None)
        self.free_page(index)

    def _give_page_away(self, entry: Entry) -> None:
        self._leave_page(entry)
        if entry.block is None:
            self.num_evictions += 1
            self.catalog.remove(entry)
            self.history.note(EVICTED, [entry.chain_hash])

    def _offer(self, entry: Entry) -> None:
        """Let the orders find the entry where it is a candidate now. Called very often."""
        if entry.page is None:
            self._clean.discard(entry)
            if entry.may_be_demoted:
                group = self.shares.group(entry.tenant)
                if entry.num_children == 0:
                    self._last_order[group].offer(entry)
                if self.pages.num_pages:
                    self._demotion_order[group].offer(entry)
            return
        group = self.shares.group(entry.tenant)
        if entry.is_clean:
            self._clean.add(entry)
            self._clean_order[group].offer(entry)
        else:
            self._clean.discard(entry)
        self._page_order[group].offer(entry)


def _prefix_closed(stored: Sequence[StoredPage]) -> list[StoredPage]:
    """The newest page of each block whose whole prefix is there, parents before children."""
    newest: dict[bytes, StoredPage] = {}
    for each in stored:
        other = newest.get(each.chain_hash)
        if other is None or other.serial < each.serial:
            newest[each.chain_hash] = each
    whole: dict[bytes, bool] = {b"": True}
    kept: list[StoredPage] = []
    for each in newest.values():
        path: list[StoredPage] = []
        at: StoredPage | None = each
        on_path: set[bytes] = set()
        while at is not None and at.chain_hash not in whole and at.chain_hash not in on_path:
            path.append(at)
            on_path.add(at.chain_hash)
            at = newest.get(at.parent) if at.parent not in whole else None
        is_whole = bool(path) and whole.get(path[-1].parent, False)
        for above in reversed(path):
            whole[above.chain_hash] = is_whole
            if is_whole:
                kept.append(above)
    return kept
