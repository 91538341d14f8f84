"""JSON schemas as users write them: pydantic's, OpenAPI's, tools', zod's, of extraction tasks, of
configuration files, and probes of the test suite's keywords (json_schemas.jsonl). Most are
accepted, each refusal names keyword and path, and each output of what is accepted satisfies the
schema by jsonschema, formats included."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from engine.grammar.compile_server import _compile
from engine.request import GrammarKind, GrammarSpec
from tests.conftest import third
from tests.unit.engine.grammar.driver import END, Grammars, run, schema_spec

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
        name: _compile(
            grammars.tokenizer,
            GrammarSpec(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
            grammars.limits,
        )
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


def _validator(schema: Any) -> Any:
    """With OpenAPI's `nullable`, which JSON Schema does not know, and patterns as ECMA 262 has
    them: \\w and \\d are ASCII there, in Python they are not."""
    import jsonschema  # takes a second, which only a process that runs this has to spend

    written = _with_null(schema)
    made = jsonschema.validators.validator_for(written, jsonschema.Draft202012Validator)
    own = jsonschema.validators.extend(made, {"pattern": _pattern})
    return own(written, format_checker=made.FORMAT_CHECKER)


def _pattern(_: Any, pattern: str, instance: Any, __: Any) -> Iterator[Any]:
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


def _samples(grammars: Grammars, schema: Any, rng: random.Random, num: int) -> Iterator[str]:
    compiled = grammars.compiled(schema_spec(schema))
    for _ in range(num):
        output = run(grammars, compiled.state(frozenset({END})), rng, jump=True, num_free=40)
        if output.is_whole:
            yield grammars.text(output.token_ids)


@pytest.mark.timeout(1800)  # all of the stated count
def test_outputs_satisfy_their_schema(
    grammars: Grammars,
    answers: dict[str, dict[str, Any]],
    seed: int,
    scale: Callable[[int], int],
) -> None:
    rng = random.Random(f"{seed} corpus")
    num_whole = 0
    num_samples = scale(20)
    accepted = third(name for name in CORPUS if answers[name]["ok"])
    for name in accepted:
        schema = CORPUS[name]
        validator = _validator(_read(json.dumps(schema)))
        for text in _samples(grammars, schema, rng, num_samples):
            num_whole += 1
            problems = list(validator.iter_errors(_read(text)))
            assert not problems, (name, text, problems[0].message)
    assert num_whole > 0.8 * num_samples * len(accepted)
