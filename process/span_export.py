"""OtlpExporter: spans that are over, on their way to an OTLP receiver.

They wait in a bounded queue for a thread of their own, which makes OpenTelemetry's spans of them
and sends them in batches: the request's own thread pays for an append. A receiver that is away
costs the spans of that time, and they are counted; its absence and its return are told in one log
line each.

Law: every span that was taken is exported, failed, dropped or waits. `take` belongs to any thread.
The only module that imports OpenTelemetry, and only where traces are on.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import socket
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from process import logs
from process.errors import Internal
from process.settings import SettingsError
from process.spans import Kind, Link, SpanData
from process.trace_context import TraceContext
from process.tracing import SpanCounters, TracingSettings

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

logger = logging.getLogger(__name__)

BATCH_SPANS = 512
SCOPE = "baton"
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"
"""Of OpenTelemetry's semantic conventions, the version whose names our attributes have."""


class OtlpExporter:
    """See the module."""

    def __init__(
        self, settings: TracingSettings, component: str, instance_id: str, sender: Any = None
    ) -> None:
        """sender: of OpenTelemetry's SpanExporter kind; None: one over gRPC, as the settings say.

        Raises: SettingsError when OpenTelemetry is not installed, or `ca_file` cannot be read.
        """
        self.counters = SpanCounters()
        self._settings = settings
        check(settings)
        self._translator = _Translator(component, instance_id)
        self._sender = _sender(settings) if sender is None else sender
        self._waiting: deque[SpanData] = deque()
        self._num_sending = 0
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._is_stopping = False
        self._is_reached = True
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to send, from a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)
        self._thread.start()

    def take(self, span: SpanData) -> None:
        """One that is over; never waits."""
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
        """Send what waits and end; what is not sent by then has failed. A receiver that was away
        at the last attempt is not waited for. Idempotent."""
        thread, self._thread = self._thread, None
        self._is_stopping = True
        self._wake.set()
        if thread is not None:
            thread.join(timeout_s if self._is_reached else 0.0)
            self._sender.shutdown()  # cuts short what still tries
            thread.join(1.0)
        with self._lock:
            self.counters.num_failed += len(self._waiting)
            self._waiting.clear()

    def check_integrity(self) -> None:
        """Raises: Internal when a span is neither exported, failed, dropped nor waiting."""
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
            except Exception:  # the last line of defence: the next batch must have its chance
                logger.exception("spans_not_sent")
            with self._lock:
                self._num_sending = 0
                if is_sent:
                    self.counters.num_exported += count
                else:
                    self.counters.num_failed += count
            self._note(is_sent)

    def _send(self, batch: Sequence[SpanData]) -> bool:
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


def check(settings: TracingSettings) -> None:
    """Raises: SettingsError when OpenTelemetry is not installed, or `ca_file` cannot be read."""
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
    """OpenTelemetry's exporter over gRPC. Its own lines would tell of each attempt: `_note` tells
    of changes."""
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
    """From our spans to OpenTelemetry's."""

    def __init__(self, component: str, instance_id: str) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk import trace as sdk
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._trace, self._sdk = trace, sdk
        self._kinds = {
            Kind.INTERNAL: trace.SpanKind.INTERNAL,
            Kind.SERVER: trace.SpanKind.SERVER,
            Kind.CLIENT: trace.SpanKind.CLIENT,
        }
        version = _version()
        self._scope = InstrumentationScope(SCOPE, version, SCHEMA_URL)
        # What a deployment says of itself (OTEL_RESOURCE_ATTRIBUTES) comes along, and says better
        # than we can which host this is.
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

    def __call__(self, span: SpanData) -> ReadableSpan:
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

    def _link(self, link: Link) -> Any:
        context = self._context(link.context, is_remote=True)
        return self._trace.Link(context, dict(link.attributes))


def _version() -> str:
    try:
        return importlib.metadata.version("baton")
    except importlib.metadata.PackageNotFoundError:
        return ""
