"""Errors of the KV store beside those of `process.rpc_errors`, and the reasons why a block
was not used.

    BatonError
      NotFound
        LeaseLapsed         the lease is over; what it pinned may be gone
      Unavailable
        UnknownAttachment   the store does not know this attachment (any more): attach again
      Internal
        IntegrityError      a conservation law does not hold
      TransferFailed        the bytes did not arrive; nothing will arrive later
      TransferTimeout       the time is over, but the transfer is NOT: it carries a `Quarantine`
    CancelledError
      TransferCancelled     cancelled while the transfer is not over: it carries a `Quarantine`

A `Quarantine` names worker blocks that a transfer may still write into; they must not be used,
freed or read until `settled` is done.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from process.rpc_errors import (
    BatonError,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    NotFound,
    Unavailable,
)

GENERATION = "generation"
CHECKSUM = "checksum"
MISSING = "missing"
LEASE_LAPSED = "lease_lapsed"
INCARNATION = "incarnation"
DEADLINE = "deadline"
TRANSPORT = "transport"
STORE_UNAVAILABLE = "store_unavailable"
CANCELLED = "cancelled"
"""The reason of a call whose caller was cancelled; not one of REASONS."""
REASONS = (
    GENERATION,
    CHECKSUM,
    MISSING,
    LEASE_LAPSED,
    INCARNATION,
    DEADLINE,
    TRANSPORT,
    STORE_UNAVAILABLE,
)
"""The reasons, as metrics and provenance name them, why a block was not used."""


@dataclass(frozen=True)
class Quarantine:
    """Blocks of the worker's cache that may still be written into until `settled` is done (it never
    fails)."""

    block_ids: tuple[int, ...]
    settled: asyncio.Future[None]


class LeaseLapsed(NotFound):
    """The lease is unknown: released, lapsed, or of an earlier start of the store."""


class UnknownAttachment(Unavailable):
    """The store does not know the attachment: it restarted, or it gave a silent worker up. Attach
    again."""

    retry_after_s = 0.0


class StoreIntegrityError(Internal):
    """A conservation law of the store does not hold; the message names it."""


class TransferFailed(BatonError):
    """The transfer ended with an error. It is terminal: no byte of it moves from now on."""

    retry_after_s = 0.0


class TransferTimeout(BatonError):
    """The deadline of a transfer passed while it may still write into the blocks that `quarantine`
    names."""

    def __init__(self, message: str, quarantine: Quarantine) -> None:
        super().__init__(message)
        self.quarantine = quarantine


class TransferCancelled(asyncio.CancelledError):
    """The task that waited for a transfer was cancelled while it may still write into the blocks
    that `quarantine` names. It is a real cancellation otherwise."""

    def __init__(self, message: str, quarantine: Quarantine) -> None:
        super().__init__(message)
        self.quarantine = quarantine


def reason_of(error: BaseException) -> str:
    """The reason, one of REASONS or CANCELLED, for which a whole call of the store that raised
    `error` moved nothing."""
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    if isinstance(error, LeaseLapsed | NotFound):
        return LEASE_LAPSED
    if isinstance(error, DeadlineExceeded | TransferTimeout):
        return DEADLINE
    if isinstance(error, FailedPrecondition):  # of a put: the block that its blocks follow
        return MISSING
    if isinstance(error, Unavailable):
        return STORE_UNAVAILABLE
    return TRANSPORT


def quarantine_of(error: BaseException) -> Quarantine | None:
    """The quarantine that an error carries: worker blocks that must stay out of use after it. None
    where it carries none."""
    if isinstance(error, TransferTimeout | TransferCancelled):
        return error.quarantine
    return None
