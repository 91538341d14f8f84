"""What a Sampling must be like to be drawn with: the range of every field. Pure; any thread.

The services check at the edge, with narrower bounds and better words; here stands what would make
the arithmetic itself go wrong, or one request's step dear for all. Whether a grammar compiles is
not known here.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from engine.errors import InvalidRequest
from engine.request import MAX_LOGPROBS, Sampling

MIN_TEMPERATURE = 1e-4
"""Least temperature above 0. Below, scores leave float32's range; greedy is what is meant."""

MAX_TEMPERATURE = 1e6
"""Above, nothing is left of a difference of logits in float32."""

MAX_REPETITION_PENALTY = 1e6
"""And 1 / it is the least. Keeps a logit of 1e30 finite."""

MAX_SHIFT = 1e9
"""Most that presence, frequency (per occurrence) or a bias may move a logit. With a million
occurrences, and divided by the least temperature, that stays finite in float32."""

MAX_NGRAM_SIZE = 64
"""Each token's n-1 predecessors are kept as a key of the index of n-grams. Guessed: 3 is usual."""

MAX_BAD_WORD_TOKENS = 1 << 16
"""Tokens of all bad words together. Guessed."""


def check_sampling(sampling: Sampling, vocab_size: int) -> None:
    """Raises: InvalidRequest naming the first field that is out of its range."""
    _check_ranges(sampling)
    _check_ids(sampling, vocab_size)


def _check_ranges(one: Sampling) -> None:
    # Each condition is written so that NaN fails it.
    least_penalty = 1 / MAX_REPETITION_PENALTY
    checks = (
        ("max_tokens", one.max_tokens, one.max_tokens >= 1, "at least 1"),
        (
            "temperature",
            one.temperature,
            one.temperature == 0 or MIN_TEMPERATURE <= one.temperature <= MAX_TEMPERATURE,
            f"0 (greedy), or from {MIN_TEMPERATURE:g} to {MAX_TEMPERATURE:g}",
        ),
        ("top_p", one.top_p, 0 < one.top_p <= 1, "above 0, at most 1"),
        ("top_k", one.top_k, 0 <= one.top_k < 1 << 31, "from 0 (off), below 2^31"),
        ("min_p", one.min_p, 0 <= one.min_p <= 1, "from 0 (off) to 1"),
        (
            "min_tokens",
            one.min_tokens,
            0 <= one.min_tokens <= one.max_tokens,
            f"from 0 to max_tokens, which is {one.max_tokens}",
        ),
        ("seed", one.seed, 0 <= one.seed < 1 << 64, "an unsigned integer of 64 bits"),
        ("sample_index", one.sample_index, 0 <= one.sample_index < 1 << 31, "from 0, below 2^31"),
        (
            "logprobs",
            one.logprobs,
            0 <= (one.logprobs or 0) <= MAX_LOGPROBS,
            f"from 0 to {MAX_LOGPROBS}",
        ),
        (
            "repetition_penalty",
            one.repetition_penalty,
            least_penalty <= one.repetition_penalty <= MAX_REPETITION_PENALTY,
            f"from {least_penalty:g} to {MAX_REPETITION_PENALTY:g} (1 is off)",
        ),
        ("presence_penalty", one.presence_penalty, _is_shift(one.presence_penalty), _SHIFT),
        ("frequency_penalty", one.frequency_penalty, _is_shift(one.frequency_penalty), _SHIFT),
        (
            "no_repeat_ngram",
            one.no_repeat_ngram,
            0 <= one.no_repeat_ngram <= MAX_NGRAM_SIZE,
            f"from 0 (off) to {MAX_NGRAM_SIZE}",
        ),
    )
    for name, value, is_valid, wanted in checks:
        if not is_valid:
            raise InvalidRequest(name, f"{value} is out of range; it must be {wanted}")


_SHIFT = f"from {-MAX_SHIFT:g} to {MAX_SHIFT:g}"


def _is_shift(value: float) -> bool:
    return math.isfinite(value) and -MAX_SHIFT <= value <= MAX_SHIFT


def _check_ids(one: Sampling, vocab_size: int) -> None:
    """Token ids lie in the vocabulary, and every list says something."""
    _check_vocabulary("stop_token_ids", one.stop_token_ids, vocab_size)
    biased = [token_id for token_id, _ in one.logit_bias]
    _check_vocabulary("logit_bias", biased, vocab_size)
    if len(set(biased)) != len(biased):
        twice = next(token_id for token_id in biased if biased.count(token_id) > 1)
        raise InvalidRequest("logit_bias", f"token {twice} is named twice")
    for token_id, value in one.logit_bias:
        if not _is_shift(value):
            raise InvalidRequest(
                "logit_bias", f"{value} of token {token_id} is out of range; it must be {_SHIFT}"
            )
    for word in one.bad_words:
        if not word:
            raise InvalidRequest("bad_words", "one of them has no token")
        _check_vocabulary("bad_words", word, vocab_size)
    if sum(map(len, one.bad_words)) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest("bad_words", f"more than {MAX_BAD_WORD_TOKENS} tokens in all")
    if one.allowed_token_ids is not None:
        if not one.allowed_token_ids:
            raise InvalidRequest("allowed_token_ids", "empty: no token could be drawn")
        _check_vocabulary("allowed_token_ids", one.allowed_token_ids, vocab_size)


def _check_vocabulary(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return  # there may be as many as the vocabulary has, on the engine's thread
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(field, f"token {token_id} is outside [0, {vocab_size})")
