"""Structured output over the real wire, with the small bundled model: both legs follow one grammar,
and the outputs are those of one engine alone.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import checkpoints
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from process.errors import BatonError, InvalidArgument
from protos import common_pb2, prefill_pb2
from tests.harness.bundled_pair import MODEL, PROMPT, WAIT_S, alone, workers
from tests.harness.prefill_decode_pair import PrefillCall, Sample, whole
from tokens.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures("one_compile_process")

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Tom"]}, "likes_soup": {"type": "boolean"}},
    "required": ["name", "likes_soup"],
    "additionalProperties": False,
}
COLOURS = ["red", "green", "dark green"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = load_engine(EngineConfig(model=MODEL, device="cpu", kv_bytes=8 * 1024 * 1024))
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoints.resolve(MODEL, files="tokenizer").path)


def _text(tokenizer: Tokenizer, sample: Sample) -> str:
    return tokenizer.decode(sample.token_ids)


def _plain(samples: list[Sample]) -> list[tuple[list[int], int]]:
    return [(sample.token_ids, sample.finish_reason) for sample in samples]


async def test_each_kind_gives_what_it_says_and_what_one_engine_gives(
    tmp_path: Path, engine: Engine, tokenizer: Tokenizer
) -> None:
    kinds: list[tuple[dict[str, Any], Callable[[str], Any]]] = [
        ({"choice": common_pb2.StringList(values=COLOURS)}, lambda text: text in COLOURS),
        (
            {"regex": r"(once|twice), [a-z]{2,6}\."},
            lambda text: re.fullmatch(r"(once|twice), [a-z]{2,6}\.", text),
        ),
        (
            {"json_schema": json.dumps(SCHEMA)},
            lambda text: set(json.loads(text)) == {"name", "likes_soup"},
        ),
        (
            {"ebnf": 'root ::= "yes" | "no, " root'},
            lambda text: re.fullmatch(r"(no, )*yes", text) or text.startswith("no, "),
        ),
    ]
    async with workers(tmp_path) as w:
        for index, (grammar, is_right) in enumerate(kinds):
            asked = {"max_tokens": 60, "temperature": 0.8, "n": 3, "ignore_eos": False, **grammar}
            samples = await w.generate(name=f"r{index}", **asked)
            ordered = [samples[i] for i in range(3)]
            assert _plain(ordered) == _plain(alone(engine, **asked)), grammar
            for sample in ordered:
                assert is_right(_text(tokenizer, sample)), (grammar, _text(tokenizer, sample))
        await w.check()


async def test_decode_goes_on_in_the_middle_of_a_grammar(
    tmp_path: Path, engine: Engine, tokenizer: Tokenizer, seed: int, scale: Callable[[int], int]
) -> None:
    """Wherever the first leg's tokens end, forced ones included, the second knows where it is."""
    rng = random.Random(seed)
    letters = "abcdefgh"
    async with workers(tmp_path) as w:
        for index in range(scale(60)):
            words = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(4)]
            pattern = f"({words[0]}|{words[1]}) {words[2]} [{letters}]{{1,3}} {words[3]}"
            asked: dict[str, Any] = {
                "max_tokens": 60,
                "temperature": rng.choice((0.0, 1.0)),
                "seed": rng.randrange(2**32),
                "regex": pattern,
                "ignore_eos": False,
            }
            (sample,) = (await w.generate(name=f"r{index}", **asked)).values()
            assert re.fullmatch(pattern, _text(tokenizer, sample)), pattern
            assert _plain([sample]) == _plain(alone(engine, **asked))
            assert sample.finish_reason in (
                common_pb2.FINISH_REASON_GRAMMAR,
                common_pb2.FINISH_REASON_EOS,
            )
        await w.check()


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"regex": "("}, "sampling.regex"),
    ({"regex": "a{30000}"}, "sampling.regex"),
    ({"ebnf": "root ::= missing"}, "sampling.ebnf"),
    ({"json_schema": '{"type": 7}'}, "sampling.json_schema"),
    ({"json_schema": "false"}, "sampling.json_schema"),
]


async def test_a_grammar_that_cannot_be_followed_is_its_senders_mistake(tmp_path: Path) -> None:
    async with workers(tmp_path) as w:
        for grammar, field in BROKEN:
            fields = w.fields(PROMPT, "r", "", "", max_tokens=4, **grammar)
            with pytest.raises(BatonError) as caught:
                await whole(
                    PrefillCall(w.stubs[0], prefill_pb2.PrefillRequest(**fields), timeout_s=WAIT_S)
                )
            error = caught.value
            assert isinstance(error, InvalidArgument), error
            assert error.field == field
        # And nobody else is hurt.
        await w.generate(name="after", max_tokens=4)
        await w.check()
