"""A worker whose device does not answer ends by itself, with one line, although the thread that
waits for the device never does."""

from __future__ import annotations

import subprocess
import sys

import pytest

WAIT_S = 180.0
"""That it ends is the promise: how long its imports take is the machine's business."""

CODE = """if True:
    import asyncio
    import sys
    import threading

    from process import entry
    from services.decode.role import DecodeRole
    from services.worker import main
    from services.worker.config import WorkerSettings
    from tests.unit.worker.builders import fake_engine

    async def load(settings, stop, health, draft_workers):
        engine = fake_engine()
        engine.has_work = lambda: True
        engine.step = lambda: threading.Event().wait()
        return engine

    main._load = load

    async def run(settings, stop):
        await main.run(settings, stop, "decode", DecodeRole)

    sys.exit(entry.run("decode", WorkerSettings, run))
"""


@pytest.mark.timeout(2 * WAIT_S)
def test_a_worker_on_a_device_that_hangs_ends_with_one_line() -> None:
    told = ("--set", 'redis_url=""', "--set", "limits.step_timeout_s=0.3")
    ended = subprocess.run(
        [sys.executable, "-c", CODE, *told],
        timeout=WAIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("decode: ") and "limits.step_timeout_s" in last
