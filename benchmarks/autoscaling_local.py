"""Load that steps, climbs, bursts or follows a trace, on a local cluster that scales itself: what
became of the requests, and how many workers there were.

    python -m benchmarks.autoscaling_local              # all shapes, two to five minutes each
    python -m benchmarks.autoscaling_local --shapes step --plot step.png
    python -m benchmarks.autoscaling_local --trace conversation_trace.jsonl

The plan, the router's beats and the workers are the real ones; only pods are processes. On few
cores more workers do not compute more: there one sees that workers come and go in time and cost no
request, not that they help. That they help is the shape "paced": its workers take as long for a
step as they are told (benchmarks/paced_worker.py), so that their slots bind, not the cores. What
the same plan does to latency at the size of a cluster is `benchmarks.autoscaling`'s to say, in a
model. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton import Client, ClusterConfig, LocalCluster
from baton.cli.render import number, table, text
from baton.load import course, workload
from baton.load.course import ROLES, Course, Moment
from baton.load.report import Limits, report
from baton.load.runner import Outcome
from baton.load.runner import run as run_load
from baton.load.senders import GrpcSender
from baton.load.workload import Planned
from benchmarks.context import context, publish
from benchmarks.paced_worker import paced
from benchmarks.pool_watch import LOOK_S, watching
from benchmarks.stretches import Stretch, at_once, rounds_of, send_all
from engine.paced import DevicePace

SHAPES = {
    "step": "1:15,{high}:45,1:60",
    "ramp": "1..{high}:60,{high}..1:30,1:30",
    "burst": "1:15,{high}:10,1:25,{high}:10,1:60",
    "paced": "2.5:20",
}
"""Rates in phases; `high` is more than the workers at the beginning are wanted to serve. "paced" is
a round of its load, which goes on until it can be judged."""

HIGH_PER_S = 12.0
_LEAD_S = 1.0
_TIMEOUT_S = 120.0
_LENGTHS = workload.Lengths(64, 48, spread=0.5)

PACED = {
    "prefill": DevicePace(token_s=0.0088),
    "decode": DevicePace(step_s=0.5),
}
"""A prefill worker takes 0.56 s for a prompt, 1.8 a second; a decode worker with 12 slots takes 6 s
for an answer, 2 a second. At 2.5 a second one of each is too little, and two are enough. A core
computes a tenth of that time at most, so a busy machine keeps the pace."""

PACED_SLOTS = 12
PACED_LENGTHS = workload.Lengths(64, 13)
PACED_TARGETS = Limits(ttft_ms=3000.0, tpot_ms=1000.0)
"""Well above what a request takes where nobody waits: 0.56 and 0.5 s."""

MAX_ROUNDS = 25
"""Of a load that lasts until workers came: so many, and it is told that they did not."""

JUDGED_S = 40.0
"""A paced load goes on for so long after what had piled up is cleared: 100 requests."""

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
    """Requests within targets, among those sent in one span of time."""

    from_s: float
    to_s: float
    num_requests: int
    ttft_share: float
    tpot_share: float
    """Of them; 0 without any. One that failed met nothing."""

    def reaches(self, share: float) -> bool:
        """Whether so many met each."""
        return min(self.ttft_share, self.tpot_share) >= share


@dataclass(frozen=True)
class Drive:
    """One load, and what was seen while it ran."""

    outcomes: list[Outcome]
    """Of each request."""

    course: Course
    """Of the workers, from before the load until all is as it was, or time is up."""

    @property
    def reaction_s(self) -> float | None:
        """From the load's beginning until more workers of each role served; None: never."""
        return reaction_s(self.course)

    def met(self, targets: Limits, from_s: float, to_s: float) -> Met:
        """Of the requests that were sent in that time."""
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
        """Until workers were added, and from when they had as long again to clear what had piled
        up; None: none were. For a load that is too much for the first workers all the while."""
        reaction_s = self.reaction_s
        if reaction_s is None:
            return None
        end_s = max(each.sent_s for each in self.outcomes) + LOOK_S
        return self.met(targets, 0.0, reaction_s), self.met(targets, 2 * reaction_s, end_s)


def reaction_s(seen: Course) -> float | None:
    """From the load's beginning until more workers of each role served; None: not yet."""
    reactions = [seen.reaction_s(role) for role in ROLES]
    known = [each for each in reactions if each is not None]
    return max(known) if len(known) == len(reactions) else None


def have_come(seen: Course) -> bool:
    """Whether workers of each role were added, however long they took to start."""
    return reaction_s(seen) is not None


def can_be_judged(seen: Course) -> bool:
    """Whether, besides, what had piled up had its time to be cleared and `JUDGED_S` are behind
    that; see `Drive.met_before_and_after`."""
    added_s = reaction_s(seen)
    return added_s is not None and seen.moments[-1].at_s >= 2 * added_s + JUDGED_S


def config(*overrides: str, most: int = 3) -> ClusterConfig:
    """One worker of each role at first, at most `most` of each."""
    return ClusterConfig(
        port=0,
        autoscale=True,
        num_prefill_max=most,
        num_decode_max=most,
        overrides=(*QUICK, *overrides),
    )


def _paced_priors() -> dict[str, float]:
    """What is so anyway, so that the first minute is not spent on finding out."""
    prefill, decode = PACED["prefill"], PACED["decode"]
    return {
        "prefill_tokens_per_s": round(1 / prefill.token_s, 3),
        "decode_step_s": decode.step_s,
        "num_prompt_tokens": PACED_LENGTHS.num_input_tokens,
        "num_output_tokens": PACED_LENGTHS.num_output_tokens,
        "max_num_running": PACED_SLOTS,
    }


def paced_config(most: int = 2) -> ClusterConfig:
    """For a cluster whose workers are started within `paced(PACED)`."""
    assert PACED_TARGETS.ttft_ms is not None and PACED_TARGETS.tpot_ms is not None
    return config(
        # One prompt a step: nobody's first token waits for prompts that came later.
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
    """Requests of a load whose rates are `rates`."""
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
    """Of a load for paced workers, an open loop whose requests come evenly. Every prompt is
    another: what is found somewhere takes no time.

    Args:
        enough: asked each time `rates` were sent; until it says yes they are sent again. None: they
            are sent once.
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
    """Send the load and watch; afterwards wait until the fewest workers are left, at most
    `settle_s` seconds."""
    moments: list[Moment] = []
    begin_s = time.monotonic() + _LEAD_S
    async with watching(cluster, moments, begin_s), Client(cluster.address) as client:
        await asyncio.sleep(_LEAD_S)

        async def send(load: Sequence[Planned]) -> list[Outcome]:
            return await run_load(load, GrpcSender(client, {}), timeout_s=_TIMEOUT_S)

        outcomes = await send_all(stretches, send, lambda: Course(tuple(moments)), begin_s)
        deadline_s = time.monotonic() + settle_s
        while time.monotonic() < deadline_s and not _is_least(cluster.config, moments[-1]):
            await asyncio.sleep(LOOK_S)
    return Drive(outcomes, Course(tuple(moments)))


def _is_least(asked: ClusterConfig, moment: Moment) -> bool:
    least = {"prefill": max(1, asked.num_prefill_min), "decode": max(1, asked.num_decode_min)}
    return all(
        size.num_wanted == size.num_ready == least[role] for role, size in moment.pools.items()
    )


def summary(driven: Drive) -> dict[str, Any]:
    """What is told of one load."""
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


def _one(
    asked_config: ClusterConfig, load_of: Callable[[int], Stretch], settle_s: float = 90.0
) -> Drive:
    """A cluster of its own, so that no shape begins with another's workers."""
    with LocalCluster(asked_config) as cluster:
        stretch = load_of(asyncio.run(_vocab_size(cluster)))
        return asyncio.run(drive(cluster, [stretch], settle_s=settle_s))


def _drive_paced(rates: str, seed: int) -> Drive:
    def load_of(vocab_size: int) -> Stretch:
        return paced_stretch(rates, vocab_size=vocab_size, seed=seed, enough=can_be_judged)

    with paced(PACED):
        return _one(paced_config(), load_of)


def _drive_trace(file: Path, asked: argparse.Namespace) -> Drive:
    def load_of(vocab_size: int) -> Stretch:
        trace = workload.read_trace(file, limit=asked.requests)
        load = workload.replay_trace(
            trace,
            vocab_size=vocab_size,
            seed=asked.seed,
            speed=asked.speed,
            shrink=asked.shrink,
        )
        return Stretch([load])

    return _one(config(), load_of)


def _drive_shape(shape: str, asked: argparse.Namespace) -> Drive:
    rates = SHAPES[shape].format(high=asked.high)
    if shape == "paced":
        return _drive_paced(rates, asked.seed)
    return _one(config(), lambda size: Stretch([shaped(rates, vocab_size=size, seed=asked.seed)]))


def _show(results: Mapping[str, Any]) -> None:
    titles = ("requests", "failed", "TTFT p50", "p99", "prefill", "decode")
    numbers = (number(title, operator.itemgetter(place)) for place, title in enumerate(titles, 1))
    rows = []
    for shape, result in results.items():
        requests, workers = result["requests"], result["workers"]
        num_failed = sum(each["num"] for each in requests["failures"])
        ttft = requests["ttft"] or {}
        most = [workers[role]["most_ready"] for role in ROLES]
        waits = [f"{ttft[name]:.0f} ms" if ttft else "-" for name in ("p50_ms", "p99_ms")]
        rows.append((shape, requests["num_requests"], num_failed, *waits, *most))
    shown = table([text("load", operator.itemgetter(0)), *numbers], rows)
    Console().print(shown)


def main() -> int:
    """Returns: 0 if no request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=sorted(SHAPES))
    parser.add_argument("--trace", type=Path, help="in Mooncake's format; instead of shapes")
    parser.add_argument("--shrink", type=int, default=32, help="of a trace: lengths divided by N")
    parser.add_argument("--speed", type=float, default=10.0, help="of a trace")
    parser.add_argument("--requests", type=int, default=600, help="of a trace, at most")
    parser.add_argument("--high", type=float, default=HIGH_PER_S, help="requests a second")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="all loads, one picture")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the JSON object")
    asked = parser.parse_args()
    if asked.trace is not None:
        driven = {"trace": _drive_trace(asked.trace, asked)}
    else:
        driven = {shape: _drive_shape(shape, asked) for shape in asked.shapes}
    results = {shape: summary(each) for shape, each in driven.items()}
    if "paced" in driven:
        spans = driven["paced"].met_before_and_after(PACED_TARGETS)
        results["paced"]["targets"] = {**asdict(PACED_TARGETS), "quantile": QUANTILE}
        results["paced"]["met"] = spans and dict(
            zip(("before", "after"), map(asdict, spans), strict=True)
        )
    if asked.plot is not None:
        runs = {shape: (each.outcomes, each.course) for shape, each in driven.items()}
        course.draw_all(runs, asked.plot)
    _show(results)
    publish({"benchmark": "autoscaling_local", **context(), "loads": results}, asked.out)
    return int(any(each["requests"]["failures"] for each in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
