"""Draws that are begun and waited for later are those of one call, of whichever rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Sampling
from engine.sampling import pipeline
from engine.sampling.copies import Fetched, bring
from engine.sampling.on_device import begin_on_device
from tests.conftest import LONG
from tests.unit.engine.cuda_waits import refused_waits
from tests.unit.engine.sampling.reference import (
    VOCAB_SIZE,
    batch,
    make_draw,
    make_logits,
    rows_of_batches,
)


@settings(max_examples=300 if LONG else 8)
@given(rows=rows_of_batches, seed=st.integers(0, 2**31), shift=st.integers(0, 40))
def test_of_any_rows(rows: list[Any], seed: int, shift: int) -> None:
    draws = batch(rows)
    logits = make_logits(seed, len(draws) + 2, VOCAB_SIZE, torch.float32)
    places = [(at * 7 + shift) % len(logits) for at in range(len(draws))]  # some twice
    expected = repr(pipeline.draw(logits[places], draws))
    assert repr(pipeline.begin(logits, draws, places)()) == expected
    assert repr(begin_on_device(logits[places], draws)()) == expected
    first = logits[: len(draws)]
    assert repr(pipeline.begin(first, draws)()) == repr(pipeline.draw(first, draws))


def test_small_arrays_come_and_go_as_they_are() -> None:
    words = np.arange(-3, 9, dtype=np.int32).reshape(3, 4)
    brought = bring(words, torch.device("cpu"))
    assert brought.tolist() == words.tolist() and brought.dtype == torch.int32
    assert Fetched(brought).wait().tolist() == words.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_not_waited_for(seed: int) -> None:
    """torch itself looks out for calls that wait; rows that change no logit, greedy and sampled."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(40, 5000, generator=generator) * 3).to(torch.bfloat16).cuda()
    fields: list[dict[str, Any]] = [{}, {"temperature": 0.8}, {"temperature": 1.0, "top_p": 0.9}]
    draws = [make_draw((3, 4), (5, row), seed=row, **fields[row % 3]) for row in range(30)]
    rows = [row + 5 for row in range(30)]
    expected = [one.token_id for one in pipeline.begin(logits, draws, rows)()]
    torch.cuda.synchronize()
    with refused_waits():
        with pytest.raises(RuntimeError):
            logits.cpu()  # it does look
        result = pipeline.begin(logits, draws, rows)
    assert [one.token_id for one in result()] == expected
    on_cpu = pipeline.draw(logits[rows].cpu(), draws)
    assert [one.token_id for one in on_cpu] == expected


def test_tokens_that_are_left_for_the_next_step(seed: int) -> None:
    """Of draws that change no logit; what is told does not ask the logits again."""
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    logits = torch.randn(6, VOCAB_SIZE, generator=generator)
    draws = [
        pipeline.Draw(Sampling(max_tokens=9, temperature=0.7 * (at % 2), seed=at), 5 + at)
        for at in range(6)
    ]
    expected = [one.token_id for one in pipeline.draw(logits, draws)]
    for begin in (pipeline.begin, begin_on_device):
        own, into = logits.clone(), torch.zeros(6, dtype=torch.int32)
        finish = begin(own, draws, into=into)
        assert into.tolist() == expected
        own.fill_(torch.nan)
        assert [one.token_id for one in finish()] == expected
