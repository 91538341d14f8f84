"""Which chain hashes are present, as trees of prefixes, and in which places their blocks lie.

An entry lies in a frame (`block`), in a page of the file tier (`page`), or in both. Two laws:
- presence is prefix-closed: an entry's parent is present too, because only leaves (entries without
  children) or whole subtrees are ever removed, and only below a present parent is inserted;
- so is the file tier by itself: an entry with a page has a parent with a page, so that everything
  in it can be used again by the store's next life.

A tail block is an `Entry` without a chain hash; it can be pinned but is never in the catalog.

Knows nothing of frames' states, leases, tenants' shares or clocks. Plain synchronous values, one
thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.blocks import Block, Page
from kvstore.errors import IntegrityError


@dataclass(slots=True, eq=False)
class Entry:
    """A block that is present, and its bookkeeping. tenant: whose share it is charged to.
    num_page_uses: reads and writes that rely on its page right now."""

    chain_hash: bytes
    parent: Entry | None
    depth: int
    tenant: str
    block: Block | None = None
    page: Page | None = None
    num_children: int = 0
    num_page_children: int = 0
    num_pins: int = 0
    num_hits: int = 0
    num_page_uses: int = 0
    last_used: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether its frame can go at once without loss: it lies in a page, too."""
        return self.block is not None and self.page is not None and self.num_pins == 0

    @property
    def may_be_evicted(self) -> bool:
        """Whether it lies in a frame only and can leave the store with it."""
        return self.may_be_demoted and self.num_children == 0

    @property
    def may_leave_page(self) -> bool:
        """Whether its page can be given to another block."""
        if self.page is None or self.num_page_uses or self.num_page_children:
            return False
        return self.block is not None or (self.num_children == 0 and self.num_pins == 0)

    @property
    def may_be_demoted(self) -> bool:
        """Whether it lies in a frame only, and nobody uses it."""
        return (
            self.block is not None
            and self.page is None
            and self.num_pins == 0
            and bool(self.chain_hash)
        )


class Catalog:
    """The present chain hashes."""

    def __init__(
        self,
        on_change: Callable[[bool, bytes], None] | None = None,
        on_use: Callable[[Entry], None] | None = None,
    ) -> None:
        """on_change(present, chain_hash): called as each comes and goes, in order. on_use(entry):
        called when what may become of a present entry may have changed."""
        self._entries: dict[bytes, Entry] = {}
        self.num_pinned = 0
        """Entries with a pin, tails and lost ones among them."""
        self._on_change = on_change
        self._on_use = on_use
        self._tick = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, parents before children."""
        return iter(self._entries.values())

    def find(self, chain_hash: bytes) -> Entry | None:
        return self._entries.get(chain_hash)

    def is_present(self, entry: Entry) -> bool:
        return self._entries.get(entry.chain_hash) is entry

    def longest_prefix(self, chain_hashes: Sequence[bytes]) -> list[Entry]:
        """Entries of the hashes from the first on, up to the first that is absent."""
        found: list[Entry] = []
        for chain_hash in chain_hashes:
            entry = self._entries.get(chain_hash)
            if entry is None:
                break
            found.append(entry)
        return found

    def insert(
        self,
        chain_hash: bytes,
        parent: Entry | None,
        *,
        tenant: str = "",
        block: Block | None = None,
        page: Page | None = None,
    ) -> Entry:
        """Add a block below `parent` (None: at the start of a prompt).

        Raises: IntegrityError if it is there already or its parent is not.
        """
        if chain_hash in self._entries:
            raise IntegrityError(f"catalog: {chain_hash.hex()} is there already")
        if parent is not None and not self.is_present(parent):
            raise IntegrityError(f"catalog: the parent of {chain_hash.hex()} is not there")
        entry = Entry(chain_hash, parent, parent.depth + 1 if parent else 0, tenant, block)
        if parent is not None:
            parent.num_children += 1
        self._entries[chain_hash] = entry
        if page is not None:
            self.set_page(entry, page)
        self.touch([entry])
        if self._on_change is not None:
            self._on_change(True, chain_hash)
        return entry

    def touch(self, entries: Sequence[Entry]) -> None:
        """The entries were used now, all at the same moment."""
        self._tick += 1
        for entry in entries:
            entry.last_used = self._tick
            if entry.num_pins == 0 or entry.page is not None:  # else it is no candidate
                self.changed(entry)

    def pin(self, entry: Entry) -> None:
        entry.num_pins += 1
        self.num_pinned += entry.num_pins == 1
        if entry.page is not None and entry.num_pins == 1:  # clean no more
            self.changed(entry)

    def unpin(self, entry: Entry) -> None:
        if entry.num_pins < 1:
            raise IntegrityError("catalog: an entry is unpinned once too often")
        entry.num_pins -= 1
        self.num_pinned -= entry.num_pins == 0
        if entry.num_pins == 0:
            self.changed(entry)

    def set_block(self, entry: Entry, block: Block | None) -> None:
        """The entry came into a frame, or left it."""
        entry.block = block
        self.changed(entry)

    def set_page(self, entry: Entry, page: Page | None) -> None:
        """The entry came into a page, or left it. Raises: IntegrityError if the file tier would not
        stay prefix-closed."""
        above = entry.parent
        if page is not None and above is not None and above.page is None:
            raise IntegrityError("catalog: a page below a parent that has none")
        step = (page is not None) - (entry.page is not None)
        entry.page = page
        if above is not None and step:
            above.num_page_children += step
            self.changed(above)
        self.changed(entry)

    def remove(self, entry: Entry) -> None:
        """Take a leaf without a page out. Raises: IntegrityError if it is none."""
        if entry.num_children or entry.page is not None or not self.is_present(entry):
            raise IntegrityError(f"catalog: {entry.chain_hash.hex()} cannot be removed")
        del self._entries[entry.chain_hash]
        if entry.parent is not None:
            entry.parent.num_children -= 1
            self.changed(entry.parent)
        if self._on_change is not None:
            self._on_change(False, entry.chain_hash)

    def with_all_below(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those of `entries` that are present and every entry below them, children before parents.
        O(n): for what is rare."""
        marked = {id(entry) for entry in entries if self.is_present(entry)}
        if not marked:
            return []
        found: list[Entry] = []
        for entry in self:
            if id(entry) in marked or (entry.parent is not None and id(entry.parent) in marked):
                marked.add(id(entry))
                found.append(entry)
        found.reverse()
        return found

    def changed(self, entry: Entry) -> None:
        """What may become of the entry may have changed."""
        if self._on_use is not None:
            self._on_use(entry)

    def check_integrity(self) -> None:
        """Recount children; both prefix laws. Raises: IntegrityError."""
        deque(self.checks(), maxlen=0)

    def checks(self) -> Iterator[None]:
        """The same in steps; the caller may do other things between two (kvstore/watch.py)."""
        children: dict[int, int] = {}
        page_children: dict[int, int] = {}
        for chain_hash, entry in self._entries.items():
            yield
            if entry.chain_hash != chain_hash:
                raise IntegrityError(f"catalog: {chain_hash.hex()} names another block")
            if entry.block is None and entry.page is None:
                raise IntegrityError(f"catalog: {chain_hash.hex()} lies nowhere")
            above = entry.parent
            if above is None:
                continue
            if not self.is_present(above):
                raise IntegrityError(f"catalog: {chain_hash.hex()} has an absent parent")
            children[id(above)] = children.get(id(above), 0) + 1
            if entry.page is not None:
                if above.page is None:
                    raise IntegrityError(f"catalog: {chain_hash.hex()} has a page, its parent none")
                page_children[id(above)] = page_children.get(id(above), 0) + 1
        for chain_hash, entry in self._entries.items():
            counts = (entry.num_children, entry.num_page_children)
            if counts != (children.get(id(entry), 0), page_children.get(id(entry), 0)):
                raise IntegrityError(f"catalog: {chain_hash.hex()} miscounts its children")
            yield
