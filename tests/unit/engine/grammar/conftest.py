"""Grammars compiled in this process on the bundled tokenizer, for tests of everything but the
process that compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.grammar.compile_server import compile_grammar, tokenizer_info
from engine.grammar.config import GrammarLimits
from engine.grammar.jump import Cutter
from engine.grammar.source import source
from engine.grammar.state import GrammarState, Surroundings, new_state
from engine.grammar.vocabulary import Vocabulary
from engine.grammar.workers import Workers
from engine.request import GrammarSpec
from tests.unit.engine.grammar.driver import BUNDLED, END, VOCAB_SIZE, Grammars
from tokens.tokenizer import Tokenizer


@pytest.fixture(scope="package")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(BUNDLED)


@pytest.fixture(scope="package")
def vocabulary() -> Vocabulary:
    return Vocabulary.load(BUNDLED, VOCAB_SIZE)


@pytest.fixture(scope="package")
def grammars(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Iterator[Grammars]:
    """States of specs, on the bundled tokenizer."""
    made = grammars_of(vocabulary, tokenizer, GrammarLimits())
    yield made
    made.surroundings.workers.check_integrity()
    made.surroundings.workers.close()


def grammars_of(
    vocabulary: Vocabulary, tokenizer: Tokenizer | None, limits: GrammarLimits
) -> Grammars:
    cutter = None if tokenizer is None else Cutter(tokenizer, vocabulary)
    surroundings = Surroundings(vocabulary, limits, Workers("test", 4), cutter)
    info = tokenizer_info(vocabulary)

    def state(spec: GrammarSpec, ends: frozenset[int] = frozenset({END})) -> GrammarState:
        checked = source(spec, limits)
        return new_state(compile_grammar(info, checked.form, checked.text), surroundings, ends)

    return Grammars(surroundings, state)


@pytest.fixture(scope="package")
def make_grammars() -> Iterator[Callable[..., Grammars]]:
    """`make_grammars(vocabulary, tokenizer, limits)`."""
    made: list[Grammars] = []

    def make(
        vocabulary: Vocabulary, tokenizer: Tokenizer | None = None, **limits: float
    ) -> Grammars:
        made.append(grammars_of(vocabulary, tokenizer, GrammarLimits(**limits)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.surroundings.workers.close()


@pytest.fixture(scope="package")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer.json without merges: ids 0 to 255 are the bytes, 256 is
    the end."""
    from tests.unit.engine.grammar.driver import write_bytes_only

    folder = tmp_path_factory.mktemp("bytes_only")
    write_bytes_only(folder)
    return folder
