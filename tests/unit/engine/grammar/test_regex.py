"""Patterns: what is taken, what is refused by name, and ranges of characters."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequest
from engine.grammar import regex
from engine.grammar.ranges import Ranges, minus, union


def parse(pattern: str) -> regex.Node:
    return regex.parse(pattern, max_num_levels=8, max_num_repeats=100)


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("a(?=b)", "character 1: a look-ahead"),
        ("a(?!b)", "a look-ahead"),
        ("(?<=b)a", "character 0: a look-behind"),
        ("(?<!b)a", "a look-behind"),
        ("(?P<x>a)(?P=x)", "(?...)"),
        ("(?i)a", "(?...)"),
        ("(?>a)", "(?...)"),
        (r"(a)\1", r"\1"),
        (r"\bfoo", r"\b"),
        (r"\Afoo", r"\A"),
        (r"\pL", r"\p"),
        (r"\x4", "2 hex digits"),
        (r"\u12g4", "4 hex digits"),
        ("a\\", "a backslash at the end"),
        ("a^b", "^ that is not at an end"),
        ("(^a)", "^ that is not at an end"),
        ("a$b", "$ that is not at an end"),
        ("*a", "* with nothing to repeat"),
        ("a|+", "+ with nothing to repeat"),
        ("{2}", "{ with nothing to repeat"),
        ("a**", "two quantifiers"),
        ("a{2}{3}", "two quantifiers"),
        ("a++", "a possessive quantifier"),
        ("a{3,2}", "at least 3 and at most 2"),
        ("a{101}", "beyond 100"),
        ("a{0,99999999999999999999}", "beyond 100"),
        ("(a", "character 0: an unmatched ("),
        ("a)", "an unmatched )"),
        ("[a", "an unmatched ["),
        ("[z-a]", "a bad range"),
        (r"[a-\d]", "a bad range"),
        ("[[:alpha:]]", "a POSIX class"),
        ("[a&&b]", "a set operation"),
        ("(" * 9 + ")" * 9, "deeper than 8 levels"),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_place(pattern: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^grammar: pattern, character \d+: ") as refusal:
        parse(pattern)
    assert problem in str(refusal.value)
    assert refusal.value.field == "grammar"


@pytest.mark.parametrize("pattern", [r"[^\d\D]", "a[^\x00-\U0010ffff]", r"([^\w\W]|a[^\s\S])+"])
def test_a_pattern_that_nothing_matches_is_known(pattern: str) -> None:
    assert regex.is_empty(parse(pattern))


def test_options_that_nothing_matches_are_left_out() -> None:
    node = parse(r"a[^\d\D]?|b|[^\w\W]c")
    assert not regex.is_empty(node)
    assert regex.write(regex.prune(node)) == "(a|b)"


def test_what_is_written_has_one_range_beyond_ascii_per_class() -> None:
    assert regex.write(parse("[a-cé-ü日-本Z]")) == "([Za-c]|[é-ü]|[日-本])"
    assert regex.write(parse(r"[\n-]+x{0}(?:)\.")) == r"([\u000a\-])+\."


@pytest.mark.parametrize("pattern", ['"', r"(Z|foo\\Z)", r"a\n*", r"[\t\n]", '(Z|a"Z)'])
def test_what_json_must_escape_is_found(pattern: str) -> None:
    assert regex.escaped_in_json(parse(pattern)) in ('"', "\\", "\n", "\t")
    assert regex.escaped_in_json(parse(r"[^a-z]+(Z|\s)")) is None


def test_in_json_classes_lose_what_must_be_escaped() -> None:
    assert regex.write(regex.in_json(parse('(Z|[a"]b)'))) == "(Z|ab)"
    assert regex.write(regex.in_json(parse(r"[\s\\]{2}"))) == "( ){2,2}"


ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))),
    max_size=6,
)


def members(found: Ranges) -> set[int]:
    return {code for low, high in found for code in range(low, high + 1)}


@given(ranges, ranges)
def test_union_and_minus_are_those_of_sets(
    left: list[tuple[int, int]], right: list[tuple[int, int]]
) -> None:
    whole = union([*left, *right])
    assert members(whole) == members(tuple(left)) | members(tuple(right))
    assert all(a[1] + 1 < b[0] for a, b in itertools.pairwise(whole))
    rest = minus(union(left), union(right))
    assert members(rest) == members(tuple(left)) - members(tuple(right))
