"""What `benchmarks.speculation` makes of single steps: a way's speed against plain decoding, with
an interval, split into what resting costs and what guessing costs. Knows no engine.

A step in which no drafter is asked, and that computes as many rows as plain decoding's of the same
number, is a resting one: both compute the same, one right after the other. What resting costs is
the median of the quotients of such pairs in a round: no step that something else held up has more
say than any other. All other steps are guessing ones, and count by the seconds they took: those
with guesses, those in which a drafter was asked for nothing, and those of fewer rows, since who was
guessed for ends first. With P the seconds of all plain steps, P_rest of those that resting ones
stand beside, r the rounds' medians (mean by P_rest), O the seconds of guessing ones:

    1 / speed = (r * P_rest + O) / P = 1 + (r - 1) * P_rest / P  +  (O - (P - P_rest)) / P
                                           resting_loss             guessing_loss

The interval. Steps that follow each other meet the same moments of a machine, and all steps of an
engine the same memory, so that neither steps nor pairs are independent; rounds are, in which all
engines are made anew. So a round is one observation: what its resting steps took more or less than
r says, and its guessing ones than the quotient of all rounds' says, together; the interval is
Student's, of as many observations as rounds. It is about time: which guesses were made, and kept,
is taken as it was. How often a trial comes is the policy's matter, and no accident of a clock.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.speculation_rounds import AGAIN, PLAIN

_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14,
            2.13, 2.12, 2.11, 2.10, 2.09, 2.09)  # fmt: skip
"""Of 95 %, on both sides, for 1, 2, ... degrees of freedom; the last for more, too."""

_DIGITS = 4


class Step(NamedTuple):
    """One step of an engine."""

    wall_s: float
    cpu_s: float
    """That the engine's thread computed."""
    num_tokens: int
    """That it computed and kept: rows, where nothing was guessed."""
    is_asked: bool
    """A drafter was."""


class Held(NamedTuple):
    """One round of a way beside plain decoding's: what speed is reckoned from."""

    plain_s: float
    resting_plain_s: float
    """Of the plain steps that resting ones stand beside."""
    resting: float
    """Median of resting steps' seconds by those; 1.0 where there are none."""
    guessing_s: float
    num_resting: int
    num_guessing: int


class Speed(NamedTuple):
    """See the module."""

    speed: float
    low: float | None
    high: float | None
    """Of the interval; None: one round has none."""
    resting_loss: float
    guessing_loss: float


def held(plain: Sequence[Step], own: Sequence[Step], clock: str) -> Held:
    """Of one round.

    Args:
        plain, own: steps in their order, without those of prompts; the way's n-th was taken beside
            the plain n-th, and it has no more of them.
        clock: field of Step.
    """
    if len(own) > len(plain):
        raise ValueError(f"{len(own)} steps where plain decoding took {len(plain)}")
    plain_s = [float(getattr(step, clock)) for step in plain]
    quotients: list[float] = []
    resting_plain_s = guessing_s = 0.0
    for step, beside, beside_s in zip(own, plain, plain_s, strict=False):
        seconds = getattr(step, clock)
        if step.is_asked or step.num_tokens != beside.num_tokens:
            guessing_s += seconds
        else:
            quotients.append(seconds / beside_s)
            resting_plain_s += beside_s
    num_resting = len(quotients)
    resting = statistics.median(quotients) if quotients else 1.0
    num_guessing = len(own) - num_resting
    return Held(sum(plain_s), resting_plain_s, resting, guessing_s, num_resting, num_guessing)


def speed(rounds: Sequence[Held]) -> Speed:
    """Of all rounds. See the module."""
    plain_s = math.fsum(one.plain_s for one in rounds)
    rested_s = math.fsum(one.resting_plain_s for one in rounds)
    guessing_s = math.fsum(one.guessing_s for one in rounds)
    resting_s = math.fsum(one.resting * one.resting_plain_s for one in rounds)
    own_s = resting_s + guessing_s
    found = plain_s / own_s
    resting_loss = (resting_s - rested_s) / plain_s
    guessing_loss = (guessing_s - (plain_s - rested_s)) / plain_s
    if len(rounds) < 2:
        return Speed(found, None, None, resting_loss, guessing_loss)
    resting = resting_s / rested_s if rested_s else 1.0
    in_place_s = plain_s - rested_s  # of guessing
    guessing = guessing_s / in_place_s if in_place_s > 0.0 else 0.0
    off_s = [
        (one.resting - resting) * one.resting_plain_s
        + one.guessing_s
        - guessing * (one.plain_s - one.resting_plain_s)
        for one in rounds
    ]
    num_rounds = len(rounds)
    error = math.sqrt(math.fsum(one * one for one in off_s) * num_rounds / (num_rounds - 1)) / own_s
    width = math.exp(_STUDENT[min(num_rounds - 1, len(_STUDENT)) - 1] * error)
    return Speed(found, found / width, found * width, resting_loss, guessing_loss)


def figures(plain: Sequence[Sequence[Step]], own: Sequence[Sequence[Step]]) -> dict[str, Any]:
    """Of one way: `speed`, its `interval`, `resting_loss` and `guessing_loss` by the wall clock,
    the same `by_cpu`, by the time that the engine's thread computed, and `held`: each round, by the
    wall clock, as fields of Held."""
    by_clock = {
        clock: [held(one, beside, clock) for one, beside in zip(plain, own, strict=True)]
        for clock in ("wall_s", "cpu_s")
    }
    found = _rounded(speed(by_clock["wall_s"]))
    found["by_cpu"] = _rounded(speed(by_clock["cpu_s"]))
    found["held"] = [[round(number, 6) for number in one] for one in by_clock["wall_s"]]
    return found


def _rounded(one: Speed) -> dict[str, Any]:
    interval = None
    if one.low is not None and one.high is not None:
        interval = [round(one.low, _DIGITS), round(one.high, _DIGITS)]
    return {
        "speed": round(one.speed, _DIGITS),
        "interval": interval,
        "resting_loss": round(one.resting_loss, _DIGITS),
        "guessing_loss": round(one.guessing_loss, _DIGITS),
    }


def verdicts(by_batch: Mapping[str, Mapping[str, Any]], least: float) -> dict[str, list[str]]:
    """Cells and ways by whether they are at least so fast: `shown`, all of the interval is;
    `refuted`, nothing of it is; `open`, it says neither."""
    found: dict[str, list[str]] = {"shown": [], "open": [], "refuted": []}
    for cell, by_way in by_batch.items():
        for way, one in by_way.items():
            if way == PLAIN:
                continue
            low, high = one["interval"] or (0.0, math.inf)
            verdict = "shown" if low >= least else "refuted" if high < least else "open"
            found[verdict].append(_line(cell, way, one))
    return found


def markdown(by_batch: Mapping[str, Mapping[str, Any]], ways: Sequence[str]) -> str:
    """A table of speeds and their intervals, by cell and way."""
    lines = [f"| speed against plain (95 %) | {' | '.join(ways)} |", "|---|" + "---|" * len(ways)]
    for cell, by_way in by_batch.items():
        told: list[str] = []
        for way in ways:
            low, high = by_way[way]["interval"] or (math.nan, math.nan)
            told.append(f"{by_way[way]['speed']:.3f} ({low:.3f}-{high:.3f})")
        lines.append(f"| {cell} | {' | '.join(told)} |")
    return "\n".join(lines)


def control(by_batch: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of "plain again", which is as fast as plain decoding, whatever is measured: `num_cells`, and
    `off`, those whose interval leaves 1 out. Intervals of 95 % leave it out in one of 20."""
    off = [
        _line(cell, AGAIN, by_way[AGAIN])
        for cell, by_way in by_batch.items()
        if (interval := by_way[AGAIN]["interval"]) and not interval[0] <= 1.0 <= interval[1]
    ]
    return {"num_cells": len(by_batch), "off": off}


def _line(cell: str, way: str, one: Mapping[str, Any]) -> str:
    interval = one["interval"]
    told = "no interval" if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
    return f"{cell}, {way}: {one['speed']:.3f} ({told})"
