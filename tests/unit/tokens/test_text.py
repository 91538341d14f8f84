"""What is visible, what counts: text, ids and stop strings joined."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.harness.small_tokenizers import KINDS, byte_fallback, byte_level
from tokens.text import OutputText, TextDelta

kinds = st.sampled_from(sorted(KINDS))


def _run(output: OutputText, ids: list[int], size: int) -> list[TextDelta]:
    parts = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    return [*(output.feed(part) for part in parts), output.finish()]


@given(kind=kinds, data=st.data(), size=st.integers(1, 7))
def test_without_stops_all_is_shown_and_counted(kind: str, data: st.DataObject, size: int) -> None:
    tokenizer = KINDS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    output = OutputText(tokenizer)
    deltas = _run(output, ids, size)
    assert "".join(delta.text for delta in deltas) == tokenizer.decode(ids)
    assert [i for delta in deltas for i in delta.token_ids] == ids
    assert output.num_tokens == len(ids)
    assert output.stop_string is None


@given(
    kind=st.sampled_from(["byte_level", "byte_fallback"]),
    text=st.text(alphabet="ab中 ", max_size=30),
    stops=st.lists(st.text(alphabet="ab中 ", min_size=1, max_size=3), min_size=1, max_size=3),
    size=st.integers(1, 5),
    include=st.booleans(),
)
def test_any_split_stops_at_the_same_token(
    kind: str, text: str, stops: list[str], size: int, include: bool
) -> None:
    """Overshoot depends on how many ids arrived together; what is shown and counted must not."""
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    results = []
    for part_size in (1, size):
        output = OutputText(tokenizer, stop=stops, include_stop_text=include)
        deltas = _run(output, ids, part_size)
        shown_ids = [i for delta in deltas for i in delta.token_ids]
        assert len(shown_ids) == output.num_tokens
        assert shown_ids == ids[: output.num_tokens]
        results.append(("".join(d.text for d in deltas), output.num_tokens, output.stop_string))
    assert results[0] == results[1]
    visible, num_tokens, stop = results[0]
    whole = tokenizer.decode(ids)
    assert whole.startswith(visible)
    if stop is None:
        assert (visible, num_tokens) == (whole, len(ids))
        assert not any(other in whole for other in stops)
    else:
        assert not include or visible.endswith(stop)
        assert include or not any(other in visible for other in stops)


@given(text=st.text(alphabet="ab", max_size=30), stop=st.text(alphabet="ab", min_size=1))
def test_ids_never_run_ahead_of_text(text: str, stop: str) -> None:
    """A reader who stops between two messages has the text of every id it was told."""
    tokenizer = KINDS["byte_level"]
    output = OutputText(tokenizer, stop=[stop])
    shown, ids = "", []
    for token_id in tokenizer.encode(text):
        delta = output.feed([token_id])
        shown += delta.text
        ids += delta.token_ids
        if delta.stop_string is not None:
            break
        assert shown.startswith(tokenizer.decode(ids))


def test_overshoot_is_neither_shown_nor_counted() -> None:
    tokenizer = byte_level()
    output = OutputText(tokenizer, stop=["b"])
    delta = output.feed(tokenizer.encode("aabbb"))
    assert (delta.text, len(delta.token_ids), delta.stop_string) == ("aa", 3, "b")
    assert output.feed(tokenizer.encode("more")) == TextDelta()
    assert output.finish() == TextDelta()
    assert output.num_tokens == 3


def test_a_stop_inside_a_token_hides_the_rest_of_it() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("hello")
    assert len(ids) == 2  # hell|o
    output = OutputText(tokenizer, stop=["el"])
    assert output.feed(ids) == TextDelta("h", tuple(ids[:1]), "el")


def test_held_ids_come_with_their_text() -> None:
    tokenizer = byte_level()
    output = OutputText(tokenizer, stop=["ab"])
    first = output.feed(tokenizer.encode("a"))
    assert first == TextDelta()
    second = output.feed(tokenizer.encode("c"))
    assert (second.text, len(second.token_ids)) == ("ac", 2)


def test_the_text_of_a_stop_token_is_hidden_but_counted() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ab")
    output = OutputText(tokenizer)
    assert output.feed(ids, ends_with_stop_token=True).text == "a"
    assert output.finish() == TextDelta("", (ids[1],), None)
    assert output.num_tokens == 2
    including = OutputText(tokenizer, include_stop_text=True)
    assert including.feed(ids, ends_with_stop_token=True).text == "ab"


def test_a_stop_string_in_what_was_held_back_counts() -> None:
    """Byte fallback: the run of bytes ends with the answer, and only then is it text."""
    tokenizer = byte_fallback()
    ids = tokenizer.encode("a中")
    output = OutputText(tokenizer, stop=["中"])
    assert output.feed(ids).text == "a"
    last = output.finish()
    assert (last.text, last.stop_string, output.num_tokens) == ("", "中", len(ids))
