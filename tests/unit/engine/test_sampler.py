"""The logits pipeline, against a slow reference that takes no short cut."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine import noise, sampler
from engine.errors import InvalidLogits
from engine.request import Sampling
from engine.sampler import Draw


def _draw(position: int = 5, **fields: Any) -> Draw:
    return Draw(Sampling(**({"max_tokens": 1} | fields)), position)


def _reference_support(logits: torch.Tensor, sampling: Sampling) -> set[int]:
    """Filters by sorting everything, in double precision."""
    scaled = logits.double() / sampling.temperature
    order = torch.sort(scaled, descending=True, stable=True).indices.tolist()
    kept = order
    if sampling.top_k:
        kept = kept[: sampling.top_k]
    if sampling.top_p < 1.0:
        mass = torch.softmax(scaled[kept], dim=0)
        count = int((mass.cumsum(0) < sampling.top_p).sum()) + 1
        kept = kept[:count]
    if sampling.min_p:
        best = float(scaled[order[0]])
        kept = [i for i in kept if math.exp(float(scaled[i]) - best) >= sampling.min_p]
    return set(kept)


def _reference_token(logits: torch.Tensor, draw: Draw) -> int:
    """argmax over the whole support, noise for every token."""
    one = draw.sampling
    keys = torch.tensor([noise.row_key(one.seed, one.sample_index, draw.position)])
    scores = (logits.float() - logits.float().max()) / one.temperature
    scores = scores + noise.gumbel(keys, torch.arange(logits.shape[0]))
    support = _reference_support(logits, one)
    return max(sorted(support), key=lambda token_id: float(scores[token_id]))


FILTERS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"temperature": 1e-6},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 7},
    {"temperature": 2.0, "top_k": 5000},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 3.0, "top_p": 0.999},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("fields", FILTERS)
@pytest.mark.parametrize("spread", [0.01, 3.0, 30.0])
def test_a_draw_is_the_argmax_over_the_whole_support(
    fields: dict[str, Any], spread: float, seed: int
) -> None:
    """Pruning by the bound on the noise must never change a result."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, 3000, generator=generator) * spread
    draws = [_draw(seed=seed + row, position=row, **fields) for row in range(40)]
    drawn = sampler.draw(logits, draws)
    for row, one in enumerate(drawn):
        assert one.error is None
        assert one.token_id == _reference_token(logits[row], draws[row])


def test_draws_follow_the_softmax(seed: int) -> None:
    """Chi-square of 20,000 draws over 8 tokens, 7 degrees of freedom: above 40 with probability
    1.3e-6."""
    logits = torch.tensor([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5])
    count = 20_000
    draws = [_draw(seed=seed, position=i, temperature=1.5) for i in range(count)]
    drawn = sampler.draw(logits.expand(count, -1), draws)
    observed = torch.bincount(torch.tensor([d.token_id for d in drawn]), minlength=8).double()
    expected = torch.softmax(logits / 1.5, 0).double() * count
    assert float(((observed - expected) ** 2 / expected).sum()) < 40


def test_a_row_does_not_depend_on_its_batch(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, 500, generator=generator) * 4
    draws = [_draw(seed=seed, temperature=t, top_p=0.9) for t in (0.0, 0.5, 1.0, 0.0, 2.0, 9.0)]
    together = [d.token_id for d in sampler.draw(logits, draws)]
    alone = [
        sampler.draw(logits[row : row + 1], [one])[0].token_id for row, one in enumerate(draws)
    ]
    assert together == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_greedy_takes_the_lowest_id_among_equals(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 300, dtype=dtype)
    logits[0, [37, 200, 290]] = 2.0
    assert sampler.draw(logits, [_draw()])[0].token_id == 37


def test_ties_at_the_edge_of_a_filter_stay_in(seed: int) -> None:
    """A filter must not depend on how a sort orders equal logits."""
    logits = torch.tensor([[1.0, 1.0, 1.0, 1.0, -9.0]])
    for fields in ({"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}):
        draws = [_draw(seed=seed, position=i, temperature=1.0, **fields) for i in range(300)]
        seen = {d.token_id for d in sampler.draw(logits.expand(300, -1), draws)}
        assert seen == {0, 1, 2, 3}, fields  # one of four missing: 4 * 0.75^300 = 1e-37


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_fail_their_row_only(bad: float, temperature: float) -> None:
    logits = torch.randn(3, 50)
    logits[1, 20] = bad
    drawn = sampler.draw(logits, [_draw(temperature=temperature)] * 3)
    assert isinstance(drawn[1].error, InvalidLogits)
    assert drawn[0].error is None and drawn[2].error is None


def test_an_empty_support_is_an_error() -> None:
    drawn = sampler.draw(torch.full((1, 9), -math.inf), [_draw(temperature=1.0)])
    assert isinstance(drawn[0].error, InvalidLogits)


def test_masked_tokens_are_never_drawn(seed: int) -> None:
    logits = torch.full((200, 30), -math.inf)
    logits[:, 4] = -3.0
    draws = [_draw(seed=seed, position=i, temperature=9.0) for i in range(200)]
    assert {d.token_id for d in sampler.draw(logits, draws)} == {4}


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0]])
    (one,) = sampler.draw(logits, [_draw(temperature=9.0, top_k=1, logprobs=3)])
    expected = torch.log_softmax(logits[0], 0)
    assert one.logprobs is not None
    assert one.logprobs.token_id == one.token_id
    assert one.logprobs.logprob == pytest.approx(float(expected[one.token_id]))
    assert [token_id for token_id, _ in one.logprobs.top] == [1, 3, 2]
    assert [value for _, value in one.logprobs.top] == pytest.approx(expected[[1, 3, 2]].tolist())


def test_logprobs_only_where_asked_for() -> None:
    drawn = sampler.draw(torch.randn(2, 9), [_draw(logprobs=0), _draw()])
    assert drawn[0].logprobs is not None and drawn[0].logprobs.top == ()
    assert drawn[1].logprobs is None
