"""Span: one piece of work of one request, with a beginning, an end and what is worth knowing of it;
and `current()`, the span that the running task works for.

A request that is not sampled has the span NOBODY, which does nothing and costs a call: code that is
traced asks nobody whether it is. A sampled one's is Recording: it collects, and hands a SpanData to
its sink when it ends. Its times are moments of `time.monotonic`, so that a span which begins where
another ends shares that very number; they become the wall clock's by one offset, taken where the
trace enters the process, so that no step of that clock opens a gap.

What a span holds is bounded. Knows no RPC, no exporter and no OpenTelemetry. A span belongs to one
thread at a time.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from process.errors import BatonError, Cancelled, InvalidArgument
from process.settings import split_host_port
from process.trace_context import TraceContext

Value = str | bool | int | float | Sequence[str]
Attributes = Mapping[str, Value]

MAX_ATTRIBUTES = 128
MAX_VALUE_CHARS = 1024
MAX_EVENTS = 128
MAX_LINKS = 32
MAX_PROBLEM_CHARS = 256
_FIELD = re.compile(r"[A-Za-z0-9_.\[\]-]{1,128}")


class Kind(Enum):
    """On which side of a call a span is."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that this one has to do with, maybe of another trace."""

    context: TraceContext
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """What happened at one moment within a span."""

    name: str
    at_ns: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class SpanData:
    """A span that is over. Times are Unix nanoseconds."""

    name: str
    kind: Kind
    context: TraceContext
    parent: TraceContext | None
    is_parent_remote: bool
    begin_ns: int
    end_ns: int
    attributes: Attributes
    events: Sequence[SpanEvent]
    links: Sequence[Link]
    problem: str | None
    """Why it failed; None: it did not."""


Sink = Callable[[SpanData], None]


class Span:
    """The span of a request that is not sampled: nothing happens. See the module."""

    is_recording = False

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = Kind.INTERNAL,
        begin_s: float | None = None,
    ) -> Span:
        """A span within this one, from `begin_s` on (None: from now on); whoever makes it ends
        it, or uses it as a context: then it is the current one, too."""
        return self

    def add_child(
        self, name: str, begin_s: float, end_s: float, attributes: Attributes | None = None
    ) -> None:
        """A span within this one that is over already."""

    def set(self, attributes: Attributes) -> None:
        """Add to what is known."""

    def event(
        self, name: str, attributes: Attributes | None = None, *, at_s: float | None = None
    ) -> None:
        """Something happened."""

    def link(self, context: TraceContext | None, attributes: Attributes | None = None) -> None:
        """This has to do with another span; None: with none."""

    def end(self, error: BaseException | None = None, *, at_s: float | None = None) -> None:
        """It is over; a second end is none."""

    @property
    def context(self) -> TraceContext | None:
        """What a message says of it; None: nothing."""
        return None

    @property
    def traceparent(self) -> str:
        """As a field of a message; empty: none."""
        return ""

    @property
    def headers(self) -> tuple[tuple[str, str], ...] | None:
        """A call's metadata; None: none."""
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


NOBODY = Span()
"""Of whoever is not sampled."""

_current: contextvars.ContextVar[Span] = contextvars.ContextVar("span", default=NOBODY)


def current() -> Span:
    """The span that the running task works for. One that is over is none: a task that outlives the
    request which started it works for nobody."""
    span = _current.get()
    return span if span.is_recording else NOBODY


def detached() -> contextvars.Context:
    """For a task that works for several requests, or for none: it inherits nobody's span."""
    context = contextvars.copy_context()
    context.run(_current.set, NOBODY)
    return context


class Recording(Span):
    """The span of a sampled request. See the module."""

    def __init__(
        self,
        sink: Sink,
        name: str,
        context: TraceContext,
        parent: TraceContext | None,
        *,
        is_parent_remote: bool = False,
        kind: Kind = Kind.INTERNAL,
        begin_s: float | None = None,
        attributes: Attributes | None = None,
        offset_ns: int | None = None,
    ) -> None:
        """offset_ns: from the monotonic clock to the wall clock's; None: taken now."""
        self.is_recording = True
        self._sink = sink
        self._name = name
        self._context = context
        self._parent = parent
        self._is_parent_remote = is_parent_remote
        self._kind = kind
        self._offset_ns = wall_offset_ns() if offset_ns is None else offset_ns
        self._begin_ns = self._ns(begin_s)
        self._attributes: dict[str, Value] = {}
        self._events: list[SpanEvent] = []
        self._links: list[Link] = []
        self._tokens: list[contextvars.Token[Span]] = []
        if attributes:
            self.set(attributes)

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: Kind = Kind.INTERNAL,
        begin_s: float | None = None,
    ) -> Span:
        return Recording(
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
            if len(self._attributes) < MAX_ATTRIBUTES or key in self._attributes:
                self._attributes[key] = _bounded(value)

    def event(
        self, name: str, attributes: Attributes | None = None, *, at_s: float | None = None
    ) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append(SpanEvent(name, self._ns(at_s), dict(attributes or {})))

    def link(self, context: TraceContext | None, attributes: Attributes | None = None) -> None:
        if context is not None and len(self._links) < MAX_LINKS:
            self._links.append(Link(context, dict(attributes or {})))

    def end(self, error: BaseException | None = None, *, at_s: float | None = None) -> None:
        if not self.is_recording:
            return
        self.is_recording = False
        problem = None
        if error is not None and _is_cancel(error):
            self.set({"baton.cancelled": True})
        elif error is not None:
            self.set({"error.type": type(error).__name__})
            problem = _problem(error)
        self._sink(
            SpanData(
                self._name,
                self._kind,
                self._context,
                self._parent,
                self._is_parent_remote,
                self._begin_ns,
                max(self._begin_ns, self._ns(at_s)),
                self._attributes,
                self._events,
                self._links,
                problem,
            )
        )

    @property
    def context(self) -> TraceContext | None:
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
        # A stream that nobody reads any more is closed by another task, whose span this is not.
        with contextlib.suppress(ValueError):
            _current.reset(self._tokens.pop())
        self.end(error)

    def _next_context(self) -> TraceContext:
        here = self._context
        return TraceContext(here.trace_id, new_span_id(), True, here.state)

    def _ns(self, at_s: float | None) -> int:
        return self._offset_ns + round((time.monotonic() if at_s is None else at_s) * 1e9)


def new_span_id() -> int:
    """Random, above 0."""
    return random.getrandbits(64) or 1


def wall_offset_ns() -> int:
    """From the monotonic clock to the wall clock, now."""
    return time.time_ns() - round(time.monotonic() * 1e9)


def _bounded(value: Value) -> Value:
    if isinstance(value, str):
        return value[:MAX_VALUE_CHARS]
    if isinstance(value, bool | int | float):
        return value
    return tuple(str(each)[:MAX_VALUE_CHARS] for each in value[:MAX_LINKS])


def _is_cancel(error: BaseException) -> bool:
    """The caller wanted no more: for a server that is no error, so no status and no error.type."""
    return isinstance(error, Cancelled) or not isinstance(error, Exception)


def _problem(error: BaseException) -> str:
    """What the status of a span says of its error. The text of an unexpected error may hold
    anything, so only its type is told; of a wrong field the name, for the text may quote a client's
    words. An unknown field has the name that the client gave it: only one that looks like a name.
    """
    if isinstance(error, InvalidArgument):
        return error.field if _FIELD.fullmatch(error.field) else "a field"
    if isinstance(error, BatonError):
        return str(error)[:MAX_PROBLEM_CHARS]
    return type(error).__name__


def server_of(address: str) -> Attributes:
    """The attributes of a CLIENT span that say where the server is; `address`: host:port, or a
    path."""
    try:
        host, port = split_host_port(address)
    except ValueError:
        return {"server.address": address}
    return {"server.address": host, "server.port": port}


def grpc_call(service: str, method: str) -> Attributes:
    """The attributes of both sides of a gRPC call."""
    return {"rpc.system.name": "grpc", "rpc.method": f"baton.v1.{service}/{method}"}
