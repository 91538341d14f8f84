"""Told: what a lender says of a lease that still grows, as it says it and as its reader has it.
Values."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.blocks import PackedBlocks


@dataclass(frozen=True)
class Word:
    """What is known of blocks that a lender told of and no handle names. num_unsealed: so many of
    the last ones have no checksum yet: their bytes are complete, and only a handle says what they
    must be. held_until_s: the lender keeps all of them in place until then, on this process'
    monotonic clock; 0: it has not said so."""

    num_unsealed: int = 0
    held_until_s: float = 0.0


NO_WORD = Word()


@dataclass(frozen=True)
class Told:
    """Blocks beyond those that were known; `is_all`: they are all that was wanted, or the lease was
    handed over and lends no more. The last `num_unsealed` of them have no checksum yet.

    held_s: the lender keeps them in place for so long from its answer on; 0: it does not. waited_s:
    how long the question was with it.
    """

    blocks: PackedBlocks
    is_all: bool
    num_unsealed: int = 0
    held_s: float = 0.0
    waited_s: float = 0.0

    def word(self, asked_s: float) -> Word:
        """As whoever asked at `asked_s` may rely on it: the question came later than it was asked,
        so the promise ends no sooner than this."""
        held_until_s = asked_s + self.waited_s + self.held_s if self.held_s else 0.0
        return Word(self.num_unsealed, held_until_s)
