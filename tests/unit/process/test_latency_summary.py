"""Percentiles by their definition, whoever counts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from process.latency_summary import LatencySummary


def test_of_a_hundred() -> None:
    assert LatencySummary.of([0.003]) == LatencySummary(3.0, 3.0, 3.0, 3.0, 3.0, 1)
    hundred = [index / 1000 for index in range(100, 0, -1)]
    assert LatencySummary.of(hundred) == LatencySummary(50.5, 50.0, 90.0, 99.0, 100.0, 100)
    assert LatencySummary.of([*hundred, *hundred, 9.0]).p99_ms == 100.0


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=300))
def test_percentiles_by_their_definition(seconds: list[float]) -> None:
    spread = LatencySummary.of(seconds)
    for share, value_ms in ((50, spread.p50_ms), (90, spread.p90_ms), (99, spread.p99_ms)):
        enough = [
            second
            for second in seconds
            if sum(other <= second for other in seconds) * 100 >= share * len(seconds)
        ]
        assert value_ms == round(min(enough) * 1e3, 3)
