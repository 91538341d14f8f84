"""EngineThread: the only thread that calls an engine, and the asyncio interface to it.

`start` -> jobs and steps alternate -> `stop`. Between two steps waiting jobs run in order of
arrival, at least one and then for a share of a step's time; the others wait for the next step, so
that decoding requests are not delayed. The results of the jobs between two steps go to the event
loop by one `call_soon_threadsafe`, and each step's output by another. With neither jobs nor work
the thread blocks on its queue; after `idle_check_s` it checks the engine's invariants once. The
engine is closed when the thread ends, unless `stop` leaves it to a later thread.

On a GPU a step may return before its kernels have finished. Transports copy blocks concurrently, so
with a store the results of a step or job are delivered only after the kernels that write into such
blocks have finished: `wait_for_kernels`. That wait comes after the launch of the next step
(`LLMEngine.is_device_behind`).

Failures: an exception of `step` is a failure of the engine: `on_failure` is called (the worker
fails its requests), the invariants are checked for the log, and the thread stays unhealthy. It then
runs no step and refuses `call`, but still runs posted jobs, so that aborts free blocks. An
exception of `on_step` has the same effect, since requests would miss that step's tokens. A step or
job that exceeds `step_timeout_s` waits for a device that does not answer. Nothing can end it, so
the thread `is_stuck` and its process must exit; StepWatch is the watchdog that detects this: the
engine's thread marks begin and end of a step, and the event loop checks the time.

`start`, `call`, `post` and `stop` are used on the event loop's thread; any thread may read `stats`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from engine.metrics import EngineStats
from engine.outputs import StepOutput
from process import logs
from process.background_tasks import end_tasks, start_task
from process.rpc_errors import Internal, Unavailable
from services.worker.engine_port import WorkerEngine
from services.worker.step_log import StepLog

WATCH_S = 1.0
"""Seconds between two checks; a quarter of `timeout_s` where that is less."""


class StepWatch:
    """Timer of the running step.

    Args:
        timeout_s: most seconds of a step; 0: no limit.
        what: name of the step, for the error's message.
    """

    def __init__(
        self, timeout_s: float, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.is_on = timeout_s > 0.0
        self._timeout_s = timeout_s
        self._what = what
        self._clock = clock
        self._since_s: float | None = None

    def begin(self) -> None:
        """Start the timer of a step; the previous one has ended."""
        self._since_s = self._clock()

    def end(self) -> None:
        """Stop the timer at the end of the step."""
        self._since_s = None

    @property
    def age_s(self) -> float:
        """Return the seconds since the running step began; 0: none runs. Any thread."""
        since_s = self._since_s
        return 0.0 if since_s is None else self._clock() - since_s

    @property
    def is_late(self) -> bool:
        """Return whether the running step has exceeded its limit. Any thread."""
        return self.is_on and self.age_s > self._timeout_s

    async def run(self, on_late: Callable[[Internal], None]) -> None:
        """Check until a step is late, then call `on_late` once."""
        while not self.is_late:
            await asyncio.sleep(min(WATCH_S, self._timeout_s / 4))
        on_late(
            Internal(
                f"{self._what} did not end within {self._timeout_s:g} s (limits.step_timeout_s): "
                "its device does not answer"
            )
        )


logger = logging.getLogger(__name__)

T = TypeVar("T")

JOBS_S = 0.001
JOBS_SHARE = 0.2
"""Share of a step's time that jobs may take before the next one, where the device computes a step
ahead and loses nothing by them."""


@dataclass(frozen=True)
class _Job:
    run: Callable[[Any], Any]
    future: asyncio.Future[Any] | None
    then: Callable[[], None] | None = None


@dataclass(frozen=True)
class _JobResult:
    job: _Job
    result: object
    problem: Exception | None


class EngineThread:
    """Thread that runs `engine`: steps, and jobs between them. Not restartable."""

    def __init__(
        self,
        engine: WorkerEngine,
        *,
        idle_check_s: float = 0.25,
        jobs_s: float = JOBS_S,
        jobs_share: float = JOBS_SHARE,
        step_timeout_s: float = 0.0,
        wait_for_kernels: Callable[[], None] = lambda: None,
        log: StepLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the thread; `start` runs it.

        Args:
            jobs_s, jobs_share: time between two steps in which jobs may begin: this share of the
                previous step's time, and at least so many seconds.
            step_timeout_s: most seconds of a step or job; 0: no limit.
            wait_for_kernels: waits until the device has finished all kernels of the engine.
            log: records every job and step.
            clock: clock in seconds for the times of steps.
        """
        self._engine = engine
        self._wait_for_kernels = wait_for_kernels
        self._log = log
        self._idle_check_s = idle_check_s
        self.jobs_s, self.jobs_share = jobs_s, jobs_share
        """Read before each step."""
        self._watch = StepWatch(step_timeout_s, "the engine's step", clock)
        self._watching: asyncio.Task[None] | None = None
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._late: deque[_Job | None] = deque()  # taken from it, and not run yet
        self._job_results: list[_JobResult] = []  # the loop has not heard of them yet
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stats = engine.stats()
        self._failure: Internal | None = None
        self._is_untold = False  # a step's output was, or a part of it
        self._closed = False
        self._closes_engine = True
        self._step_s = 0.0
        self.num_steps = 0
        self.num_idle_checks = 0

    def start(
        self,
        on_step: Callable[[StepOutput], None],
        on_failure: Callable[[Internal], None],
    ) -> None:
        """Start the thread. Both callbacks run on the calling event loop; `on_failure` must not
        raise."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._on_step = on_step
        self._on_failure = on_failure
        self._engine.watch(self._wake)
        self._thread.start()
        if self._watch.is_on:
            self._watching = start_task(self._watch.run(self._on_late), "engine watch")

    @property
    def stats(self) -> EngineStats:
        """Return the engine's statistics as of its last step or job; never waits for the engine."""
        return self._stats

    @property
    def failure(self) -> Internal | None:
        """Return the error because of which the thread is unhealthy; None while it is healthy."""
        return self._failure

    @property
    def step_age_s(self) -> float:
        """Return the seconds since the running step or job began; 0: none runs."""
        return self._watch.age_s

    @property
    def is_stuck(self) -> bool:
        """Return whether the thread has failed because a step or job does not end, and that still
        runs."""
        return self._failure is not None and self._watch.is_late

    async def call(self, run: Callable[[WorkerEngine], T]) -> T:
        """Run `run(engine)` between two steps and return its result.

        A caller that is cancelled does not undo it: the job may still run, later than the
        cancellation. Resources that it acquired must be released by a job posted afterwards. The
        wait is bounded by the caller.
        Raises: the errors of `run`; Unavailable when the thread is unhealthy or stopped.
        """
        self._refuse_if_down()
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put(_Job(run, future))
        return await future

    def post(
        self, run: Callable[[WorkerEngine], object], then: Callable[[], None] | None = None
    ) -> None:
        """Run `run(engine)` between two steps, after everything posted before, then `then` on the
        event loop.

        `run` must not raise: that counts as a failure of the engine. Works on an unhealthy thread;
        ignored on a stopped one.
        """
        if not self._closed:
            self._jobs.put(_Job(run, None, then))

    async def stop(self, timeout_s: float, *, closes_engine: bool = True) -> None:
        """Stop after the step in progress; pending jobs are refused. Raises: Unavailable if the
        step does not end."""
        await end_tasks([self._watching])
        if not self._closed:
            self._closes_engine = closes_engine
            self._closed = True
            self._jobs.put(None)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._ended)
        except TimeoutError as error:
            raise Unavailable(f"the engine did not end its step within {timeout_s} s") from error

    def _refuse_if_down(self) -> None:
        if self._failure is not None:
            raise Unavailable(f"the engine failed: {self._failure}")
        if self._closed:
            raise Unavailable("the worker is stopping")

    def _on_late(self, failure: Internal) -> None:
        if self._failure is None:
            self._failure = failure
            logs.event(logger, "engine_stuck", level=logging.ERROR, why=str(failure))
            self._on_failure(failure)

    def _wake(self) -> None:
        """Wake the engine's thread because one of its processes has ended. Any thread."""
        self._jobs.put(_Job(lambda engine: engine.check_alive(), None))

    # ---- the engine's thread

    def _run(self) -> None:
        stopping = False
        while not stopping:
            for job in self._jobs_before_step():
                if job is None:
                    stopping = True
                    break
                self._watch.begin()
                self._do(job)
                self._watch.end()
            if self._job_results:
                self._watch.begin()  # for the kernels of jobs
                self._deliver_job_results()
                self._watch.end()
            if not stopping and self._failure is None:
                self._watch.begin()
                self._step()
                self._watch.end()
        self._refuse_rest()
        self._stats = self._engine.stats()
        try:
            if self._closes_engine:
                self._engine.close()
        except Exception:  # nothing is left to fail; the log must know
            logger.exception("engine_close_failed")
        self._deliver(self._end)

    def _jobs_before_step(self) -> Iterator[_Job | None]:
        """Return the jobs to run before the next step, as long as there is time; waits when there
        is nothing else to do."""
        if not self._late and (self._failure is not None or not self._engine.has_work()):
            self._late.append(self._wait_for_job())
        with contextlib.suppress(queue.Empty):
            while True:
                self._late.append(self._jobs.get_nowait())
        ends_s = time.monotonic() + max(self.jobs_s, self.jobs_share * self._step_s)
        while self._late:
            yield self._late.popleft()
            if time.monotonic() >= ends_s:
                return

    def _wait_for_job(self) -> _Job | None:
        if self._failure is None:
            try:
                return self._jobs.get(timeout=self._idle_check_s)
            except queue.Empty:
                self._check_when_idle()
        return self._jobs.get()

    def _check_when_idle(self) -> None:
        self.num_idle_checks += 1
        try:
            self._engine.check_integrity()
        except Exception as error:  # the last line of defence
            self._fail(error)

    def _do(self, job: _Job) -> None:
        if job.future is not None and self._failure is not None:
            refusal = Unavailable(f"the engine failed: {self._failure}")
            self._job_results.append(_JobResult(job, None, refusal))
            return
        result, problem = None, None
        begun_s = time.monotonic()
        try:
            result = job.run(self._engine)
        except Exception as error:  # handed to the caller, or the last line of defence
            problem = error
            if job.future is None:
                self._fail(error)
        if self._log is not None:
            self._log.job(begun_s, job.run.__qualname__.rpartition(".")[2])
        self._job_results.append(_JobResult(job, result, problem))

    def _deliver_job_results(self) -> None:
        """Deliver the results of all jobs between two steps at once: waking the loop for each would
        take the interpreter's lock from the next one."""
        results, self._job_results = self._job_results, []
        try:
            self._wait_if_behind()
            self._stats = self._engine.stats()
        except Exception as error:  # the last line of defence
            self._fail(error)
            results = [replace(each, problem=each.problem or error) for each in results]
        self._deliver(self._settle, results)

    def _step(self) -> None:
        begun_s = time.monotonic()
        try:
            if not self._engine.has_work():
                return
            output = self._engine.step()
            self._wait_if_behind()
            self._stats = self._engine.stats()
        except Exception as error:  # the last line of defence
            self._fail(error)
            return
        if self._failure is not None:
            return  # it was late: those who waited for it were told so
        self.num_steps += 1
        self._step_s = time.monotonic() - begun_s
        if self._log is not None:
            self._log.step(begun_s, output.num_scheduled_tokens, output.num_running)
        self._deliver(self._tell, output)

    def _wait_if_behind(self) -> None:
        if self._engine.is_device_behind:
            self._wait_for_kernels()

    def _fail(self, error: Exception) -> None:
        if self._failure is not None:
            return
        logger.error("engine_failed", exc_info=error)
        message = f"{type(error).__name__}: {error}"
        try:
            self._engine.check_integrity()
        except Exception as broken:  # said together with the first
            message += f"; and {broken}"
        self._failure = Internal(f"the engine failed: {message}")
        self._deliver(self._on_failure, self._failure)

    def _refuse_rest(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._late.append(self._jobs.get_nowait())
        for job in self._late:
            if job is not None and job.future is not None:
                refusal = Unavailable("the worker is stopping")
                self._job_results.append(_JobResult(job, None, refusal))
        self._deliver(self._settle, self._job_results)

    def _deliver(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:
            # The loop is closed: nobody is left to tell.
            logs.event(logger, "engine_result_dropped", level=logging.DEBUG)

    # ---- on the loop

    def _tell(self, output: StepOutput) -> None:
        if self._is_untold:
            return
        try:
            self._on_step(output)
        except Exception as error:  # the last line of defence
            self._is_untold = True
            logger.error("engine_step_not_told", exc_info=error)
            if self._failure is None:
                message = f"the engine's step was not told: {type(error).__name__}: {error}"
                self._failure = Internal(message)
                self._on_failure(self._failure)

    def _settle(self, results: list[_JobResult]) -> None:
        for each in results:
            future = each.job.future
            if future is not None and not future.done():  # its caller may have given up
                if isinstance(each.problem, StopIteration):  # no future takes it
                    future.set_exception(Internal(f"a job of the engine: {each.problem!r}"))
                elif each.problem is not None:
                    future.set_exception(each.problem)
                else:
                    future.set_result(each.result)
            if each.job.then is not None:
                self._loop.call_soon(each.job.then)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
