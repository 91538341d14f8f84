"""Training of further draft models: what counts as missed, what is learnt of it, and that an engine
guesses with what comes out."""

from __future__ import annotations

import copy
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.engine import load_engine
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from tests.harness.engines import hasher
from tests.unit.tools.tiny_pair import TOKENIZER, save_pair
from tools.bundled_model.boosted_drafts import (
    Settings,
    TargetAnswer,
    answer,
    boost,
    fit,
    load,
    missed,
    prompts,
    ranks,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("boost"))


def test_a_token_is_missed_where_no_draft_model_has_it() -> None:
    by_draft = [
        [np.array([0, 3, 1, 9]), np.array([2])],
        [np.array([5, 0, 2, 7]), np.array([1])],
    ]
    assert [own.tolist() for own in missed(by_draft, 1)] == [[False, False, True, True], [True]]
    assert [own.tolist() for own in missed(by_draft, 2)] == [[False, False, False, True], [False]]
    assert [own.tolist() for own in missed(by_draft[:1], 1)] == [[False, True, True, True], [True]]


def test_prompts_are_of_their_seed_and_no_longer_than_allowed() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    found = prompts(tokenizer, 3, 12, 60)
    assert found == prompts(tokenizer, 3, 12, 60) != prompts(tokenizer, 4, 12, 60)
    assert len(found) == 12 and all(1 <= len(one) <= 60 for one in found)
    asking = tokenizer.token_to_id("<|assistant|>")
    assert {one[-1] == asking for one in found} == {True, False}
    assert all(one[-1] == asking for one in found if tokenizer.token_to_id("<|user|>") in one)


def test_ranks_are_those_of_each_token_alone(pair: tuple[Path, Path], seed: int) -> None:
    """Rows of different lengths beside one another, each against the whole model without padding.
    Scores that are nearly equal may come in any order."""
    model, _ = load(str(pair[1]))
    rng = random.Random(seed)
    answers = []
    for _ in range(5):
        token_ids = tuple(rng.randrange(5, 2048) for _ in range(rng.randint(2, 20)))
        answers.append(TargetAnswer(token_ids, rng.randint(1, len(token_ids) - 1), 0.0))
    for one, found in zip(answers, ranks(model, answers, 3), strict=True):
        assert len(found) == len(one.token_ids) - one.num_prompt_tokens
        for place, rank in enumerate(found, one.num_prompt_tokens):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([one.token_ids[:place]])).logits[0, -1]
            own = logits[one.token_ids[place]]
            assert (logits > own + 1e-3).sum() <= rank <= (logits >= own - 1e-3).sum()


def test_greedy_answers_are_the_likeliest_tokens_up_to_the_end(pair: tuple[Path, Path]) -> None:
    model, _ = load(str(pair[0]))
    asked = [[7, 8, 9], [10], [11, 12]]
    found = answer(model, asked, 0.0, 6, 2)
    for token_ids, one in zip(asked, found, strict=True):
        assert one.token_ids[: one.num_prompt_tokens] == tuple(token_ids)
        assert 1 <= len(one.token_ids) - one.num_prompt_tokens <= 6
    assert np.concatenate(ranks(model, found, 2)).max() == 0


@pytest.mark.parametrize("wanted", [0, 1])
def test_what_has_no_weight_is_not_learnt(pair: tuple[Path, Path], wanted: int) -> None:
    """The same beginning goes on in two ways; one of them counts."""
    model = copy.deepcopy(load(str(pair[1]))[0])
    answers = [TargetAnswer((20, 21, 22, last), 3, 0.0) for last in (30, 40)]
    weights = [np.array([float(place == wanted)], dtype=np.float32) for place in range(2)]
    settings = Settings(num_prompts=8, num_steps=20, batch=2, rate=1e-2)
    losses = fit(model, answers, weights, settings)
    assert losses[-1] < losses[0]
    own, other = (int(one[0]) for one in ranks(model, [answers[wanted], answers[1 - wanted]], 2))
    assert own == 0 < other


@pytest.fixture(scope="module")
def boosted(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("boosted") / "second"
    settings = Settings(
        target=str(pair[0]),
        drafts=(str(pair[1]),),
        num_prompts=16,
        num_prompt_tokens=24,
        num_tokens=4,
        temperatures=(0.0, 0.5),
        rest_weight=0.0,
        num_steps=15,
        batch=16,
        rate=1e-2,
    )
    return out, boost(settings, out)


def test_it_learns_what_the_earlier_one_misses(
    boosted: tuple[Path, dict[str, Any]], pair: tuple[Path, Path]
) -> None:
    out, found = boosted
    # The two have nothing in common, so nearly all is missed.
    assert 0.9 * found["num_positions"] < found["num_missed"] <= found["num_positions"]
    assert found["last_loss"] < found["first_loss"]
    assert set(found["kept_out"]) == {"temperature 0", "temperature 0.5"}
    for rates in found["kept_out"].values():
        assert max(rates["earlier"], rates["new"]) <= rates["any"] <= 1.0
    assert (out / "boosting.json").is_file()
    # The checkpoint has what was learnt: of nearly the same answers it has more than before.
    asked = prompts(Tokenizer.from_file(str(TOKENIZER)), 11, 16, 24)
    answers = answer(load(str(pair[0]))[0], asked, 0.0, 4, 16)
    before, after = (
        float(np.mean(np.concatenate(ranks(load(str(folder))[0], answers, 16)) == 0))
        for folder in (pair[1], out)
    )
    assert before < 0.1 and after > before + 0.2


def test_an_engine_guesses_with_it(
    boosted: tuple[Path, dict[str, Any]], pair: tuple[Path, Path]
) -> None:
    speculation = SpeculationConfig(draft_models=(str(pair[1]), str(boosted[0])), always=True)
    answers = []
    for own in (SpeculationConfig(), speculation):
        engine = load_engine(
            EngineConfig(
                model=str(pair[0]),
                device="cpu",
                dtype="float32",
                num_threads=1,
                context_window=64,
                num_blocks=16,
                speculation=own,
            )
        )
        sampling = Sampling(max_tokens=12, ignore_eos=True)
        engine.submit(Request("one", (7, 8, 9), sampling, hasher()))
        said: list[int] = []
        while engine.has_work():
            for event in engine.step().events:
                said += event.token_ids
        answers.append(said)
        num_guessed = engine.metrics().num_guessed_tokens
    assert answers[0] == answers[1] and len(answers[0]) == 12
    assert num_guessed > 0


def test_a_draft_model_of_another_tokenizer_is_refused(
    pair: tuple[Path, Path], tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(pair[1], other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="another tokenizer"):
        boost(Settings(target=str(pair[0]), drafts=(str(other),)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"drafts": ()},
        {"temperatures": ()},
        {"temperatures": (0.0, -0.1)},
        {"rest_weight": 1.1},
        {"num_steps": 0},
        {"rate": 0.0},
        {"num_prompts": 2},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Settings(**wrong)
