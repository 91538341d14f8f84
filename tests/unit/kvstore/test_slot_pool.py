"""The pool of frames: its four states add up, and a generation tells readers everything they need;
and that of pages, which begins with what an earlier life left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import invariants
from kvstore.errors import StoreIntegrityError
from kvstore.slot_pool import TRANSITIONS, FramePool, SlotPool, SlotState


def _in_state(state: SlotState) -> tuple[FramePool, int]:
    pool = FramePool(3)
    frame = pool.take()
    assert frame == 0
    if state is SlotState.COMMITTED:
        pool.commit(frame)
    elif state is SlotState.QUARANTINED:
        pool.quarantine(frame)
    elif state is SlotState.FREE:
        pool.free(frame)
    return pool, frame


def _move(pool: FramePool, frame: int, to: SlotState) -> None:
    if to is SlotState.COMMITTED:
        pool.commit(frame)
    elif to is SlotState.QUARANTINED:
        pool.quarantine(frame)
    else:
        pool.free(frame)


@pytest.mark.parametrize("state", list(SlotState))
@pytest.mark.parametrize("to", [SlotState.COMMITTED, SlotState.QUARANTINED, SlotState.FREE])
def test_only_the_allowed_transitions_exist(state: SlotState, to: SlotState) -> None:
    pool, frame = _in_state(state)
    before = pool.generation(frame)
    if to in TRANSITIONS[state]:
        _move(pool, frame, to)
        assert pool.state(frame) is to
    else:
        with pytest.raises(StoreIntegrityError):
            _move(pool, frame, to)
        assert (pool.state(frame), pool.generation(frame)) == (state, before)
    invariants.run(invariants.check_frames(pool))


def test_the_lowest_free_frame_comes_first() -> None:
    """Neighbouring frames merge into one copy and one descriptor."""
    pool = FramePool(4)
    assert [pool.take() for _ in range(5)] == [0, 1, 2, 3, None]
    pool.free(2)
    pool.free(1)
    assert pool.take() == 1


def test_an_evicted_frame_is_stale_before_it_is_written_again() -> None:
    """A reference must die with the eviction, not with the next reservation."""
    pool, frame = _in_state(SlotState.COMMITTED)
    before = pool.generation(frame)
    pool.free(frame)
    after = pool.generation(frame)
    assert after != before and after % 2 == 0


def test_a_frame_that_does_not_exist_is_an_error() -> None:
    pool = FramePool(2)
    for frame in (-1, 2):
        with pytest.raises(IndexError):
            pool.state(frame)
        with pytest.raises(IndexError):
            pool.free(frame)


@given(
    st.lists(
        st.sampled_from(["take", "take", "commit", "commit", "quarantine", "free"]),
        min_size=20,
        max_size=60,
    ),
    st.data(),
)
def test_generations_never_repeat_while_a_frame_can_be_read(
    steps: list[str], data: st.DataObject
) -> None:
    """What a reader saw committed is never seen again with other bytes under that generation."""
    published = np.zeros(3, np.uint64)
    pool = FramePool(3, published)
    committed: set[tuple[int, int]] = set()
    for step in steps:
        frame = data.draw(st.integers(0, 2))
        try:
            if step == "take":
                taken = pool.take()
                frame = frame if taken is None else taken
            elif step == "commit":
                pool.commit(frame)
                generation = pool.generation(frame)
                assert generation % 2 == 0
                assert (frame, generation) not in committed
                committed.add((frame, generation))
            elif step == "quarantine":
                pool.quarantine(frame)
            else:
                pool.free(frame)
                assert (frame, pool.generation(frame)) not in committed
        except StoreIntegrityError:
            pass  # the state did not allow it, and nothing changed
        invariants.run(invariants.check_frames(pool))
        assert sum(pool.count(state) for state in SlotState) == 3
        assert published.tolist() == pool.generations


def test_pages_that_hold_a_block_are_not_given_out() -> None:
    pool = SlotPool(4, committed=[1, 2])
    assert (pool.num_taken, pool.count(SlotState.COMMITTED)) == (2, 2)
    assert [pool.take() for _ in range(3)] == [0, 3, None]
    pool.free(2)
    pool.commit(0)
    assert pool.take() == 2
    with pytest.raises(StoreIntegrityError):
        pool.commit(1)
    invariants.run(invariants.check_slots(pool, "pages"))


def test_a_pool_that_miscounts_is_found() -> None:
    pool = SlotPool(3)
    pool.take()
    pool.free_heap.append(0)
    with pytest.raises(StoreIntegrityError, match="pages: 0 is in the free heap"):
        invariants.run(invariants.check_slots(pool, "pages"))
