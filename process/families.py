"""Metric families out of plain numbers: what a collector yields that reads its counts where they
are kept, instead of keeping them twice.

`labels` says who a sample is of (a worker's id and role, a store's node id) and stands on every
sample of a process. `by` is the one further label, whose values are few and known: reasons,
classes, directions; never a request's id. Pure, any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.metrics_core import Metric

Labels = Mapping[str, str]


def gauge(name: str, text: str, labels: Labels, level: float) -> Metric:
    """One level, which goes up and down."""
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), float(level))
    return family


def gauges(
    name: str, text: str, labels: Labels, by: str, levels: Iterable[tuple[str, float]]
) -> Metric:
    """One level for each value of the label `by`."""
    family = GaugeMetricFamily(name, text, labels=(*labels, by))
    for value, level in levels:
        family.add_metric((*labels.values(), value), float(level))
    return family


def counter(name: str, text: str, labels: Labels, count: float) -> Metric:
    """One count since start, which never goes down; `_total` is added to its name."""
    family = CounterMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), count)
    return family


def counters(
    name: str, text: str, labels: Labels, by: str, counts: Iterable[tuple[str, float]]
) -> Metric:
    """One count for each value of the label `by`."""
    family = CounterMetricFamily(name, text, labels=(*labels, by))
    for value, count in counts:
        family.add_metric((*labels.values(), value), count)
    return family


def spans(labels: Labels, num_exported: int, num_failed: int, num_dropped: int) -> Metric:
    """What became of a process's trace spans."""
    ends = (("exported", num_exported), ("failed", num_failed), ("dropped", num_dropped))
    text = "Trace spans that ended and do not wait to be sent."
    return counters("baton_trace_spans", text, labels, "outcome", ends)


def histogram(
    name: str,
    text: str,
    labels: Labels,
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> Metric:
    """`counts[i]` observations were at most `bounds[i]` and above the bound before, the last count
    is of those above all bounds; `total` is their sum. Prometheus counts what is at most each
    bound, all smaller ones included.
    """
    family = HistogramMetricFamily(name, text, labels=tuple(labels))
    buckets: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip((*bounds, None), counts, strict=True):
        so_far += count
        buckets.append(("+Inf" if bound is None else repr(bound), so_far))
    family.add_metric(tuple(labels.values()), buckets, total)
    return family
