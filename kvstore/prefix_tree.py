"""PrefixTree: the KV blocks that a store holds, as a tree by prefix (each block below the one that
comes before it in the prompt), and the LRU orders in which they are evicted and demoted.

A node lies in a frame (`block`), in a page of the file tier (`page`), or in both. Two laws:
- presence is prefix-closed: the parent of a present node is present. Only leaves or whole subtrees
  are removed, and a node is only inserted below a present one;
- the file tier is prefix-closed by itself: the parent of a node with a page has a page, so that the
  store can use everything in the file after a restart.

Candidates to give up a frame or a page are kept by tenant group (tenancy.py) and in the order of
their last use; of those used at the same moment the deepest goes first, so a chain goes from its
end. A tail block is a node without a chain hash; it can be pinned and is never in the tree.

Knows neither frames' states nor leases nor clocks. Plain and synchronous, one thread.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from kvstore.block_changes import ChangeLog, NullLog
from kvstore.block_refs import Block, Page
from kvstore.errors import StoreIntegrityError
from kvstore.tenant_shares import POOL, TenantShares

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NUM_SHARDS = 1024
_MASK = NUM_SHARDS - 1


class ShardedDict(Generic[K, V]):
    """A dict of millions of entries that grows without a long pause; entries come in no order.

    A plain dict copies all of its entries each time that its table is full: 50 to 200 ms for a
    million (measured), in one turn of the loop. Here an insertion copies at most one shard, a
    thousandth.
    """

    def __init__(self) -> None:
        self.shards: tuple[dict[K, V], ...] = tuple({} for _ in range(NUM_SHARDS))
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def __contains__(self, key: K) -> bool:
        return key in self.shards[hash(key) & _MASK]

    def get(self, key: K) -> V | None:
        """The value of a key; None where there is no entry."""
        return self.shards[hash(key) & _MASK].get(key)

    def add(self, key: K, value: V) -> bool:
        """Add an entry. Returns: False when the key has an entry already, which stays."""
        shard = self.shards[hash(key) & _MASK]
        if key in shard:
            return False
        shard[key] = value
        self._num_entries += 1
        return True

    def remove(self, key: K) -> None:
        """Remove the entry of a key. Raises: KeyError where there is none."""
        del self.shards[hash(key) & _MASK][key]
        self._num_entries -= 1

    def items(self) -> Iterator[tuple[K, V]]:
        """Iterate over every entry. Raises: RuntimeError, not always, when entries come or go
        meanwhile."""
        return itertools.chain.from_iterable(shard.items() for shard in self.shards)

    def keys_in_pieces(self, num_keys: int) -> Iterator[list[K]]:
        """Yield every key, in lists of `num_keys`, the last one shorter or empty, while entries
        come and go: a key that is there all the time is in one list, a key that comes or goes may
        be."""
        piece: list[K] = []
        for shard in self.shards:
            piece += shard
            while len(piece) >= num_keys:
                yield piece[:num_keys]
                del piece[:num_keys]
        yield piece


@dataclass(slots=True, eq=False)
class TreeNode:
    """A block that is present in a store, and its bookkeeping.

    tenant: whose share its frame and page are charged to. num_page_uses: reads and writes under way
    that need its page. last_used: a count of uses, no time. in_orders: the LRU orders that it is
    filed in, as bits. The children are a list linked from the first one on; a node that was removed
    is in none, so that it is freed without the garbage collector.
    """

    chain_hash: bytes
    parent: TreeNode | None
    depth: int
    tenant: str
    block: Block | None = None
    page: Page | None = None
    num_page_children: int = 0
    num_pins: int = 0
    num_hits: int = 0
    num_page_uses: int = 0
    last_used: int = 0
    in_orders: int = 0
    first_child: TreeNode | None = None
    next_sibling: TreeNode | None = None
    previous_sibling: TreeNode | None = None

    @property
    def is_clean(self) -> bool:
        """Whether the node's frame can be taken without loss: the block has a page, too, and no
        pin."""
        return self.block is not None and self.page is not None and self.num_pins == 0

    @property
    def may_be_evicted(self) -> bool:
        """Whether the node lies in a frame only and can leave the store with it."""
        return self.may_be_demoted and self.first_child is None

    @property
    def may_be_demoted(self) -> bool:
        """Whether the node lies in a frame only, and nothing pins it."""
        return (
            self.block is not None
            and self.page is None
            and self.num_pins == 0
            and bool(self.chain_hash)
        )

    @property
    def may_leave_page(self) -> bool:
        """Whether the node's page can be given to another block."""
        if self.page is None or self.num_page_uses or self.num_page_children:
            return False
        return self.block is not None or (self.first_child is None and self.num_pins == 0)

    def children(self) -> Iterator[TreeNode]:
        """Iterate over the child nodes that are present."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling


class LruOrder:
    """Candidates of one kind, the least recently used first, then the deepest.

    A heap with one item for each node. Using a node does not move its item, so an item's key may be
    older than its node; such an item is filed anew when it comes up, at the node's age now. Keys
    only grow, so the first item whose key is right is the first candidate. Each offer files up to
    two outdated items anew, so that `first` seldom meets many at once.
    """

    def __init__(self, kind: str, bit: int, is_candidate: Callable[[TreeNode], bool]) -> None:
        """Args: kind: names the order in errors. bit: marks nodes in the heap, in
        TreeNode.in_orders. is_candidate: whether a node may be chosen now."""
        self.kind = kind
        self.is_candidate = is_candidate
        self.heap: list[tuple[int, int, int, TreeNode]] = []
        """Items of (last_used when filed, -depth, serial, node)."""
        self._bit = bit
        self._serial = 0

    def offer(self, node: TreeNode) -> None:
        """File a node if it is a candidate now, so that `first` finds it. Must be called after each
        change by which a node may have become a candidate."""
        for _ in range(2):
            if not self.heap:
                break
            last_used, _, _, first = self.heap[0]
            if last_used == first.last_used and self.is_candidate(first):
                break
            self._refile()
        if not node.in_orders & self._bit and self.is_candidate(node):
            node.in_orders |= self._bit
            self._serial += 1
            heapq.heappush(self.heap, (node.last_used, -node.depth, self._serial, node))

    def first(self) -> TreeNode | None:
        """The candidate that was used the longest ago; None: there is none. It stays the first
        until it is changed."""
        while self.heap:
            last_used, _, _, node = self.heap[0]
            if last_used == node.last_used and self.is_candidate(node):
                return node
            self._refile()
        return None

    def _refile(self) -> None:
        """File the first item at its node's age, or drop it if that is no candidate."""
        node = self.heap[0][3]
        if self.is_candidate(node):
            self._serial += 1
            heapq.heapreplace(self.heap, (node.last_used, -node.depth, self._serial, node))
        else:
            node.in_orders &= ~self._bit
            heapq.heappop(self.heap)


class PrefixTree:
    """The blocks that are present in a store, by chain hash and by prefix."""

    def __init__(self, shares: TenantShares, changes: ChangeLog | None = None) -> None:
        """Args: shares: tenants' guaranteed parts, by which candidates are grouped. changes: gets
        each block that comes or goes."""
        self.nodes: ShardedDict[bytes, TreeNode] = ShardedDict()
        self.num_pinned = 0
        """The number of nodes with a pin, including tails and nodes that left the tree
        meanwhile."""
        self.clean: set[TreeNode] = set()
        """The nodes whose frames can be taken without loss."""
        self.num_inserted = 0
        """The number of blocks that were ever inserted."""
        self.has_pages = False
        """Whether the store has a file tier: without one nothing is demoted."""
        self.shares = shares
        self._changes = NullLog() if changes is None else changes
        self._tick = 0
        groups = (*shares.shares, POOL)
        self.clean_order = _orders(groups, "clean", 1, "is_clean")
        self.leaf_order = _orders(groups, "eviction", 2, "may_be_evicted")
        self.demotion_order = _orders(groups, "demotion", 4, "may_be_demoted")
        self.page_order = _orders(groups, "pages", 8, "may_leave_page")

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[TreeNode]:
        """Every node, in no order."""
        return (node for _, node in self.nodes.items())

    def find(self, chain_hash: bytes) -> TreeNode | None:
        """The node of a chain hash; None when the block is not present."""
        return self.nodes.get(chain_hash)

    def is_present(self, node: TreeNode) -> bool:
        """Whether the node is in the tree (still)."""
        return self.nodes.get(node.chain_hash) is node

    def longest_prefix(self, chain_hashes: Sequence[bytes]) -> list[TreeNode]:
        """The nodes of a chain's hashes from the first on, up to the first that is absent."""
        found: list[TreeNode] = []
        for chain_hash in chain_hashes:
            node = self.nodes.get(chain_hash)
            if node is None:
                break
            found.append(node)
        return found

    def snapshot(self, num_hashes: int) -> Iterator[list[bytes]]:
        """Yield every chain hash that is present, in no order, in lists of `num_hashes`, each of
        the moment in which it is asked for. The log of changes is cleared now: what it holds from
        here on brings the lists up to date."""
        self._changes.clear()
        return self.nodes.keys_in_pieces(num_hashes)

    def leaves_first(self, node: TreeNode) -> Iterator[TreeNode]:
        """Yield the node and all below it, children before parents. The caller must remove each of
        them before it asks for the next."""
        at: TreeNode | None = node
        while at is not None:
            while at.first_child is not None:
                at = at.first_child
            parent = at.parent if at is not node else None
            yield at
            at = parent

    # -- changes

    def insert(
        self,
        chain_hash: bytes,
        parent: TreeNode | None,
        *,
        tenant: str = "",
        block: Block | None = None,
        page: Page | None = None,
    ) -> TreeNode:
        """Add a block below `parent` (None: at the start of a prompt).

        Raises: IntegrityError if it is there already or its parent is not.
        """
        if parent is not None and not self.is_present(parent):
            raise StoreIntegrityError(f"tree: the parent of {chain_hash.hex()} is not there")
        node = TreeNode(chain_hash, parent, parent.depth + 1 if parent else 0, tenant, block)
        if not self.nodes.add(chain_hash, node):
            raise StoreIntegrityError(f"tree: {chain_hash.hex()} is there already")
        if parent is not None:
            first = node.next_sibling = parent.first_child
            if first is not None:
                first.previous_sibling = node
            parent.first_child = node
        self.num_inserted += 1
        if page is not None:
            self.set_page(node, page)
        self.touch([node])
        self._changes.append(True, chain_hash)
        return node

    def remove(self, node: TreeNode) -> None:
        """Remove a leaf that has no page from the tree. Raises: IntegrityError for any other
        node."""
        if node.first_child is not None or node.page is not None or not self.is_present(node):
            raise StoreIntegrityError(f"tree: {node.chain_hash.hex()} cannot be removed")
        self.nodes.remove(node.chain_hash)
        before, after = node.previous_sibling, node.next_sibling
        node.previous_sibling = node.next_sibling = None
        if after is not None:
            after.previous_sibling = before
        if before is not None:
            before.next_sibling = after
        elif node.parent is not None:
            node.parent.first_child = after
        if node.parent is not None:
            self._update_orders(node.parent)
        self._changes.append(False, node.chain_hash)

    def touch(self, nodes: Sequence[TreeNode]) -> None:
        """Note that nodes were used now, all at the same moment."""
        self._tick += 1
        for node in nodes:
            node.last_used = self._tick
            if node.num_pins == 0 or node.page is not None:  # else it is no candidate
                self._update_orders(node)

    def pin(self, node: TreeNode) -> None:
        """Add a pin to a node, for a lease or a move between tiers: it is not evicted until
        `unpin`."""
        node.num_pins += 1
        self.num_pinned += node.num_pins == 1
        if node.page is not None and node.num_pins == 1:  # it was clean
            self._update_orders(node)

    def unpin(self, node: TreeNode) -> None:
        """Take back one `pin`; after the last one the node may be evicted. Raises: IntegrityError
        where there is none."""
        if node.num_pins < 1:
            raise StoreIntegrityError("tree: a node is unpinned once too often")
        node.num_pins -= 1
        self.num_pinned -= node.num_pins == 0
        if node.num_pins == 0:
            self._update_orders(node)

    def set_block(self, node: TreeNode, block: Block | None) -> None:
        """Note in which frame the node's bytes are from now on; None: in none."""
        node.block = block
        self._update_orders(node)

    def set_page(self, node: TreeNode, page: Page | None) -> None:
        """Note in which page the node's bytes are from now on; None: in none. Raises:
        IntegrityError if the file tier would not stay prefix-closed."""
        parent = node.parent
        if page is not None and parent is not None and parent.page is None:
            raise StoreIntegrityError("tree: a page below a parent that has none")
        step = (page is not None) - (node.page is not None)
        node.page = page
        if parent is not None and step:
            parent.num_page_children += step
            self._update_orders(parent)
        self._update_orders(node)

    def use_page(self, node: TreeNode, step: int) -> None:
        """Note that a read or write that needs the node's page begins (1) or ends (-1)."""
        node.num_page_uses += step
        self._update_orders(node)

    # -- inside

    def _update_orders(self, node: TreeNode) -> None:
        """File the node under the orders that it is a candidate of now. Called very often."""
        if node.page is None:
            self.clean.discard(node)
            if node.may_be_demoted:
                group = self.shares.group(node.tenant)
                if node.first_child is None:
                    self.leaf_order[group].offer(node)
                if self.has_pages:
                    self.demotion_order[group].offer(node)
            return
        group = self.shares.group(node.tenant)
        if node.is_clean:
            self.clean.add(node)
            self.clean_order[group].offer(node)
        else:
            self.clean.discard(node)
        self.page_order[group].offer(node)


def _orders(groups: Iterable[str], kind: str, bit: int, candidate: str) -> dict[str, LruOrder]:
    return {group: LruOrder(kind, bit, attrgetter(candidate)) for group in groups}
