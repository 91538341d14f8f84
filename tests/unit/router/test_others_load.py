"""What a heartbeat says of this router's own requests, now or a moment ago, is not others' load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.router.worker_client import BEAT_AGE_S, OthersLoad
from tests.harness.waiting import Clock


def look(load: OthersLoad, told: int, ours: int) -> list[str]:
    worker = cast(Any, SimpleNamespace(worker_id="d0", num_requests=told))
    return load.reckon([worker], lambda each: cast(int, each.num_requests), lambda _: ours)


@pytest.mark.parametrize(("passed_s", "others"), [(0.0, 2), (BEAT_AGE_S / 2, 2), (BEAT_AGE_S, 5)])
def test_what_ended_since_the_heartbeat_is_taken_off(passed_s: float, others: int) -> None:
    clock = Clock()
    load = OthersLoad(clock)
    assert load.of("d0") is None
    load.note("d0", 3)
    load.note("d0", 0)
    clock.now_s += passed_s
    assert look(load, told=5, ours=0) == ["d0"] and load.of("d0") == others


def test_a_heartbeat_that_stays_counts_in_full_in_the_end() -> None:
    clock = Clock()
    load = OthersLoad(clock)
    load.note("d0", 4)
    for _ in range(5):
        look(load, told=4, ours=0)
        assert load.of("d0") == 0
        clock.now_s += BEAT_AGE_S / 4
    clock.now_s += BEAT_AGE_S
    assert look(load, told=4, ours=0) == ["d0"] and load.of("d0") == 4
    assert look(load, told=4, ours=0) == []


def test_it_is_never_below_none_and_who_is_gone_is_forgotten() -> None:
    load = OthersLoad(Clock())
    look(load, told=1, ours=7)
    assert load.of("d0") == 0
    load.reckon([], lambda _: 0, lambda _: 0)
    assert load.of("d0") is None
