"""ServiceRate: how fast waiting requests are taken up, as seen of late. Pure; moments come from
outside.

Measured only while somebody waits: how fast an idle cluster could be says nothing.
"""

from __future__ import annotations

import math

HALF_LIFE_S = 10.0
"""After so long a measurement counts half. Guessed: longer than a burst, shorter than a change of
the number of workers."""

LEAST_S = 1.0
"""Less time seen than this tells no rate."""


class ServiceRate:
    """See the module."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._since_s: float | None = None

    def on_backlog(self, now_s: float, *, is_backlog: bool) -> None:
        """From now on somebody waits, or nobody."""
        self._pass(now_s)
        self._since_s = now_s if is_backlog else None

    def on_start(self, now_s: float, num_tokens: int) -> None:
        """A request that had waited is served from now on."""
        if self._since_s is None:
            return  # not for want of room: it says nothing of the cluster
        self._pass(now_s)
        self._tokens += num_tokens

    def tokens_per_s(self, now_s: float) -> float | None:
        """None: not enough was seen. A queue that stands still brings it down."""
        self._pass(now_s)
        if self._seconds < LEAST_S or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def _pass(self, now_s: float) -> None:
        if self._since_s is None:
            return
        passed_s = max(0.0, now_s - self._since_s)
        self._since_s = now_s
        keep = math.pow(0.5, passed_s / HALF_LIFE_S)
        self._tokens *= keep
        self._seconds = self._seconds * keep + passed_s
