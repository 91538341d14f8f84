"""Streams pause while the loop is behind, and only then."""

from __future__ import annotations

import time

from services.router.client_limits import LoopPace
from tests.harness.waiting import until


def test_a_pause_grows_to_a_bound_and_goes_away_again() -> None:
    pace, pauses = LoopPace(), []
    for _ in range(30):
        pace.on_lag(0.01)
        pauses.append(pace.pause_s)
    assert pauses == sorted(pauses) and 0 < pauses[0] < pauses[-1] == 0.05
    for _ in range(30):
        pace.on_lag(0.0)
    assert pace.pause_s == 0.0


def test_nobody_pauses_on_a_loop_that_keeps_up() -> None:
    pace = LoopPace()
    for _ in range(100):
        pace.on_lag(0.001)
    assert pace.pause_s == 0.0


async def test_it_sees_the_loop_that_it_runs_on() -> None:
    pace = LoopPace()
    pace.start()
    try:

        def is_seen() -> bool:
            time.sleep(0.03)
            return pace.pause_s > 0

        await until(is_seen)
    finally:
        await pace.stop()
    assert pace.pause_s == 0.0
    assert pace._task is not None and pace._task.done(), "the watch is over"
