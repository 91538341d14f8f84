"""Load: how many requests a second the pools must be ready for, and how many workers that needs.

What arrives, and where it clearly rises what it will be when a worker started now is there, and
what has piled up, to be served within CLEAR_S. One rate for both pools, for every request passes
through both; no more of it than the best pair within the budget carries, since one pool beyond the
other serves nobody.

Pure: an observation, what was learned, and the looks before it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from services.autoscaler import pairs
from services.autoscaler.capacity import Capacity
from services.autoscaler.limits import Pace, ScaleLimits
from services.autoscaler.rates import Rates
from services.autoscaler.signals import ByRole, Observations, Role, Traffic

CLEAR_S = 30.0
"""What waits shall be served within so long. Guessed: half of what a worker takes to start."""

MOST_TREND = 1.0
"""A rising load is thought on to at most so much more than it is now, as a share."""

SURE = 2.0
"""Standard deviations of chance by which a load must have risen."""


@dataclass(frozen=True)
class Load:
    """In requests per second, and the workers that they need."""

    arriving: float
    trend: float
    """More that will come, as it seems."""
    backlog: float
    """More to serve, to clear what waits within CLEAR_S."""
    most: float
    """That the best pair within limits and budget carries."""
    waiting: float
    """Requests that wait for a worker, or at one."""
    wished: ByRole[int]
    """Workers that all of it would need."""
    needed: ByRole[int]
    """Fewest workers for what can be carried."""
    enough: ByRole[int]
    """The same with the slack, and for the streams that run."""

    @property
    def rate(self) -> float:
        """All of it."""
        return self.arriving + self.trend + self.backlog


def load_of(
    seen: Observations,
    traffic: Traffic,
    before: Sequence[tuple[float, Traffic]],
    capacity: Capacity,
    rates: Rates,
    limits: ScaleLimits,
    pace: Pace,
) -> Load:
    """
    Args:
        traffic: that of `seen`.
        before: earlier traffic with its moment, oldest first, without a gap.
    """
    history = [*before, (seen.now_s, traffic)]
    now = _rate(history, seen.now_s, 0.0, pace.window_s)
    earlier = _rate(history, seen.now_s, pace.window_s, 2 * pace.window_s)
    arriving, trend = now[0], _trend(now, earlier, pace)
    waiting = num_waiting(seen, traffic, capacity)
    backlog = _backlog(seen, waiting, capacity, rates) / CLEAR_S
    most = pairs.most_carried(rates, limits)
    rate = arriving + trend + backlog

    def needed(role: Role, of_rate: float) -> int:
        return max(limits.least.of(role), rates.needed(role, of_rate))

    both = ByRole(Role.PREFILL, Role.DECODE)
    carried = min(rate, most)
    num_streams = sum(w.num_running for w in seen.pools.decode.workers if not w.is_draining)
    streams = math.ceil(num_streams / rates.bounds.max_batch)
    enough = both.map(lambda _, role: needed(role, carried * (1 + pace.slack)))
    return Load(
        arriving,
        trend,
        backlog,
        most,
        waiting,
        wished=both.map(lambda _, role: needed(role, rate)),
        needed=both.map(lambda _, role: needed(role, carried)),
        enough=ByRole(enough.prefill, max(enough.decode, streams)),
    )


def _rate(
    history: Sequence[tuple[float, Traffic]], now_s: float, from_s: float, to_s: float
) -> tuple[float, float]:
    """Arrivals a second of what was seen between two ages, and the seconds that were."""
    seen = [traffic for at_s, traffic in history if from_s <= now_s - at_s < to_s]
    seconds = sum(traffic.elapsed_s for traffic in seen)
    return (sum(traffic.num_arrived for traffic in seen) / seconds if seen else 0.0), seconds


def _trend(now: tuple[float, float], earlier: tuple[float, float], pace: Pace) -> float:
    """0 unless it rose by more than chance and more than the slack does."""
    rise = now[0] - earlier[0]
    if earlier[0] <= 0:
        return 0.0
    chance = SURE * math.sqrt(now[0] / now[1] + earlier[0] / earlier[1])
    if rise <= max(chance, pace.slack * earlier[0]):
        return 0.0
    return min(rise / pace.window_s * pace.lead_s, MOST_TREND * now[0])


def num_waiting(seen: Observations, traffic: Traffic, capacity: Capacity) -> float:
    """Requests that wait: in routers, and at prefill workers, as their tokens tell it; less those
    that are being computed."""
    pool = seen.pools.prefill
    num_tokens = sum(w.num_queued_tokens for w in pool.workers if not w.is_draining)
    at_workers = max(0.0, num_tokens / capacity.uncached_tokens - pool.num_ready)
    return traffic.num_waiting + traffic.num_queued + at_workers


def _backlog(seen: Observations, waiting: float, capacity: Capacity, rates: Rates) -> float:
    """Of the requests that wait, those that the workers that serve do not take up in the time that
    they may wait anyway."""
    serving = seen.pools.map(lambda _, pool: pool.num_ready)
    taken = rates.carried(serving) * (rates.bounds.wait_s + capacity.prefill_s)
    return max(0.0, waiting - taken)
