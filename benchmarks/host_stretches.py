"""What of a step's time the host spends on what: the engine's parts with a stopwatch around each.
What runs while the device computes, and what the device waits for, stand apart: of plain steps.
Where the step after is launched ahead, the device waits for none of it unless "wait" is nothing."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine import plain_steps
from engine.decode_rows import DecodeRows
from engine.foresight import Foresight
from engine.in_flight import InFlight
from engine.loop import Engine
from engine.runner import Runner
from engine.sampling import pipeline
from engine.scheduler import Scheduler

HIDDEN = ("launch", "draw", "foresight", "wait")
"""From the first launch on the device has work; before and after these it has none, but for what
the host takes until the first launch."""

_PARTS: tuple[tuple[Any, str, str], ...] = (
    (Scheduler, "_admit", "admission"),
    (Scheduler, "_plan", "plan"),
    (Scheduler, "_grant", "blocks"),
    (Scheduler, "plan_after", "plan"),
    (DecodeRows, "of_plan", "build"),
    (DecodeRows, "after", "build"),
    (InFlight, "launch", "launch"),
    (InFlight, "take", "wait"),
    (plain_steps, "build", "build"),
    (pipeline, "begin", "draw"),
    (Foresight, "use_wait", "foresight"),
    (Runner, "_book", "booking"),
)

Step = dict[str, float]
"""Seconds by stretch, each without those within it; "step" is all of it, "other" what no stretch
has."""


class Stopwatch:
    """Times of one step after another."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.steps: list[Step] = []
        self._now: Step = {}
        self._inner_s: list[float] = []

    def around(self, work: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The same work, timed."""

        @functools.wraps(work)
        def timed(*args: Any, **fields: Any) -> Any:
            self._inner_s.append(0.0)
            began = time.perf_counter()
            try:
                found = work(*args, **fields)
            finally:
                took_s = time.perf_counter() - began
                inner_s = self._inner_s.pop()
                self._now[name] = self._now.get(name, 0.0) + took_s - inner_s
                if self._inner_s:
                    self._inner_s[-1] += took_s
            return self.around(found, "wait") if work is _begin else found

        return timed

    def step(self) -> Any:
        """Engine.step, as one more entry of `steps`."""
        self._now = {}
        began = time.perf_counter()
        output = self.around(self._engine.step, "other")()
        self.steps.append({"step": time.perf_counter() - began, **self._now})
        return output


_begin = pipeline.begin


@contextlib.contextmanager
def watched(engine: Engine) -> Iterator[Stopwatch]:
    """This engine's parts are timed meanwhile; others' in the same process, too."""
    watch = Stopwatch(engine)
    model: Any = engine._model  # noqa: SLF001  its passes are a stretch
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in _PARTS]
    for owner, name, stretch in _PARTS:
        setattr(owner, name, watch.around(getattr(owner, name), stretch))
    model.forward = watch.around(model.forward, "launch")
    try:
        yield watch
    finally:
        del model.forward
        for owner, name, work in before:
            setattr(owner, name, work)


def medians_us(steps: Sequence[Step]) -> dict[str, float]:
    """Of each stretch over these steps, microseconds, rounded; what no step had is not there."""
    names = dict.fromkeys(name for step in steps for name in step)
    return {
        name: round(statistics.median(step.get(name, 0.0) for step in steps) * 1e6)
        for name in names
    }
