"""A small model that guesses: the bundled pair's answers are the target's own, with several tokens
a step; its cache's conservation law; what is refused."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from checkpoints.resolve import resolve
from engine.batch import Batch
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.errors import LoadError
from engine.models import loader as model_loader
from engine.models.interface import Guesses
from engine.request import Request, Sampling
from engine.sequence import Key
from engine.speculation import loader
from engine.speculation.config import SpeculationConfig
from engine.speculation.draft_model import DraftKVCache, DraftModelProposer
from engine.speculation.proposer import Draft, DraftTask
from engine.speculation.token_tree import EMPTY
from engine.testing.fake_model import FakeModel
from tests.conftest import third
from tests.harness.engines import hasher
from tests.harness.models import FAMILIES, save

TARGET = EngineConfig(
    model="baton-5m", device="cpu", dtype="float32", num_threads=1, context_window=256
)
PROMPTS = (
    "Once upon a time there was a little dog who",
    "The cat sat on the",
    "One day Tom and Anna went to the park and",
)


def _answers(engine: LLMEngine, **sampling: Any) -> tuple[dict[str, list[int]], int]:
    """(output by request, steps)"""
    tokenizer = Tokenizer.from_file(
        str(resolve("baton-5m", files="tokenizer").path / "tokenizer.json")
    )
    answers: dict[str, list[int]] = {}
    for index, prompt in enumerate(PROMPTS):
        own = Sampling(max_tokens=48, seed=index, ignore_eos=True, **sampling)
        token_ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        engine.submit(Request(f"r{index}", tuple(token_ids), own, hasher()))
    num_steps = 0
    while engine.has_work():
        for event in engine.step().events:
            answers.setdefault(event.request_id, []).extend(event.token_ids)
        num_steps += 1
        engine.check_integrity()
    return answers, num_steps


@pytest.mark.parametrize(
    "sampling", third([{}, {"temperature": 0.9}, {"temperature": 1.0, "top_p": 0.8}])
)
def test_the_bundled_pair_gives_the_targets_answers_in_fewer_steps(
    sampling: dict[str, float],
) -> None:
    """Sampled, too: draft and target draw with the same noise."""
    plain, num_plain = _answers(load_engine(TARGET), **sampling)
    for expansion in ((1, 1, 1), (3, 2, 1)):
        speculation = SpeculationConfig(
            draft_models=("baton-5m-draft",), drafters=("ngram",), expansion=expansion, always=True
        )
        engine = load_engine(replace(TARGET, speculation=speculation))
        answers, num_steps = _answers(engine, **sampling)
        assert answers == plain
        assert num_steps < num_plain / 2


def test_a_small_cache_costs_drafts_and_no_token() -> None:
    """Room for one of three: who loses its blocks catches up again."""
    plain, num_plain = _answers(load_engine(TARGET))
    target = load_engine(TARGET)
    draft = load_engine(replace(TARGET, model="baton-5m-draft"))._model
    proposer = DraftModelProposer(draft, (2, 1), num_blocks=7, max_num_tokens=5)
    config = replace(TARGET, speculation=SpeculationConfig(always=True))
    engine = LLMEngine(config, target._model, proposers=[proposer])
    answers, num_steps = _answers(engine)
    assert answers == plain
    assert num_steps < num_plain


def test_a_model_without_trees_drafts_a_path_and_its_siblings() -> None:
    """Of <2, 2>: two children of the root, and two of the likelier one."""
    model = FakeModel(block_size=4)
    model.guesses = Guesses.CHAINS
    proposer = DraftModelProposer(model, (2, 2), num_blocks=16, max_num_tokens=64)
    sampling = Sampling(max_tokens=8)
    tokens = [3, 1, 4, 1, 5]
    (draft,) = proposer.propose([DraftTask(("r", 0), tokens, 3, sampling, 0, 9)])
    assert len(draft.tree) == 4
    best = model.next_token(tokens)
    assert draft.tree.child(-1, best) is not None
    second = model.next_token([*tokens, best])
    assert draft.tree.child(draft.tree.child(-1, best) or 0, second) is not None
    proposer.check_integrity()


@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_no_block_is_lost_or_shared(rng: random.Random, num_blocks: int) -> None:
    cache = DraftKVCache(num_blocks, 4)
    keys = [(f"r{index}", 0) for index in range(4)]
    for _ in range(40):
        key = rng.choice(keys)
        if rng.random() < 0.3:
            cache.forget(key)
        else:
            busy = rng.sample(keys, rng.randint(0, 4))
            num_slots = rng.randint(1, 30)
            held = cache.allocate(key, num_slots, busy)
            if held is not None:
                assert len(held.block_ids) * 4 >= num_slots
                held.num_tokens = rng.randint(0, num_slots)
            else:
                assert -(-num_slots // 4) > num_blocks or set(busy) - {key}
        cache.check_integrity()
    for key in keys:
        cache.forget(key)
    assert cache.allocate(keys[0], 4 * num_blocks, ()) is not None


def test_a_draft_model_of_another_tokenizer_or_without_room_is_refused(
    tmp_path: Path,
) -> None:
    save(FAMILIES["llama"](), tmp_path / "other", 1)

    def load(**fields: Any) -> None:
        load_engine(replace(TARGET, speculation=SpeculationConfig(**fields)))

    with pytest.raises(LoadError, match="has another tokenizer than baton-5m"):
        load(draft_models=(str(tmp_path / "other"),))
    with pytest.raises(LoadError, match="draft_kv_bytes: 1000 hold 0 blocks of baton-5m-draft"):
        load(draft_models=("baton-5m-draft",), draft_kv_bytes=1000)


def test_nobody_loses_blocks_in_vain() -> None:
    cache = DraftKVCache(10, 4)
    for name, num_slots in (("a", 12), ("b", 16)):
        held = cache.allocate((name, 0), num_slots, ())
        assert held is not None
        held.num_tokens = num_slots
    assert cache.has_room(("a", 0), 24) and not cache.has_room(("a", 0), 25)
    assert cache.has_room(("c", 0), 12) and not cache.has_room(("c", 0), 13)
    assert cache.allocate(("c", 0), 25, [("b", 0)]) is None
    assert [cache.num_tokens((name, 0)) for name in "abc"] == [12, 16, 0]
    assert cache.allocate(("c", 0), 24, [("b", 0)]) is not None
    assert [cache.num_tokens((name, 0)) for name in "abc"] == [0, 16, 0]
    cache.check_integrity()


def test_a_path_below_a_sibling_that_has_no_children() -> None:
    """Its cells are the sibling's: the first of two draws is one after which nothing is a number,
    so that all that follows is below the second."""
    model = FakeModel(block_size=4)
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=3)
    task = DraftTask(("r", 0), [3, 1, 4, 1, 5], 3, sampling, 0, 30, is_drawn=True)
    (whole,) = DraftModelProposer(model, (2, 1, 1), num_blocks=16, max_num_tokens=64).propose(
        [task]
    )
    first, second = whole.tree.children[-1]
    for poison, rest in ((first, second), (second, first)):
        model = FakeModel(block_size=4, poison=frozenset({poison}))
        (draft,) = DraftModelProposer(model, (2, 1, 1), num_blocks=16, max_num_tokens=64).propose(
            [task]
        )
        paths = [path for path, _ in draft.distributions]
        assert [len(path) for path in paths] == [0, 1, 2] and paths[1] == (rest,)
        for place, distribution in draft.distributions.items():
            assert distribution.tolist() == whole.distributions[place].tolist()


@pytest.mark.parametrize("name", ["make_memory", "attach", "warm_up", "forward"])
def test_a_draft_model_that_cannot_be_set_up_is_closed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    closed: list[object] = []

    def fail(*_: object) -> None:
        raise MemoryError("no room")

    model = FakeModel()
    monkeypatch.setattr(loader, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(FakeModel, "close", lambda one: closed.append(one))
    monkeypatch.setattr(FakeModel, name, fail)
    with pytest.raises(MemoryError):
        loader.load_draft_model(TARGET)
    assert closed == [model]


@pytest.mark.parametrize("is_drawn", [False, True])
def test_a_loaded_one_has_guessed_before_and_for_nobody(
    monkeypatch: pytest.MonkeyPatch, is_drawn: bool
) -> None:
    """By each way of drawing, so that no trial is charged with what its first call costs."""
    depths: list[int] = []
    forward = FakeModel.forward

    def seen(one: FakeModel, batch: Batch) -> torch.Tensor:
        depths.append(len(batch.token_ids))
        return forward(one, batch)

    monkeypatch.setattr(loader, "load_model", lambda *_, **__: FakeModel())
    monkeypatch.setattr(FakeModel, "forward", seen)
    speculation = replace(TARGET.speculation, expansion=(1, 1, 1))
    proposer = loader.load_draft_model(replace(TARGET, speculation=speculation))
    # A text of four tokens, and then of five; and one that grows by so many.
    assert depths == [4, 1, 1, 1, 1, 1] * 3 + list(range(1, 21))
    sampling = Sampling(max_tokens=8, temperature=1.0, seed=3)
    task = DraftTask(("r", 0), [3, 1, 4, 1, 5], 3, sampling, 0, 30, is_drawn=is_drawn)
    fresh = DraftModelProposer(FakeModel(), (1, 1, 1), num_blocks=64, max_num_tokens=64)
    assert proposer.propose([task])[0].tree == fresh.propose([task])[0].tree
    proposer.forget(task.key)
    proposer.check_integrity()
    assert len(proposer._cache._sequences) == 0


def test_one_that_cannot_be_loaded_closes_those_before(monkeypatch: pytest.MonkeyPatch) -> None:
    models = [FakeModel(), FakeModel()]
    left, closed = list(models), []

    def load_one(config: EngineConfig, **_: Any) -> FakeModel:
        if not left:
            raise LoadError("no such folder")
        return left.pop(0)

    monkeypatch.setattr(loader, "load_model", load_one)
    monkeypatch.setattr(FakeModel, "close", lambda one: closed.append(one))
    speculation = SpeculationConfig(draft_models=("a", "b"))
    config = replace(TARGET, speculation=speculation)
    proposers = loader.load_proposers(config, FakeModel().info)
    assert len(proposers) == 2 and not closed
    left += models
    for fields in ({"draft_models": ("a", "b", "c")}, {"draft_workers": ("nowhere:1",)}):
        with pytest.raises(LoadError):
            loader.load_proposers(
                replace(config, speculation=replace(speculation, **fields)), FakeModel().info
            )
        assert closed == models[::-1]
        left, closed = list(models), []


def test_what_fails_while_they_are_closed_hides_neither_the_cause_nor_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    models = [FakeModel(), FakeModel()]
    left, closed = list(models), []

    def close(one: FakeModel) -> None:
        closed.append(one)
        raise OSError(f"model {models.index(one)} is stuck")

    monkeypatch.setattr(loader, "load_model", lambda *_, **__: left.pop(0))
    monkeypatch.setattr(FakeModel, "close", close)
    speculation = SpeculationConfig(draft_models=("a", "b"), draft_workers=("nowhere:1",))
    with pytest.raises(LoadError, match="draft_workers"):
        loader.load_proposers(replace(TARGET, speculation=speculation), FakeModel().info)
    assert closed == models[::-1]
    assert all(f"model {index} is stuck" in caplog.text for index in range(2))


class _Closing:
    """A proposer with something to close."""

    name = "closing"

    def __init__(self) -> None:
        self.num_closed = 0

    def propose(self, tasks: Sequence[DraftTask]) -> list[Draft]:
        return [Draft(EMPTY, {})] * len(tasks)

    def forget(self, key: Key) -> None: ...

    def check_integrity(self) -> None: ...

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize("failing", ["load_heads", "warm_up", ""])
def test_draft_models_are_closed_with_the_engine_and_where_it_cannot_be_loaded(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer, model = _Closing(), FakeModel()
    closed: list[object] = []

    def fail(*_: object) -> None:
        raise LoadError("the heads of another model")

    monkeypatch.setattr(FakeModel, "close", lambda one: closed.append(one))
    monkeypatch.setattr(model_loader, "load_model", lambda *_, **__: model)
    monkeypatch.setattr(loader, "load_proposers", lambda *_: [proposer])
    if failing:
        owner = loader if failing == "load_heads" else LLMEngine
        monkeypatch.setattr(owner, failing, fail)
    config = EngineConfig(model="baton-5m", num_blocks=100)
    if failing:
        with pytest.raises(LoadError, match="heads"):
            load_engine(config)
    else:
        engine = load_engine(config)
        assert not closed and not proposer.num_closed
        engine.close()
    assert closed == [model] and proposer.num_closed == 1
    DraftModelProposer(model, (1,), num_blocks=100, max_num_tokens=8).close()
    assert closed == [model, model]
