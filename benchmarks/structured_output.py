"""What structured output costs with a vocabulary of 128,000 tokens: Baton's grammars (llguidance
behind a front of its own) beside xgrammar, over the corpus of JSON schemas of the test suite.

    OMP_NUM_THREADS=1 python -m benchmarks.structured_output both --cache FOLDER --out FILE
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sysconfig
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal, localcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import click
import jsonschema
import numpy as np
import numpy.typing as npt
import tokenizers
from rich.progress import track

from benchmarks import harness
from engine.grammar.compile_server import compile_grammar
from engine.grammar.config import GrammarLimits
from engine.grammar.llguidance_source import source
from engine.grammar.state import CompiledGrammar, GrammarState
from engine.grammar.vocabulary import GrammarTokenizer, Vocabulary
from engine.request import GrammarKind, GrammarSpec

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "tests" / "unit" / "engine" / "grammar" / "json_schemas.jsonl"
SEED = 1
VOCAB_SIZE = 128_000
END = 1
_MOST_BYTES = {"prose": 40 << 20, "json": 30 << 20, "py": 150 << 20}
"""Text to train on, by kind; Python's fills up to its number."""
_MOST_FILE_BYTES = 1_000_000
_KINDS = {".txt": "prose", ".md": "prose", ".rst": "prose", ".html": "prose"}

Words = npt.NDArray[np.int32]


# -- vocabulary


def texts() -> Iterator[str]:
    """Find text files of the standard library and the installed packages, prose first."""
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
    """Train the tokenizer and write `folder/tokenizer.json`, unless it is there."""
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
    """The interface of one output under way, which a grammar constrains."""

    def mask(self) -> Words: ...
    def accept(self, token_id: int) -> bool: ...
    def look_ahead(self) -> None: ...
    def is_over(self) -> bool: ...
    def error(self) -> str: ...


class Engine(Protocol):
    """The interface of a grammar engine: it compiles schemas. `compile` raises what the engine
    refuses with."""

    token_bytes: Sequence[bytes]

    def compile(self, schema: str) -> Any: ...
    def begin(self, compiled: Any) -> Output: ...


class BatonOutput:
    """An output that a GrammarState of Baton constrains."""

    def __init__(self, state: GrammarState) -> None:
        self._state = state

    def mask(self) -> Words:
        return self._state.mask()

    def accept(self, token_id: int) -> bool:
        return self._state.accept(token_id)

    def look_ahead(self) -> None:
        self._state.forced()

    def is_over(self) -> bool:
        return self._state.is_complete

    def error(self) -> str:
        return "" if self._state.error is None else str(self._state.error)


class Baton:
    """Baton's grammars, as the engine uses them."""

    def __init__(self, folder: Path) -> None:
        self.limits = GrammarLimits()
        self.tokenizer = GrammarTokenizer.load(folder, VOCAB_SIZE)
        self.token_bytes: Sequence[bytes] = self.tokenizer.vocabulary.token_bytes

    def compile(self, schema: str) -> CompiledGrammar:
        grammar = source(GrammarSpec(GrammarKind.JSON_SCHEMA, schema), self.limits)
        matcher = compile_grammar(self.tokenizer, grammar, self.limits)
        return CompiledGrammar(matcher, self.tokenizer, self.limits)

    def begin(self, compiled: CompiledGrammar) -> Output:
        return BatonOutput(compiled.state(frozenset({END})))


class XgrammarOutput:
    """An output that a GrammarMatcher of xgrammar constrains."""

    def __init__(self, matcher: Any, words: Words) -> None:
        self._matcher = matcher
        self._words = words

    def mask(self) -> Words:
        self._matcher.fill_next_token_bitmask(self._words)
        words: Words = self._words[0]
        return words

    def accept(self, token_id: int) -> bool:
        return bool(self._matcher.accept_token(token_id))

    def look_ahead(self) -> None:
        if not self._matcher.is_terminated():
            self._matcher.find_jump_forward_string()

    def is_over(self) -> bool:
        return bool(self._matcher.is_terminated())

    def error(self) -> str:
        return ""


class Xgrammar:
    """xgrammar's grammars, as a server would use them."""

    def __init__(self, folder: Path) -> None:
        self.token_bytes: Sequence[bytes] = Vocabulary.load(folder, VOCAB_SIZE).token_bytes
        try:
            import xgrammar  # a peer: the product does not need it
        except ModuleNotFoundError:
            raise click.UsageError("needs the peer: pip install xgrammar") from None
        self._matcher_of = xgrammar.GrammarMatcher
        info = xgrammar.TokenizerInfo(
            list(self.token_bytes), vocab_size=VOCAB_SIZE, stop_token_ids=[END]
        )
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._words: Words = np.zeros((1, VOCAB_SIZE // 32), dtype=np.int32)

    def compile(self, schema: str) -> Any:
        return self._compiler.compile_json_schema(schema, any_whitespace=False, strict_mode=True)

    def begin(self, compiled: Any) -> Output:
        return XgrammarOutput(self._matcher_of(compiled), self._words)


ENGINES: dict[str, Callable[[Path], Engine]] = {"baton": Baton, "xgrammar": Xgrammar}


# -- draws


class Draws:
    """Draws random tokens among the allowed ones."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._closing = np.exp([_closing(data) for data in token_bytes])
        self._single = np.array([1.0 if len(data) == 1 else 2e-9 for data in token_bytes])
        self._closing[END] = self._single[END] = 1e9

    def draw(self, allowed: npt.NDArray[np.intp], rng: np.random.Generator, closes: bool) -> int:
        """Draw one of `allowed`, evenly, or in favour of what closes."""
        if not closes:
            return int(rng.choice(allowed))
        weights = (self._closing if rng.random() < 0.5 else self._single)[allowed].cumsum()
        place = int(np.searchsorted(weights, rng.random() * weights[-1], side="right"))
        return int(allowed[min(place, len(allowed) - 1)])


def _closing(data: bytes) -> float:
    closers = sum(data.count(char) for char in (b'"', b"]", b"}"))
    openers = sum(data.count(char) for char in (b"[", b"{", b","))
    return max(-50.0, 3.0 * closers - 3.0 * openers - 0.5 * len(data) - 9.0 * data.isdigit())


class Costs:
    """Seconds that each token of an output cost: its mask (CPU time), and following it."""

    def __init__(self) -> None:
        self.mask_s = array("d")
        self.follow_s = array("d")


# -- outputs


def follow(output: Output, draws: Draws, num_tokens: int, costs: Costs) -> tuple[list[int], str]:
    """Draw an output token by token. Returns: its ids, and how it ended: "finished", "cut", or what
    is wrong."""
    rng = np.random.default_rng([SEED, 0])
    token_ids: list[int] = []
    while not output.is_over():
        if len(token_ids) >= num_tokens:
            return token_ids, "cut"
        began = time.thread_time()
        words = output.mask()
        costs.mask_s.append(time.thread_time() - began)
        allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return token_ids, output.error() or "a dead end"
        token_id = draws.draw(allowed, rng, len(token_ids) >= 0.4 * num_tokens)
        began = time.perf_counter()
        is_taken = output.accept(token_id)
        if is_taken:
            output.look_ahead()
        costs.follow_s.append(time.perf_counter() - began)
        if not is_taken:
            return token_ids, output.error() or "an allowed token is refused"
        if token_id == END:
            break
        token_ids.append(token_id)
    return token_ids, output.error() or "finished"


# -- whether an output satisfies its schema


def validator(schema: Any) -> Any:
    """Make a jsonschema validator that also knows OpenAPI's `nullable`. A `pattern` is met if it
    matches with ASCII or with Unicode classes: ECMA 262 has ASCII \\w and \\d but a Unicode \\s,
    which no flag of `re` gives. So it may accept too much, such as an accented letter for \\w."""
    written = _with_null(_read(json.dumps(schema)))
    made = jsonschema.validators.validator_for(written, jsonschema.Draft202012Validator)
    own = jsonschema.validators.extend(made, {"pattern": _pattern})
    return own(written, format_checker=made.FORMAT_CHECKER)


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[Any]:
    flags = (re.ASCII, re.UNICODE)
    if isinstance(instance, str) and not any(re.search(pattern, instance, one) for one in flags):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _with_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_null(value) for key, value in schema.items()}
    if inner.pop("nullable", False) is True:
        return {"anyOf": [inner, {"type": "null"}]}
    return inner


def _read(text: str) -> Any:
    """JSON, with decimals for floats, so that multiples of 0.01 are."""

    def number(text: str) -> Decimal | float:
        exponent = re.search(r"[eE][+-]?(\d+)$", text)
        return float(text) if exponent and len(exponent.group(1)) > 2 else Decimal(text)

    return json.loads(text, parse_float=number)


def is_valid(schema: Any, data: bytes) -> bool:
    """Whether an output satisfies its schema."""
    with localcontext(prec=500):
        try:
            return bool(validator(schema).is_valid(_read(data.decode())))
        except ValueError:
            return False


# -- one engine


def measure(engine: Engine, num_tokens: int) -> dict[str, Any]:
    """Measure all schemas on one engine, in this process."""
    entries = [json.loads(line) for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    draws, costs = Draws(engine.token_bytes), Costs()
    first = engine.compile('{"type": "object", "properties": {"a": {"type": "string"}}}')
    follow(engine.begin(first), draws, num_tokens, Costs())
    compiled: dict[str, Any] = {}
    refused: dict[str, str] = {}
    compile_s: list[float] = []
    before = _resident_bytes()
    for entry in track(entries, "compiling", console=harness.CONSOLE):
        text = json.dumps(entry["schema"])
        began = time.perf_counter()
        try:
            compiled[entry["name"]] = engine.compile(text)
        except Exception as error:  # whatever the engine refuses with
            refused[entry["name"]] = str(error).strip()[:200]
        else:
            compile_s.append(time.perf_counter() - began)
    grown_mb = round((_resident_bytes() - before) / 1e6, 1)
    endings: Counter[str] = Counter()
    invalid, broken = [], {}
    for entry in track(entries, "following", console=harness.CONSOLE):
        if entry["name"] not in compiled:
            continue
        output = engine.begin(compiled[entry["name"]])
        token_ids, ending = follow(output, draws, num_tokens, costs)
        endings[ending if ending in ("finished", "cut") else "broken"] += 1
        data = b"".join(engine.token_bytes[token_id] for token_id in token_ids)
        if ending == "finished" and not is_valid(entry["schema"], data):
            invalid.append([entry["name"], data.decode(errors="replace")[:300]])
        elif ending not in ("finished", "cut"):
            broken[entry["name"]] = ending
    return {
        "accepted": len(compiled),
        "schemas": len(entries),
        "refused": refused,
        "compile_ms": quantiles(compile_s, 1e3),
        "mask_cpu_us": quantiles(costs.mask_s, 1e6),
        "follow_us": quantiles(costs.follow_s, 1e6),
        "compile_mb": grown_mb,
        "outputs": dict(endings),
        "valid": endings["finished"] - len(invalid),
        "invalid": invalid,
        "broken": broken,
    }


def quantiles(seconds: Sequence[float], scale: float) -> dict[str, float]:
    """Quantiles of the values, the longest and the mean."""
    values = np.asarray(seconds) * scale
    found = {f"p{share}": np.quantile(values, share / 100) for share in (50, 90, 99)}
    found |= {"max": values.max(), "mean": values.mean()}
    return {"num": len(values)} | {name: round(float(one), 2) for name, one in found.items()}


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def _rows(results: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """p50 / p90 / p99 / max of each engine."""
    lines: dict[str, Callable[[dict[str, Any]], str]] = {
        "accepted": lambda one: f"{one['accepted']} of {one['schemas']}",
        "compile ms": lambda one: _line(one["compile_ms"]),
        "mask us of CPU time": lambda one: _line(one["mask_cpu_us"]),
        "follow us": lambda one: _line(one["follow_us"]),
        "memory MB": lambda one: str(one["compile_mb"]),
        "valid": lambda one: f"{one['valid']} of {one['outputs'].get('finished', 0)} finished",
        "broken outputs": lambda one: str(one["outputs"].get("broken", 0)),
    }
    for label, cell in lines.items():
        yield {"": label} | {name: cell(one) for name, one in results.items()}


def _line(found: dict[str, float]) -> str:
    values = (f"{found[name]:,.6g}" for name in ("p50", "p90", "p99", "max") if name in found)
    return " / ".join(values)


_CACHE = click.option("--cache", type=click.Path(path_type=Path), help="where tokenizer.json is")
_TOKENS = click.option("--tokens", default=60, help="most tokens of an output")


@harness.case
@click.argument("name", type=click.Choice(list(ENGINES)))
@_CACHE
@_TOKENS
def one(name: str, cache: Path | None, tokens: int) -> dict[str, Any]:
    """One engine, in this process."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        folder = cache or Path(temporary)
        train(folder)
        return measure(ENGINES[name](folder), tokens)


@harness.case
@_CACHE
@_TOKENS
def both(cache: Path | None, tokens: int) -> dict[str, Any]:
    """Milliseconds to compile, microseconds of a mask and of a token accepted, memory, and whether
    outputs satisfy their schemas: Baton's grammars beside xgrammar.

    Vocabulary: a byte-level BPE that is trained on the prose, Python and JSON files of the standard
    library and the installed packages, and kept in --cache, since that takes minutes. It differs a
    little from machine to machine; both engines have the same one. Each engine runs in a process of
    its own, on one thread, with the same schemas, token bytes and seeds. Per schema: compile, then
    follow an output of random draws among what is allowed, which favour what closes after two
    fifths of --tokens. "follow" is to accept a token and to look what is forced after it. "memory"
    is the growth of the resident memory while all compiled grammars are kept. "valid" are the
    finished outputs that satisfy their schema by jsonschema, formats included.
    """
    results = {}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as temporary:
        folder = cache or Path(temporary)
        train(folder)
        arguments = ["--cache", str(folder), "--tokens", str(tokens)]
        for name in ENGINES:
            argv = harness.module("benchmarks.structured_output", "one", name, *arguments)
            with harness.child(*argv, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                last = process.stdout.read().splitlines()
            if not last:
                raise RuntimeError(f"{name}: the process ended without a result")
            results[name] = json.loads(last[-1])
    harness.show("p50 / p90 / p99 / max", list(_rows(results)))
    libraries = {name: version(name) for name in ("llguidance", "xgrammar", "tokenizers")}
    return {"vocabulary": VOCAB_SIZE, "engines": results, **libraries}


main = harness.program(__doc__, both, one)

if __name__ == "__main__":
    main()
