"""Tool calls are read out of text, however the text is cut."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import pytest

from tokens.tool_call_text import (
    BARE,
    LISTED,
    MISTRAL,
    TAGGED,
    CallPart,
    CallsInText,
    Content,
    OneCall,
    Piece,
    ToolCallFormat,
    find_format,
)

SEARCH = '{"name": "search", "arguments": {"query": "a \\"}\\" b", "k": [1, {"x": "]"}]}}'
ARGUMENTS = '{"query": "a \\"}\\" b", "k": [1, {"x": "]"}]}'


def joined(pieces: Sequence[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """The content, and (name, arguments) of each call."""
    content, calls = "", []
    for piece in pieces:
        if isinstance(piece, Content):
            content += piece.text
            continue
        if piece.index == len(calls):
            assert piece.name, "a call begins with its name"
            calls.append((piece.name, piece.arguments))
        else:
            assert piece.index == len(calls) - 1 and not piece.name
            name, arguments = calls[-1]
            calls[-1] = name, arguments + piece.arguments
    return content, calls


def read(form: ToolCallFormat, text: str) -> tuple[str, list[tuple[str, str]]]:
    reader = CallsInText(form)
    return joined([*reader.feed(text), *reader.finish()])


CASES = [
    (TAGGED, "no call at all", ("no call at all", [])),
    (TAGGED, f"<tool_call>\n{SEARCH}\n</tool_call>", ("", [("search", ARGUMENTS)])),
    (
        TAGGED,
        f"I look.\n\n<tool_call>{SEARCH}</tool_call>\n<tool_call>\n"
        '{"arguments": {}, "name": "b"}</tool_call>',
        ("I look.", [("search", ARGUMENTS), ("b", "{}")]),
    ),
    (TAGGED, f"<tool_call>{SEARCH}", ("", [("search", ARGUMENTS)])),
    (TAGGED, '<tool_call>{"name": "a"}</tool_call>', ("", [("a", "{}")])),
    (TAGGED, '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}', ("", [("a", '{"x": 1}')])),
    (TAGGED, '<tool_call>{"name": "a", "arguments": null}', ("", [("a", "null")])),
    (TAGGED, '<tool_call>{"id": 7, "name": "a", "arguments": {"x', ("", [("a", '{"x')])),
    (TAGGED, "<tool_call>not json</tool_call> x", ("<tool_call>not json</tool_call> x", [])),
    (TAGGED, '<tool_call>{"arguments": {}}</tool_call>', None),
    (TAGGED, '<tool_call>{"name": 3}', None),
    (TAGGED, '<tool_call>{"name": "a", ]', ("", [("a", "")])),
    (TAGGED, "a < b <tool_cal", ("a < b <tool_cal", [])),
    (TAGGED, "The tag <tool_call> is used so.", None),
    (TAGGED, "The tag \n <tool_call>", None),
    (TAGGED, "The tag\t<tool_call> {", None),
    (TAGGED, "Say <tool_call> {4} ", None),
    (TAGGED, "Say <tool_call><tool_cal", None),
    (
        TAGGED,
        'Say <tool_call><tool_call>{"name": "a"}</tool_call>',
        ("Say <tool_call>", [("a", "{}")]),
    ),
    (
        TAGGED,
        '<tool_call>{"name": "a"}</tool_call> The <tool_call> tag.',
        (" The <tool_call> tag.", [("a", "{}")]),
    ),
    (TAGGED, "trailing space \n", ("trailing space \n", [])),
    (MISTRAL, f"[TOOL_CALLS] [{SEARCH}]", ("", [("search", ARGUMENTS)])),
    (
        MISTRAL,
        f'[TOOL_CALLS] [{SEARCH}, {{"name": "b", "arguments": {{}}}}]',
        ("", [("search", ARGUMENTS), ("b", "{}")]),
    ),
    (
        MISTRAL,
        f'Hm. [TOOL_CALLS]search[ARGS]{ARGUMENTS}[TOOL_CALLS]b{{"x": 1}}',
        ("Hm.", [("search", ARGUMENTS), ("b", '{"x": 1}')]),
    ),
    (MISTRAL, "[TOOL_CALLS] what?", ("[TOOL_CALLS] what?", [])),
    (MISTRAL, "Hm. [TOOL_CALLS] what?", None),
    (
        MISTRAL,
        '[TOOL_CALLS]a{"x": 1}[TOOL_CALLS] what?',
        ("[TOOL_CALLS] what?", [("a", '{"x": 1}')]),
    ),
    (MISTRAL, "only text", ("only text", [])),
    (BARE, '{"name": "a", "parameters": {"x": 1}}', ("", [("a", '{"x": 1}')])),
    (BARE, '<|python_tag|>{"name": "a", "parameters": {}}', ("", [("a", "{}")])),
    (
        BARE,
        '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"y": 2}}',
        ("", [("a", "{}"), ("b", '{"y": 2}')]),
    ),
    (BARE, '{"answer": 42}', ('{"answer": 42}', [])),
    (BARE, 'Well, {"name": "a"}', ('Well, {"name": "a"}', [])),
    (BARE, "  x", ("  x", [])),
    (
        LISTED,
        f'[{SEARCH}, {{"name": "b", "arguments": {{}}}}]',
        ("", [("search", ARGUMENTS), ("b", "{}")]),
    ),
    (LISTED, "[", ("[", [])),
]


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_content_and_calls_are_told_apart(
    form: ToolCallFormat, text: str, expected: tuple[str, list[tuple[str, str]]] | None
) -> None:
    """`None`: no call, so all of it is content."""
    assert read(form, text) == (expected or (text, []))


@pytest.mark.parametrize(("form", "text", "_"), CASES)
def test_how_the_text_is_cut_changes_nothing(
    form: ToolCallFormat, text: str, _: object, seed: int
) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        reader, pieces, position = CallsInText(form), list[Piece](), 0
        while position < len(text):
            size = rng.choice((1, 1, 2, 3, 7))
            pieces += reader.feed(text[position : position + size])
            position += size
        pieces += reader.finish()
        assert joined(pieces) == read(form, text)


def test_arguments_come_while_they_are_written() -> None:
    reader = CallsInText(TAGGED)
    assert reader.feed('<tool_call>{"name": "a", "argum') == [CallPart(0, "a", "")]
    assert reader.feed('ents": {"x": 1') == [CallPart(0, "", '{"x": 1')]
    assert reader.feed("2}") == [CallPart(0, "", "2}")]
    assert reader.feed("}</tool_call>") == [] and reader.finish() == []


@pytest.mark.parametrize(
    ("form", "text", "is_cut"),
    [
        (LISTED, '[{"name": "a", "arguments": {"x"', True),
        (LISTED, '[{"name": "a", ', True),
        (LISTED, '[{"na', False),
        (LISTED, '[{"name": "a", "arguments": {}}, ', False),
        (TAGGED, '<tool_call>{"name": "a", "arguments": {"x"', True),
        (TAGGED, '<tool_call>{"name": "a"}</tool_', False),
        (MISTRAL, "[TOOL_CALLS]a{", True),
        (TAGGED, "no call", False),
    ],
)
def test_a_call_that_the_text_ends_in_is_cut(form: ToolCallFormat, text: str, is_cut: bool) -> None:
    reader = CallsInText(form)
    reader.feed(text)
    assert not reader.is_cut
    reader.finish()
    assert reader.is_cut == is_cut


def test_content_is_held_back_no_longer_than_it_may_be_a_marker() -> None:
    reader = CallsInText(TAGGED)
    assert reader.feed("ab <") == [Content("ab")]
    assert reader.feed("b") == [Content(" <b")]


def test_random_calls_come_back(seed: int) -> None:
    rng = random.Random(seed)

    def value(depth: int) -> object:
        kinds = 6 if depth < 3 else 4
        kind = rng.randrange(kinds)
        if kind == 4:
            return [value(depth + 1) for _ in range(rng.randrange(3))]
        if kind == 5:
            return {text(): value(depth + 1) for _ in range(rng.randrange(3))}
        return (text(), rng.random() * 100, rng.random() < 0.5, None)[kind]

    def text() -> str:
        return "".join(
            rng.choice('ab"\\{}[],:;<> \n\u00e9\U0001f600') for _ in range(rng.randrange(8))
        )

    for _ in range(200):
        arguments = {text(): value(0) for _ in range(rng.randrange(4))}
        call = {"name": "f", "arguments": arguments}
        ascii_only = rng.random() < 0.5
        written = json.dumps(call, ensure_ascii=ascii_only)
        for form, whole in (
            (TAGGED, f"<tool_call>{written}</tool_call>"),
            (MISTRAL, f"[TOOL_CALLS][{written}]"),
            (BARE, written),
            (LISTED, f"[{written}]"),
        ):
            content, calls = read(form, whole)
            assert content == "" and [name for name, _ in calls] == ["f"]
            assert json.loads(calls[0][1]) == arguments


def test_a_forced_call_is_its_arguments() -> None:
    reader = OneCall("f")
    assert reader.feed('{"x"') == [CallPart(0, "f", '{"x"')]
    assert reader.feed(": 1}") == [CallPart(0, "", ": 1}")] and reader.finish() == []
    assert OneCall("f").finish() == [CallPart(0, "f", "")]


def test_formats_are_found_in_templates() -> None:
    assert find_format("x <tool_call> {{ tool }} </tool_call>") is TAGGED
    assert find_format("<tool_call>\n<function=name>") is None
    assert find_format("{{ '[TOOL_CALLS] [' }}") is MISTRAL
    assert find_format("""{{ '"parameters": ' }} <|eot_id|>""") is BARE
    assert find_format("{{ messages }}") is None
