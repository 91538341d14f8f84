"""Stage times sum to the whole, whatever other processes report; those up to the first token sum to
the time that it took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.request_stats import BEFORE_FIRST, StageTimes
from tests.harness.waiting import Clock

parts = st.lists(
    st.tuples(st.sampled_from([*sorted(BEFORE_FIRST), "decode", "store"]), st.floats(-1, 1e3))
)
steps = st.lists(
    st.tuples(
        st.floats(0, 1e3),
        st.one_of(st.just("mark"), st.just("first_token"), parts),
    ),
    max_size=12,
)


Steps = list[tuple[float, str | list[tuple[str, float]]]]


def _run(steps: Steps) -> StageTimes:
    clock = Clock()
    times = StageTimes(clock)
    for lap_s, step in steps:
        clock.now_s += lap_s
        if step == "first_token":
            times.first_token()
        elif isinstance(step, str):
            times.mark("own")
        else:
            times.mark_split(step, rest="rest", wire="wire")
    return times


@given(steps)
def test_stages_and_laps_sum_to_the_total(steps: Steps) -> None:
    """Laps without a gap or overlap, not even by a rounding; the first token is out between two."""
    times = _run(steps)
    stages, laps = dict(times.stages()), times.laps()
    assert sum(stages.values()) == pytest.approx(times.total_s, rel=1e-6, abs=1e-6)
    assert all(s >= 0 for s in stages.values())
    bounds = [times.begin_s, *(lap.end_s for lap in laps)]
    assert [lap.begin_s for lap in laps] == bounds[:-1] and bounds[-1] == times.last_s
    assert all(lap.end_s > lap.begin_s for lap in laps)
    if times.first_token_s is not None and times.first_token_s <= times.last_s:
        assert times.first_token_s in bounds
    by_stage: dict[str, float] = {}
    for lap in laps:
        by_stage[lap.stage] = by_stage.get(lap.stage, 0.0) + (lap.end_s - lap.begin_s)
    expected = {stage: s for stage, s in stages.items() if s > 0}
    assert by_stage == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_a_stage_that_is_marked_again_and_again_is_one_lap() -> None:
    """A request that waited 300 s for a worker kept 3,000 of them once."""
    times = _run([(0.1, "own")] * 3000)
    assert len(times.laps()) == 1


def test_a_lap_of_no_length_takes_nothing_from_a_stage() -> None:
    clock = Clock()
    clock.now_s = 1e-13
    times = StageTimes(clock)
    clock.now_s = 2e-13
    times.mark("own")
    clock.now_s = 1000.0
    times.mark("other")
    times.mark("own")
    assert dict(times.stages())["own"] == pytest.approx(1e-13)


def test_what_the_other_process_did_not_count_is_the_rest() -> None:
    clock = Clock()
    times = StageTimes(clock)
    clock.now_s += 1
    times.mark("receive")
    clock.now_s += 10
    times.mark_split([("compute", 6.0), ("store", 1.0)], rest="handover")
    clock.now_s += 0.5
    times.mark("handover")
    stages = dict(times.stages())
    assert stages == pytest.approx({"receive": 1, "compute": 6, "store": 1, "handover": 3.5})


def test_the_first_token_parts_what_came_before_it_from_what_came_after() -> None:
    clock = Clock()
    times = StageTimes(clock)
    clock.now_s += 4
    assert times.first_token() == 4
    clock.now_s += 3
    assert times.first_token() == 4, "there is only one first token"
    account = [("prefill_queue", 0.5), ("prefill_compute", 3.0), ("prefill_store", 2.0)]
    times.mark_split(account, rest="handover", wire="prefill_wire")
    laps = [(lap.stage, lap.begin_s - 100, lap.end_s - 100) for lap in times.laps()]
    assert laps == [
        ("prefill_queue", 0, 0.5),
        ("prefill_compute", 0.5, 3.5),
        ("prefill_wire", 3.5, 4),
        ("prefill_store", 4, 6),
        ("handover", 6, 7),
    ]


def test_an_account_that_says_more_than_passed_is_cut_to_it() -> None:
    clock = Clock()
    times = StageTimes(clock)
    clock.now_s += 2
    times.first_token()
    clock.now_s += 1
    times.mark_split([("prefill_compute", 8.0), ("prefill_store", 2.0)], rest="handover")
    laps = [(lap.stage, lap.end_s - 100) for lap in times.laps()]
    assert laps == [("prefill_compute", 2), ("prefill_store", 3)]
