"""What is drawn, over many draws: truncated distributions, and that draws at different places are
independent.

False alarms: every test here compares a chi-square statistic with a limit that it exceeds with
probability 1e-6 if all is well; there are 11 such comparisons in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from engine.request import Sampling
from engine.sampling.metadata import SamplingRequest
from tests.unit.engine.sampling.reference import sample

Scale = Callable[[int], int]

Z_ONE_IN_A_MILLION = 4.7534
"""Standard normal: exceeded with probability 1e-6."""


def _limit(num_free: int) -> float:
    """What chi-square of so many degrees of freedom exceeds once in a million, by Wilson and
    Hilferty (1931); up to 4 % too high at the 7 degrees that are the fewest here."""
    spread = 2 / (9 * num_free)
    return float(num_free * (1 - spread + Z_ONE_IN_A_MILLION * math.sqrt(spread)) ** 3)


def _chi_square(observed: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((observed.double() - expected.double()) ** 2 / expected.double()).sum())


def _tokens(logits: torch.Tensor, draws: Iterable[SamplingRequest]) -> torch.Tensor:
    """Every draw from the same [V] logits."""
    draws = list(draws)
    drawn = sample(logits.expand(len(draws), -1), draws)
    assert all(one.error is None for one in drawn)
    return torch.tensor([one.token_id for one in drawn])


def _at(position: int, sampling: Sampling, sample_index: int = 0) -> SamplingRequest:
    return SamplingRequest(sampling, position, sample_index)


LOGITS = torch.tensor([2.0, 1.7, 1.4, 1.1, 0.8, 0.5, 0.2, -0.1, -0.4, -0.7, -1.0, -1.3, -1.6, -1.9])


@pytest.mark.parametrize(
    ("fields", "num_kept"),
    [
        ({}, 14),
        ({"top_k": 9}, 9),
        ({"top_p": 0.93}, 9),
        ({"min_p": 0.09}, 9),
        ({"top_k": 12, "top_p": 0.95, "min_p": 0.08}, 9),
    ],
)
def test_truncated_draws_follow_the_renormalised_softmax(
    fields: dict[str, Any], num_kept: int, seed: int, scale: Scale
) -> None:
    count = scale(200_000)
    sampling = Sampling(max_tokens=1, temperature=1.0, seed=seed, **fields)
    tokens = _tokens(LOGITS, (_at(position, sampling) for position in range(count)))
    assert int(tokens.max()) < num_kept
    observed = torch.bincount(tokens, minlength=num_kept)
    expected = torch.softmax(LOGITS[:num_kept].double(), 0) * count
    assert _chi_square(observed, expected) < _limit(num_kept - 1)


def test_penalised_draws_follow_the_penalised_softmax(seed: int, scale: Scale) -> None:
    """Temperature comes after a bias."""
    count = scale(200_000)
    bias = torch.zeros(14)
    bias[3], bias[8] = 2.0, -1.0
    sampling = Sampling(max_tokens=1, temperature=1.7, seed=seed, logit_bias=((3, 2.0), (8, -1.0)))
    tokens = _tokens(LOGITS, (_at(position, sampling) for position in range(count)))
    expected = torch.softmax((LOGITS + bias).double() / 1.7, 0) * count
    assert _chi_square(torch.bincount(tokens, minlength=14), expected) < _limit(13)


UNIFORM = torch.zeros(8)


def _pairs(
    seed: int, count: int
) -> dict[str, tuple[Iterable[SamplingRequest], Iterable[SamplingRequest]]]:
    """Two draws each that differ in one part of the noise's key, and only slightly."""
    plain = Sampling(max_tokens=1, temperature=1.0, seed=seed)

    def seeded(offset: int) -> list[SamplingRequest]:
        return [
            _at(9, Sampling(max_tokens=1, temperature=1.0, seed=(seed + 2 * i + offset)))
            for i in range(count)
        ]

    return {
        "positions": (
            [_at(2 * i, plain) for i in range(count)],
            [_at(2 * i + 1, plain) for i in range(count)],
        ),
        "sample indices": (
            [_at(9, plain, 2 * i) for i in range(count)],
            [_at(9, plain, 2 * i + 1) for i in range(count)],
        ),
        "seeds": (seeded(0), seeded(1)),
        "position and sample index": (
            [_at(i, plain, i + 1) for i in range(count)],
            [_at(i + 1, plain, i) for i in range(count)],
        ),
    }


@pytest.mark.parametrize(
    "between", ["positions", "sample indices", "seeds", "position and sample index"]
)
def test_draws_at_neighbouring_places_are_uniform_and_independent(
    between: str, seed: int, scale: Scale
) -> None:
    """The table of both draws is flat: 63 degrees of freedom, for uniformity and independence
    together."""
    count = scale(100_000)
    left, right = _pairs(seed, count)[between]
    table = _tokens(UNIFORM, left) * 8 + _tokens(UNIFORM, right)
    observed = torch.bincount(table, minlength=64)
    assert _chi_square(observed, torch.full((64,), count / 64)) < _limit(63)


def test_the_statistic_finds_what_it_is_for(seed: int, scale: Scale) -> None:
    """At 200,000 draws a token that comes a tenth too often is seen (in a short run: one that comes
    so much more often that it stands out as far), and one draw in four that repeats its
    neighbour."""
    count = scale(200_000)
    sampling = Sampling(max_tokens=1, temperature=1.0, seed=seed)
    skewed = UNIFORM.clone()
    skewed[2] = math.log(1 + 0.1 * math.sqrt(200_000 / count))
    tokens = _tokens(skewed, (_at(position, sampling) for position in range(count)))
    flat = torch.full((8,), count / 8)
    assert _chi_square(torch.bincount(tokens, minlength=8), flat) > _limit(7)
    first = _tokens(UNIFORM, (_at(2 * i, sampling) for i in range(count // 2)))
    second = _tokens(UNIFORM, (_at(2 * i + 1, sampling) for i in range(count // 2)))
    second[::4] = first[::4]
    observed = torch.bincount(first * 8 + second, minlength=64)
    assert _chi_square(observed, torch.full((64,), count / 128)) > _limit(63)


def test_two_seeds_agree_no_more_often_than_chance(seed: int, scale: Scale) -> None:
    """One long sequence each: agreements are binomial with p = 1/8; at most 4.8914 standard
    deviations off, which happens with probability 1e-6, both sides together."""
    count = scale(200_000)
    sequences = [
        _tokens(UNIFORM, (_at(i, Sampling(1, temperature=1.0, seed=one)) for i in range(count)))
        for one in (seed, seed + 1)
    ]
    agreed = int((sequences[0] == sequences[1]).sum())
    deviation = math.sqrt(count * 7 / 64)
    assert abs(agreed - count / 8) < 4.8914 * deviation
