"""A forbidden word is forbidden in both of its spellings."""

from __future__ import annotations

import pytest

from tests.harness.small_tokenizers import byte_level
from tokens.bad_words import bad_word_ids

TOKENIZER = byte_level()


@pytest.mark.parametrize("word", ["hello", " hello", "hello ", "é", "中 a"])
def test_a_word_with_and_without_the_space_before_it(word: str) -> None:
    texts = [TOKENIZER.decode(ids) for ids in bad_word_ids(TOKENIZER, [word])]
    assert texts == [word.strip(), " " + word.strip()]


def test_a_spelling_comes_once() -> None:
    once = bad_word_ids(TOKENIZER, ["hell", "zz"])
    assert bad_word_ids(TOKENIZER, ["hell", " hell", "zz", "hell"]) == once


def test_nothing_cannot_be_forbidden() -> None:
    assert bad_word_ids(TOKENIZER, []) == []
    with pytest.raises(ValueError, match="no tokens"):
        bad_word_ids(TOKENIZER, [""])
