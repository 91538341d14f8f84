"""A load whose length is not known beforehand: stretches one after another, each sent again and
again until there is enough of it. What enough is, is asked of what was seen of the workers: when
they come is the machine's affair."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

from baton.load.course import Course
from baton.load.runner import Outcome
from baton.load.workload import Planned

Send = Callable[[Sequence[Planned]], Awaitable[list[Outcome]]]
"""All of a load; the outcomes' times are since its beginning."""


def at_once(course: Course) -> bool:
    """One round is enough."""
    return True


@dataclass(frozen=True)
class Stretch:
    """A part of a load."""

    rounds: Sequence[Sequence[Planned]]
    """Sent one after another, at most all of them; times are since each one's beginning."""

    enough: Callable[[Course], bool] = at_once
    """Asked after each round of what was seen so far; yes ends the stretch."""

    round_s: float | None = None
    """From one round's beginning to the next's, whatever became of its requests: an open loop
    throughout. None: a round ends when all of its requests have."""


def rounds_of(load: Sequence[Planned], round_s: float) -> list[list[Planned]]:
    """A load cut into rounds of so many seconds each; empty ones, where nothing is sent, too."""
    made: list[list[Planned]] = []
    for planned in load:
        number = int(planned.at_s // round_s)
        made += ([] for _ in range(number + 1 - len(made)))
        made[number].append(replace(planned, at_s=planned.at_s - number * round_s))
    return made


async def send_all(
    stretches: Sequence[Stretch], send: Send, seen: Callable[[], Course], begin_s: float
) -> list[Outcome]:
    """Send one stretch after the other, and wait for all that came of them.

    Args:
        seen: what was seen of the workers until now.
        begin_s: of the whole load, on the monotonic clock.
    Returns: the outcomes in the order in which their rounds began; times are since `begin_s`.
    """
    tasks: list[asyncio.Task[list[Outcome]]] = []
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


async def _round(load: Sequence[Planned], send: Send, begin_s: float) -> list[Outcome]:
    at_s = time.monotonic() - begin_s
    return [_later(outcome, at_s) for outcome in await send(load)]


def _later(outcome: Outcome, by_s: float) -> Outcome:
    """The same, with its times from an earlier moment on."""
    return replace(
        outcome,
        planned_s=outcome.planned_s + by_s,
        sent_s=outcome.sent_s + by_s,
        end_s=outcome.end_s + by_s,
        arrivals=tuple(replace(each, at_s=each.at_s + by_s) for each in outcome.arrivals),
    )
