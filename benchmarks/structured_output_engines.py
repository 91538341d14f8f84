"""What benchmarks.structured_output compares: a vocabulary of 128,000 tokens, two engines behind
one interface, how outputs are drawn, and what is kept of them. Timed calls do nothing here but pass
on."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers
import xgrammar

from engine.grammar.compile_server import compile_grammar
from engine.grammar.config import GrammarLimits
from engine.grammar.source import source
from engine.grammar.state import CompiledGrammar, GrammarState
from engine.grammar.vocabulary import GrammarTokenizer, Vocabulary
from engine.request import GrammarKind, GrammarSpec

VOCAB_SIZE = 128_000
END = 1
_MOST_BYTES = {"prose": 40 << 20, "json": 30 << 20, "py": 150 << 20}
"""Text to train on, by kind; Python's fills up to its number."""
_MOST_FILE_BYTES = 1_000_000
_KINDS = {".txt": "prose", ".md": "prose", ".rst": "prose", ".html": "prose"}

Words = npt.NDArray[np.int32]


# -- vocabulary


def texts() -> Iterator[str]:
    """Files of the standard library and the installed packages, prose first."""
    paths = sysconfig.get_paths()
    found: dict[str, list[Path]] = {kind: [] for kind in _MOST_BYTES}
    for folder in (Path(paths["stdlib"]), Path(paths["purelib"])):
        for path in sorted(folder.rglob("*")):
            kind = _KINDS.get(path.suffix, path.suffix[1:])
            is_other = "site-packages" in path.relative_to(folder).parts
            if kind in found and not is_other and path.is_file():
                found[kind].append(path)
    num_bytes = 0
    for kind, most in _MOST_BYTES.items():
        num_of_kind = num_bytes if kind == "py" else 0
        for path in found[kind]:
            size = path.stat().st_size
            if num_of_kind < most and size <= _MOST_FILE_BYTES:
                num_of_kind += size
                num_bytes += size
                yield path.read_text(encoding="utf-8", errors="ignore")


def train(folder: Path) -> None:
    """Make `folder/tokenizer.json`, unless it is there."""
    if (folder / "tokenizer.json").exists():
        return
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts(), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))


# -- engines


class Output(Protocol):
    """One output on its way."""

    def mask(self) -> Words: ...
    def accept(self, token_id: int) -> bool: ...
    def is_forced(self) -> bool: ...
    def is_over(self) -> bool: ...
    def error(self) -> str: ...


class Engine(Protocol):
    """Compiles schemas. `compile` raises what the engine refuses with."""

    token_bytes: Sequence[bytes]

    def compile(self, schema: str) -> Any: ...
    def begin(self, compiled: Any) -> Output: ...


class BatonOutput:
    """A GrammarState."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state

    def mask(self) -> Words:
        return self._state.mask()

    def accept(self, token_id: int) -> bool:
        return self._state.accept(token_id)

    def is_forced(self) -> bool:
        return bool(self._state.forced())

    def is_over(self) -> bool:
        return self._state.is_complete

    def error(self) -> str:
        return "" if self._state.error is None else str(self._state.error)


class Baton:
    """As the engine uses it."""

    def __init__(self, folder: Path, limits: GrammarLimits) -> None:
        self.limits = limits
        self.tokenizer = GrammarTokenizer.load(folder, VOCAB_SIZE)
        self.token_bytes: Sequence[bytes] = self.tokenizer.vocabulary.token_bytes

    def compile(self, schema: str) -> CompiledGrammar:
        grammar = source(GrammarSpec(GrammarKind.JSON_SCHEMA, schema), self.limits)
        matcher = compile_grammar(self.tokenizer, grammar, self.limits)
        return CompiledGrammar(matcher, self.tokenizer, self.limits)

    def begin(self, compiled: CompiledGrammar) -> Output:
        return BatonOutput(compiled.state(frozenset({END})))


class XgrammarOutput:
    """A GrammarMatcher."""

    def __init__(self, matcher: Any, words: Words) -> None:
        self._matcher = matcher
        self._words = words

    def mask(self) -> Words:
        self._matcher.fill_next_token_bitmask(self._words)
        words: Words = self._words[0]
        return words

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def is_forced(self) -> bool:
        return not self._matcher.is_terminated() and bool(self._matcher.find_jump_forward_string())

    def is_over(self) -> bool:
        return bool(self._matcher.is_terminated())

    def error(self) -> str:
        return ""


class Xgrammar:
    """As a server would use it."""

    def __init__(self, folder: Path, _: GrammarLimits) -> None:
        self.token_bytes: Sequence[bytes] = Vocabulary.load(folder, VOCAB_SIZE).token_bytes
        info = xgrammar.TokenizerInfo(
            list(self.token_bytes), vocab_size=VOCAB_SIZE, stop_token_ids=[END]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words: Words = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, any_whitespace=False, strict_mode=True)

    def begin(self, compiled: Any) -> Output:
        return XgrammarOutput(xgrammar.GrammarMatcher(compiled), self._words)


ENGINES: dict[str, Callable[[Path, GrammarLimits], Engine]] = {"baton": Baton, "xgrammar": Xgrammar}


# -- draws


class Draws:
    """Random tokens among the allowed ones."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._closing = np.exp([_closing(data) for data in token_bytes])
        self._single = np.array([1.0 if len(data) == 1 else 2e-9 for data in token_bytes])
        self._closing[END] = self._single[END] = 1e9

    def draw(self, allowed: npt.NDArray[np.intp], rng: np.random.Generator, closes: bool) -> int:
        """One of `allowed`, evenly, or in favour of what closes."""
        if not closes:
            return int(rng.choice(allowed))
        weights = (self._closing if rng.random() < 0.5 else self._single)[allowed].cumsum()
        place = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
        return int(allowed[min(place, len(allowed) - 1)])


def _closing(data: bytes) -> float:
    closers = sum(data.count(char) for char in (b'"', b"]", b"}"))
    openers = sum(data.count(char) for char in (b"[", b"{", b","))
    return max(-50.0, 3.0 * closers - 3.0 * openers - 0.5 * len(data) - 9.0 * data.isdigit())


ROW = np.dtype(
    [
        *(("s", "f8"), ("cpu_s", "f8"), ("follow_s", "f8"), ("forced", "?")),
        *(("place", "i4"), ("allowed", "i4"), ("schema", "i4"), ("output", "i4")),
    ]
)
"""One token: seconds of its mask and of following it, and which it was."""
Rows = npt.NDArray[np.void]


class Costs:
    """Rows of all tokens, in memory that is there from the beginning."""

    def __init__(self, most: int) -> None:
        self._rows: Rows = np.zeros(most, ROW)
        self._rows["output"] = -1
        self.num = 0

    def add(self, *row: float) -> None:
        """One token, as ROW has it."""
        self._rows[self.num] = row
        self.num += 1

    @property
    def rows(self) -> Rows:
        """Those that were added."""
        return self._rows[: self.num]
