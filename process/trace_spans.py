"""Spans of traces, as traced code uses them. `current_span()` is the span that the running task
works for.

A request that is not sampled has NOOP_SPAN, whose methods do nothing, so that traced code needs no
condition. A sampled one has a RecordingSpan, which hands itself to its sink when it ends.

Times are moments of `time.monotonic`, so that a span that begins where another ends shares that
very number. They become the wall clock's by one offset, taken where the trace enters the process,
so that no step of that clock opens a gap. Headers from outside (W3C: traceparent, tracestate,
baggage) are parsed strictly and bounded: a wrong one means "no trace", never an error. A span
belongs to one thread at a time. Knows no RPC and no OpenTelemetry.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from urllib.parse import unquote

from process.rpc_errors import BatonError, Cancelled, InvalidArgument
from process.settings import split_host_port

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"

MAX_TRACEPARENT_CHARS = 256
"""Most characters of a traceparent header that are read: version 00 has 55, and what a later
version adds is ignored."""
MAX_TRACESTATE_CHARS = 512
MAX_TRACESTATE_MEMBERS = 32
MAX_BAGGAGE_CHARS = 8192
MAX_BAGGAGE_MEMBERS = 64
MAX_BAGGAGE_VALUE_CHARS = 256

_VERSION_00 = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_LATER = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_STATE_MEMBER = re.compile(
    r"[a-z0-9][a-z0-9_\-*/]{0,240}(@[a-z][a-z0-9_\-*/]{0,13})?=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{1,256}"
)
_SAMPLED = 0x01
_LOW_64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The place of one span in its trace. Ids are numbers above 0, of 128 and 64 bits."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""
    """The header tracestate, as it came."""

    @property
    def traceparent(self) -> str:
        """The context as a `traceparent` header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """The context as the headers that a call carries."""
        if self.state:
            return (TRACEPARENT, self.traceparent), (TRACESTATE, self.state)
        return ((TRACEPARENT, self.traceparent),)


def parse_traceparent(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """Parse a traceparent and a tracestate header. Returns: None when there is no traceparent, or
    it is not of the form."""
    if not traceparent or len(traceparent) > MAX_TRACEPARENT_CHARS:
        return None
    found = _VERSION_00.fullmatch(traceparent)
    if found is None and not traceparent.startswith("00"):
        found = _LATER.fullmatch(traceparent)
    if found is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in found.group(1, 2, 3))
    if not (trace_id and span_id):
        return None
    return TraceContext(trace_id, span_id, bool(flags & _SAMPLED), _tracestate(tracestate))


def trace_headers(pairs: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Select the headers of a call that are about traces, by lower-case name. A repeated header is
    joined to a list, as W3C has it; a repeated traceparent is then invalid, and no trace."""
    found: dict[str, str] = {}
    for name, value in pairs:
        name = name.lower()
        if name in (TRACEPARENT, TRACESTATE, BAGGAGE) and isinstance(value, str):
            found[name] = f"{found[name]},{value}" if name in found else value
    return found


def parse_headers(headers: Mapping[str, str]) -> TraceContext | None:
    """Parse the trace context in headers that `trace_headers` selected. Returns: None when there is
    none."""
    parent = headers.get(TRACEPARENT)
    return parse_traceparent(parent, headers.get(TRACESTATE, "")) if parent else None


def parse_baggage(header: str, wanted: Iterable[str]) -> dict[str, str]:
    """Parse the values of the wanted keys of a baggage header; a header that is too long has
    none."""
    names = set(wanted)
    if not names or not header or len(header) > MAX_BAGGAGE_CHARS:
        return {}
    found: dict[str, str] = {}
    for member in header.split(",", MAX_BAGGAGE_MEMBERS)[:MAX_BAGGAGE_MEMBERS]:
        name, equals, value = member.partition(";")[0].partition("=")
        if equals and (name := name.strip()) in names:
            text = unquote(value.strip(), errors="replace")
            found[name] = text[:MAX_BAGGAGE_VALUE_CHARS]
    return found


def is_sampled_id(trace_id: int, ratio: float) -> bool:
    """Whether a trace is among the `ratio` that is sampled, by its id, as OpenTelemetry's
    TraceIdRatioBased decides."""
    return (trace_id & _LOW_64) < round(ratio * (1 << 64))


def _tracestate(header: str) -> str:
    """The header if it is valid; else empty, and the trace goes on."""
    if len(header) > MAX_TRACESTATE_CHARS:
        return ""
    members = [member.strip(" \t") for member in header.split(",")]
    members = [member for member in members if member]
    if len(members) > MAX_TRACESTATE_MEMBERS:
        return ""
    if any(_STATE_MEMBER.fullmatch(member) is None for member in members):
        return ""
    return ",".join(members)


Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

MAX_ATTRIBUTES = 128
MAX_VALUE_CHARS = 1024
MAX_EVENTS = 128
MAX_LINKS = 32
MAX_PROBLEM_CHARS = 256
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,128}")


class SpanKind(Enum):
    """The side of a call that a span is on."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class SpanLink:
    """A link from a span to a related one, maybe of another trace."""

    context: TraceContext
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """An event at one moment within a span."""

    name: str
    at_ns: int
    attributes: Attributes


class Span:
    """The interface of a span, and the span of a request that is not sampled: every method does
    nothing."""

    is_recording = False

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        begin_s: float | None = None,
    ) -> Span:
        """Make a span within this one, from `begin_s` on (None: from now on). The caller ends it,
        or uses it as a context manager, which also makes it the current one."""
        return self

    def add_child(
        self, name: str, begin_s: float, end_s: float, attributes: Attributes | None = None
    ) -> None:
        """Record a span within this one that is over already."""

    def set(self, attributes: Attributes) -> None:
        """Add attributes to the span, over those of the same name; beyond MAX_ATTRIBUTES new names
        are dropped."""

    def event(
        self, name: str, attributes: Attributes | None = None, *, at_s: float | None = None
    ) -> None:
        """Record an event at this moment of the span."""

    def link(self, context: TraceContext | None, attributes: Attributes | None = None) -> None:
        """Link the span to a related one; None: does nothing."""

    def end(self, error: BaseException | None = None, *, at_s: float | None = None) -> None:
        """End the span at `at_s` of time.monotonic (None: now), with `error` as its failure; a
        cancel by the caller is marked as one and is no error. A second call does nothing."""

    @property
    def context(self) -> TraceContext | None:
        """The ids of the span, to be sent in a message; None: it is not sampled."""
        return None

    @property
    def traceparent(self) -> str:
        """The span as a `traceparent`, to be sent in a field of a message; empty: it is not
        sampled."""
        return ""

    @property
    def headers(self) -> tuple[tuple[str, str], ...] | None:
        """The span as headers, to be sent in a call's metadata; None: it is not sampled."""
        return None

    def __enter__(self) -> Span:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None


NOOP_SPAN = Span()
"""The span of a request that is not sampled."""

_current: contextvars.ContextVar[Span] = contextvars.ContextVar("span", default=NOOP_SPAN)


def current_span() -> Span:
    """The span that the running task works for; NOOP_SPAN once that span has ended, so that a task
    that outlives its request adds nothing to its trace."""
    span = _current.get()
    return span if span.is_recording else NOOP_SPAN


def without_span() -> contextvars.Context:
    """A context without a span, for a task that works for several requests or for none."""
    context = contextvars.copy_context()
    context.run(_current.set, NOOP_SPAN)
    return context


class RecordingSpan(Span):
    """The span of a sampled request: collects attributes, events and links, bounded, and hands
    itself to its sink when it ends. Times are Unix nanoseconds."""

    def __init__(
        self,
        sink: Callable[[RecordingSpan], None],
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        *,
        is_parent_remote: bool = False,
        kind: SpanKind = SpanKind.INTERNAL,
        begin_s: float | None = None,
        attributes: Attributes | None = None,
        offset_ns: int | None = None,
    ) -> None:
        """Args: offset_ns: from the monotonic clock to the wall clock; None: taken now."""
        self.is_recording = True
        self._sink = sink
        self.name = name
        self._context = context
        self.parent = parent
        self.is_parent_remote = is_parent_remote
        self.kind = kind
        self._offset_ns = wall_offset_ns() if offset_ns is None else offset_ns
        self.begin_ns = self.end_ns = self._ns(begin_s)
        self.attributes: dict[str, Value] = {}
        self.events: list[SpanEvent] = []
        self.links: list[SpanLink] = []
        self.problem: str | None = None
        """Why the work of the span failed; None: it did not fail."""
        self._tokens: list[contextvars.Token[Span]] = []
        if attributes:
            self.set(attributes)

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        begin_s: float | None = None,
    ) -> Span:
        return RecordingSpan(
            self._sink,
            name,
            self._next_context(),
            self._context,
            kind=kind,
            begin_s=begin_s,
            attributes=attributes,
            offset_ns=self._offset_ns,
        )

    def add_child(
        self, name: str, begin_s: float, end_s: float, attributes: Attributes | None = None
    ) -> None:
        self.child(name, attributes, begin_s=begin_s).end(at_s=end_s)

    def set(self, attributes: Attributes) -> None:
        for key, value in attributes.items():
            if len(self.attributes) < MAX_ATTRIBUTES or key in self.attributes:
                self.attributes[key] = _bounded(value)

    def event(
        self, name: str, attributes: Attributes | None = None, *, at_s: float | None = None
    ) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append(SpanEvent(name, self._ns(at_s), dict(attributes or {})))

    def link(self, context: TraceContext | None, attributes: Attributes | None = None) -> None:
        if context is not None and len(self.links) < MAX_LINKS:
            self.links.append(SpanLink(context, dict(attributes or {})))

    def end(self, error: BaseException | None = None, *, at_s: float | None = None) -> None:
        if not self.is_recording:
            return
        self.is_recording = False
        self.end_ns = max(self.begin_ns, self._ns(at_s))
        if error is not None and _is_cancel(error):
            self.set({"baton.cancelled": True})
        elif error is not None:
            self.set({"error.type": type(error).__name__})
            self.problem = _problem(error)
        self._sink(self)

    @property
    def context(self) -> TraceContext:
        return self._context

    @property
    def traceparent(self) -> str:
        return self._context.traceparent

    @property
    def headers(self) -> tuple[tuple[str, str], ...] | None:
        return self._context.headers

    def __enter__(self) -> Span:
        self._tokens.append(_current.set(self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # An abandoned stream is closed by another task, in whose context this span is not current.
        with contextlib.suppress(ValueError):
            _current.reset(self._tokens.pop())
        self.end(error)

    def _next_context(self) -> TraceContext:
        here = self._context
        return TraceContext(here.trace_id, new_span_id(), True, here.state)

    def _ns(self, at_s: float | None) -> int:
        return self._offset_ns + round((time.monotonic() if at_s is None else at_s) * 1e9)


def new_span_id() -> int:
    """A random span id, above 0."""
    return random.getrandbits(64) or 1


def wall_offset_ns() -> int:
    """Nanoseconds to add now to a time of the monotonic clock to have the wall clock's."""
    return time.time_ns() - round(time.monotonic() * 1e9)


def _bounded(value: Value) -> Value:
    if isinstance(value, str):
        return value[:MAX_VALUE_CHARS]
    if isinstance(value, bool | int | float):
        return value
    return tuple(str(each)[:MAX_VALUE_CHARS] for each in value[:MAX_LINKS])


def _is_cancel(error: BaseException) -> bool:
    """A cancel by the caller is no error of the server: no status and no error.type."""
    return isinstance(error, Cancelled) or not isinstance(error, Exception)


def _problem(error: BaseException) -> str:
    """The message of a failed span's status. An unexpected error's text may hold anything, so only
    its type counts. Of a wrong field only the name, since the text may quote the client; and only
    if it looks like a name, since the client made up the name of an unknown field."""
    if isinstance(error, InvalidArgument):
        return error.field if _FIELD.fullmatch(error.field) else "a field"
    if isinstance(error, BatonError):
        return str(error)[:MAX_PROBLEM_CHARS]
    return type(error).__name__


def server_attributes(address: str) -> Attributes:
    """The attributes of a CLIENT span that name the server. address: host:port, or a path."""
    try:
        host, port = split_host_port(address)
    except ValueError:
        return {"server.address": address}
    return {"server.address": host, "server.port": port}


def rpc_attributes(service: str, method: str) -> Attributes:
    """The attributes that the spans of both sides of a gRPC call have."""
    return {"rpc.system.name": "grpc", "rpc.method": f"baton.v1.{service}/{method}"}
