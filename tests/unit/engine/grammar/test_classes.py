"""Classes written anew take the same text, and no surrogates."""

from __future__ import annotations

import pytest
from xgrammar import Grammar
from xgrammar.testing import _is_grammar_accept_string

from engine.grammar.classes import rewrite


@pytest.mark.parametrize(
    ("ebnf", "inside", "outside"),
    [
        (
            'root ::= [^\\0-\\x1f\\"\\\\\\r\\n]',
            ["a", "]", "é", "\U0010ffff"],
            ['"', "\\", "\n", "\x01"],
        ),
        ("root ::= [a-cx\\-]", ["a", "x", "-"], ["d", "\\"]),
        ("root ::= [-a]", ["-", "a"], ["b"]),
        ("root ::= [\\]\\^é-ü日-本]*", ["]^é日", ""], ["a"]),
        ('root ::= "[^a]" # [^b]', ["[^a]"], ["b"]),
        ('root ::= "x" [^\\n]{2,3} "y"', ["xééy", "xyyyy"], ["xéy", "x\ny"]),
        ("root ::= [\\U0001F600-\\U0001F602]+", ["\U0001f601"], ["\U0001f603"]),
    ],
)
def test_the_language_stays(ebnf: str, inside: list[str], outside: list[str]) -> None:
    printed = str(Grammar.from_ebnf(ebnf))
    for text in (ebnf, printed):
        written = Grammar.from_ebnf(rewrite(text))
        for one in inside:
            assert _is_grammar_accept_string(written, one), one
        for one in outside:
            assert not _is_grammar_accept_string(written, one), one


def test_the_bytes_of_a_surrogate_are_no_text() -> None:
    """They are what a negated class takes as it is: the reason for writing it anew."""
    from xgrammar.testing import _get_matcher_from_grammar

    surrogate = b"\xed\xa0\x80"
    assert _get_matcher_from_grammar(Grammar.from_ebnf("root ::= [^a]")).accept_string(surrogate)
    written = Grammar.from_ebnf(rewrite("root ::= [^a]"))
    assert not _get_matcher_from_grammar(written).accept_string(surrogate)
    counted = Grammar.from_ebnf(rewrite(str(Grammar.from_ebnf("root ::= [^a]{1,9}"))))
    assert not _get_matcher_from_grammar(counted).accept_string(surrogate)


def test_a_counted_class_stays_one_class() -> None:
    """A choice of classes in its place is right, too, at 500 times the cost of a mask."""
    printed = str(Grammar.from_ebnf('root ::= [^a]{1,9} [^b] "x"'))
    assert rewrite(printed).count(" | ") == printed.count(" | ") + 2
