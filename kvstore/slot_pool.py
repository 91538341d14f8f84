"""SlotPool and FramePool: the state of each slot for a KV block, in one tier (frames of a slab, or
pages of a file): free, being written, holding a block, or out of use.

    FREE         may be taken
    WRITING      reserved; its writer may write
    COMMITTED    holds one complete block
    QUARANTINED  out of use: a transfer may still write into it, or its bytes are bad and a reader
                 may still be at them. Frames only

Conservation law: the counts of the four states add up to num_slots.

A frame also has a generation, by which readers know what they read: it is odd while the frame is
WRITING or QUARANTINED and even otherwise, it never repeats until the store restarts, and each way
out of COMMITTED changes it. A reader that sees the same even generation before and after its copy
has copied one committed block.

Knows nothing of blocks, hashes or leases. Plain and synchronous, one thread.
"""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

from kvstore.errors import StoreIntegrityError


class SlotState(enum.Enum):
    """The state of a slot for one KV block; the list at the top of this file says what each
    means."""

    FREE = "free"
    WRITING = "writing"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"

    # Identity, which is what members are compared by. Enum's own hash is Python code, and is called
    # several times for each slot that moves.
    __hash__ = object.__hash__


TRANSITIONS: Mapping[SlotState, Mapping[SlotState, int]] = {
    SlotState.FREE: {SlotState.WRITING: 1},
    SlotState.WRITING: {SlotState.COMMITTED: 1, SlotState.QUARANTINED: 0, SlotState.FREE: 1},
    SlotState.COMMITTED: {SlotState.FREE: 2, SlotState.QUARANTINED: 1},
    SlotState.QUARANTINED: {SlotState.FREE: 1},
}
"""The allowed next states of each state, and by how much a frame's generation grows."""


class SlotPool:
    """The states of all slots of one tier. The lowest free slot is taken first: neighbouring frames
    are copied in one run, and a file fills from its beginning."""

    def __init__(self, num_slots: int, committed: Iterable[int] = ()) -> None:
        """Args: committed: slots that hold a block already."""
        self.num_slots = num_slots
        self.num_changes = 0
        """The number of moves of slots from one state to another, since the pool was made."""
        self.num_ever_taken = 0
        """The lowest slot from which on none was ever taken: the kernel may not have allocated the
        memory of those frames yet."""
        self.states = [SlotState.FREE] * num_slots
        for slot in committed:
            self.states[slot] = SlotState.COMMITTED
        self.free_heap = [slot for slot in range(num_slots) if self.states[slot] is SlotState.FREE]
        self._counts = dict.fromkeys(SlotState, 0)
        self._counts[SlotState.FREE] = len(self.free_heap)
        self._counts[SlotState.COMMITTED] = num_slots - len(self.free_heap)

    @property
    def num_taken(self) -> int:
        """The number of slots that are not free."""
        return self.num_slots - self._counts[SlotState.FREE]

    def count(self, state: SlotState) -> int:
        """The number of slots that are in `state`."""
        return self._counts[state]

    def state(self, slot: int) -> SlotState:
        """The state of a slot. Raises: IndexError for a slot that does not exist."""
        self._check(slot)
        return self.states[slot]

    def take(self) -> int | None:
        """Take the lowest free slot to write into (FREE -> WRITING). Returns: None when there is
        none."""
        if not self.free_heap:
            return None
        slot = heapq.heappop(self.free_heap)
        self._move(slot, SlotState.WRITING)
        if slot >= self.num_ever_taken:
            self.num_ever_taken = slot + 1
        return slot

    def commit(self, slot: int) -> None:
        """Note that a slot holds a complete block (WRITING -> COMMITTED). Raises: IntegrityError
        from any other state."""
        self._check(slot)
        self._move(slot, SlotState.COMMITTED)

    def free(self, slot: int) -> None:
        """Free a slot in any other state. Raises: IntegrityError for one that is free already."""
        self._check(slot)
        self._move(slot, SlotState.FREE)
        heapq.heappush(self.free_heap, slot)

    # -- inside

    def _check(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot}: there are {self.num_slots}")

    def _move(self, slot: int, to: SlotState) -> int:
        """Move a slot to another state. Returns: by how much a frame's generation grows. Raises:
        IntegrityError for a move that is not allowed."""
        state = self.states[slot]
        step = TRANSITIONS[state].get(to)
        if step is None:
            raise StoreIntegrityError(f"slot {slot}: {state.value} -> {to.value} is not allowed")
        self.num_changes += 1
        self.states[slot] = to
        self._counts[state] -= 1
        self._counts[to] += 1
        return step


class FramePool(SlotPool):
    """The states and generations of a slab's frames. `published` mirrors the generations for
    readers; nothing is read back from it, since others can write into that memory."""

    def __init__(self, num_frames: int, published: npt.NDArray[np.uint64] | None = None) -> None:
        """Args: published: [num_frames] generations in the slab, written at each change."""
        if num_frames < 1:
            raise ValueError(f"num_frames: must be at least 1, got {num_frames}")
        super().__init__(num_frames)
        self.generations = [0] * num_frames
        self._published = np.zeros(num_frames, np.uint64) if published is None else published

    def generation(self, frame: int) -> int:
        """The generation of a frame. Raises: IndexError for a frame that does not exist."""
        self._check(frame)
        return self.generations[frame]

    def quarantine(self, frame: int) -> None:
        """Put a WRITING or COMMITTED frame out of use (QUARANTINED). A committed frame is stale to
        every reader from here on."""
        self._check(frame)
        self._move(frame, SlotState.QUARANTINED)

    def _move(self, slot: int, to: SlotState) -> int:
        step = super()._move(slot, to)
        if step:
            self.generations[slot] += step
            self._published[slot] = self.generations[slot]
        return step
