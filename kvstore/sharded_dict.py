"""ShardedDict: a dict of millions of entries that grows without a long pause.

Plain and synchronous, one thread.

A plain dict copies all of its entries each time that its table is full: 50 to 200 ms for a million
(measured), in one turn of the loop. Here an insertion copies at most one shard, a thousandth.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

NUM_SHARDS = 1024
_MASK = NUM_SHARDS - 1


class ShardedDict(Generic[K, V]):
    """Entries by key, in no order."""

    def __init__(self) -> None:
        self.shards: tuple[dict[K, V], ...] = tuple({} for _ in range(NUM_SHARDS))
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def __contains__(self, key: K) -> bool:
        return key in self.shards[hash(key) & _MASK]

    def get(self, key: K) -> V | None:
        """None where there is no entry."""
        return self.shards[hash(key) & _MASK].get(key)

    def add(self, key: K, value: V) -> bool:
        """Returns: False when there is an entry already, which stays."""
        shard = self.shards[hash(key) & _MASK]
        if key in shard:
            return False
        shard[key] = value
        self._num_entries += 1
        return True

    def remove(self, key: K) -> None:
        """Raises: KeyError where there is no entry."""
        del self.shards[hash(key) & _MASK][key]
        self._num_entries -= 1

    def items(self) -> Iterator[tuple[K, V]]:
        """Every entry. Raises: RuntimeError, not always, when entries come or go meanwhile."""
        return chain.from_iterable(shard.items() for shard in self.shards)

    def keys_in_pieces(self, num_keys: int) -> Iterator[list[K]]:
        """Every key, in lists of `num_keys`, the last one shorter or empty, while entries come and
        go: a key that is there all the time is in one list, a key that comes or goes may be."""
        piece: list[K] = []
        for shard in self.shards:
            piece += shard
            while len(piece) >= num_keys:
                yield piece[:num_keys]
                del piece[:num_keys]
        yield piece
