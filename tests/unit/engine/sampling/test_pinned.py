"""Sampled outputs as they were recorded: edges of top-k, top-p and min-p, what changes logits
together with log probabilities and traces, and rows in error. Recorded requests must replay."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from baton_kernels import gumbel_noise

from engine.request import Sampling
from engine.sampling.metadata import SamplingRequest
from tests.unit.engine.sampling.reference import bitmask_of, make_draw, sample

NUM_TOKENS = 3000
NUM_ROWS = 6
PROMPT, OUTPUT = tuple(range(5, 400, 7)), (5, 12, 12, 900, 17, 5, 12, 12)
GRAMMAR = bitmask_of(frozenset(range(0, NUM_TOKENS, 3)), NUM_TOKENS)
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.7,
}
KINDS: dict[str, dict[str, Any]] = {
    "half of the mass": {"top_p": 0.5},
    "next to no mass": {"top_p": 1e-9},
    "next to all of the mass": {"top_p": 0.999999},
    "top-k in a tie": {"top_k": 3},
    "top-p of a tie": {"top_k": 700, "top_p": 0.3},
    "as probable as the best": {"min_p": 1.0},
    "hardly a min-p": {"min_p": 1e-14},
    "all three": {"top_k": 1500, "top_p": 0.97, "min_p": 0.001, "temperature": 1.7},
    "hardly warm": {"temperature": 1e-6, "top_p": 0.9},
    "hot": {"temperature": 100.0, "min_p": 0.9},
    "penalties": {**PENALTIES, "logprobs": 4},
    "penalties, greedy": {**PENALTIES, "temperature": 0.0, "logprobs": 2},
    "bias and a nucleus": {"logit_bias": ((7, 9.0), (2999, 8.5)), "top_p": 0.9, "logprobs": 1},
    "allowed ids": {"allowed_token_ids": frozenset(range(10, 60)), "logprobs": 0},
    "words and n-grams": {"bad_words": ((12, 12), (900,)), "no_repeat_ngram": 2, "logprobs": 3},
    "grammar": {"bitmask": GRAMMAR, "top_p": 0.8, "logprobs": 2},
    "least tokens": {"min_tokens": 20, "ends": range(0, NUM_TOKENS, 2), "temperature": 0.0},
}


def _logits(is_flat: bool) -> torch.Tensor:
    """[NUM_ROWS, NUM_TOKENS] float32 with many ties."""
    words = gumbel_noise.words(torch.arange(NUM_ROWS)[:, None], torch.arange(NUM_TOKENS)[None])
    if is_flat:
        return (gumbel_noise.uniform(words) * 4.0).round()
    return (-(gumbel_noise.uniform(words).double().log()) * 0.8).float().round(decimals=2)


RECORDED = json.loads(Path(__file__).with_name("pinned.json").read_text())
"""By kind (with " of flat logits"): token id and size of the support, row by row; and the tests'
own names."""


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_sampled_never_changes(kind: str, is_flat: bool) -> None:
    fields = {"temperature": 1.0, "trace": True} | KINDS[kind]
    draws = [make_draw(PROMPT, OUTPUT, seed=row + 11, **fields) for row in range(NUM_ROWS)]
    found = []
    for one in sample(_logits(is_flat), draws):
        assert one.trace is not None and one.error is None
        found.append([one.token_id, one.trace.support_size])
    assert found == RECORDED[kind + " of flat logits" * is_flat]


def test_log_probabilities_never_change() -> None:
    """Of a sampled row with penalties, to four decimals: exponentials differ between machines."""
    draws = [
        make_draw(PROMPT, OUTPUT, seed=row, temperature=0.8, trace=True, logprobs=3, **PENALTIES)
        for row in range(NUM_ROWS)
    ]
    found = sample(_logits(is_flat=False), draws)
    assert [one.token_id for one in found] == RECORDED["log probabilities"]["token_ids"]
    for one, wanted in zip(found, RECORDED["log probabilities"]["numbers"], strict=True):
        assert one.logprobs is not None and one.trace is not None
        numbers = [one.logprobs.logprob, one.trace.processed_logprob]
        numbers += [number for pair in one.logprobs.top for number in pair]
        assert np.round(numbers, 4).tolist() == pytest.approx(wanted, abs=2e-4)


def test_errors_never_change() -> None:
    """A row's own, named by what emptied it; the rows beside it sample what they sample alone."""
    logits = _logits(is_flat=False)
    logits[0, 17] = math.nan
    logits[1, 17] = math.inf
    logits[2] = -math.inf
    logits[4, 12] = 3e38
    nothing = {"allowed_token_ids": frozenset({900}), "bad_words": ((900,),)}
    loud = {"repetition_penalty": 1e-6, "trace": True}
    kinds: list[dict[str, Any]] = [{}, {"logprobs": 2}, PENALTIES, nothing, loud, {"trace": True}]
    draws = [make_draw(PROMPT, OUTPUT, temperature=1.0, seed=4, **each) for each in kinds]
    found = sample(logits, draws)
    assert [[one.token_id, repr(one.error)] for one in found] == RECORDED["errors"]
    assert all(one.logprobs is None and one.trace is None for one in found[:5])


FIRST: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.2},
    {"temperature": 3.0, "top_k": 20},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 2.0, "min_p": 0.05},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.7, "top_p": 0.999, "seed": 2**64 - 1, "sample_index": 3},
]
DRAWN = {
    0: [1822, 829, 1162, 1597, 258, 1845, 1871, 489],
    1: [1822, 303, 920, 1614, 432, 1199, 372, 539],
    600: [1822, 1187, 838, 1688, 256, 838, 684, 575],
    131071: [1822, 922, 1993, 423, 599, 374, 1908, 1014],
}
"""By position: of each of FIRST. In bfloat16 there are ties: the first and one other differ."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draws_without_processors_never_change(dtype: torch.dtype) -> None:
    """By the first version of the sampler, before there were processors."""
    words = gumbel_noise.words(torch.arange(8)[:, None], torch.arange(2000)[None])
    logits = (gumbel_noise.uniform(words) * 12.0).round(decimals=3).to(dtype)
    for position, expected in DRAWN.items():
        if dtype is torch.bfloat16:
            expected = [490, *expected[1:]]
            expected[6] = 535 if position == 0 else expected[6]
        draws = [
            SamplingRequest(
                Sampling(**({"max_tokens": 1, "seed": 77} | fields)),
                position,
                sample_index=fields.get("sample_index", 0),
            )
            for fields in FIRST
        ]
        assert [one.token_id for one in sample(logits, draws)] == expected
