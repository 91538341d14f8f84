"""Told: what a lender says of a lease that still grows. A value."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.packed import PackedBlocks


@dataclass(frozen=True)
class Told:
    """Blocks beyond those that were known; `is_all`: they are all that was wanted, or the lease was
    handed over and lends no more. The last `num_unsealed` of them have no checksum yet: their bytes
    are complete, and only a handle says what they must be."""

    blocks: PackedBlocks
    is_all: bool
    num_unsealed: int = 0
