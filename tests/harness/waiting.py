"""Requests whose time is over when a test says so: none has to get anywhere within a budget that a
busy machine may use up before.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import pytest

from process import deadline

if TYPE_CHECKING:
    from services.decode.worker import DecodeWorker

BEGIN_S = 30.0


class Deadlines:
    """Keeps the scopes that `Deadline.timeout` opens in each task; the first one of a request's
    task is its time. Stands for `asyncio` in process/deadline.py, which needs no more of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._scopes: dict[asyncio.Task[Any], list[asyncio.Timeout]] = {}
        monkeypatch.setattr(deadline, "asyncio", self)

    def timeout(self, delay_s: float) -> asyncio.Timeout:
        scope = asyncio.timeout(delay_s)
        task = asyncio.current_task()
        assert task is not None
        self._scopes.setdefault(task, []).append(scope)
        return scope

    async def end(self, task: asyncio.Task[Any] | None) -> None:
        """The time of what this task does is over; once it has begun."""
        assert task is not None
        async with asyncio.timeout(BEGIN_S):
            while task not in self._scopes:
                await asyncio.sleep(0.001)
        _end(self._scopes[task][0])

    def end_newest(self, name: str) -> None:
        """That of the last task of this name to begin."""
        *_, scopes = (scopes for task, scopes in self._scopes.items() if task.get_name() == name)
        _end(scopes[0])

    def end_all(self) -> None:
        """That of everything that is under way."""
        for scope in [scope for scopes in self._scopes.values() for scope in scopes]:
            with contextlib.suppress(RuntimeError):  # its body is over
                _end(scope)


def _end(scope: asyncio.Timeout) -> None:
    scope.reschedule(asyncio.get_running_loop().time())


def task_of(worker: DecodeWorker, key: int) -> asyncio.Task[None] | None:
    """Of the request under this key of a stream."""
    requests = worker._requests.values()
    return next(request.task for request in requests if request.key == key)
