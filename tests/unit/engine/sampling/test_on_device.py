"""The pipeline's way for a device gives what its way on CPU gives: run here on CPU tensors, where
the kernels' plain-torch references stand in for the kernels (tests/kernels compares those)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from baton_kernels import noise
from baton_kernels import sampling as kernels
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EmptySupport, InvalidLogits
from engine.request import Sampling
from engine.sampling import dense, on_device, pipeline
from engine.sampling.on_device import (
    draw_on_device,
    penalise,
    sampling_rows,
    warm_up_device,
)
from engine.sampling.penalties import penalise as penalise_on_cpu
from engine.sampling.pipeline import Draw, Drawn
from engine.sampling.recipe import Row, recipe_of
from tests.conftest import LONG
from tests.unit.engine.sampling.reference import (
    VOCAB_SIZE,
    batch,
    make_draw,
    make_logits,
    rows_of_batches,
)

EXAMPLES = 1000 if LONG else 50


def _plain(drawn: Sequence[Drawn]) -> list[tuple[Any, ...]]:
    """Comparable: errors are equal if they say the same."""
    return [(one.token_id, one.logprobs, one.trace, repr(one.error)) for one in drawn]


@settings(max_examples=EXAMPLES)
@given(rows=rows_of_batches, seed=st.integers(0, 2**31), is_half=st.booleans())
def test_any_batch_is_drawn_as_on_cpu(rows: list[Any], seed: int, is_half: bool) -> None:
    draws = batch(rows)
    dtype = torch.bfloat16 if is_half else torch.float32
    logits = make_logits(seed, len(draws), VOCAB_SIZE, dtype)
    before = logits.clone()
    found = draw_on_device(logits, draws)
    assert _plain(found) == _plain(pipeline.draw(logits, draws))
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
    expected = _plain(pipeline.draw(logits, draws))
    assert _plain(draw_on_device(logits, draws)) == expected
    monkeypatch.setattr(dense, "_CPU_PASS", 2000)
    assert _plain(draw_on_device(logits, draws)) == expected


def test_a_row_s_error_is_its_own() -> None:
    logits = torch.zeros(5, 9)
    logits[0, 3] = math.nan
    logits[1] = -math.inf
    logits[2, 4] = math.inf
    nothing = {"allowed_token_ids": frozenset({2}), "bad_words": ((2,),), "trace": True}
    draws = [Draw(Sampling(max_tokens=1, temperature=1.0), 5)] * 3
    draws += [make_draw(temperature=1.0, **nothing), make_draw(temperature=1.0, seed=4)]
    found = draw_on_device(logits, draws)
    assert [type(one.error) for one in found[:3]] == [InvalidLogits] * 3
    assert isinstance(found[3].error, EmptySupport) and found[3].token_id == -1
    assert found[4].error is None
    assert _plain(found) == _plain(pipeline.draw(logits, draws))


def test_penalties_are_those_of_the_cpu_to_the_last_bit(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, 60, generator=generator) * 5
    fields: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3},
        {},
        {"frequency_penalty": 0.7, "logit_bias": ((3, 1.5), (59, -2.0))},
        {"repetition_penalty": 0.6},
    ]
    rows = []
    for place, each in enumerate(fields):
        draw = make_draw(range(0, 50, place + 2), [7, 7, 9, place + 20], **each)
        rows.append(Row(place, draw, recipe_of(draw.sampling), True))
    expected, found = logits.clone(), logits.clone()
    penalise_on_cpu(expected, rows)
    penalise(found, rows)
    assert found.equal(expected) and not found.equal(logits)


def test_parameters_reach_the_device_as_they_are() -> None:
    draws = [
        Draw(Sampling(max_tokens=1, temperature=0.5, top_k=1 << 40, top_p=0.25, seed=2**64 - 1), 7),
        Draw(Sampling(max_tokens=1, temperature=2.0, min_p=0.125, seed=3), 9, sample_index=5),
        Draw(Sampling(max_tokens=1, temperature=2.0, top_k=3), 0),
    ]
    rows = sampling_rows(draws, 100, torch.device("cpu"), [False, False, True])
    assert rows.temperature.tolist() == [0.5, 2.0, 0.0]
    assert rows.top_k.tolist() == [100, 0, 3]
    assert rows.top_p.tolist() == [0.25, 1.0, 1.0]
    assert rows.min_p.tolist() == [0.0, 0.125, 0.0]
    assert rows.positions.tolist() == [7, 9, 0]
    keys = [noise.seed_key(2**64 - 1, 0), noise.seed_key(3, 5), noise.seed_key(0, 0)]
    assert rows.seed_keys.tolist() == keys
    assert all(each.is_contiguous() for each in rows)


def test_a_warm_up_draws_in_every_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the kernel's variants, from the model's logits and from a copy that was changed."""
    seen = []

    def draw_tokens(logits: torch.Tensor, rows: Any, *, needs: str, out: Any) -> None:
        seen.append((logits.dtype, needs))
        kernels.draw_tokens(logits, rows, needs=needs, out=out)

    monkeypatch.setattr(on_device, "draw_tokens", draw_tokens)
    warm_up_device(torch.randn(1, 77).to(torch.bfloat16))
    for needs in ("greedy", "sampled", "truncated"):
        assert (torch.float32, needs) in seen and (torch.bfloat16, needs) in seen


def test_no_rows_is_no_draw() -> None:
    assert draw_on_device(torch.empty(0, 9), []) == []
