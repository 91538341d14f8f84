"""Admission queue for blocks of the engine, first come, first served.

Invariant: a request never takes blocks while one that came earlier still waits. One engine call
tries all waiting requests (arrivals of one step join the same next step), in order, up to the first
that finds no room; they are tried again after `room_may_have_come`. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from engine.errors import NoBlocks
from engine.request import Request, Reservation
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.errors import BatonError, Internal, NoCapacity
from services.worker.adapters import check_digest
from services.worker.engine_port import WorkerEngine
from services.worker.engine_thread import EngineThread

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Waiter:
    request: Request
    future: asyncio.Future[Reservation]


class Admission:
    """FIFO queue in front of `engine.reserve`, at most `max_waiting` requests long."""

    def __init__(
        self,
        thread: EngineThread,
        *,
        max_waiting: int,
        on_full: Callable[[], None] = lambda: None,
    ) -> None:
        """Create an empty queue. on_full: called when a request has found no room."""
        self._thread = thread
        self._max_waiting = max_waiting
        self._on_full = on_full
        self._waiting: list[_Waiter] = []
        self._wake = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def reserve(self, request: Request, deadline: Deadline) -> Reservation:
        """Wait for room and reserve it, if the request's adapter is still loaded.

        The caller posts an `abort` of the request's id if this ends in any other way than by
        returning: a cancelled wait may still have been granted.
        Raises: NoCapacity when the queue is full; DeadlineExceeded; RequestTooLong and what else
        `reserve` refuses.
        """
        if len(self._waiting) >= self._max_waiting:
            raise NoCapacity(
                f"{len(self._waiting)} requests wait for room in this worker's KV cache",
                retry_after_s=1.0,
            )
        if self._pump is None:
            self._pump = start_task(self._grant_forever(), "admission", is_for_many=True)
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(request, future)
        self._waiting.append(waiter)
        self._wake.set()
        try:
            async with deadline.timeout("waiting for room in the KV cache"):
                return await waiter.future
        finally:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
                self._wake.set()

    def room_may_have_come(self) -> None:
        """Retry the waiting requests; called when blocks have been freed."""
        if self._waiting:
            self._wake.set()

    async def stop(self) -> None:
        """Stop the queue; requests that still wait are refused."""
        await end_tasks([self._pump])
        for waiter in self._waiting:
            if not waiter.future.done():
                waiter.future.set_exception(NoCapacity("the worker is stopping"))

    async def _grant_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch = list(self._waiting)
            if batch:
                await self._grant(batch)

    async def _grant(self, batch: list[_Waiter]) -> None:
        asked = [waiter.request for waiter in batch]
        try:
            outcomes = await self._thread.call(lambda engine: _reserve_in_order(engine, asked))
        except BatonError as error:  # the engine is down: nobody will be served
            outcomes = [error] * len(batch)
        except Exception as error:  # the last line of defence: those who come later must be tried
            logger.exception("admission_failed")
            outcomes = [Internal(f"admission failed: {error}")] * len(batch)
        for waiter, outcome in zip(batch, outcomes, strict=False):
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            if waiter.future.done():
                continue
            if isinstance(outcome, BatonError):
                waiter.future.set_exception(outcome)
            else:
                waiter.future.set_result(outcome)
        if len(outcomes) < len(batch):
            self._on_full()


def _reserve_in_order(engine: WorkerEngine, asked: list[Request]) -> list[Reservation | BatonError]:
    """Reserve blocks in order. Returns: one outcome for each request up to the first without
    room."""
    outcomes: list[Reservation | BatonError] = []
    for request in asked:
        try:
            check_digest(engine, request.adapter)
            outcomes.append(engine.reserve(request))
        except NoBlocks:
            break
        except BatonError as error:
            outcomes.append(error)
    return outcomes
