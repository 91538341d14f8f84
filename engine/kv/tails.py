"""Tails: what of a quantized cache is not quantized yet: the numbers of unfilled blocks as the
model computed them, and of guessed tokens until it is known which of them are kept.

Knows no request. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.errors import IntegrityError

if TYPE_CHECKING:
    from engine.kv.memory import KvMemory

_FIRST_TAILS = 8
"""Slots to begin with; doubled when all are in use."""


class Tails:
    """Unfilled blocks of a quantized cache: one slot of a raw memory per block being filled.

    A slot is opened when a block is entered, closed when it is full and the step that filled it is
    booked (or when it is cleared). One whose block was given back unfilled is found when room is
    wanted: `is_live` says so. Grows as live sequences do.

    Guessed tokens touch no block and no tail: theirs are slots of their own, from the step that
    computes them (`guess`) to its draws (`keep`), or to the next step (`drop_guesses`) where those
    never came. As many slots as they have stay free meanwhile, for the blocks that a kept path
    enters: what is kept needs no memory that might not be there, once tokens have been told.

    Args:
        make: a raw memory of so many slots.
    """

    def __init__(self, make: Callable[[int], KvMemory]) -> None:
        self.is_live: Callable[[int], object] = lambda _: True
        """Is this block referenced? Set by whoever owns the pool."""
        self.quantize: Callable[[Sequence[int], Sequence[int]], None] | None = None
        """Make these blocks of what lies in these slots, in all layers. Set by whoever computes
        guesses."""
        self._make = make
        self.memory = make(_FIRST_TAILS)
        self._slots: dict[int, int] = {}
        self._free = list(range(_FIRST_TAILS))
        self._guesses: dict[int, tuple[int, ...]] = {}  # slots, by the block of the token before

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._slots

    @property
    def num_guess_slots(self) -> int:
        """In which numbers of guesses lie."""
        return sum(len(slots) for slots in self._guesses.values())

    def slot(self, block_id: int) -> int:
        """Of a block that is being filled. Raises: IntegrityError where it was never entered: its
        first tokens came from elsewhere, which only full blocks can."""
        if block_id not in self._slots:
            raise IntegrityError(f"block {block_id} is entered in its middle, but has no tail")
        return self._slots[block_id]

    def open(self, block_id: int) -> int:
        """A slot of zeros for a block that is entered."""
        self.close(block_id)
        slot = self._slots[block_id] = self._take()
        self.memory.clear(slot)
        return slot

    def close(self, block_id: int) -> None:
        """Nothing, where the block has none."""
        slot = self._slots.pop(block_id, None)
        if slot is not None:
            self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        """What `source` has of a tail, or has not, becomes `target`'s, too."""
        self.close(target)
        if source in self._slots:
            slot = self.open(target)
            self.memory.copy(self._slots[source], slot)

    # -- guesses

    def guess(self, block_id: int, num_nodes: int) -> tuple[int, ...]:
        """Slots for guessed tokens, node after node; what lies in them is not looked at.

        Args:
            block_id: of the last token before them: one sequence's own.
        """
        num_slots = -(-num_nodes // self.memory.layout.block_size)
        slots = tuple(self._take() for _ in range(num_slots))
        self._guesses[block_id] = slots
        while len(self._free) < self.num_guess_slots:
            self._grow()
        return slots

    def keep(self, block_ids: Sequence[int], start: int, nodes: Sequence[int]) -> None:
        """The sequence in these blocks goes on at position `start` with these of the nodes that
        were guessed there, in their order. Blocks that they fill are quantized, as of any token;
        the other nodes are forgotten.

        Raises: IntegrityError where no step has computed guesses for that place.
        """
        size = self.memory.layout.block_size
        before = block_ids[(start - 1) // size]
        if before not in self._guesses:
            if not nodes:
                return
            raise IntegrityError(f"no guesses were computed behind block {before}")
        slots = self._guesses.pop(before)
        moves: list[tuple[int, int, int, int]] = []
        for position, node in enumerate(nodes, start):
            block_id = block_ids[position // size]
            slot = self.slot(block_id) if position % size else self.open(block_id)
            moves.append((slots[node // size], node % size, slot, position % size))
        self.memory.move_tokens(moves)
        self._free += slots
        full = block_ids[start // size : (start + len(nodes)) // size]
        if full:
            if self.quantize is None:
                raise IntegrityError("guesses fill a block, and nobody can quantize it")
            self.quantize(full, [self._slots[block_id] for block_id in full])

    def drop_guesses(self) -> None:
        """Forget those that nobody has asked for: their step failed, or their sequence is gone."""
        for slots in self._guesses.values():
            self._free += slots
        self._guesses = {}

    # -- room

    def _take(self) -> int:
        num_promised = self.num_guess_slots
        if len(self._free) <= num_promised:
            for block_id in [block_id for block_id in self._slots if not self.is_live(block_id)]:
                self.close(block_id)
        while len(self._free) <= num_promised:
            self._grow()
        return self._free.pop()

    def _grow(self) -> None:
        old = self.memory
        # A step asks for room, and in between it is written to as well.
        with torch.inference_mode(False):
            self.memory = self._make(2 * old.num_blocks)
            self.memory.cache[: old.num_blocks].copy_(old.cache)
        self._free += range(old.num_blocks, 2 * old.num_blocks)

    def check_integrity(self) -> None:
        """Raises: IntegrityError where a slot is lost or has two owners."""
        guessed = [slot for slots in self._guesses.values() for slot in slots]
        slots = [*self._slots.values(), *guessed, *self._free]
        if sorted(slots) != list(range(self.memory.num_blocks)):
            raise IntegrityError(f"{len(slots)} tail slots of {self.memory.num_blocks}")
