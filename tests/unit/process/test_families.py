"""Families out of plain numbers: what is written is what Prometheus reads."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process import families
from tests.harness import exposition

WHO = {"worker_id": "w", "role": "decode"}


class _Given(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self._metrics


def _read(*metrics: Metric) -> dict[str, exposition.Family]:
    registry = CollectorRegistry()
    registry.register(_Given(*metrics))
    return exposition.read(generate_latest(registry).decode())


def test_one_and_several_of_each_kind() -> None:
    found = _read(
        families.gauge("baton_level", "A level.", WHO, 2),
        families.gauges("baton_levels", "Levels.", WHO, "state", [("a", 1), ("b", 0)]),
        families.counter("baton_things", "Things.", WHO, 3),
        families.counters("baton_kinds", "Kinds.", WHO, "reason", []),
        families.spans(WHO, 5, 0, 1),
    )
    assert found["baton_level"].samples[0].labels == WHO
    assert [s.value for s in found["baton_levels"].samples] == [1, 0]
    assert found["baton_things_total"].samples[0].value == 3
    assert found["baton_kinds_total"].samples == ()
    assert {s.labels["outcome"]: s.value for s in found["baton_trace_spans_total"].samples} == {
        "exported": 5,
        "failed": 0,
        "dropped": 1,
    }


def test_a_histogram_counts_as_prometheus_does(seed: int, scale: Callable[[int], int]) -> None:
    """Each bucket holds all that is at most its bound."""
    random_ = random.Random(seed)
    for _ in range(scale(200)):
        bounds = sorted({round(random_.uniform(0.001, 9), 3) for _ in range(random_.randrange(8))})
        values = [random_.uniform(0, 10) for _ in range(random_.randrange(20))]
        counts = [0] * (len(bounds) + 1)
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        made = families.histogram("baton_x_seconds", "X.", WHO, bounds, counts, sum(values))
        samples = _read(made)["baton_x_seconds"].samples
        for sample in samples:
            if sample.name.endswith("_bucket"):
                at_most = sum(value <= float(sample.labels["le"]) for value in values)
                assert sample.value == at_most, (sample, values)
            elif sample.name.endswith("_count"):
                assert sample.value == len(values)
