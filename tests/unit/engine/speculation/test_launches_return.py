"""Steps that cannot be launched ahead are no reason to launch no others: where guessing does not
pay, launches come back with those who can be launched."""

from __future__ import annotations

from collections.abc import Sequence

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.request import Request, Sampling
from engine.speculation.config import NgramConfig, SpeculationConfig
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import Draft, DraftTask
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.harness.engines import hasher

LAUNCHED_S, PAUSE_S, LOOKUP_S = 0.007, 0.003, 0.0001


def test_behind_steps_that_cannot_be_launched() -> None:
    now = 0.0

    class Lookup(NgramProposer):
        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Draft]:
            nonlocal now
            now += LOOKUP_S
            return super().propose(tasks)

    class Model(FakeModel):
        def forward(self, batch: Batch):  # type: ignore[no-untyped-def]  # as of FakeModel
            nonlocal now
            now += LAUNCHED_S
            return super().forward(batch)

    class Ahead(AheadModel):
        def forward(self, batch: Batch):  # type: ignore[no-untyped-def]
            nonlocal now
            now += PAUSE_S
            return super().forward(batch)

    inner = Model(vocab_size=20_000, context_window=1024, block_size=16)
    model = Ahead(inner, takes=lambda draw: draw.sampling.logprobs is None, takes_prompts=False)
    config = EngineConfig(
        num_blocks=200,
        max_num_running=2,
        overlap_prompts=False,
        speculation=SpeculationConfig(drafters=("ngram",)),
    )
    engine = LLMEngine(config, model, proposers=[Lookup(NgramConfig())], clock=lambda: now)

    def num_launched(name: str, sampling: Sampling) -> int:
        before = model.launches.num_launches
        engine.submit(Request(name, tuple(range(1, 30)), sampling, hasher(name.encode())))
        while engine.has_work():
            engine.step()
        return model.launches.num_launches - before

    assert num_launched("probabilities", Sampling(max_tokens=30, ignore_eos=True, logprobs=1)) == 0
    assert num_launched("none", Sampling(max_tokens=300, ignore_eos=True)) > 150
    engine.check_integrity()
    engine.close()
