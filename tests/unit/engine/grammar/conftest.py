"""Grammars compiled in this process on the bundled tokenizer, for tests of everything but the
process that compiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.grammar.config import GrammarLimits
from engine.grammar.vocabulary import GrammarTokenizer, Vocabulary
from tests.unit.engine.grammar.driver import BUNDLED, VOCAB_SIZE, Grammars, write_bytes_only
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
    made = Grammars(GrammarTokenizer.of(vocabulary, tokenizer), GrammarLimits())
    yield made
    made.filler.check_integrity()
    made.filler.close()


@pytest.fixture(scope="package")
def make_grammars(
    tokenizer: Tokenizer, vocabulary: Vocabulary
) -> Iterator[Callable[..., Grammars]]:
    """`make_grammars(vocabulary=None, tokenizer=None, <limits>)`: by default the bundled ones'."""
    made: list[Grammars] = []

    def make(
        own: Vocabulary | None = None, cut: Tokenizer | None = None, **limits: Any
    ) -> Grammars:
        known = GrammarTokenizer.of(own or vocabulary, cut or tokenizer)
        made.append(Grammars(known, GrammarLimits(**limits)))
        return made[-1]

    yield make
    for one in made:
        one.filler.close()


@pytest.fixture(scope="package")
def bytes_only(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a byte-level tokenizer.json without merges: ids 0 to 255 are the bytes, 256 is
    the end."""
    folder = tmp_path_factory.mktemp("bytes_only")
    write_bytes_only(folder)
    return folder
