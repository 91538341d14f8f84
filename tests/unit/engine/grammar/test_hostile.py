"""Grammars that are meant to hurt (hostile_grammars.py): each is refused, or compiled and followed
within its limits; the compiling process lives on, and other grammars are served all the while."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator

import pytest

from engine.errors import InvalidRequest
from engine.grammar import cost_limits
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarTooCostly
from engine.grammar.service import GrammarService
from engine.request import GrammarKind, GrammarSpec
from tests.harness.compile_process import SharedProcess
from tests.unit.engine.grammar.driver import (
    BUNDLED,
    END,
    VOCAB_SIZE,
    Grammars,
    choice_spec,
    random_regex,
)
from tests.unit.engine.grammar.hostile_grammars import hostile_grammars

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import sre_parse

WAIT_S = 60.0
KINDS = {
    "regex": GrammarKind.REGEX,
    "json_schema": GrammarKind.JSON_SCHEMA,
    "lark": GrammarKind.EBNF,
    "gbnf": GrammarKind.EBNF,
}


def spec_of(kind: str, text: str) -> GrammarSpec | None:
    """None for choices that are none."""
    if kind != "choice":
        return GrammarSpec(KINDS[kind], text)
    try:
        choices = json.loads(text)
    except ValueError:
        return None
    is_text = isinstance(choices, list) and all(isinstance(one, str) for one in choices)
    return choice_spec(*choices) if is_text else None


@pytest.fixture
def service(grammars: Grammars) -> Iterator[GrammarService]:
    process = SharedProcess(BUNDLED, VOCAB_SIZE)
    limits = GrammarLimits(max_num_cached=2)
    made = GrammarService(lambda: grammars.tokenizer, limits, process=process)
    yield made
    made.close()
    process.end()
    made.check_integrity()


@pytest.mark.timeout(1800)  # all of the stated count
def test_each_is_refused_or_bounded(
    service: GrammarService, grammars: Grammars, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(f"{seed} hostile")
    every = hostile_grammars()
    assert len(every) >= 500
    for name, kind, text in rng.sample(every, scale(len(every))):
        spec = spec_of(kind, text)
        if spec is None:
            continue
        try:
            compilation = service.submit(spec)
        except InvalidRequest:
            continue
        assert compilation.wait(WAIT_S), name
        service.release(compilation)
        if compilation.error is not None:
            assert isinstance(compilation.error, InvalidRequest), (name, compilation.error)
            continue
        state = compilation.state(frozenset({END}))
        for _ in range(100):
            allowed = [] if state.is_complete else grammars.allowed(state)
            if not allowed:
                break
            state.accept(rng.choice(allowed))
            for token_id in state.forced():
                state.accept(token_id)
        assert state.error is None or isinstance(state.error, GrammarTooCostly), name
    good = service.submit(choice_spec("well"))
    assert good.wait(WAIT_S) and good.error is None


def test_the_shortest_text_of_a_pattern(seed: int, scale: Callable[[int], int]) -> None:
    """As Python's own parser of patterns computes it."""
    rng = random.Random(f"{seed} shortest")
    for _ in range(scale(2000)):
        pattern = random_regex(rng)
        assert cost_limits.shortest(pattern) == sre_parse.parse(pattern).getwidth()[0], pattern


@pytest.mark.parametrize(
    ("check", "value", "problem"),
    [
        (cost_limits.check_pattern, "((a{99}){99}){99}", "970299 are more than"),
        (cost_limits.check_pattern, "a" * 40_000, "characters of a pattern"),
        (cost_limits.check_pattern, "a*" * 501, "repetitions"),
        (
            cost_limits.check_schema,
            {"items": {"const": "x" * 30_000}, "minItems": 100},
            "constants",
        ),
        (
            cost_limits.check_schema,
            {"anyOf": [{"multipleOf": 7919}, {"multipleOf": 0.10007}]},
            "common multiple",
        ),
        (cost_limits.check_schema, [{"$ref": "#"}] * 1001, "references"),
        (cost_limits.check_schema, {"allOf": [{"pattern": "a?" * 300}] * 2}, "repetitions"),
        (cost_limits.check_lark, "start: a::x\n", "parametric"),
        (cost_limits.check_lark, "start: A\n" + "A: /a/ & /b/\n" * 65, "operators"),
        (cost_limits.check_lark, "".join(f"A{index}: /a/\n" for index in range(257)), "terminals"),
        (cost_limits.check_gbnf, "root ::= " + "a" * 9_000, "characters of a grammar"),
    ],
)
def test_what_the_library_does_not_bound_is_refused(
    check: Callable[[object], None], value: object, problem: str
) -> None:
    with pytest.raises(GrammarTooCostly, match=problem):
        check(value)
