"""Specs of each kind, their bounds, and what a grammar's text may not ask for."""

from __future__ import annotations

import pytest

from engine.errors import InvalidRequest
from engine.grammar.compile_server import GrammarError
from engine.grammar.config import GrammarLimits
from engine.grammar.llguidance_source import source
from engine.request import GrammarKind, GrammarSpec
from process.settings import SettingsError
from tests.unit.engine.grammar.driver import (
    Grammars,
    choice_spec,
    ebnf_spec,
    regex_spec,
    schema_spec,
)

LIMITS = GrammarLimits(max_spec_bytes=200, max_num_choices=3, max_num_levels=4, max_num_repeats=50)


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (regex_spec("a" * 201), "201 bytes are more than 200"),
        (choice_spec("é" * 60, "é" * 60), "240 bytes are more than 200"),
        (choice_spec(), "choices: there is none"),
        (choice_spec("a", "b", "c", "d"), "choices: 4 are more than 3"),
        (choice_spec("\ud800"), "no Unicode text"),
        (GrammarSpec(GrammarKind.CHOICE, "x", ("a",)), "text: "),
        (GrammarSpec(GrammarKind.REGEX, "x", ("a",)), "choices: "),
        (schema_spec({"not": {"format": "uri"}}), "$.not"),
        (ebnf_spec("start: <|end|>"), "line 1: a special token (<|end|>) is not supported"),
        (ebnf_spec('a: "x"\nstart: a <[3]>'), "line 2: a special token"),
        (ebnf_spec('%llguidance {"no_forcing": false}\nstart: "a"'), "%llguidance"),
        (ebnf_spec("start: %json {}"), "line 1: %json is not supported"),
        (ebnf_spec('start: a\na[stop="x"]: /y*/'), "line 2: options of a rule"),
        (ebnf_spec('root ::= ("a"'), "grammar text: "),
        (ebnf_spec("root ::= missing"), "Rule 'missing' not found"),
        (ebnf_spec('nothing ::= "a"'), "No 'root' rule"),
    ],
)
def test_bounds_and_names(spec: GrammarSpec, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar: ") as refusal:
        source(spec, LIMITS)
    assert problem in str(refusal.value)


def test_what_stands_in_a_literal_pattern_or_comment_is_text() -> None:
    text = 'start: "<|end|> %json [stop=1]" /<a> %json/ // <|end|> %json\n# <b>\n'
    assert source(ebnf_spec(text), LIMITS).endswith(text)


@pytest.mark.parametrize("text", ['root ::= "\\u00e9\\u0041"', 'root ::= "é" [\\x41]'])
def test_escapes_of_gbnf_are_characters(text: str, grammars: Grammars) -> None:
    state = grammars.state(ebnf_spec(text))
    for byte in "éA".encode():
        assert state.accept(grammars.token_bytes.index(bytes([byte])))
    assert state.is_complete


def test_a_choice_is_escaped(grammars: Grammars) -> None:
    choice = 'a"\\\n\x01f'
    state = grammars.state(choice_spec(choice, choice))
    for byte in choice.encode():
        assert state.accept(grammars.token_bytes.index(bytes([byte])))
    assert state.is_complete


def test_a_pattern_that_matches_nothing_is_found_when_it_is_tried_out(grammars: Grammars) -> None:
    with pytest.raises(GrammarError, match="no text"):
        grammars.compiled(regex_spec("x[^\\s\\S]"))


def test_limits_are_positive() -> None:
    with pytest.raises(SettingsError, match="max_num_token_fuel"):
        GrammarLimits(max_num_token_fuel=0)
