"""Any split of ids gives the text of all of them, for every kind of tokenizer, UTF-8 or not."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.small_tokenizers import KINDS, TEXTS, byte_fallback, byte_level
from tokens.detokenizer import _MAX_WINDOW_TOKENS, Detokenizer

kinds = st.sampled_from(sorted(KINDS))


def _shown(detokenizer: Detokenizer, parts: Iterable[list[int]]) -> str:
    return "".join([*map(detokenizer.feed, parts), detokenizer.finish()])


def _one_by_one(ids: list[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


def _split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise(edges)]


@given(kind=kinds, data=st.data(), cuts=st.lists(st.integers(0, 200)), skip=st.booleans())
def test_any_split_equals_the_whole(
    kind: str, data: st.DataObject, cuts: list[int], skip: bool
) -> None:
    """Random ids: broken UTF-8, specials inside characters, ids beyond the vocabulary."""
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=60))
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    whole = tokenizer.decode(ids, skip_special_tokens=skip)
    assert _shown(detokenizer, _split(ids, cuts)) == whole


@given(kind=kinds, text=st.text(max_size=60))
def test_one_by_one_equals_the_whole_for_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    assert _shown(Detokenizer(tokenizer), _one_by_one(ids)) == tokenizer.decode(ids)


@given(
    kind=kinds,
    text=st.lists(st.sampled_from([" ", "   ", "a", "he", "\n", "中"]), max_size=60).map("".join),
)
def test_runs_of_spaces(kind: str, text: str) -> None:
    """Decoders that strip leading spaces must strip them once, not in every window."""
    tokenizer = KINDS[kind]
    ids = [i for character in text for i in tokenizer.encode(character)]
    assert _shown(Detokenizer(tokenizer), _one_by_one(ids)) == tokenizer.decode(ids)


@given(
    seed=st.integers(0, 2**32), kind=st.sampled_from(["byte_level", "byte_fallback", "metaspace"])
)
def test_bytes_of_broken_characters(seed: int, kind: str) -> None:
    """Long runs of byte tokens, most of them no UTF-8: the window must move without losing any."""
    tokenizer, rng = KINDS[kind], random.Random(seed)
    if kind == "byte_level":
        choices = list(range(256))
    else:
        choices = [tokenizer.find_token_id(f"<0x{byte:02X}>") or 0 for byte in range(256)]
    hard = [choices[byte] for byte in (0xE4, 0xB8, 0xAD, 0xF0, 0x9F, 0x90, 0x80, 0xFF, 0x41)]
    ids = [rng.choice(hard if rng.random() < 0.8 else choices) for _ in range(80)]
    detokenizer = Detokenizer(tokenizer)
    assert _shown(detokenizer, _one_by_one(ids)) == tokenizer.decode(ids)
    if kind == "byte_level":
        assert len(detokenizer._window) <= _MAX_WINDOW_TOKENS


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_half_a_character_is_held_back(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("中x")
    detokenizer = Detokenizer(tokenizer)
    shown = [(detokenizer.feed([token_id]), detokenizer.is_holding) for token_id in ids]
    assert "".join(text for text, _ in shown) == "中x"
    assert all("\ufffd" not in text for text, _ in shown)
    assert any(holding for _, holding in shown) and not detokenizer.is_holding


def test_a_token_that_ends_inside_a_character_shows_its_first_part() -> None:
    tokenizer = byte_level()
    first = tokenizer.find_token_id("oð")
    assert first is not None
    ids = [first, *tokenizer.encode("👩")[1:]]
    assert tokenizer.decode(ids[:1]) == "o\ufffd"
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.feed(ids[:1]) == "o"
    assert detokenizer.feed(ids[1:]) == "👩"


def test_text_is_not_held_without_a_reason() -> None:
    detokenizer = Detokenizer(byte_level())
    for character in "plain text":
        assert detokenizer.feed(byte_level().encode(character)) == character


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_the_window_stays_small(kind: str, text: str) -> None:
    """O(window) per token: a long answer must not get slower."""
    tokenizer = KINDS[kind]
    detokenizer = Detokenizer(tokenizer)
    for token_id in tokenizer.encode(text) * 20:
        detokenizer.feed([token_id])
    # Byte fallback keeps a run of bytes until it ends; the texts have runs of up to 40.
    assert len(detokenizer._window) <= _MAX_WINDOW_TOKENS + 40


def test_a_prompt_s_end_as_context_keeps_the_space_of_the_next_word() -> None:
    """Llama's decoder strips the first space; a continuation must not glue its words together."""
    tokenizer = byte_fallback()
    prompt, output = tokenizer.encode("hello"), tokenizer.encode("a he")
    alone, continued = Detokenizer(tokenizer), Detokenizer(tokenizer, context_ids=prompt)
    assert alone.feed(output) == "a he"
    assert continued.feed(output) == " a he"


@given(kind=st.sampled_from(["byte_level", "byte_fallback"]), text=st.text(max_size=30))
def test_context_plus_output_reads_as_one_text(kind: str, text: str) -> None:
    tokenizer = KINDS[kind]
    prompt = tokenizer.encode("hello hello hello hello")
    output = tokenizer.encode(text)
    detokenizer = Detokenizer(tokenizer, context_ids=prompt)
    shown = _shown(detokenizer, _one_by_one(output))
    assert tokenizer.decode(prompt) + shown == tokenizer.decode(prompt + output)


def test_a_prompt_that_ends_inside_a_character_is_no_context() -> None:
    tokenizer = byte_level()
    prompt = tokenizer.encode("中")[:-1]
    detokenizer = Detokenizer(tokenizer, context_ids=prompt)
    assert detokenizer.feed(tokenizer.encode("ab")) == "ab"
