"""How tests wait: for what comes to be, within a bound that no busy machine reaches; on clocks that
go on, at gates that open and for times that are over when the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from process import deadline
from process.deadline import Deadline

if TYPE_CHECKING:
    from services.decode.worker import DecodeWorker
    from tests.harness.worker_probe import WorkerProbe

WAIT_S = 30.0
"""No wait of a test may take longer; far above what any should take."""


async def until(condition: Callable[[], Any | Awaitable[Any]], timeout_s: float = WAIT_S) -> None:
    """Poll a condition, which may be async, until it holds. Raises: TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while True:
            held = condition()
            if inspect.isawaitable(held):
                held = await held
            if held:
                return
            await asyncio.sleep(0.005)


async def settled() -> None:
    """Until nothing on this loop can go on without time, a thread or a peer. For one at a time."""
    loop: Any = asyncio.get_running_loop()
    async with asyncio.timeout(WAIT_S):
        await asyncio.sleep(0)
        while loop._ready:
            await asyncio.sleep(0)


def block_until(condition: Callable[[], Any], timeout_s: float = WAIT_S) -> None:
    """As `until`, where no loop runs. Raises: TimeoutError."""
    end_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {timeout_s:g} s")
        time.sleep(0.01)


def within(timeout_s: float = WAIT_S) -> Deadline:
    """The deadline of a call that should succeed."""
    return Deadline.after(timeout_s)


class Clock:
    """Seconds that pass when the test says so; also in place of the module `time`."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def monotonic(self) -> float:
        return self.now_s


class Gate:
    """Holds calls of one method of an object until told to go on."""

    closed: ClassVar[list[Gate]] = []

    def __init__(self, target: Any, name: str) -> None:
        self._target, self._name = target, name
        self._real = getattr(target, name)
        self._open = asyncio.Event()
        self.entered = asyncio.Event()
        setattr(target, name, self._gated)
        Gate.closed.append(self)

    async def _gated(self, *arguments: Any, **options: Any) -> Any:
        self.entered.set()
        await self._open.wait()
        return await self._real(*arguments, **options)

    async def wait_entered(self) -> None:
        async with asyncio.timeout(WAIT_S):
            await self.entered.wait()

    @classmethod
    def open_all(cls) -> None:
        """Every one that is closed."""
        for gate in list(cls.closed):
            gate.open()

    def open(self) -> None:
        """Let those that wait and all that come go on; idempotent."""
        if self in Gate.closed:
            Gate.closed.remove(self)
        self._open.set()
        setattr(self._target, self._name, self._real)


class Deadlines:
    """Requests whose time is over when a test says so: none has to get anywhere within a budget
    that a busy machine may use up before.

    Keeps the scopes that `Deadline.timeout` opens in each task; the first one of a request's
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
        async with asyncio.timeout(WAIT_S):
            while task not in self._scopes:
                await asyncio.sleep(0.001)
        _end(self._scopes[task][0])

    def of(self, worker: WorkerProbe, key: int) -> Callable[[], Awaitable[None]]:
        """`end_decode` for later, when the worker may have let go of the request."""
        task = task_of(worker.worker.role.worker, key)
        return lambda: self.end(task)

    async def end_decode(self, worker: WorkerProbe, key: int) -> None:
        """That of the request under this key of a stream of this decode worker."""
        await self.end(task_of(worker.worker.role.worker, key))

    def end_prefill(self, key: int = 7) -> None:
        """That of the last request to begin under this key; by default a PrefillCall's."""
        self.end_newest(f"prefill {key}")

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
