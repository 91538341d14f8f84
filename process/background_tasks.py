"""Background asyncio tasks: tasks that are not awaited, whose errors are logged and which their
owner ends for certain, and work that must come to its end although its caller was cancelled."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from process import logs, trace_spans

logger = logging.getLogger(__name__)

T = TypeVar("T")

_AGAIN_S = 1.0
"""A cancelled task that is not over by then is cancelled again."""
_GIVE_UP_S = 30.0
"""A task that is not over by then is left behind, and the log names it."""


def start_task(
    work: Coroutine[Any, Any, None], name: str, *, is_for_many: bool = False
) -> asyncio.Task[None]:
    """Run `work` as a background task, whose error is logged; its owner keeps it and ends it.
    is_for_many: the task works for others than the request that starts it, too, and is no part of
    that request's trace."""
    context = trace_spans.without_span() if is_for_many else None
    task = asyncio.create_task(work, name=name, context=context)
    task.add_done_callback(_report)
    return task


async def end_tasks(
    tasks: Iterable[asyncio.Task[Any] | None],
    *,
    again_s: float = _AGAIN_S,
    give_up_s: float = _GIVE_UP_S,
) -> None:
    """Cancel tasks and wait for their end; their results and errors are not looked at.

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


async def complete_despite_cancel(work: asyncio.Future[Any]) -> None:
    """Wait until `work` (which must be bounded) is done, even if the caller is cancelled meanwhile;
    then re-raise the cancellation. The result or error of `work` is left for the caller to take."""
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class BackgroundTasks:
    """Tasks that outlive the calls that started them; their owner waits for all of them with
    `settle`. One asyncio loop."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """Run `work` as a task. Its error is raised where the task is awaited, if it is."""

        async def run() -> T:
            return await work

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return task

    async def settle(self) -> None:
        """Wait until no task is left. Each task must have a bound of its own."""
        while self._tasks:
            await asyncio.wait(set(self._tasks))


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        fields = {"fields": {"task": task.get_name()}}
        logger.error("background_task_died", exc_info=error, extra=fields)
