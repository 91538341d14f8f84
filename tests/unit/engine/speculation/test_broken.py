"""What breaks beside guesses costs what it costs without them: a request of its own, or nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import PolicyFailed
from engine.grammar.state import GrammarState
from engine.models.interface import Guesses
from engine.request import Request, StopView
from engine.speculation import roster
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_model import DraftModel
from engine.speculation.drafter import Draft, Task
from engine.speculation.exploration import Exploration
from engine.speculation.lessons import Lessons
from engine.speculation.possible import in_grammar
from engine.speculation.tree import TokenTree, chain
from engine.testing.fake_model import FakeModel
from tests.harness.engines import all_events
from tests.harness.workloads import SIZE, VOCAB, WINDOW, steps_beyond, undisturbed
from tests.unit.engine.speculation.test_engine import KnowsTheAnswers

ALWAYS = SpeculationConfig(always=True)
CONFIG = EngineConfig(num_blocks=40, preemption="recompute", speculation=ALWAYS)


class Right(KnowsTheAnswers):
    """Three tokens of the answer, each time."""

    def _tree(self, task: Task) -> TokenTree:
        name, index = task.key
        done = len(task.token_ids) - task.num_prompt_tokens
        rest = self._expected[name][index][0][done : done + 3]
        return chain(rest, [0.9**place for place in range(1, len(rest) + 1)])


def _model(**fields: Any) -> FakeModel:
    return FakeModel(context_window=WINDOW, block_size=SIZE, **fields)


def _right(request: Request) -> Right:
    return Right(random.Random(0), undisturbed([request]), VOCAB)


def _run(engine: LLMEngine) -> tuple[list[int], Exception | None]:
    token_ids: list[int] = []
    error: Exception | None = None
    for event in all_events(engine):
        token_ids += event.token_ids
        error = event.error or error
    return token_ids, error


@pytest.fixture
def request_(make_request: Callable[..., Request]) -> Request:
    return make_request("r", [1, 2, 3], max_tokens=20)


def test_a_policy_that_fails_after_kept_tokens(request_: Request) -> None:
    """What was drawn before is told, as without guesses."""

    def policy(view: StopView) -> bool:
        if len(view.output_token_ids) == 7:
            raise ZeroDivisionError("seven")
        return False

    engine = LLMEngine(CONFIG, _model(), stop_policy=policy, drafters=[_right(request_)])
    engine.submit(request_)
    token_ids, error = _run(engine)
    assert tuple(token_ids) == undisturbed([request_])["r"][0][0][:6]
    assert isinstance(error, PolicyFailed)
    assert engine.metrics().num_kept_tokens > 0


class Failing(Right):
    """Its third call raises."""

    num_asked = 0

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        self.num_asked += 1
        if self.num_asked == 3:
            raise ZeroDivisionError("third")
        return super().propose(tasks)


def test_a_drafter_that_fails_is_not_asked_for_a_while(
    request_: Request, caplog: pytest.LogCaptureFixture
) -> None:
    expected = undisturbed([request_])
    drafter = Failing(random.Random(0), expected, VOCAB)
    now_s = 0.0
    engine = LLMEngine(CONFIG, _model(), drafters=[drafter], clock=lambda: now_s)
    engine.submit(request_)
    assert _run(engine) == (list(expected["r"][0][0]), None)
    assert drafter.num_asked == 3
    assert "drafter knows has failed; it is asked again in 60 s" in caplog.text

    now_s = roster.FIRST_REST_S
    engine.submit(request_)
    assert _run(engine) == (list(expected["r"][0][0]), None)
    assert drafter.num_asked > 4, "it is asked again, for the same tokens"


def test_a_drafter_rests_longer_with_each_failure() -> None:
    rests = [roster.rest_s(num_failures) for num_failures in range(1, 40)]
    assert rests[:3] == [60.0, 120.0, 240.0]
    assert rests[-1] == roster.MAX_REST_S and rests == sorted(rests)


@pytest.mark.parametrize(
    ("owner", "name"), [(Lessons, "hear"), (Lessons, "study"), (Exploration, "learn")]
)
def test_what_fails_in_learning_costs_no_drafter(
    request_: Request, caplog: pytest.LogCaptureFixture, owner: Any, name: str
) -> None:
    """Once: drafters are asked in the steps after it, for the same tokens."""
    plain = getattr(owner, name)
    num_calls = 0

    def failing(self: object, *arguments: Any, **named: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise ZeroDivisionError("second")
        return plain(self, *arguments, **named)

    expected = undisturbed([request_])
    drafter = _right(request_)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(owner, name, failing)
        engine = LLMEngine(CONFIG, _model(), drafters=[drafter])
        engine.submit(request_)
        assert _run(engine) == (list(expected["r"][0][0]), None)
    assert num_calls > 2 and "learnt anew" in caplog.text
    assert engine._speculator is not None and engine._speculator._roster.is_live
    # 20 tokens in steps of up to four: as many are kept as without the failure, but for one step's.
    assert engine.metrics().num_kept_tokens >= 9


def test_a_draft_model_whose_logits_are_no_numbers(request_: Request) -> None:
    expected = undisturbed([request_])["r"][0][0]
    draft = DraftModel(
        _model(poison=frozenset(expected[::3])), (2, 1), num_blocks=40, max_num_tokens=64
    )
    engine = LLMEngine(CONFIG, _model(), drafters=[draft])
    engine.submit(request_)
    assert _run(engine) == (list(expected), None)


def test_a_model_that_raises_leaves_no_block_for_guesses(request_: Request) -> None:
    class Raising(FakeModel):
        is_raising = False

        def forward(self, batch: Batch) -> torch.Tensor:
            if self.is_raising and len(batch.token_ids) > 1:
                raise MemoryError("no room")
            return super().forward(batch)

    model = Raising(context_window=WINDOW, block_size=SIZE)
    engine = LLMEngine(CONFIG, model, drafters=[_right(request_)])
    engine.submit(request_)
    token_ids: list[int] = []
    for number in range(4):
        for event in engine.step().events:
            token_ids += event.token_ids
        model.is_raising = True
        num_blocks = len(engine.block_ids("r"))
        with pytest.raises(MemoryError):
            engine.step()
        assert len(engine.block_ids("r")) == num_blocks, number
        engine.check_integrity()
        model.is_raising = False
    rest, error = _run(engine)
    assert (tuple(token_ids + rest), error) == (undisturbed([request_])["r"][0][0], None)


def test_a_guess_that_spoils_the_sums_of_its_neighbours(request_: Request) -> None:
    """Its KV is no number, and 0 times NaN is NaN: the request goes on without guesses."""

    expected = undisturbed([request_])
    answer = expected["r"][0][0]
    bad = next(token_id for token_id in range(VOCAB) if token_id not in answer)

    class Spoiled(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            logits = super().forward(batch)
            if bad in batch.token_ids:
                logits[:] = float("nan")
            return logits

    class Wrong(Right):
        def _tree(self, task: Task) -> TokenTree:
            return chain([bad], [0.5])

    drafter = Wrong(random.Random(0), expected, VOCAB)
    engine = LLMEngine(CONFIG, Spoiled(context_window=WINDOW, block_size=SIZE), drafters=[drafter])
    engine.submit(request_)
    assert _run(engine) == (list(answer), None)
    assert engine.metrics().num_guessed_tokens == 1


def test_a_cache_in_several_places_takes_chains(
    request_: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of one path is ever moved."""
    model = _model()
    model.guesses = Guesses.CHAINS
    engine = LLMEngine(CONFIG, model, drafters=[_right(request_)])
    monkeypatch.setattr(type(engine.kv), "is_whole", False)
    engine.submit(request_)
    assert _run(engine) == (list(undisturbed([request_])["r"][0][0]), None)
    assert engine.metrics().num_kept_tokens > 0


def test_a_parser_that_is_late_costs_the_guess() -> None:
    class Late:
        is_complete = False

        def __init__(self, num_left: int) -> None:
            self._num_left = num_left

        def fork(self) -> Late:
            return Late(self._num_left)

        def accept(self, token_id: int) -> bool:
            self._num_left -= 1
            return self._num_left >= 0

    late: Any = Late(2)
    state: GrammarState = late
    guess = in_grammar(chain([5, 6, 7, 8], [0.9, 0.8, 0.7, 0.6]), state)
    assert guess.tree == chain([5, 6], [0.9, 0.8])
    assert len(guess.grammars) == 2


def test_a_drafter_wins_its_trust_back(make_request: Callable[..., Request]) -> None:
    """Wrong for 400 tokens, then right: guesses that were not computed are judged, too. Time is a
    device's, moved by rows."""
    now = 0.0

    class Timed(FakeModel):
        def forward(self, batch: Batch) -> torch.Tensor:
            nonlocal now
            now += 1e-3 + 2e-4 * len(batch.token_ids)
            return super().forward(batch)

    class Late(Right):
        def _tree(self, task: Task) -> TokenTree:
            tree = super()._tree(task)
            if len(task.token_ids) > 400:
                return tree
            wrong = [(token_id + 1) % VOCAB for token_id in tree.token_ids]
            return chain(wrong, tree.chances)

    window = 2048
    request = make_request("r", [1, 2, 3], max_tokens=1500)
    token_ids = FakeModel(context_window=window, block_size=16).generate([1, 2, 3], 1500)
    drafter = Late(random.Random(0), {"r": {0: (tuple(token_ids), None, None, "")}}, VOCAB)
    engine = LLMEngine(
        dataclasses.replace(CONFIG, num_blocks=200, speculation=SpeculationConfig()),
        Timed(context_window=window, block_size=16),
        drafters=[drafter],
        clock=lambda: now,
    )
    engine.submit(request)
    found, num_steps = steps_beyond(engine, 500)
    assert found == tuple(token_ids)
    assert num_steps < 800, "of 1,000 tokens"
