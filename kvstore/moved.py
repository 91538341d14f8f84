"""What one call of a store's client moved, as its caller sees it: which way, how much, how long,
and what did not come and why. For whoever measures or traces; it changes nothing. A value.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvstore.errors import (
    DEADLINE,
    LEASE_LAPSED,
    MISSING,
    STORE_UNAVAILABLE,
    TRANSPORT,
    LeaseLapsed,
    TransferTimeout,
)
from process.errors import DeadlineExceeded, FailedPrecondition, NotFound, Unavailable

CANCELLED = "cancelled"
"""Beside `kvstore.errors.REASONS`: nobody waited for it any more."""


@dataclass(frozen=True)
class Moved:
    """See the module. `seconds` holds all of the call: control, bytes, checksums and what was
    compared with them."""

    direction: Literal["read", "write"]
    transport: str
    num_bytes: int
    """That may be used: bytes that failed do not count."""
    seconds: float
    failed: Mapping[str, int] = field(default_factory=dict)
    """Blocks by reason."""


def reason_of(error: BaseException) -> str:
    """The word for why a whole call brought nothing."""
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    if isinstance(error, LeaseLapsed | NotFound):
        return LEASE_LAPSED
    if isinstance(error, DeadlineExceeded | TransferTimeout):
        return DEADLINE
    if isinstance(error, Unavailable):
        return STORE_UNAVAILABLE
    if isinstance(error, FailedPrecondition):  # of a put: the block that its blocks follow
        return MISSING
    return TRANSPORT
