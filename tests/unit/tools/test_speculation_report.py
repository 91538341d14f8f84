"""The report's figures against what is known of them: of a draft model that is its target, and of
distributions that were written down."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.speculation_report import (
    WIDTHS,
    ScoredAnswer,
    Settings,
    answered,
    drawn_children,
    engine_for,
    kept_rates,
    markdown,
    ranks,
    report,
    score,
)
from engine.speculation.config import SpeculationConfig
from tests.unit.tools.tiny_pair import save_pair
from tools.bundled_model.boosted_drafts import TargetAnswer, load


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_pair(tmp_path_factory.mktemp("report"))


def test_the_noise_is_the_one_that_the_engine_drew_with(pair: tuple[Path, Path]) -> None:
    """The target's own scores with it are highest at the tokens that were drawn; without it, or
    with that of another request, they are not."""
    wanted = Settings(target=str(pair[0]), num_prompts=3, num_prompt_tokens=16, num_tokens=12)
    engine = engine_for(wanted, SpeculationConfig())
    models = [load(str(folder))[0] for folder in pair]
    asked = [[7, 8, 9], [10], [11, 12]]
    # So hot that noise says more than the model.
    scored = score(models, answered(engine, asked, 20.0, wanted)[0])
    own = np.concatenate([ranks(one, one.logits[0], is_coupled=True) for one in scored])
    # A tie may fall otherwise in another sum of the same numbers.
    assert np.mean(own == 0) > 0.9
    for others in (
        [ranks(one, one.logits[0], is_coupled=False) for one in scored],
        [ranks(one._replace(seed=99), one.logits[0], is_coupled=True) for one in scored],
    ):
        assert np.mean(np.concatenate(others) == 0) < 0.5
    greedy = score(models, answered(engine, asked, 0.0, wanted)[0])
    for is_coupled in (False, True):
        own = np.concatenate([ranks(one, one.logits[0], is_coupled=is_coupled) for one in greedy])
        assert np.mean(own == 0) > 0.9


def _scored(target: list[float], draft: list[float], num_tokens: int) -> ScoredAnswer:
    """As if every token had these two distributions."""
    answer = TargetAnswer((1, *[0] * num_tokens), 1, 1.0)
    logits = [torch.tensor(own).log().expand(num_tokens, -1) for own in (target, draft)]
    return ScoredAnswer(answer, 0, tuple(logits))


def test_rates_of_both_rules_are_those_of_theory() -> None:
    """One of k draws from q: naive sampling keeps one with sum p (1 - (1 - q)^k), multi-step
    sampling of one draw with sum min(p, q). Bounds: six standard deviations; the seed is fixed."""
    p, q = [0.7, 0.2, 0.1], [0.2, 0.2, 0.6]
    num_tokens = 400
    settings = Settings(num_trials=2)
    rates = kept_rates([_scored(p, q, num_tokens)], 1, settings)
    bound = 6 * (0.25 / (2 * num_tokens)) ** 0.5
    for width, rate in zip(WIDTHS, rates["naive"], strict=True):
        expected = sum(a * (1 - (1 - b) ** width) for a, b in zip(p, q, strict=True))
        assert abs(rate - expected) < bound
    assert abs(rates["multi_step"][0] - sum(map(min, p, q))) < bound
    # From itself, a draw is always right; an independent one is not.
    same = kept_rates([_scored(p, p, 50)], 1, settings)
    assert same["multi_step"] == [1.0] * len(WIDTHS)
    assert same["naive"][0] < 0.9


def test_equal_draws_are_one_node_with_a_try_each() -> None:
    own = [np.array([0.5, 0.5, 0.0]), np.array([0.0, 0.5, 0.5])]
    for seed in range(20):
        tree, drawn_from = drawn_children(own, 3, random.Random(seed))
        assert sorted(drawn_from) == [((), 0), ((), 1)]
        by_proposer = [one.proposer for tries in tree.tries for one in tries]
        assert by_proposer.count(0) == by_proposer.count(1) == 3
        for token_id, tries in zip(tree.token_ids, tree.tries, strict=True):
            assert all(one.probability == own[one.proposer][token_id] > 0.0 for one in tries)


def test_a_draft_model_that_is_its_target_is_always_right(pair: tuple[Path, Path]) -> None:
    target = str(pair[0])
    wanted = Settings(
        target=target,
        drafts=(target, str(pair[1])),
        num_prompts=2,
        num_prompt_tokens=16,
        num_tokens=8,
        temperatures=(0.8,),
        num_trials=1,
        widths=(2,),
        rules=("exact", "multi_step"),
    )
    found = report(wanted)
    for how in ("greedy", "temperature 0.8, same noise"):
        for name in ("target", "any"):
            assert min(found["hit_rate"][how][name]) > 0.8
        assert max(found["hit_rate"][how]["draft"]) < 0.5
    assert min(found["kept_rate"]["temperature 0.8"]["multi_step"]) > 0.8
    # However few tokens are left: every step keeps the whole depth and draws one more.
    for name in ("exact", "any, exact"):
        assert found["tokens_per_step"]["greedy"][name] == pytest.approx([5.0], abs=0.5)
    sampled = found["tokens_per_step"]["temperature 0.8"]
    assert set(sampled) == {"exact", "multi_step", "any, exact"}
    assert min(rates[0] for rates in sampled.values()) > 4.0


def _tables() -> dict[str, Any]:
    row = {"one": [0.125, 0.25, 0.375, 0.5, 0.625]}
    return {
        "hit_rate": {"greedy": row},
        "kept_rate": {"temperature 0.8": row},
        "tokens_per_step": {"greedy": {"exact": [1.0, 2.0, 3.0, 4.0, 5.0]}},
    }


def test_markdown_has_every_row_of_every_table() -> None:
    plain = markdown(_tables())
    assert "| greedy: one | 12.5 % | 25.0 % | 37.5 % | 50.0 % | 62.5 % |" in plain
    assert "| temperature 0.8: one | 12.5 % |" in plain
    assert "| greedy: exact | 1.00 | 2.00 | 3.00 | 4.00 | 5.00 |" in plain
    for line in plain.splitlines():
        assert line.count("|") in (0, 2 + len(WIDTHS))
