"""PrefixCache: chain hash -> block, on top of the pool. Hashes come from the caller: it knows no
tokens and no keys.

One hash maps to one block, the first that was inserted; a second block with the same content stays
its request's own and becomes free with it. A mapping lives until its block is taken for something
else (least recently used first), or is forgotten because its content cannot be trusted. Tenants are
apart because their hashes are keyed. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import IntegrityError, NoBlocks
from engine.kv.block_pool import BlockPool


class PrefixCache:
    """The map and its reverse."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    def match(self, chain_hashes: Sequence[bytes]) -> tuple[int, ...]:
        """Blocks of the longest cached prefix. References nothing and changes no order."""
        matched: list[int] = []
        for chain_hash in chain_hashes:
            block_id = self._block_of.get(chain_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return tuple(matched)

    def reserve(
        self, chain_hashes: Sequence[bytes], num_blocks: int
    ) -> tuple[tuple[int, ...], int]:
        """Reference `num_blocks` blocks: those that hold the longest cached prefix, then new ones.

        Returns: (block ids, how many of them are the prefix).
        Raises: NoBlocks, and nothing was taken.
        """
        shared = self.match(chain_hashes[:num_blocks])
        num_fresh = num_blocks - len(shared)
        num_reused = sum(1 for block_id in shared if self.pool.is_evictable(block_id))
        if num_fresh > self.pool.num_available - num_reused:
            raise NoBlocks(
                f"{num_fresh} blocks wanted beside a cached prefix of {len(shared)}, "
                f"{self.pool.num_available - num_reused} are free or evictable"
            )
        for block_id in shared:  # before taking the rest, which could evict them
            self.pool.reference(block_id)
        fresh = self.take(num_fresh)
        return shared + fresh, len(shared)

    def take(self, num_blocks: int) -> tuple[int, ...]:
        """Reference new blocks and forget what was cached in them. Raises: NoBlocks."""
        taken = self.pool.take(num_blocks)
        for block_id in taken.evicted:
            del self._block_of[self._hash_of.pop(block_id)]
        return taken.block_ids

    def insert(self, chain_hash: bytes, block_id: int) -> bool:
        """Map `chain_hash` to a full, referenced block. False: the hash has a block already,
        nothing changed."""
        if chain_hash in self._block_of:
            return False
        if block_id in self._hash_of:
            raise IntegrityError(f"block {block_id} is cached under another hash")
        self.pool.mark_cached(block_id)
        self._block_of[chain_hash] = block_id
        self._hash_of[block_id] = chain_hash
        return True

    def forget(self, block_id: int) -> None:
        """Unmap a block, if it is mapped: nobody else shall find it."""
        chain_hash = self._hash_of.pop(block_id, None)
        if chain_hash is not None:
            del self._block_of[chain_hash]
            self.pool.unmark_cached(block_id)

    def __len__(self) -> int:
        return len(self._block_of)

    def check_integrity(self) -> None:
        """Both maps are each other's reverse, and the pool agrees on what is cached. Raises:
        IntegrityError."""
        if {block: key for key, block in self._block_of.items()} != self._hash_of:
            raise IntegrityError("the prefix cache's two maps disagree")
        cached = {b for b in range(self.pool.num_blocks) if self.pool.is_cached(b)}
        if cached != set(self._hash_of):
            raise IntegrityError(
                f"pool and prefix cache disagree on blocks {cached ^ set(self._hash_of)}"
            )
