"""Every output of a grammar is in its language, by checkers that know nothing of the library."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest

from tests.unit.engine.grammar.driver import (
    END,
    Grammars,
    check_output,
    choice_spec,
    ebnf_spec,
    random_regex,
    random_schema,
    regex_spec,
    run,
    schema_spec,
)


@pytest.mark.parametrize("jump", [False, True], ids=["plain", "jump"])
def test_every_output_of_random_schemas_is_valid(
    grammars: Grammars, seed: int, scale: Callable[[int], int], jump: bool
) -> None:
    rng = random.Random(f"{seed} schemas {jump}")
    num_forced = num_cut = 0
    for _ in range(scale(200)):
        schema = random_schema(rng)
        for _ in range(3):
            output = run(grammars, grammars.state(schema_spec(schema)), rng, jump=jump)
            if not output.is_whole:  # random draws may lose their way in what has no end
                num_cut += 1
                continue
            check_output(schema, grammars.text(output.token_ids))
            num_forced += output.num_forced
    assert (num_forced > 0) == jump
    assert num_cut <= max(2, 0.05 * scale(200) * 3)


@pytest.mark.parametrize("jump", [False, True], ids=["plain", "jump"])
def test_every_output_of_random_patterns_matches(
    grammars: Grammars, seed: int, scale: Callable[[int], int], jump: bool
) -> None:
    rng = random.Random(f"{seed} patterns {jump}")
    num_cut = 0
    for _ in range(scale(200)):
        pattern = random_regex(rng)
        for _ in range(3):
            output = run(grammars, grammars.state(regex_spec(pattern)), rng, jump=jump)
            if not output.is_whole:
                num_cut += 1
                continue
            text = grammars.text(output.token_ids)
            assert re.fullmatch(pattern, text, re.ASCII), (pattern, text)
    assert num_cut <= max(2, 0.05 * scale(200) * 3)


@pytest.mark.parametrize("kind", ["pattern", "schema"])
def test_a_mask_has_just_what_the_parser_takes(
    grammars: Grammars, seed: int, scale: Callable[[int], int], kind: str
) -> None:
    """Or, where the text that follows is forced, the one token with which the tokenizer goes on."""
    rng = random.Random(f"{seed} masks {kind}")
    for _ in range(scale(60)):
        spec = (
            regex_spec(random_regex(rng)) if kind == "pattern" else schema_spec(random_schema(rng))
        )
        state = grammars.state(spec)
        for _ in range(8):
            allowed = set(grammars.allowed(state)) - {END}
            taken = {
                token_id
                for token_id, data in enumerate(grammars.token_bytes)
                if data and state.fork().accept(token_id)
            }
            forced = state.forced()
            assert allowed == ({forced[0]} if forced else taken), (spec, state.token_ids)
            assert allowed <= taken
            if not allowed:
                break
            assert state.accept(rng.choice(sorted(allowed)))


def test_recursive_schemas(grammars: Grammars, seed: int) -> None:
    rng = random.Random(f"{seed} recursive")
    schema = {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
                },
                "required": ["value"],
            }
        },
    }
    for _ in range(10):
        output = run(grammars, grammars.state(schema_spec(schema)), rng)
        check_output(schema, grammars.text(output.token_ids))


def test_choices_are_whole_and_all_can_come(grammars: Grammars, seed: int) -> None:
    rng = random.Random(f"{seed} choices")
    choices = ("yes", "yes, sir", 'a "quote" \\ and\ttab', "日本", "")
    found = {
        grammars.text(run(grammars, grammars.state(choice_spec(*choices)), rng).token_ids)
        for _ in range(60)
    }
    # By chance one of five is missed in 60 draws with under 1e-5 even at a twentieth each.
    assert found <= set(choices)
    assert len(found) >= 3


@pytest.mark.parametrize(
    "text",
    [
        'root ::= "(" root ")" root | "x"{1,2} # balanced',
        'start: "(" start ")" start | X // balanced\nX: /x{1,2}/',
    ],
    ids=["gbnf", "lark"],
)
def test_ebnf(grammars: Grammars, seed: int, text: str) -> None:
    rng = random.Random(f"{seed} ebnf")
    for _ in range(10):
        output = run(grammars, grammars.state(ebnf_spec(text)), rng, num_free=5)
        if not output.is_whole:
            continue
        level = 0
        for character in grammars.text(output.token_ids):
            level += {"(": 1, ")": -1}.get(character, 0)
            assert level >= 0
        assert level == 0


@pytest.mark.parametrize(
    ("pattern", "inside", "outside"),
    [
        (r"a{2,3}", ["aa", "aaa"], ["a", "aaaa", ""]),
        (r"^(ab|c)+$", ["ab", "cab"], ["", "abx"]),
        (r"^a$|b", ["a", "b"], ["ab"]),
        (r"[^\W\d]+", ["abc_"], ["a1", "é"]),
        (r"\d\s", ["1 "], ["\u0663 ", "1\u00a0"]),
        (r".", ["é", "\t", "日"], ["\n", "ab"]),
        (r"\x41\u00e9\/", ["Aé/"], ["A"]),
        (r"[]a-]+", ["]-a"], ["b"]),
        (r"a{0,2}?b*?", ["", "aab"], ["aaa"]),
        (r"(?P<year>\d{4})?-(?<m>\d)", ["-1", "2024-5"], ["20-5"]),
        ("()", [""], ["a"]),
        ("(|a)b{0}c?", ["", "a", "ac"], ["b"]),
        ('["\\\\]', ['"', "\\"], ["a"]),
    ],
)
def test_what_a_pattern_takes_is_what_re_takes(
    grammars: Grammars, pattern: str, inside: list[str], outside: list[str]
) -> None:
    for text in [*inside, *outside]:
        state = grammars.state(regex_spec(pattern))
        byte_ids = {data[0]: i for i, data in _single_bytes(grammars)}
        is_in = all(state.accept(byte_ids[byte]) for byte in text.encode()) and state.accept(1)
        assert is_in == (text in inside), text
        if is_in and "<m>" not in pattern:
            assert re.fullmatch(pattern, text, re.ASCII), text


def _single_bytes(grammars: Grammars) -> list[tuple[int, bytes]]:
    return [(i, data) for i, data in enumerate(grammars.token_bytes) if len(data) == 1]


def test_a_json_pattern_is_about_the_value(grammars: Grammars, seed: int) -> None:
    """A quote that the pattern wants is escaped in the JSON."""
    rng = random.Random(f"{seed} quotes")
    schema = {"type": "string", "pattern": '^["\\\\\\n\\x01a]{3}$'}
    for _ in range(20):
        text = grammars.text(run(grammars, grammars.state(schema_spec(schema)), rng).token_ids)
        assert re.fullmatch('["\\\\\\n\\x01a]{3}', json.loads(text)), text
