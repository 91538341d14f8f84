"""Observations: the input of the autoscaler's plan at one time, as frozen values: the two pools as
the Scaler and the registry report them, and the traffic since the previous observation.

Counts since the previous observation are differences of cumulative counters within one incarnation
of a process; the observer ensures this, so that a restart does not look like a burst. Times are
seconds of the caller's monotonic clock. Any thread.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")
U = TypeVar("U")


class Role(StrEnum):
    """Role of a worker, and of the pool that it belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The role that a worker of this role may be flipped to."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True)
class ByRole(Generic[T]):
    """One value for each of the two pools."""

    prefill: T
    decode: T

    def of(self, role: Role) -> T:
        """Return the value of one pool."""
        return self.prefill if role is Role.PREFILL else self.decode

    def but(self, role: Role, value: T) -> ByRole[T]:
        """Return a copy with another value for one pool."""
        if role is Role.PREFILL:
            return ByRole(value, self.decode)
        return ByRole(self.prefill, value)

    def map(self, make: Callable[[Role, T], U]) -> ByRole[U]:
        """Return `make(role, value)` of both pools."""
        return ByRole(make(Role.PREFILL, self.prefill), make(Role.DECODE, self.decode))

    def to_json(self) -> dict[str, T]:
        """Return both values by role name."""
        return {"prefill": self.prefill, "decode": self.decode}


@dataclass(frozen=True)
class DurationCounts:
    """Histogram of durations: `counts[i]` samples took at most `bounds_s[i]` seconds and more than
    the bound before; the last count has no upper bound. Empty: all counts are 0, or no bounds.

    Raises: ValueError when bounds do not ascend, a count is negative, or there is not exactly one
        count more than bounds.
    """

    bounds_s: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if len(self.counts) != len(self.bounds_s) + 1 or min(self.counts) < 0:
            raise ValueError("a histogram has one count more than bounds, and none is negative")
        if any(low >= high for low, high in itertools.pairwise(self.bounds_s)):
            raise ValueError("bounds of a histogram ascend")

    @property
    def total(self) -> int:
        """Number of samples."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Return the seconds that `share` (0 to 1) of the samples did not exceed, interpolated
        linearly between two bounds; beyond the last bound: that bound. None: no samples."""
        total, below = self.total, 0
        if not total or not self.bounds_s:
            return None
        rank = share * total
        for index, bound_s in enumerate(self.bounds_s):
            count = self.counts[index]
            if below + count >= rank and count:
                low_s = self.bounds_s[index - 1] if index else 0.0
                return low_s + (bound_s - low_s) * max(0.0, rank - below) / count
            below += count
        return self.bounds_s[-1]

    def share_within(self, limit_s: float) -> float | None:
        """Return the share of the samples that took at most `limit_s` seconds; None: no
        samples."""
        if not self.total or not self.bounds_s:
            return None
        index = bisect.bisect_left(self.bounds_s, limit_s)
        within = float(sum(self.counts[:index]))
        if index < len(self.bounds_s):
            low_s = self.bounds_s[index - 1] if index else 0.0
            part = (limit_s - low_s) / (self.bounds_s[index] - low_s)
            within += self.counts[index] * max(0.0, part)
        return within / self.total

    def plus(self, other: DurationCounts) -> DurationCounts:
        """Return the sum of both histograms; one without bounds adds nothing.

        Raises: ValueError when their bounds differ.
        """
        if not other.bounds_s:
            return self
        if not self.bounds_s:
            return other
        if self.bounds_s != other.bounds_s:
            raise ValueError("histograms of other bounds cannot be added")
        return DurationCounts(
            self.bounds_s, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        )


@dataclass(frozen=True)
class Work:
    """Work of one worker's engine since the previous observation."""

    num_steps: int = 0
    """Engine steps that computed something."""
    step_s: float = 0.0
    """Seconds inside these steps."""
    num_computed_tokens: int = 0
    """All tokens that passed through the model, of prefill and decode."""
    num_decode_tokens: int = 0
    """Those of them that were decode tokens of streams; their number per step is the batch."""


@dataclass(frozen=True)
class ObservedWorker:
    """State of one worker as of its last heartbeat."""

    worker_id: str
    age_s: float = 0.0
    """Seconds since that heartbeat."""
    is_draining: bool = False
    can_flip: bool = False
    """Whether the worker may be told to take the other role: flips are allowed, and it has not
    refused."""
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Prompt tokens that the worker has received and not yet computed."""
    num_blocks: int = 0
    """All KV blocks of the worker."""
    num_free_blocks: int = 0
    """Free KV blocks, and cached ones that no request uses."""
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Pool:
    """Workers of one role, whichever Deployment started them. A flipped worker belongs to the pool
    of its new role from the time of the order."""

    wanted: int = 0
    """Workers that were asked for last: replicas, with flips counted."""
    num_ready: int = 0
    """Workers that the Scaler reports as ready. The rest of `wanted` are starting."""
    num_draining: int = 0
    """Workers that are ending and still hold their devices; not part of `wanted`."""
    workers: tuple[ObservedWorker, ...] = ()
    """Workers in the registry, including draining ones."""

    @property
    def num_starting(self) -> int:
        """Workers that were asked for and do not serve yet."""
        return max(0, self.wanted - self.num_ready)

    @property
    def num_present(self) -> int:
        """Workers that hold devices, now or soon."""
        return max(self.wanted, self.num_ready) + self.num_draining


@dataclass(frozen=True)
class ObservedTraffic:
    """Traffic of one model at all routers together: counts since the previous observation, and
    present levels."""

    elapsed_s: float
    """Seconds since the previous observation; above 0."""
    num_arrived: int = 0
    """Requests that arrived, including refused ones."""
    num_refused: int = 0
    num_failed: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of the finished requests; the next two are also of finished requests."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft: DurationCounts = field(default_factory=DurationCounts)
    tpot: DurationCounts = field(default_factory=DurationCounts)
    queue_s: float = 0.0
    """Seconds that requests waited in routers, summed over those whose wait ended."""
    num_waiting: int = 0
    """Level: requests that routers hold because there is no worker at all."""
    num_queued: int = 0
    """Level: requests queued in routers for busy workers."""
    num_running: int = 0
    """Level: requests at workers."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.elapsed_s) and self.elapsed_s > 0):
            raise ValueError("elapsed_s of traffic must be above 0")

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self.num_waiting + self.num_queued + self.num_running


@dataclass(frozen=True)
class Observations:
    """Observation of the whole cluster at one time."""

    now_s: float
    """Time by the caller's monotonic clock; never goes back."""
    pools: ByRole[Pool]
    traffic: ObservedTraffic | None = None
    """None: no router reports, or there is no previous observation to compare with."""
    routers_age_s: float = math.inf
    """Seconds since the oldest valid heartbeat of a router; infinite: there is none."""
    scale_age_s: float = math.inf
    """Seconds since the Scaler's last answer."""
    num_flipping: int = 0
    """Flips that were ordered and are not done."""
