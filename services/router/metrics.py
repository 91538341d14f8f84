"""What a router's /metrics shows: requests by how they ended, where their time went, latencies as
clients see them, where prompts' KV came from, how workers were chosen, and whom it knows.

Counted where things happen, on the event loop; prometheus_client's values may be read from the
metrics server's thread at any time. Labels are few and known: no request, no tenant, no worker
beyond its role.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process.metrics import Labels, gauge, gauges
from process.rpc import status_of
from protos import common_pb2, inference_pb2
from services.router.views import Snapshot

REQUEST_BOUNDS_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.4, 0.6, 1.0, 1.5),
    *(2.5, 4.0, 6.0, 10.0, 20.0, 40.0, 80.0, 160.0),
)
"""As the engine's for what happens once a request."""

TOKEN_BOUNDS_S = (
    *(0.000_25, 0.000_5, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
"""As the engine's for what happens once a step."""

_CHOICE_BOUNDS_S = (
    *(0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025, 0.005, 0.01, 0.05),
)
"""A decision is computing only: tens of microseconds for a few workers. Guessed beyond."""


class RouterMetrics(Collector):
    """See the module."""

    def __init__(
        self,
        router_id: str,
        num_in_flight: Callable[[], int],
        snapshot: Callable[[], Snapshot] = Snapshot,
        others: Callable[[Labels], Iterable[Metric]] = lambda labels: (),
    ) -> None:
        """At a scrape, snapshot: of the registry; others: what is counted elsewhere."""
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
        """For one request's messages. elapsed_s: seconds since it arrived; others: told what it
        measures, too."""
        return RequestMeter(self, elapsed_s, others)

    def on_first_token(self, seconds: float) -> None:
        """A request's first token went out."""
        self._first_token.observe(seconds)

    def on_tokens(self, num_tokens: int, since_last_s: float | None) -> None:
        """A sample's tokens went out; None: its first."""
        self._tokens.inc(num_tokens)
        if since_last_s is not None:
            self._between.observe(since_last_s)

    def on_sample_end(self, reason: str, per_token_s: float | None) -> None:
        """A sample's last message went out; None: it had no token after its first ones."""
        self._samples.labels(self._id, reason).inc()
        if per_token_s is not None:
            self._per_token.observe(per_token_s)

    def on_provenance(self, provenance: common_pb2.Provenance) -> None:
        """A request's account went out."""
        for source, num_tokens in prompt_sources(provenance).items():
            self._sources.labels(self._id, source).inc(num_tokens)

    @contextmanager
    def errors_counted(self) -> Iterator[None]:
        """Count what the body raises, by status code."""
        try:
            yield
        except BaseException as error:
            self._errors.labels(self._id, code_of(error)).inc()
            raise

    def on_end(
        self, outcome: str, code: str, seconds: float, stages: Iterable[tuple[str, float]]
    ) -> None:
        """A request ended: finished, failed, cancelled or refused. code: see `code_of`; empty: it
        has finished."""
        self._requests.labels(self._id, outcome, code or "ok").inc()
        for stage, stage_s in stages:
            self._stages.labels(self._id, stage).inc(stage_s)
            if stage == "queue":
                self._queue.observe(stage_s)
        if outcome == "finished":
            self._whole.observe(seconds)

    def on_choice(self, policy: str, unit: str, why: Mapping[str, float], took_s: float) -> None:
        """A pair was chosen. why: its cost by term, in the policy's unit."""
        self._choices.labels(self._id, policy).inc()
        self._choice_time.observe(took_s)
        if unit == "s":  # turns, tokens and requests do not add up with it
            for term, cost_s in why.items():
                self._terms.labels(self._id, term).inc(max(0.0, cost_s))

    def on_lookup(self, seconds: float, *, ok: bool) -> None:
        """The prefix index was asked."""
        self._lookup_time.observe(seconds)
        if not ok:
            self._lookups_failed.inc()

    def on_retry(self, what: str) -> None:
        """A leg failed and another was tried, or the request went on without."""
        self._retries.labels(self._id, what).inc()

    def on_suspect(self, role: str) -> None:
        """A worker failed an RPC."""
        self._suspects.labels(self._id, role).inc()

    def on_probe(self, outcome: str) -> None:
        """A suspected worker was looked at."""
        self._probes.labels(self._id, outcome).inc()

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""
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
    """Who is told what a meter measures of one request."""

    def on_first_token(self, seconds: float) -> None: ...
    def on_sample_end(self, per_token_s: float | None) -> None: ...


class RequestMeter:
    """Measures one request's messages as they go out."""

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
        """A message went out."""
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
    """When one sample's tokens went out, in seconds since its request arrived."""

    def __init__(self, first_s: float) -> None:
        self.first_s = self.last_s = first_s
        self.num_later_tokens = 0

    @property
    def per_token_s(self) -> float | None:
        if not self.num_later_tokens:
            return None
        return (self.last_s - self.first_s) / self.num_later_tokens


def code_of(error: BaseException) -> str:
    """The status that a client sees of it, in small letters."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return status_of(error)[0].name.lower()


def prompt_sources(provenance: common_pb2.Provenance) -> dict[str, int]:
    """Prompt tokens by where the first leg found their KV: computed, local or store. The legs after
    it get theirs from it. Empty when no leg left an account.
    """
    for leg in provenance.legs:
        sources = {
            "computed": leg.num_tokens_computed,
            "local": leg.num_tokens_local,
            "store": sum(count.num_tokens for count in leg.from_store),
        }
        if any(sources.values()):  # else its worker broke, and told nothing
            return sources
    return {}


def _of_registry(snapshot: Snapshot, labels: Labels) -> Iterable[Metric]:
    """Whom the router knows."""
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
