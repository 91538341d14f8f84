"""Tracing: which requests of one process are traced, and the export of their spans over OTLP.

A router begins traces: it follows the decision that came with the request, or samples its share.
Workers and stores only follow. Without an endpoint nothing is ever recorded, and OpenTelemetry is
not imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from process import logs
from process.rpc_errors import Internal
from process.settings import PositiveInt, SettingsError, check_host_port, check_ranges
from process.trace_spans import (
    BAGGAGE,
    NOOP_SPAN,
    Attributes,
    RecordingSpan,
    Span,
    SpanKind,
    SpanLink,
    TraceContext,
    is_sampled_id,
    new_span_id,
    parse_baggage,
    parse_headers,
)

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

BATCH_SPANS = 512
SCOPE = "baton"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""Version of OpenTelemetry's semantic conventions whose names the spans' attributes have."""


@dataclass(frozen=True)
class TracingSettings:
    """Settings of traces of requests, which go to an OpenTelemetry collector."""

    endpoint: str = ""
    """host:port of an OTLP receiver (gRPC); empty: no traces."""

    ca_file: str = ""
    """PEM file of the authority that the receiver's certificate is from; empty: a connection in
    the clear, for a receiver on this host or in this pod."""

    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the requests that are traced, of those whose traceparent does not decide it. The
    router's: workers and stores follow it."""

    follow_callers: bool = True
    """Whether a request's own traceparent decides if it is traced. False: `sample_ratio` decides
    for all, and the caller's trace is linked to."""

    max_followed_per_s: Annotated[float, Meta(gt=0, le=1e6)] = 200.0
    """Traces a second beyond `sample_ratio` that the traceparents of callers may have sampled. A
    trace costs work, and every caller may ask for one with each request. One that `sample_ratio`
    takes anyway does not count: with a ratio of 1 all are joined."""

    baggage: tuple[str, ...] = ()
    """Keys of a request's W3C baggage that become attributes of its span. Other keys are passed
    over."""

    max_waiting_spans: PositiveInt = 8192
    """Most spans that wait to be sent; one more is dropped and counted."""

    send_interval_s: Annotated[float, Meta(gt=0, le=3600)] = 1.0
    """Time between two batches of spans."""

    send_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 5.0
    """Time limit of one attempt to send a batch."""

    stop_timeout_s: Annotated[float, Meta(gt=0, le=3600)] = 2.0
    """Longest time that a stopping process tries to send the spans that wait."""

    def __post_init__(self) -> None:
        if self.max_followed_per_s == 0:
            raise SettingsError(
                "max_followed_per_s: must be above 0; follow_callers=false follows no caller"
            )
        check_ranges(self)
        check_host_port("endpoint", self.endpoint)
        if self.ca_file and not self.endpoint:
            raise SettingsError("ca_file: there is no tracing.endpoint")


@dataclass
class SpanCounters:
    """Counts of the spans of a process since its start. Invariant: ended = exported + failed +
    dropped + waiting."""

    num_ended: int = 0
    num_exported: int = 0
    num_failed: int = 0
    """Spans that the receiver did not take."""
    num_dropped: int = 0
    """Spans for which the queue had no room."""


class _Allowance:
    """A token bucket of `per_s` a second, filled for one second. Any thread, off by one then."""

    def __init__(self, per_s: float, clock: Callable[[], float]) -> None:
        self.num_refused = 0
        self._per_s = per_s
        self._most = self._left = max(1.0, per_s)
        self._clock = clock
        self._at_s = clock()

    def take(self) -> bool:
        """Whether there was a token."""
        now_s = self._clock()
        self._left = min(self._most, self._left + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        if self._left < 1.0:
            self.num_refused += 1
            return False
        self._left -= 1.0
        return True


class Tracing:
    """Decides which requests of a process are traced, and makes their spans. Off without an
    exporter.

    Life: made with the process, `start`, spans end at any time on any thread, `stop` sends what
    waits within its bound.
    """

    def __init__(
        self,
        settings: TracingSettings | None = None,
        exporter: OtlpExporter | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings or TracingSettings()
        self._exporter = exporter
        self._callers = _Allowance(self._settings.max_followed_per_s, clock)

    @property
    def num_not_followed(self) -> int:
        """The number of requests that their callers had sampled and that were not traced, beyond
        max_followed_per_s."""
        return self._callers.num_refused

    @classmethod
    def of(cls, settings: TracingSettings, component: str, instance_id: str) -> Tracing:
        """Make the tracing of one process, as its settings say.

        Raises: SettingsError when OpenTelemetry is not installed, or `ca_file` cannot be read.
        """
        if not settings.endpoint:
            return cls(settings)
        return cls(settings, OtlpExporter(settings, component, instance_id))

    @staticmethod
    def check(settings: TracingSettings) -> None:
        """Check the settings early, in a process that takes long to start. Raises: as `of`."""
        if settings.endpoint:
            check_export(settings)

    @property
    def is_on(self) -> bool:
        """Whether this process records traces."""
        return self._exporter is not None

    @property
    def counters(self) -> SpanCounters:
        """Counts of the spans by what became of them."""
        return self._exporter.counters if self._exporter is not None else SpanCounters()

    def start(self) -> None:
        """Start to send ended spans."""
        if self._exporter is not None:
            self._exporter.start()

    def stop(self) -> None:
        """Send the spans that wait; blocks, for a bounded time. A second call does nothing."""
        if self._exporter is not None:
            self._exporter.stop(self._settings.stop_timeout_s)

    def check_integrity(self) -> None:
        """Check that the span counters add up. Raises: Internal."""
        if self._exporter is not None:
            self._exporter.check_integrity()

    def begin(self, name: str, headers: Mapping[str, str], *, begin_s: float | None = None) -> Span:
        """Make the span of a request from outside, by its headers; NOOP_SPAN if the request is not
        sampled."""
        if self._exporter is None:
            return NOOP_SPAN
        settings = self._settings
        caller = parse_headers(headers) if headers else None
        parent = caller if settings.follow_callers else None
        # By an id of our own: the caller's may be chosen so that the share takes it.
        trace_id = _new_trace_id()
        is_sampled = is_sampled_id(trace_id, settings.sample_ratio)
        if parent is not None:
            is_sampled = parent.is_sampled and (is_sampled or self._callers.take())
            trace_id = parent.trace_id
        if not is_sampled:
            return NOOP_SPAN
        span = self._record(name, trace_id, parent, kind=SpanKind.SERVER, begin_s=begin_s)
        if caller is not None and parent is None:
            span.link(caller)
        for key, value in parse_baggage(headers.get(BAGGAGE, ""), settings.baggage).items():
            span.set({f"baggage.{key}": value})
        return span

    def follow(
        self,
        name: str,
        parent: TraceContext | None,
        attributes: Attributes | None = None,
    ) -> Span:
        """Make the span of a call that another process of the cluster made; NOOP_SPAN unless that
        process sampled it."""
        if self._exporter is None or parent is None or not parent.is_sampled:
            return NOOP_SPAN
        return self._record(
            name,
            parent.trace_id,
            parent,
            kind=SpanKind.SERVER,
            attributes=attributes,
        )

    def _record(
        self,
        name: str,
        trace_id: int,
        parent: TraceContext | None,
        *,
        kind: SpanKind,
        begin_s: float | None = None,
        attributes: Attributes | None = None,
    ) -> Span:
        assert self._exporter is not None
        state = parent.state if parent is not None else ""
        return RecordingSpan(
            self._exporter.take,
            name,
            TraceContext(trace_id, new_span_id(), True, state),
            parent,
            is_parent_remote=parent is not None,
            kind=kind,
            begin_s=begin_s,
            attributes=attributes,
        )


OFF = Tracing()
"""The tracing of a process that records no traces."""


def _new_trace_id() -> int:
    return random.getrandbits(128) or 1


class OtlpExporter:
    """Sends ended spans to an OTLP receiver, in batches, from a thread of its own.

    Spans wait in a bounded queue, so that a request's thread pays for an append. While the receiver
    is away its spans are counted as failed; its loss and its return are one log line each.
    """

    def __init__(
        self, settings: TracingSettings, component: str, instance_id: str, sender: Any = None
    ) -> None:
        """Args: sender: of OpenTelemetry's SpanExporter kind; None: one over gRPC, as the settings
            say.
        Raises: SettingsError when OpenTelemetry is not installed, or `ca_file` cannot be read.
        """
        self.counters = SpanCounters()
        self._settings = settings
        check_export(settings)
        self._translator = _Translator(component, instance_id)
        self._sender = _sender(settings) if sender is None else sender
        self._waiting: deque[RecordingSpan] = deque()
        self._num_sending = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_stopping = False
        self._is_reached = True
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread that sends spans."""
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)
        self._thread.start()

    def take(self, span: RecordingSpan) -> None:
        """Queue an ended span to be sent; never waits."""
        counters = self.counters
        with self._lock:
            counters.num_ended += 1
            if len(self._waiting) + self._num_sending >= self._settings.max_waiting_spans:
                counters.num_dropped += 1
                return
            self._waiting.append(span)
            is_full = len(self._waiting) == BATCH_SPANS
        if is_full:
            self._wake.set()

    def stop(self, timeout_s: float) -> None:
        """Send the spans that wait and end the thread; spans that are not sent by then count as
        failed. Does not wait for a receiver that was away at the last attempt. A second call does
        nothing."""
        thread, self._thread = self._thread, None
        self._is_stopping = True
        self._wake.set()
        if thread is not None:
            thread.join(timeout_s if self._is_reached else 0.0)
            self._sender.shutdown()  # ends an attempt that is under way
            thread.join(1.0)
        with self._lock:
            self.counters.num_failed += len(self._waiting)
            self._waiting.clear()

    def check_integrity(self) -> None:
        """Check that each span is exported, failed, dropped or waiting. Raises: Internal."""
        with self._lock:
            counters, num_waiting = self.counters, len(self._waiting) + self._num_sending
            known = counters.num_exported + counters.num_failed + counters.num_dropped
        if counters.num_ended != known + num_waiting:
            raise Internal(f"{counters.num_ended} spans ended, {known} + {num_waiting} are known")

    # ---- the thread

    def _run(self) -> None:
        while not self._is_stopping:
            self._wake.wait(self._settings.send_interval_s)
            self._wake.clear()
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        while True:
            with self._lock:
                count = min(BATCH_SPANS, len(self._waiting))
                batch = [self._waiting.popleft() for _ in range(count)]
                self._num_sending = count
            if not batch:
                return
            is_sent = False
            try:
                is_sent = self._send(batch)
            except Exception:  # the next batch must be tried
                logger.exception("spans_not_sent")
            with self._lock:
                self._num_sending = 0
                if is_sent:
                    self.counters.num_exported += count
                else:
                    self.counters.num_failed += count
            self._note(is_sent)

    def _send(self, batch: Sequence[RecordingSpan]) -> bool:
        result = self._sender.export([self._translator(span) for span in batch])
        return bool(result.value == 0)  # SpanExportResult.SUCCESS

    def _note(self, is_reached: bool) -> None:
        if is_reached != self._is_reached:
            self._is_reached = is_reached
            logs.event(
                logger,
                "trace_receiver_reached" if is_reached else "trace_receiver_lost",
                level=logging.INFO if is_reached else logging.WARNING,
                endpoint=self._settings.endpoint,
                num_failed=self.counters.num_failed,
            )


def check_export(settings: TracingSettings) -> None:
    """Check that traces can be exported as the settings say. Raises: SettingsError when
    OpenTelemetry is not installed, or `ca_file` cannot be read."""
    for name in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc"):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise SettingsError(
                "tracing.endpoint: traces need opentelemetry-sdk and "
                f"opentelemetry-exporter-otlp-proto-grpc ({error})"
            ) from error
    if settings.ca_file and not Path(settings.ca_file).is_file():
        raise SettingsError(f"tracing.ca_file: {settings.ca_file} is no file")


def _sender(settings: TracingSettings) -> Any:
    """OpenTelemetry's exporter over gRPC, without its log line for each attempt: `_note` logs
    changes."""
    import grpc
    from opentelemetry.exporter.otlp.proto.grpc import exporter
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    credentials = None
    if settings.ca_file:
        credentials = grpc.ssl_channel_credentials(Path(settings.ca_file).read_bytes())
    logging.getLogger(exporter.__name__).setLevel(logging.CRITICAL)
    return OTLPSpanExporter(
        endpoint=settings.endpoint,
        insecure=credentials is None,
        credentials=credentials,
        timeout=settings.send_timeout_s,
    )


class _Translator:
    """Converts our spans to OpenTelemetry's."""

    def __init__(self, component: str, instance_id: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._trace, self._sdk = trace, sdk
        self._kinds = {
            SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
            SpanKind.SERVER: trace.SpanKind.SERVER,
            SpanKind.CLIENT: trace.SpanKind.CLIENT,
        }
        version = _version()
        self._scope = InstrumentationScope(SCOPE, version, SCHEMA_URL)
        # OTEL_RESOURCE_ATTRIBUTES is merged in, and wins where it names the host.
        self._resource = Resource({"host.name": socket.gethostname()}).merge(
            Resource.create(
                {
                    "service.namespace": "baton",
                    "service.name": f"baton-{component}",
                    "service.instance.id": instance_id,
                    "service.version": version,
                },
                SCHEMA_URL,
            )
        )

    def __call__(self, span: RecordingSpan) -> ReadableSpan:
        trace = self._trace
        status = trace.Status(trace.StatusCode.UNSET)
        if span.problem is not None:
            status = trace.Status(trace.StatusCode.ERROR, span.problem)
        parent = None
        if span.parent is not None:
            parent = self._context(span.parent, is_remote=span.is_parent_remote)
        return self._sdk.ReadableSpan(
            name=span.name,
            context=self._context(span.context, is_remote=False),
            parent=parent,
            resource=self._resource,
            attributes=dict(span.attributes),
            events=[
                self._sdk.Event(event.name, dict(event.attributes), event.at_ns)
                for event in span.events
            ],
            links=[self._link(link) for link in span.links],
            kind=self._kinds[span.kind],
            status=status,
            start_time=span.begin_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )

    def _context(self, context: TraceContext, *, is_remote: bool) -> Any:
        trace = self._trace
        return trace.SpanContext(
            context.trace_id,
            context.span_id,
            is_remote,
            trace.TraceFlags(int(context.is_sampled)),
            trace.TraceState.from_header([context.state]) if context.state else None,
        )

    def _link(self, link: SpanLink) -> Any:
        context = self._context(link.context, is_remote=True)
        return self._trace.Link(context, dict(link.attributes))


def _version() -> str:
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:
        return ""
