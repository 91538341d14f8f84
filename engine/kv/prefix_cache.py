"""PrefixCache: which blocks hold which prefix, as a map from chain hashes to blocks of the pool.
Hashes come from the caller: it knows no tokens and no keys.

A chain hash binds all blocks before it, and the pool knows the parent of each cached block:

- presence is closed under prefixes: a block is cached only with all blocks before it. So the
  longest match is found by bisection, and its blocks by following parents from the last one.
- one hash maps to one block, the first that was inserted. A second block with the same content
  stays its request's own and becomes free with it, and so does one whose parent is not cached.
- what was computed from a forgotten block is forgotten with it.

Eviction is the pool's: the least recently used tail of a chain first, never a block before one that
follows it. Tenants are apart because their hashes are keyed. Engine thread only.

Source: vLLM's automatic prefix caching, with the radix tree's law that eviction begins at the
leaves (Zheng et al. 2024, SGLang).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence

from engine.errors import IntegrityError, NoBlocks
from engine.kv.block_pool import NO_BLOCK, BlockPool


class PrefixCache:
    """The prefix cache: a map from chain hashes to blocks of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._block_of: dict[bytes, int] = {}
        """Blocks by chain hash, in order of insertion, so that a block comes after its parent
        (`forget` relies on it)."""
        self._hash_of: list[bytes] = [b""] * pool.num_blocks

    def __len__(self) -> int:
        return len(self._block_of)

    # -- look-up

    def match_length(self, chain_hashes: Sequence[bytes]) -> int:
        """Return the number of blocks of the longest cached prefix of one chain. References no
        block and changes no order.

        Cost: O(log n) look-ups.
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
        return low

    def match(self, chain_hashes: Sequence[bytes], first: int = 0) -> tuple[int, ...]:
        """Return the blocks from index `first` on of the longest cached prefix. References no block
        and changes no order.

        Cost: O(log n) look-ups, and a step for each block returned.
        Raises: IntegrityError where the block found for `first` has another hash: the hashes do not
            form a chain.
        """
        length = self.match_length(chain_hashes)
        if length <= first:
            return ()
        block_ids = self.pool.chain_to(self._block_of[chain_hashes[length - 1]], length - first)
        if self._hash_of[block_ids[0]] != chain_hashes[first]:
            raise IntegrityError("chain hashes that do not bind the blocks before them")
        return block_ids

    def match_counts(self, chain_hashes: Sequence[bytes]) -> tuple[int, int]:
        """Return (blocks of the longest cached prefix, those of them that are evictable). Sharing
        the prefix makes the latter unavailable to others. Cost: O(log n) look-ups."""
        length, block_of = self.match_length(chain_hashes), self._block_of
        num_kept = bisect_left(  # a chain's evictable blocks are its last ones
            chain_hashes, True, hi=length, key=lambda each: self.pool.is_evictable(block_of[each])
        )
        return length, length - num_kept

    # -- blocks for requests

    def reserve(
        self, chain_hashes: Sequence[bytes], num_blocks: int
    ) -> tuple[tuple[int, ...], int]:
        """Reference `num_blocks` blocks: those of the longest cached prefix, then new ones.

        Returns: (block ids, how many of them are the prefix).
        Raises: NoBlocks; no block is referenced then.
        """
        pool, chain_hashes = self.pool, chain_hashes[:num_blocks]
        shared = self.match(chain_hashes)
        num_new = num_blocks - len(shared)
        num_available = pool.num_available - self.match_counts(chain_hashes)[1]
        if num_new > num_available:
            raise NoBlocks(
                f"{num_new} blocks wanted beside a cached prefix of {len(shared)}, "
                f"{num_available} are free or evictable"
            )
        pool.share(shared)  # before others are taken, which could evict them
        return shared + self.take(num_new), len(shared)

    def take(self, num_blocks: int) -> tuple[int, ...]:
        """Take `num_blocks` blocks out of the pool, with one reference each, for content that is
        not cached. Blocks that the pool evicts for this lose their chain hashes. Raises: NoBlocks;
        no block is taken then."""
        taken = self.pool.take(num_blocks)
        for block_id in taken.evicted:
            del self._block_of[self._hash_of[block_id]]
            self._hash_of[block_id] = b""
        return taken.block_ids

    def writable(self, block_id: int) -> tuple[int, int | None]:
        """Return the block that the owner of one reference to `block_id` may write (copy-on-write).

        Returns: (block_id, None) if nothing else references it and it is not cached; else (a new
            block, block_id): the reference has moved to the new block, and the caller must copy the
            old block's bytes to it before any later write.
        Raises: NoBlocks; nothing changes then. IntegrityError if the block is not referenced.
        """
        pool = self.pool
        if pool.num_references(block_id) < 1:
            raise IntegrityError(f"block {block_id} is not referenced: no request may write it")
        if pool.num_references(block_id) == 1 and not pool.is_cached(block_id):
            return block_id, None
        (new,) = self.take(1)
        pool.put_back((block_id,))
        return new, block_id

    # -- content

    def insert(
        self, parent_hash: bytes, chain_hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Map hashes to full, referenced blocks that follow one another, the first of them after
        the block of `parent_hash` (b"": the first of a chain).

        A block whose hash is mapped already is skipped and stays its request's own; those after it
        follow the mapped block. If the parent is not cached (it was evicted or forgotten), all are
        skipped.
        """
        block_of, hash_of = self._block_of, self._hash_of
        parent = block_of.get(parent_hash, NO_BLOCK)
        if parent_hash and parent == NO_BLOCK:
            return
        inserted: list[int] = []
        for chain_hash, block_id in zip(chain_hashes, block_ids, strict=True):
            if chain_hash in block_of:
                self.pool.mark_cached(inserted, parent)
                inserted, parent = [], block_of[chain_hash]
                continue
            block_of[chain_hash] = block_id
            hash_of[block_id] = chain_hash
            inserted.append(block_id)
        self.pool.mark_cached(inserted, parent)

    def forget(self, block_ids: Collection[int]) -> None:
        """Unmap the given blocks that are mapped, and all cached blocks that follow them in their
        chains. Cost: a step for each block that was cached since the first of them."""
        pool, left = self.pool, set(filter(self.pool.is_cached, block_ids))
        forgotten, later = left.copy(), list[int]()
        entries = reversed(self._block_of.values())
        while left:
            later.append(next(entries))
            left.discard(later[-1])
        for block_id in reversed(later):  # each after its parent
            if pool.parent_of(block_id) in forgotten:
                forgotten.add(block_id)
        for block_id in later:
            if block_id in forgotten:
                del self._block_of[self._hash_of[block_id]]
                self._hash_of[block_id] = b""
                pool.unmark_cached(block_id)

    def check_integrity(self) -> None:
        """Check that the two maps agree, that a block comes after its parent, and that the pool has
        the same blocks marked as cached. Raises: IntegrityError."""
        pool, seen = self.pool, {NO_BLOCK}
        for chain_hash, block_id in self._block_of.items():
            if self._hash_of[block_id] != chain_hash or pool.parent_of(block_id) not in seen:
                raise IntegrityError(f"block {block_id} is not where the prefix cache has it")
            seen.add(block_id)
        seen.remove(NO_BLOCK)
        if len(seen) != len(self._block_of) or len(seen) != sum(map(bool, self._hash_of)):
            raise IntegrityError("the prefix cache's two maps disagree")
        if seen != pool.cached():
            raise IntegrityError(f"pool and prefix cache disagree on blocks {pool.cached() ^ seen}")
