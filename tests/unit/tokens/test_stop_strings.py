"""Stop strings against a brute-force oracle, and the exact amount held back."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokens.stop_strings import StopStrings

# Two letters: overlaps, borders and repeats are the common case then.
texts = st.text(alphabet="ab", max_size=40)
stop_lists = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def _oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Character by character: is some stop string complete here?"""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def _held(text: str, stops: list[str]) -> int:
    """Length of the longest end of `text` that could still become a stop string."""
    return max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))


@given(text=texts, stops=stop_lists, include=st.booleans(), cuts=st.lists(st.integers(0, 40)))
def test_any_cut_agrees_with_the_oracle(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    matcher = StopStrings(stops, include_stop_text=include)
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    shown = ""
    for begin, end in itertools.pairwise(edges):
        piece = matcher.feed(text[begin:end])
        shown += piece.text
        if matcher.found is None:
            # Exactly as much as needed: no less is safe, and more would make the reader wait.
            assert len(shown) == end - _held(text[:end], stops)
    shown += matcher.finish()
    assert (shown, matcher.found) == _oracle(text, stops, include)


def test_a_visible_stop_string_is_shown_and_others_are_not() -> None:
    matcher = StopStrings(["</call>", "!"], visible=["</call>"])
    match = matcher.feed("a</call>b")
    assert (match.text, match.stop) == ("a</call>", "</call>")
    assert StopStrings(["</call>", "!"], visible=["</call>"]).feed("a!").text == "a"


def test_the_stop_that_is_complete_first_wins() -> None:
    matcher = StopStrings(["abcd", "bc"])
    assert matcher.feed("ab").text == ""
    match = matcher.feed("cd")
    assert (match.text, match.stop) == ("a", "bc")


def test_of_two_complete_at_once_the_longer_is_trimmed() -> None:
    match = StopStrings(["end", "the end"]).feed("It is the end.")
    assert (match.text, match.stop) == ("It is ", "the end")


def test_after_a_match_text_is_dropped() -> None:
    matcher = StopStrings(["x"])
    assert matcher.feed("axb").text == "a"
    assert (matcher.feed("more").text, matcher.finish()) == ("", "")


def test_held_text_comes_with_the_end() -> None:
    matcher = StopStrings(["\n\n"])
    assert matcher.feed("line\n").text == "line"
    assert matcher.finish() == "\n"


def test_without_stops_nothing_is_held() -> None:
    assert StopStrings([]).feed("all of it").text == "all of it"


def test_an_empty_stop_string_is_refused() -> None:
    """It would match before the first character."""
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
