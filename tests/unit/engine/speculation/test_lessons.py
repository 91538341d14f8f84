"""Lessons: every step is learnt from once, in order, and none too soon: whatever comes between."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.outputs import RequestOutput
from engine.request import Request
from engine.speculation import lessons
from engine.speculation.config import SpeculationConfig
from engine.speculation.drafter import Draft, Task
from engine.speculation.expansion import Calibration, observe_tree
from engine.speculation.expansion import calibrated as by_calibration
from engine.speculation.lessons import Lessons
from engine.speculation.tree import TokenTree, chain, merge
from engine.testing.fake_model import FakeModel
from tests.harness.workloads import SIZE, VOCAB, WINDOW, steps_beyond, undisturbed
from tests.unit.engine.speculation.test_engine import KnowsTheAnswers


def _tree(rng: random.Random) -> TokenTree:
    chains = []
    for _ in range(rng.randint(1, 3)):
        chances = sorted((rng.random() for _ in range(rng.randint(1, 3))), reverse=True)
        chains.append(chain([rng.randrange(3) for _ in chances], chances))
    return merge(chains)


def _event(name: str, token_ids: tuple[int, ...]) -> RequestOutput:
    return RequestOutput(name, token_ids, None, (), 0, None, None, None)


def test_what_is_heard_is_learnt_when_there_is_time(seed: int) -> None:
    """Chances are by all steps but the last one, until it is studied; a step that was not heard of
    (it failed) teaches nothing."""
    rng = random.Random(seed)
    one, expected = Lessons(2), [Calibration(), Calibration()]
    waiting: list[tuple[int, TokenTree, tuple[int, ...]]] = []

    def study() -> None:
        for drafter, tree, token_ids in waiting:
            observe_tree(expected[drafter], tree, token_ids)
        waiting.clear()

    for _ in range(60):
        one.begin()
        own: list[tuple[str, int, TokenTree]] = []
        for name in rng.sample(["a", "b", "c"], rng.randrange(4)):
            for drafter in range(rng.randint(1, 2)):
                own.append((name, drafter, _tree(rng)))
                one.note((name, 0), drafter, own[-1][2])
        probe = _tree(rng)
        for drafter, calibration in enumerate(expected):
            assert one.calibrated(drafter, probe) == by_calibration(probe, calibration)
        if rng.random() < 0.7:
            one.study()
            study()
        one.prepare()
        if rng.random() < 0.2:
            continue
        num_kept = {(name, 0): rng.randrange(3) for name, _, _ in own if rng.random() < 0.9}
        told = {
            name: tuple(rng.randrange(3) for _ in range(1 + num_kept.get((name, 0), 0)))
            for name in ("a", "b", "d")
        }
        one.hear([_event(name, token_ids) for name, token_ids in told.items()], num_kept)
        study()  # of the step before, at the latest now
        num_right = {0: 0, 1: 0}
        for name, drafter, tree in own:
            token_ids = told.get(name, ())
            kept = num_kept.get((name, 0), 0)
            paths = {
                tuple(tree.token_ids[at] for at in tree.path(node)) for node in range(len(tree))
            }
            num_right[drafter] += sum(token_ids[: end + 1] in paths for end in range(kept))
            waiting.append((drafter, tree, token_ids))
        assert one.num_right([0, 1]) == num_right


class _Proposed(NamedTuple):
    step: int
    tree: TokenTree


class _Noting(KnowsTheAnswers):
    """Three tokens of the answer, sometimes wrong."""

    def __init__(self, rng: random.Random, request: Request) -> None:
        super().__init__(rng, undisturbed([request]), VOCAB)
        self.step = 0
        self.proposed: list[_Proposed] = []
        self._own_rng = rng

    def propose(self, tasks: Sequence[Task]) -> list[Draft]:
        drafts = super().propose(tasks)
        self.proposed += [_Proposed(self.step, draft.tree) for draft in drafts]
        return drafts

    def _tree(self, task: Task) -> TokenTree:
        name, index = task.key
        done = len(task.token_ids) - task.num_prompt_tokens
        rest = list(self._expected[name][index][0][done : done + 3])
        if self._own_rng.random() < 0.3:
            rest[-1] = (rest[-1] + 1) % VOCAB
        return chain(rest, [0.9**place for place in range(1, len(rest) + 1)])


class _Failing(FakeModel):
    is_failing = False

    def forward(self, batch: Batch) -> torch.Tensor:
        if self.is_failing:
            raise MemoryError("no room")
        return super().forward(batch)


@pytest.mark.parametrize("ends", ["length", "abort"])
def test_an_engine_learns_of_each_step_once(
    ends: str,
    seed: int,
    make_request: Callable[..., Request],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps fail, sequences lose their blocks, answers end by their length or are aborted: of all
    steps that were told, in their order, the last one maybe later."""
    rng = random.Random(seed)
    learnt: list[tuple[TokenTree, tuple[int, ...]]] = []
    monkeypatch.setattr(
        lessons, "observe_tree", lambda _, tree, token_ids: learnt.append((tree, tuple(token_ids)))
    )
    request = make_request("r", [1, 2, 3], max_tokens=40)
    drafter = _Noting(rng, request)
    model = _Failing(context_window=WINDOW, block_size=SIZE)
    config = EngineConfig(
        num_blocks=60, preemption="recompute", speculation=SpeculationConfig(always=True)
    )
    engine = LLMEngine(config, model, drafters=[drafter])
    told: list[tuple[TokenTree, tuple[int, ...]]] = []
    token_ids: list[int] = []
    for number in range(2):
        engine.submit(dataclasses.replace(request, request_id="r"))
        while engine.has_work():
            drafter.step += 1
            model.is_failing = rng.random() < 0.2
            try:
                events = engine.step().events
            except MemoryError:
                continue
            own = [one.tree for one in drafter.proposed if one.step == drafter.step]
            for event in events:
                token_ids += event.token_ids
                if own:
                    told.append((own[0], event.token_ids))
            assert learnt in (told, told[:-1])
            engine.check_integrity()
            if engine.has_work() and rng.random() < 0.1:
                engine.preempt("r")
            if ends == "abort" and len(token_ids) > 20:
                engine.abort("r")
        if ends == "length":
            assert tuple(token_ids) == drafter._expected["r"][0][0], number
        token_ids.clear()
    assert learnt in (told, told[:-1]) and len(learnt) > 5
    assert any(len(own) > 1 for _, own in learnt), "nothing was kept"


class _Mistaken(_Noting):
    """Two tokens, of which the right one is said to be the less likely."""

    def _tree(self, task: Task) -> TokenTree:
        name, index = task.key
        right = self._expected[name][index][0][len(task.token_ids) - task.num_prompt_tokens]
        return merge([chain([(right + 1) % VOCAB], [0.6]), chain([right], [0.3])])


def test_where_there_is_room_for_one_of_two_it_is_the_one_that_was_right_before(
    seed: int, make_request: Callable[..., Request]
) -> None:
    """Also where all that there is room for is computed, whatever it costs."""
    request = make_request("r", [1, 2, 3], max_tokens=40, ignore_eos=True)
    drafter = _Mistaken(random.Random(seed), request)
    config = EngineConfig(
        num_blocks=60,
        max_num_running=1,
        max_num_tokens_per_step=2,
        speculation=SpeculationConfig(always=True),
    )
    engine = LLMEngine(
        config, FakeModel(context_window=WINDOW, block_size=SIZE), drafters=[drafter]
    )
    engine.submit(request)
    found, num_steps = steps_beyond(engine, 20)
    assert found == drafter._expected["r"][0][0]
    assert num_steps < 15, "of 20 tokens, two a step"
