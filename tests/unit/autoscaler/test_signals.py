"""Histograms, and values of both pools."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process.settings import SettingsError
from services.autoscaler.config import Pace, PoolLimits, Priors, ScaleLimits, Targets
from services.autoscaler.signals import DurationCounts, ObservedTraffic, Pool

COUNTS = st.lists(st.integers(0, 50), min_size=5, max_size=5).map(tuple)
BOUNDS_S = (0.1, 0.5, 1.0, 4.0)


def test_quantiles_lie_between_their_bounds() -> None:
    found = DurationCounts(BOUNDS_S, (0, 10, 10, 0, 0))
    assert found.quantile(0.25) == pytest.approx(0.3)
    assert found.quantile(0.5) == pytest.approx(0.5)
    assert found.quantile(1.0) == pytest.approx(1.0)
    assert DurationCounts(BOUNDS_S, (0, 0, 0, 0, 3)).quantile(0.5) == 4.0
    assert DurationCounts().quantile(0.5) is None
    assert DurationCounts(BOUNDS_S, (0,) * 5).quantile(0.5) is None


@given(COUNTS, st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_quantiles_ascend_and_are_within_their_share(
    counts: tuple[int, ...], low: float, high: float
) -> None:
    found = DurationCounts(BOUNDS_S, counts)
    low, high = sorted((low, high))
    first, second = found.quantile(low), found.quantile(high)
    if not found.total:
        assert first is second is None
        return
    assert first is not None and second is not None and first <= second
    within = found.share_within(second)
    assert within is not None
    # Beyond the last bound nothing is known.
    assert within >= min(high, sum(counts[:-1]) / found.total) - 1e-9


@given(COUNTS, COUNTS)
def test_histograms_add_up(one: tuple[int, ...], two: tuple[int, ...]) -> None:
    both = DurationCounts(BOUNDS_S, one).plus(DurationCounts(BOUNDS_S, two))
    assert both.total == sum(one) + sum(two)
    assert both.plus(DurationCounts()) == both == DurationCounts().plus(both)


@pytest.mark.parametrize(
    ("bounds_s", "counts"),
    [((1.0, 1.0), (0, 0, 0)), ((2.0, 1.0), (0, 0, 0)), ((1.0,), (0,)), ((1.0,), (0, -1))],
)
def test_histograms_that_make_no_sense_are_refused(
    bounds_s: tuple[float, ...], counts: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError):
        DurationCounts(bounds_s, counts)


def test_histograms_of_other_bounds_are_not_added() -> None:
    with pytest.raises(ValueError, match="other bounds"):
        DurationCounts((1.0,), (1, 1)).plus(DurationCounts((2.0,), (1, 1)))


def test_no_time_is_no_traffic() -> None:
    with pytest.raises(ValueError, match="elapsed_s"):
        ObservedTraffic(0.0)


def test_a_pools_devices_are_those_of_all_who_are_there() -> None:
    assert Pool(wanted=3, num_ready=1, num_draining=2).num_present == 5
    assert Pool(wanted=1, num_ready=3).num_present == 3
    assert Pool(wanted=3, num_ready=1).num_starting == 2


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Targets(ttft_s=0), "ttft_s"),
        (lambda: Targets(tpot_s=float("nan")), "tpot_s"),
        (lambda: Targets(quantile=1.0), "quantile"),
        (lambda: PoolLimits(min_workers=-1), "min_workers"),
        (lambda: PoolLimits(min_workers=3, max_workers=2), "max_workers"),
        (lambda: PoolLimits(num_devices=0), "num_devices"),
        (lambda: ScaleLimits(budget_devices=1), "budget_devices: 1 do not suffice"),
        (lambda: ScaleLimits(PoolLimits(0), PoolLimits(0), 1), "budget_devices"),
        (lambda: ScaleLimits(budget_devices=-1), "budget_devices"),
        (lambda: ScaleLimits(max_added_workers=0), "max_added_workers"),
        (lambda: Pace(up_s=-1), "up_s"),
        (lambda: Pace(window_s=0), "window_s"),
        (lambda: Pace(up_s=30, down_s=10), "down_s"),
        (lambda: Priors(max_utilisation=1.0), "max_utilisation"),
        (lambda: Priors(decode_step_s=0), "decode_step_s"),
    ],
)
def test_settings_out_of_range_name_their_field(make: object, field: str) -> None:
    assert callable(make)
    with pytest.raises(SettingsError, match=field):
        make()
