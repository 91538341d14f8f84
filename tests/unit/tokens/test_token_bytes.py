"""The bytes of tokens, in a row, are the text."""

from __future__ import annotations

import random

import pytest

from tests.harness import small_tokenizers as builders
from tokens.token_bytes import TokenBytes
from tokens.tokenizer import Tokenizer


@pytest.mark.parametrize("make", [builders.byte_level, builders.byte_fallback])
def test_bytes_in_a_row_are_the_text(make: object, seed: int) -> None:
    tokenizer: Tokenizer = make()  # type: ignore[operator]
    rng = random.Random(seed)
    names = TokenBytes(tokenizer)
    for _ in range(100):
        letters = rng.choices("abc \u00e9\u4f60\U0001f600", k=rng.randrange(1, 20))
        text = "".join(letters)
        ids = tokenizer.encode(text, add_special_tokens=False)
        spelled = b"".join(names.of(token_id) for token_id in ids).decode()
        assert spelled.lstrip(" ") == tokenizer.decode(ids).lstrip(" ")


def test_half_a_character_shows_as_a_replacement() -> None:
    tokenizer = builders.byte_level()
    names = TokenBytes(tokenizer)
    ids = tokenizer.encode("\U0001f600", add_special_tokens=False)
    if len(ids) > 1:
        assert names.text_of(ids[0]) == "\ufffd"
    assert b"".join(names.of(token_id) for token_id in ids) == "\U0001f600".encode()


def test_control_tokens_have_their_spelling_and_no_token_has_nothing() -> None:
    tokenizer = builders.byte_level()
    names = TokenBytes(tokenizer)
    assert names.of(tokenizer.find_token_id("<|end|>") or 0) == b"<|end|>"
    assert names.of(10**6) == b""
