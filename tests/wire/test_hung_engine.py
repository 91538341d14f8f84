"""A worker whose engine's step, or whose device, does not end: its requests go on at the other one,
and after limits.step_timeout_s it ends by itself, with one line."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from tests.harness.gated_engine import prompt_of
from tests.harness.router_bench import BOUND_S, ids_of, request, rest_of
from tests.harness.router_site import Site, site
from tests.harness.waiting import until


async def tokens_of(here: Site) -> list[int]:
    """Of one answer."""
    asked = request(
        token_ids={"ids": prompt_of(40)},
        sampling={"max_tokens": 24, "temperature": 0.0, "ignore_eos": True},
    )
    messages = await rest_of(here.stub.Generate(asked, timeout=BOUND_S))
    return ids_of(messages)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_leaves_a_worker_whose_step_does_not_end(role: str) -> None:
    async with site(num_workers=2, times={"max_step_s": 2.0}) as here:
        right = await tokens_of(here)
        assert len(right) == 24
        for gated in here.models[role]:
            gated.hold()
        asked = asyncio.create_task(tokens_of(here))
        await until(lambda: any(gated.is_held.is_set() for gated in here.models[role]))
        _, other = sorted(here.models[role], key=lambda gated: not gated.is_held.is_set())
        other.release()
        assert await asked == right
        assert not other.is_held.is_set()
        # Nor does the next one go there.
        assert await tokens_of(here) == right


# ---- the process ends by itself


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
