"""UnquantizedTails: the numbers of a quantized cache that are not quantized yet, in the model's
compute dtype: those of unfilled blocks, and those of draft tokens until they are accepted or
rejected.

It knows no requests. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from engine.errors import IntegrityError

if TYPE_CHECKING:
    from engine.kv.memory import KvMemory

_FIRST_SLOTS = 8
"""Number of slots at start; doubled when all are in use."""


class UnquantizedTails:
    """One slot of unquantized memory for each unfilled block of a quantized cache: the block's
    tail.

    A slot is opened when a block gets its first token, and closed when the block is full and the
    step that filled it is processed, or when the block is cleared. When slots run out, those of
    blocks that are no longer live (`is_live`) are closed, and if that is not enough the memory
    doubles.

    Draft tokens touch no block and no tail: they have slots of their own, from the step that
    computes them (`guess`) to their acceptance (`keep`), or to the next step (`drop_guesses`) if
    that never came. As many slots stay free meanwhile, for the blocks that an accepted path enters,
    so that `keep` cannot fail for lack of memory.

    Args: make: creates an unquantized KvMemory of the given number of slots.
    """

    def __init__(self, make: Callable[[int], KvMemory]) -> None:
        self.is_live: Callable[[int], object] = lambda _: True
        """Return whether a block is referenced or held. The engine sets it to
        `BlockPool.is_used`."""
        self.quantize: Callable[[Sequence[int], Sequence[int]], None] | None = None
        """Quantize the contents of slots (second argument) into blocks (first argument), in all
        layers. Set by the attention that computes draft tokens; None before."""
        self._make = make
        self.memory = make(_FIRST_SLOTS)
        self._slots: dict[int, int] = {}
        self._free = list(range(_FIRST_SLOTS))
        self._guesses: dict[int, tuple[int, ...]] = {}  # slots, by the block of the token before

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._slots

    @property
    def num_guess_slots(self) -> int:
        """The number of slots that hold draft tokens."""
        return sum(len(slots) for slots in self._guesses.values())

    def slot(self, block_id: int) -> int:
        """Return the slot of an unfilled block. Raises: IntegrityError if the block has none, which
        means that its first tokens were not computed here."""
        if block_id not in self._slots:
            raise IntegrityError(f"block {block_id} is entered in its middle, but has no tail")
        return self._slots[block_id]

    def open(self, block_id: int) -> int:
        """Allocate a zeroed slot for a block that gets its first token. Returns: the slot."""
        self.close(block_id)
        slot = self._slots[block_id] = self._take()
        self.memory.clear(slot)
        return slot

    def close(self, block_id: int) -> None:
        """Free the slot of a block, if it has one."""
        slot = self._slots.pop(block_id, None)
        if slot is not None:
            self._free.append(slot)

    def copy(self, source: int, target: int) -> None:
        """Copy the tail of block `source` to block `target`; close that of `target` if `source` has
        none."""
        self.close(target)
        if source in self._slots:
            slot = self.open(target)
            self.memory.copy(self._slots[source], slot)

    # -- draft tokens

    def guess(self, block_id: int, num_nodes: int) -> tuple[int, ...]:
        """Allocate slots for the nodes of a tree of draft tokens. Returns: the slots, in the order
        of the nodes; their bytes are undefined.

        Args: block_id: the block of the last token before the tree, which one sequence alone owns.
        """
        num_slots = -(-num_nodes // self.memory.layout.block_size)
        slots = tuple(self._take() for _ in range(num_slots))
        self._guesses[block_id] = slots
        while len(self._free) < self.num_guess_slots:
            self._grow()
        return slots

    def keep(self, block_ids: Sequence[int], start: int, nodes: Sequence[int]) -> None:
        """Move the KV of accepted draft tokens to the sequence's blocks, from position `start` on,
        in the order of `nodes`. Blocks that they fill are quantized; the KV of other nodes is
        dropped.

        Raises: IntegrityError if no step computed draft tokens for that place.
        """
        size = self.memory.layout.block_size
        before = block_ids[(start - 1) // size]
        if before not in self._guesses:
            if not nodes:
                return
            raise IntegrityError(f"no guesses were computed after block {before}")
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
                raise IntegrityError("draft tokens fill a block, and nothing can quantize it")
            self.quantize(full, [self._slots[block_id] for block_id in full])

    def drop_guesses(self) -> None:
        """Free the slots of all draft tokens that were not kept: their step failed, or their
        sequence ended."""
        for slots in self._guesses.values():
            self._free += slots
        self._guesses = {}

    # -- slots

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
        # A step asks for slots in inference mode; between steps they are written outside of it.
        with torch.inference_mode(False):
            self.memory = self._make(2 * old.num_blocks)
            self.memory.cache[: old.num_blocks].copy_(old.cache)
        self._free += range(old.num_blocks, 2 * old.num_blocks)

    def check_integrity(self) -> None:
        """Check the slots. Raises: IntegrityError where a slot is lost or has two owners."""
        guessed = [slot for slots in self._guesses.values() for slot in slots]
        slots = [*self._slots.values(), *guessed, *self._free]
        if sorted(slots) != list(range(self.memory.num_blocks)):
            raise IntegrityError(f"{len(slots)} tail slots of {self.memory.num_blocks}")
