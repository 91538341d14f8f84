"""The modelled cluster keeps its own laws, and the plan does well on it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from process.rpc_errors import Internal
from services.autoscaler.config import Pace, PoolLimits, Priors, ScaleLimits, Targets
from services.autoscaler.decision import Decision, Direction, Flip
from services.autoscaler.plan import PlanState, plan
from services.autoscaler.signals import ByRole, Role
from services.autoscaler.testing.simulator import Machines, SimulatedCluster, SimulatedRequest

LIMITS = ScaleLimits(PoolLimits(1, 8), PoolLimits(1, 8), budget_devices=12)
TARGETS = Targets()
MACHINES = Machines(token_s=1 / 10_000, step_s=0.012, stream_s=0.0004, max_streams=64)
"""Small ones, so that few requests keep many busy."""


def served(
    rate: Callable[[float], float],
    seconds: float,
    *,
    limits: ScaleLimits = LIMITS,
    workers: ByRole[int] | None = None,
    seed: int = 1,
    lengths: Callable[[float], tuple[int, int]] = lambda now_s: (2000, 250),
    until_empty: bool = False,
) -> tuple[SimulatedCluster, list[Decision]]:
    """The plan on a load that arrives by chance; every look checks the cluster's laws."""
    rng, state = random.Random(seed), PlanState()
    cluster = SimulatedCluster(MACHINES, workers or ByRole(1, 1))
    decisions: list[Decision] = []
    next_s = rng.expovariate(rate(0.0) or 1.0)
    while cluster.now_s < seconds or (until_empty and cluster.num_open):
        end_s = cluster.now_s + 5.0
        while next_s < min(end_s, seconds):
            cluster.advance(next_s)
            if not rate(next_s):
                next_s += 1.0
                continue
            prompt, output = lengths(next_s)
            num_prompt = 1 + int(rng.expovariate(1 / prompt))
            num_output = 2 + int(rng.expovariate(1 / output))
            cluster.arrive(SimulatedRequest(next_s, num_prompt, 0, num_output))
            next_s += rng.expovariate(rate(next_s) or 1.0)
        cluster.advance(end_s)
        cluster.check_integrity()
        decision, state = plan(
            cluster.observe(), TARGETS, limits, state, pace=Pace(), priors=Priors()
        )
        decisions.append(decision)
        for flip in decision.flips:
            cluster.flip(flip)
        if decision.direction in (Direction.UP, Direction.DOWN):
            cluster.set(decision.wanted)
    return cluster, decisions


def attainment(cluster: SimulatedCluster, from_s: float, to_s: float) -> float:
    """Of the requests that arrived then, the share that met both targets."""
    there = [request for request in cluster.finished if from_s <= request.at_s < to_s]
    met = [
        (request.ttft_s or 0.0) <= TARGETS.ttft_s and (request.tpot_s or 0.0) <= TARGETS.tpot_s
        for request in there
    ]
    return sum(met) / len(met)


def turns(decisions: list[Decision], role: Role) -> int:
    moves = [decision.change(role) > 0 for decision in decisions if decision.change(role)]
    return sum(a != b for a, b in itertools.pairwise(moves))


def test_one_request_alone_takes_what_the_machines_say() -> None:
    machines = Machines()
    cluster = SimulatedCluster(machines, ByRole(1, 1))
    cluster.advance(1.0)
    cluster.arrive(SimulatedRequest(1.0, 2500, 0, 101))
    cluster.advance(10.0)
    (request,) = cluster.finished
    assert request.ttft_s == pytest.approx(2500 * machines.token_s, abs=0.06)
    assert request.tpot_s == pytest.approx(machines.step_s + machines.stream_s, abs=0.002)


def test_a_worker_that_leaves_loses_nothing_and_its_device_is_free_later() -> None:
    cluster = SimulatedCluster(Machines(), ByRole(1, 2))
    for index in range(20):
        cluster.arrive(SimulatedRequest(0.0, 100 + index, 0, 500))
    cluster.advance(1.0)
    cluster.set(ByRole(1, 1))
    assert cluster.serving() == ByRole(1, 1) and cluster.present() == ByRole(1, 2)
    cluster.advance(30.0)
    assert cluster.present() == ByRole(1, 1)
    assert len(cluster.finished) == 20
    cluster.check_integrity()


@pytest.mark.parametrize("seed_of", range(3))
def test_nothing_is_lost_whatever_is_ordered(seed: int, seed_of: int) -> None:
    """Workers come, leave and flip at random under load; the laws are recomputed all the while."""
    rng = random.Random(f"{seed} {seed_of}")
    cluster = SimulatedCluster(Machines(start_s=3.0, flip_s=1.0, drain_s=1.0), ByRole(2, 2))
    for _ in range(60):
        for _ in range(rng.randrange(20)):
            cluster.arrive(
                SimulatedRequest(cluster.now_s, rng.randrange(1, 9000), 0, rng.randrange(1, 300))
            )
        cluster.advance(cluster.now_s + rng.random() * 2)
        cluster.check_integrity()
        workers = [
            (role, worker)
            for role in Role
            for worker in cluster.observe().pools.of(role).workers
            if not worker.is_draining
        ]
        if rng.random() < 0.4 and workers:
            role, worker = rng.choice(workers)
            cluster.flip(Flip(worker.worker_id, role.other))
        elif rng.random() < 0.5:
            cluster.set(ByRole(rng.randrange(4), rng.randrange(4)))
        cluster.check_integrity()
    cluster.set(ByRole(2, 2))
    cluster.advance(cluster.now_s + 600)
    cluster.check_integrity()
    assert cluster.num_open == 0 and len(cluster.finished) == cluster.num_arrived


def test_a_lost_request_is_noticed() -> None:
    cluster = SimulatedCluster(Machines(), ByRole(1, 1))
    cluster.arrive(SimulatedRequest(0.0, 100, 0, 10))
    cluster._waiting.clear()
    with pytest.raises(Internal, match="1 requests arrived"):
        cluster.check_integrity()


def test_a_step_is_answered_within_the_start_time_and_the_backlogs(seed: int) -> None:
    """60 s to start, 15 to be sure, 60 to serve what piled up meanwhile."""
    cluster, decisions = served(lambda t: 2.0 if t < 120 else 16.0, 480, seed=seed)
    assert attainment(cluster, 300, 470) > 0.9
    assert max(turns(decisions, role) for role in Role) <= 1


def test_a_constant_load_is_left_alone(seed: int) -> None:
    """Poisson arrivals at 8 a second move a 30 s mean by 6 % (one sigma), and exponential lengths
    theirs: beyond the slack now and then. A worker that chance brought may go, no sooner than
    `down_s` later, and another may come; more of it in 25 minutes would be swinging."""
    _, decisions = served(lambda _: 8.0, 1500, workers=ByRole(3, 2), seed=seed)
    assert max(turns(decisions, role) for role in Role) <= 3
    assert sum(decision.is_action for decision in decisions) <= 8


def test_what_came_with_the_load_goes_with_it(seed: int) -> None:
    cluster, decisions = served(lambda t: 16.0 if t < 300 else 0.2, 1500, seed=seed)
    most = max(decision.wanted.prefill + decision.wanted.decode for decision in decisions)
    left = cluster.serving()
    assert most >= 5 and left.prefill + left.decode <= 3
    assert all(LIMITS.allows(decision.wanted) for decision in decisions)


def test_a_new_mixture_flips_workers_instead_of_starting_them(seed: int) -> None:
    """Long prompts with short answers, then the reverse: 8 devices for both."""
    limits = replace(LIMITS, budget_devices=8)
    _, decisions = served(
        lambda _: 5.0,
        600,
        limits=limits,
        workers=ByRole(6, 2),
        lengths=lambda t: (2500, 100) if t < 200 else (300, 900),
        seed=seed,
    )
    flips = [decision for decision in decisions if decision.direction is Direction.FLIP]
    assert flips and all(flip.flips[0].to is Role.DECODE for flip in flips)


def test_scale_to_zero_and_back_loses_nobody(seed: int) -> None:
    """Nobody for 15 minutes, then somebody again."""
    limits = ScaleLimits(PoolLimits(0, 8), PoolLimits(0, 8), 12)
    cluster, decisions = served(
        lambda t: 2.0 if t < 60 or t > 1000 else 0.0, 1200, limits=limits, seed=seed
    )
    assert any(decision.wanted == ByRole(0, 0) for decision in decisions)
    assert decisions[-1].wanted.prefill >= 1
    assert attainment(cluster, 1100, 1190) > 0.9
