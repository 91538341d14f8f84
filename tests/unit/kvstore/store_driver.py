"""What the state machines do with a store and see of it. They hold for any cut of its classes: how
the store is called stands here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvstore.answers import Match, Reserved, StoreLimits, Written
from kvstore.blocks import Block, StoredPage
from kvstore.frames import FrameState
from kvstore.store import Store
from kvstore.tiers.moves import Demotion, PageWrite, Promotion


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
        self.generations: dict[int, int] = {}
        """Of each frame, as readers see it."""
        self.present: list[bytes] = []
        """Chain hashes in the order in which they came, by the changes that the index gets."""
        self.gone: list[bytes] = []
        """Those that left since this list was last cleared."""
        self.store = Store(
            num_frames,
            frame_bytes,
            limits,
            publish=self.generations.__setitem__,
            on_change=self._changed,
        )
        if num_pages:
            self.store.places.open_pages(num_pages, stored)

    def _changed(self, present: bool, chain_hash: bytes) -> None:
        if present:
            assert chain_hash not in self.present
            self.present.append(chain_hash)
        else:
            self.present.remove(chain_hash)
            self.gone.append(chain_hash)

    # -- writers

    def reserve(
        self, attachment_id: str, parent: bytes, chain_hashes: Sequence[bytes], **options: Any
    ) -> tuple[str, list[Reserved], Reserved | None]:
        return self.store.writes.reserve(attachment_id, parent, chain_hashes, **options)

    def check_reservation(self, *arguments: Any) -> None:
        self.store.writes.check_reservation(*arguments)

    def commit(
        self, attachment_id: str, lease_id: str, written: Sequence[Written], now_s: float
    ) -> list[Block]:
        return self.store.writes.commit(attachment_id, lease_id, written, now_s)

    def abort(
        self, attachment_id: str, lease_id: str, written: Sequence[Written], **options: Any
    ) -> None:
        self.store.writes.abort(attachment_id, lease_id, written, **options)

    def writer_of(self, lease_id: str, frame: int) -> str:
        """The attachment that reserved the frame."""
        return self.store.leases.get(lease_id).reservations[frame].attachment_id

    # -- the file tier

    def begin_demotion(self, max_blocks: int) -> Demotion | None:
        return self.store.moves.begin_demotion(max_blocks)

    def end_demotion(self, demotion: Demotion, done: Sequence[bool]) -> None:
        self.store.moves.end_demotion(demotion, done)

    def begin_promotion(self, entry: Any) -> Promotion | None:
        return self.store.moves.begin_promotion(entry)

    def end_promotion(self, promotion: Promotion, is_good: bool) -> None:
        self.store.moves.end_promotion(promotion, is_good)

    def close_pages(self) -> None:
        self.store.places.close_pages()

    def header(self, write: PageWrite, serial: int) -> StoredPage:
        """Of the page that is to be written."""
        parent = write.entry.parent
        return StoredPage(
            write.index,
            write.entry.chain_hash,
            parent.chain_hash if parent else b"",
            write.block.checksum,
            write.block.num_tokens,
            write.entry.tenant,
            serial,
        )

    # -- what is there

    def entries(self) -> list[Any]:
        return list(self.store.catalog)

    def matched(self, match: Match) -> list[Any]:
        """The entries of a match."""
        return match.entries

    def promoted(self, promotion: Promotion) -> Any:
        """The entry that is being read."""
        return promotion.entry

    def in_frames(self) -> list[Block]:
        return [entry.block for entry in self.store.catalog if entry.block is not None]

    def in_pages(self) -> set[bytes]:
        """Chain hashes of blocks that lie in a page, whether or not they are in a frame, too."""
        return {entry.chain_hash for entry in self.store.catalog if entry.page is not None}

    def is_within_share(self, tenant: str) -> bool:
        """In each tier."""
        accounts = (self.store.places.frame_account, self.store.places.page_account)
        return all(each.used().get(tenant, 0) <= each.guaranteed[tenant] for each in accounts)

    def count(self, state: FrameState) -> int:
        return self.store.frames.count(state)

    def is_committed(self, frame: int) -> bool:
        return self.store.frames.state(frame) is FrameState.COMMITTED

    def generation(self, frame: int) -> int:
        return self.store.frames.generation(frame)

    def num_moving(self) -> int:
        """Demotions and promotions under way, and pages being written."""
        return self.store.moves.num_moving + self.store.places.pages.num_writing

    def moved(self) -> dict[str, int]:
        """How often each kind of move happened in this life."""
        moves = self.store.moves
        return {
            "demoted": moves.num_demoted,
            "promoted": moves.num_promoted,
            "bad": moves.num_pages_bad,
            "evicted": self.store.places.num_evictions,
        }
