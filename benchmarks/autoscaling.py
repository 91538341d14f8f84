"""The autoscaler's plan on a modelled cluster (services/autoscaler/simulator.py), beside two peers'
rules: loads that step, ramp, burst, change their mixture, or follow a trace, in simulated time.

Told for each: requests that met both targets (one that was not served met none), the time after
the load's highest jump until 9 of 10 that arrive meet them again, device time over what an oracle
takes that has the fewest workers that carry each half minute's load and starts them at once, how
often the number of a pool's workers turned round, and the most devices taken at once. Nothing here
is measured on a machine: rates are those of `Machines`. The last line printed is one JSON object.

    python -m benchmarks.autoscaling --plot benchmarks/results/<date>-autoscaling.svg

Nothing is written unless --out and --plot say where.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from baton.load.workload import arrival_times, parse_rates, read_trace
from benchmarks.autoscaling_peers import LoadMode, OurPlan, RatioLaw, Rule
from benchmarks.context import context, publish
from services.autoscaler.capacity import Capacity
from services.autoscaler.limits import Pace, PlanSettings, PoolLimits, Priors, ScaleLimits, Targets
from services.autoscaler.rates import rates_of
from services.autoscaler.signals import ByRole, Role
from services.autoscaler.simulated import Machines, Request
from services.autoscaler.simulator import Cluster

if TYPE_CHECKING:
    from matplotlib.axes import Axes

EVERY_S = 5.0
BIN_S = 30.0
MACHINES = Machines(
    token_s=1 / 25_000, step_s=0.0066, stream_s=0.00028, max_streams=128, stream_blocks=100
)
"""About an 8B model on one large GPU; a step of 128 streams takes 42 ms."""

SETTINGS = PlanSettings(
    targets=Targets(ttft_s=1.0, tpot_s=0.05),
    limits=ScaleLimits(PoolLimits(1, 10), PoolLimits(1, 10), budget_devices=12),
    pace=Pace(),
    priors=Priors(max_num_running=128),
)
"""Priors are the defaults: the plan finds out itself what the machines are."""


@dataclass(frozen=True)
class Load:
    """Rates as `baton bench` reads them, and lengths by phase: (until, prompt, output)."""

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
class Run:
    """One load under one rule."""

    rule: str
    requests: list[Request]
    at_s: list[float] = field(default_factory=list)
    serving: list[ByRole[int]] = field(default_factory=list)
    wanted: list[ByRole[int]] = field(default_factory=list)
    devices: list[int] = field(default_factory=list)
    num_flips: int = 0


def requests_of(load: Load, seed: int) -> list[Request]:
    """The load, drawn; lengths are exponential around their means."""
    rng = random.Random(f"{load.name} {seed}")
    times = arrival_times(
        parse_rates(load.rates), num_requests=None, burstiness=load.burstiness, seed=seed
    )
    found = []
    for at_s in times:
        prompt, output = next((p, o) for until_s, p, o in load.lengths if at_s < until_s)
        num_prompt = 1 + int(rng.expovariate(1 / prompt))
        found.append(Request(at_s, num_prompt, 0, 2 + int(rng.expovariate(1 / output))))
    return found


def trace_requests(file: Path) -> list[Request]:
    """A trace in Mooncake's format, without its prefixes: what hits is the cluster's affair."""
    trace = read_trace(file)
    first_ms = trace[0].timestamp_ms
    return [
        Request(
            (line.timestamp_ms - first_ms) / 1000,
            line.num_input_tokens,
            0,
            max(2, line.num_output_tokens),
        )
        for line in trace
    ]


def simulate(rule: Rule, requests: Sequence[Request], seconds: float) -> Run:
    """All of it, and 2 minutes for what is still running then."""
    run = Run(rule.name, [replace(request) for request in requests])
    cluster, queue = Cluster(MACHINES, ByRole(1, 1)), iter(run.requests)
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
        run.serving.append(cluster.serving())
        run.wanted.append(wanted)
        run.devices.append(SETTINGS.limits.devices(cluster.present()))
    cluster.check_integrity()
    return run


def is_met(request: Request) -> bool:
    """Both targets."""
    ttft_s, tpot_s, targets = request.ttft_s, request.tpot_s, SETTINGS.targets
    return (
        ttft_s is not None
        and ttft_s <= targets.ttft_s
        and tpot_s is not None
        and tpot_s <= targets.tpot_s
    )


def by_bin(requests: Sequence[Request], seconds: float) -> list[list[Request]]:
    """By arrival, BIN_S each."""
    bins: list[list[Request]] = [[] for _ in range(int(seconds / BIN_S) + 1)]
    for request in requests:
        bins[min(len(bins) - 1, int(request.at_s / BIN_S))].append(request)
    return bins


def oracle(requests: Sequence[Request], seconds: float) -> list[ByRole[int]]:
    """Fewest workers for each bin, by the machines' own numbers and the bin's own means."""
    limits = replace(SETTINGS.limits, budget_devices=0)
    truth = Priors(
        prefill_tokens_per_s=1 / MACHINES.token_s,
        decode_step_s=MACHINES.step_s,
        decode_stream_s=MACHINES.stream_s,
        max_num_running=MACHINES.max_streams,
    )
    found = []
    for there in by_bin(requests, seconds):
        if not there:
            found.append(limits.least)
            continue
        num = len(there)
        means = replace(
            truth,
            num_prompt_tokens=max(1, sum(r.num_uncached_tokens for r in there) // num),
            num_output_tokens=max(1, sum(r.num_output_tokens for r in there) // num),
        )
        rates = rates_of(Capacity.believed(means), SETTINGS.targets, limits, means)
        needed = ByRole(Role.PREFILL, Role.DECODE).map(
            lambda _, role, rates=rates, num=num: min(
                limits.of(role).max_workers, rates.needed(role, num / BIN_S)
            )
        )
        found.append(needed)
    return found


def summary(run: Run, seconds: float) -> dict[str, Any]:
    """One row."""
    limits, bins = SETTINGS.limits, by_bin(run.requests, seconds)
    least = sum(limits.devices(pair) * BIN_S for pair in oracle(run.requests, seconds))
    took = sum(
        n * EVERY_S for at_s, n in zip(run.at_s, run.devices, strict=True) if at_s <= seconds
    )
    served = sorted(r.ttft_s for r in run.requests if r.ttft_s is not None)
    turns = 0
    for role in Role:
        counts = [pair.of(role) for pair in run.wanted]
        moves = [b > a for a, b in itertools.pairwise(counts) if a != b]
        turns += sum(a != b for a, b in itertools.pairwise(moves))
    return {
        "rule": run.rule,
        "num_requests": len(run.requests),
        "met_share": round(sum(map(is_met, run.requests)) / len(run.requests), 4),
        "ttft_p50_s": round(served[len(served) // 2], 3),
        "ttft_p99_s": round(served[int(len(served) * 0.99)], 3),
        "reaction_s": _reaction_s(bins),
        "device_s": round(took),
        "device_time_over_oracle": round(took / least, 3),
        "most_devices": max(run.devices),
        "num_changes": sum(a != b for a, b in itertools.pairwise(run.wanted)),
        "num_turns": turns,
        "num_flips": run.num_flips,
    }


def _reaction_s(bins: Sequence[Sequence[Request]]) -> float | None:
    """From the bin before which the load rose most until 9 of 10 meet the targets again; None:
    never."""
    rises = [len(b) - len(a) for a, b in itertools.pairwise(bins)]
    first = rises.index(max(rises)) + 1
    for index in range(first, len(bins)):
        if bins[index] and sum(map(is_met, bins[index])) >= 0.9 * len(bins[index]):
            return (index - first) * BIN_S
    return None


def draw(loads: Sequence[tuple[str, float, Sequence[Run]]], file: Path) -> None:
    """A row a load: what arrives, and each rule's workers; and how long first tokens took."""
    from matplotlib.figure import Figure

    columns = 1 + len(loads[0][2])
    figure = Figure(figsize=(4.2 * columns, 2.3 * len(loads)), layout="constrained")
    grid = figure.subplots(len(loads), columns, squeeze=False)
    for row, (name, seconds, runs) in zip(grid, loads, strict=True):
        _draw_latency(row[0], name, seconds, runs)
        for axes, run in zip(row[1:], runs, strict=True):
            _draw_workers(axes, seconds, run)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=90, metadata={"Date": None} if file.suffix == ".svg" else None)


_COLOURS = ("#2a6f97", "#b23a48", "#c9a227")


def _draw_latency(axes: Axes, name: str, seconds: float, runs: Sequence[Run]) -> None:
    for run, colour in zip(runs, _COLOURS, strict=True):
        values = []
        for there in by_bin(run.requests, seconds):
            waits = sorted(r.ttft_s if r.ttft_s is not None else 1e3 for r in there)
            values.append(waits[int(0.9 * (len(waits) - 1))] if waits else float("nan"))
        axes.plot(
            [i * BIN_S / 60 for i in range(len(values))], values, color=colour, lw=1, label=run.rule
        )
    axes.axhline(SETTINGS.targets.ttft_s, color="grey", lw=0.6, ls=":")
    axes.set_yscale("log")
    axes.set_title(f"{name}: first token, P90, s", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, frameon=False)


def _draw_workers(axes: Axes, seconds: float, run: Run) -> None:
    minutes = [at_s / 60 for at_s in run.at_s]
    for role, colour in zip(Role, ("#2a6f97", "#3a7d44"), strict=True):
        axes.step(
            minutes,
            [pair.of(role) for pair in run.serving],
            color=colour,
            lw=1,
            label=role.value,
            where="post",
        )
        axes.step(
            minutes,
            [pair.of(role) for pair in run.wanted],
            color=colour,
            lw=0.6,
            ls=":",
            where="post",
        )
    axes.set_ylim(0, 11)
    load = axes.twinx()
    rates = [len(there) / BIN_S for there in by_bin(run.requests, seconds)]
    load.fill_between(
        [i * BIN_S / 60 for i in range(len(rates))],
        rates,
        color="grey",
        alpha=0.2,
        lw=0,
        step="post",
    )
    load.tick_params(labelsize=6)
    axes.set_title(f"{run.rule}: workers (dotted: wanted), requests/s in grey", fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6, frameon=False, loc="upper left")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", nargs="+", default=[load.name for load in LOADS])
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format beside them")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args()
    cases = [
        (load.name, requests_of(load, parsed.seed)) for load in LOADS if load.name in parsed.loads
    ]
    if parsed.trace:
        cases.append(("trace", trace_requests(parsed.trace)))
    console, rows, drawn = Console(), [], []
    table = Table(
        "load",
        "rule",
        "met",
        "TTFT p50",
        "p99",
        "reaction",
        "device time / oracle",
        "most devices",
        "changes",
        "turns",
        "flips",
        box=None,
    )
    for name, requests in cases:
        seconds = requests[-1].at_s
        rules: list[Rule] = [OurPlan(SETTINGS), RatioLaw(SETTINGS), LoadMode(SETTINGS, MACHINES)]
        runs = [simulate(rule, requests, seconds) for rule in rules]
        drawn.append((name, seconds, runs))
        for run in runs:
            row = {"load": name, **summary(run, seconds)}
            rows.append(row)
            reaction = row["reaction_s"]
            table.add_row(
                name,
                run.rule,
                f"{row['met_share']:.1%}",
                f"{row['ttft_p50_s']:.2f} s",
                f"{row['ttft_p99_s']:.1f} s",
                "-" if reaction is None else f"{reaction:.0f} s",
                f"{row['device_time_over_oracle']:.2f}",
                str(row["most_devices"]),
                str(row["num_changes"]),
                str(row["num_turns"]),
                str(row["num_flips"]),
            )
    console.print(table)
    if parsed.plot:
        draw(drawn, parsed.plot)
    publish(
        {
            "benchmark": "autoscaling",
            **context(),
            "simulated": True,
            "budget_devices": SETTINGS.limits.budget,
            "targets": {"ttft_s": SETTINGS.targets.ttft_s, "tpot_s": SETTINGS.targets.tpot_s},
            "runs": rows,
        },
        parsed.out,
    )


if __name__ == "__main__":
    main()
