"""Loaded: what came of a load of blocks, as far as it can be used. A value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.transport.base import GetResult


@dataclass(frozen=True)
class Loaded:
    """The leading items that may be used, and the others by reason. checksums: of what came, by
    index, of items that are not sealed: the caller compares them."""

    num_usable: int
    num_bytes: int
    not_usable: Counter[str] = field(default_factory=Counter)
    checksums: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, result: GetResult, num_items: int) -> Loaded:
        """What lies behind a failed block cannot be used without it: the same reason, unless it has
        its own."""
        first_failed = min(result.failed, default=num_items)
        not_usable = Counter(
            result.failed.get(index, result.failed[first_failed])
            for index in range(first_failed, num_items)
        )
        return cls(first_failed, result.num_bytes, not_usable, result.checksums)
