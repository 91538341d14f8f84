"""Tracing: which requests of one process are traced, and where their spans go.

A router begins traces: it follows the decision that came with the request, else it takes its share
of them. Workers and stores only follow: a call without a sampled context is nobody's. Off (no
endpoint), nothing is ever recorded and OpenTelemetry is not imported.

Life: made with the process -> `start` -> spans end at any time, on any thread -> `stop`, which
sends what waits within its bound. Knows no stage and no RPC; the way out is process/span_export.py.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from process import spans, trace_context
from process.settings import SettingsError, check_host_port
from process.spans import Attributes, Kind, Link, Recording, Span, SpanData
from process.trace_context import TraceContext


@dataclass(frozen=True)
class TracingSettings:
    """Traces of requests, for an OpenTelemetry collector."""

    endpoint: str = ""
    """host:port of an OTLP receiver (gRPC); empty: no traces."""

    ca_file: str = ""
    """PEM file of the authority that the receiver's certificate is from; empty: a connection in
    the clear, for a receiver on this host or in this pod."""

    sample_ratio: float = 1.0
    """Share of the requests that are traced, of those that do not say so themselves. The router's:
    workers and stores follow it."""

    follow_callers: bool = True
    """Whether a request's own traceparent decides if it is traced. False: `sample_ratio` decides
    for all, and the caller's trace is linked to."""

    max_followed_per_s: float = 200.0
    """Traces a second beyond `sample_ratio` that the traceparents of callers may have sampled. A
    trace costs work, and every caller may ask for one with each request. One that `sample_ratio`
    takes anyway does not count: with a ratio of 1 all are joined."""

    baggage: tuple[str, ...] = ()
    """Keys of a request's W3C baggage that become attributes of its span. Others are passed
    over."""

    max_waiting_spans: int = 8192
    """Spans that wait to be sent; one more is dropped and counted."""

    send_interval_s: float = 1.0
    """How often spans are sent."""

    send_timeout_s: float = 5.0
    """For one attempt to send a batch."""

    stop_timeout_s: float = 2.0
    """How long a stopping process tries to send what waits."""

    def __post_init__(self) -> None:
        check_host_port("tracing.endpoint", self.endpoint)
        if self.ca_file and not self.endpoint:
            raise SettingsError("tracing.ca_file: there is no tracing.endpoint")
        if not 0 <= self.sample_ratio <= 1:
            raise SettingsError(
                f"tracing.sample_ratio: must be from 0 to 1, got {self.sample_ratio}"
            )
        if self.max_waiting_spans < 1:
            raise SettingsError("tracing.max_waiting_spans: must be at least 1")
        if not 0 < self.max_followed_per_s <= 1e6:
            raise SettingsError(
                "tracing.max_followed_per_s: must be above 0; follow_callers=false follows nobody"
            )
        for name in ("send_interval_s", "send_timeout_s", "stop_timeout_s"):
            if not 0 < getattr(self, name) <= 3600:
                raise SettingsError(f"tracing.{name}: must be above 0 and at most 3600")


@dataclass
class SpanCounters:
    """Spans since start. Law: ended = exported + failed + dropped + those that wait."""

    num_ended: int = 0
    num_exported: int = 0
    num_failed: int = 0
    """Sent in vain."""
    num_dropped: int = 0
    """No room to wait."""


class Exporter(Protocol):
    """Where spans go."""

    counters: SpanCounters

    def start(self) -> None: ...
    def take(self, span: SpanData) -> None:
        """One that is over. Any thread; never waits."""

    def check_integrity(self) -> None:
        """Raises: Internal when a span is lost track of."""

    def stop(self, timeout_s: float) -> None:
        """Send what waits, and end. Blocking, for about so long at most."""


class _Allowance:
    """So many a second on average, and those of one second at once. Any thread: off by one then."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self.num_refused = 0
        self._per_s = per_s
        self._most = self._left = max(1.0, per_s)
        self._clock = clock
        self._at_s = clock()

    def take(self) -> bool:
        """Whether there is one more."""
        now_s = self._clock()
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            self.num_refused += 1
            return False
        self._left -= 1.0
        return True


class Tracing:
    """See the module. Without an exporter it is off."""

    def __init__(
        self,
        settings: TracingSettings | None = None,
        exporter: Exporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or TracingSettings()
        self._exporter = exporter
        self._callers = _Allowance(self._settings.max_followed_per_s, clock)

    @property
    def num_not_followed(self) -> int:
        """Callers who wanted a trace and were too many."""
        return self._callers.num_refused

    @classmethod
    def of(cls, settings: TracingSettings, component: str, instance_id: str) -> Tracing:
        """As the settings say, for one life of one process.

        Raises: SettingsError when OpenTelemetry is not installed, or `ca_file` cannot be read.
        """
        if not settings.endpoint:
            return cls(settings)
        from process.span_export import OtlpExporter

        return cls(settings, OtlpExporter(settings, component, instance_id))

    @staticmethod
    def check(settings: TracingSettings) -> None:
        """For a process that takes long to start. Raises: as `of`."""
        if settings.endpoint:
            from process import span_export

            span_export.check(settings)

    @property
    def is_on(self) -> bool:
        return self._exporter is not None

    @property
    def counters(self) -> SpanCounters:
        """What became of the spans."""
        return self._exporter.counters if self._exporter is not None else SpanCounters()

    def start(self) -> None:
        """Begin to send."""
        if self._exporter is not None:
            self._exporter.start()

    def stop(self) -> None:
        """Send what waits; blocking, bounded. Idempotent."""
        if self._exporter is not None:
            self._exporter.stop(self._settings.stop_timeout_s)

    def check_integrity(self) -> None:
        """Raises: Internal when a span is lost track of."""
        if self._exporter is not None:
            self._exporter.check_integrity()

    def begin(self, name: str, headers: Mapping[str, str], *, begin_s: float | None = None) -> Span:
        """The span of a request that came from outside, with whatever headers it had."""
        if self._exporter is None:
            return spans.NOBODY
        settings = self._settings
        caller = trace_context.from_headers(headers) if headers else None
        parent = caller if settings.follow_callers else None
        # By an id of our own: the caller's may be chosen so that the share takes it.
        trace_id = _new_trace_id()
        is_sampled = trace_context.is_taken(trace_id, settings.sample_ratio)
        if parent is not None:
            is_sampled = parent.is_sampled and (is_sampled or self._callers.take())
            trace_id = parent.trace_id
        if not is_sampled:
            return spans.NOBODY
        span = self._record(name, trace_id, parent, kind=Kind.SERVER, begin_s=begin_s)
        if caller is not None and parent is None:
            span.link(caller)
        for key, value in trace_context.baggage(
            headers.get(trace_context.BAGGAGE, ""), settings.baggage
        ).items():
            span.set({f"baggage.{key}": value})
        return span

    def follow(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes | None = None,
        *,
        begin_s: float | None = None,
    ) -> Span:
        """The span of a call that another process of ours made; NOBODY's unless it is sampled."""
        if self._exporter is None or parent is None or not parent.is_sampled:
            return spans.NOBODY
        return self._record(
            name, parent.trace_id, parent, kind=Kind.SERVER, begin_s=begin_s, attributes=attributes
        )

    def linked(
        self, name: str, links: Sequence[Link], attributes: Attributes | None = None
    ) -> Span:
        """The span of work that no request asked for: a trace of its own, if it has to do with one
        that was sampled."""
        if self._exporter is None or not links:
            return spans.NOBODY
        span = self._record(name, _new_trace_id(), None, kind=Kind.INTERNAL, attributes=attributes)
        for link in links:
            span.link(link.context, link.attributes)
        return span

    def _record(
        self,
        name: str,
        trace_id: int,
        parent: TraceContext | None,
        *,
        kind: Kind,
        begin_s: float | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        assert self._exporter is not None
        state = parent.state if parent is not None else ""
        return Recording(
            self._exporter.take,
            name,
            TraceContext(trace_id, spans.new_span_id(), True, state),
            parent,
            is_parent_remote=parent is not None,
            kind=kind,
            begin_s=begin_s,
            attributes=attributes,
        )


OFF = Tracing()
"""Of a process that traces nothing."""


def _new_trace_id() -> int:
    return random.getrandbits(128) or 1
