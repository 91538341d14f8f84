"""DecodeState: states of a decode request and their transitions; services/decode/request.py
describes them. Values."""

from __future__ import annotations

import enum


class DecodeState(enum.Enum):
    """State of a decode request."""

    RESERVING = "reserving"
    RESERVED = "reserved"
    PREFETCHING = "prefetching"
    FETCHING = "fetching"
    RUNNING = "running"
    MOVING = "moving"
    FINISHED = "finished"
    MOVED = "moved"
    CANCELLED = "cancelled"
    FAILED = "failed"


_OVER = frozenset({DecodeState.CANCELLED, DecodeState.FAILED})
ALLOWED: dict[DecodeState, frozenset[DecodeState]] = {
    DecodeState.RESERVING: frozenset({DecodeState.RESERVED}) | _OVER,
    DecodeState.RESERVED: frozenset({DecodeState.PREFETCHING, DecodeState.FETCHING}) | _OVER,
    DecodeState.PREFETCHING: frozenset({DecodeState.RESERVED}) | _OVER,
    DecodeState.FETCHING: frozenset({DecodeState.RUNNING, DecodeState.MOVED}) | _OVER,
    DecodeState.RUNNING: frozenset({DecodeState.FINISHED, DecodeState.MOVING, DecodeState.MOVED})
    | _OVER,
    DecodeState.MOVING: frozenset({DecodeState.MOVED}) | _OVER,
    DecodeState.FINISHED: frozenset(),
    DecodeState.MOVED: frozenset(),
    DecodeState.CANCELLED: frozenset(),
    DecodeState.FAILED: frozenset(),
}
