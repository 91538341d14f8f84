"""Tasks that nobody awaits: when one dies of an error the log says so, and their owner can end them
for certain."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

from process import logs, spans

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
"""A cancelled task that is not over by then is cancelled again."""
_GIVE_UP_S = 30.0
"""A task that is not over by then is left behind, and the log names it."""


def start_task(
    work: Coroutine[Any, Any, None], name: str, *, is_for_many: bool = False
) -> asyncio.Task[None]:
    """Run `work` as a task; its owner keeps it and ends it. `is_for_many`: it works for others than
    the request that starts it, too, and is no part of that one's trace."""
    context = spans.detached() if is_for_many else None
    task = asyncio.create_task(work, name=name, context=context)
    task.add_done_callback(_report)
    return task


async def end_tasks(
    tasks: Iterable[asyncio.Task[Any] | None],
    *,
    again_s: float = _AGAIN_S,
    give_up_s: float = _GIVE_UP_S,
) -> None:
    """Cancel the tasks and see them to their end; what they end with is theirs to report.

    A single cancel is a wish that can be lost: before Python 3.12 `asyncio.wait_for` swallows one
    that arrives in the turn in which its own work is done, and libraries use it. So it is repeated.
    """
    left = {task for task in tasks if task is not None and not task.done()}
    for _ in range(round(give_up_s / again_s)):
        if not left:
            return
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=again_s)
    names = sorted(task.get_name() for task in left)
    if names:
        logs.event(logger, "tasks_not_ended", level=logging.ERROR, tasks=names)


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        fields = {"fields": {"task": task.get_name()}}
        logger.error("background_task_died", exc_info=error, extra=fields)
