"""A proposer of a decode worker raises once: no token is another, it is not called during its
back-off, and its draft tokens are accepted again afterwards."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from engine.speculation import manager
from engine.speculation.config import SpeculationConfig
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.token_tree import TokenTree, chain
from process.metrics import MetricsServer
from services.worker.metrics import WorkerCollector
from tests.harness import exposition
from tests.harness.gated_engine import GatedModel, prompt_of
from tests.harness.prefill_decode_pair import pair

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
    def get() -> str:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
            return str(reply.read().decode())

    while True:  # without it where the engine did not answer in time
        families = exposition.read(await asyncio.to_thread(get))
        if family := families.get("baton_guessed_tokens_kept_total"):
            (sample,) = family.samples
            return float(sample.value)
