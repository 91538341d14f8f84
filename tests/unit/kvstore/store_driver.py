"""What the state machines do with a store and see of it. They hold for any cut of its classes: how
the store is called stands here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore import invariants
from kvstore.block_changes import ChangeLog
from kvstore.block_refs import Block, StoredPage
from kvstore.block_store import BlockStore, PrefixMatch, Reserved, StoreLimits, WrittenFrame
from kvstore.frame_table import Demotion, PageWrite, Promotion
from kvstore.slot_pool import SlotState


class StoreDriver:
    """A store, over a file tier if `num_pages` is given. An `entry` is a block that is present, as
    the store keeps it."""

    def __init__(
        self,
        num_frames: int,
        frame_bytes: int,
        limits: StoreLimits,
        num_pages: int = 0,
        stored: Sequence[StoredPage] = (),
    ) -> None:
        self.generations = np.zeros(num_frames, np.uint64)
        """Of each frame, as readers see it."""
        self._log = ChangeLog()
        self._present: list[bytes] = []
        self._gone: list[bytes] = []
        self.store = BlockStore(
            num_frames, frame_bytes, limits, published=self.generations, changes=self._log
        )
        if num_pages:
            self.store.table.open_pages(num_pages, stored)

    @property
    def present(self) -> list[bytes]:
        """Chain hashes in the order in which they came, by the changes that the index gets."""
        for change in self._log.take(len(self._log)):
            if change.is_present:
                assert change.chain_hash not in self._present
                self._present.append(change.chain_hash)
            else:
                self._present.remove(change.chain_hash)
                self._gone.append(change.chain_hash)
        return self._present

    @property
    def gone(self) -> list[bytes]:
        """Those that left since this list was last cleared."""
        assert self.present is not None
        return self._gone

    def check_integrity(self) -> None:
        """Recompute every law. Raises: IntegrityError."""
        invariants.check(self.store)

    # -- writers

    def reserve(
        self, attachment_id: str, parent: bytes, chain_hashes: Sequence[bytes], **options: Any
    ) -> tuple[str, list[Reserved], Reserved | None]:
        return self.store.reserve(attachment_id, parent, chain_hashes, **options)

    def check_reservation(self, *arguments: Any) -> None:
        self.store.check_reservation(*arguments)

    def commit(
        self, attachment_id: str, lease_id: str, written: Sequence[WrittenFrame], now_s: float
    ) -> list[Block]:
        return self.store.commit(attachment_id, lease_id, written, now_s)

    def abort(
        self, attachment_id: str, lease_id: str, written: Sequence[WrittenFrame], **options: Any
    ) -> None:
        self.store.abort(attachment_id, lease_id, written, **options)

    def writer_of(self, lease_id: str, frame: int) -> str:
        """The attachment that reserved the frame."""
        return self.store.leases.get(lease_id).reservations[frame].attachment_id

    # -- the file tier

    def begin_demotion(self, max_blocks: int) -> Demotion | None:
        return self.store.table.begin_demotion(max_blocks)

    def end_demotion(self, demotion: Demotion, done: Sequence[bool]) -> None:
        self.store.table.end_demotion(demotion, done)

    def begin_promotion(self, entry: Any) -> Promotion | None:
        return self.store.table.begin_promotion(entry)

    def end_promotion(self, promotion: Promotion, is_good: bool) -> None:
        self.store.table.end_promotion(promotion, is_good)

    def close_pages(self) -> None:
        self.store.table.close_pages()

    def header(self, write: PageWrite, serial: int) -> StoredPage:
        """Of the page that is to be written."""
        parent = write.node.parent
        return StoredPage(
            write.index,
            write.node.chain_hash,
            parent.chain_hash if parent else b"",
            write.block.checksum,
            write.block.num_tokens,
            write.node.tenant,
            serial,
        )

    # -- what is there

    def entries(self) -> list[Any]:
        """In an order that is the same in each run."""
        return sorted(self.store.tree, key=lambda node: node.chain_hash)

    def matched(self, match: PrefixMatch) -> list[Any]:
        """The entries of a match."""
        return match.nodes

    def promoted(self, promotion: Promotion) -> Any:
        """The entry that is being read."""
        return promotion.node

    def in_frames(self) -> list[Block]:
        return [node.block for node in self.entries() if node.block is not None]

    def in_pages(self) -> set[bytes]:
        """Chain hashes of blocks that lie in a page, whether or not they are in a frame, too."""
        return {node.chain_hash for node in self.store.tree if node.page is not None}

    def is_within_share(self, tenant: str) -> bool:
        """In each tier."""
        accounts = (self.store.table.frame_account, self.store.table.page_account)
        return all(each.used.get(tenant, 0) <= each.guaranteed[tenant] for each in accounts)

    def count(self, state: SlotState) -> int:
        return self.store.frames.count(state)

    def is_committed(self, frame: int) -> bool:
        return self.store.frames.state(frame) is SlotState.COMMITTED

    def generation(self, frame: int) -> int:
        return self.store.frames.generation(frame)

    def num_moving(self) -> int:
        """Demotions and promotions under way, and pages being written."""
        return self.store.table.num_moving + self.store.table.pages.count(SlotState.WRITING)

    def moved(self) -> dict[str, int]:
        """How often each kind of move happened in this life."""
        moves = self.store.table
        return {
            "demoted": moves.num_demoted,
            "promoted": moves.num_promoted,
            "bad": moves.num_pages_bad,
            "evicted": self.store.table.num_evictions,
        }
