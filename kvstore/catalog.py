"""Which chain hash lies in which frame, and what goes first when room is needed.

Presence is prefix-closed: an entry's parent is present too, because only leaves (entries without
children) are ever removed and only below a present parent is inserted. An entry is evictable when
it is an unpinned leaf. The least recently used evictable entry goes first; of entries used at the
same moment the deepest, so that a chain goes tail first. Choosing one costs O(log n): a heap whose
outdated items are skipped.

A tail block is an `Entry` without a chain hash; it can be pinned but is never in the catalog.

Knows nothing of frames' states, leases or clocks. Plain synchronous values, one thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.block import Block
from kvstore.errors import IntegrityError


@dataclass(slots=True, eq=False)
class Entry:
    """A committed block and its bookkeeping. `block.chain_hash` is empty for a tail block."""

    block: Block
    parent: Entry | None
    depth: int
    num_children: int = 0
    num_pins: int = 0
    last_used: int = 0

    @property
    def evictable(self) -> bool:
        return self.num_pins == 0 and self.num_children == 0


class Catalog:
    """The present chain hashes."""

    def __init__(self, on_change: Callable[[bool, bytes], None] | None = None) -> None:
        """on_change(present, chain_hash): called at each insert and eviction, in order."""
        self._entries: dict[bytes, Entry] = {}
        self._on_change = on_change
        self._tick = 0
        self._serial = 0
        self._heap: list[tuple[int, int, int, Entry]] = []  # (last_used, -depth, serial, entry)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Every entry, parents before children."""
        return iter(self._entries.values())

    def find(self, chain_hash: bytes) -> Entry | None:
        return self._entries.get(chain_hash)

    def longest_prefix(self, chain_hashes: Sequence[bytes]) -> list[Entry]:
        """Entries of the hashes from the first on, up to the first that is absent."""
        found: list[Entry] = []
        for chain_hash in chain_hashes:
            entry = self._entries.get(chain_hash)
            if entry is None:
                break
            found.append(entry)
        return found

    def insert(self, block: Block, parent: Entry | None) -> Entry:
        """Add a block below `parent` (None: at the start of a prompt).

        Raises: IntegrityError if it is there already or its parent is not.
        """
        if block.chain_hash in self._entries:
            raise IntegrityError(f"catalog: {block.chain_hash.hex()} is there already")
        if parent is not None and self._entries.get(parent.block.chain_hash) is not parent:
            raise IntegrityError(f"catalog: the parent of {block.chain_hash.hex()} is not there")
        entry = Entry(block, parent, parent.depth + 1 if parent else 0)
        if parent is not None:
            parent.num_children += 1
        self._entries[block.chain_hash] = entry
        self.touch([entry])
        if self._on_change is not None:
            self._on_change(True, block.chain_hash)
        return entry

    def touch(self, entries: Sequence[Entry]) -> None:
        """The entries were used now, all at the same moment."""
        self._tick += 1
        for entry in entries:
            entry.last_used = self._tick
            self._offer(entry)

    def pin(self, entry: Entry) -> None:
        entry.num_pins += 1

    def unpin(self, entry: Entry) -> None:
        if entry.num_pins < 1:
            raise IntegrityError(f"catalog: frame {entry.block.frame} is unpinned once too often")
        entry.num_pins -= 1
        self._offer(entry)

    def evict(self) -> Entry | None:
        """Remove the evictable entry that was used the longest ago; None when nothing is
        evictable."""
        while self._heap:
            last_used, _, _, entry = heapq.heappop(self._heap)
            if last_used == entry.last_used and self._is_candidate(entry):
                self._remove(entry)
                return entry
        return None

    def num_evictable_now(self) -> int:
        """How many entries are unpinned leaves. O(n): for status and tests."""
        return sum(1 for entry in self._entries.values() if entry.evictable)

    def check_integrity(self) -> None:
        """Recount children and parents; every evictable entry must be found by the heap."""
        children: dict[bytes, int] = {}
        for chain_hash, entry in self._entries.items():
            if entry.block.chain_hash != chain_hash:
                raise IntegrityError(f"catalog: {chain_hash.hex()} names another block")
            if entry.parent is None:
                continue
            above = entry.parent.block.chain_hash
            if self._entries.get(above) is not entry.parent:
                raise IntegrityError(f"catalog: {chain_hash.hex()} has an absent parent")
            children[above] = children.get(above, 0) + 1
        offered = {id(entry) for tick, _, _, entry in self._heap if tick == entry.last_used}
        for chain_hash, entry in self._entries.items():
            if entry.num_children != children.get(chain_hash, 0):
                raise IntegrityError(f"catalog: {chain_hash.hex()} miscounts its children")
            if entry.evictable and id(entry) not in offered:
                raise IntegrityError(f"catalog: {chain_hash.hex()} could never be evicted")

    def _is_candidate(self, entry: Entry) -> bool:
        return entry.evictable and self._entries.get(entry.block.chain_hash) is entry

    def _offer(self, entry: Entry) -> None:
        """Let `evict` find the entry if it is a candidate now."""
        if not self._is_candidate(entry):
            return
        self._serial += 1
        heapq.heappush(self._heap, (entry.last_used, -entry.depth, self._serial, entry))
        # Each use leaves an outdated item behind; rebuild before they outnumber the entries.
        if len(self._heap) > 64 + 4 * len(self._entries):
            self._heap = [
                (entry.last_used, -entry.depth, serial, entry)
                for serial, entry in enumerate(self._entries.values())
                if entry.evictable
            ]
            heapq.heapify(self._heap)
            self._serial = len(self._entries)

    def _remove(self, entry: Entry) -> None:
        del self._entries[entry.block.chain_hash]
        if entry.parent is not None:
            entry.parent.num_children -= 1
            self._offer(entry.parent)
        if self._on_change is not None:
            self._on_change(False, entry.block.chain_hash)
