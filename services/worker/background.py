"""Tasks that nobody awaits: when one dies of an error, the log says so."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(__name__)


def start_task(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Run `work` as a task; its owner keeps it and cancels it."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_report)
    return task


def _report(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        fields = {"fields": {"task": task.get_name()}}
        logger.error("background_task_died", exc_info=error, extra=fields)
