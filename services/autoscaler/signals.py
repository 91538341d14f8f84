"""Signals: what the plan is made from, as values. One observation is one look at the cluster: the
two pools as the scaler and the registry know them now, and the traffic since the look before.

Counts since the last look are differences of cumulative counters within one life of a process: who
makes an observation fences them, so that a restart is no burst. Nothing here knows Redis,
Kubernetes or a clock; times are seconds of whichever monotonic clock the caller keeps to.

Pure; any thread.
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
    """Of a worker, and so of the pool that it belongs to."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """What a worker of this role may be flipped to."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True)
class ByRole(Generic[T]):
    """One value for each of the two pools."""

    prefill: T
    decode: T

    def of(self, role: Role) -> T:
        """That of one pool."""
        return self.prefill if role is Role.PREFILL else self.decode

    def but(self, role: Role, value: T) -> ByRole[T]:
        """With another value for one pool."""
        if role is Role.PREFILL:
            return ByRole(value, self.decode)
        return ByRole(self.prefill, value)

    def map(self, make: Callable[[Role, T], U]) -> ByRole[U]:
        """Another value of each."""
        return ByRole(make(Role.PREFILL, self.prefill), make(Role.DECODE, self.decode))

    def to_json(self) -> dict[str, T]:
        """By the roles' names."""
        return {"prefill": self.prefill, "decode": self.decode}


@dataclass(frozen=True)
class Histogram:
    """How long something took, in classes: `counts[i]` were at most `bounds_s[i]` and more than
    the bound before; the last count has no bound. All counts 0, or no bounds: nothing measured.

    Raises: ValueError when bounds do not ascend, or the counts are not one more than the bounds.
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
        """How many were measured."""
        return sum(self.counts)

    def quantile(self, share: float) -> float | None:
        """Seconds that `share` (0 to 1) of them did not exceed, straight between two bounds; beyond
        the last bound, that bound. None when nothing was measured."""
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
        """How many of them, as a share, took at most `limit_s`; None when nothing was measured."""
        if not self.total or not self.bounds_s:
            return None
        index = bisect.bisect_left(self.bounds_s, limit_s)
        within = float(sum(self.counts[:index]))
        if index < len(self.bounds_s):
            low_s = self.bounds_s[index - 1] if index else 0.0
            part = (limit_s - low_s) / (self.bounds_s[index] - low_s)
            within += self.counts[index] * max(0.0, part)
        return within / self.total

    def plus(self, other: Histogram) -> Histogram:
        """Both together. Raises: ValueError when their bounds differ; one without bounds adds
        nothing."""
        if not other.bounds_s:
            return self
        if not self.bounds_s:
            return other
        if self.bounds_s != other.bounds_s:
            raise ValueError("histograms of other bounds cannot be added")
        return Histogram(
            self.bounds_s, tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        )


@dataclass(frozen=True)
class Work:
    """What one worker's engine did since the last look."""

    num_steps: int = 0
    """Engine steps that computed something."""
    step_s: float = 0.0
    """Seconds inside them."""
    num_computed_tokens: int = 0
    """All tokens through the model: prompts' and drawn ones'."""
    num_decode_tokens: int = 0
    """Of them, those of streams that were drawing: their number per step is the batch."""


@dataclass(frozen=True)
class Worker:
    """One worker as its last heartbeat has it."""

    worker_id: str
    age_s: float = 0.0
    """Since that heartbeat."""
    is_draining: bool = False
    can_flip: bool = False
    """It may take the other role: its certificate and its device allow it."""
    num_running: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    """Prompt tokens that it was sent and has yet to compute."""
    num_blocks: int = 0
    num_free_blocks: int = 0
    """Free ones, and cached ones that nobody uses."""
    work: Work = field(default_factory=Work)


@dataclass(frozen=True)
class Pool:
    """The workers of one role, whichever Deployment started them: a flipped worker belongs to the
    pool of its new role from the moment of the order on."""

    wanted: int = 0
    """Workers that were asked for last: replicas, with flips counted."""
    num_ready: int = 0
    """Those that the scaler sees serving. Others of `wanted` are starting."""
    num_draining: int = 0
    """Beside `wanted`: on their way out, and still holding their devices."""
    workers: tuple[Worker, ...] = ()
    """As the registry has them, draining ones among them."""

    @property
    def num_starting(self) -> int:
        """Asked for, and not serving yet."""
        return max(0, self.wanted - self.num_ready)

    @property
    def num_present(self) -> int:
        """Devices are taken by so many workers, now or soon."""
        return max(self.wanted, self.num_ready) + self.num_draining


@dataclass(frozen=True)
class Traffic:
    """All routers together, of one model: counts since the last look, and levels now."""

    elapsed_s: float
    """Since that look; above 0."""
    num_arrived: int = 0
    """Refused ones among them."""
    num_refused: int = 0
    num_failed: int = 0
    num_finished: int = 0
    num_prompt_tokens: int = 0
    """Of the finished ones, as are the next two."""
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    queue_s: float = 0.0
    """Seconds that requests waited in routers, summed over those that stopped waiting."""
    num_waiting: int = 0
    """Levels from here on. Held because there is no worker for them at all."""
    num_queued: int = 0
    """Waiting in a router for its workers."""
    num_running: int = 0
    """At workers."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.elapsed_s) and self.elapsed_s > 0):
            raise ValueError("elapsed_s of traffic must be above 0")

    @property
    def num_open(self) -> int:
        """Requests that have not ended."""
        return self.num_waiting + self.num_queued + self.num_running


@dataclass(frozen=True)
class Observations:
    """One look at the cluster."""

    now_s: float
    """Of the caller's monotonic clock; never goes back."""
    pools: ByRole[Pool]
    traffic: Traffic | None = None
    """None: no router reports, or this is the first look and there is nothing to compare with."""
    routers_age_s: float = math.inf
    """Of the oldest router beat that has not lapsed; infinite: there is none."""
    scale_age_s: float = math.inf
    """Since the scaler said what is wanted and ready."""
    num_flipping: int = 0
    """Flips ordered and not done."""
