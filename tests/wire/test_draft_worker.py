"""A draft worker as the process that a pod runs: it guesses for an engine, and is killed in the
middle of a stream, whose tokens are those of plain decoding. (In one process:
tests/conformance/test_draft_channel.py.)"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engine.engine import LLMEngine
from engine.speculation.remote import RemoteProposer
from engine.testing.fake_model import FakeModel
from process.rpc import PLAIN
from services.worker.draft_channel import DraftPeers
from tests.harness.draft_workers import CONFIG, meet, outputs, submit
from tests.harness.service_process import start_service
from tests.harness.waiting import Clock

CALL_S = 30.0


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    """A worker's, in a thread: the test has its engine's."""
    made = asyncio.new_event_loop()
    thread = threading.Thread(target=made.run_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.call_soon_threadsafe(made.stop)
        thread.join(CALL_S)
        made.close()


@pytest.fixture
def process() -> Iterator[subprocess.Popen[str]]:
    started = start_service(
        "draft",
        'engine.model="baton-5m-draft"',
        'engine.device="cpu"',
        "engine.num_threads=1",
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def _address(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("{") and (said := json.loads(line))["event"] == "ready":
            return str(said["address"])
    raise AssertionError("it has ended")


@pytest.mark.long
def test_a_stream_goes_on_when_its_draft_worker_is_killed(
    process: subprocess.Popen[str], loop: asyncio.AbstractEventLoop
) -> None:
    address = _address(process)

    async def connect() -> DraftPeers:
        return DraftPeers([address], PLAIN)

    drafts = asyncio.run_coroutine_threadsafe(connect(), loop).result(CALL_S)
    (peer,), clock = drafts.peers, Clock()
    try:
        about = peer.channel.describe(CALL_S).result(CALL_S)
        assert about.model == "baton-5m-draft"
        model = FakeModel(vocab_size=about.vocab_size)
        info = replace(model.info, tokenizer_digest=about.tokenizer_digest)
        proposer = RemoteProposer([peer], info, deadline_s=CALL_S, clock=clock)
        meet(proposer, peer, clock)
        engine, plain = LLMEngine(CONFIG, model, proposers=[proposer]), LLMEngine(CONFIG, model)
        found: list[int] = []

        def kill(step: int) -> None:
            if step == 5:
                found.append(peer.counts.num_nodes)
                process.kill()
                process.wait(CALL_S)

        submit(engine, 2, max_tokens=12)
        guessed_for = outputs(engine, kill)
        assert found == [peer.counts.num_nodes] and found[0] > 0
        assert peer.counts.num_failed == 1 and not peer.counts.is_ready
        submit(plain, 2, max_tokens=12)
        assert outputs(plain)[0] == guessed_for[0]
    finally:
        asyncio.run_coroutine_threadsafe(drafts.close(), loop).result(CALL_S)
