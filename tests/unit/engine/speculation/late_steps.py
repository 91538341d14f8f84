"""Engines whose steps are begun early, on a device that writes as late as it may what a forward
pass computes: when its draws are waited for, or something is queued behind it. So a block that was
given away too early is written when it is another's, and the FakeModel's tokens show it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.kv.memory import KvMemory
from engine.models.interface import LoadedModel
from engine.outputs import RequestOutput
from engine.request import Request
from engine.speculation.config import SpeculationConfig
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.token_tree import EMPTY, TokenTree, chain, merge
from engine.testing.ahead_model import AheadModel
from engine.testing.fake_model import FakeModel
from tests.harness.engines import SIZE, WINDOW, all_steps, tokens_of

OTHER = tuple(range(40, 51))
"""A prompt."""


class LateFake(FakeModel):
    """Whose forward passes, where they are `late`, write when `settle` says so."""

    def __init__(self) -> None:
        super().__init__(context_window=WINDOW, block_size=SIZE)
        self.is_late = False
        self.num_waits = 0
        self.failure: Exception | None = None
        self._unwritten: list[tuple[int, int, torch.Tensor]] = []

    def attach(self, memory: KvMemory) -> None:
        super().attach(memory)
        for name in ("clear", "copy", "move_tokens", "clear_tokens"):
            setattr(memory, name, self._behind(getattr(memory, name)))

    def _behind(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def after(*args: Any) -> Any:
            self.settle()
            return call(*args)

        return after

    def forward(self, batch: Batch) -> torch.Tensor:
        self.settle()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise failure
        if not self.is_late:
            return super().forward(batch)
        places = [
            (span.block_ids[slot // SIZE], slot % SIZE)
            for span in batch.spans
            if span.block_ids
            for slot in range(span.start, span.end)
        ]
        cells = self._cells()
        before = [cells[block_id, :, slot].clone() for block_id, slot in places]
        logits = super().forward(batch)
        for (block_id, slot), old in zip(places, before, strict=True):
            self._unwritten.append((block_id, slot, cells[block_id, :, slot].clone()))
            cells[block_id, :, slot] = old
        return logits

    def settle(self) -> None:
        """What was computed is written."""
        for block_id, slot, values in self._unwritten:
            self._cells()[block_id, :, slot] = values
        self._unwritten = []


class LateModel(AheadModel):
    """Its forward passes are late, its launches are computed when they are read."""

    def __init__(self, fake: LateFake) -> None:
        super().__init__(fake, is_late=True)
        self.fake = fake

    def forward(self, batch: Batch) -> torch.Tensor:
        self.fake.settle()
        self.launches.compute_all()
        self.fake.is_late = True
        try:
            return super().forward(batch)
        finally:
            self.fake.is_late = False


class Branches:
    """A Proposer that knows what follows, and lies as well: a right path of `num_right` beside a
    wrong one."""

    name = "branches"

    def __init__(self, fake: FakeModel, rng: random.Random | None = None) -> None:
        self._fake = fake
        self._rng = rng
        self.num_right, self.num_wrong = 1, 6
        self.now_s, self.takes_s = 0.0, 0.0
        self.num_asked = 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        self.num_asked += 1
        self.now_s += self.takes_s
        return [Draft(self._tree(task).best(task.num_nodes), {}) for task in tasks]

    def _tree(self, task: DraftTask) -> TokenTree:
        num_right, num_wrong = self.num_right, self.num_wrong
        if self._rng is not None:
            num_right, num_wrong = self._rng.randint(0, 3), self._rng.randint(0, 6)
        right = self._fake.generate(task.token_ids, num_right)
        wrong = [(self._fake.next_token(task.token_ids) + 1) % 97] * num_wrong
        paths = [
            chain(path, [chance / (place + 1) for place in range(len(path))])
            for path, chance in ((wrong, 0.5), (right, 0.4))
            if path
        ]
        return merge(paths) if paths else EMPTY

    def forget(self, key: object) -> None:
        pass

    def check_integrity(self) -> None:
        pass


def guessing_engine(
    model: LoadedModel,
    fake: FakeModel,
    *,
    rng: random.Random | None = None,
    proposer: Branches | None = None,
    **config: Any,
) -> tuple[LLMEngine, Branches]:
    proposer = proposer or Branches(fake, rng)
    defaults: dict[str, Any] = {
        "num_blocks": 64,
        "max_num_running": 8,
        "speculation": SpeculationConfig(max_num_nodes=8, always=True),
    }
    config = defaults | config
    engine = LLMEngine(
        EngineConfig(**config), model, proposers=[proposer], clock=lambda: proposer.now_s
    )
    return engine, proposer


def late_engine(fake: LateFake, **fields: Any) -> LLMEngine:
    return guessing_engine(LateModel(fake), fake, **fields)[0]


def decoding(engine: LLMEngine, *requests: Request) -> list[RequestOutput]:
    """These, and what was told until a step is under way that verifies guesses for all of them."""
    events: list[RequestOutput] = []
    for request in requests:
        engine.submit(request)
    while not engine._in_flight.is_live or engine.stats().num_waiting:
        events += engine.step().events
        engine.check_integrity()
    return events


def rest_of(engine: LLMEngine) -> list[RequestOutput]:
    events = [event for output in all_steps(engine) for event in output.events]
    stats = engine.stats()
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks
    return events


def told_of(events: Sequence[RequestOutput], name: str) -> list[int]:
    return tokens_of([event for event in events if event.request_id == name])
