"""Ending tasks for certain, and a Redis client under which no cancel is lost."""

from __future__ import annotations

import asyncio
import logging

import pytest

from process import registry
from process.background_tasks import end_tasks


async def _deaf(num_times: int) -> None:
    """Swallows the first `num_times` cancels."""
    for _ in range(num_times):
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
    await asyncio.sleep(3600)


async def test_a_lost_cancel_is_repeated() -> None:
    tasks = [asyncio.create_task(_deaf(num_times)) for num_times in range(5)]
    await asyncio.sleep(0)
    await end_tasks([None, *tasks], again_s=0.01)
    assert all(task.cancelled() for task in tasks)
    await end_tasks(tasks)  # again: nothing to do


async def test_a_task_that_never_ends_is_named(caplog: pytest.LogCaptureFixture) -> None:
    task = asyncio.create_task(_deaf(20), name="the deaf one")
    await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        await end_tasks([task], again_s=0.01, give_up_s=0.05)
    assert not task.done()
    assert [record.message for record in caplog.records] == ["tasks_not_ended"]
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Redis enough for PING and the client's greeting."""
    while line := await reader.readline():
        if line.startswith(b"*"):
            for _ in range(2 * int(line[1:])):
                await reader.readline()
            writer.write(b"+PONG\r\n")
            await writer.drain()
    writer.close()


async def test_no_cancel_is_lost_at_any_turn_of_a_call() -> None:
    """Each call is cancelled after 0, 1, 2, ... turns of the loop, until it is over first."""
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = registry.connect_redis(f"redis://127.0.0.1:{port}/0?protocol=2", 5.0)
    num_turns, num_finished = 0, 0
    async with asyncio.timeout(60):
        while num_finished < 20:
            task: asyncio.Task[object] = asyncio.create_task(client.ping())
            for _ in range(num_turns):
                await asyncio.sleep(0)
            if task.done():
                num_finished += 1
                num_turns = 0
                continue
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), f"the cancel after {num_turns} turns was lost"
            num_turns += 1
    await client.aclose()
    server.close()
