"""Draft workers and proposers that fail: a draft worker is a process, which is killed in the middle
of a stream; a proposer raises once. No token is another. (In one process:
tests/conformance/test_draft_channel.py.)"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.engine import LLMEngine
from engine.speculation import manager
from engine.speculation.config import SpeculationConfig
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.remote import RemoteProposer
from engine.speculation.token_tree import TokenTree, chain
from engine.testing.fake_model import FakeModel
from process.metrics import MetricsServer
from process.rpc import PLAIN
from services.worker.draft_channel import DraftPeers
from services.worker.metrics import WorkerCollector
from tests.harness.draft_workers import CONFIG, meet, outputs, submit
from tests.harness.exposition import scrape, values
from tests.harness.gated_engine import GatedModel, prompt_of
from tests.harness.prefill_decode_pair import pair
from tests.harness.service_process import Process, started
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


@pytest.mark.long
def test_a_stream_goes_on_when_its_draft_worker_is_killed(loop: asyncio.AbstractEventLoop) -> None:
    settings = 'engine.model="baton-5m-draft"', 'engine.device="cpu"', "engine.num_threads=1"
    with started("services.draft", *settings) as process:
        _check_a_kill(process, loop)


def _check_a_kill(process: Process, loop: asyncio.AbstractEventLoop) -> None:
    (ready,) = process.until_logged("ready")
    address = ready["address"]

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

        submit(engine, 2, max_tokens=12)
        guessed_for = outputs(engine, kill)
        assert found == [peer.counts.num_nodes] and found[0] > 0
        assert peer.counts.num_failed == 1 and not peer.counts.is_ready
        submit(plain, 2, max_tokens=12)
        assert outputs(plain)[0] == guessed_for[0]
    finally:
        asyncio.run_coroutine_threadsafe(drafts.close(), loop).result(CALL_S)


# ---- a proposer raises


NUM_TOKENS = 40
DEPTH = 3


class RaisesOnce:
    """Three tokens of the answer, each time but the second."""

    name = "raises-once"

    def __init__(self) -> None:
        self.num_asked = 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self.num_asked += 1
        if self.num_asked == 2:
            raise ZeroDivisionError("second")
        return [Draft(self._tree(task), {}) for task in tasks]

    def _tree(self, task: DraftTask) -> TokenTree:
        depth = min(DEPTH, task.num_nodes, task.max_depth)
        guess = GatedModel().generate(list(task.token_ids), depth)
        return chain(guess, [0.9**place for place in range(1, depth + 1)])

    def forget(self, key: object) -> None:
        """It keeps nothing."""

    def check_integrity(self) -> None:
        """See forget."""


async def test_a_proposer_that_raised_once_proposes_again_within_a_minute(tmp_path: Path) -> None:
    now_s = 0.0
    proposer = RaisesOnce()
    parts = {
        "proposers": [proposer],
        "speculation": SpeculationConfig(always=True),
        "clock": lambda: now_s,
    }
    async with pair(tmp_path, decode_parts=parts) as both:
        collector = WorkerCollector(both.decode.core, asyncio.get_running_loop())
        server = MetricsServer(collector)
        server.start("127.0.0.1:0")
        try:
            kept = []
            for index in range(3):
                # The second comes a moment before the rest is over, the third when it is.
                now_s = [0.0, manager.FIRST_BACKOFF_S - 1, 60.0][index]
                prompt = prompt_of(10, index)
                answer = await both.generate(prompt, name=f"r{index}", max_tokens=NUM_TOKENS)
                assert answer.token_ids == both.expected(prompt, NUM_TOKENS)
                kept.append(await _num_kept(server.address))
        finally:
            await asyncio.to_thread(server.stop)
        assert 0 < kept[0] <= DEPTH, "of its first call"
        assert kept[1] == kept[0]
        assert kept[2] > kept[1] + DEPTH
        await both.check()


async def _num_kept(address: str) -> float:
    name = "baton_guessed_tokens_kept_total"
    while name not in (found := values(await scrape(address))):
        pass  # the engine did not answer in time
    return found[name]
