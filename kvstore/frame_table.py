"""FrameTable: in which frame (slot in memory) and page (slot in the file tier) each KV block lies,
which tenant these are charged to, and which blocks are evicted for others.

Frames and pages are the two kinds of slots of a store. A block that must leave its frame stays
present if it has a page; without one it leaves the store, and only as a leaf of the tree. A block
that must leave its page stays present while it has a frame. Which block goes is decided by tenants'
shares (tenancy.py) and then by the order of use (prefix_tree.py).

A node that was removed because its bytes, or those of a block above it, are bad keeps its frame
until its last pin ends. A frame with bad bytes is QUARANTINED meanwhile.

Blocks that move between the tiers; the bytes are moved by FileTier, in threads:
- demotion: the oldest unpinned block that lies in a frame only, with all of its prefix that has no
  page, parents first, so that the file tier is prefix-closed at each moment. Its frames stay as
  they are until another block needs them; they are `clean` meanwhile;
- promotion: a block that lies in a page only is read into a frame and checked there. If it is bad,
  it is removed with all below.

Conservation law of moves: pages being written are those of the demotions under way, frames being
read into (`promoting`) those of the promotions under way.

Knows nothing of leases, workers or bytes. Plain and synchronous, one thread.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvstore.block_changes import ChangeLog
from kvstore.block_history import (
    DAMAGED,
    DEMOTED,
    EVICTED,
    LEFT_MEMORY,
    LOST,
    PROMOTED,
    BlockHistory,
)
from kvstore.block_refs import Block, Page, StoredPage
from kvstore.errors import StoreIntegrityError
from kvstore.prefix_tree import PrefixTree, TreeNode
from kvstore.slot_pool import FramePool, SlotPool, SlotState
from kvstore.tenant_shares import SlotAccount, TenantShares


@dataclass(frozen=True, slots=True)
class PageWrite:
    """One block of a demotion, which is to be written to page `index`."""

    node: TreeNode
    block: Block
    index: int


@dataclass(eq=False, slots=True)
class Demotion:
    """Blocks that are being copied from frames to pages. writes: parents before children. parent:
    the node with a page that the first of them follows; None: it begins a prompt."""

    writes: list[PageWrite]
    parent: TreeNode | None


@dataclass(eq=False, slots=True)
class Promotion:
    """A block that is being read back: page `page` of `node` into `frame`."""

    node: TreeNode
    page: Page
    frame: int


class FrameTable:
    """The frames and pages of a store, and the tree of the blocks that lie in them."""

    def __init__(
        self,
        num_frames: int,
        shares: TenantShares,
        *,
        published: npt.NDArray[np.uint64] | None = None,
        changes: ChangeLog | None = None,
        history: BlockHistory | None = None,
    ) -> None:
        """Args: published: the generations that readers see (FramePool). changes: gets each block
        that comes or goes (PrefixTree)."""
        self.history = BlockHistory() if history is None else history
        self.shares = shares
        self.tree = PrefixTree(shares, changes)
        self.frames = FramePool(num_frames, published)
        self.frame_account = SlotAccount(num_frames, shares)
        self.pages = SlotPool(0)
        self.page_account = SlotAccount(0, shares)
        self.committed: list[TreeNode | None] = [None] * num_frames
        """The node whose bytes lie in each frame, by frame; None for a frame that is not committed.
        Includes tails, and nodes that left the tree."""
        self.tails: dict[int, str] = {}
        """The name that each tail block was reserved under, by frame."""
        self.damaged: dict[int, TreeNode] = {}
        """Nodes with bad bytes whose frames leases still pin, by frame."""
        self.demotions: set[Demotion] = set()
        self.promotions: dict[int, Promotion] = {}
        """Promotions under way, by frame."""
        self.num_evictions = 0
        self.num_demoted = 0
        self.num_promoted = 0
        self.num_pages_bad = 0

    # -- frames

    @property
    def num_available(self) -> int:
        """The number of frames that can be given to another block at once without loss: free ones,
        and those whose unpinned blocks also lie in pages."""
        return self.frames.count(SlotState.FREE) + len(self.tree.clean)

    def take_frame(self, tenant: str) -> int | None:
        """Take a frame to write into (it becomes WRITING), charged to `tenant`, by eviction where
        none is free. Returns: None when no block may give its frame up."""
        frame = self.frames.take()
        if frame is None:
            for group in self.frame_account.groups_to_evict(tenant):
                # A newer block that has a page goes before an older one that would be lost.
                node = self.tree.clean_order[group].first() or self.tree.leaf_order[group].first()
                if node is not None:
                    self._evict(node)
                    frame = self.frames.take()
                    break
        if frame is not None:
            self.frame_account.take(frame, tenant)
        return frame

    def free_frame(self, frame: int) -> None:
        """Free a frame that no node lies in."""
        self.frames.free(frame)
        self.frame_account.release(frame)

    def place(self, frame: int, node: TreeNode, checksum: int, num_tokens: int) -> Block:
        """Commit a frame (WRITING -> COMMITTED) that holds the node's bytes now. It is charged to
        the tenant that stored the block first."""
        self.frames.commit(frame)
        generation = self.frames.generations[frame]
        block = Block(node.chain_hash, frame, generation, checksum, num_tokens)
        self.committed[frame] = node
        self.frame_account.transfer_to(frame, node.tenant)
        self.tree.set_block(node, block)
        return block

    def place_tail(self, frame: int, name: str, checksum: int, num_tokens: int) -> TreeNode:
        """Commit a frame that holds a tail block (the unfilled last block of a prompt). Returns:
        the node made for it, which is not in the tree."""
        node = TreeNode(b"", None, 0, self.frame_account.tenant_of(frame))
        self.tails[frame] = name
        self.place(frame, node, checksum, num_tokens)
        return node

    def find(self, frame: int) -> TreeNode | None:
        """The node whose bytes are committed in the frame; None also for a frame that does not
        exist."""
        return self.committed[frame] if 0 <= frame < self.frames.num_slots else None

    def unpin(self, node: TreeNode) -> None:
        """Take back one pin of a node; with the last one the frame of a removed node or of a tail
        comes free."""
        self.tree.unpin(node)
        if node.num_pins == 0 and not self.tree.is_present(node):
            self._leave_frame(node)

    # -- pages

    def open_pages(self, num_pages: int, stored: Sequence[StoredPage]) -> int:
        """Begin to use a file tier of `num_pages`, with the blocks that an earlier start of the
        store left in it: of each block the page written last, and only if its whole prefix is
        there. Returns: how many blocks are kept."""
        if len(self.tree):
            raise StoreIntegrityError("a file tier is opened before anything is stored")
        kept = _prefix_closed(stored)
        self.pages = SlotPool(num_pages, (each.index for each in kept))
        self.page_account = SlotAccount(num_pages, self.shares)
        self.tree.has_pages = True
        for each in kept:
            parent = self.tree.find(each.parent) if each.parent else None
            page = Page(each.index, each.checksum, each.num_tokens)
            self.page_account.take(each.index, each.tenant)
            self.tree.insert(each.chain_hash, parent, tenant=each.tenant, page=page)
        for each in sorted(kept, key=lambda page: page.serial):
            node = self.tree.find(each.chain_hash)
            if node is not None:
                self.tree.touch([node])
        return len(kept)

    def close_pages(self) -> int:
        """Stop using the file tier. Blocks that lay only there, and all below them, leave the
        store. No move may be under way. Returns: how many blocks left."""
        num_lost = self.remove_subtrees([node for node in self.tree if node.block is None])
        for node in self.tree:
            if node.page is not None:
                self._leave_page(node)
        self.pages = SlotPool(0)
        self.page_account = SlotAccount(0, self.shares)
        self.tree.has_pages = False
        return num_lost

    # -- demotion

    def begin_demotion(self, max_blocks: int) -> Demotion | None:
        """Choose what to copy to the file tier next, at most `max_blocks`; None when nothing can go
        there. The chosen blocks are pinned and their pages taken until `end_demotion`."""
        if not self.pages.num_slots:
            return None
        for oldest in self._next_to_demote():
            path: list[TreeNode] = []
            node: TreeNode | None = oldest
            while node is not None and node.page is None:
                path.append(node)
                node = node.parent
            demotion = Demotion([], node)
            if node is not None:
                self.tree.use_page(node, 1)  # it must not give way to its own children
            for each in reversed(path[-max_blocks:]):
                index = self._take_page(each) if each.block is not None else None
                if index is None or each.block is None:
                    break
                self.tree.pin(each)
                demotion.writes.append(PageWrite(each, each.block, index))
            if demotion.writes:
                self.demotions.add(demotion)
                return demotion
            if node is not None:
                self.tree.use_page(node, -1)
        return None

    def end_demotion(self, demotion: Demotion, done: Sequence[bool]) -> None:
        """End a demotion. done: of each write in order, whether its bytes were good and are in the
        page."""
        self.demotions.remove(demotion)
        demoted: list[bytes] = []
        if demotion.parent is not None:
            self.tree.use_page(demotion.parent, -1)
        for write, is_done in zip(demotion.writes, done, strict=True):
            node = write.node
            has_way = node.parent is None or node.parent.page is not None
            if is_done and has_way and self.tree.is_present(node) and node.page is None:
                page = Page(write.index, write.block.checksum, write.block.num_tokens)
                self.tree.set_page(node, page)
                self.pages.commit(write.index)
                self.num_demoted += 1
                demoted.append(node.chain_hash)
            else:
                self._free_page(write.index)
        self.history.note(DEMOTED, demoted)
        for write in demotion.writes:
            self.unpin(write.node)

    # -- promotion

    def begin_promotion(self, node: TreeNode) -> Promotion | None:
        """Take a frame for a block that lies in a page only; None when there is no room. Until
        `end_promotion` the node is pinned and its page kept."""
        if node.page is None or node.block is not None:
            raise StoreIntegrityError(f"{node.chain_hash.hex()}: nothing to promote")
        frame = self.take_frame(node.tenant)
        if frame is None:
            return None
        promotion = Promotion(node, node.page, frame)
        self.tree.pin(node)
        self.tree.use_page(node, 1)
        self.promotions[frame] = promotion
        return promotion

    def end_promotion(self, promotion: Promotion, is_good: bool) -> int:
        """End a promotion. is_good: the page's bytes are in the frame and their checksum is right;
        else the block is removed with all below. Returns: how many blocks were removed."""
        node, frame = promotion.node, promotion.frame
        del self.promotions[frame]
        self.tree.use_page(node, -1)
        num_lost = 0
        # The block may have been removed, or written again by a worker, meanwhile.
        is_wanted = self.tree.is_present(node) and node.block is None
        if is_good and is_wanted:
            self.place(frame, node, promotion.page.checksum, promotion.page.num_tokens)
            self.num_promoted += 1
            self.history.note(PROMOTED, [node.chain_hash])
        else:
            self.free_frame(frame)
        if not is_good and node.page is promotion.page:
            self.num_pages_bad += 1
            num_lost = self.remove_subtrees([node], DAMAGED)
        self.unpin(node)
        return num_lost

    @property
    def num_moving(self) -> int:
        """The number of demotions and promotions under way."""
        return len(self.demotions) + len(self.promotions)

    def promoting(self) -> dict[int, int]:
        """The frames that promotions are reading into, each with its (odd) generation."""
        return {frame: self.frames.generations[frame] for frame in self.promotions}

    def pins_of_moves(self) -> Counter[TreeNode]:
        """The number of pins that the moves under way hold on each node."""
        pinned = Counter(write.node for each in self.demotions for write in each.writes)
        pinned.update(promotion.node for promotion in self.promotions.values())
        return pinned

    # -- damage

    def remove_subtrees(self, nodes: Sequence[TreeNode], why: str = LOST) -> int:
        """Remove nodes and all below them from the tree; a pinned frame stays until it is not
        pinned. why: what happened to the nodes, for the history. Returns: how many nodes were
        removed."""
        self.history.note(why, [node.chain_hash for node in nodes])
        num_removed = self.remove_below(nodes)
        for node in nodes:
            if self.tree.is_present(node):
                self._remove(node)
                num_removed += 1
        return num_removed

    def remove_below(self, nodes: Sequence[TreeNode], max_blocks: int | None = None) -> int:
        """Remove at most `max_blocks` of the nodes below these, children before parents; a pinned
        frame stays until it is not pinned. Returns: how many nodes were removed."""
        named, lost, num_removed = set(nodes), list[bytes](), 0
        for node in nodes:
            for each in self.tree.leaves_first(node):
                if each is node or num_removed == max_blocks:
                    break
                self._remove(each)
                num_removed += 1
                if each not in named:
                    lost.append(each.chain_hash)
        self.history.note(LOST, lost)
        return num_removed

    def quarantine_damaged(self, node: TreeNode) -> None:
        """Make the node's frame, whose bytes are bad, stale to every reader, and keep it out of use
        until its last pin ends."""
        block = node.block
        if block is None or self.committed[block.frame] is not node:
            return
        self.committed[block.frame] = None
        self.tails.pop(block.frame, None)
        self.frames.quarantine(block.frame)
        self.damaged[block.frame] = node
        if node.num_pins == 0:
            self._leave_frame(node)

    # -- inside

    def _evict(self, node: TreeNode) -> None:
        """Take the frame of a clean node or a leaf."""
        if node.block is None:
            raise StoreIntegrityError(f"{node.chain_hash.hex()} lies in no frame")
        if node.page is None:
            self.num_evictions += 1
            self.tree.remove(node)
        self.history.note(EVICTED if node.page is None else LEFT_MEMORY, [node.chain_hash])
        self._leave_frame(node)

    def _remove(self, node: TreeNode) -> None:
        """Take a leaf out of the tree, and out of its page and frame; a pin keeps its frame."""
        if node.page is not None:
            self._leave_page(node)
        self.tree.remove(node)
        if node.num_pins == 0:
            self._leave_frame(node)

    def _leave_frame(self, node: TreeNode) -> None:
        """Free the frame of a node that has no pin and does not need it to be present."""
        block = node.block
        if block is None:
            return
        if self.damaged.pop(block.frame, None) is None:
            self.committed[block.frame] = None
            self.tails.pop(block.frame, None)
        self.tree.set_block(node, None)
        self.free_frame(block.frame)

    def _take_page(self, node: TreeNode) -> int | None:
        """A page to write `node` into (WRITING); None when no block may give its page up.

        A tenant below its share gets pages of tenants beyond theirs, however recently these were
        used. Otherwise only an older block gives way, so that two tenants beyond their shares do
        not take pages from each other without end.
        """
        page = self.pages.take()
        own = self.shares.group(node.tenant)
        if page is None:
            is_entitled = self.page_account.is_below_share(own)
            for group in self.page_account.groups_to_evict(node.tenant):
                victim = self.tree.page_order[group].first()
                if victim is None:
                    continue
                if victim.last_used >= node.last_used and (group == own or not is_entitled):
                    continue
                self._evict_from_page(victim)
                page = self.pages.take()
                break
        if page is not None:
            self.page_account.take(page, node.tenant)
        return page

    def _free_page(self, page: int) -> None:
        """A page without a node comes free."""
        self.pages.free(page)
        self.page_account.release(page)

    def _evict_from_page(self, node: TreeNode) -> None:
        self._leave_page(node)
        if node.block is None:
            self.num_evictions += 1
            self.tree.remove(node)
            self.history.note(EVICTED, [node.chain_hash])

    def _leave_page(self, node: TreeNode) -> None:
        if node.page is None:
            raise StoreIntegrityError(f"{node.chain_hash.hex()} lies in no page")
        index = node.page.index
        self.tree.set_page(node, None)
        self._free_page(index)

    def _next_to_demote(self) -> list[TreeNode]:
        """The least recently used block of each tenant group that lies in a frame only, in the
        order in which the groups would lose frames."""
        orders = self.tree.demotion_order
        groups = self.frame_account.groups_to_evict("")
        found = [orders[group].first() for group in groups]
        found += [order.first() for group, order in orders.items() if group not in groups]
        return [node for node in found if node is not None]


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
