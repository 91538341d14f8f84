"""Load that steps, climbs, bursts or follows a trace, on a local cluster that scales itself: what
became of the requests, and how many workers there were.

    python -m benchmarks.autoscaling_local                        # all shapes, two minutes each
    python -m benchmarks.autoscaling_local --shapes step --plots DIR
    python -m benchmarks.autoscaling_local --trace conversation_trace.jsonl

The plan, the router's beats and the workers are the real ones; only pods are processes. On few
cores more workers do not compute more: here one sees that workers come and go in time and cost no
request, not that they help. What the same plan does to latency at the size of a cluster is
`benchmarks.autoscaling`'s to say, in a model. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc.aio
from rich.console import Console

from baton import Client, LocalCluster
from baton.cluster_plan import ClusterConfig
from baton.load import arrivals, course, planned, trace_file
from baton.load.course import ROLES, Course, Moment, PoolSize
from baton.load.outcome import Outcome
from baton.load.planned import Planned
from baton.load.report import Limits, as_json, report
from baton.load.run import run as run_load
from baton.load.senders import GrpcSender
from baton.tables import table
from protos import autoscaler_pb2, autoscaler_pb2_grpc

SHAPES = {
    "step": "1:15,{high}:45,1:60",
    "ramp": "1..{high}:60,{high}..1:30,1:30",
    "burst": "1:15,{high}:10,1:25,{high}:10,1:60",
}
"""Rates in phases; `high` is more than the workers at the beginning are wanted to serve."""

HIGH_PER_S = 12.0
_LEAD_S = 1.0
_LOOK_S = 0.5
_CALL_S = 5.0
_TIMEOUT_S = 120.0
_LENGTHS = planned.Lengths(64, 48, spread=0.5)

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
class Drive:
    """One load, and what was seen while it ran."""

    outcomes: list[Outcome]
    """Of each request."""

    course: Course
    """Of the workers, from before the load until all is as it was, or time is up."""


def config(*overrides: str, most: int = 3) -> ClusterConfig:
    """One worker of each role at first, at most `most` of each."""
    return ClusterConfig(
        port=0,
        autoscale=True,
        num_prefill_max=most,
        num_decode_max=most,
        overrides=(*QUICK, *overrides),
    )


def shaped(rates: str, *, vocab_size: int, seed: int) -> list[Planned]:
    """Requests of a load whose rates are `rates`."""
    phases = arrivals.parse_rates(rates)
    times_s = arrivals.arrivals(phases, num_requests=None, seed=seed)
    return planned.random_load(times_s, _LENGTHS, vocab_size=vocab_size, seed=seed)


async def drive(
    cluster: LocalCluster,
    load: Sequence[Planned],
    *,
    settle_s: float,
    enough: Callable[[Moment], bool] = lambda moment: True,
    max_rounds: int = 1,
) -> Drive:
    """Send the load and watch; afterwards wait until the fewest workers are left, at most
    `settle_s` seconds.

    Args:
        enough: asked after the load; until it says yes the load is sent again, in all at most
            `max_rounds` times.
    """
    moments: list[Moment] = []
    outcomes: list[Outcome] = []
    begin_s = time.monotonic() + _LEAD_S
    async with _watching(cluster, moments, begin_s), Client(cluster.address) as client:
        await asyncio.sleep(_LEAD_S)
        for _ in range(max_rounds):
            at_s = time.monotonic() - begin_s
            sent = await run_load(load, GrpcSender(client, {}), timeout_s=_TIMEOUT_S)
            outcomes += [_later(outcome, at_s) for outcome in sent]
            if enough(moments[-1]):
                break
        deadline_s = time.monotonic() + settle_s
        while time.monotonic() < deadline_s and not _is_least(cluster.config, moments[-1]):
            await asyncio.sleep(_LOOK_S)
    return Drive(outcomes, Course(tuple(moments)))


def _later(outcome: Outcome, by_s: float) -> Outcome:
    """The same, with its times from an earlier moment on."""
    return replace(
        outcome,
        planned_s=outcome.planned_s + by_s,
        sent_s=outcome.sent_s + by_s,
        end_s=outcome.end_s + by_s,
        arrivals=tuple(replace(each, at_s=each.at_s + by_s) for each in outcome.arrivals),
    )


def _is_least(asked: ClusterConfig, moment: Moment) -> bool:
    least = {"prefill": max(1, asked.num_prefill_min), "decode": max(1, asked.num_decode_min)}
    return all(
        size.num_wanted == size.num_ready == least[role] for role, size in moment.pools.items()
    )


@contextlib.asynccontextmanager
async def _watching(
    cluster: LocalCluster, moments: list[Moment], begin_s: float
) -> AsyncIterator[None]:
    """Look at the pools all the while; the first look is there when this begins."""
    async with grpc.aio.insecure_channel(cluster.autoscaler_address) as channel:
        stub = autoscaler_pb2_grpc.AutoscalerStub(channel)

        async def look() -> None:
            asked = autoscaler_pb2.GetDecisionsRequest(num_decisions=1)
            reply = await stub.GetDecisions(asked, timeout=_CALL_S)
            pools = {pool.role: PoolSize(pool.num_wanted, pool.num_ready) for pool in reply.pools}
            if set(pools) == set(ROLES):  # not before its first look
                sizes = {role: pools[role] for role in ROLES}
                moments.append(Moment(time.monotonic() - begin_s, sizes))

        async def again() -> None:
            while True:
                await asyncio.sleep(_LOOK_S)
                await look()

        async with asyncio.timeout(30.0):
            while not moments:
                await look()
                await asyncio.sleep(_LOOK_S)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(again())
            yield
            task.cancel()


def summary(driven: Drive) -> dict[str, Any]:
    """What is told of one load."""
    seen = driven.course
    return {
        "requests": as_json(report(driven.outcomes, Limits())),
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


def _one(shape: str, load_of: Any, plots: Path | None) -> dict[str, Any]:
    """A cluster of its own, so that no shape begins with another's workers."""
    with LocalCluster(config()) as cluster:
        load = load_of(asyncio.run(_vocab_size(cluster)))
        driven = asyncio.run(drive(cluster, load, settle_s=90.0))
    if plots is not None:
        course.draw(driven.outcomes, driven.course, plots / f"autoscaling-{shape}.png", shape)
    return summary(driven)


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
    parser.add_argument("--plots", type=Path, metavar="FOLDER")
    asked = parser.parse_args()
    results = {}
    if asked.trace is not None:

        def traced(vocab_size: int) -> list[Planned]:
            trace = trace_file.read_trace(asked.trace, limit=asked.requests)
            return trace_file.replay(
                trace,
                vocab_size=vocab_size,
                seed=asked.seed,
                speed=asked.speed,
                shrink=asked.shrink,
            )

        results["trace"] = _one("trace", traced, asked.plots)
    else:
        for shape in asked.shapes:
            rates = SHAPES[shape].format(high=asked.high)
            results[shape] = _one(
                shape,
                lambda size, rates=rates: shaped(rates, vocab_size=size, seed=asked.seed),
                asked.plots,
            )
    shown = table("load", numbers=("requests", "failed", "TTFT p50", "p99", "prefill", "decode"))
    for shape, result in results.items():
        requests, workers = result["requests"], result["workers"]
        num_failed = sum(each["num"] for each in requests["failures"])
        ttft = requests["ttft"] or {}
        most = [str(workers[role]["most_ready"]) for role in ROLES]
        waits = [f"{ttft[name]:.0f} ms" if ttft else "-" for name in ("p50_ms", "p99_ms")]
        shown.add_row(shape, str(requests["num_requests"]), str(num_failed), *waits, *most)
    Console().print(shown)
    sys.stdout.write(json.dumps(results) + "\n")
    return int(any(each["requests"]["failures"] for each in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
