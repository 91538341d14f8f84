"""Specs of each kind, their bounds, and grammars without any text."""

from __future__ import annotations

from typing import Any

import pytest
import xgrammar

from engine.errors import InvalidRequest
from engine.grammar.config import GrammarLimits
from engine.grammar.emptiness import UnknownForm, has_text
from engine.grammar.source import EBNF, source
from engine.request import GrammarKind, GrammarSpec
from process.settings import SettingsError
from tests.unit.engine.grammar.driver import choice_spec, ebnf_spec, regex_spec, schema_spec

LIMITS = GrammarLimits(max_spec_bytes=200, max_num_choices=3, max_num_levels=4, max_num_repeats=50)
ALL_BYTES = frozenset(range(256))


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (regex_spec("a" * 201), "201 bytes are more than 200"),
        (choice_spec("é" * 60, "é" * 60), "240 bytes are more than 200"),
        (choice_spec(), "choices: there is none"),
        (choice_spec("a", "b", "c", "d"), "choices: 4 are more than 3"),
        (choice_spec("a\0"), "choices: NUL"),
        (choice_spec("\ud800"), "no Unicode text"),
        (GrammarSpec(GrammarKind.CHOICE, "x", ("a",)), "text: "),
        (GrammarSpec(GrammarKind.REGEX, "x", ("a",)), "choices: "),
        (regex_spec("[^\\s\\S]"), "it matches no text"),
        (schema_spec({"not": {}}), "$.not"),
        (ebnf_spec('root ::= "a" (="b")'), "line 1: a look-ahead"),
        (ebnf_spec("root ::= Token(3)"), "Token is not supported"),
        (ebnf_spec('x ::= "a"\nroot ::= TagDispatch(("a", x))'), "line 2: TagDispatch"),
        (ebnf_spec('root ::= (((((("a"))))))'), "deeper than 4 levels"),
        (ebnf_spec('root ::= "a"{51}'), "a repetition beyond 50"),
        (ebnf_spec('root ::= "a"{1, 51}'), "a repetition beyond 50"),
        (ebnf_spec('root ::= "a'), 'an unmatched "'),
        (ebnf_spec("root ::= [a"), "an unmatched ["),
        (ebnf_spec("root ::= \0"), "NUL"),
    ],
)
def test_bounds_and_names(spec: GrammarSpec, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar: ") as refusal:
        source(spec, LIMITS)
    assert problem in str(refusal.value)


def test_what_stands_in_a_literal_class_or_comment_is_text() -> None:
    text = 'root ::= "(((((Token(=" [((((({"] # (((((= Token {99}'
    assert source(ebnf_spec(text), LIMITS).text == text


class Counted(str):
    """Text that counts how often it is searched for lines."""

    __slots__ = ("num_counts",)

    def count(self, *arguments: Any) -> int:
        self.num_counts = getattr(self, "num_counts", 0) + 1
        return super().count(*arguments)


def test_lines_are_counted_for_a_refusal_only() -> None:
    """Once per piece would be quadratic."""
    text = Counted('root ::= "a"\n' * 4)
    assert source(ebnf_spec(text), LIMITS).text == text
    assert not hasattr(text, "num_counts")
    wrong = Counted('root ::= "a"\n' * 4 + '(= "b")')
    with pytest.raises(InvalidRequest, match="line 5: a look-ahead"):
        source(ebnf_spec(wrong), LIMITS)
    assert wrong.num_counts == 1


def test_a_choice_is_escaped() -> None:
    checked = source(choice_spec('a"\\\n\x01f', "a"), LIMITS)
    assert (checked.form, checked.text) == (EBNF, 'root ::= "a\\"\\\\\\n\\u0001f" | "a"')


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('root ::= "a" root', False),
        ('root ::= "a" root | "b"', True),
        ("root ::= a\na ::= b\nb ::= a", False),
        ('root ::= a{0,3} "x"\na ::= "a" a', True),
        ('root ::= a{1,3} "x"\na ::= "a" a', False),
        ('root ::= ""', True),
        ('root ::= [a-c]* root | root "x"', False),
        ('root ::= "x" (a | b)\na ::= a\nb ::= "b"?', True),
    ],
)
def test_a_grammar_without_text_is_known(text: str, expected: bool) -> None:
    serialised = str(xgrammar.Grammar.from_ebnf(text).serialize_json())
    assert has_text(serialised, ALL_BYTES) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('root ::= "abc"', True),
        ('root ::= "abd"', False),
        ('root ::= "abd" | "c"', True),
        ("root ::= [d-z]", False),
        ("root ::= [^a-b]", True),
        ("root ::= [^a-c]", False),
        ("root ::= [é]", False),
    ],
)
def test_text_must_be_of_the_vocabularys_bytes(text: str, expected: bool) -> None:
    serialised = str(xgrammar.Grammar.from_ebnf(text).serialize_json())
    if text == "root ::= [^a-c]":  # beyond ASCII too many to try: it counts as spellable
        assert has_text(serialised, frozenset(b"abc")) is True
        return
    assert has_text(serialised, frozenset(b"abc")) is expected


def test_an_unknown_serialised_form_is_not_guessed_at() -> None:
    with pytest.raises(UnknownForm, match="v99"):
        has_text('{"__VERSION__": "v99"}', ALL_BYTES)


def test_limits_are_positive() -> None:
    with pytest.raises(SettingsError, match="token_cpu_s"):
        GrammarLimits(token_cpu_s=0)
