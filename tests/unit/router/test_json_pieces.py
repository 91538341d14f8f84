"""A text read piece by piece is what `json.loads` makes of it, or is refused as there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.router.openai import json_pieces
from services.router.openai.json_pieces import JsonPieces


def no_constant(name: str) -> Any:
    raise ValueError(name)


def whole(text: str) -> tuple[bool, Any]:
    """Whether it is JSON, and its value."""
    try:
        return True, json.loads(text, parse_constant=no_constant)
    except ValueError:
        return False, None


def in_pieces(text: str, window: int) -> tuple[bool, Any]:
    try:
        return True, JsonPieces(no_constant, window).loads(text)
    except ValueError:
        return False, None


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(',]}"\\ a\n', max_size=8),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(':,"} b'), inner),
    max_leaves=25,
)


@given(value=values, window=st.integers(1, 60), space=st.sampled_from([None, 0, 2]))
def test_a_text_is_what_it_was(value: Any, window: int, space: int | None) -> None:
    text = json.dumps(value, indent=space)
    read = JsonPieces(no_constant, window).loads(text)
    assert read == json.loads(text) == value
    assert json.dumps(read) == json.dumps(value)  # also 1 and 1.0, and the order of names


@given(
    text=st.lists(
        st.sampled_from(
            [*'[]{},:" \n', '"a"', '"b":', "1", "-2e3", "true", "null", "NaN", "[1,2]", '{"a":1},']
        ),
        max_size=30,
    ).map("".join),
    window=st.integers(1, 30),
)
@example('{"a":1,"a":2,"b":3,"b":4}', 4)
@example("[1,2,3,,4]", 4)
@example("[1,2,3,]", 4)
@example("[1,2,3,4,5,6,7,  ]", 15)
@example("[1],2,3,4,5,6", 4)
@example('{"a" 1,"b":2}', 4)
@example('{"a":1,}', 3)
@example("[1,2,3", 4)
@example("[1,2]]", 4)
@example('["],", "],"]', 5)
@example("", 3)
def test_what_is_no_json_is_none_in_pieces_either(text: str, window: int) -> None:
    assert in_pieces(text, window) == whole(text)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_how_deep_it_may_go_is_bounded(opening: str) -> None:
    closing = "]" if opening == "[" else "}"
    for depth in (json_pieces.MAX_DEPTH + 1, 5000):
        text = opening * depth + "1" + closing * depth
        with pytest.raises(RecursionError):
            JsonPieces(no_constant, 4).loads(text)
    depth = json_pieces.MAX_DEPTH - 1
    text = opening * depth + "1" + closing * depth
    assert JsonPieces(no_constant, 4).loads(text) == json.loads(text)


@pytest.mark.parametrize(
    "entry", ["7", '{"a":[1,{"b":2}]}', '[[1,"a"],[2,"b"]]', '"],},"', "{}", '"x":{"y":[1]}']
)
def test_no_call_into_c_gets_more_than_a_window(
    entry: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of any list of alike entries; a text of one long string is read at once, and fast."""
    longest, num_calls = 0, 0
    is_object = entry.startswith('"x"')
    text = ("{%s}" if is_object else "[%s]") % ",".join([entry] * 20_000)
    decoder = json.JSONDecoder()

    class Counting(json.JSONDecoder):
        def __init__(self, **options: Any) -> None:
            self.scan_once = self._scan  # type: ignore[method-assign]

        def _scan(self, text: str, at: int) -> tuple[Any, int]:
            nonlocal longest, num_calls
            value, end = decoder.scan_once(text, at)
            longest, num_calls = max(longest, end - at), num_calls + 1
            return value, end

    monkeypatch.setattr(json_pieces.json, "JSONDecoder", Counting)
    assert JsonPieces(no_constant, 1000).loads(text) == json.loads(text)
    assert longest <= 1002  # and the brackets around them
    # Most entries come many at once, not one by one.
    assert num_calls < 20_000 / 2
