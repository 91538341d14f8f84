"""Stage times sum to the whole, whatever other processes report."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.times import StageTimes


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


seconds = st.floats(0, 1e3)


@given(
    st.lists(st.tuples(seconds, st.lists(st.tuples(st.sampled_from("abc"), st.floats(-1, 1e3)))))
)
def test_stages_sum_to_the_total(laps: list[tuple[float, list[tuple[str, float]]]]) -> None:
    clock = _Clock()
    times = StageTimes(clock)
    for lap_s, parts in laps:
        clock.now_s += lap_s
        times.mark_split(parts, rest="rest")
    assert sum(s for _, s in times.stages()) == pytest.approx(times.total_s, rel=1e-6, abs=1e-6)
    assert all(s >= 0 for _, s in times.stages())


def test_what_the_other_process_did_not_count_is_the_rest() -> None:
    clock = _Clock()
    times = StageTimes(clock)
    clock.now_s += 1
    times.mark("receive")
    clock.now_s += 10
    times.mark_split([("compute", 6.0), ("store", 1.0)], rest="handover")
    clock.now_s += 0.5
    times.mark("handover")
    stages = dict(times.stages())
    assert stages == pytest.approx({"receive": 1, "compute": 6, "store": 1, "handover": 3.5})
