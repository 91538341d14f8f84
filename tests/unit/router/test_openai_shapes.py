"""Shapes read strictly: what they read fits the schema that they say, and what they refuse does
not, but for what no schema can say.
"""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from process.rpc_errors import InvalidArgument
from services.router.openai.chat import tool_use
from services.router.openai.schemas import (
    BATON,
    CHAT,
    COMPLETION,
    EMBEDDING,
    TOOL,
    BodyField,
    BodyRecord,
    Either,
    Flag,
    Integer,
    ListOf,
    MapOf,
    Number,
    OneOf,
    RefusedField,
    Tagged,
    Text,
)

INNER = BodyRecord(
    (BodyField("type", OneOf(("a",)), is_needed=True), BodyField("x", Integer(0, 3)))
)
SHAPE = BodyRecord(
    (
        BodyField("text", Text(1, 5)),
        BodyField("number", Number(-1, 1)),
        BodyField("whole", Integer(0, 9), is_needed=True),
        BodyField("flag", Flag()),
        BodyField("kind", OneOf(("p", "q"))),
        BodyField("either", Either((Text(), ListOf(Integer(0, 5), least=1), ListOf(Text())))),
        BodyField("map", MapOf(Number(0, 1), most=2)),
        BodyField("tagged", Tagged("type", {"a": INNER})),
        BodyField("refused", RefusedField("never", (False,))),
    )
)
CHECKER = jsonschema_rs.Draft202012Validator(SHAPE.schema())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 12) | st.floats(-2, 2) | st.sampled_from("apq"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.fixed_dictionaries({"type": st.just("a")}, optional={"x": inner})
        | st.dictionaries(st.sampled_from("xy"), inner, max_size=3)
    ),
    max_leaves=4,
)


@example({"whole": 0, "either": []})
@given(
    st.fixed_dictionaries(
        {"whole": st.integers(0, 9) | VALUES},
        optional={field.name: VALUES for field in SHAPE.fields if field.name != "whole"},
    )
)
def test_what_is_read_is_what_the_schema_allows(value: dict[str, Any]) -> None:
    try:
        SHAPE.read(value, "")
        is_read = True
    except InvalidArgument:
        is_read = False
    assert is_read == CHECKER.is_valid(value)


def test_null_is_absent_and_unknown_is_refused_with_the_nearest() -> None:
    assert SHAPE.read({"whole": 3.0, "text": None}, "") == {"whole": 3}
    with pytest.raises(InvalidArgument, match=r"^wohle: is unknown here; did you mean whole\?"):
        SHAPE.read({"wohle": 1}, "")
    with pytest.raises(InvalidArgument, match=r"^tagged.x: must be from 0 to 3"):
        SHAPE.read({"whole": 1, "tagged": {"type": "a", "x": 4}}, "")
    with pytest.raises(InvalidArgument, match=r"^refused: never"):
        SHAPE.read({"whole": 1, "refused": 0}, "")  # 0 is not false


def test_keys_of_a_sender_are_shown_short_and_printable() -> None:
    with pytest.raises(InvalidArgument) as caught:
        SHAPE.read({"whole": 1, "\ud800\n" + "k" * 500: 1}, "")
    assert str(caught.value).isprintable() and len(str(caught.value)) < 200


@pytest.mark.parametrize("record", [BATON, CHAT, COMPLETION, EMBEDDING, TOOL])
def test_schemas_of_the_tables_are_schemas(record: Any) -> None:
    assert jsonschema_rs.meta.is_valid(record.schema())


def test_a_long_list_of_ids_is_not_read_entry_by_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = ListOf(Integer(0, 9))
    num_reads, read = 0, Integer.read

    def counted(self: Integer, value: Any, path: str) -> int:
        nonlocal num_reads
        num_reads += 1
        return read(self, value, path)

    monkeypatch.setattr(Integer, "read", counted)
    assert shape.read([1] * 1000, "x") == [1] * 1000
    assert shape.read([1.0, 2] * 500, "x") == [1, 2] * 500
    assert all(type(entry) is int for entry in shape.read([1.0, 2], "x"))
    assert shape.read([], "x") == []
    assert num_reads == 0
    for wrong in (1.5, 10, -1, True, "1", None, [1], float("inf"), float("nan")):
        with pytest.raises(InvalidArgument, match=r"x\[1000\]"):
            shape.read([1] * 1000 + [wrong], "x")
    assert num_reads == 9


def test_of_an_unknown_key_only_the_beginning_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []

    def close(word: str, known: Any, n: int) -> list[str]:
        compared.append(word)
        return []

    monkeypatch.setattr("services.router.openai.schemas.difflib.get_close_matches", close)
    with pytest.raises(InvalidArgument, match="is unknown here"):
        COMPLETION.read({"prompt": "a", "temperatur" * 1000: 1}, "")
    assert compared == [("temperatur" * 1000)[:40]]


@pytest.mark.parametrize(
    "choice", [None, "auto", "required", {"type": "function", "function": {"name": "f"}}]
)
def test_a_model_that_takes_no_tools_says_so_whatever_the_choice_is(choice: Any) -> None:
    body: dict[str, Any] = {"tools": [{"type": "function", "function": {"name": "f"}}]}
    body |= {"tool_choice": choice} if choice is not None else {}
    with pytest.raises(InvalidArgument, match="template takes no tools") as caught:
        tool_use(body, None, takes_tools=False)
    assert caught.value.field == "tools"
    if choice in (None, "auto"):  # its calls cannot be read, but a forced one can be made
        with pytest.raises(InvalidArgument, match="set tool_choice to required"):
            tool_use(body, None, takes_tools=True)
    else:
        assert tool_use(body, None, takes_tools=True).schema() is not None
