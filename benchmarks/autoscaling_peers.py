"""Two peers' rules for scaling, as published, beside our plan: for benchmarks.autoscaling.

`RatioLaw` is llm-d's SLO-aware law: each pool by itself, by how near the latencies' P90 is to its
target; here with the pool's own latency (prefill: first token; decode: between tokens), evaluated
every 15 s, with what Kubernetes' own autoscaler adds by default (the highest wish of the last 300 s
counts on the way down; at most twice as many or 4 more on the way up). It knows no budget of both
pools: where it meets more targets than we do, look at the devices that it took.

`LoadMode` is the load mode of Dynamo's planner: every 5 s one worker more when all workers of a
pool are estimated to miss the target, one fewer when the rest could take over at 80 % of it; then
both pools are cut in proportion to fit the budget. It acts on a pool only while none of its workers
is starting or leaving: else it would add one every 5 s of the minute that a worker takes to start.
Its regression is given: it knows the machines.

Observations in, wishes out; each keeps its own history.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from services.autoscaler.decision import Decision, Flip
from services.autoscaler.limits import PlanSettings
from services.autoscaler.plan import PlanState, plan
from services.autoscaler.signals import ByRole, Histogram, Observations, Role
from services.autoscaler.simulated import Machines

Wish = tuple[ByRole[int], tuple[Flip, ...]]
"""What is wanted, and the flips that lead there."""


class Rule(Protocol):
    """Somebody who decides, every 5 s."""

    name: str

    def decide(self, seen: Observations) -> Wish:
        """One look."""


class OurPlan:
    """The very function that the autoscaler runs."""

    name = "baton"

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self._state = PlanState()
        self.decisions: list[Decision] = []

    def decide(self, seen: Observations) -> Wish:
        """See `Rule`."""
        settings = self._settings
        decision, self._state = plan(
            seen,
            settings.targets,
            settings.limits,
            self._state,
            pace=settings.pace,
            priors=settings.priors,
        )
        self.decisions.append(decision)
        return decision.wanted, decision.flips


class RatioLaw:
    """See the module."""

    name = "llm-d law"

    _EVERY_S, _STABLE_S, _AVERAGE_S = 15.0, 300.0, 45.0
    _UP, _DOWN, _MOST = 0.55, 0.40, 2.0

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self._ratios: dict[Role, deque[tuple[float, float]]] = {role: deque() for role in Role}
        self._wishes: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in Role}
        self._decided_s = -math.inf

    def decide(self, seen: Observations) -> Wish:
        """See `Rule`."""
        before = seen.pools.map(lambda _, pool: pool.wanted)
        for role in Role:
            self._ratios[role].append((seen.now_s, self._ratio(role, seen)))
            _forget(self._ratios[role], seen.now_s - self._AVERAGE_S)
        if seen.now_s - self._decided_s < self._EVERY_S:
            return before, ()
        self._decided_s = seen.now_s
        return before.map(lambda role, _: self._wanted(role, seen)), ()

    def _ratio(self, role: Role, seen: Observations) -> float:
        targets, traffic = self._settings.targets, seen.traffic
        if traffic is None:
            return 0.0
        if role is Role.PREFILL:
            found, target_s = traffic.ttft, targets.ttft_s
        else:
            found, target_s = traffic.tpot, targets.tpot_s
        return min(self._MOST, (_p90(found) or 0.0) / target_s)

    def _wanted(self, role: Role, seen: Observations) -> int:
        pool, limits = seen.pools.of(role), self._settings.limits.of(role)
        ratios = self._ratios[role]
        s, n = sum(ratio for _, ratio in ratios) / len(ratios), pool.wanted
        wish = n
        if s > self._UP:
            wish = n + math.ceil(n * (s * (pool.num_ready / n) / self._UP - 1))
        elif s < self._DOWN:
            wish = n - math.floor(n * (1 - s / self._DOWN))
        wish = min(max(wish, limits.min_workers), limits.max_workers)
        self._wishes[role].append((seen.now_s, wish))
        _forget(self._wishes[role], seen.now_s - self._STABLE_S)
        if wish < n:
            return min(n, max(wish for _, wish in self._wishes[role]))
        return min(wish, max(2 * n, n + 4))


class LoadMode:
    """See the module."""

    name = "Dynamo load mode"

    _SAFE = 0.8

    def __init__(self, settings: PlanSettings, machines: Machines) -> None:
        self._settings = settings
        self._machines = machines
        self._own_tokens = float(settings.priors.num_prompt_tokens)

    def decide(self, seen: Observations) -> Wish:
        """See `Rule`."""
        traffic = seen.traffic
        if traffic is not None and traffic.num_finished:
            mean = (traffic.num_prompt_tokens - traffic.num_cached_tokens) / traffic.num_finished
            self._own_tokens += 0.2 * (mean - self._own_tokens)
        wanted = ByRole(self._prefill(seen), self._decode(seen))
        limits = self._settings.limits
        wanted = wanted.map(
            lambda role, num: min(
                max(num, limits.of(role).min_workers), limits.of(role).max_workers
            )
        )
        devices = limits.devices(wanted)
        if devices > limits.budget:
            share = limits.budget / devices
            wanted = wanted.map(lambda _, num: max(1, math.floor(num * share)))
        return wanted, ()

    def _prefill(self, seen: Observations) -> int:
        pool, target_s = seen.pools.prefill, self._settings.targets.ttft_s
        workers = [worker for worker in pool.workers if not worker.is_draining]
        if not workers or pool.num_starting or pool.num_draining:
            return pool.wanted
        token_s, num = self._machines.token_s, len(workers)
        own_s = self._own_tokens * token_s
        waits_s = [worker.num_queued_tokens * token_s for worker in workers]
        if all(wait_s + own_s > target_s for wait_s in waits_s):
            return pool.wanted + 1
        mean_s = sum(waits_s) / num
        is_safe = num > 1 and mean_s * num / (num - 1) < (target_s - own_s) * self._SAFE
        return pool.wanted - 1 if is_safe else pool.wanted

    def _decode(self, seen: Observations) -> int:
        pool, target_s = seen.pools.decode, self._settings.targets.tpot_s
        workers = [worker for worker in pool.workers if not worker.is_draining]
        if not workers or pool.num_starting or pool.num_draining:
            return pool.wanted
        machines, num = self._machines, len(workers)
        queued = seen.traffic.num_queued if seen.traffic is not None else 0
        # Its decode workers would queue what waits for them; our router does.
        batches = [worker.num_running + worker.num_waiting + queued / num for worker in workers]
        if all(machines.step_s + machines.stream_s * batch > target_s for batch in batches):
            return pool.wanted + 1
        if num == 1:
            return pool.wanted
        after = sum(batches) / (num - 1)
        has_room = after * machines.stream_blocks < machines.num_blocks
        is_safe = machines.step_s + machines.stream_s * after < self._SAFE * target_s
        return pool.wanted - 1 if has_room and is_safe else pool.wanted


def _p90(found: Histogram) -> float | None:
    return found.quantile(0.9)


def _forget(
    entries: deque[tuple[float, float]] | deque[tuple[float, int]], before_s: float
) -> None:
    while entries and entries[0][0] < before_s:
        entries.popleft()
