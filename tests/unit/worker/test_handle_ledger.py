"""The ledger: each handle once, memory bounded, nothing let in unseen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.worker import handle as handles
from services.worker.handle import CLOCK_SLACK_S, LEDGER_FULL, Handle, HandleLedger, HandleRefused

BASE = Handle("r", "t", "", "ab" * 32, "p", b"p" * 16, 4, 0, (), None, 0, b"n" * 16)


def handle_of(nonce: int, deadline_s: float) -> Handle:
    return dataclasses.replace(
        BASE, nonce=nonce.to_bytes(16, "big"), deadline_unix_ms=int(deadline_s * 1000)
    )


def refused(ledger: HandleLedger, handle: Handle, now_s: float) -> str:
    """The reason; empty: it was taken."""
    try:
        ledger.take(handle, now_s)
    except HandleRefused as error:
        return error.reason
    return ""


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(-20, 60), st.floats(0.0, 20.0)), max_size=60),
    st.integers(1, 6),
)
def test_as_a_model_that_forgets_nothing(
    uses: list[tuple[int, int, float]], max_entries: int
) -> None:
    """Against a list of all that was taken: never twice, never too old, never more than fits."""
    ledger, now_s = HandleLedger(max_entries), 1000.0
    taken: dict[tuple[int, int], Handle] = {}
    for nonce, ahead_s, wait_s in uses:
        now_s += wait_s
        # One nonce is one handle, so one deadline.
        handle = taken.get(
            (nonce, ahead_s), handle_of(nonce * 1000 + 500 + ahead_s, now_s + ahead_s)
        )
        alive = [
            old
            for old in taken.values()
            if old.deadline_unix_ms >= int((now_s - CLOCK_SLACK_S) * 1000)
        ]
        reason = refused(ledger, handle, now_s)
        if handle.deadline_unix_ms < int((now_s - CLOCK_SLACK_S) * 1000):
            assert reason == "deadline"
        elif handle in alive:
            assert reason == handles.REPLAYED
        elif len(alive) >= max_entries:
            assert reason == LEDGER_FULL
        else:
            assert reason == ""
            taken[nonce, ahead_s] = handle
        ledger.check_integrity()
        assert len(ledger) <= max_entries


def test_memory_follows_the_handles_that_are_alive(scale: Callable[[int], int]) -> None:
    ledger = HandleLedger()
    for number in range(scale(20_000)):
        now_s = 1000.0 + number / 100
        ledger.take(handle_of(number, now_s + 1.0), now_s)
        assert len(ledger) <= 100 * (1.0 + CLOCK_SLACK_S) + 2


def test_a_broken_ledger_is_found() -> None:
    ledger = HandleLedger()
    ledger.take(handle_of(1, 1030.0), 1000.0)
    ledger._nonces.clear()
    with pytest.raises(Exception, match="differ"):
        ledger.check_integrity()


def test_a_clock_that_is_set_back_lets_nothing_in_again() -> None:
    ledger, handle = HandleLedger(), handle_of(1, deadline_s=1030.0)
    assert refused(ledger, handle, 1000.0) == ""
    assert refused(ledger, handle_of(2, deadline_s=2000.0), 1040.0) == ""
    assert refused(ledger, handle, 1000.0) != ""
