"""Admission: first come first served for blocks, bounded in length and time, nothing lost on the
way.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine.engine import LLMEngine
from engine.errors import RequestTooLong
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded
from services.prefill.worker import BlockQueue
from services.worker.engine_thread import EngineThread
from tests.harness.gated_engine import fake_engine, prompt_of, request, running
from tests.harness.waiting import settled, until

SOON = 30.0


@asynccontextmanager
async def small_worker(
    max_waiting: int = 100,
) -> AsyncIterator[tuple[LLMEngine, EngineThread, BlockQueue]]:
    """64 blocks of 4 tokens."""
    engine = fake_engine(num_blocks=64)
    async with running(engine) as thread:
        admission = BlockQueue(thread, max_waiting=max_waiting)
        yield engine, thread, admission
        await admission.stop()
        assert engine.stats().num_referenced_blocks == 0


async def give_back(thread: EngineThread, admission: BlockQueue, name: str) -> None:
    await thread.call(lambda e: e.abort(name))
    admission.room_may_have_come()


async def are_tried(thread: EngineThread, admission: BlockQueue) -> None:
    """All requests that wait have been tried since the last one came."""
    await until(lambda: not admission._wake.is_set())
    await thread.call(lambda e: None)


def ask(
    engine: LLMEngine, admission: BlockQueue, name: str, num_tokens: int, timeout_s: float = SOON
):
    # type: ignore[no-untyped-def]
    prompt = prompt_of(num_tokens, start=hash(name) % 89)
    wanted = request(engine, prompt, name=name, max_tokens=1)
    return asyncio.create_task(admission.reserve(wanted, Deadline.after(timeout_s)))


async def test_room_is_granted_in_the_order_of_arrival(seed: int) -> None:
    """Random sizes; a grant may never overtake one that came before and still waits."""
    rng = random.Random(seed)
    async with small_worker() as (engine, thread, admission):
        granted: list[int] = []
        tasks = {}
        for index in range(60):
            task = ask(engine, admission, f"r{index}", rng.randint(1, 200))
            task.add_done_callback(lambda _, i=index: granted.append(i))
            tasks[index] = task
            await asyncio.sleep(0)
        while tasks:
            await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
            index = rng.choice([i for i, task in tasks.items() if task.done()])
            assert tasks.pop(index).exception() is None
            await give_back(thread, admission, f"r{index}")
        assert granted == sorted(granted)


async def test_arrivals_of_one_step_are_granted_by_one_job() -> None:
    """Thirty prompts must not need thirty steps of somebody else to get in."""
    async with small_worker() as (engine, thread, admission):
        num_calls = 0
        call = thread.call

        async def counted(run):  # type: ignore[no-untyped-def]
            nonlocal num_calls
            num_calls += 1
            return await call(run)

        thread.call = counted  # type: ignore[method-assign]
        tasks = [ask(engine, admission, f"r{i}", 4) for i in range(30)]
        await asyncio.gather(*tasks)
        assert num_calls <= 2
        thread.call = call  # type: ignore[method-assign]
        for i in range(30):
            await give_back(thread, admission, f"r{i}")


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_who_leaves_the_head_lets_the_next_one_in(how: str) -> None:
    async with small_worker() as (engine, thread, admission):
        await ask(engine, admission, "holder", 200)
        head = ask(engine, admission, "head", 240, timeout_s=0.05 if how == "deadline" else SOON)
        await settled()
        small = ask(engine, admission, "small", 8)
        if how == "cancel":
            await until(lambda: admission.num_waiting == 2)
            await are_tried(thread, admission)
            assert not small.done()
            head.cancel()
        with pytest.raises((DeadlineExceeded, asyncio.CancelledError)):
            await head
        await thread.call(lambda e: e.abort("head"))
        await asyncio.wait_for(small, SOON)
        for name in ("holder", "small"):
            await give_back(thread, admission, name)


async def test_what_can_never_fit_is_refused_and_blocks_nobody() -> None:
    async with small_worker() as (engine, thread, admission):
        wrong = ask(engine, admission, "wrong", 300)
        right = ask(engine, admission, "right", 8)
        with pytest.raises(RequestTooLong):
            await wrong
        await asyncio.wait_for(right, SOON)
        await give_back(thread, admission, "right")
