"""Sampled answers of an engine that guesses by draws: under the multi-step rule each token has the
distribution of plain decoding, given those before it, through the engine's own path: draft models
that draw, trees that are merged and cut, KV, the sampler, kept paths. A wrong rule, or
children that are no draws, must fail the same test.
False alarms: drawn_answers.py.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.models.interface import Guesses
from engine.request import FinishReason, Sampling
from engine.sampling.metadata import SamplingRequest
from engine.sampling.sampler import Sampler
from engine.sampling.token_history import TokenHistory
from engine.speculation import acceptance, draft_model, drawing
from engine.speculation.acceptance import Distribution, Proposal, Proposals
from engine.speculation.config import NgramConfig, SpeculationConfig
from engine.speculation.ngram import PromptLookup
from process.settings import SettingsError
from tests.unit.engine.sampling.reference import sample
from tests.unit.engine.speculation.drawn_answers import (
    LIMIT,
    NUM_TOKENS,
    VOCAB,
    answer,
    draft_model_of,
    likelihood,
    make_engine,
    requests_of,
    world,
)
from tests.unit.engine.speculation.markov import MarkovModel, Table, Tally


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("expansions", "likeness"), [([(3, 1)], 0.6), ([(2, 1), (2, 1)], 0.3)])
def test_tokens_have_the_models_distribution(
    expansions: list[tuple[int, ...]],
    likeness: float,
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """One draft model and two; three draws of five tokens are often the same."""
    table, tables = world(seed, len(expansions), likeness)
    drafters = [draft_model_of(own, *one) for own, one in zip(tables, expansions, strict=True)]
    engine = make_engine(table, drafters)
    requests = requests_of(scale(100_000) // NUM_TOKENS, seed)
    assert likelihood(table, requests, answer(engine, requests)) > LIMIT
    counts = engine.metrics()
    assert counts.num_kept_tokens > 0.1 * counts.num_output_tokens


def _chains(table: Table, own: Table, _: object) -> LLMEngine:
    """Of a target and a draft model without masks for trees."""
    model = MarkovModel(table)
    model.guesses = Guesses.CHAINS
    return make_engine(model, [draft_model_of(own, 2, 2, takes_trees=False)])


_CUTS: dict[str, Callable[[Table, Table, Callable[[], float]], LLMEngine]] = {
    "room for two of four": lambda table, own, _: make_engine(
        table, [draft_model_of(own, 3, 1)], max_num_nodes=2
    ),
    "what pays": lambda table, own, clock: make_engine(
        table, [draft_model_of(own, 2, 1, 1)], always=False, clock=clock
    ),
    "a lookup beside": lambda table, own, _: make_engine(
        table,
        [draft_model_of(own, 2, 1), PromptLookup(NgramConfig(min_length=1, max_matches=2))],
        max_num_nodes=4,
    ),
    "chains": _chains,
}


@pytest.mark.parametrize("cut", _CUTS)
def test_what_is_not_computed_is_tried_all_the_same(
    cut: str, seed: int, scale: Callable[[int], int]
) -> None:
    table, (own,) = world(seed, 1, 0.3)
    ticks = itertools.count()
    engine = _CUTS[cut](table, own, lambda: next(ticks) * 1e-3)
    requests = requests_of(max(3, scale(10_000) // NUM_TOKENS), seed)
    assert likelihood(table, requests, answer(engine, requests)) > LIMIT
    assert engine.metrics().num_guessed_tokens > 0


def _best_children(
    logits: torch.Tensor, parents: Sequence[drawing.Parent], width: int
) -> list[drawing.Children | None]:
    """A distribution's best, as if they were draws from it."""
    found: list[drawing.Children | None] = []
    for one in drawing.draw_children(logits, parents, width):
        assert one is not None
        best = np.argsort(-one.distribution)[:width].tolist()
        found.append(drawing.Children(Counter(best), one.distribution))
    return found


def _leaves_no_residual(
    wanted: Distribution, tries: Sequence[Proposal], uniform: acceptance.Uniform
) -> int:
    """The model's own distribution after all are rejected: what they took of it comes twice."""
    for one in tries:
        if uniform() * one.probability < wanted[one.token_id]:
            return one.token_id
    return acceptance.pick(wanted, uniform())


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (draft_model, "draw_children", _best_children),
        (acceptance, "accept", _leaves_no_residual),
    ],
)
def test_what_does_not_keep_it_is_found(
    owner: Any, name: str, wrong: Any, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Top-k children under the multi-step rule, and a wrong rule: in a world where drafts are far
    off, at less than the short form's count."""
    monkeypatch.setattr(owner, name, wrong)
    row = np.array([0.7, 0.15, 0.08, 0.04, 0.03])
    table = np.stack([np.roll(row, shift) for shift in range(VOCAB)])
    own = np.stack([np.roll(row[::-1], shift) for shift in range(VOCAB)])
    requests = requests_of(2_000 // NUM_TOKENS, seed)
    outputs = answer(make_engine(table, [draft_model_of(own, 3)]), requests)
    assert likelihood(table, requests, outputs) < LIMIT


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.2},
        {
            "temperature": 1.3,
            "top_k": 4,
            "min_p": 0.05,
            "frequency_penalty": 0.1,
            "logit_bias": ((2, 0.7),),
            "stop_token_ids": frozenset({3}),
        },
    ],
)
def test_the_distribution_is_the_processed_one(sampling: dict[str, Any], seed: int) -> None:
    """Of two samples each: every processor, each node with its own history; ends inside a kept
    run."""
    table, (own,) = world(seed, 1, 0.6)
    requests = requests_of(30, seed, num_samples=2, max_tokens=12, **sampling)
    outputs = answer(make_engine(table, [draft_model_of(own, 2, 1)]), requests)
    assert likelihood(table, requests, outputs) > LIMIT
    for token_ids, reason in outputs.values():
        assert (reason is FinishReason.STOP_TOKEN) == (
            bool(sampling.get("stop_token_ids")) and token_ids[-1] == 3
        )
        assert "stop_token_ids" not in sampling or 3 not in token_ids[:-1]
        assert reason is FinishReason.STOP_TOKEN or len(token_ids) == 12


def test_naive_and_greedy_and_traced_answers_are_plain_ones(seed: int) -> None:
    """Whatever the draft models draw: and a record can be replayed under the multi-step rule."""
    table, tables = world(seed, 2, 0.5)
    cases: list[tuple[str, Mapping[str, Any]]] = [
        ("naive", {}),
        ("naive", {"top_p": 0.8, "frequency_penalty": 0.5, "num_samples": 2}),
        ("multi_step", {"temperature": 0.0, "repetition_penalty": 1.3}),
        ("multi_step", {"trace": True}),
    ]
    num_kept = num_guessed = 0
    for rule, fields in cases:
        requests = requests_of(3, seed, **({"max_tokens": 25} | dict(fields)))
        engine = make_engine(table, [draft_model_of(own, 2, 1) for own in tables], rule)
        assert answer(engine, requests) == answer(make_engine(table, []), requests)
        counts = engine.metrics()
        num_kept += counts.num_kept_tokens
        num_guessed += counts.num_guessed_tokens
    assert 0 < num_kept < num_guessed


def test_a_run_can_be_repeated(seed: int) -> None:
    """And its tokens are not plain decoding's."""
    table, tables = world(seed, 2, 0.5)
    requests = requests_of(2, seed, max_tokens=60)
    first, again = (
        answer(make_engine(table, [draft_model_of(own, 2, 1) for own in tables]), requests)
        for _ in range(2)
    )
    assert first == again
    assert first != answer(make_engine(table, []), requests)


def test_masks_of_grammars_hold_for_what_was_proposed(seed: int) -> None:
    """Draws from the mask's own distribution alone, though most of what is proposed is banned."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=6).astype(np.float32))
    draft = rng.dirichlet(np.ones(6))
    sampling = Sampling(max_tokens=1, temperature=0.7)
    bitmask = torch.tensor([0b011010], dtype=torch.int32)
    draws = []
    for key in range(4_000):
        drawn = rng.choice(6, size=2, p=draft).tolist()
        tries = tuple(Proposal(token, float(draft[token]), draft) for token in drawn)
        proposals = Proposals(tries, drawing.random_key(seed, key))
        draws.append(SamplingRequest(sampling, 0, bitmask=bitmask, proposals=proposals))
    tally = Tally(6)
    shares = np.where([0, 1, 0, 1, 1, 0], np.exp(logits.double().numpy() / 0.7), 0.0)
    for one in sample(logits.expand(len(draws), -1), draws):
        tally.add("all", one.token_id, shares / shares.sum())
    assert tally.likelihood() > LIMIT


def test_what_a_draft_model_draws_from_is_what_the_target_would(seed: int) -> None:
    """`distributions` against `draw` on the same rows, each processor on; and errors."""
    sampling = Sampling(
        max_tokens=9, temperature=0.8, top_p=0.95, presence_penalty=0.5, logit_bias=((1, 0.3),)
    )
    history = TokenHistory(sampling, (1, 2), (3,))
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=6).astype(np.float32))
    own = Sampler().distributions(logits[None], [SamplingRequest(sampling, 3, history=history)])[0]
    tally = Tally(6)
    rows = [
        SamplingRequest(replace(sampling, seed=(seed + key) % 2**64), 3, history=history)
        for key in range(2_000)
    ]
    for one in sample(logits.expand(len(rows), -1), rows):
        tally.add("all", one.token_id, own)
    assert tally.likelihood() > LIMIT
    broken = torch.stack([torch.full((6,), torch.nan), logits])
    found = Sampler().distributions(broken, [SamplingRequest(sampling, 3, history=history)] * 2)
    assert np.isnan(found[0]).all()
    assert np.array_equal(found[1], own)


def test_distributions_are_made_of_few_rows_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of rows: to the last bit what all of them at once are."""
    drawn = np.random.default_rng(seed).normal(size=(7, 200_000))
    logits = torch.from_numpy(drawn.astype(np.float32))
    logits[4] = torch.nan
    draws = [
        SamplingRequest(Sampling(max_tokens=9, temperature=0.5 + row / 4, top_p=0.9), 3)
        for row in range(7)
    ]
    alone = [Sampler().distributions(logits[i : i + 1], draws[i : i + 1])[0] for i in range(7)]
    most: list[int] = []
    real = Sampler._distributions

    def few(sampler: Sampler, own: torch.Tensor, requests: list[SamplingRequest]) -> Any:
        most.append(len(own))
        return real(sampler, own, requests)

    monkeypatch.setattr(Sampler, "_distributions", few)
    found = Sampler().distributions(logits, draws)
    assert np.array_equal(found, np.stack(alone), equal_nan=True)
    assert most == [5, 2]


def test_what_cannot_hold_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="acceptance: 'mss' is none of exact, multi_step"):
        SpeculationConfig(acceptance="mss")
    config = EngineConfig(
        num_blocks=64, exact=True, speculation=SpeculationConfig(acceptance="multi_step")
    )
    table, (own,) = world(0, 1, 0.5)
    with pytest.raises(SettingsError, match="multi_step is not for exact=true"):
        LLMEngine(config, MarkovModel(table), drafters=[draft_model_of(own, 1)])
