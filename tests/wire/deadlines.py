"""Requests whose time is over when a test says so: none has to get anywhere within a budget that a
busy machine may use up before.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from process import deadline
from services.decode.worker import DecodeWorker
from tests.wire.prefill_decode_pair import until


class Deadlines:
    """Keeps the scope that `Deadline.timeout` opens first in each task: a request is one, and that
    is its time. Stands for `asyncio` in process/deadline.py, which needs no more of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._scopes: dict[asyncio.Task[Any], asyncio.Timeout] = {}
        monkeypatch.setattr(deadline, "asyncio", self)

    def timeout(self, delay_s: float) -> asyncio.Timeout:
        scope = asyncio.timeout(delay_s)
        task = asyncio.current_task()
        assert task is not None
        self._scopes.setdefault(task, scope)
        return scope

    async def end(self, task: asyncio.Task[Any] | None) -> None:
        """The time of what this task does is over; once it has begun."""
        assert task is not None
        await until(lambda: task in self._scopes)
        self._scopes[task].reschedule(asyncio.get_running_loop().time())

    def end_newest(self, name: str) -> None:
        """That of the last task of this name to begin."""
        *_, scope = (scope for task, scope in self._scopes.items() if task.get_name() == name)
        scope.reschedule(asyncio.get_running_loop().time())


def task_of(worker: DecodeWorker, key: int) -> asyncio.Task[None] | None:
    """Of the request under this key of a stream."""
    requests = worker._requests.values()
    return next(request.task for request in requests if request.key == key)
