"""Failover: what one request has gone through of workers that leave, move its stream or break, and
how much more of that it may.

A worker that leaves on purpose is not asked again in the same life, and costs the request nothing
but time. One that breaks may be the only one and come back, so it is asked again where there is no
other; but the request might be what breaks it, so that it may lose a few workers only. No I/O, no
clock. One request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from process.errors import BatonError, FailedPrecondition, NoCapacity, Unavailable
from services.router.kv_account import LOST, MOVED
from services.router.sealed_handle import Extent
from services.router.times import Details, StageTimes

STAGE = "move"
"""Of the times: what it took to find another worker and to hand over to it."""

OTHERS_MAY = (Unavailable, NoCapacity, FailedPrecondition)
"""What a worker's end means that another worker need not share: also that it has the model's
weights, or an adapter, not as the router thought."""

LAPSED = "lapsed"
SHORT = "short"

HANDOVER_S = 1.0
"""What a handle must have left when it is sent: its leases must outlive the fetching. Guessed."""


@dataclass(frozen=True)
class Loss:
    """A decode worker's part is over before the answer is."""

    worker_id: str
    incarnation: str
    error: BatonError | None
    """None: it moved the stream."""

    @property
    def is_on_purpose(self) -> bool:
        """It leaves, and may know best; one that refuses for that reason says to retry at once."""
        return self.error is None or self.error.retry_after_s == 0.0

    @property
    def ended_by(self) -> str:
        """As the account of the request's KV says it."""
        return MOVED if self.is_on_purpose else LOST

    @property
    def why(self) -> str:
        return str(self.error or f"decode worker {self.worker_id} left")


def shortcoming(
    extent: Extent, num_context_tokens: int, max_own_tokens: int, now_unix_s: float
) -> str:
    """Why who goes on from a handle of this `extent` would compute more of the context alone than a
    decode worker should; empty: it would not. What a new request may leave to it, this one may, and
    the rest of a block in any case.

    Args: num_context_tokens: prompt and what was drawn, of which the last one is always computed.
        max_own_tokens: as `policy.Ask`'s.
    """
    if extent.deadline_unix_ms and extent.deadline_unix_ms / 1000 < now_unix_s + HANDOVER_S:
        return LAPSED
    if num_context_tokens - extent.num_tokens > max(extent.block_size, max_own_tokens, 1):
        return SHORT
    return ""


class Failover:
    """See the module."""

    def __init__(self, times: StageTimes, max_lost: int) -> None:
        """max_lost: workers that may break under it."""
        self.num_moved = 0
        self.num_lost = 0
        self.left: frozenset[str] = frozenset()
        """Lives that are not to be asked again."""
        self._max_lost = max_lost
        self._times = times
        self.last: Loss | None = None

    @property
    def is_on(self) -> bool:
        """Whether the request has been with a decode worker before."""
        return bool(self.num_moved or self.num_lost)

    @property
    def mark(self) -> Callable[[str, Details | None], None]:
        """Ends a stage of the request's time, which between two workers is `STAGE` whatever it was
        spent on."""
        return self._mark_move if self.is_on else self._times.mark

    def stage(self, name: str) -> str:
        """`name`, or what it is called between two workers."""
        return STAGE if self.is_on else name

    def note(self, loss: Loss) -> None:
        """Another worker is to be found. Raises: Unavailable when too many were lost."""
        self.last = loss
        if loss.error is None or loss.is_on_purpose:
            self.num_moved += 1
            self.left |= {loss.incarnation}
            return
        if self.num_lost == self._max_lost:
            raise Unavailable(
                f"{loss.error} (the last of {self.num_lost + 1} decode workers that failed "
                "this request)",
                retry_after_s=loss.error.retry_after_s,
            ) from loss.error
        self.num_lost += 1

    def explained(self, error: BatonError) -> BatonError:
        """`error`, which says why no other worker was found, with what made that necessary. A
        precondition stays one: to ask again is no use."""
        why = self.last.why if self.last is not None else "nothing was lost"
        told = f"{why}, and no other worker took over: {error}"
        if isinstance(error, FailedPrecondition):
            return FailedPrecondition(told)
        return Unavailable(told, retry_after_s=error.retry_after_s or 1.0)

    def _mark_move(self, stage: str, details: Details | None = None) -> None:
        self._times.mark(STAGE, details)
