"""What a router's /metrics shows: requests by how they ended, where their time went, and tokens.

Counted where things happen, on the event loop; prometheus_client's values may be read from the
metrics server's thread at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from protos import common_pb2, inference_pb2

_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5),
    *(2.5, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
"""As the engine's for what happens once a request."""


class RouterMetrics(Collector):
    """See the module."""

    def __init__(self, router_id: str, num_in_flight: Callable[[], int]) -> None:
        self._registry = registry = CollectorRegistry()
        names = ("router_id",)
        self._id = router_id
        self._requests = Counter(
            "baton_router_requests",
            "Requests that ended, by outcome.",
            (*names, "outcome"),
            registry=registry,
        )
        self._samples = Counter(
            "baton_router_samples",
            "Samples that ended, by finish reason.",
            (*names, "reason"),
            registry=registry,
        )
        self._stages = Counter(
            "baton_router_stage_seconds",
            "Time of ended requests, by stage.",
            (*names, "stage"),
            registry=registry,
        )
        self._tokens = Counter(
            "baton_router_output_tokens", "Shown to clients.", names, registry=registry
        ).labels(router_id)
        self._first_token = Histogram(
            "baton_router_time_to_first_token_seconds",
            "From arrival to the first message with a token.",
            names,
            registry=registry,
            buckets=_BOUNDS_S,
        ).labels(router_id)
        self._whole = Histogram(
            "baton_router_request_seconds",
            "From arrival to the end, of finished requests.",
            names,
            registry=registry,
            buckets=_BOUNDS_S,
        ).labels(router_id)
        in_flight = Gauge(
            "baton_router_requests_in_flight", "Now.", names, registry=registry
        ).labels(router_id)
        in_flight.set_function(num_in_flight)

    def on_first_token(self, seconds: float) -> None:
        """A request's first token went out."""
        self._first_token.observe(seconds)

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        """A message went out."""
        self._tokens.inc(len(message.token_ids))
        if message.finish_reason:
            name = common_pb2.FinishReason.Name(message.finish_reason)
            reason = name.removeprefix("FINISH_REASON_").lower()
            self._samples.labels(self._id, reason).inc()

    def on_end(self, outcome: str, seconds: float, stages: Iterable[tuple[str, float]]) -> None:
        """A request ended: finished, failed or refused."""
        self._requests.labels(self._id, outcome).inc()
        for stage, stage_s in stages:
            self._stages.labels(self._id, stage).inc(stage_s)
        if outcome == "finished":
            self._whole.observe(seconds)

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""
        return self._registry.collect()
