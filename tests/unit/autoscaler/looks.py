"""Observations for tests: pools as they are asked for, with workers that report and did what
workers of a known kind would have done; and the plan, called look by look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from services.autoscaler.config import Pace, PoolLimits, Priors, ScaleLimits, Targets
from services.autoscaler.decision import Decision, Direction
from services.autoscaler.plan import PlanState, plan
from services.autoscaler.signals import (
    ByRole,
    DurationCounts,
    Observations,
    ObservedTraffic,
    ObservedWorker,
    Pool,
    Role,
    Work,
)

EVERY_S = 5.0
PROMPT_TOKENS = 1000
OUTPUT_TOKENS = 200
TOKENS_PER_S = 10_000.0
STEP_S, STREAM_S = 0.01, 0.0002
BOUNDS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.0, 5.0)
"""One prefill worker carries 10 prompts a second at most; a decode worker's step has 11 ms at 5
streams."""

LIMITS = ScaleLimits(PoolLimits(1, 8), PoolLimits(1, 8), budget_devices=10)
PACE = Pace(lead_s=0.0)


def by_time(value_s: float, num: int) -> DurationCounts:
    """`num` times the same."""
    counts = [0] * (len(BOUNDS_S) + 1)
    counts[sum(value_s > bound_s for bound_s in BOUNDS_S)] = num
    return DurationCounts(BOUNDS_S, tuple(counts))


def traffic(
    rate: float, *, elapsed_s: float = EVERY_S, ttft_s: float = 0.2, tpot_s: float = 0.02
) -> ObservedTraffic:
    """So many requests a second that all ended well, all alike."""
    num = round(rate * elapsed_s)
    return ObservedTraffic(
        elapsed_s,
        num_arrived=num,
        num_finished=num,
        num_prompt_tokens=num * PROMPT_TOKENS,
        num_output_tokens=num * OUTPUT_TOKENS,
        ttft=by_time(ttft_s, num),
        tpot=by_time(tpot_s, num),
        num_running=round(rate),
    )


def pool(role: Role, num: int, rate: float, *, can_flip: bool = True, age_s: float = 1.0) -> Pool:
    """`num` workers that serve, and that did their part of `rate` since the last look."""
    return Pool(
        wanted=num,
        num_ready=num,
        workers=tuple(
            ObservedWorker(
                f"{role.value}-{index}",
                age_s=age_s,
                can_flip=can_flip,
                num_blocks=10_000,
                num_free_blocks=10_000 - 75 * round(rate / num),
                num_running=round(rate / num),
                work=work(role, rate / num),
            )
            for index in range(num)
        ),
    )


def work(role: Role, rate: float) -> Work:
    """What one worker did in EVERY_S for so many requests a second."""
    if role is Role.PREFILL:
        num_tokens = round(rate * EVERY_S * PROMPT_TOKENS)
        return Work(max(1, num_tokens // 512), num_tokens / TOKENS_PER_S, num_tokens, 0)
    busy = rate * OUTPUT_TOKENS
    batch = busy * STEP_S / max(0.05, 1 - busy * STREAM_S)
    num_steps = round(EVERY_S / (STEP_S + STREAM_S * batch))
    num_drawn = round(num_steps * batch)
    return Work(num_steps, num_steps * (STEP_S + STREAM_S * batch), num_drawn, num_drawn)


def look(now_s: float, workers: ByRole[int], rate: float, **more: object) -> Observations:
    """All of it; `more` replaces fields of the observation."""
    seen = Observations(
        now_s,
        workers.map(lambda role, num: pool(role, num, rate)),
        traffic(rate),
        routers_age_s=1.0,
        scale_age_s=0.0,
    )
    return replace(seen, **more)  # type: ignore[arg-type]


@dataclass
class Runs:
    """The plan, look after look; what it wants is there at once."""

    limits: ScaleLimits = LIMITS
    targets: Targets = field(default_factory=Targets)
    pace: Pace = PACE
    priors: Priors = field(default_factory=Priors)
    workers: ByRole[int] = ByRole(1, 1)  # noqa: RUF009  a frozen value
    now_s: float = 1000.0
    state: PlanState = field(default_factory=PlanState)
    decisions: list[Decision] = field(default_factory=list)

    def step(self, seen: Observations) -> Decision:
        """One look, and what comes of it is done."""
        decision, self.state = plan(
            seen, self.targets, self.limits, self.state, pace=self.pace, priors=self.priors
        )
        self.decisions.append(decision)
        self.workers = decision.wanted
        self.now_s = seen.now_s + EVERY_S
        return decision

    def at(self, rate: float, **more: object) -> Decision:
        """One look at so many requests a second."""
        return self.step(look(self.now_s, self.workers, rate, **more))

    def during(self, seconds: float, rate: Callable[[float], float] | float) -> list[Decision]:
        """Looks every EVERY_S; `rate` of the seconds that passed. Returns: their decisions."""
        begin_s, first = self.now_s, len(self.decisions)
        while self.now_s < begin_s + seconds:
            self.at(rate if isinstance(rate, int | float) else rate(self.now_s - begin_s))
        return self.decisions[first:]

    def until_action(self, one_look: Callable[[], Decision], num_looks: int = 24) -> Decision:
        """Looks again and again. Returns: the first decision in which something is done."""
        for _ in range(num_looks):
            decision = one_look()
            if decision.is_action:
                return decision
        raise AssertionError("nothing was done")

    @property
    def actions(self) -> list[Decision]:
        """Those in which something was done."""
        return [decision for decision in self.decisions if decision.is_action]


def directions(decisions: list[Decision]) -> list[Direction]:
    """Of the actions among them."""
    return [decision.direction for decision in decisions if decision.is_action]
