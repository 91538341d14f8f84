"""Breaker: a circuit breaker with exponential back-off for calls to a peer.

A failure opens it for BACKOFF_MIN_S, doubled by each further failure up to BACKOFF_MAX_S: never for
ever. When that time is over it is half-open: its owner lets one caller try. A success closes it,
but its failures count on until none came for FORGIVE_S: a peer that greets well and fails at work
is not met twice a second.
"""

from __future__ import annotations

from dataclasses import dataclass

BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
FORGIVE_S = 60.0


@dataclass(frozen=True)
class Breaker:
    """State of a circuit breaker. num_failures: number of consecutive failures, each within
    FORGIVE_S of the one before. retry_at_s: time on the caller's clock before which no attempt is
    made. is_closed: the last attempt succeeded, or there was none."""

    num_failures: int = 0
    failed_at_s: float = 0.0
    retry_at_s: float = 0.0
    is_closed: bool = True

    def refuses(self, now_s: float) -> bool:
        """Return whether attempts are refused at `now_s`."""
        return not self.is_closed and now_s < self.retry_at_s

    def is_half_open(self, now_s: float) -> bool:
        """Return whether one trial attempt is allowed, and no other until its outcome is known."""
        return not self.is_closed and now_s >= self.retry_at_s

    def succeeded(self) -> Breaker:
        """Return the state after a successful attempt."""
        return Breaker(self.num_failures, self.failed_at_s, 0.0, True)

    def failed(self, now_s: float, jitter: float) -> Breaker:
        """Return the state after a failed attempt. jitter: factor in [0.5, 1] that spreads the
        retries of many workers; the first wait is not shortened."""
        forgiven = now_s - self.failed_at_s > FORGIVE_S
        num_failures = 1 if forgiven else self.num_failures + 1
        doubled_s = BACKOFF_MIN_S * 2 ** min(num_failures - 1, 16)
        backoff_s = max(BACKOFF_MIN_S, min(BACKOFF_MAX_S, doubled_s) * jitter)
        return Breaker(num_failures, now_s, now_s + backoff_s, False)
