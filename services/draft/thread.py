"""DraftThread: the thread that owns the draft sessions and their model. Its public methods are
called on the loop.

Waiting calls are computed as one batch, with at most one call of each verifier. Between batches the
thread computes the KV of new text (catch-up). When it is idle, it checks the sessions' invariants.
Under constant load it does both after a fixed number of batches.

An invalid call fails alone. Any other error, or a batch that takes longer than `step_timeout_s`,
sets `failed` and fails every call: the process should then end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from engine.speculation.draft_protocol import DraftRequest, DraftResponse
from engine.speculation.draft_sessions import DraftSessions
from process import logs
from process.background_tasks import end_tasks, start_task
from process.deadline import Deadline
from process.rpc_errors import BatonError, Internal, InvalidArgument, NoCapacity, Unavailable
from services.worker.engine_thread import StepWatch

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 0.25
PIECE_EVERY = 4
"""Batches between two pieces of catch-up under constant load. Guessed: a piece takes as long as
several batches.
"""
LAWS_EVERY = 256
"""Batches between two checks of the invariants under constant load."""


@dataclass(eq=False)
class _Call:
    verifier: bytes
    requests: Sequence[DraftRequest]
    answers: Future[Sequence[DraftResponse]] = field(default_factory=Future)


@dataclass(eq=False)
class _Forget:
    verifier: bytes
    sessions: Sequence[int]


_Job = _Call | _Forget | None


class DraftThread:
    """Thread that drafts tokens for verifiers' sessions in batches."""

    def __init__(
        self, sessions: DraftSessions, max_waiting_calls: int, *, step_timeout_s: float = 0.0
    ) -> None:
        """`step_timeout_s`: limit of one step of drafting; 0: none."""
        self.sessions = sessions
        """Sessions; on the loop, read for their counts only."""
        self.failed = asyncio.Event()
        self.failure: BatonError | None = None
        self._num_put = self._num_done = 0  # the loop writes the first, the thread the second
        self._max_waiting_calls = max_waiting_calls
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._is_over = False
        self._watch = StepWatch(step_timeout_s, "guessing")
        self._watching: asyncio.Task[None] | None = None
        if self._watch.is_on:
            self._watching = start_task(self._watch.run(self._on_late), "draft watch")
        self._thread = threading.Thread(target=self._run, name="drafts", daemon=True)
        self._thread.start()

    @property
    def is_stuck(self) -> bool:
        """Whether the thread has failed by timeout and the late step still runs."""
        return self.failure is not None and self._watch.is_late

    @property
    def num_waiting(self) -> int:
        """Number of jobs that wait or are computed: calls and Forgets. A call that was given up
        counts until the thread reaches it.
        """
        return self._num_put - self._num_done

    async def propose(
        self, verifier: bytes, requests: Sequence[DraftRequest], deadline: Deadline
    ) -> Sequence[DraftResponse]:
        """Return a draft for each request. Raises: InvalidArgument, NoCapacity, DeadlineExceeded;
        Unavailable when the thread has ended or failed.
        """
        with _named():
            self.sessions.check(verifier, requests)
        call = _Call(verifier, requests)
        self._put(call)
        async with deadline.timeout("guessing"):
            return await asyncio.wrap_future(call.answers)

    def forget(self, verifier: bytes, sessions: Sequence[int]) -> None:
        """Drop sessions after the calls before; does not wait for it. Raises: InvalidArgument,
        NoCapacity, Unavailable.
        """
        with _named():
            self.sessions.check_ended(verifier, sessions)
        self._put(_Forget(verifier, sessions))

    async def stop(self, timeout_s: float) -> bool:
        """Fail the calls that have not begun, and end the thread. Returns: whether it ended within
        `timeout_s`.
        """
        await end_tasks([self._watching])
        self._is_over = True
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join, timeout_s)
        return not self._thread.is_alive()

    def _on_late(self, failure: Internal) -> None:
        if self.failure is None:
            self.failure = failure
            logs.event(logger, "guessing_stuck", level=logging.ERROR, why=str(failure))
            self.failed.set()

    def _put(self, job: _Call | _Forget) -> None:
        if self._is_over or self.failure is not None:
            raise Unavailable(str(self.failure or "this worker is stopping"))
        if self.num_waiting >= self._max_waiting_calls:
            raise NoCapacity(f"{self.num_waiting} calls wait", retry_after_s=0.1)
        self._num_put += 1
        self._jobs.put(job)

    # ---- the thread

    def _run(self) -> None:
        waiting: deque[_Call | _Forget] = deque()
        try:
            self._work(waiting)
        except Exception as error:
            logger.exception("guessing has failed")
            if self.failure is None:
                self.failure = Internal(f"guessing has failed: {type(error).__name__}: {error}")
            self._loop.call_soon_threadsafe(self.failed.set)
        self._watch.end()
        self._is_over = True
        with contextlib.suppress(queue.Empty, _Over):
            while True:
                self._take(waiting, 0.0)
        for job in waiting:
            self._num_done += 1
            if isinstance(job, _Call) and job.answers.set_running_or_notify_cancel():
                job.answers.set_exception(
                    Unavailable(str(self.failure or "this worker is stopping"))
                )

    def _work(self, waiting: deque[_Call | _Forget]) -> None:
        is_changed = False
        num_batches = 0  # without a pause
        while True:
            if not waiting:
                is_behind = self.sessions.is_behind
                timeout_s = 0.0 if is_behind else IDLE_CHECK_S if is_changed else None
                try:
                    self._watch.end()
                    self._take(waiting, timeout_s)
                except queue.Empty:
                    self._watch.begin()
                    if is_behind:
                        self.sessions.catch_up()
                    else:
                        self.sessions.check_integrity()
                        is_changed = False
                    num_batches = 0
                    continue
                except _Over:
                    return
            is_changed = True
            self._watch.begin()
            self._do(waiting)
            num_batches += 1
            if num_batches % PIECE_EVERY == 0:
                self._watch.begin()
                self.sessions.catch_up()
            if num_batches % LAWS_EVERY == 0:
                self.sessions.check_integrity()

    def _do(self, waiting: deque[_Call | _Forget]) -> None:
        """Process the job that waits longest, together with the calls that fit into its batch."""
        job = waiting[0]
        if isinstance(job, _Forget):
            waiting.popleft()
            self._num_done += 1
            self.sessions.forget(job.verifier, job.sessions)
        else:
            self._propose(_batch(waiting))

    def _take(self, waiting: deque[_Call | _Forget], timeout_s: float | None) -> None:
        """Move all queued jobs to `waiting`, at least one. Raises: Empty when none came within
        `timeout_s` (None: no limit); _Over when the thread should end.
        """
        is_waiting = timeout_s is None or timeout_s > 0.0
        job = self._jobs.get(is_waiting, timeout_s if is_waiting else None)
        while True:
            if job is None:
                raise _Over
            waiting.append(job)
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return

    def _propose(self, calls: Sequence[_Call]) -> None:
        # Calls that were given up meanwhile are not computed.
        live = [call for call in calls if call.answers.set_running_or_notify_cancel()]
        requests = [(call.verifier, one) for call in live for one in call.requests]
        try:
            answers = self.sessions.propose(requests) if live else []
        except Exception as error:
            self._num_done += len(calls)
            for call in live:
                call.answers.set_exception(Internal(f"guessing has failed: {error}"))
            raise
        self._num_done += len(calls)  # before the callers get their results
        first = 0
        for call in live:
            call.answers.set_result(answers[first : first + len(call.requests)])
            first += len(call.requests)


@contextlib.contextmanager
def _named() -> Iterator[None]:
    """Turn a ValueError with the text `field: problem` into InvalidArgument."""
    try:
        yield
    except ValueError as error:
        name, _, problem = str(error).partition(": ")
        raise InvalidArgument(name, problem) from error


class _Over(Exception):
    """The thread was asked to end."""


def _batch(waiting: deque[_Call | _Forget]) -> list[_Call]:
    """Remove and return the calls of the next batch: the first call, and those after it that may be
    computed with it.
    """
    calls: list[_Call] = []
    verifiers: set[bytes] = set()
    while waiting:
        job = waiting[0]
        # Another call of the same verifier may be about the same sessions.
        if isinstance(job, _Forget) or job.verifier in verifiers:
            break
        waiting.popleft()
        verifiers.add(job.verifier)
        calls.append(job)
    return calls
