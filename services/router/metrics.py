"""RouterMetrics: the Prometheus metrics of a router, and Traffic, the request counts by model that
the router reports to the autoscaler.

`RouterMetrics` holds requests by outcome, stage times, latencies as clients see them, where the KV
of prompts came from, how workers were chosen, and the known workers and stores. `RequestMeter`
measures one request's messages for it. `HttpMetrics` counts HTTP answers by path and status,
including those rejected before they became a request; the path is the registered route, and all
paths without a route share one label. `AdmissionMetrics` reads the admission's counts at each
scrape. Labels have few values: no request, no tenant, no worker id.

`Traffic` counts, for capacity planning, every request that passed the first checks: once as
arrived, once by its end, and in exactly one place in between. Invariant: arrived = finished +
refused + failed + cancelled + rejected + requests in some place. `make_beat` makes the registry
heartbeat that publishes these counts, and this router's use of adapters for other routers.

Values are updated on one asyncio loop; the metrics server reads them from its own thread at any
time.
"""

from __future__ import annotations

import asyncio
import collections
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from aiohttp import web
from google.protobuf import json_format
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process import metrics
from process.metrics import Labels, gauge, gauges
from process.registry import RedisAccess, RegistryHeartbeat
from process.rpc import status_of
from process.rpc_errors import (
    AlreadyExists,
    Cancelled,
    Internal,
    InvalidArgument,
    NoCapacity,
    Unavailable,
)
from protos import common_pb2, inference_pb2, router_status_pb2
from services.router.admission import REASONS, Admission
from services.router.rate_limit import OverRate
from services.router.worker_views import Snapshot

_PREFIX = "baton_router_admission_"


class AdmissionMetrics(Collector):
    """Prometheus collector of the admission's counts."""

    def __init__(self, admission: Admission, router_id: str) -> None:
        self._admission = admission
        self._labels = {"router_id": router_id}

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as of now."""
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


NO_ROUTE = "(none)"


class HttpMetrics(Collector):
    """Prometheus collector that counts the answers of an aiohttp application."""

    def __init__(self, router_id: str) -> None:
        self._id = router_id
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "baton_router_http_answers",
            "Answers over HTTP, by path and status.",
            ("router_id", "path", "code"),
            registry=self._registry,
        )

    def add_to(self, app: web.Application) -> None:
        """Count the answers of `app`."""
        app.on_response_prepare.append(self._count)

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as of now."""
        return self._registry.collect()

    async def _count(self, request: web.Request, response: web.StreamResponse) -> None:
        """Count an answer when it begins; an aiohttp signal handler."""
        resource = request.match_info.route.resource
        path = resource.canonical if resource is not None else NO_ROUTE
        self._answers.labels(self._id, path, str(response.status)).inc()


class TrafficPlace(Enum):
    """Place of a running request."""

    HELD = "held because there is no worker"
    QUEUED = "waiting to be admitted"
    RUNNING = "admitted"


class TrafficEnd(Enum):
    """Outcome of a request, for capacity planning."""

    FINISHED = "finished"
    REFUSED = "refused"
    FAILED = "failed"
    CANCELLED = "cancelled"
    REJECTED = "rejected"
    """By the request's or its tenant's own fault: more workers would not serve it."""


class Durations:
    """Histogram of durations in seconds."""

    def __init__(self, bounds_s: Sequence[float]) -> None:
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._total_s = 0.0

    def observe(self, seconds: float) -> None:
        """Add a duration."""
        self._counts[bisect_left(self._bounds_s, seconds)] += 1
        self._total_s += seconds

    def to_proto(self) -> router_status_pb2.Durations:
        """Return all durations so far."""
        return router_status_pb2.Durations(
            bounds_s=self._bounds_s, counts=self._counts, total_s=self._total_s
        )


class ModelCounts:
    """Counts of one model since start."""

    def __init__(self) -> None:
        self.num_arrived = 0
        self.ended: collections.Counter[TrafficEnd] = collections.Counter()
        self.places: collections.Counter[TrafficPlace] = collections.Counter()
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self.first_token = Durations(REQUEST_BOUNDS_S)
        self.per_token = Durations(TOKEN_BOUNDS_S)
        self.queue = Durations(REQUEST_BOUNDS_S)

    def to_proto(self, model: str) -> router_status_pb2.ModelTraffic:
        """Return the counts as of now."""
        return router_status_pb2.ModelTraffic(
            model=model,
            num_arrived=self.num_arrived,
            num_finished=self.ended[TrafficEnd.FINISHED],
            num_refused=self.ended[TrafficEnd.REFUSED],
            num_failed=self.ended[TrafficEnd.FAILED],
            num_cancelled=self.ended[TrafficEnd.CANCELLED],
            num_rejected=self.ended[TrafficEnd.REJECTED],
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_output_tokens=self.num_output_tokens,
            first_token=self.first_token.to_proto(),
            per_token=self.per_token.to_proto(),
            queue=self.queue.to_proto(),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            num_held=self.places[TrafficPlace.HELD],
            num_queued=self.places[TrafficPlace.QUEUED],
            num_running=self.places[TrafficPlace.RUNNING],
        )


class RequestTraffic:
    """One request's contribution to the counts of its model."""

    def __init__(self, counts: ModelCounts) -> None:
        self._counts = counts
        self._place = TrafficPlace.QUEUED
        self._num_output_tokens = 0
        self._provenance: common_pb2.Provenance | None = None
        counts.places[self._place] += 1

    def move(self, place: TrafficPlace) -> None:
        """Record that the request is at `place` now."""
        self._counts.places[self._place] -= 1
        self._place = place
        self._counts.places[place] += 1

    def on_first_token(self, seconds: float) -> None:
        """Record the time to first token in seconds."""
        self._counts.first_token.observe(seconds)

    def on_sample_end(self, per_token_s: float | None) -> None:
        """Record the mean seconds per output token of an ended sample; None: it ended with its
        first token."""
        if per_token_s is not None:
            self._counts.per_token.observe(per_token_s)

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        """Count a message that was sent."""
        self._num_output_tokens += len(message.token_ids)
        if message.HasField("provenance"):
            self._provenance = message.provenance

    def on_stages(self, stages: Iterable[tuple[str, float]]) -> None:
        """Add the seconds of each stage; called at the request's end."""
        queue_s = 0.0
        for stage, seconds in stages:
            if stage in _QUEUES:
                queue_s += seconds
            if stage.startswith("prefill_"):
                self._counts.prefill_s += seconds
            elif stage in _DECODES:
                self._counts.decode_s += seconds
        self._counts.queue.observe(queue_s)

    def leave(self, end: TrafficEnd) -> None:
        """Count the request by how it ended."""
        counts, account = self._counts, self._provenance
        counts.places[self._place] -= 1
        counts.ended[end] += 1
        if end is TrafficEnd.FINISHED and account is not None:
            sources = prompt_sources(account)
            counts.num_prompt_tokens += account.num_prompt_tokens
            counts.num_cached_tokens += sources.get("local", 0) + sources.get("store", 0)
            counts.num_output_tokens += self._num_output_tokens


_QUEUES = frozenset({"hold", "queue", "wait_room", "prefill_queue"})
_DECODES = frozenset({"decode_fetch", "decode_queue", "decode", "stream"})


class Traffic:
    """Counts of all models that this router serves."""

    def __init__(self, models: Iterable[str]) -> None:
        self._models = {model: ModelCounts() for model in models}

    @contextmanager
    def follow(self, model: str) -> Iterator[RequestTraffic]:
        """Context manager: count one request for a model while the body serves it."""
        counts = self._models[model]
        counts.num_arrived += 1
        request = RequestTraffic(counts)
        end = TrafficEnd.FINISHED
        try:
            yield request
        except BaseException as error:
            end = _end_of(error)
            raise
        finally:
            request.leave(end)

    def to_proto(self) -> list[router_status_pb2.ModelTraffic]:
        """Return the counts of all models as of now."""
        return [counts.to_proto(model) for model, counts in self._models.items()]

    def check_integrity(self, *, is_idle: bool = False) -> None:
        """Raises: Internal naming the model whose requests do not add up."""
        for model, counts in self._models.items():
            num_here = counts.places.total()
            if counts.num_arrived != counts.ended.total() + num_here:
                raise Internal(f"{model}: {counts.num_arrived} requests arrived, not all are known")
            if min(counts.places.values(), default=0) < 0:
                raise Internal(f"{model}: more requests left a place than came there")
            if is_idle and num_here:
                raise Internal(f"idle, but {num_here} requests for {model} are counted as here")


def _end_of(error: BaseException) -> TrafficEnd:
    """Return the outcome of a request that ended with `error`."""
    if isinstance(error, OverRate | InvalidArgument | AlreadyExists):
        return TrafficEnd.REJECTED
    if isinstance(error, NoCapacity | Unavailable):
        return TrafficEnd.REFUSED
    if isinstance(error, asyncio.CancelledError | Cancelled | GeneratorExit):
        return TrafficEnd.CANCELLED
    return TrafficEnd.FAILED


KIND = "router"


def make_beat(
    redis_url: str,
    access: RedisAccess,
    *,
    router_id: str,
    incarnation: str,
    address: Callable[[], str],
    traffic: Traffic,
    adapters: Callable[[], Iterable[router_status_pb2.RouterAdapter]],
) -> RegistryHeartbeat:
    """Return the heartbeat of this router's registry entry, not started.

    Args: address: returns the address at which this router serves; called once it serves.
    """

    began_s = time.monotonic()

    def entry() -> str:
        status = router_status_pb2.RouterStatus(
            router_id=router_id,
            incarnation=incarnation,
            address=address(),
            models=traffic.to_proto(),
            uptime_s=time.monotonic() - began_s,
            adapters=adapters(),
        )
        return json_format.MessageToJson(status, indent=None)

    return RegistryHeartbeat(
        redis_url,
        KIND,
        entry_id=router_id,
        incarnation=incarnation,
        entry=entry,
        access=access,
    )


REQUEST_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5),
    *(2.5, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
"""Histogram buckets for what happens once a request; the same as the engine's."""

TOKEN_BOUNDS_S = (
    *(0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""Histogram buckets for what happens once a step; the same as the engine's."""

_CHOICE_BOUNDS_S = (
    *(0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.05),
)
"""Histogram buckets for a placement decision, which is pure computation: tens of microseconds for
a few workers. The upper ones are guessed."""


class RouterMetrics(Collector):
    """Prometheus collector of all metrics of a router's requests."""

    def __init__(
        self,
        router_id: str,
        num_in_flight: Callable[[], int],
        snapshot: Callable[[], Snapshot] = Snapshot,
        others: Callable[[Labels], Iterable[Metric]] = lambda labels: (),
    ) -> None:
        """num_in_flight: returns the requests in flight.
        snapshot: returns the registry's snapshot at a scrape.
        others: returns metrics that are counted elsewhere, at a scrape."""
        self._registry = CollectorRegistry()
        self._id = router_id
        self._snapshot = snapshot
        self._others = others
        self._requests = self._counter(
            "requests",
            "Requests that ended, by outcome and, where it is no answer, by status code.",
            "outcome",
            "code",
        )
        self._errors = self._counter(
            "errors", "Requests that ended with an error, before or after work began.", "code"
        )
        self._samples = self._counter("samples", "Samples that ended.", "reason")
        self._stages = self._counter("stage_seconds", "Time of ended requests.", "stage")
        self._sources = self._counter(
            "prompt_tokens", "Prompt tokens of finished requests by where their KV was.", "source"
        )
        self._tokens = self._counter("output_tokens", "Shown to clients.").labels(router_id)
        self._first_token = self._histogram(
            "time_to_first_token",
            "From arrival to the first message with a token.",
            REQUEST_BOUNDS_S,
        )
        self._between = self._histogram(
            "inter_token_latency", "Between two messages of one sample.", TOKEN_BOUNDS_S
        )
        self._per_token = self._histogram(
            "time_per_output_token", "Mean per ended sample, its first left out.", TOKEN_BOUNDS_S
        )
        self._whole = self._histogram(
            "request", "From arrival to the end, of finished requests.", REQUEST_BOUNDS_S
        )
        self._queue = self._histogram(
            "queue", "Waiting to be admitted; 0 of those that did not wait.", REQUEST_BOUNDS_S
        )
        self._choices = self._counter("choices", "Decisions for a pair of workers.", "policy")
        self._terms = self._counter(
            "choice_cost_seconds",
            "What the chosen pairs were reckoned to cost, by policies that reckon in time.",
            "term",
        )
        self._choice_time = self._histogram("choice", "One decision.", _CHOICE_BOUNDS_S)
        self._lookup_time = self._histogram("lookup", "One prefix lookup.", TOKEN_BOUNDS_S)
        self._lookups_failed = self._counter(
            "lookups_failed", "Prefix lookups without an answer: the request went on without."
        ).labels(router_id)
        self._retries = self._counter("retries", "Legs tried again or given up.", "what")
        self._suspects = self._counter("suspects", "Times that a worker was suspected.", "role")
        self._probes = self._counter("probes", "Looks at suspected workers.", "outcome")
        in_flight = Gauge(
            "baton_router_requests_in_flight",
            "Requests that are being served or wait for it.",
            ("router_id",),
            registry=self._registry,
        ).labels(router_id)
        in_flight.set_function(num_in_flight)

    def meter(
        self, elapsed_s: Callable[[], float], *, others: Sequence[LatencyListener] = ()
    ) -> RequestMeter:
        """Return a meter for one request's messages.

        Args:
            elapsed_s: returns the seconds since the request arrived.
            others: called with the same measurements.
        """
        return RequestMeter(self, elapsed_s, others)

    def on_first_token(self, seconds: float) -> None:
        """Record a request's time to first token in seconds."""
        self._first_token.observe(seconds)

    def on_tokens(self, num_tokens: int, since_last_s: float | None) -> None:
        """Count tokens of a sample that were sent.

        Args: since_last_s: seconds since the sample's last message; None: it is the first one.
        """
        self._tokens.inc(num_tokens)
        if since_last_s is not None:
            self._between.observe(since_last_s)

    def on_sample_end(self, reason: str, per_token_s: float | None) -> None:
        """Record a sample that ended.

        Args: per_token_s: mean seconds per token; None: no token came after its first message.
        """
        self._samples.labels(self._id, reason).inc()
        if per_token_s is not None:
            self._per_token.observe(per_token_s)

    def on_provenance(self, provenance: common_pb2.Provenance) -> None:
        """Count the prompt tokens of a finished request by where their KV was."""
        for source, num_tokens in prompt_sources(provenance).items():
            self._sources.labels(self._id, source).inc(num_tokens)

    @contextmanager
    def errors_counted(self) -> Iterator[None]:
        """Context manager: count what the body raises, by status code."""
        try:
            yield
        except BaseException as error:
            self._errors.labels(self._id, code_of(error)).inc()
            raise

    def on_end(
        self, outcome: str, code: str, seconds: float, stages: Iterable[tuple[str, float]]
    ) -> None:
        """Record a request that ended.

        Args:
            outcome: finished, failed, cancelled or refused.
            code: see `code_of`; empty: it has finished.
            seconds: from arrival to the end.
            stages: (stage, seconds).
        """
        self._requests.labels(self._id, outcome, code or "ok").inc()
        for stage, stage_s in stages:
            self._stages.labels(self._id, stage).inc(stage_s)
            if stage == "queue":
                self._queue.observe(stage_s)
        if outcome == "finished":
            self._whole.observe(seconds)

    def on_choice(self, policy: str, unit: str, why: Mapping[str, float], took_s: float) -> None:
        """Record a placement decision.

        Args:
            unit: of the policy's cost.
            why: cost of the chosen pair by term, in that unit.
            took_s: seconds that the decision took.
        """
        self._choices.labels(self._id, policy).inc()
        self._choice_time.observe(took_s)
        if unit == "s":  # the metric is in seconds; other units are not added to it
            for term, cost_s in why.items():
                self._terms.labels(self._id, term).inc(max(0.0, cost_s))

    def on_lookup(self, seconds: float, *, ok: bool) -> None:
        """Record a lookup in the prefix index."""
        self._lookup_time.observe(seconds)
        if not ok:
            self._lookups_failed.inc()

    def on_retry(self, what: str) -> None:
        """Count a worker's failure after which another worker was tried, or the request went on
        without."""
        self._retries.labels(self._id, what).inc()

    def on_suspect(self, role: str) -> None:
        """Count a worker that failed an RPC."""
        self._suspects.labels(self._id, role).inc()

    def on_probe(self, outcome: str) -> None:
        """Count a probe of a suspected worker."""
        self._probes.labels(self._id, outcome).inc()

    def collect(self) -> Iterable[Metric]:
        """Return all metrics as of now."""
        labels = {"router_id": self._id}
        yield gauge("baton_up", "1 while the process answers.", labels, 1)
        yield from _of_registry(self._snapshot(), labels)
        yield from self._others(labels)
        yield from self._registry.collect()

    def _counter(self, name: str, text: str, *by: str) -> Counter:
        labels = ("router_id", *by)
        return Counter(f"baton_router_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        name = f"baton_router_{name}_seconds"
        made = Histogram(name, text, ("router_id",), registry=self._registry, buckets=bounds)
        return made.labels(self._id)


class LatencyListener(Protocol):
    """Receiver of the latencies that a RequestMeter measures."""

    def on_first_token(self, seconds: float) -> None: ...
    def on_sample_end(self, per_token_s: float | None) -> None: ...


class RequestMeter:
    """Latency measurement of one request's messages as they are sent."""

    def __init__(
        self,
        metrics: RouterMetrics,
        elapsed_s: Callable[[], float],
        others: Sequence[LatencyListener],
    ) -> None:
        self._metrics = metrics
        self._others = others
        self._elapsed_s = elapsed_s
        self._is_first = True
        self._samples: dict[int, _SampleTimes] = {}

    def on_message(self, message: inference_pb2.GenerateResponse) -> None:
        """Measure a message that was sent."""
        now_s, num_tokens = self._elapsed_s(), len(message.token_ids)
        sample = self._samples.get(message.sample_index)
        if num_tokens:
            if self._is_first:
                self._is_first = False
                self._metrics.on_first_token(now_s)
                for other in self._others:
                    other.on_first_token(now_s)
            if sample is None:
                self._samples[message.sample_index] = sample = _SampleTimes(now_s)
                self._metrics.on_tokens(num_tokens, None)
            else:
                self._metrics.on_tokens(num_tokens, now_s - sample.last_s)
                sample.last_s = now_s
                sample.num_later_tokens += num_tokens
        if message.finish_reason:
            name = common_pb2.FinishReason.Name(message.finish_reason)
            reason = name.removeprefix("FINISH_REASON_").lower()
            per_token_s = sample.per_token_s if sample else None
            self._metrics.on_sample_end(reason, per_token_s)
            for other in self._others:
                other.on_sample_end(per_token_s)
        if message.HasField("provenance"):
            self._metrics.on_provenance(message.provenance)


class _SampleTimes:
    """Times at which one sample's tokens were sent, in seconds since the request arrived."""

    def __init__(self, first_s: float) -> None:
        self.first_s = self.last_s = first_s
        self.num_later_tokens = 0

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds per token after the first message; None: there was no such token."""
        if not self.num_later_tokens:
            return None
        return (self.last_s - self.first_s) / self.num_later_tokens


def code_of(error: BaseException) -> str:
    """Return the status code that a client sees for `error`, in lower case."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return status_of(error)[0].name.lower()


def prompt_sources(provenance: common_pb2.Provenance) -> dict[str, int]:
    """Return prompt tokens by where the first worker found their KV: computed, local or store.
    Later workers get the KV from that worker. Empty when no worker left an account."""
    for leg in provenance.legs:
        sources = {
            "computed": leg.num_tokens_computed,
            "local": leg.num_tokens_local,
            "store": sum(count.num_tokens for count in leg.from_store),
        }
        if any(sources.values()):  # else the worker failed and gave no account
            return sources
    return {}


def _of_registry(snapshot: Snapshot, labels: Labels) -> Iterable[Metric]:
    """Return metrics of the workers and stores that the router knows."""
    states = dict.fromkeys(("prefill", "prefill_draining", "decode", "decode_draining"), 0)
    for worker in snapshot.workers:
        state = f"{worker.role}_draining" if worker.is_draining else worker.role
        if state in states:
            states[state] += 1
    yield gauges(
        "baton_router_workers", "Workers that live, by role.", labels, "role", states.items()
    )
    yield gauge("baton_router_stores", "KV stores that live.", labels, len(snapshot.stores))
    yield gauge(
        "baton_router_redis_reachable",
        "0: workers and stores are as last known, and nothing is looked up.",
        labels,
        snapshot.is_redis_reachable,
    )
