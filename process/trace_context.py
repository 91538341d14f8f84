"""TraceContext: which trace and which span a call belongs to, as W3C writes it in headers
(traceparent, tracestate, baggage), and whether a new trace is sampled.

What comes from outside is believed to the letter of the form only, and bounded: whatever is wrong
means "no trace", never an error. Knows no span, no RPC and no OpenTelemetry. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
BAGGAGE = "baggage"

MAX_TRACEPARENT_CHARS = 256
"""Version 00 has 55; what a later version adds is passed over."""
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
    """One span's place in its trace. Ids are numbers above 0, of 128 and 64 bits."""

    trace_id: int
    span_id: int
    is_sampled: bool
    state: str = ""
    """tracestate, as it came."""

    @property
    def traceparent(self) -> str:
        """The header."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{int(self.is_sampled):02x}"

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """What a call carries."""
        if self.state:
            return (TRACEPARENT, self.traceparent), (TRACESTATE, self.state)
        return ((TRACEPARENT, self.traceparent),)


def parse(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context that headers name; None when there is none, or it is not of the form."""
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
    return TraceContext(trace_id, span_id, bool(flags & _SAMPLED), _state(tracestate))


def headers_of(pairs: Iterable[tuple[str, object]]) -> dict[str, str]:
    """Those of a call's metadata or headers that are about traces, by lower-case name. One that
    comes several times is a list, as W3C has it; a traceparent that does is none, for nobody can
    say which is right."""
    found: dict[str, str] = {}
    for name, value in pairs:
        name = name.lower()
        if name in (TRACEPARENT, TRACESTATE, BAGGAGE) and isinstance(value, str):
            found[name] = f"{found[name]},{value}" if name in found else value
    return found


def from_headers(headers: Mapping[str, str]) -> TraceContext | None:
    """As `parse`, out of what `headers_of` yields."""
    parent = headers.get(TRACEPARENT)
    return parse(parent, headers.get(TRACESTATE, "")) if parent else None


def baggage(header: str, wanted: Iterable[str]) -> dict[str, str]:
    """Values of the wanted keys of a baggage header; nothing of one that is too long."""
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


def is_taken(trace_id: int, ratio: float) -> bool:
    """Whether a trace is among the `ratio` that is sampled: by its id, so that all who ask about
    one trace agree (as OpenTelemetry's TraceIdRatioBased)."""
    return (trace_id & _LOW_64) < round(ratio * (1 << 64))


def _state(header: str) -> str:
    """A tracestate worth passing on: a broken one is dropped, and the trace goes on."""
    if len(header) > MAX_TRACESTATE_CHARS:
        return ""
    members = [member.strip(" \t") for member in header.split(",")]
    members = [member for member in members if member]
    if len(members) > MAX_TRACESTATE_MEMBERS:
        return ""
    if any(_STATE_MEMBER.fullmatch(member) is None for member in members):
        return ""
    return ",".join(members)
