"""The beam algorithm by hand, against exhaustive search, and what it refuses. That it equals
transformers: tests/parity/test_beam.py."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch

from engine import beam_search
from engine.beam_search import BeamState, Hypothesis
from engine.errors import InvalidLogits, InvalidRequest
from engine.request import Beam

VOCAB = 16


def row(seed: int, token_ids: tuple[int, ...]) -> torch.Tensor:
    """A model: log probabilities after these tokens."""
    generator = torch.Generator().manual_seed(hash((seed, *token_ids)) % (1 << 62))
    return torch.log_softmax(torch.randn(VOCAB, generator=generator) * 2.0, dim=-1)


def search(
    seed: int, beam: Beam, max_tokens: int, ends: frozenset[int] = frozenset()
) -> tuple[Hypothesis, ...]:
    state = beam_search.start(beam, ends, max_tokens)
    while not state.is_over:
        rows = torch.stack([row(seed, path) for path in state.open_token_ids])
        before = state
        done = beam_search.step(state, rows)
        state = done.state
        for index, (parent, token_id) in enumerate(zip(done.parents, done.token_ids, strict=True)):
            assert state.open_token_ids[index] == (*before.open_token_ids[parent], token_id)
        assert list(state.open_scores) == sorted(state.open_scores, reverse=True)
    assert len(state.finished) == beam.num_beams
    return state.finished


def exhaustive(seed: int, length: int, ends: frozenset[int]) -> list[tuple[float, tuple[int, ...]]]:
    """(sum of log probabilities, tokens) of everything that ends within `length`, best first."""
    found = []
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(length):
        longer = []
        for total, path in paths:
            for token_id, logprob in enumerate(row(seed, path).tolist()):
                one = (total + logprob, (*path, token_id))
                (found if token_id in ends or len(one[1]) == length else longer).append(one)
        paths = longer
    return sorted(found, reverse=True)


def test_many_beams_are_an_exhaustive_search(seed: int) -> None:
    """8 beams over 16 tokens lose nothing in the first of two steps that could win in the second,
    as long as their best 8 hold the winner: checked, so that the test says what it means."""
    found = 0
    for number in range(40):
        best = exhaustive(seed + number, 2, frozenset())[:1]
        finished = search(seed + number, Beam(8, length_penalty=0.0), 2)
        first = sorted(range(VOCAB), key=row(seed + number, ()).tolist().__getitem__)[-8:]
        if best[0][1][0] in first:
            found += 1
            assert finished[0].token_ids == best[0][1]
            assert finished[0].score == pytest.approx(best[0][0], abs=1e-5)
    assert found > 20


def test_a_search_begun_from_candidates_is_the_same(seed: int, scale: Callable[[int], int]) -> None:
    """What the prefill leg hands over is enough, whatever the end tokens are."""
    rng = random.Random(seed)
    for number in range(scale(400)):
        ends = frozenset(rng.sample(range(VOCAB), rng.randint(0, 4)))
        beam = Beam(rng.randint(2, 3), rng.choice([-1.0, 0.0, 1.0, 2.0]), rng.random() < 0.5)
        state = beam_search.start(beam, ends, rng.randint(1, 6))
        prompt = row(seed + number, ())
        count = beam_search.num_candidates(beam.num_beams, len(ends))
        candidates = beam_search.first_candidates(prompt, count)
        assert beam_search.begin(state, candidates) == beam_search.step(state, prompt[None])
        more = beam_search.first_candidates(prompt, count + 5)
        assert beam_search.begin(state, more) == beam_search.begin(state, candidates)


def test_by_hand() -> None:
    """Two beams, end token 0: one beam ends, the next best takes its place; then no open beam can
    win any more."""
    logs = torch.tensor([[0.4, 0.3, 0.2, 0.05, 0.05]]).log()
    first = beam_search.step(beam_search.start(Beam(2), frozenset({0}), 9), logs)
    assert [h.token_ids for h in first.state.finished] == [(0,)]
    assert (first.parents, first.token_ids) == ((0, 0), (1, 2))
    logs = torch.tensor([[0.02, 0.4, 0.3, 0.2, 0.08], [0.9, 0.04, 0.03, 0.02, 0.01]]).log()
    second = beam_search.step(first.state, logs)
    assert second.state.is_over
    assert (second.parents, second.token_ids, second.state.open_token_ids) == ((), (), ())
    assert [h.token_ids for h in second.state.finished] == [(2, 0), (0,)]
    assert second.state.finished[0].score == pytest.approx(
        (torch.tensor(0.2).log() + torch.tensor(0.9).log()).item() / 2, abs=1e-6
    )


def test_early_stopping_ends_with_enough_hypotheses() -> None:
    """A score that grows with length keeps a search open unless early_stopping is set."""
    logs = torch.tensor([[0.5, 0.3, 0.1, 0.05, 0.05]]).log()
    after = torch.tensor([[0.3, 0.6, 0.05, 0.03, 0.02], [0.3, 0.6, 0.05, 0.03, 0.02]]).log()
    for early_stopping in (True, False):
        beam = Beam(2, length_penalty=4.0, early_stopping=early_stopping)
        state = beam_search.step(beam_search.start(beam, frozenset({0}), 9), logs).state
        state = beam_search.step(state, after).state
        assert len(state.finished) == 2
        assert state.is_over == early_stopping


def test_length_ends_every_beam() -> None:
    finished = search(7, Beam(3), 4)
    assert all(len(hypothesis.token_ids) == 4 for hypothesis in finished)
    scores = [hypothesis.score for hypothesis in finished]
    assert scores == sorted(scores, reverse=True)
    assert len({hypothesis.token_ids for hypothesis in finished}) == 3


def test_a_masked_token_is_never_in_a_hypothesis() -> None:
    state: BeamState = beam_search.start(Beam(2), frozenset({0}), 5)
    while not state.is_over:
        rows = torch.stack([row(3, path) for path in state.open_token_ids])
        rows[:, 5:] = -torch.inf
        state = beam_search.step(state, rows).state
    used = set(itertools.chain.from_iterable(h.token_ids for h in state.finished))
    assert used <= set(range(5))


def test_too_few_continuations_are_an_error_of_the_request() -> None:
    state = beam_search.start(Beam(2), frozenset({0}), 5)
    logprobs = torch.full((1, VOCAB), -torch.inf)
    logprobs[0, :2] = -0.7
    with pytest.raises(InvalidLogits, match="only 1"):
        beam_search.step(state, logprobs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_an_error(bad: float) -> None:
    logprobs = row(0, ())[None].clone()
    logprobs[0, 3] = bad
    state = beam_search.start(Beam(2), frozenset(), 5)
    with pytest.raises(InvalidLogits):
        beam_search.step(state, logprobs)
    with pytest.raises(InvalidLogits):
        beam_search.first_candidates(logprobs[0], 4)


@pytest.mark.parametrize(
    ("field", "beam", "num_samples", "num_ends"),
    [
        ("beam.num_beams", Beam(1), 1, 1),
        ("num_samples", Beam(2), 3, 1),
        ("beam.length_penalty", Beam(2, length_penalty=float("nan")), 1, 1),
        ("beam.length_penalty", Beam(2, length_penalty=6.0), 1, 1),
        ("beam.num_beams", Beam(9), 1, 0),
        ("beam.num_beams", Beam(4), 1, 4),
    ],
)
def test_what_cannot_be_searched_is_refused_by_name(
    field: str, beam: Beam, num_samples: int, num_ends: int
) -> None:
    with pytest.raises(InvalidRequest, match=field):
        beam_search.check_beam(beam, num_samples, VOCAB, num_ends)
    beam_search.check_beam(Beam(2), 2, VOCAB, 3)
