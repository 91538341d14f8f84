"""The states of a decode request, and which may follow which; what each means is in
services/decode/request.py. Values.
"""

from __future__ import annotations

import enum


class DecodeState(enum.Enum):
    """Where a request is."""

    RESERVING = "reserving"
    RESERVED = "reserved"
    PREFETCHING = "prefetching"
    FETCHING = "fetching"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


_OVER = frozenset({DecodeState.CANCELLED, DecodeState.FAILED})
ALLOWED: dict[DecodeState, frozenset[DecodeState]] = {
    DecodeState.RESERVING: frozenset({DecodeState.RESERVED}) | _OVER,
    DecodeState.RESERVED: frozenset({DecodeState.PREFETCHING, DecodeState.FETCHING}) | _OVER,
    DecodeState.PREFETCHING: frozenset({DecodeState.RESERVED}) | _OVER,
    DecodeState.FETCHING: frozenset({DecodeState.RUNNING}) | _OVER,
    DecodeState.RUNNING: frozenset({DecodeState.FINISHED}) | _OVER,
    DecodeState.FINISHED: frozenset(),
    DecodeState.CANCELLED: frozenset(),
    DecodeState.FAILED: frozenset(),
}
