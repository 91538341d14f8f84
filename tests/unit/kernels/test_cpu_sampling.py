"""What CPU tensors are sampled and changed by, against the plain-torch references, which
tests/kernels compares with the kernels of CUDA."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels import gumbel_noise, logit_ops
from baton_kernels.sampling import (
    Needs,
    SamplingRows,
    distance_limits,
    draw_tokens,
    draw_tokens_reference,
)

Scale = Callable[[int], int]


def _rows(rng: random.Random, num_rows: int, num_tokens: int, dtype: torch.dtype) -> SamplingRows:
    def some(values: list[Any], kind: torch.dtype) -> torch.Tensor:
        return torch.tensor([rng.choice(values) for _ in range(num_rows)], dtype=kind)

    keys = gumbel_noise.seed_keys([rng.randrange(2**64) for _ in range(num_rows)], range(num_rows))
    return SamplingRows(
        temperature=some([0.0, 0.4, 1.0, 1.0, 7.0, 1e-6], torch.float32),
        seed_keys=torch.from_numpy(keys),
        positions=some([-1, 0, 5, 131_071], torch.int32),
        top_k=some([0, 0, 1, 30, num_tokens // 2, num_tokens, num_tokens + 9], torch.int32),
        top_p=some([1.0, 1.0, 1e-6, 0.5, 0.9, 0.9999], dtype),
        min_p=some([0.0, 0.0, 1e-14, 0.03, 1.0], dtype),
    )


@pytest.mark.parametrize("needs", ["greedy", "sampled", "truncated"])
def test_cpu_samples_what_the_reference_samples(needs: Needs, seed: int, scale: Scale) -> None:
    """Of every dtype; rows in error, rows that are none, and ties beside others."""
    rng = random.Random(f"{seed} {needs}")
    for number in range(scale(200)):
        generator = torch.Generator().manual_seed(seed % 2**62 + number)
        num_tokens = rng.choice([1, 40, 700, 1500])
        logits = torch.randn(12, num_tokens, generator=generator) * rng.choice([0.1, 3.0, 15.0])
        if number % 3 == 0:
            logits = logits.round()
        logits[rng.randrange(12)] = rng.choice([torch.inf, -torch.inf, torch.nan])
        logits = logits.to(rng.choice([torch.float32, torch.bfloat16, torch.float16]))
        rows = _rows(rng, 12, num_tokens, torch.float32)
        found = draw_tokens(logits, rows, needs=needs)
        expected = draw_tokens_reference(logits, rows, needs=needs)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert torch.equal(found.best_values.isnan(), expected.best_values.isnan())
        assert torch.equal(found.best_values.nan_to_num(), expected.best_values.nan_to_num())


def test_limits_are_what_is_sampled_by(seed: int) -> None:
    """Sampled without a truncation over what the limits leave: the same tokens."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed % 2**62)
    logits = torch.randn(30, 900, generator=generator) * 2
    rows = _rows(rng, 30, 900, torch.float64)
    rows = rows._replace(
        temperature=rows.temperature.clamp(min=0.4), positions=rows.positions.abs()
    )
    distances = (logits.amax(dim=1, keepdim=True) - logits) / rows.temperature[:, None]
    limits = distance_limits(distances, rows)
    left = logits.masked_fill(distances > limits[:, None], -torch.inf)
    found = draw_tokens(left, rows, needs="sampled").token_ids
    assert found.equal(draw_tokens(logits, rows).token_ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bitmask_on_cpu_is_the_references(dtype: torch.dtype, seed: int) -> None:
    """What is not allowed becomes -inf, an infinity, too; nothing else changes."""
    generator = torch.Generator().manual_seed(seed % 2**62)
    logits = torch.randn(5, 77, generator=generator).to(dtype)
    logits[2, ::5] = torch.inf
    words = torch.randint(-(2**31), 2**31, (5, 3), generator=generator).to(torch.int32)
    for rows in (None, torch.tensor([4, -1, 0, 2, -1], dtype=torch.int32)):
        found, expected = logits.clone(), logits.clone()
        logit_ops.apply_bitmask(found, words, rows)
        logit_ops.apply_bitmask(expected, words, rows, backend="reference")
        assert found.equal(expected) and not found.equal(logits)


def test_rows_that_lie_apart_are_changed_alone(seed: int) -> None:
    """Penalties and biases in rows of a wider matrix."""
    generator = torch.Generator().manual_seed(seed % 2**62)
    wide = torch.randn(4, 90, generator=generator)
    before, logits = wide.clone(), wide[:, :60]
    ids = torch.tensor([[0, 59, -1], [-1, -1, -1], [7, -1, 3], [59, 1, 2]], dtype=torch.int32)
    values = torch.full((4, 3), 2.0)
    logit_ops.add_bias(logits, ids, values)
    ones = torch.ones(4)
    logit_ops.penalise(logits, logit_ops.Penalties(ids, values, ones, ones * 0.5, ones * 0.25))
    expected = before.clone()
    for row, own in enumerate(ids.tolist()):
        for token_id in own:
            if token_id >= 0:
                expected[row, token_id] = expected[row, token_id] + 2.0 - 0.5 - 0.25 * 2.0
    assert wide.equal(expected)
