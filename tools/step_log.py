"""What a worker's step log (services/worker/step_log.py) says of the time between steps, and of
what went on beside the longest.

    python -m tools.step_log steps/decode-0.steps.jsonl
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from services.worker import step_log

Entries = dict[str, list[Any]]

_NUM_LONGEST = 8
_BEFORE_S = 0.02
"""Time before a late step in which something that began may have delayed it: the step before was
launched then."""

_NEIGHBOURS = 25
"""Steps before and after one, whose median says how long it should have been: contexts grow."""


@dataclass(frozen=True)
class LoggedSpan:
    """A span of time, from one moment of the monotonic clock to another."""

    begun_s: float
    ended_s: float

    def __contains__(self, at_s: float) -> bool:
        return self.begun_s <= at_s < self.ended_s


def cuts(values_ms: Sequence[float]) -> dict[str, float]:
    """Summarize times: how many, p50, p99, p99.9 and the longest."""
    if len(values_ms) < 2:
        return {"num": len(values_ms)}
    found = statistics.quantiles(values_ms, n=1000, method="inclusive")
    return {
        "num": len(values_ms),
        "p50_ms": round(found[499], 3),
        "p99_ms": round(found[989], 3),
        "p99_9_ms": round(found[998], 3),
        "longest_ms": round(max(values_ms), 3),
    }


def step_periods(entries: Entries, spans: Iterable[LoggedSpan]) -> list[tuple[float, float]]:
    """The times between the ends of steps within one of the spans: (when a step ended, s; time
    since the one before ended, ms)."""
    ends = [begun_s + took_s for begun_s, took_s, _, _ in entries["step"]]
    found = []
    for span in spans:
        within = [at_s for at_s in ends if at_s in span]
        found += [(after, (after - before) * 1e3) for before, after in itertools.pairwise(within)]
    return found


def excess(entries: Entries, spans: Iterable[LoggedSpan]) -> dict[str, Any]:
    """Milliseconds by which steps were longer than their neighbours' median, by what went on: a
    request joined (more tokens than usual), blocks came meanwhile, or neither."""
    steps = [
        (begun_s, begun_s + took_s, num_tokens)
        for begun_s, took_s, num_tokens, _ in entries["step"]
    ]
    moving = [(begun_s, begun_s + took_s) for begun_s, took_s, _ in entries["transfer"]]
    found: dict[str, list[float]] = {"joined": [], "transfer": [], "neither": []}
    for span in spans:
        within = [step for step in steps if step[1] in span]
        periods = [(before[1], after[1], after[2]) for before, after in itertools.pairwise(within)]
        usual = statistics.median([num_tokens for _, _, num_tokens in within] or [0])
        for at, (begun_s, ended_s, num_tokens) in enumerate(periods):
            near = periods[max(0, at - _NEIGHBOURS) : at + _NEIGHBOURS + 1]
            own = statistics.median(end - begin for begin, end, _ in near)
            kind = "neither"
            if num_tokens > usual:
                kind = "joined"
            elif any(begin < ended_s and end > begun_s for begin, end in moving):
                kind = "transfer"
            found[kind].append((ended_s - begun_s - own) * 1e3)
    return {kind: cuts(values) for kind, values in found.items()}


def explain(entries: Entries, spans: Sequence[LoggedSpan]) -> dict[str, Any]:
    """Report the periods' distribution, how they differ by what went on beside, what jobs and
    transfers took, and the longest periods with all that went on beside."""
    periods = step_periods(entries, spans)
    longest = sorted(periods, key=lambda period: -period[1])[:_NUM_LONGEST]
    jobs: dict[str, list[float]] = {}
    for begun_s, took_s, name in entries["job"]:
        if any(begun_s in span for span in spans):
            jobs.setdefault(name, []).append(took_s * 1e3)
    transfers = [
        took_s * 1e3
        for begun_s, took_s, _ in entries["transfer"]
        if any(begun_s in span for span in spans)
    ]
    return {
        "period": cuts([period_ms for _, period_ms in periods]),
        "excess": excess(entries, spans),
        "transfers": cuts(transfers),
        "jobs": {
            name: {"num": len(took_ms), "p50_ms": round(statistics.median(took_ms), 3)}
            | {"longest_ms": round(max(took_ms), 3)}
            for name, took_ms in jobs.items()
        },
        "longest": [_beside(entries, ended_s, period_ms) for ended_s, period_ms in longest],
    }


def _beside(entries: Entries, ended_s: float, period_ms: float) -> dict[str, Any]:
    """Moments are ms before the late step's end."""
    window = LoggedSpan(ended_s - period_ms / 1e3 - _BEFORE_S, ended_s)
    found: dict[str, Any] = {"period_ms": round(period_ms, 2)}
    for kind, values in entries.items():
        beside = [
            [round((ended_s - at_s) * 1e3, 1), round(took_s * 1e3, 2), *rest]
            for at_s, took_s, *rest in values
            if at_s in window
        ]
        if beside:
            found[kind] = beside
    return found


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("logs", type=click.Path(path_type=Path, exists=True), nargs=-1, required=True)
def main(logs: tuple[Path, ...]) -> None:
    """Time between steps, and what ran beside the longest, of logs of `--set decode.step_log`."""
    for path in logs:
        Console().print(path.name, explain(step_log.read(path), [LoggedSpan(-math.inf, math.inf)]))


if __name__ == "__main__":
    main()
