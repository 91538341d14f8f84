"""What a modelled cluster (simulator.py) is made of, which changes it: machines, workers on them,
and requests.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.autoscaler.signals import Role, Work


@dataclass(frozen=True)
class Machines:
    """What the workers are, in truth."""

    token_s: float = 1 / 25_000
    """For one prompt token."""
    step_s: float = 0.0066
    stream_s: float = 0.00005
    """A decode step takes step_s + stream_s * batch."""
    max_streams: int = 64
    stream_blocks: int = 80
    num_blocks: int = 25_000
    start_s: float = 60.0
    flip_s: float = 5.0
    drain_s: float = 5.0
    """At least, until a leaving worker's device is free."""


@dataclass
class SimulatedRequest:
    """One of the load, and what it met."""

    at_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    sent_s: float | None = None
    first_s: float | None = None
    end_s: float | None = None

    @property
    def num_uncached_tokens(self) -> int:
        """At least one must be computed."""
        return max(1, self.num_prompt_tokens - self.num_cached_tokens)

    @property
    def ttft_s(self) -> float | None:
        """None: it has no token yet."""
        return None if self.first_s is None else self.first_s - self.at_s

    @property
    def tpot_s(self) -> float | None:
        """None: it has not ended."""
        if self.first_s is None or self.end_s is None:
            return None
        return (self.end_s - self.first_s) / max(1, self.num_output_tokens - 1)


@dataclass
class SimulatedWorker:
    """One of them, and what it has to do."""

    name: str
    role: Role
    serves_at_s: float
    leaves_at_s: float | None = None
    """Not None: it is draining, and its device is free then at the earliest."""
    is_flipping: bool = False
    prompts: deque[SimulatedRequest] = field(default_factory=deque)
    done_s: float = 0.0
    """Of the first prompt, seconds that were spent."""
    num_reserved: int = 0
    """Places kept for prompts that are not computed yet."""
    progress: float = 0.0
    """Tokens that a stream got that was there from the start."""
    streams: list[tuple[float, int, SimulatedRequest]] = field(default_factory=list)
    """By the progress at which they end."""
    work: Work = field(default_factory=Work)

    @property
    def num_queued_tokens(self) -> int:
        return sum(request.num_uncached_tokens for request in self.prompts)
