"""What became of one request, as its sender saw it. Times are one clock's seconds since the load
began. Values.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Arrival:
    """What was read at once."""

    at_s: float
    num_tokens: int


@dataclass(frozen=True)
class Outcome:
    """See the module."""

    planned_s: float
    sent_s: float
    end_s: float
    arrivals: tuple[Arrival, ...] = ()
    """Those that brought tokens."""
    num_input_tokens: int = 0
    num_cached_tokens: int = 0
    error: str = ""
    """The kind of error, as NoCapacity; empty: it was served."""
    error_text: str = ""
    retry_after_s: float | None = None
    stages: tuple[tuple[str, float], ...] = field(default=(), repr=False)
    """Where its time went, as the router says (stage, seconds); empty: it does not."""

    @property
    def is_served(self) -> bool:
        return not self.error

    @property
    def num_output_tokens(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def lag_s(self) -> float:
        """How much later than planned it was sent: the sender's own fault."""
        return self.sent_s - self.planned_s

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first token; None: there was none."""
        return self.arrivals[0].at_s - self.sent_s if self.arrivals else None

    @property
    def e2e_s(self) -> float:
        """From sending to the end."""
        return self.end_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """(E2E - TTFT) / (output tokens - 1); None with fewer than two tokens."""
        ttft_s, num_tokens = self.ttft_s, self.num_output_tokens
        return (
            None if ttft_s is None or num_tokens < 2 else (self.e2e_s - ttft_s) / (num_tokens - 1)
        )

    @property
    def gaps_s(self) -> list[float]:
        """Between what was read and what was read next."""
        times = [arrival.at_s for arrival in self.arrivals]
        return [after - before for before, after in itertools.pairwise(times)]
