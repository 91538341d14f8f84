"""A store whose bytes nobody moves, for named cases; and what the state machines do with a store
and see of it, which holds for any cut of its classes: how the store is called stands here alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore import invariants
from kvstore.block_changes import ChangeLog
from kvstore.block_history import BlockHistory
from kvstore.block_refs import Block, StoredPage
from kvstore.block_store import BlockStore, PrefixMatch, Reserved, StoreLimits, WrittenFrame
from kvstore.frame_table import Demotion, PageWrite, Promotion
from kvstore.prefix_tree import TreeNode
from kvstore.slot_pool import SlotState
from kvstore.tenant_shares import TenantShares

GRACE_S = 30.0
"""How long what a gone worker may still write into stays out of use."""


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


def hashes_of(prompt: int, length: int, tenant: str = "") -> list[bytes]:
    """Chain hashes of a prompt's first blocks, which begin with its tenant's name."""
    return [
        tenant.encode() + bytes([prompt, index]).rjust(16 - len(tenant), b"h")
        for index in range(length)
    ]


class StoreBench:
    """A store whose bytes are not moved, and a worker of it. Every law holds after each call."""

    def __init__(
        self,
        num_frames: int = 8,
        num_pages: int = 0,
        *,
        shares: TenantShares | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        limits = StoreLimits(100.0, GRACE_S, shares or TenantShares())
        self.log = ChangeLog()
        self.generations = np.zeros(num_frames, np.uint64)
        self.store = BlockStore(
            num_frames, 1000, limits, published=self.generations, changes=self.log, history=history
        )
        self.table = self.store.table
        if num_pages:
            self.table.open_pages(num_pages, [])
        self.worker = self.attach("w1")

    def attach(self, worker_id: str, *, one_sided: bool = True, life: bytes = b"1") -> str:
        """Returns: the attachment."""
        transport = "shm" if one_sided else "grpc"
        return self.store.attach(worker_id, life, transport, one_sided, 0.0).attachment_id

    def reserve(
        self,
        chain: Sequence[bytes],
        *,
        parent: bytes = b"",
        tail: str = "",
        who: str = "",
        now_s: float = 0.0,
        **options: Any,
    ) -> tuple[str, list[Reserved], Reserved | None]:
        """For 10 s. who: an attachment; by default the worker's."""
        answer = self.store.reserve(
            who or self.worker, parent, chain, tail_name=tail, ttl_s=10.0, now_s=now_s, **options
        )
        self.check()
        return answer

    def commit(
        self, lease_id: str, answers: Sequence[Reserved], *, who: str = "", now_s: float = 0.0
    ) -> list[Block]:
        blocks = self.store.commit(who or self.worker, lease_id, _written(answers), now_s)
        self.check()
        return blocks

    def abort(
        self,
        lease_id: str,
        answers: Sequence[Reserved],
        *,
        quarantine: bool,
        who: str = "",
        now_s: float = 0.0,
    ) -> None:
        frames = _written(answers)
        self.store.abort(who or self.worker, lease_id, frames, quarantine=quarantine, now_s=now_s)
        self.check()

    def put(self, chain: Sequence[bytes], *, who: str = "", **options: Any) -> list[Block]:
        """Reserve, commit and let go: present and unpinned."""
        lease_id, answers, _ = self.reserve(chain, who=who, **options)
        blocks = self.commit(lease_id, answers, who=who)
        self.store.release([lease_id], now_s=0.0)
        self.check()
        return blocks

    def put_prompt(self, prompt: int, length: int, tenant: str = "") -> list[TreeNode]:
        """As `put`. Returns: the entries of those that are present."""
        chain = hashes_of(prompt, length, tenant)
        self.put(chain, tenant=tenant)
        return self.store.tree.longest_prefix(chain)

    def begin_demotion(self) -> Demotion:
        demotion = self.table.begin_demotion(8)
        assert demotion is not None
        return demotion

    def end_demotion(self, demotion: Demotion, done: Sequence[bool]) -> None:
        self.table.end_demotion(demotion, done)
        self.check()

    def demote_all(self, most: int = 1000) -> None:
        """No more than so many blocks are written."""
        num_writes = 0
        while (demotion := self.table.begin_demotion(8)) is not None:
            num_writes += len(demotion.writes)
            assert num_writes <= most
            self.end_demotion(demotion, [True] * len(demotion.writes))

    def begin_promotion(self, entry: TreeNode) -> Promotion:
        promotion = self.table.begin_promotion(entry)
        assert promotion is not None
        return promotion

    def end_promotion(self, promotion: Promotion, is_good: bool) -> int:
        """Returns: how many blocks were lost."""
        num_lost = self.table.end_promotion(promotion, is_good)
        self.check()
        return num_lost

    def changes(self) -> list[tuple[bool, bytes]]:
        """What came or left since this was last asked, in order."""
        return [(each.is_present, each.chain_hash) for each in self.log.take(9999)]

    def count(self, state: SlotState) -> int:
        return self.store.frames.count(state)

    def num_present(self, chain: Sequence[bytes]) -> int:
        return len(self.store.match(chain, pin=False, now_s=0.0).blocks)

    def check(self) -> None:
        invariants.check(self.store)


def _written(answers: Sequence[Reserved]) -> list[WrittenFrame]:
    """Frames that were reserved, with their bytes."""
    return [
        WrittenFrame(each.frame, each.generation, checksum=each.frame + 100, num_tokens=16)
        for each in answers
        if each.frame >= 0
    ]
