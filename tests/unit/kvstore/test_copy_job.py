"""run_copy: what was begun is ended, also where no thread is to be had."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.transport.copy_pipeline import IsStopped, run_copy
from process.deadline import Deadline
from process.errors import DeadlineExceeded


async def test_without_a_thread_what_was_begun_is_ended_here() -> None:
    pool = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    pool.shutdown()
    steps: list[str] = []

    def begin(is_stopped: IsStopped) -> None:
        steps.append("begun" if not is_stopped() else "stopped")

    def copy(is_stopped: IsStopped) -> None:
        steps.append("copies" if not is_stopped() else "ends")
        raise DeadlineExceeded("it was told to stop")

    with pytest.raises(RuntimeError, match="shutdown"):
        await run_copy(copy, Deadline.after(30), begin)
    assert steps == ["begun", "ends"]
