"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.speculation.config import NgramConfig
from engine.speculation.ngram import NgramIndex


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 3),
)
def test_as_a_search_finds_it(
    token_ids: list[int], num_tokens: int, min_length: int, more: int, max_matches: int
) -> None:
    settings = NgramConfig(min_length + more, min_length, max_matches)
    index = NgramIndex(settings)
    for end in range(1, len(token_ids) + 1):
        known = token_ids[:end]
        tree = index.propose(known, num_tokens)
        wanted: list[tuple[int, ...]] = []
        for length in range(min(settings.max_length, end), min_length - 1, -1):
            places = [
                at for at in range(length, end) if known[at - length : at] == known[end - length :]
            ]
            wanted = [tuple(known[at : at + num_tokens]) for at in reversed(places[-max_matches:])]
            if wanted:
                break
        paths = {tuple(tree.token_ids[one] for one in tree.path(node)) for node in range(len(tree))}
        assert paths == {path[:cut] for path in wanted for cut in range(1, len(path) + 1)}


def test_a_shorter_text_is_refused() -> None:
    index = NgramIndex(NgramConfig())
    index.propose([1, 2, 3], 4)
    with pytest.raises(ValueError, match="2 tokens, 3 at the call before"):
        index.propose([1, 2], 4)
