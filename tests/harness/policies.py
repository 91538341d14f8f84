"""The pure policies as functions from a number to a line of text: drawn pools and observations go
in, the decision comes out.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import get_args

from process.rpc_errors import BatonError
from services.autoscaler.config import Pace, PoolLimits, Priors, ScaleLimits, Targets
from services.autoscaler.plan import PlanState, plan
from services.router.config import RoutingPolicy
from services.router.policies import make
from tests.unit.autoscaler.looks import EVERY_S
from tests.unit.autoscaler.test_plan_properties import anything
from tests.unit.router.pools import COSTS, random_case, slow_case

ROUTING_POLICIES: tuple[str, ...] = get_args(RoutingPolicy)


def routed(policy_name: str, num_pools: int) -> Iterator[str]:
    """The pair that the policy chooses from each of so many drawn pools, or why there is none."""
    rng = random.Random(20_261_128)
    policy = make(policy_name, COSTS)  # type: ignore[arg-type]
    for index in range(num_pools):
        pools, ask = (slow_case if index % 4 == 3 else random_case)(rng)
        try:
            choice = policy.choose(pools, ask)
        except BatonError as error:
            yield f"{type(error).__name__}: {error}"
        else:
            yield f"{choice.prefill_id}>{choice.decode_id} {choice.path.value} {choice.cost:.4g}"


def scaled(num_runs: int, num_looks: int) -> Iterator[str]:
    """What the autoscaler's plan decides at each of so many drawn observations of so many runs."""
    rng = random.Random(20_261_128)
    for _ in range(num_runs):
        pools = [PoolLimits(rng.randint(0, 2), rng.randint(2, 9), rng.choice((1, 2))) for _ in "pd"]
        limits = ScaleLimits(*pools, rng.choice((0, 20)))
        pace = Pace(window_s=rng.choice((5.0, 30.0)), lead_s=0.0)
        state, workers, now_s = PlanState(), limits.least, 0.0
        for _ in range(num_looks):
            seen = anything(rng, now_s, workers)
            decision, state = plan(seen, Targets(), limits, state, pace=pace, priors=Priors())
            workers, now_s = decision.wanted, now_s + EVERY_S
            yield decision.line()
