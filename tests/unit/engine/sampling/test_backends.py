"""The sampler gives the same by every version of the kernels: here on CPU tensors by the plain
reference, which tests/kernels compares with the kernels of CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from baton_kernels import noise
from baton_kernels import sampling as kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Sampling
from engine.sampling import logprobs, sampler
from engine.sampling.metadata import SamplerOutput, SamplingRequest
from engine.sampling.sampler import Sampler
from tests.conftest import LONG
from tests.unit.engine.sampling.reference import (
    VOCAB_SIZE,
    batch,
    make_draw,
    make_logits,
    rows_of_batches,
    sample,
)

EXAMPLES = 1000 if LONG else 50


def _plain(drawn: Sequence[SamplerOutput]) -> list[tuple[Any, ...]]:
    """Comparable: errors are equal if they say the same."""
    return [(one.token_id, one.logprobs, one.trace, repr(one.error)) for one in drawn]


def _by_reference(logits: torch.Tensor, requests: Sequence[SamplingRequest]) -> list[SamplerOutput]:
    return Sampler("reference").begin(logits, requests).result()


@settings(max_examples=EXAMPLES)
@given(rows=rows_of_batches, seed=st.integers(0, 2**31), is_half=st.booleans())
def test_any_batch_is_drawn_as_on_cpu(rows: list[Any], seed: int, is_half: bool) -> None:
    draws = batch(rows)
    dtype = torch.bfloat16 if is_half else torch.float32
    logits = make_logits(seed, len(draws), VOCAB_SIZE, dtype)
    before = logits.clone()
    found = _by_reference(logits, draws)
    assert _plain(found) == _plain(sample(logits, draws))
    assert logits.view(torch.uint8).equal(before.view(torch.uint8))


def test_large_batches_go_through_in_passes(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(24, 700, generator=generator) * 3
    fields: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "top_p": 0.9, "trace": True},
        {"temperature": 0.7, "repetition_penalty": 1.4, "top_k": 30, "trace": True},
        {"logprobs": 2, "trace": True},
    ]
    draws = [make_draw((3, 4), (5, row), seed=row, **fields[row % 4]) for row in range(24)]
    expected = _plain(sample(logits, draws))
    assert _plain(_by_reference(logits, draws)) == expected
    monkeypatch.setattr(logprobs, "_CPU_PASS", 2000)
    assert _plain(_by_reference(logits, draws)) == expected


def test_the_best_by_keys_are_the_best(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a device finds them: best first, and the lowest id first among equals."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.log_softmax(torch.randn(9, 50, generator=generator).round(), dim=-1)
    values[3, 7:40] = -torch.inf
    values[4] = 0.0
    values[4, ::2] = -0.0
    monkeypatch.setattr(logprobs, "_KEYS_PASS", 100)
    for count in (1, 7, 50):
        on_cpu, by_keys = logprobs.best_of(values, count), logprobs._best_by_keys(values, count)
        order = values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        assert on_cpu[1].tolist() == by_keys[1].tolist() == order.tolist()
        assert on_cpu[0].equal(by_keys[0])
    assert [one.shape for one in logprobs.best_of(values, 0)] == [(9, 0), (9, 0)]


def test_parameters_reach_the_device_as_they_are() -> None:
    draws = [
        SamplingRequest(
            Sampling(max_tokens=1, temperature=0.5, top_k=1 << 40, top_p=0.25, seed=2**64 - 1), 7
        ),
        SamplingRequest(
            Sampling(max_tokens=1, temperature=2.0, min_p=0.125, seed=3), 9, sample_index=5
        ),
        SamplingRequest(Sampling(max_tokens=1, temperature=2.0, top_k=3), 0),
    ]
    rows = sampler._parameters(draws, torch.empty(3, 100), "truncated", [False, False, True])
    assert rows.temperature.tolist() == [0.5, 2.0, 0.0]
    assert rows.top_k.tolist() == [100, 0, 3]
    assert rows.top_p.tolist() == [0.25, 1.0, 1.0]
    assert rows.min_p.tolist() == [0.0, 0.125, 0.0]
    assert rows.positions.tolist() == [7, 9, 0]
    keys = [noise.seed_key(2**64 - 1, 0), noise.seed_key(3, 5), noise.seed_key(0, 0)]
    assert rows.seed_keys.tolist() == keys
    assert all(each.is_contiguous() for each in rows)


def test_a_warm_up_samples_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the kernel's variants, from the model's logits and from a copy that was changed."""
    seen = []

    def draw_tokens(logits: torch.Tensor, rows: Any, *, needs: Any, **fields: Any) -> Any:
        seen.append((logits.dtype, needs))
        return kernels.draw_tokens(logits, rows, needs=needs, **fields)

    monkeypatch.setattr(sampler, "draw_tokens", draw_tokens)
    Sampler("reference")._warm_up_kernels(torch.randn(1, 77).to(torch.bfloat16))
    for needs in ("greedy", "sampled", "truncated"):
        assert (torch.float32, needs) in seen and (torch.bfloat16, needs) in seen


def test_no_rows_are_no_tokens() -> None:
    assert sample(torch.empty(0, 9), []) == []
