"""check_sampling: every field's range by name; and whatever it lets through can be drawn with."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import EmptySupport, InvalidRequest
from engine.input_processor import MAX_BAD_WORD_TOKENS, MAX_NGRAM_SIZE, check_sampling
from engine.request import MAX_LOGPROBS, Sampling
from tests.conftest import LONG
from tests.unit.engine.sampling.reference import make_draw, sample

NAN, INF = math.nan, math.inf

WRONG: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (0, -1)),
    *(("temperature", value) for value in (-1.0, NAN, INF, -INF, 1e-5, 1e7)),
    *(("top_p", value) for value in (0.0, -0.1, 1.0001, NAN, INF)),
    ("top_k", -1),
    ("top_k", 1 << 31),
    *(("min_p", value) for value in (-0.1, 1.1, NAN, INF)),
    *(("min_tokens", value) for value in (-1, 101)),
    *(("seed", value) for value in (-1, 1 << 64)),
    *(("sample_index", value) for value in (-1, 1 << 31)),
    *(("logprobs", value) for value in (-1, MAX_LOGPROBS + 1)),
    *(("repetition_penalty", value) for value in (0.0, -1.0, NAN, INF, 1e-7, 1e7)),
    *(("presence_penalty", value) for value in (NAN, INF, -INF, 2e9, -2e9)),
    *(("frequency_penalty", value) for value in (NAN, INF, -INF, 2e9, -2e9)),
    *(("stop_token_ids", frozenset({value})) for value in (-1, 50)),
    *(("logit_bias", ((3, value),)) for value in (NAN, INF, -INF, 2e9, -2e9)),
    *(("logit_bias", ((value, 1.0),)) for value in (-1, 50)),
    ("logit_bias", ((3, 1.0), (4, 1.0), (3, 1.0))),
    *(("bad_words", ((1,), value)) for value in ((), (50,), (1, -1), (1, 2, 50))),
    ("bad_words", ((1,) * (MAX_BAD_WORD_TOKENS + 1),)),
    *(("allowed_token_ids", frozenset(value)) for value in ((), (50,), (-1, 3))),
    *(("no_repeat_ngram", value) for value in (-1, MAX_NGRAM_SIZE + 1)),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_what_is_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    sampling = Sampling(**({"max_tokens": 100} | {field: value}))
    with pytest.raises(InvalidRequest) as caught:
        check_sampling(sampling, 50)
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{field}: ")


RIGHT: list[dict[str, Any]] = [
    {},
    {"temperature": 1e-4, "top_p": 1e-300, "min_p": 1.0, "top_k": 10**9},
    {"min_tokens": 100, "seed": (1 << 64) - 1, "logprobs": MAX_LOGPROBS},
    {"logprobs": 0, "repetition_penalty": 1e-6, "presence_penalty": -1e9},
    {"repetition_penalty": 1e6, "frequency_penalty": 1e9, "stop_token_ids": frozenset({0, 49})},
    {"logit_bias": ((0, -1e9), (49, 1e9)), "bad_words": ((49,), (0, 0, 49))},
    {"allowed_token_ids": frozenset({0, 49}), "no_repeat_ngram": MAX_NGRAM_SIZE},
]


@pytest.mark.parametrize("fields", RIGHT)
def test_the_edges_of_the_ranges_are_in(fields: dict[str, Any]) -> None:
    check_sampling(Sampling(**({"max_tokens": 100} | fields)), 50)


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 2) | st.just(1.0)
ids = st.integers(0, 49) | st.integers(-2, 60)
junk = st.fixed_dictionaries(
    {"max_tokens": st.integers(-1, 50) | st.just(9)},
    optional={
        "temperature": numbers,
        "top_p": numbers,
        "top_k": st.integers(-1, 60),
        "min_p": numbers,
        "min_tokens": st.integers(-1, 10),
        "seed": st.integers(-1, 2**64),
        "sample_index": st.integers(-1, 3),
        "stop_token_ids": st.frozensets(ids, max_size=2),
        "logprobs": st.none() | st.integers(-1, MAX_LOGPROBS + 1),
        "repetition_penalty": numbers,
        "presence_penalty": numbers,
        "frequency_penalty": numbers,
        "logit_bias": st.lists(st.tuples(ids, numbers), max_size=3).map(tuple),
        "bad_words": st.lists(st.lists(ids, max_size=3).map(tuple), max_size=3).map(tuple),
        "allowed_token_ids": st.none() | st.frozensets(ids, max_size=5),
        "no_repeat_ngram": st.integers(-1, 5),
        "trace": st.booleans(),
    },
)


@settings(max_examples=4000 if LONG else 200)
@given(fields=junk, logits_seed=st.integers(0, 1000))
def test_what_is_let_through_can_be_drawn_with(fields: dict[str, Any], logits_seed: int) -> None:
    """Any combination is refused by name, or gives a token, or empties its own support; and the
    row beside it is drawn as if it were alone."""
    sampling = Sampling(**fields)
    try:
        check_sampling(sampling, 50)
    except InvalidRequest as error:
        assert error.field in fields
        return
    generator = torch.Generator().manual_seed(logits_seed)
    logits = torch.randn(2, 50, generator=generator) * 10
    one = make_draw((1, 2, 1), (3, 3), ends=sorted(sampling.stop_token_ids), **fields)
    calm = make_draw((1,), (), temperature=1.0, top_p=0.9, repetition_penalty=1.2)
    drawn = sample(logits, [one, calm])
    assert drawn[1] == sample(logits[1:], [calm])[0]
    if drawn[0].error is not None:
        assert isinstance(drawn[0].error, EmptySupport)
        return
    assert 0 <= drawn[0].token_id < 50
    if drawn[0].trace is not None:
        assert drawn[0].trace.support_size >= 1
        assert not math.isnan(drawn[0].trace.processed_logprob)
