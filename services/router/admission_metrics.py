"""What admission counts, as metrics. Plain numbers, read in the thread of whoever scrapes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process import metrics
from services.router.admission import REASONS, Admission

_PREFIX = "baton_router_admission_"


class AdmissionMetrics(Collector):
    """See the module."""

    def __init__(self, admission: Admission, router_id: str) -> None:
        self._admission = admission
        self._labels = {"router_id": router_id}

    def collect(self) -> Iterable[Metric]:
        """All of them, now."""
        admission, labels, counts = self._admission, self._labels, self._admission.counts
        return [
            metrics.gauge(
                f"{_PREFIX}active_requests", "Being served.", labels, admission.num_active
            ),
            metrics.gauge(
                f"{_PREFIX}waiting_requests", "In the fair queue.", labels, admission.num_waiting
            ),
            metrics.gauge(
                f"{_PREFIX}rate_limits_alone",
                "1: Redis does not answer, and this router keeps rate limits by itself.",
                labels,
                float(bool(admission.problem)),
            ),
            metrics.counter(
                f"{_PREFIX}admitted_requests", "Served since start.", labels, counts.num_admitted
            ),
            metrics.counter(
                f"{_PREFIX}waited_requests",
                "Of them, those that waited.",
                labels,
                counts.num_waited,
            ),
            metrics.counters(
                f"{_PREFIX}refused_requests",
                "Refused before any work.",
                labels,
                "reason",
                ((reason, counts.refused[reason]) for reason in REASONS),
            ),
        ]
