"""JSON schemas: what is refused, by its path and keyword; what a rewrite lets through."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.grammar.compile_server import GrammarError, _located
from engine.grammar.config import GrammarLimits
from engine.grammar.json_schema import lower
from tests.unit.engine.grammar.driver import Grammars, check_output, run, schema_spec

LIMITS = GrammarLimits(max_num_levels=6, max_num_repeats=1000, max_num_choices=5)


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        lower(json.dumps(schema), LIMITS)
    assert caught.value.field == "grammar"
    return str(caught.value)


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {"type": "string", "pattern": "a"}}, "$.not"),
        ({"if": {"pattern": "a"}, "then": {}}, "$.if"),
        (
            {"unevaluatedProperties": False, "if": obj(a={"const": 1}), "then": obj(b={})},
            "$.unevaluatedProperties",
        ),
        (obj(a={"type": "array", "uniqueItems": True}), "$.properties.a.uniqueItems"),
        (obj(a={"type": "array", "contains": {}, "maxContains": 2}), "$.properties.a.contains"),
        ({"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}}, "$.propertyNames"),
        ({"unevaluatedThings": False}, "$.unevaluatedThings"),
        ({"tipe": "integer"}, "$.tipe"),
        ({"anyOf": []}, "$.anyOf"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "$.$ref"),
        ({"$ref": "#b", "$defs": {"a": {"$anchor": "a"}}}, "$.$ref"),
        ({"$ref": "http://x/y"}, "$.$ref"),
        ({"minLength": 3, "minimum": 3}, "$.minLength"),
        ({"type": "string", "maxLength": 1001}, "$.maxLength"),
        ({"type": "string", "minLength": -1}, "$.minLength"),
        ({"type": "number", "multipleOf": 0}, "$.multipleOf"),
        ({"type": "number", "minimum": "3"}, "$.minimum"),
        ({"enum": []}, "$.enum"),
        ({"enum": [1, 2, 3, 4, 5, 6]}, "$.enum"),
        ({"type": "string", "const": 1}, "$.const"),
        ({"type": "foo"}, "$.type"),
        (obj(a=3), "$.properties.a"),
        ([], "$"),
    ],
)
def test_what_would_be_ignored_is_refused_with_its_place(schema: Any, place: str) -> None:
    assert refusal(schema).startswith(f"grammar: schema at {place}: ")


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        (obj(a={"type": "string", "pattern": "(?<=a)b"}), "$.properties.a.pattern"),
        (obj(a={"oneOf": [{"type": "integer"}, {"type": "number"}]}), "$.properties.a.oneOf"),
        (
            {
                "$ref": "#/$defs/a",
                "$defs": {
                    "a": {
                        **obj(b={"type": "integer", "minimum": 5, "maximum": 3}),
                        "required": ["b"],
                    }
                },
            },
            "$.$defs.a.properties.b.maximum",
        ),
        ({"type": "array", "items": {"type": "string", "pattern": "("}}, "$.items.pattern"),
        ({**obj(a={}), "minProperties": 2}, "$.minProperties"),
    ],
)
def test_what_the_library_refuses_is_told_with_its_place(
    schema: Any, place: str, grammars: Grammars
) -> None:
    with pytest.raises(GrammarError):
        grammars.state(schema_spec(schema))
    told = _located(grammars.tokenizer, json.dumps(schema), GrammarLimits(), "refused")
    assert told.startswith(f"schema at {place}: ")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no JSON"),
        ('{"type": "string", "type": "null"}', "twice"),
        ('{"const": NaN}', "NaN"),
        ("[" * 100_000, "no JSON"),
    ],
)
def test_what_is_no_json_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        lower(text, LIMITS)


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(7):
        schema = {"type": "array", "items": schema}
    assert "deeper than 6 levels" in refusal(schema)


REWRITTEN: dict[str, Any] = {
    one["name"]: one["schema"]
    for one in map(
        json.loads, Path(__file__).with_name("rewritten_schemas.jsonl").read_text().splitlines()
    )
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_is_rewritten_still_satisfies_the_schema(
    name: str, grammars: Grammars, seed: int
) -> None:
    rng = random.Random(f"{seed} {name}")
    compiled = grammars.compiled(schema_spec(REWRITTEN[name]))
    num_whole = 0
    for _ in range(20):
        output = run(grammars, compiled.state(frozenset({1})), rng)
        if output.is_whole:
            num_whole += 1
            check_output(REWRITTEN[name], grammars.text(output.token_ids))
    assert num_whole > 10


def test_nullable_is_null_or_the_rest(grammars: Grammars, seed: int) -> None:
    """OpenAPI's keyword, which a validator does not know."""
    rng = random.Random(f"{seed} nullable")
    compiled = grammars.compiled(schema_spec({"type": "boolean", "nullable": True}))
    found = {
        grammars.text(run(grammars, compiled.state(frozenset({1})), rng).token_ids)
        for _ in range(60)
    }
    assert found == {"null", "true", "false"}


def test_keys_beside_properties_are_there_where_the_schema_says_so(grammars: Grammars) -> None:
    def takes(schema: Any, text: str) -> bool:
        state = grammars.state(schema_spec(schema))
        ids = {data: token_id for token_id, data in enumerate(grammars.token_bytes)}
        return all(state.accept(ids[bytes([byte])]) for byte in text.encode())

    closed = obj(a={"type": "integer"})
    assert takes(closed, '{"a": 1}') and not takes(closed, '{"a": 1, "b')
    for more in ({"additionalProperties": True}, {"additionalProperties": {"type": "integer"}}):
        assert takes({**closed, **more}, '{"a": 1, "b": 2}')
    assert not takes({**closed, "additionalProperties": {"type": "integer"}}, '{"a": 1, "b": "')
