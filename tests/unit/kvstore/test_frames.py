"""The frame pool: its four states add up, and a generation tells readers everything they need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import IntegrityError
from kvstore.frames import ALLOWED, FramePool, FrameState


def _in_state(state: FrameState) -> tuple[FramePool, int]:
    pool = FramePool(3)
    frame = pool.take()
    assert frame == 0
    if state is FrameState.COMMITTED:
        pool.commit(frame)
    elif state is FrameState.QUARANTINED:
        pool.quarantine(frame)
    elif state is FrameState.FREE:
        pool.free(frame)
    return pool, frame


def _move(pool: FramePool, frame: int, to: FrameState) -> None:
    if to is FrameState.COMMITTED:
        pool.commit(frame)
    elif to is FrameState.QUARANTINED:
        pool.quarantine(frame)
    else:
        pool.free(frame)


@pytest.mark.parametrize("state", list(FrameState))
@pytest.mark.parametrize("to", [FrameState.COMMITTED, FrameState.QUARANTINED, FrameState.FREE])
def test_only_the_allowed_transitions_exist(state: FrameState, to: FrameState) -> None:
    pool, frame = _in_state(state)
    before = pool.generation(frame)
    if to in ALLOWED[state]:
        _move(pool, frame, to)
        assert pool.state(frame) is to
    else:
        with pytest.raises(IntegrityError):
            _move(pool, frame, to)
        assert (pool.state(frame), pool.generation(frame)) == (state, before)
    pool.check_integrity()


def test_the_lowest_free_frame_comes_first() -> None:
    """Neighbouring frames merge into one copy and one descriptor."""
    pool = FramePool(4)
    assert [pool.take() for _ in range(5)] == [0, 1, 2, 3, None]
    pool.free(2)
    pool.free(1)
    assert pool.take() == 1


def test_an_evicted_frame_is_stale_before_it_is_written_again() -> None:
    """A reference must die with the eviction, not with the next reservation."""
    pool, frame = _in_state(FrameState.COMMITTED)
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
    published: dict[int, int] = {}
    pool = FramePool(3, publish=published.__setitem__)
    committed: set[tuple[int, int]] = set()
    for step in steps:
        frame = data.draw(st.integers(0, 2))
        try:
            if step == "take":
                taken = pool.take()
                frame = frame if taken is None else taken
            elif step == "commit":
                generation = pool.commit(frame)
                assert generation % 2 == 0
                assert (frame, generation) not in committed
                committed.add((frame, generation))
            elif step == "quarantine":
                pool.quarantine(frame)
            else:
                pool.free(frame)
                assert (frame, pool.generation(frame)) not in committed
        except IntegrityError:
            pass  # the state did not allow it, and nothing changed
        pool.check_integrity()
        assert sum(pool.count(state) for state in FrameState) == 3
        assert all(pool.generation(f) == generation for f, generation in published.items())
