"""LatencySummary: mean, percentiles and maximum of durations, in milliseconds, as all benchmarks
count them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LatencySummary:
    """Mean, percentiles and maximum of `num` durations, in milliseconds."""

    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float
    num: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencySummary:
        """Summarize at least one duration, given in seconds. A percentile is the smallest of the
        values that so many in 100 do not exceed."""
        ordered = sorted(seconds)

        def at(share: float) -> float:
            # Less a hair: 0.9 * 10 is not to become 10 by the way floats are.
            index = math.ceil(share * len(ordered) - 1e-9) - 1
            return round(ordered[max(0, index)] * 1e3, 3)

        return cls(
            mean_ms=round(statistics.fmean(ordered) * 1e3, 3),
            p50_ms=at(0.50),
            p90_ms=at(0.90),
            p99_ms=at(0.99),
            max_ms=round(ordered[-1] * 1e3, 3),
            num=len(ordered),
        )
