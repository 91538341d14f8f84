"""Loaded: the usable result of loading blocks from a store. Immutable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvstore.transport.base import GetResult


@dataclass(frozen=True)
class Loaded:
    """Leading blocks of a load that may be used, and the others by reason. checksums: checksum by
    index of each loaded block that was not sealed, for the caller to compare."""

    num_usable: int
    num_bytes: int
    not_usable: Counter[str] = field(default_factory=Counter)
    checksums: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, result: GetResult, num_items: int) -> Loaded:
        """Create from a transfer's result: blocks after a failed one cannot be used without it and
        get its reason, unless they have their own."""
        first_failed = min(result.failed, default=num_items)
        not_usable = Counter(
            result.failed.get(index, result.failed[first_failed])
            for index in range(first_failed, num_items)
        )
        return cls(first_failed, result.num_bytes, not_usable, result.checksums)
