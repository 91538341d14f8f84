"""The autoscaler: its plan on a modelled cluster beside two peers' rules, and a local cluster that
scales itself.

    python -m benchmarks.autoscaling simulated
    python -m benchmarks.autoscaling local --plot scaling.png
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import click
import grpc.aio

from baton import Client, ClusterConfig, LocalCluster
from baton.cluster import command_lines as cluster_plan
from baton.load import workload
from baton.load.report import Limits, report
from baton.load.runner import RequestOutcome
from baton.load.runner import run as run_load
from baton.load.senders import GrpcSender
from baton.load.workload import Planned
from benchmarks import harness
from benchmarks.harness import Several
from engine.testing.paced_model import DevicePace
from protos import autoscaler_pb2, autoscaler_pb2_grpc
from services.autoscaler.config import Pace, PlanSettings, PoolLimits, Priors, ScaleLimits, Targets
from services.autoscaler.decision import Flip
from services.autoscaler.plan import PlanState, plan
from services.autoscaler.signals import ByRole, Observations, Role
from services.autoscaler.testing.simulator import Machines, SimulatedCluster, SimulatedRequest

# -- rules: observations in, wishes out, every 5 s; each keeps its own history

Wish = tuple[ByRole[int], tuple[Flip, ...]]
"""A rule's decision: how many workers it wants of each role, and the role changes that lead
there."""


class Rule(Protocol):
    """The interface of a rule that decides how many workers there shall be, every 5 s."""

    name: str

    def decide(self, seen: Observations) -> Wish:
        """Decide how many workers there shall be, by what was observed."""


class OurPlan:
    """The rule of Baton's autoscaler: the very function that it runs."""

    name = "baton"

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self._state = PlanState()

    def decide(self, seen: Observations) -> Wish:
        """Decide by `services.autoscaler`'s plan."""
        settings = self._settings
        decision, self._state = plan(
            seen,
            settings.targets,
            settings.limits,
            self._state,
            pace=settings.pace,
            priors=settings.priors,
        )
        return decision.wanted, decision.flips


class RatioLaw:
    """The SLO-aware rule of llm-d, as published: each pool by itself, by how near the latencies'
    P90 is to its target; here with the pool's own latency (prefill: first token; decode: between
    tokens), evaluated every 15 s, with what Kubernetes' own autoscaler adds by default (the highest
    wish of the last 300 s counts on the way down; at most twice as many or 4 more on the way up).

    It knows no budget of both pools: where it meets more targets than ours, look at the devices it
    took.
    """

    name = "llm-d law"

    _EVERY_S, _STABLE_S, _AVERAGE_S = 15.0, 300.0, 45.0
    _UP, _DOWN, _MOST = 0.55, 0.40, 2.0

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings
        self._ratios: dict[Role, deque[tuple[float, float]]] = {role: deque() for role in Role}
        self._wishes: dict[Role, deque[tuple[float, int]]] = {role: deque() for role in Role}
        self._decided_s = -math.inf

    def decide(self, seen: Observations) -> Wish:
        """Decide by the ratio of latency to target, pool by pool."""
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
        return min(self._MOST, (found.quantile(0.9) or 0.0) / target_s)

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
    """The load mode of Dynamo's planner, as published: every 5 s one worker more when all workers
    of a pool are estimated to miss the target, one fewer when the rest could take over at 80 % of
    it; then both pools are cut in proportion to fit the budget.

    It acts on a pool only while none of its workers is starting or leaving: else it would add one
    every 5 s of the minute that a worker takes to start. Its regression is given: it knows the
    machines.
    """

    name = "Dynamo load mode"

    _SAFE = 0.8

    def __init__(self, settings: PlanSettings, machines: Machines) -> None:
        self._settings = settings
        self._machines = machines
        self._own_tokens = float(settings.priors.num_prompt_tokens)

    def decide(self, seen: Observations) -> Wish:
        """Decide by the estimated latency of each pool's workers."""
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


def _forget(
    entries: deque[tuple[float, float]] | deque[tuple[float, int]], before_s: float
) -> None:
    while entries and entries[0][0] < before_s:
        entries.popleft()


# -- in simulated time

EVERY_S = 5.0
BIN_S = 30.0
MACHINES = Machines(
    token_s=1 / 25_000, step_s=0.0066, stream_s=0.00028, max_streams=128, stream_blocks=100
)
"""Speeds of the modelled workers: about an 8B model on one large GPU; a step of 128 streams takes
42 ms."""

SETTINGS = PlanSettings(
    targets=Targets(ttft_s=1.0, tpot_s=0.05),
    limits=ScaleLimits(PoolLimits(1, 10), PoolLimits(1, 10), budget_devices=12),
    pace=Pace(),
    priors=Priors(max_num_running=128),
)
"""Settings of the plan. Its priors are the defaults: the plan finds out itself what the machines
are."""


@dataclass(frozen=True)
class Load:
    """A modelled load: rates as `baton bench` reads them, and lengths by phase: (until, prompt,
    output)."""

    name: str
    rates: str
    lengths: tuple[tuple[float, int, int], ...] = ((float("inf"), 2000, 250),)
    burstiness: float = 1.0


LOADS = (
    Load("constant", "20:2400"),
    Load("step", "5:300,40:900,5:1200"),
    Load("ramp", "2..60:1200,60..2:1200"),
    Load("burst", ",".join(["6:300,45:60"] * 6)),
    Load(
        "mixture",
        "14:2700",
        ((900.0, 6000, 100), (1800.0, 400, 1500), (float("inf"), 6000, 100)),
    ),
    Load(
        "daily",
        "4..30:600,30..22:300,22..45:600,45..8:600,8..4:300",
        ((900.0, 1500, 300), (1800.0, 3500, 200), (float("inf"), 1000, 500)),
        burstiness=0.5,
    ),
)


@dataclass
class SimulatedRun:
    """The outcome of one load under one rule."""

    rule: str
    requests: list[SimulatedRequest]
    at_s: list[float] = field(default_factory=list)
    wanted: list[ByRole[int]] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    num_flips: int = 0


def requests_of(load: Load, seed: int) -> list[SimulatedRequest]:
    """Draw the requests of a load; lengths are exponential around their means."""
    rng = random.Random(f"{load.name} {seed}")
    times = workload.arrival_times(
        workload.parse_rates(load.rates), num_requests=None, burstiness=load.burstiness, seed=seed
    )
    found = []
    for at_s in times:
        prompt, output = next((p, o) for until_s, p, o in load.lengths if at_s < until_s)
        num_prompt = 1 + int(rng.expovariate(1 / prompt))
        found.append(SimulatedRequest(at_s, num_prompt, 0, 2 + int(rng.expovariate(1 / output))))
    return found


def simulate(rule: Rule, requests: Sequence[SimulatedRequest], seconds: float) -> SimulatedRun:
    """Simulate a load under a rule, and 2 minutes more for the requests that still run then."""
    run = SimulatedRun(rule.name, [replace(request) for request in requests])
    cluster, queue = SimulatedCluster(MACHINES, ByRole(1, 1)), iter(run.requests)
    request = next(queue, None)
    while cluster.now_s < seconds + 120.0:
        end_s = cluster.now_s + EVERY_S
        while request is not None and request.at_s < end_s:
            cluster.advance(request.at_s)
            cluster.arrive(request)
            request = next(queue, None)
        cluster.advance(end_s)
        wanted, flips = rule.decide(cluster.observe())
        for flip in flips:
            cluster.flip(flip)
        cluster.set(wanted)
        run.num_flips += len(flips)
        run.at_s.append(cluster.now_s)
        run.wanted.append(wanted)
        run.devices.append(SETTINGS.limits.devices(cluster.present()))
    cluster.check_integrity()
    return run


def is_met(request: SimulatedRequest) -> bool:
    """Whether a request met both targets."""
    ttft_s, tpot_s, targets = request.ttft_s, request.tpot_s, SETTINGS.targets
    return (
        ttft_s is not None
        and ttft_s <= targets.ttft_s
        and tpot_s is not None
        and tpot_s <= targets.tpot_s
    )


def by_bin(requests: Sequence[SimulatedRequest], seconds: float) -> list[list[SimulatedRequest]]:
    """Group requests by the time of their arrival, BIN_S each."""
    bins: list[list[SimulatedRequest]] = [[] for _ in range(int(seconds / BIN_S) + 1)]
    for request in requests:
        bins[min(len(bins) - 1, int(request.at_s / BIN_S))].append(request)
    return bins


def simulated_summary(run: SimulatedRun, seconds: float) -> dict[str, Any]:
    """The row of one run in the result's table."""
    took = sum(
        n * EVERY_S for at_s, n in zip(run.at_s, run.devices, strict=True) if at_s <= seconds
    )
    return {
        "rule": run.rule,
        "num_requests": len(run.requests),
        "met_share": round(sum(map(is_met, run.requests)) / len(run.requests), 4),
        "reaction_s": _reaction_s(by_bin(run.requests, seconds)),
        "device_s": round(took),
        "most_devices": max(run.devices),
        "num_turns": sum(_num_turns([pair.of(role) for pair in run.wanted]) for role in Role),
        "num_flips": run.num_flips,
    }


def _reaction_s(bins: Sequence[Sequence[SimulatedRequest]]) -> float | None:
    """Seconds from the bin before which the load rose most until 9 of 10 requests meet the targets
    again; None: never."""
    rises = [len(b) - len(a) for a, b in itertools.pairwise(bins)]
    first = rises.index(max(rises)) + 1
    for index in range(first, len(bins)):
        if bins[index] and sum(map(is_met, bins[index])) >= 0.9 * len(bins[index]):
            return (index - first) * BIN_S
    return None


@harness.case
@click.option("--loads", type=Several(str), default=",".join(load.name for load in LOADS))
@click.option("--seed", default=1)
def simulated(loads: Sequence[str], seed: int) -> dict[str, Any]:
    """The autoscaler's plan on a SimulatedCluster (services/autoscaler/testing/), beside two
    peers' rules: loads that step, ramp, burst, or change their mixture.

    Of each: requests that met both targets (one that was not served met none), the time after the
    load's highest jump until 9 of 10 that arrive meet them again, device time, how often the number
    of a pool's workers turned round, and the most devices taken at once.
    Nothing here is measured on a machine: rates are those of `Machines`.
    """
    rows = []
    for load in (load for load in LOADS if load.name in loads):
        requests = requests_of(load, seed)
        seconds = requests[-1].at_s
        rules: list[Rule] = [OurPlan(SETTINGS), RatioLaw(SETTINGS), LoadMode(SETTINGS, MACHINES)]
        for rule in rules:
            run = simulate(rule, requests, seconds)
            rows.append({"load": load.name, **simulated_summary(run, seconds)})
    harness.show("simulated", rows)
    return {
        "simulated": True,
        "budget_devices": SETTINGS.limits.budget,
        "targets": {"ttft_s": SETTINGS.targets.ttft_s, "tpot_s": SETTINGS.targets.tpot_s},
        "runs": rows,
    }


# -- what workers there were while a load ran, and one picture of load, workers and waiting

PoolRole = Literal["prefill", "decode"]
ROLES: tuple[PoolRole, ...] = ("prefill", "decode")
_COLOURS = {"prefill": "#c9a227", "decode": "#2a6f97"}
_FAILED = "#b23a48"
_WINDOW_S = 2.0


@dataclass(frozen=True)
class PoolSize:
    """Numbers of workers of one role at one moment: those that the autoscaler has asked for, and
    those that serve."""

    num_wanted: int
    num_ready: int


@dataclass(frozen=True)
class Moment:
    """The sizes of all pools at `at_s` seconds since the load began; below 0 before it."""

    at_s: float
    pools: dict[PoolRole, PoolSize]


@dataclass(frozen=True)
class Course:
    """The sizes of the pools while a load ran, in the order of time."""

    moments: tuple[Moment, ...]

    def most_ready(self, role: PoolRole) -> int:
        """The most workers of a role that served at once."""
        return max(moment.pools[role].num_ready for moment in self.moments)

    def last_wanted(self, role: PoolRole) -> int:
        """The number of workers of a role that the autoscaler asked for in the end."""
        return self.moments[-1].pools[role].num_wanted

    def num_turns(self, role: PoolRole) -> int:
        """How often the autoscaler asked for more workers of a role after fewer, or for fewer after
        more. A load that comes and goes once needs one; each turn beyond what the load itself does
        is oscillation."""
        return _num_turns([moment.pools[role].num_wanted for moment in self.moments])

    def reaction_s(self, role: PoolRole) -> float | None:
        """Seconds from the load's beginning until more workers of a role served than before; None:
        never."""
        first = self.moments[0].pools[role].num_ready
        for moment in self.moments:
            if moment.at_s >= 0 and moment.pools[role].num_ready > first:
                return moment.at_s
        return None


def _num_turns(wanted: Sequence[int]) -> int:
    ups = [after > before for before, after in itertools.pairwise(wanted) if after != before]
    return sum(after != before for before, after in itertools.pairwise(ups))


def offered(
    outcomes: Sequence[RequestOutcome], window_s: float = _WINDOW_S
) -> list[tuple[float, float]]:
    """The load as it was sent: (middle of a window in seconds, requests a second sent in it),
    windows without any included."""
    if not outcomes:
        return []
    counts = [0] * (int(max(outcome.sent_s for outcome in outcomes) // window_s) + 1)
    for outcome in outcomes:
        counts[int(outcome.sent_s // window_s)] += 1
    return [((i + 0.5) * window_s, count / window_s) for i, count in enumerate(counts)]


def draw(runs: Mapping[str, tuple[Sequence[RequestOutcome], Course]], file: Path) -> None:
    """Draw each load: its rate, workers and waiting over the same seconds, under its title; needs
    matplotlib. Raises: OSError."""
    from matplotlib.figure import Figure

    width = 10 if len(runs) == 1 else 5.5 * len(runs)
    figure = Figure(figsize=(width, 8), layout="constrained")
    axes: Any = figure.subplots(3, len(runs), sharex="col", sharey="row", squeeze=False)
    for column, (title, (outcomes, course)) in zip(axes.T, runs.items(), strict=True):
        column[0].set_title(title)
        _draw(column, outcomes, course)
    labels = ("requests a second", "workers", "seconds to the first token")
    for row, label in zip(axes, labels, strict=True):
        row[0].set_ylabel(label)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw(axes: Any, outcomes: Sequence[RequestOutcome], course: Course) -> None:
    """Draw one load."""
    axes[0].step(*zip(*offered(outcomes), strict=True), where="mid", color="#444444")
    times = [moment.at_s for moment in course.moments]
    for role, (kind, style) in itertools.product(ROLES, (("ready", "-"), ("wanted", ":"))):
        nums = [getattr(moment.pools[role], f"num_{kind}") for moment in course.moments]
        label = f"{role}, {kind}"
        axes[1].step(times, nums, style, where="post", color=_COLOURS[role], label=label)
    axes[1].set_ylim(bottom=0)
    axes[1].legend(frameon=False, ncols=2)
    served = [each for each in outcomes if each.ttft_s is not None and each.is_served]
    waits_s = [(each.sent_s, each.ttft_s) for each in served]
    if waits_s:
        axes[2].plot(*zip(*waits_s, strict=True), ".", color=_COLOURS["prefill"], label="served")
    failed = [(each.sent_s, each.end_s - each.sent_s) for each in outcomes if not each.is_served]
    if failed:
        axes[2].plot(*zip(*failed, strict=True), "x", color=_FAILED, label="failed")
    axes[2].set_xlabel("seconds since the load began")
    axes[2].set_yscale("log")
    for each in axes:
        each.grid(alpha=0.25)


# -- a load whose length is not known beforehand: stretches one after another, each sent again and
# again until there is enough of it, by what was seen of the workers

Send = Callable[[Sequence[Planned]], Awaitable[list[RequestOutcome]]]
"""A function that sends all requests of a load; the outcomes' times are since the load's
beginning."""


def at_once(course: Course) -> bool:
    """End a stretch after one round, whatever was seen."""
    return True


@dataclass(frozen=True)
class Stretch:
    """A part of a load, sent in rounds."""

    rounds: Sequence[Sequence[Planned]]
    """The rounds, sent one after another, at most all of them; times are since each one's
    beginning."""

    enough: Callable[[Course], bool] = at_once
    """Called after each round with what was seen so far; True ends the stretch."""

    round_s: float | None = None
    """Seconds from one round's beginning to the next's, whatever became of its requests: an open
    loop throughout. None: a round ends when all of its requests have."""


def rounds_of(load: Sequence[Planned], round_s: float) -> list[list[Planned]]:
    """Cut a load into rounds of `round_s` seconds each, including empty ones, where nothing is
    sent."""
    made: list[list[Planned]] = []
    for one in load:
        number = int(one.at_s // round_s)
        made += ([] for _ in range(number + 1 - len(made)))
        made[number].append(replace(one, at_s=one.at_s - number * round_s))
    return made


async def send_all(
    stretches: Sequence[Stretch], send: Send, seen: Callable[[], Course], begin_s: float
) -> list[RequestOutcome]:
    """Send one stretch after the other, and wait for the outcomes of all.

    Args:
        seen: what was seen of the workers until now.
        begin_s: of the whole load, on the monotonic clock.
    Returns: the outcomes in the order in which their rounds began; times are since `begin_s`.
    """
    tasks: list[asyncio.Task[list[RequestOutcome]]] = []
    async with asyncio.TaskGroup() as group:
        for stretch in stretches:
            for load in stretch.rounds:
                until_s = time.monotonic() + (stretch.round_s or 0.0)
                task = group.create_task(_round(load, send, begin_s))
                tasks.append(task)
                if stretch.round_s is None:
                    await task
                await asyncio.sleep(max(0.0, until_s - time.monotonic()))
                if stretch.enough(seen()):
                    break
    return [outcome for task in tasks for outcome in task.result()]


async def _round(load: Sequence[Planned], send: Send, begin_s: float) -> list[RequestOutcome]:
    at_s = time.monotonic() - begin_s
    return [_later(outcome, at_s) for outcome in await send(load)]


def _later(outcome: RequestOutcome, by_s: float) -> RequestOutcome:
    """An outcome with its times counted from an earlier moment on."""
    return replace(
        outcome,
        planned_s=outcome.planned_s + by_s,
        sent_s=outcome.sent_s + by_s,
        end_s=outcome.end_s + by_s,
        arrivals=tuple(replace(each, at_s=each.at_s + by_s) for each in outcome.arrivals),
    )


# -- on a local cluster

LOOK_S = 0.5
PACED_WORKER = "services.worker.testing.paced_worker"


@contextlib.contextmanager
def paced(paces: Mapping[str, DevicePace]) -> Iterator[None]:
    """Context in which workers of clusters with `autoscale` are started with devices of these
    paces, by role; those of other roles as usual."""
    plain = cluster_plan.numbered_worker

    @functools.wraps(plain)
    def numbered_worker(
        config: ClusterConfig, role: str, index: int, parts: cluster_plan.WorkerSpec
    ) -> cluster_plan.ProcessSpec:
        spec = plain(config, role, index, parts)
        if role not in paces:
            return spec
        interpreter, safe, *module = spec.argv
        if module[:2] != ["-m", f"services.{role}"]:
            raise ValueError(f"{spec.name} is started in a way that is not known here: {spec.argv}")
        pace = (role, repr(paces[role].step_s), repr(paces[role].token_s))
        return replace(spec, argv=(interpreter, safe, "-m", PACED_WORKER, *pace, *module[2:]))

    cluster_plan.numbered_worker = numbered_worker
    try:
        yield
    finally:
        cluster_plan.numbered_worker = plain


@contextlib.asynccontextmanager
async def watching(
    cluster: LocalCluster, moments: list[Moment], begin_s: float
) -> AsyncIterator[None]:
    """Context in which the pools are looked at all the while, into `moments`; the first look is
    there when the body begins.

    Args: begin_s: of the load, on the monotonic clock.
    """
    async with grpc.aio.insecure_channel(cluster.autoscaler_address) as channel:
        stub = autoscaler_pb2_grpc.AutoscalerStub(channel)

        async def look() -> None:
            asked = autoscaler_pb2.GetDecisionsRequest(num_decisions=1)
            reply = await stub.GetDecisions(asked, timeout=5.0)
            pools = {pool.role: PoolSize(pool.num_wanted, pool.num_ready) for pool in reply.pools}
            if set(pools) == set(ROLES):  # not before its first look
                sizes = {role: pools[role] for role in ROLES}
                moments.append(Moment(time.monotonic() - begin_s, sizes))

        async def again() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                await look()

        async with asyncio.timeout(30.0):
            while not moments:
                await look()
                await asyncio.sleep(LOOK_S)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(again())
            yield
            task.cancel()


SHAPES = {
    "step": "1:15,{high}:45,1:60",
    "ramp": "1..{high}:60,{high}..1:30,1:30",
    "burst": "1:15,{high}:10,1:25,{high}:10,1:60",
    "paced": "2.5:20",
}
"""The shapes of a local load: its rates in phases; `high` is more than the workers at the beginning
are wanted to serve. "paced" is a round of its load, which goes on until it can be judged."""

HIGH_PER_S = 12.0
_LEAD_S = 1.0
_TIMEOUT_S = 120.0
_LENGTHS = workload.Lengths(64, 48, spread=0.5)

PACED = {
    "prefill": DevicePace(token_s=0.0088),
    "decode": DevicePace(step_s=0.5),
}
"""Paces of the shape "paced", by role. A prefill worker takes 0.56 s for a prompt, 1.8 a second; a
decode worker with 12 slots takes 6 s for an answer, 2 a second. At 2.5 a second one of each is too
little, and two are enough. A core computes a tenth of that time at most, so a busy machine keeps
the pace."""

PACED_SLOTS = 12
PACED_LENGTHS = workload.Lengths(64, 13)
PACED_TARGETS = Limits(ttft_ms=3000.0, tpot_ms=1000.0)
"""Latency targets of the shape "paced": well above what a request takes where none waits, 0.56 and
0.5 s."""

MAX_ROUNDS = 25
"""Most rounds of a load that lasts until workers were added; then the result says that none
were."""

JUDGED_S = 40.0
"""Time for which a paced load goes on after the backlog is cleared: 100 requests."""

QUANTILE = 0.9
"""Share of the requests that shall meet each target: the plan's own default."""

QUICK = (
    # Processes start in seconds and a benchmark has minutes: the plan's own pace is for pods.
    "autoscaler.plan.pace.window_s=8",
    "autoscaler.plan.pace.up_s=2",
    "autoscaler.plan.pace.down_s=10",
    "autoscaler.plan.pace.flip_s=10",
    "autoscaler.plan.pace.settle_s=5",
    "autoscaler.plan.pace.lead_s=5",
    "autoscaler.plan.pace.down_cooldown_s=3",
    "autoscaler.interval_s=1",
)


@dataclass(frozen=True)
class Met:
    """How many requests met the targets, among those sent in one span of time."""

    from_s: float
    to_s: float
    num_requests: int
    ttft_share: float
    tpot_share: float
    """Share of the requests that met the target of time per token; 0 without any. A request that
    failed met no target."""

    def reaches(self, share: float) -> bool:
        """Whether at least `share` of the requests met each target."""
        return min(self.ttft_share, self.tpot_share) >= share


@dataclass(frozen=True)
class Drive:
    """The run of one load on a local cluster, and what was seen while it ran."""

    outcomes: list[RequestOutcome]
    """The outcome of each request."""

    course: Course
    """The workers from before the load until the fewest are left again, or time is up."""

    @property
    def reaction_s(self) -> float | None:
        """Seconds from the load's beginning until more workers of each role served; None: never."""
        return reaction_s(self.course)

    def met(self, targets: Limits, from_s: float, to_s: float) -> Met:
        """How many of the requests that were sent within a span of time met the targets."""
        sent = [each for each in self.outcomes if from_s <= each.sent_s < to_s]

        def share(of: Limits) -> float:
            return sum(map(of.keeps, sent)) / len(sent) if sent else 0.0

        return Met(
            from_s,
            to_s,
            len(sent),
            share(Limits(ttft_ms=targets.ttft_ms)),
            share(Limits(tpot_ms=targets.tpot_ms)),
        )

    def met_before_and_after(self, targets: Limits) -> tuple[Met, Met] | None:
        """How many requests met the targets until workers were added, and from when these had as
        long again to clear the backlog; None: none were added. For a load that is too much for the
        first workers all the while."""
        reaction_s = self.reaction_s
        if reaction_s is None:
            return None
        end_s = max(each.sent_s for each in self.outcomes) + LOOK_S
        return self.met(targets, 0.0, reaction_s), self.met(targets, 2 * reaction_s, end_s)


def reaction_s(seen: Course) -> float | None:
    """Seconds from the load's beginning until more workers of each role served; None: not yet."""
    reactions = [seen.reaction_s(role) for role in ROLES]
    known = [each for each in reactions if each is not None]
    return max(known) if len(known) == len(reactions) else None


def have_come(seen: Course) -> bool:
    """Whether workers of each role were added, however long they took to start."""
    return reaction_s(seen) is not None


def can_be_judged(seen: Course) -> bool:
    """Whether workers of each role were added, these had time to clear the backlog, and `JUDGED_S`
    have passed since; see `Drive.met_before_and_after`."""
    added_s = reaction_s(seen)
    return added_s is not None and seen.moments[-1].at_s >= 2 * added_s + JUDGED_S


def config(*overrides: str, most: int = 3) -> ClusterConfig:
    """Make the config of a cluster with one worker of each role at first, at most `most` of
    each."""
    return ClusterConfig(
        port=0,
        autoscale=True,
        num_prefill_max=most,
        num_decode_max=most,
        overrides=(*QUICK, *overrides),
    )


def _paced_priors() -> dict[str, float]:
    """Priors of the plan that are the workers' true speeds, so that the first minute is not spent
    on finding them out."""
    prefill, decode = PACED["prefill"], PACED["decode"]
    return {
        "prefill_tokens_per_s": round(1 / prefill.token_s, 3),
        "decode_step_s": decode.step_s,
        "num_prompt_tokens": PACED_LENGTHS.num_input_tokens,
        "num_output_tokens": PACED_LENGTHS.num_output_tokens,
        "max_num_running": PACED_SLOTS,
    }


def paced_config(most: int = 2) -> ClusterConfig:
    """Make the config of a cluster whose workers are started within `paced(PACED)`."""
    assert PACED_TARGETS.ttft_ms is not None and PACED_TARGETS.tpot_ms is not None
    return config(
        # One prompt a step: no first token waits for prompts that came later.
        f"prefill.engine.max_num_tokens_per_step={PACED_LENGTHS.num_input_tokens}",
        f"decode.engine.max_num_running={PACED_SLOTS}",
        *(f"autoscaler.plan.priors.{name}={value}" for name, value in _paced_priors().items()),
        f"autoscaler.plan.targets.ttft_s={PACED_TARGETS.ttft_ms / 1e3}",
        f"autoscaler.plan.targets.tpot_s={PACED_TARGETS.tpot_ms / 1e3}",
        f"autoscaler.plan.targets.quantile={QUANTILE}",
        # Not before the first workers have been late, however fast processes start.
        "autoscaler.plan.pace.up_s=10",
        most=most,
    )


def shaped(
    rates: str,
    *,
    vocab_size: int,
    seed: int,
    lengths: workload.Lengths = _LENGTHS,
    kind: workload.ArrivalKind = "poisson",
) -> list[Planned]:
    """Plan the requests of a load whose rates are `rates`."""
    phases = workload.parse_rates(rates)
    times_s = workload.arrival_times(phases, num_requests=None, kind=kind, seed=seed)
    return workload.random_load(times_s, lengths, vocab_size=vocab_size, seed=seed)


def paced_stretch(
    rates: str,
    *,
    vocab_size: int,
    seed: int,
    enough: Callable[[Course], bool] | None = None,
) -> Stretch:
    """Plan a part of a load for paced workers: an open loop, requests come evenly. Every prompt is
    another, so none is found in a cache.

    Args: enough: asked each time `rates` were sent; until it says yes they are sent again. None:
        they are sent once.
    """
    round_s = sum(phase.seconds for phase in workload.parse_rates(rates))
    num_rounds = MAX_ROUNDS if enough is not None else 1
    load = shaped(
        ",".join([rates] * num_rounds),
        vocab_size=vocab_size,
        seed=seed,
        lengths=PACED_LENGTHS,
        kind="constant",
    )
    return Stretch(rounds_of(load, round_s), enough or at_once, round_s)


async def drive(cluster: LocalCluster, stretches: Sequence[Stretch], *, settle_s: float) -> Drive:
    """Send a load and watch the workers; afterwards wait until the fewest workers are left, at most
    `settle_s` seconds."""
    moments: list[Moment] = []
    begin_s = time.monotonic() + _LEAD_S
    async with watching(cluster, moments, begin_s), Client(cluster.address) as client:
        await asyncio.sleep(_LEAD_S)

        async def send(load: Sequence[Planned]) -> list[RequestOutcome]:
            return await run_load(load, GrpcSender(client, {}), timeout_s=_TIMEOUT_S)

        outcomes = await send_all(stretches, send, lambda: Course(tuple(moments)), begin_s)
        deadline_s = time.monotonic() + settle_s
        while time.monotonic() < deadline_s and not _is_least(cluster.config, moments[-1]):
            await asyncio.sleep(LOOK_S)
    return Drive(outcomes, Course(tuple(moments)))


def _is_least(config_of: ClusterConfig, moment: Moment) -> bool:
    least = {
        "prefill": max(1, config_of.num_prefill_min),
        "decode": max(1, config_of.num_decode_min),
    }
    return all(
        size.num_wanted == size.num_ready == least[role] for role, size in moment.pools.items()
    )


def summary(driven: Drive) -> dict[str, Any]:
    """The published figures of one load."""
    seen = driven.course
    return {
        "requests": asdict(report(driven.outcomes, Limits())),
        "workers": {
            role: {
                "most_ready": seen.most_ready(role),
                "last_wanted": seen.last_wanted(role),
                "num_turns": seen.num_turns(role),
                "reaction_s": seen.reaction_s(role),
            }
            for role in ROLES
        },
    }


async def _vocab_size(cluster: LocalCluster) -> int:
    async with Client(cluster.address) as client:
        return await GrpcSender(client, {}).vocab_size() or 1


def _one(config_of: ClusterConfig, load_of: Callable[[int], Stretch]) -> Drive:
    """A cluster of its own, so that no shape begins with another's workers."""
    with LocalCluster(config_of) as cluster:
        stretch = load_of(asyncio.run(_vocab_size(cluster)))
        return asyncio.run(drive(cluster, [stretch], settle_s=90.0))


def _drive_shape(shape: str, high: float, seed: int) -> Drive:
    rates = SHAPES[shape].format(high=high)
    if shape != "paced":
        return _one(config(), lambda size: Stretch([shaped(rates, vocab_size=size, seed=seed)]))

    def load_of(vocab_size: int) -> Stretch:
        return paced_stretch(rates, vocab_size=vocab_size, seed=seed, enough=can_be_judged)

    with paced(PACED):
        return _one(paced_config(), load_of)


@harness.case
@click.option("--shapes", type=Several(click.Choice(sorted(SHAPES))), default=",".join(SHAPES))
@click.option("--high", default=HIGH_PER_S, help="requests a second")
@click.option("--seed", default=0)
@click.option("--plot", type=click.Path(path_type=Path), help="all loads, one picture")
def local(
    shapes: Sequence[str],
    high: float,
    seed: int,
    plot: Path | None,
) -> dict[str, Any]:
    """Load that steps, climbs or bursts, on a local cluster that scales itself:
    what became of the requests, and how many workers there were; two to five minutes each.

    The plan, the router's heartbeats and the workers are the real ones; only pods are processes. On
    few cores more workers do not compute more: there one sees that workers come and go in time and
    cost no request, not that they help. That they help is the shape "paced": its workers' devices
    take a set time for a step (services/worker/testing/paced_worker.py), so that their slots bind,
    not the cores.
    """
    driven = {shape: _drive_shape(shape, high, seed) for shape in shapes}
    results = {shape: summary(each) for shape, each in driven.items()}
    if "paced" in driven:
        spans = driven["paced"].met_before_and_after(PACED_TARGETS)
        results["paced"]["targets"] = {**asdict(PACED_TARGETS), "quantile": QUANTILE}
        results["paced"]["met"] = spans and dict(
            zip(("before", "after"), map(asdict, spans), strict=True)
        )
    if plot is not None:
        draw({shape: (each.outcomes, each.course) for shape, each in driven.items()}, plot)
    rows = []
    for shape, result in results.items():
        found, ttft = result["requests"], result["requests"]["ttft"] or {}
        most = {f"most {role}": result["workers"][role]["most_ready"] for role in ROLES}
        num_failed = sum(each["num"] for each in found["failures"])
        row = {"load": shape, "requests": found["num_requests"], "failed": num_failed}
        rows.append(
            row | {f"TTFT {name}": ttft.get(name, "-") for name in ("p50_ms", "p99_ms")} | most
        )
    harness.show("on a local cluster", rows)
    return {"loads": results}


main = harness.program(__doc__, simulated, local)

if __name__ == "__main__":
    main()
