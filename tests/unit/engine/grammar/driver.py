"""Drives states with random logits, as an engine would with a model that knows nothing, and makes
random grammars whose outputs can be checked without the grammar library."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from engine.grammar.compile_server import compile_grammar
from engine.grammar.config import GrammarLimits
from engine.grammar.llguidance_source import source
from engine.grammar.mask_filler import MaskFiller
from engine.grammar.state import CompiledGrammar, GrammarState
from engine.grammar.vocabulary import GrammarTokenizer
from engine.request import GrammarKind, GrammarSpec

BUNDLED = Path(__file__).resolve().parents[4] / "checkpoints" / "bundled" / "baton-5m"
VOCAB_SIZE = 2048
END = 1
MakeGrammars = Callable[..., "Grammars"]


class Grammars:
    """States of specs on one tokenizer, compiled in this process."""

    def __init__(self, tokenizer: GrammarTokenizer, limits: GrammarLimits) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.filler = MaskFiller(2)

    @property
    def token_bytes(self) -> tuple[bytes, ...]:
        return self.tokenizer.vocabulary.token_bytes

    def compiled(self, spec: GrammarSpec) -> CompiledGrammar:
        matcher = compile_grammar(self.tokenizer, source(spec, self.limits), self.limits)
        return CompiledGrammar(matcher, self.tokenizer, self.limits)

    def state(self, spec: GrammarSpec, ends: frozenset[int] = frozenset({END})) -> GrammarState:
        return self.compiled(spec).state(ends)

    def masks(self, states: Sequence[GrammarState]) -> torch.Tensor:
        """[number of states, ceil(V / 32)], by way of the filler."""
        self.filler.submit(states)
        assert not self.filler.wait(states, None)
        return torch.from_numpy(np.stack([state.mask() for state in states]))

    def allowed(self, state: GrammarState) -> list[int]:
        """Ids that may come next."""
        return ids_of(self.masks([state])[0])

    def text(self, token_ids: Sequence[int]) -> str:
        return b"".join(self.token_bytes[token_id] for token_id in token_ids).decode()


def ids_of(row: torch.Tensor) -> list[int]:
    """The set bits of a mask's row."""
    return [int(index) for index in _ids(row)]


def _ids(row: torch.Tensor) -> np.ndarray[Any, np.dtype[np.intp]]:
    return np.flatnonzero(np.unpackbits(row.numpy().view(np.uint8), bitorder="little"))


class Output:
    """What one run drew: `token_ids` without the end, and whether it came to one."""

    def __init__(self, token_ids: list[int], is_whole: bool, num_forced: int) -> None:
        self.token_ids = token_ids
        self.is_whole = is_whole
        self.num_forced = num_forced


def run(
    grammars: Grammars,
    state: GrammarState,
    rng: random.Random,
    *,
    jump: bool = False,
    num_free: int = 24,
    max_tokens: int = 600,
) -> Output:
    """Draw by random logits until the end. After `num_free` tokens they favour what closes."""
    noise = np.random.default_rng(rng.randrange(1 << 32))
    token_bytes = grammars.token_bytes
    closing, single = _favours(token_bytes)
    output: list[int] = []
    num_forced = 0
    while not state.is_complete:
        if len(output) >= max_tokens:
            return Output(output, False, num_forced)
        allowed = _ids(grammars.masks([state])[0])
        assert len(allowed), f"a dead end after {grammars.text(output)!r}: {state.error}"
        logits = noise.gumbel(size=len(token_bytes))
        if len(output) >= num_free:
            logits += closing if rng.random() < 0.5 else single
            logits[END] += 20.0
        token_id = int(allowed[np.argmax(logits[allowed])])
        if not token_bytes[token_id]:
            assert state.accept(token_id)
            break
        assert state.accept(token_id)
        output.append(token_id)
        for forced in state.forced() if jump else ():
            assert state.accept(forced)
            output.append(forced)
            num_forced += 1
    return Output(output, True, num_forced)


@functools.lru_cache(maxsize=4)
def _favours(token_bytes: tuple[bytes, ...]) -> tuple[Any, Any]:
    """[V] each: what is added to the logits of tokens that close, and of single bytes."""
    closing = np.array([_closing(data) for data in token_bytes])
    return closing, np.array([20.0 if len(data) == 1 else 0.0 for data in token_bytes])


def _closing(data: bytes) -> float:
    closers = sum(data.count(char) for char in (b'"', b"]", b"}"))
    openers = sum(data.count(char) for char in (b"[", b"{", b","))
    endless = data.isdigit()  # a number may go on for ever
    return 3.0 * closers - 3.0 * openers - 0.5 * len(data) - 9.0 * endless


def write_bytes_only(folder: Path) -> None:
    """A tokenizer in which each byte is a token and nothing merges."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters.update({byte: chr(256 + index) for index, byte in enumerate(others)})
    vocabulary = {characters[byte]: byte for byte in range(256)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    backend.save(str(folder / "tokenizer.json"))


# -- random grammars


def random_regex(rng: random.Random, level: int = 0) -> str:
    """A pattern of the subset that is taken, short enough to come to an end."""
    kind = rng.choice(("literal", "class", "sequence", "sequence", "choice", "repeat", "group"))
    if level > 3 or kind == "literal":
        return rng.choice(("foo", "\\.", "\\\\", "日本", "\\n", "\\$", *'aZ7 "é-/'))
    if kind == "class":
        classes = ("[a-z]", "[^a-z]", "\\d", "\\w", "\\s", ".", "[0-9a-fA-F]", "[^\\d\\s]", "\\D")
        return rng.choice((*classes, "[é-ü]", "[\\]\\[^-]", "[-+*/]", "[\\W]", "\\x41", "\\u0061"))
    if kind == "sequence":
        return "".join(random_regex(rng, level + 1) for _ in range(rng.randint(2, 4)))
    if kind == "choice":
        return "(" + "|".join(random_regex(rng, level + 1) for _ in range(rng.randint(2, 3))) + ")"
    if kind == "group":
        return "(?:" + random_regex(rng, level + 1) + ")"
    if rng.random() < 0.4:
        # Without a bound only of few characters: random draws must find the way out.
        return rng.choice(("[a-f]", "\\d", "(ab|c)", "foo")) + rng.choice(("*", "+", "{2,}", "*?"))
    bounds = rng.choice(("?", "{2}", "{0,3}", "{1,4}"))
    return f"({random_regex(rng, level + 1)}){bounds}"


def random_schema(rng: random.Random, level: int = 0) -> dict[str, Any]:
    """A schema of the subset that is taken."""
    simple = "string pattern format integer number boolean null enum const".split()
    nested = "array tuple object object map anyOf oneOf types".split()
    kind = rng.choice(simple if level > 2 else (*simple, *nested, *nested))
    num_inner = rng.randint(1, 3) if kind in nested else 0
    inner = [random_schema(rng, level + 1) for _ in range(num_inner)]
    if kind == "string":
        low = rng.randint(0, 4)
        return rng.choice(
            (
                {"type": "string"},
                {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 6)},
                {"type": "string", "maxLength": low},
                {"minLength": low},
            )
        )
    if kind == "pattern":
        return {"type": "string", "pattern": f"^{random_regex(rng, 2)}$"}
    if kind == "format":
        return {"type": "string", "format": rng.choice(("date", "uuid", "ipv4", "time", "uri"))}
    if kind == "integer":
        low = rng.randint(-300, 300)
        return rng.choice(
            (
                {"type": "integer"},
                {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 400)},
                {"type": "integer", "exclusiveMinimum": low},
                {"type": "integer", "multipleOf": rng.randint(1, 9)},
            )
        )
    if kind == "number":
        low = round(rng.uniform(-30, 30), rng.randint(0, 4))
        high = round(low + rng.uniform(0.01, 40), 4)
        return rng.choice(
            (
                {"type": "number"},
                {"type": "number", "minimum": low, "maximum": high},
                {"type": "number", "exclusiveMinimum": low, "exclusiveMaximum": high},
                {"type": "number", "exclusiveMaximum": low},
            )
        )
    if kind == "enum":
        values = [1, -7, 2.5, "cat", 'a "b"\\', "é\n", "", None, True, [1, {"x": []}], {"k": 1e-3}]
        return {"enum": rng.sample(values, rng.randint(1, 4))}
    if kind == "const":
        return {"const": rng.choice(["fixed", 12, {"a": [1, None], "b": "\t/"}])}
    if kind == "array":
        low = rng.randint(0, 2)
        high = low + rng.randint(0, 2)
        return {"type": "array", "items": inner[0], "minItems": low, "maxItems": high}
    if kind == "tuple":
        return {"type": "array", "prefixItems": inner, "items": rng.choice((False, inner[0]))}
    if kind == "object":
        names = rng.sample(["name", "a b", 'q"', "é", "x", "1"], len(inner))
        schema = {
            "type": "object",
            "properties": dict(zip(names, inner, strict=True)),
            "required": rng.sample(names, rng.randint(0, len(names))),
            "additionalProperties": False,
        }
        if rng.random() < 0.3:
            schema["minProperties"] = rng.randint(0, len(names))
        return schema
    if kind == "map":
        return {"type": "object", "additionalProperties": inner[0], "maxProperties": 2}
    if kind == "anyOf":
        return {"anyOf": inner, "description": "one of several"}
    if kind == "oneOf":
        return {"oneOf": [{"type": "integer"}, {"const": "none"}, {"type": ["boolean", "null"]}]}
    if kind == "types":
        return {"type": ["integer", "string", "null"], "minimum": 3, "maxLength": 3}
    return {"type": kind}


# -- specs


def schema_spec(schema: Any) -> GrammarSpec:
    return GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def regex_spec(pattern: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.REGEX, pattern)


def ebnf_spec(text: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.EBNF, text)


def choice_spec(*choices: str) -> GrammarSpec:
    return GrammarSpec(GrammarKind.CHOICE, choices=choices)


# -- outputs against their schema, by jsonschema


def check_output(schema: Any, text: str) -> None:
    """With OpenAPI's `nullable`, which JSON Schema does not know."""
    import jsonschema  # takes a second, which only a process that runs this has to spend

    written = _with_null(_read(json.dumps(schema)))
    made = jsonschema.validators.validator_for(written, jsonschema.Draft202012Validator)
    own = jsonschema.validators.extend(made, {"pattern": _pattern})
    problem = next(own(written, format_checker=made.FORMAT_CHECKER).iter_errors(_read(text)), None)
    assert problem is None, (schema, text, problem)


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[Any]:
    """As ECMA 262 has it: \\d and \\w are ASCII, \\s is not."""
    import jsonschema

    if isinstance(instance, str) and not any(
        re.search(pattern, instance, flags) for flags in (re.ASCII, re.UNICODE)
    ):
        yield jsonschema.ValidationError(f"{instance!r} does not match {pattern!r}")


def _with_null(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_with_null(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: _with_null(value) for key, value in schema.items()}
    if inner.get("nullable") is True:
        del inner["nullable"]
        return {"anyOf": [inner, {"type": "null"}]}
    return inner


def _read(text: str) -> Any:
    """JSON, with decimals for floats, so that multiples of 0.01 are."""
    return json.loads(text, parse_float=_decimal)


def _decimal(text: str) -> Decimal | float:
    exponent = re.search(r"[eE][+-]?(\d+)$", text)
    return float(text) if exponent and len(exponent.group(1)) > 2 else Decimal(text)
