"""When a peer that failed may be tried again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker.store_pool import BACKOFF_MAX_S, BACKOFF_MIN_S, FORGIVE_S, CallBreaker


def test_a_new_peer_may_be_tried_by_anybody() -> None:
    breaker = CallBreaker()
    assert not breaker.refuses(0.0) and not breaker.is_half_open(0.0)


def test_the_waits_double_up_to_a_bound() -> None:
    breaker, now_s, waits = CallBreaker(), 1000.0, []
    for _ in range(9):
        breaker = breaker.failed(now_s, jitter=1.0)
        waits.append(breaker.retry_at_s - now_s)
        now_s = breaker.retry_at_s
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_after_the_wait_one_may_try_and_a_success_closes_it() -> None:
    breaker = CallBreaker().failed(10.0, jitter=1.0)
    assert breaker.refuses(10.4) and not breaker.is_half_open(10.4)
    assert not breaker.refuses(10.5) and breaker.is_half_open(10.5)
    closed = breaker.succeeded()
    assert not closed.refuses(10.5) and not closed.is_half_open(10.5)


@pytest.mark.parametrize(("later_s", "wait_s"), [(1.0, 2.0), (FORGIVE_S + 1, 0.5)])
def test_a_success_does_not_make_what_came_before_undone_at_once(
    later_s: float, wait_s: float
) -> None:
    """It greets well and fails at work: the waits go on growing, until it was good for long."""
    breaker = CallBreaker().failed(0.0, 1.0).succeeded().failed(1.0, 1.0).succeeded()
    assert breaker.failed(1.0 + later_s, 1.0).retry_at_s == pytest.approx(1.0 + later_s + wait_s)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0.5, 1.0), st.booleans()), max_size=40),
)
def test_nothing_is_refused_for_ever(history: list[tuple[float, float, bool]]) -> None:
    breaker, now_s = CallBreaker(), 0.0
    for pause_s, jitter, works in history:
        now_s += pause_s
        breaker = breaker.succeeded() if works else breaker.failed(now_s, jitter)
        if not works:
            assert breaker.refuses(now_s)
            assert BACKOFF_MIN_S * 0.999 <= breaker.retry_at_s - now_s <= BACKOFF_MAX_S * 1.001
        assert not breaker.refuses(now_s + BACKOFF_MAX_S + 0.01)
