"""RadixTree: which blocks hold which prefix, as a compressed tree over chain hashes on top of the
pool. Hashes come from the caller: it knows no tokens and no keys.

A node is a run of blocks that follow one another without a branch; it is split where a chain
diverges and joined with its only child when the last other one goes, so the tree's shape depends on
what is cached alone, not on how it came about. A chain hash binds all blocks before it, therefore:

- presence is closed under prefixes: a block is in the tree only with all blocks before it. So the
  longest match is found by bisection, not by looking at every hash.
- one hash maps to one block, the first that was inserted; a second block with the same content
  stays its request's own and becomes free with it, and so does one whose parent is not in the tree.
- what was computed from a forgotten block is forgotten with it.

Eviction is the pool's: the least recently used tail of a chain first, never a block before one that
follows it. Tenants are apart because their hashes are keyed. Engine thread only.

Source: Zheng et al. 2024 (SGLang, RadixAttention), with blocks in place of tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from engine.errors import IntegrityError, NoBlocks
from engine.kv.block_pool import NO_BLOCK, BlockPool


class _Node:
    """A run of blocks; the root has none. `children` by their first block."""

    __slots__ = ("block_ids", "children", "parent")

    def __init__(self, parent: _Node | None, block_ids: list[int]) -> None:
        self.parent = parent
        self.block_ids = block_ids
        self.children: dict[int, _Node] = {}


class RadixTree:
    """See the module."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._root = _Node(None, [])
        self._num_nodes = 0
        self._block_of: dict[bytes, int] = {}
        # By block: its hash, the node it lies in, and how many blocks are before it in its chain.
        # The last never changes while the block is cached: a split or join moves nodes only.
        self._hash_of: list[bytes] = [b""] * pool.num_blocks
        self._node_of: list[_Node] = [self._root] * pool.num_blocks
        self._depth_of = array("q", (0,)) * pool.num_blocks

    # -- looking

    def match_length(self, chain_hashes: Sequence[bytes]) -> int:
        """Blocks of the longest cached prefix of one chain. References nothing, changes no order.

        Cost: O(log n) look-ups. Raises: IntegrityError where the hashes are seen to be no chain.
        """
        block_of = self._block_of
        low, high = 0, len(chain_hashes)  # [0, low) is cached, [high, end) is not
        if high == 0 or chain_hashes[0] not in block_of:
            return 0
        middle = high  # the whole chain first: a prompt that came before
        while low < high:
            if chain_hashes[middle - 1] in block_of:
                low = middle
            else:
                high = middle - 1
            middle = (low + high + 1) // 2
        if self._depth_of[block_of[chain_hashes[low - 1]]] != low - 1:
            raise IntegrityError("chain hashes that do not bind the blocks before them")
        return low

    def match_counts(self, chain_hashes: Sequence[bytes]) -> tuple[int, int]:
        """(blocks of the longest cached prefix, those of them that are evictable): sharing them
        uses up the latter. Cost: O(log n) look-ups."""
        length = self.match_length(chain_hashes)
        low, high = 0, length  # a chain's evictable blocks are its last ones
        while low < high:
            middle = (low + high) // 2
            if self.pool.is_evictable(self._block_of[chain_hashes[middle]]):
                high = middle
            else:
                low = middle + 1
        return length, length - low

    def match(self, chain_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Blocks of the longest cached prefix. References nothing and changes no order."""
        length = self.match_length(chain_hashes)
        if length == 0:
            return ()
        node: _Node | None = self._node_of[self._block_of[chain_hashes[length - 1]]]
        runs: list[list[int]] = []
        while node is not None:
            runs.append(node.block_ids)
            node = node.parent
        matched: list[int] = []
        for run in reversed(runs):
            matched += run
        return tuple(matched[:length])

    def __len__(self) -> int:
        return len(self._block_of)

    @property
    def num_nodes(self) -> int:
        """Runs; the root is not counted."""
        return self._num_nodes

    @property
    def num_evictable(self) -> int:
        """Cached blocks that `take` may evict: nobody uses them, nor any block after them."""
        return self.pool.num_evictable

    # -- references

    def reserve(
        self, chain_hashes: Sequence[bytes], num_blocks: int
    ) -> tuple[tuple[int, ...], int]:
        """Reference `num_blocks` blocks: those that hold the longest cached prefix, then new ones.

        Returns: (block ids, how many of them are the prefix).
        Raises: NoBlocks, and nothing was taken.
        """
        pool = self.pool
        shared = self.match(chain_hashes[:num_blocks])
        _, num_reused = self.match_counts(chain_hashes[: len(shared)])
        num_fresh = num_blocks - len(shared)
        if num_fresh > pool.num_available - num_reused:
            raise NoBlocks(
                f"{num_fresh} blocks wanted beside a cached prefix of {len(shared)}, "
                f"{pool.num_available - num_reused} are free or evictable"
            )
        # Before taking the rest, which could evict them.
        self.share(shared)
        return shared + self.take(num_fresh), len(shared)

    def take(self, num_blocks: int) -> tuple[int, ...]:
        """Reference new blocks and forget what was cached in them. Raises: NoBlocks, and nothing
        was taken."""
        taken = self.pool.take(num_blocks)
        self._cut_tails(taken.evicted)
        return taken.block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """One more request references each of these referenced or cached blocks."""
        for block_id in block_ids:
            self.pool.reference(block_id)

    def writable(self, block_id: int) -> tuple[int, int | None]:
        """Copy-on-write: the block that a holder of one reference to `block_id` may write.

        Returns: (block, None) if it is the holder's alone and not cached; else (a new block, the
            old one): the reference has moved to the new one, and the old one's bytes must be copied
            to it before the next call that takes blocks or the next write. Copies done later, but
            in order and before any write, come to the same.
        Raises: NoBlocks, and nothing changed.
        """
        pool = self.pool
        if pool.num_references(block_id) < 1:
            raise IntegrityError(f"block {block_id} is not referenced: nobody may write it")
        if pool.num_references(block_id) == 1 and not pool.is_cached(block_id):
            return block_id, None
        (fresh,) = self.take(1)
        pool.put_back((block_id,))
        return fresh, block_id

    # -- content

    def insert(self, parent_hash: bytes, chain_hash: bytes, block_id: int) -> bool:
        """Map `chain_hash` to a full, referenced block that follows the one of `parent_hash` (b"":
        none).

        Returns: False where the hash has a block already, or its parent has none (it was evicted
            or forgotten): nothing changed, the block stays its request's own.
        """
        if chain_hash in self._block_of:
            return False
        parent = self._block_of.get(parent_hash, NO_BLOCK) if parent_hash else NO_BLOCK
        if parent_hash and parent == NO_BLOCK:
            return False
        self.pool.mark_cached(block_id, parent)
        node = self._root
        self._depth_of[block_id] = 0
        if parent != NO_BLOCK:
            depth = self._depth_of[parent] + 1
            self._depth_of[block_id] = depth
            node = self._node_of[parent]
            index = depth - self._depth_of[node.block_ids[0]]
            if index < len(node.block_ids):
                node = self._split(node, index)
        if node.block_ids and not node.children:
            node.block_ids.append(block_id)
        else:
            child = _Node(node, [block_id])
            node.children[block_id] = child
            self._num_nodes += 1
            node = child
        self._node_of[block_id] = node
        self._block_of[chain_hash] = block_id
        self._hash_of[block_id] = chain_hash
        return True

    def insert_chain(
        self, parent_hash: bytes, chain_hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """`insert` for each of the blocks that follow one another: a whole prompt's, at a third of
        the price where none of it is cached."""
        if not chain_hashes:
            return
        first, hashes = block_ids[0], chain_hashes[1:]
        is_new = self.insert(parent_hash, chain_hashes[0], first)
        if not hashes:
            return
        rest = block_ids[1:]  # behind the end of a run: nothing follows a block that is new
        added = dict(zip(hashes, rest, strict=True))
        # By the law of chains none of the others is there; who breaks it spoils nothing.
        is_apart = len(added) == len(hashes) and self._block_of.keys().isdisjoint(added)
        if not is_new or not is_apart:
            for before, chain_hash, block_id in zip(chain_hashes, hashes, rest, strict=False):
                self.insert(before, chain_hash, block_id)
            return
        pieces = self.pool.mark_chain(rest, first)
        node, depth = self._node_of[first], self._depth_of[first]
        node.block_ids += rest
        self._block_of.update(added)
        depth_of, node_of, hash_of = self._depth_of, self._node_of, self._hash_of
        for i, j, is_run in pieces:
            if is_run:
                start, end = rest[i], rest[j - 1] + 1
                depth_of[start:end] = self.pool.numbers[depth + 1 + i : depth + 1 + j]
                node_of[start:end] = [node] * (j - i)
                hash_of[start:end] = hashes[i:j]
                continue
            for index in range(i, j):
                block_id = rest[index]
                depth_of[block_id] = depth + 1 + index
                node_of[block_id] = node
                hash_of[block_id] = hashes[index]

    def forget(self, block_id: int) -> None:
        """Unmap a block and all that follow it, if it is mapped: nobody else shall find them."""
        if not self.pool.is_cached(block_id):
            return
        top = self._node_of[block_id]
        below = [top]
        for node in below:  # grows while it is walked: parents before children
            below += node.children.values()
        for node in reversed(below):
            while node.block_ids:
                tail = node.block_ids[-1]
                self._cut_tail(tail, is_joining=False)
                self.pool.unmark_cached(tail)
                if tail == block_id:
                    break
        rest = top if top.block_ids else top.parent
        if rest is not None:
            self._join(rest)

    # -- shape

    def _cut_tails(self, block_ids: Sequence[int]) -> None:
        """Take blocks out of the tree, each the last of a leaf when its turn comes. Of a run as
        many at once as leave it a first one."""
        block_of, hash_of, node_of, root = self._block_of, self._hash_of, self._node_of, self._root
        done, num_blocks = 0, len(block_ids)
        while done < num_blocks:
            node = node_of[block_ids[done]]
            most, num_cut = min(len(node.block_ids) - 1, num_blocks - done), 0
            while num_cut < most and node.block_ids[-1 - num_cut] == block_ids[done + num_cut]:
                num_cut += 1
            if node.children or num_cut < 1:
                self._cut_tail(block_ids[done])
                done += 1
                continue
            del node.block_ids[-num_cut:]
            for block_id in block_ids[done : done + num_cut]:
                del block_of[hash_of[block_id]]
                hash_of[block_id] = b""
                node_of[block_id] = root
            done += num_cut

    def _cut_tail(self, block_id: int, *, is_joining: bool = True) -> None:
        """Take the last block of a leaf out of the tree."""
        node = self._node_of[block_id]
        if node.children or node.block_ids[-1] != block_id:
            raise IntegrityError(f"block {block_id} has cached blocks after it")
        node.block_ids.pop()
        del self._block_of[self._hash_of[block_id]]
        self._hash_of[block_id] = b""
        self._node_of[block_id] = self._root
        if not node.block_ids and node.parent is not None:
            del node.parent.children[block_id]
            self._num_nodes -= 1
            if is_joining:
                self._join(node.parent)

    def _split(self, node: _Node, index: int) -> _Node:
        """Cut a run before its block `index`; returns the upper part. The cheaper part moves."""
        upper_ids, lower_ids = node.block_ids[:index], node.block_ids[index:]
        self._num_nodes += 1
        if node.parent is not None and index < len(lower_ids) + len(node.children):
            upper, lower, moved_ids = _Node(node.parent, upper_ids), node, upper_ids
            node.parent.children[upper_ids[0]] = upper
            lower.parent, lower.block_ids = upper, lower_ids
        else:
            upper, lower, moved_ids = node, _Node(node, lower_ids), lower_ids
            lower.children, upper.children = upper.children, {}
            for child in lower.children.values():
                child.parent = lower
            upper.block_ids = upper_ids
        upper.children[lower_ids[0]] = lower
        moved = upper if moved_ids is upper_ids else lower
        for block_id in moved_ids:
            self._node_of[block_id] = moved
        return upper

    def _join(self, node: _Node) -> None:
        """Make one run of a node and its only child. The cheaper one moves."""
        if len(node.children) != 1 or node.parent is None:
            return
        (child,) = node.children.values()
        self._num_nodes -= 1
        first = node.block_ids[0]
        if len(node.block_ids) < len(child.block_ids) + len(child.children):
            kept, moved = child, node.block_ids
            child.block_ids = node.block_ids + child.block_ids
            child.parent = node.parent
            node.parent.children[first] = child
        else:
            kept, moved = node, child.block_ids
            node.block_ids = node.block_ids + child.block_ids
            node.children = child.children
            for grandchild in node.children.values():
                grandchild.parent = node
        for block_id in moved:
            self._node_of[block_id] = kept

    def check_integrity(self) -> None:
        """The tree is compressed, its maps are each other's reverse, and the pool agrees on what is
        cached and on what follows what. Raises: IntegrityError."""
        seen: dict[int, bytes] = {}
        nodes = [(self._root, NO_BLOCK, 0)]
        for node, parent, depth in nodes:
            if node is not self._root and (not node.block_ids or len(node.children) == 1):
                raise IntegrityError("the prefix tree has an empty run, or one that is not joined")
            for block_id in node.block_ids:
                seen[block_id] = self._hash_of[block_id]
                is_here = self._node_of[block_id] is node and self._depth_of[block_id] == depth
                if not is_here or self.pool.parent_of(block_id) != parent:
                    raise IntegrityError(f"block {block_id} is not where the prefix tree has it")
                parent, depth = block_id, depth + 1
            for first, child in node.children.items():
                if child.parent is not node or child.block_ids[:1] != [first]:
                    raise IntegrityError(f"the run of block {first} hangs in two places")
                nodes.append((child, parent, depth))
        if {key: block for block, key in seen.items()} != self._block_of:
            raise IntegrityError("the prefix tree and its map of hashes disagree")
        cached = self.pool.cached()
        if cached != set(seen) or len(nodes) - 1 != self._num_nodes:
            raise IntegrityError(
                f"pool and prefix tree disagree on blocks {cached ^ set(seen)}, or its "
                f"{len(nodes) - 1} nodes are counted as {self._num_nodes}"
            )
