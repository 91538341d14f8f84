"""PrefillSession: one router's stream: its keys, the prompts behind them, and their cancellation
when it breaks.

States of a key: RUNNING -> its answer | its failure, each the last message; a cancel leads from
RUNNING to the failure CANCELLED and has no effect afterwards. Invariant: a handle belongs to the
router once its answer was written; an answer that was not written is taken back.

Knows no stubs. Belongs to the loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Protocol

from process.background_tasks import start_task
from process.deadline import Deadline
from process.errors import AlreadyExists, BatonError, Cancelled, Internal
from process.trace_spans import Span
from services.prefill.handover import PrefillAnswer
from services.prefill.job import PrefillAsk
from services.prefill.worker import Audience, PrefillWorker

logger = logging.getLogger(__name__)


class EventSink(Audience, Protocol):
    """Interface to send the events of one key; its methods do not block."""

    def answered(self, answer: PrefillAnswer) -> None:
        """Send the answer. Raises: when it cannot be sent."""

    def failed(self, error: BaseException) -> None: ...


class PrefillSession:
    """Prompts of one stream, by the router's keys."""

    def __init__(self, worker: PrefillWorker) -> None:
        self._worker = worker
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._untold: dict[int, PrefillAnswer] = {}
        self._is_closed = False
        self._idle = asyncio.Event()
        self._idle.set()

    def begin(
        self, key: int, ask: PrefillAsk, deadline: Deadline, sink: EventSink, span: Span
    ) -> None:
        """Start to prefill a prompt; `span` ends with it. Raises: AlreadyExists when the key is in
        use."""
        if key in self._tasks:
            raise AlreadyExists(f"key {key} is in use on this stream")
        self._idle.clear()
        work = self._live(key, ask, deadline, sink, span)
        self._tasks[key] = start_task(work, f"prefill {key}", is_for_many=True)
        self._tasks[key].add_done_callback(lambda _: self._over(key))

    def cancel(self, key: int) -> None:
        """Cancel a prompt; one that is over is ignored."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    def told(self, key: int) -> None:
        """Record that the key's answer was written, so that its handle belongs to the router."""
        self._untold.pop(key, None)

    async def wait_idle(self) -> None:
        """Wait until every prompt of the stream is over. Each has its own deadline."""
        await self._idle.wait()

    def close(self) -> None:
        """Cancel all prompts because the stream has ended, and take back the answers that were not
        delivered. Idempotent. Raises: the error of taking one back, after all of them were."""
        self._is_closed = True
        for task in list(self._tasks.values()):
            task.cancel()
        with contextlib.ExitStack() as taking:  # all of them, whatever one of them raises
            for answer in self._untold.values():
                taking.callback(answer.take_back)
            self._untold.clear()

    async def _live(
        self, key: int, ask: PrefillAsk, deadline: Deadline, sink: EventSink, span: Span
    ) -> None:
        try:
            with span:
                await self._worker.prefill(
                    ask, deadline, sink, lambda answer: self._tell(key, answer, sink)
                )
        except asyncio.CancelledError:
            sink.failed(Cancelled(f"request {ask.request_id} was cancelled"))
        except Exception as error:  # the translator of this border: the sink makes a status of it
            if isinstance(error, Internal) or not isinstance(error, BatonError):
                fields = {"fields": {"request_id": ask.request_id}}
                logger.error("prefill_request_failed", exc_info=error, extra=fields)
            sink.failed(error)

    def _tell(self, key: int, answer: PrefillAnswer, sink: EventSink) -> None:
        """Send an answer. Raises: when it cannot be sent; the caller then takes the answer back."""
        if self._is_closed:
            raise Cancelled("the stream is gone")
        sink.answered(answer)
        self._untold[key] = answer

    def _over(self, key: int) -> None:
        del self._tasks[key]
        if not self._tasks:
            self._idle.set()
