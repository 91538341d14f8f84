"""JSON schemas as users write them: pydantic's, OpenAPI's, tools', zod's, of extraction tasks, of
configuration files, and probes of the test suite's keywords (json_schemas.jsonl). Most are
accepted, each refusal names keyword and path, and each output of what is accepted satisfies the
schema by jsonschema, formats included."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.grammar.compile_server import _compile
from tests.conftest import third
from tests.unit.engine.grammar.driver import END, Grammars, check_output, run, schema_spec

CORPUS: dict[str, Any] = {
    one["name"]: one["schema"]
    for one in map(
        json.loads,
        (Path(__file__).parent / "json_schemas.jsonl").read_text(encoding="utf-8").splitlines(),
    )
}
LEAST_ACCEPTED = 0.93


@pytest.fixture(scope="module")
def answers(grammars: Grammars) -> dict[str, dict[str, Any]]:
    """What the compiling process answers of each."""
    return {
        name: _compile(grammars.tokenizer, schema_spec(schema), grammars.limits)
        for name, schema in CORPUS.items()
    }


def test_most_are_accepted(answers: dict[str, dict[str, Any]]) -> None:
    assert len(CORPUS) >= 400
    refused = {name: one["problem"] for name, one in answers.items() if not one["ok"]}
    assert len(refused) <= (1 - LEAST_ACCEPTED) * len(CORPUS), refused


def test_each_refusal_names_a_keyword_that_is_at_its_path(
    answers: dict[str, dict[str, Any]],
) -> None:
    for name, answer in answers.items():
        if answer["ok"]:
            continue
        found = re.match(r"schema at (\S+): ", answer["problem"])
        assert found is not None, (name, answer["problem"])
        assert _is_there(CORPUS[name], found.group(1)), (name, answer["problem"])


def _is_there(schema: Any, path: str) -> bool:
    """Whether the schema has something at `$.a.b[0]`, or at `#/$defs/x.a`, where a key may have
    dots."""
    if not path:
        return True
    for prefix in ("$", "#"):
        if path.startswith(prefix) and path[len(prefix) :][:1] in (".", "/", "", "["):
            path = path[len(prefix) :]
            break
    path = re.sub(r"\[(\d+)\]", r".\1", path).lstrip("./")
    return _walks(schema, path, schema)


def _walks(value: Any, path: str, root: Any) -> bool:
    if not path:
        return True
    if isinstance(value, dict):
        if path.startswith("$ref"):
            target = root
            for part in value["$ref"].split("/")[1:]:
                target = target[part]
            return _walks(target, path[len("$ref") :].lstrip("."), root)
        return any(
            path.startswith(key) and _walks(value[key], path[len(key) :].lstrip("./"), root)
            for key in value
        )
    if isinstance(value, list):
        index, _, rest = path.partition(".")
        return index.isdigit() and _walks(value[int(index)], rest, root)
    return False


@pytest.mark.timeout(1800)  # all of the stated count
def test_outputs_satisfy_their_schema(
    grammars: Grammars, answers: dict[str, dict[str, Any]], seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(f"{seed} corpus")
    num_whole, num_samples = 0, scale(20)
    accepted = third(name for name in CORPUS if answers[name]["ok"])
    for name in accepted:
        compiled = grammars.compiled(schema_spec(CORPUS[name]))
        for _ in range(num_samples):
            output = run(grammars, compiled.state(frozenset({END})), rng, jump=True, num_free=40)
            if output.is_whole:
                num_whole += 1
                check_output(CORPUS[name], grammars.text(output.token_ids))
    assert num_whole > 0.8 * num_samples * len(accepted)
