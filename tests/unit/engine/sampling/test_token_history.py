"""TokenHistory: kept up token by token it is what the whole sequence says, however it was cut."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Sampling
from engine.sampling.token_history import TokenHistory, needs_history
from tests.conftest import LONG
from tests.unit.engine.sampling.reference import banned

Scale = Callable[[int], int]
ALL: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "bad_words": ((1,), (1, 2), (1, 2, 3), (2, 2), (1, 2), (0, 1, 2, 3)),
}


def _check(history: TokenHistory, sampling: Sampling, prompt: list[int], output: list[int]) -> None:
    assert sorted(history.seen_ids.tolist()) == sorted({*prompt, *output})
    counts = dict(zip(history.output_ids.tolist(), history.output_counts.tolist(), strict=True))
    assert counts == {token_id: float(output.count(token_id)) for token_id in output}
    several = [word for word in sampling.bad_words if len(word) > 1]
    tokens = [*prompt, *output]
    wanted = banned(Sampling(1, bad_words=tuple(several)), tokens)
    wanted |= banned(Sampling(1, no_repeat_ngram=sampling.no_repeat_ngram), tokens)
    assert set(history.banned_ids()) == wanted


@settings(max_examples=2000 if LONG else 100)
@given(
    tokens=st.lists(st.integers(0, 4), max_size=60),
    cuts=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    ngram=st.integers(0, 6),
)
def test_a_history_is_what_the_tokens_say(
    tokens: list[int], cuts: tuple[int, int], ngram: int
) -> None:
    """Prompt, then outputs of an earlier leg, then appended ones."""
    sampling = Sampling(max_tokens=100, no_repeat_ngram=ngram, **ALL)
    first, second = sorted(cuts)
    prompt, output = tokens[:first], tokens[first:second]
    history = TokenHistory(sampling, prompt, output)
    _check(history, sampling, prompt, output)
    for token_id in tokens[second:]:
        history.append(token_id)
        output = [*output, token_id]
        _check(history, sampling, prompt, output)


def test_forks_go_their_own_ways(seed: int, scale: Scale) -> None:
    """Random appends to a growing family of forks."""
    rng = random.Random(seed)
    for _ in range(scale(200)):
        sampling = Sampling(max_tokens=100, no_repeat_ngram=rng.randrange(4), **ALL)
        prompt = [rng.randrange(5) for _ in range(rng.randrange(10))]
        family: list[tuple[TokenHistory, list[int]]] = [(TokenHistory(sampling, prompt), [])]
        for _ in range(40):
            history, output = rng.choice(family)
            if rng.random() < 0.15:
                family.append((history.fork(), output.copy()))
            else:
                token_id = rng.randrange(5)
                history.append(token_id)
                output.append(token_id)
        for history, output in family:
            _check(history, sampling, prompt, output)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 5, "logit_bias": ((1, 1.0),), "min_tokens": 1}, False),
        ({"bad_words": ((1,), (2,))}, False),
        ({"allowed_token_ids": frozenset({1})}, False),
        ({"repetition_penalty": 0.9}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"bad_words": ((1,), (2, 3))}, True),
        ({"no_repeat_ngram": 1}, True),
    ],
)
def test_who_needs_a_history(fields: dict[str, Any], expected: bool) -> None:
    assert needs_history(Sampling(max_tokens=1, **fields)) is expected


def test_a_long_prompt_of_few_words_is_indexed_in_its_length(seed: int) -> None:
    """50,000 tokens after which 20,000 different ones came: quadratic, this would take minutes."""
    rng = random.Random(seed)
    prompt = [token for _ in range(50_000) for token in (7, rng.randrange(20_000))]
    for size in (1, 2, 3):
        history = TokenHistory(Sampling(1, no_repeat_ngram=size), prompt)
        history.append(7)
        assert len(history.banned_ids()) == len(set(history.banned_ids()))
    assert set(TokenHistory(Sampling(1, no_repeat_ngram=2), [*prompt, 7]).banned_ids()) == {
        *prompt[1::2]
    } | ({7} if 7 in prompt[1::2] else set())
