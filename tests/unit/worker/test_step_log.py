"""StepLog: what the engine did, in order, in a file that can be read again."""

from __future__ import annotations

import asyncio
import gc
import time
from pathlib import Path

import pytest

from services.worker import step_log
from services.worker.engine_thread import EngineThread
from services.worker.step_log import StepLog
from tests.harness.gated_engine import fake_engine, prompt_of, request


async def test_every_step_and_job_is_in_the_file_in_order(tmp_path: Path) -> None:
    engine, log = fake_engine(), StepLog()
    thread = EngineThread(engine, log=log)
    began_s = time.monotonic()
    thread.start(lambda output: None, lambda error: None)
    watching = asyncio.create_task(log.run())

    def reserve(_: object) -> None:
        engine.reserve(request(engine, prompt_of(5), max_tokens=3))

    await thread.call(reserve)
    thread.post(lambda e: e.start("r"))
    async with asyncio.timeout(30):
        while engine.has_work() or thread.num_steps < 3:
            await asyncio.sleep(0.001)
    gc.collect()
    await thread.stop(5.0)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    found = step_log.read(log.write(tmp_path / "logs", "decode-0"))
    assert [name for _, _, name in found["job"]][:2] == ["reserve", "<lambda>"]
    assert len(found["step"]) == thread.num_steps
    assert [num for _, _, num, _ in found["step"]] == [5, 1, 1]
    for entries in (found["step"], found["job"]):
        times = [float(begun_s) for begun_s, *_ in entries]
        assert times == sorted(times) and times[0] >= began_s
    assert any(generation == 2 for _, _, generation in found["collection"])
    assert log._on_collection not in gc.callbacks


def test_the_newest_entries_stay(tmp_path: Path) -> None:
    log = StepLog(max_entries=3)
    for number in range(5):
        log.step(time.monotonic(), number, 1)
    found = step_log.read(log.write(tmp_path, "w"))
    assert [num for _, _, num, _ in found["step"]] == [2, 3, 4]


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no step log"):
        step_log.read(path)
