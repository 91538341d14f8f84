"""DraftCache: which blocks of a draft model's own KV cache each sequence has, and how many of its
tokens lie in them. No prefix is shared and nothing is kept for later: what is lost costs a draft,
never a token.

Engine thread only. Every block is free or one sequence's (`check_integrity`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from engine.errors import IntegrityError
from engine.sequence import Key


@dataclass(slots=True)
class Held:
    """One sequence's."""

    block_ids: list[int] = field(default_factory=list)
    num_tokens: int = 0
    """Of the sequence, from its first, whose KV lies there."""


class DraftCache:
    """See the module."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._free = list(range(num_blocks))
        self._held: dict[Key, Held] = {}  # who was used longest ago comes first

    def num_tokens(self, key: Key) -> int:
        """Of this sequence, from its first, that lie here."""
        held = self._held.get(key)
        return 0 if held is None else held.num_tokens

    def has_room(self, key: Key, num_slots: int) -> bool:
        """Whether `hold` has blocks for it without taking them from another one."""
        held = self._held.get(key)
        num_own = 0 if held is None else len(held.block_ids)
        return -(-num_slots // self._block_size) - num_own <= len(self._free)

    def hold(self, key: Key, num_slots: int, busy: Collection[Key]) -> Held | None:
        """Blocks for so many tokens of a sequence. Those used longest ago lose theirs for it, but
        nobody in `busy`. Returns: None where there is no room; it has what it had."""
        held = self._held.pop(key, None) or Held()
        self._held[key] = held
        num_missing = -(-num_slots // self._block_size) - len(held.block_ids)
        if num_missing > len(self._free) and not self._free_up(num_missing, {key, *busy}):
            return None
        for _ in range(num_missing):
            held.block_ids.append(self._free.pop())
        return held

    def _free_up(self, num_blocks: int, kept: Collection[Key]) -> bool:
        """Have so many free ones, or change nothing: nobody loses anything in vain."""
        victims: list[Key] = []
        num_free = len(self._free)
        for key, held in self._held.items():
            if num_free >= num_blocks:
                break
            if key not in kept:
                victims.append(key)
                num_free += len(held.block_ids)
        if num_free < num_blocks:
            return False
        for key in victims:
            self.forget(key)
        return True

    def forget(self, key: Key) -> None:
        """Its blocks are free. Does nothing for one that has none."""
        held = self._held.pop(key, None)
        if held is not None:
            self._free += held.block_ids

    def check_integrity(self) -> None:
        """Raises: IntegrityError where a block is lost or has two owners."""
        owned = [block_id for held in self._held.values() for block_id in held.block_ids]
        if sorted([*owned, *self._free]) != list(range(self._num_blocks)):
            raise IntegrityError(f"{len(owned)} + {len(self._free)} of {self._num_blocks} blocks")
        for key, held in self._held.items():
            if held.num_tokens > len(held.block_ids) * self._block_size:
                raise IntegrityError(f"{key}: {held.num_tokens} tokens drafted beyond its blocks")
