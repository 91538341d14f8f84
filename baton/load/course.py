"""What workers there were while a load ran: how many at each moment, how often that turned around,
and one picture of load, workers and waiting. Values and pure functions, but for `draw`.

matplotlib comes with the extra `plots` and is loaded only there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from baton.load.runner import Outcome

Role = Literal["prefill", "decode"]
ROLES: tuple[Role, ...] = ("prefill", "decode")

_COLOURS = {"prefill": "#c9a227", "decode": "#2a6f97"}
_FAILED = "#b23a48"
_WINDOW_S = 2.0


@dataclass(frozen=True)
class PoolSize:
    """Workers of one role at one moment."""

    num_wanted: int
    """That the autoscaler has asked for."""

    num_ready: int
    """That serve."""


@dataclass(frozen=True)
class Moment:
    """What was seen at once."""

    at_s: float
    """Since the load began; below 0 before it."""

    pools: dict[Role, PoolSize]
    """Of each role."""


@dataclass(frozen=True)
class Course:
    """See the module. Moments in the order of time."""

    moments: tuple[Moment, ...]

    def most_ready(self, role: Role) -> int:
        """Most workers that served at once."""
        return max(moment.pools[role].num_ready for moment in self.moments)

    def last_wanted(self, role: Role) -> int:
        """What was asked for in the end."""
        return self.moments[-1].pools[role].num_wanted

    def num_turns(self, role: Role) -> int:
        """How often more were asked for after fewer, or fewer after more. A load that comes and
        goes once needs one; each turn beyond what the load itself does is oscillation."""
        wanted = [moment.pools[role].num_wanted for moment in self.moments]
        steps = [after - before for before, after in itertools.pairwise(wanted)]
        ups = [step > 0 for step in steps if step]
        return sum(after != before for before, after in itertools.pairwise(ups))

    def reaction_s(self, role: Role) -> float | None:
        """From the load's beginning until more workers served than before; None: never."""
        first = self.moments[0].pools[role].num_ready
        for moment in self.moments:
            if moment.at_s >= 0 and moment.pools[role].num_ready > first:
                return moment.at_s
        return None


def offered(outcomes: Sequence[Outcome], window_s: float = _WINDOW_S) -> list[tuple[float, float]]:
    """(middle of a window, requests a second sent in it), windows without any included."""
    if not outcomes:
        return []
    counts = [0] * (int(max(outcome.sent_s for outcome in outcomes) // window_s) + 1)
    for outcome in outcomes:
        counts[int(outcome.sent_s // window_s)] += 1
    return [((i + 0.5) * window_s, count / window_s) for i, count in enumerate(counts)]


Run = tuple[Sequence[Outcome], Course]
"""One load: what became of its requests, and the workers meanwhile."""


def draw(outcomes: Sequence[Outcome], course: Course, file: Path, title: str) -> None:
    """Load, workers and waiting over the same seconds, into that file. Raises: OSError."""
    draw_all({title: (outcomes, course)}, file)


def draw_all(runs: Mapping[str, Run], file: Path) -> None:
    """The same of several loads beside one another, by their titles. Raises: OSError."""
    from matplotlib.figure import Figure

    width = 10 if len(runs) == 1 else 5.5 * len(runs)
    figure = Figure(figsize=(width, 8), layout="constrained")
    axes: Any = figure.subplots(3, len(runs), sharex="col", sharey="row", squeeze=False)
    for column, (title, (outcomes, course)) in zip(axes.T, runs.items(), strict=True):
        column[0].set_title(title)
        _draw(column, outcomes, course)
    for row, label in zip(
        axes, ("requests a second", "workers", "seconds to the first token"), strict=True
    ):
        row[0].set_ylabel(label)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=120, metadata={"Date": None} if file.suffix == ".svg" else None)


def _draw(axes: Any, outcomes: Sequence[Outcome], course: Course) -> None:
    """One column."""
    axes[0].step(*zip(*offered(outcomes), strict=True), where="mid", color="#444444")
    for role in ROLES:
        times = [moment.at_s for moment in course.moments]
        for kind, style in (("ready", "-"), ("wanted", ":")):
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
