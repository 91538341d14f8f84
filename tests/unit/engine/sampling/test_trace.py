"""Log probabilities and traces say what happened, and a trace is enough to draw the token again."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from baton_kernels import gumbel_noise

from engine.sampling.sampler import NUM_TRACE_TOP
from tests.unit.engine.sampling.reference import make_draw, processed, sample

Scale = Callable[[int], int]


def test_logprobs_are_of_the_models_own_distribution_where_asked_for(seed: int) -> None:
    """Whatever the temperature and the filters; counts differ by row, and among equals the lowest
    id comes first."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(40, 200, generator=generator).round(decimals=1)
    counts = [None, *range(12)] * 3 + [3]
    fields = {"temperature": 9.0, "top_k": 5}
    draws = [make_draw(logprobs=count, seed=row, **fields) for row, count in enumerate(counts)]
    for row, (one, count) in enumerate(zip(sample(logits, draws), counts, strict=True)):
        assert one.trace is None and (one.logprobs is None) == (count is None)
        if one.logprobs is not None:
            logprobs = torch.log_softmax(logits[row], 0).tolist()
            order = sorted(range(200), key=lambda i: (-logprobs[i], i))[:count]
            assert one.logprobs.token_id == one.token_id
            assert one.logprobs.logprob == pytest.approx(logprobs[one.token_id])
            assert one.logprobs.top == tuple((i, logprobs[i]) for i in order)


def test_masks_and_penalties_do_not_reach_the_raw_logprobs() -> None:
    logits = torch.tensor([[5.0, 1.0, 0.0]])
    draw = make_draw((0,), (0,), bad_words=((0,),), repetition_penalty=3.0, logprobs=2, trace=True)
    (one,) = sample(logits, [draw])
    raw = torch.log_softmax(logits[0], 0)
    assert one.token_id == 1 and one.logprobs is not None and one.trace is not None
    assert one.logprobs.top[0] == (0, pytest.approx(float(raw[0])))
    assert one.logprobs.logprob == one.trace.raw_logprob == pytest.approx(float(raw[1]))
    left = torch.log_softmax(torch.tensor([1.0, 0.0]), 0)
    assert one.trace.processed_logprob == pytest.approx(float(left[0]))
    assert one.trace.support_size == 2


def test_a_trace_names_what_was_applied_in_order() -> None:
    every = make_draw(
        (1, 2),
        (3,),
        ends=(9,),
        bitmask=torch.full((2,), -1, dtype=torch.int32),
        temperature=0.7,
        top_p=0.9,
        top_k=50,
        min_p=0.05,
        min_tokens=4,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias=((4, 1.0), (5, 2.0)),
        bad_words=((6,), (7, 8)),
        allowed_token_ids=frozenset(range(40)),
        no_repeat_ngram=3,
        trace=True,
    )
    plain = make_draw((1, 2), (3,), temperature=1.0, trace=True)
    greedy = make_draw((1, 2), (3,), trace=True, top_k=5, top_p=0.5)
    names = []
    for one in sample(torch.randn(3, 60), [every, plain, greedy]):
        assert one.trace is not None
        names.append(one.trace.processors)
    assert names[0] == (
        "repetition_penalty=1.2",
        "presence_penalty=0.5",
        "frequency_penalty=-0.25",
        "logit_bias=2 tokens",
        "allowed_token_ids=40 tokens",
        "bad_words=2 words",
        "no_repeat_ngram=3",
        "grammar",
        "min_tokens=4",
        "temperature=0.7",
        "top_k=50",
        "top_p=0.9",
        "min_p=0.05",
    )
    assert names[1] == ()
    assert names[2] == ()  # the argmax needs no filter


FIELDS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 9},
    {"temperature": 2.0, "top_p": 0.7},
    {"temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.4},
    {"temperature": 3.0, "top_k": 20, "top_p": 0.8, "logit_bias": ((3, 4.0),)},
    {"temperature": 1.0, "allowed_token_ids": frozenset({3, 5, 9})},
    {},
    {"frequency_penalty": 2.0, "no_repeat_ngram": 2},
]


def test_a_trace_draws_its_token_again(seed: int, scale: Scale) -> None:
    """From processed logits, support size and key alone: argmax of logit + noise over the `n`
    best."""
    rng = random.Random(seed)
    for number in range(scale(400)):
        generator = torch.Generator().manual_seed(seed + number)
        logits = torch.randn(8, 100, generator=generator) * 3
        prompts = [[rng.randrange(100) for _ in range(6)] for _ in range(8)]
        outputs = [[rng.randrange(100) for _ in range(rng.randrange(6))] for _ in range(8)]
        draws = []
        for row, fields in enumerate(FIELDS):
            keys = {"seed": rng.randrange(2**64), "sample_index": row, "trace": True}
            draws.append(make_draw(prompts[row], outputs[row], **keys, **fields))
        for row, one in enumerate(sample(logits, draws)):
            trace, sampling = one.trace, draws[row].sampling
            assert trace is not None and trace.token_id == one.token_id
            assert trace.position == draws[row].position and len(trace.top) == NUM_TRACE_TOP
            left = processed(logits[row], draws[row], prompts[row], outputs[row])
            support = left.argsort(descending=True, stable=True)[: trace.support_size]
            scaled = left[support] / (sampling.temperature or 1.0)
            if trace.rng_key is None:
                assert sampling.temperature == 0.0
                again = int(support[0])
                assert trace.support_size == int(torch.isfinite(left).sum())
            else:
                key = gumbel_noise.row_key(sampling.seed, draws[row].sample_index, trace.position)
                assert trace.rng_key == key
                scaled_noise = gumbel_noise.gumbel(torch.tensor([key]), support)
                again = int(support[(scaled - scaled.max() + scaled_noise).argmax()])
            assert again == trace.token_id
            at = support.tolist().index(trace.token_id)
            exact = float(torch.log_softmax(scaled.double(), 0)[at])
            assert trace.processed_logprob == pytest.approx(exact, abs=1e-5)
            raw = float(torch.log_softmax(logits[row].double(), 0)[trace.token_id])
            assert trace.raw_logprob == pytest.approx(raw, abs=1e-5)


def test_a_trace_changes_no_token(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(8, 300, generator=generator) * 3
    token_ids = {}
    for is_traced in (False, True):
        draws = [make_draw((4, 5), (6,), seed=seed, trace=is_traced, **one) for one in FIELDS]
        token_ids[is_traced] = [one.token_id for one in sample(logits, draws)]
    assert token_ids[True] == token_ids[False]


def test_a_token_that_is_certain_has_probability_one() -> None:
    logits = torch.randn(1, 30)
    draw = make_draw(temperature=1.0, allowed_token_ids=frozenset({7}), trace=True)
    (one,) = sample(logits, [draw])
    assert one.trace is not None and one.token_id == 7
    assert one.trace.processed_logprob == 0.0 and one.trace.support_size == 1
    assert not math.isinf(one.trace.raw_logprob)
