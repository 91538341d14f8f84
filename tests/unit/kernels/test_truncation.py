"""Top-k, top-p, min-p: thresholds of whole batches against the definition, row by row, and against
transformers' warpers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels import sampling
from transformers.generation import logits_process as theirs

from engine.request import Sampling

Scale = Callable[[int], int]


def thresholds(scaled: torch.Tensor, params: list[Sampling], **fields: Any) -> torch.Tensor:
    """The least scaled logit that stays in."""
    columns = ([getattr(one, name) for one in params] for name in ("top_k", "top_p", "min_p"))
    return sampling._thresholds(scaled, *columns, **fields)


def _definition(scaled: list[float], one: Sampling) -> tuple[float, float]:
    """The threshold, as the lowest and the highest that rounding of a mass may make it."""
    ordered = sorted(scaled, reverse=True)
    least = -math.inf
    if 0 < one.top_k < len(scaled):
        least = ordered[one.top_k - 1]
    edges = [least, least]
    if one.top_p < 1.0:
        kept = [value for value in ordered if value >= least]
        weights = [math.exp(value) for value in kept]
        total = math.fsum(weights)
        for end, slack in enumerate((1e-6, -1e-6)):
            wanted, mass, edge = total * one.top_p * (1 + slack), 0.0, least
            for value, weight in zip(kept, weights, strict=True):
                mass += weight
                edge = value
                if mass >= wanted:
                    break
            edges[end] = max(least, edge)
    floor = float(torch.tensor(math.log(one.min_p))) if one.min_p else -math.inf
    return max(edges[0], floor), max(edges[1], floor)


def _params(rng: random.Random, num_tokens: int) -> Sampling:
    return Sampling(
        max_tokens=1,
        temperature=1.0,
        top_k=rng.choice([0, 0, 1, 5, 60, num_tokens // 2, num_tokens - 1, num_tokens, 10**6]),
        top_p=rng.choice([1.0, 1.0, 1e-9, 0.1, 0.5, 0.9, 0.99, rng.random() or 1.0]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.05, 1.0]),
    )


def _scaled(rng: random.Random, num_rows: int, num_tokens: int) -> torch.Tensor:
    """Spread, with ties, or with masked tokens; each row's maximum 0."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    logits = torch.randn(num_rows, num_tokens, generator=generator) * rng.choice([0.01, 1, 4, 20])
    kind = rng.randrange(3)
    if kind == 1:
        logits = logits.round()
    if kind == 2:
        mask = torch.rand(num_rows, num_tokens, generator=generator) < 0.5
        mask[:, rng.randrange(num_tokens)] = False
        logits = logits.masked_fill(mask, -torch.inf)
    return logits - logits.amax(dim=-1, keepdim=True)


@pytest.mark.parametrize("num_tokens", [2, 37, 1023, 1024, 1025, 2600])
def test_a_batch_has_every_rows_own_thresholds(num_tokens: int, seed: int, scale: Scale) -> None:
    """By the definition; and the same to the last bit as each row's alone."""
    rng = random.Random(f"{seed} {num_tokens}")
    for _ in range(scale(200)):
        num_rows = rng.randrange(1, 9)
        scaled = _scaled(rng, num_rows, num_tokens)
        params = [_params(rng, num_tokens) for _ in range(num_rows)]
        found = thresholds(scaled, params)
        for row, one in enumerate(params):
            low, high = _definition(scaled[row].tolist(), one)
            assert low <= float(found[row]) <= high, (one, low, high)
            assert torch.equal(thresholds(scaled[row : row + 1], [one]), found[row : row + 1])


def test_the_shortlist_and_the_full_sort_agree(seed: int, scale: Scale) -> None:
    """How much is sorted first is a matter of time only."""
    rng = random.Random(seed)
    for _ in range(scale(200)):
        scaled = _scaled(rng, 4, 300)
        params = [_params(rng, 300) for _ in range(4)]
        sizes = (1, 8, 64, 300, 1024)
        found = [thresholds(scaled, params, most_short=most_short) for most_short in sizes]
        assert all(torch.equal(one, found[0]) for one in found), params


def test_ties_that_fill_the_shortlist_are_counted() -> None:
    """Top-k leaves 21 tokens, of which 8 are looked at first: the mass is that of all 21."""
    scaled = torch.tensor([[0.0] + [-1.0] * 20 + [-2.0] * 9])
    one = Sampling(max_tokens=1, temperature=1.0, top_k=2, top_p=0.2)
    assert math.exp(-1) * 20 * 0.2 > 1  # so the best alone is not enough
    assert thresholds(scaled, [one], most_short=8).tolist() == [-1.0]


def test_a_mass_that_is_reached_exactly_is_enough() -> None:
    num_exact = 0
    for step in range(1, 60):
        scaled = torch.tensor([[0.0, -step / 16]])
        total = 1.0 + float(torch.exp(scaled[0, 1]))
        if total * (1 / total) == 1.0:
            num_exact += 1
            one = Sampling(max_tokens=1, temperature=1.0, top_p=1 / total)
            assert thresholds(scaled, [one]).tolist() == [0.0]
    assert num_exact > 10


@pytest.mark.parametrize(
    ("fields", "warper"),
    [
        ({"top_k": 7}, lambda: theirs.TopKLogitsWarper(7)),
        ({"top_k": 400}, lambda: theirs.TopKLogitsWarper(400)),
        ({"top_p": 0.3}, lambda: theirs.TopPLogitsWarper(0.3)),
        ({"top_p": 0.9}, lambda: theirs.TopPLogitsWarper(0.9)),
        ({"top_p": 0.999}, lambda: theirs.TopPLogitsWarper(0.999)),
        ({"min_p": 0.03}, lambda: theirs.MinPLogitsWarper(0.03)),
        ({"min_p": 0.9}, lambda: theirs.MinPLogitsWarper(0.9)),
    ],
)
def test_what_stays_is_what_transformers_keeps(
    fields: dict[str, Any], warper: Callable[[], Any], seed: int, scale: Scale
) -> None:
    """Without ties, of which transformers cuts some by the order of a sort. Its masses are summed
    in float32, so one token at the edge may differ where the mass comes within 1e-5 of it."""
    for number in range(scale(400)):
        generator = torch.Generator().manual_seed(seed + number)
        places = torch.randperm(500, generator=generator) + torch.rand(500, generator=generator) / 2
        scaled = torch.special.ndtri((places + 0.1) / 501)[None] * 3  # normal, no two equal
        scaled = scaled - scaled.amax()
        kept = torch.isfinite(warper()(torch.zeros(1, 0, dtype=torch.long), scaled.clone()))[0]
        floor = thresholds(scaled, [Sampling(max_tokens=1, temperature=1.0, **fields)])
        different = ((scaled[0] >= floor) != kept).nonzero()[:, 0].tolist()
        if "top_k" in fields:
            assert not different
            continue
        assert len(different) <= 1
        for token_id in different:
            above = scaled[0][scaled[0] > scaled[0, token_id]].double().exp().sum()
            mass = float(above / scaled[0].double().exp().sum())
            weight = math.exp(float(scaled[0, token_id]))
            if "top_p" in fields:
                assert abs(mass - fields["top_p"]) < 1e-5
            else:
                assert math.isclose(weight, fields["min_p"], rel_tol=1e-5)


def test_the_largest_values_are_those_of_a_sort(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(5, 400, generator=generator).round(decimals=1)
    values[0, :390] = -torch.inf
    in_order = values.sort(dim=-1, descending=True).values
    for count in (1, 2, 17, 399, 400):
        assert torch.equal(sampling._largest(values, count), in_order[:, :count])


def test_a_rows_sum_is_its_own_in_any_batch(seed: int) -> None:
    """torch's own sum is not: one row is summed in another order than several."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(9, 70_000, generator=generator)
    together = sampling._row_sums(values)
    assert torch.equal(torch.cat([sampling._row_sums(row[None]) for row in values]), together)
    assert together.tolist() == pytest.approx([math.fsum(row.tolist()) for row in values])
    assert sampling._row_sums(torch.ones(2, 5)).tolist() == [5.0, 5.0]
