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

    from process import entrypoint
    from services.decode.role import DecodeRole
    from services.worker import main
    from services.worker.config import WorkerSettings
    from tests.harness.gated_engine import fake_engine

    async def load(settings, stop, health, draft_workers):
        engine = fake_engine()
        engine.has_work = lambda: True
        engine.step = lambda: threading.Event().wait()
        return engine

    main._load = load

    async def run(settings, stop):
        await main.run(settings, stop, "decode", DecodeRole)

    sys.exit(entrypoint.run("decode", WorkerSettings, run))
"""

DRAFT = """if True:
    import asyncio
    import sys
    import threading

    from engine.testing.fake_model import FakeModel
    from engine.speculation.draft_protocol import DraftRequest
    from engine.testing.fake_model import FakeModel
    from process import entrypoint
    from process.deadline import Deadline
    from services.draft import main
    from services.draft.config import DraftSettings
    from tests.harness.draft_workers import CountsOn

    class Hangs(CountsOn):
        info = FakeModel().info

        def propose(self, tasks):
            threading.Event().wait()

    async def load(settings, stop, health):
        return Hangs()

    def ready(worker, proposer, metrics):
        ask = DraftRequest(1, 0, [1], 1, 1, 0.0, 1.0, 0, 0.0, 0, 0)
        asked = worker.thread.propose(bytes(16), [ask], Deadline.after(60.0))
        worker.asking = asyncio.ensure_future(asked)

    main._load, main._say_ready = load, ready
    sys.exit(entrypoint.run("draft", DraftSettings, main.run))
"""


@pytest.mark.timeout(2 * WAIT_S)
@pytest.mark.parametrize(
    ("component", "code", "setting"),
    [("decode", CODE, 'redis_url=""'), ("draft", DRAFT, 'engine.model="fake"')],
)
def test_a_worker_on_a_device_that_hangs_ends_with_one_line(
    component: str, code: str, setting: str
) -> None:
    told = ("--set", setting, "--set", "limits.step_timeout_s=0.3")
    ended = subprocess.run(
        [sys.executable, "-c", code, *told],
        timeout=WAIT_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith(f"{component}: ") and "limits.step_timeout_s" in last
