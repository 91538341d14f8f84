"""Prometheus metrics of the autoscaler: the actual and the wanted sizes of the pools, decisions by
reason, the age of the signals, and the figures that the last decision was made from.

The metrics are made in the event loop at each scrape. Labels have few, known values;
docs/metrics.md lists all metrics. An HPA scales by the wanted workers and adds up what all replicas
show, so only the leader shows them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

from process import metrics
from process.metrics import Labels, gauge, gauges
from services.autoscaler.decision import Decision, DecisionLog
from services.autoscaler.signals import ByRole, Observations, Role

_OUTCOMES = ("done", "ordered", "failed", "not_leader", "advised")
_NEVER_S = 1e9
"""Age in seconds shown for a signal that is missing; more than any real age."""

SILENCE_S = 60.0
"""Seconds for which a new leader does not show the wanted workers yet: Prometheus may still hold
the last values of the leader before it, and the HPA would add both up. A missing metric changes no
pool."""


def read(
    labels: Labels,
    records: DecisionLog,
    observations: Observations | None,
    *,
    wanted: ByRole[int] | None,
    is_leader: bool,
    num_problems: int,
) -> Sequence[Metric]:
    """Return all metrics.

    Args:
        observations: the last ones; None: there are none yet.
        wanted: wanted workers of each role; None: this replica does not show them.
        num_problems: present problems.
    """
    return list(_read(labels, records, observations, wanted, is_leader, num_problems))


def silent(labels: Labels) -> Sequence[Metric]:
    """Return the metrics for a scrape that the event loop did not answer."""
    return [gauge("baton_up", "1 while the process answers.", labels, 0)]


def _read(
    labels: Labels,
    records: DecisionLog,
    observations: Observations | None,
    wanted: ByRole[int] | None,
    is_leader: bool,
    num_problems: int,
) -> Iterator[Metric]:
    yield gauge("baton_up", "1 while the process answers.", labels, 1)
    yield gauge(
        "baton_autoscaler_leader",
        "1 while this one leads: it acts or, with act=false, says what is wanted.",
        labels,
        is_leader,
    )
    yield gauge(
        "baton_autoscaler_problems",
        "What is not as it should be; `baton autoscale` names it.",
        labels,
        num_problems,
    )
    yield _decisions(labels, records)
    yield metrics.counters(
        "baton_autoscaler_actions",
        "Decisions that were to change something, by what became of them.",
        labels,
        "outcome",
        [(outcome, records.outcomes[outcome]) for outcome in _OUTCOMES],
    )
    if observations is not None:
        yield from _pools(labels, observations)
        yield from _signals(labels, observations)
    if wanted is not None:
        yield _wanted(labels, wanted)
    last = records.last
    if last is not None:
        yield _terms(labels, last.decision)


def _decisions(labels: Labels, records: DecisionLog) -> Metric:
    family = CounterMetricFamily(
        "baton_autoscaler_decisions",
        "Decisions by direction and reason.",
        labels=(*labels, "direction", "reason"),
    )
    for (direction, reason), count in sorted(records.counts.items()):
        family.add_metric((*labels.values(), direction, reason), count)
    return family


def _pools(labels: Labels, observations: Observations) -> Iterator[Metric]:
    pools = {role.value: observations.pools.of(role) for role in Role}
    yield gauges(
        "baton_autoscaler_asked_workers",
        "Workers that were asked for when it looked last.",
        labels,
        "role",
        [(role, pool.wanted) for role, pool in pools.items()],
    )
    yield gauges(
        "baton_autoscaler_ready_workers",
        "Workers that serve.",
        labels,
        "role",
        [(role, pool.num_ready) for role, pool in pools.items()],
    )
    yield gauges(
        "baton_autoscaler_draining_workers",
        "Workers on their way out.",
        labels,
        "role",
        [(role, pool.num_draining) for role, pool in pools.items()],
    )
    yield gauge(
        "baton_autoscaler_flips_under_way",
        "Workers that change their role now.",
        labels,
        observations.num_flipping,
    )


def _signals(labels: Labels, observations: Observations) -> Iterator[Metric]:
    workers = [worker for role in Role for worker in observations.pools.of(role).workers]
    ages = [
        ("routers", observations.routers_age_s),
        ("scale", observations.scale_age_s),
        ("workers", max((worker.age_s for worker in workers), default=0.0)),
    ]
    yield gauges(
        "baton_autoscaler_signal_age_seconds",
        "How old what it decides from is; the oldest of each kind.",
        labels,
        "signal",
        [(name, age_s if math.isfinite(age_s) else _NEVER_S) for name, age_s in ages],
    )
    traffic = observations.traffic
    if traffic is not None:
        levels = [
            ("held", traffic.num_waiting),
            ("queued", traffic.num_queued),
            ("running", traffic.num_running),
        ]
        yield gauges(
            "baton_autoscaler_requests", "Requests in all routers.", labels, "place", levels
        )
        rate = traffic.num_arrived / traffic.elapsed_s
        yield gauge("baton_autoscaler_arrivals_per_second", "As last seen.", labels, rate)


def _wanted(labels: Labels, wanted: ByRole[int]) -> Metric:
    return gauges(
        "baton_autoscaler_wanted_workers",
        "Workers that there shall be, by the leader's last decision; others do not show it.",
        labels,
        "role",
        [(role.value, wanted.of(role)) for role in Role],
    )


def _terms(labels: Labels, decision: Decision) -> Metric:
    return gauges(
        "baton_autoscaler_term",
        "What the last decision was made from; units are in the names.",
        labels,
        "term",
        [(name, value) for name, value in sorted(decision.terms.items()) if math.isfinite(value)],
    )
