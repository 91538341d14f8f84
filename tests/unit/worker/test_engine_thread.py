"""EngineThread: jobs between steps, one delivery per step, rest when idle, and a clean end after a
failure.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import pytest

from engine.errors import RankFailed
from engine.outputs import StepOutput
from process.rpc_errors import Internal, Unavailable
from services.worker import engine_thread
from services.worker.engine_thread import EngineThread, StepWatch
from tests.harness.gated_engine import GatedModel, fake_engine, prompt_of, request, running
from tests.harness.waiting import WAIT_S, Clock, settled, until


async def test_jobs_leave_those_who_decode_their_steps() -> None:
    engine = fake_engine()
    steps_before: list[int] = []
    waiting = threading.Event()

    async with running(engine, jobs_s=0.0, jobs_share=0.0) as thread:

        def begin(_: object) -> None:
            engine.reserve(request(engine, prompt_of(5), max_tokens=40))
            engine.start("r")
            assert waiting.wait(30)

        thread.post(begin)
        for _ in range(6):
            thread.post(lambda e: steps_before.append(thread.num_steps))
        waiting.set()
        await thread.call(lambda e: None)
        # The device has work all the time: one step at least between any two jobs.
        assert steps_before == sorted(set(steps_before)) and len(steps_before) == 6
        thread.post(lambda e: e.abort("r"))
        await thread.call(lambda e: None)


async def test_an_idle_engine_is_checked_once_and_then_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing runs in an idle engine: its thread waits for a job, and for no time."""
    waits: list[float | None] = []

    class Jobs(queue.SimpleQueue[Any]):
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            if threading.current_thread().name == "engine":
                waits.append(timeout)
            return super().get(block, timeout)

    monkeypatch.setattr(queue, "SimpleQueue", Jobs)
    engine = fake_engine()
    checked = threading.Event()
    real_check = engine.check_integrity

    def check() -> None:
        real_check()
        checked.set()

    engine.check_integrity = check  # type: ignore[method-assign]
    async with running(engine) as thread:
        await asyncio.to_thread(checked.wait, 30)
        await until(lambda: waits[-1] is None)
        assert thread.num_idle_checks == 1
        checked.clear()
        await thread.call(lambda e: None)
        await asyncio.to_thread(checked.wait, 30)
        assert thread.num_idle_checks == 2


@pytest.mark.parametrize("how", ["raises", "cannot be told"])
async def test_a_step_that_fails_ends_the_steps_but_aborts_still_run(how: str) -> None:
    """Requests that were not told of a step would go on without its tokens."""
    engine = fake_engine()
    failures: list[Internal] = []
    outputs: list[StepOutput] = []

    def on_step(output: StepOutput) -> None:
        outputs.append(output)
        if len(outputs) == 2:
            raise ValueError("the sink is full")

    async with running(engine, on_step=on_step, on_failure=failures.append) as thread:
        await thread.call(lambda e: e.reserve(request(engine, prompt_of(9), max_tokens=50)))
        if how == "raises":
            engine._model.forward = _broken_forward  # type: ignore[method-assign]
        await thread.call(lambda e: e.start("r"))
        await until(lambda: failures)
        said = "device is on fire" if how == "raises" else "not told: ValueError: the sink is full"
        assert said in str(failures[0]) and thread.failure is failures[0]
        with pytest.raises(Unavailable, match="engine failed"):
            await thread.call(lambda e: None)
        done = asyncio.Event()
        thread.post(lambda e: e.abort("r"), done.set)
        await asyncio.wait_for(done.wait(), 30)
        assert (len(failures), len(outputs)) == (1, 0 if how == "raises" else 2)
    engine.check_integrity()
    assert engine.stats().num_referenced_blocks == 0


@pytest.mark.parametrize("how", ["post", "idle check"])
async def test_a_broken_law_is_a_failure(how: str) -> None:
    engine = fake_engine()
    failures: list[Internal] = []
    thread = EngineThread(engine, idle_check_s=0.01)
    if how == "idle check":
        engine.check_integrity = lambda: _raise(Internal("a block is lost"))  # type: ignore
    thread.start(lambda output: None, failures.append)
    if how == "post":
        thread.post(lambda e: _raise(Internal("a block is lost")))
    await until(lambda: failures)
    assert "a block is lost" in str(failures[0])
    await thread.stop(5)


async def test_nobody_hears_of_a_step_or_a_job_before_its_kernels_are_over() -> None:
    """Transports copy blocks beside the kernels, so whoever hears of blocks may copy them. A
    prompt's chunk draws nothing, so nothing else has waited."""
    engine = fake_engine(chunk=4)
    are_over, waits = threading.Event(), []

    def wait_for_kernels() -> None:
        waits.append(threading.current_thread().name)
        assert are_over.wait(30)

    heard: list[StepOutput] = []
    thread = EngineThread(engine, wait_for_kernels=wait_for_kernels)
    thread.start(heard.append, lambda failure: None)
    async with asyncio.timeout(30):
        await thread.call(
            lambda e: (e.reserve(request(engine, prompt_of(9), name="r")), e.start("r"))
        )
    job = asyncio.create_task(thread.call(lambda e: e.abort("r")))
    await until(lambda: waits)
    assert not job.done() and waits == ["engine"] and not heard
    are_over.set()
    await asyncio.wait_for(job, WAIT_S)
    await until(lambda: heard)
    assert len(waits) >= 2  # after the chunk, and after the job that gives its blocks back
    await thread.stop(5)


async def test_a_draw_has_waited_for_the_kernels() -> None:
    """So has whoever reads a launch: a second wait would be for the launch of the next step."""
    engine, waits = fake_engine(), list[int]()
    heard: list[StepOutput] = []
    thread = EngineThread(engine, wait_for_kernels=lambda: waits.append(1))
    thread.start(heard.append, lambda failure: None)
    async with asyncio.timeout(30):
        await thread.call(
            lambda e: (e.reserve(request(engine, prompt_of(9), name="r")), e.start("r"))
        )
        while len(heard) < 4:
            await asyncio.sleep(0.001)
        await thread.call(lambda e: e.abort("r"))
    assert waits == []
    await thread.stop(5)


async def test_a_caller_that_left_does_not_undo_its_job() -> None:
    """So whoever leaves must post the abort: it comes after."""
    model = GatedModel()
    engine = fake_engine(model=model)
    async with running(engine) as thread:
        await thread.call(lambda e: e.reserve(request(engine, prompt_of(9), name="busy")))
        model.hold()
        await thread.call(lambda e: e.start("busy"))
        await asyncio.to_thread(model.is_held.wait, 30)
        wait = asyncio.create_task(
            thread.call(lambda e: e.reserve(request(engine, prompt_of(9, start=2))))
        )
        await settled()
        wait.cancel()
        thread.post(lambda e: e.abort("r"))
        model.release()
        await thread.call(lambda e: e.abort("busy"))
        assert (await thread.call(lambda e: e.stats())).num_reserved == 0


async def test_stop_waits_for_the_step_and_refuses_the_rest() -> None:
    model = GatedModel()
    engine = fake_engine(model=model)
    thread = EngineThread(engine)
    thread.start(lambda output: None, lambda error: None)
    await thread.call(lambda e: e.reserve(request(engine, prompt_of(9))))
    model.hold()
    await thread.call(lambda e: e.start("r"))
    await asyncio.to_thread(model.is_held.wait, 30)
    with pytest.raises(Unavailable, match="did not end its step"):
        await thread.stop(0.01)
    with pytest.raises(Unavailable, match="stopping"):
        await thread.call(lambda e: None)
    thread.post(lambda e: _raise(AssertionError("ran after the stop")))
    model.release()
    await thread.stop(5)
    assert thread.failure is None


def _raise(error: Exception) -> None:
    raise error


def _broken_forward(batch: object) -> object:
    raise RuntimeError("the device is on fire")


async def test_an_idle_engine_that_lost_a_process_fails_at_once() -> None:
    """A model of several processes tells from a thread of its own; nobody has to ask for a step."""
    engine = fake_engine()
    told: list[object] = []
    engine._model.watch = told.append  # type: ignore[method-assign]
    failures: list[Internal] = []
    async with running(engine, on_failure=failures.append) as thread:
        (tell,) = told
        assert callable(tell)
        await asyncio.to_thread(tell)  # a false alarm
        await thread.call(lambda e: None)
        assert thread.failure is None
        engine._model.check_alive = _gone  # type: ignore[method-assign]
        await asyncio.to_thread(tell)
        await until(lambda: failures)
        assert "rank 1 ended (signal 9)" in str(thread.failure)


def _gone() -> None:
    raise RankFailed("rank 1 ended (signal 9)")


async def test_a_step_that_does_not_end_is_the_engines_failure() -> None:
    model = GatedModel()
    engine = fake_engine(model=model)
    heard: list[Internal] = []
    outputs: list[StepOutput] = []
    clock = Clock()
    thread = EngineThread(engine, step_timeout_s=0.05, clock=clock)
    thread.start(outputs.append, heard.append)
    await thread.call(lambda e: engine.reserve(request(engine, prompt_of(5), name="r")))
    model.hold()
    await thread.call(lambda e: e.start("r"))
    await asyncio.to_thread(model.is_held.wait, WAIT_S)
    clock.now_s += 0.06
    await until(lambda: heard)
    assert heard == [thread.failure] and thread.is_stuck
    assert "limits.step_timeout_s" in str(heard[0])
    with pytest.raises(Unavailable):
        await thread.call(lambda e: None)
    # A device that answers after all: nobody hears of that step, and blocks can be given back.
    thread.post(lambda e: e.abort("r"))
    model.release()
    await thread.stop(5.0)
    assert not thread.is_stuck and not outputs
    assert engine.stats().num_referenced_blocks == 0
    engine.check_integrity()


async def test_kernels_of_jobs_that_do_not_end_are_the_engines_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    are_over, waited = threading.Event(), threading.Event()

    def wait_for_kernels() -> None:
        waited.set()
        assert are_over.wait(30)

    engine, clock, heard = fake_engine(), Clock(), list[Internal]()
    monkeypatch.setattr(type(engine), "is_device_behind", True)
    thread = EngineThread(
        engine, step_timeout_s=0.05, clock=clock, wait_for_kernels=wait_for_kernels
    )
    thread.start(lambda output: None, heard.append)
    job = asyncio.create_task(thread.call(lambda e: 1))
    await asyncio.to_thread(waited.wait, WAIT_S)
    clock.now_s += 0.06
    await until(lambda: heard)
    assert heard == [thread.failure] and thread.is_stuck
    are_over.set()
    assert await asyncio.wait_for(job, WAIT_S) == 1
    await thread.stop(5.0)


async def test_steps_in_time_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that only this test moves: within a step by less than it may take, and by more
    where the engine rests."""
    clock, num_looks = Clock(), 0

    class Watch(StepWatch):
        @property
        def is_late(self) -> bool:
            nonlocal num_looks
            num_looks += 1
            return super().is_late

    async def pass_time(seconds: float) -> None:
        """Returns when the watch has looked since."""
        clock.now_s += seconds
        num_wanted = num_looks + 2
        await until(lambda: num_looks >= num_wanted)

    monkeypatch.setattr(engine_thread, "StepWatch", Watch)
    model = GatedModel()
    engine = fake_engine(model=model)
    async with running(engine, step_timeout_s=0.02, clock=clock) as thread:
        await thread.call(lambda e: engine.reserve(request(engine, prompt_of(5), name="r")))
        model.hold()
        thread.post(lambda e: e.start("r"))
        await asyncio.to_thread(model.is_held.wait, WAIT_S)
        await pass_time(0.019)
        num_idle_checks = thread.num_idle_checks
        model.release()
        await until(lambda: thread.num_idle_checks > num_idle_checks)  # its steps are over
        await pass_time(1.0)
        assert thread.failure is None and not thread.is_stuck
        assert thread.stats.num_output_tokens == 4
