"""The frames of one slab: who may write which, counted by generations.

A frame is in one of four states:

    1 FREE         nobody's
    2 WRITING      reserved; its writer may write, the generation is odd
    3 COMMITTED    holds one complete block, the generation is even
    4 QUARANTINED  out of use because a transfer may still write into it, or because its bytes are
                   bad and somebody may still read them; the generation is odd

Conservation law: num_free + num_writing + num_committed + num_quarantined == num_frames.
A generation never repeats in one life of the store, and every way out of COMMITTED changes it, so a
reader that sees the same even generation before and after its copy copied one committed block.

Knows nothing of blocks, hashes or leases. Plain synchronous values, one thread.
"""

from __future__ import annotations

import enum
import heapq
from collections import deque
from collections.abc import Callable, Iterator

from kvstore.errors import IntegrityError


class FrameState(enum.Enum):
    """See the module."""

    FREE = "free"
    WRITING = "writing"
    COMMITTED = "committed"
    QUARANTINED = "quarantined"

    # A member is itself and nothing else. Enum's own hash is Python code, called several times for
    # each frame that moves.
    __hash__ = object.__hash__


ALLOWED: dict[FrameState, frozenset[FrameState]] = {
    FrameState.FREE: frozenset({FrameState.WRITING}),
    FrameState.WRITING: frozenset({FrameState.COMMITTED, FrameState.QUARANTINED, FrameState.FREE}),
    FrameState.COMMITTED: frozenset({FrameState.FREE, FrameState.QUARANTINED}),
    FrameState.QUARANTINED: frozenset({FrameState.FREE}),
}


class FramePool:
    """All frames of a slab and their generations. Lowest free frame first, so that neighbours merge
    into one run."""

    def __init__(self, num_frames: int, publish: Callable[[int, int], None] | None = None) -> None:
        """publish(frame, generation): called at each change; a slab mirrors it for its readers. The
        truth stays here: nothing is ever read back from a mapping that others can write."""
        if num_frames < 1:
            raise ValueError(f"num_frames: must be at least 1, got {num_frames}")
        self.num_frames = num_frames
        self.num_ever_taken = 0
        """Frames from here on were never used: their memory may not have been touched yet."""
        self.num_changes = 0
        """Moves of frames from one state to another."""
        self._publish = publish
        self._state = [FrameState.FREE] * num_frames
        self._generation = [0] * num_frames
        self._free = list(range(num_frames))  # a heap; sorted already
        self._counts = dict.fromkeys(FrameState, 0)
        self._counts[FrameState.FREE] = num_frames

    def count(self, state: FrameState) -> int:
        """How many frames are in `state`."""
        return self._counts[state]

    def state(self, frame: int) -> FrameState:
        """Raises: IndexError for a frame that does not exist."""
        self._check(frame)
        return self._state[frame]

    def generation(self, frame: int) -> int:
        """Raises: IndexError for a frame that does not exist."""
        self._check(frame)
        return self._generation[frame]

    def take(self) -> int | None:
        """FREE -> WRITING for the lowest free frame; None when there is none."""
        if not self._free:
            return None
        frame = heapq.heappop(self._free)
        self._move(frame, FrameState.WRITING, 1)
        self.num_ever_taken = max(self.num_ever_taken, frame + 1)
        return frame

    def commit(self, frame: int) -> int:
        """WRITING -> COMMITTED. Returns: the (even) generation that readers must see."""
        self._check(frame)
        self._move(frame, FrameState.COMMITTED, 1)
        return self._generation[frame]

    def quarantine(self, frame: int) -> None:
        """WRITING or COMMITTED -> QUARANTINED. A committed frame is stale to every reader from here
        on."""
        self._check(frame)
        step = 1 if self._state[frame] is FrameState.COMMITTED else 0
        self._move(frame, FrameState.QUARANTINED, step)

    def free(self, frame: int) -> None:
        """Any state but FREE -> FREE. Every reference to the frame is stale from here on."""
        self._check(frame)
        step = 2 if self._state[frame] is FrameState.COMMITTED else 1
        self._move(frame, FrameState.FREE, step)
        heapq.heappush(self._free, frame)

    def check_integrity(self) -> None:
        """Recount everything. Raises: IntegrityError."""
        deque(self.checks(), maxlen=0)

    def checks(self) -> Iterator[None]:
        """The same in steps; the caller may do other things between two (kvstore/watch.py)."""
        counts = dict.fromkeys(FrameState, 0)
        writing = (FrameState.WRITING, FrameState.QUARANTINED)
        for frame, state in enumerate(self._state):
            counts[state] += 1
            if (self._generation[frame] % 2 == 1) != (state in writing):
                raise IntegrityError(
                    f"frame {frame}: generation {self._generation[frame]} while {state.value}"
                )
            yield
        for state, recount in counts.items():
            if recount != self._counts[state]:
                raise IntegrityError(
                    f"frames {state.value}: counted {recount}, kept {self._counts[state]}"
                )
        free: set[int] = set()
        for frame in self._free:
            free.add(frame)
            if self._state[frame] is not FrameState.FREE:
                raise IntegrityError(f"frame {frame}: in the free heap, and not free")
            yield
        if len(self._free) != len(free) or len(free) != counts[FrameState.FREE]:
            raise IntegrityError("frames: the free heap differs from the frames that are free")

    def _check(self, frame: int) -> None:
        if not 0 <= frame < self.num_frames:
            raise IndexError(f"frame {frame}: there are {self.num_frames}")

    def _move(self, frame: int, to: FrameState, generation_step: int) -> None:
        state = self._state[frame]
        if to not in ALLOWED[state]:
            raise IntegrityError(f"frame {frame}: {state.value} -> {to.value} is not allowed")
        self.num_changes += 1
        self._state[frame] = to
        self._counts[state] -= 1
        self._counts[to] += 1
        if generation_step:
            self._generation[frame] += generation_step
            if self._publish is not None:
                self._publish(frame, self._generation[frame])
