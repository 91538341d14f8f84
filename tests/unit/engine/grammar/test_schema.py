"""JSON schemas: what is refused, by its path and keyword; what a rewrite lets through."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.grammar.compile_server import GrammarError, _located
from engine.grammar.config import GrammarLimits
from engine.grammar.json_schema import lower
from tests.unit.engine.grammar.driver import Grammars, run, schema_spec

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
        (
            obj(a={"type": "array", "contains": {}, "maxContains": 2}),
            "$.properties.a.contains",
        ),
        (
            {"propertyNames": {"pattern": "a"}, "patternProperties": {"b": {}}},
            "$.propertyNames",
        ),
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


CAT = {**obj(kind={"const": "cat"}, lives={"type": "integer"}), "required": ["kind"]}
DOG = {**obj(kind={"const": "dog"}, good={"type": "boolean"}), "required": ["kind"]}
REWRITTEN: dict[str, Any] = {
    "one of with a tag": {
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {"Cat": CAT, "Dog": DOG},
    },
    "one of by keys": {
        "oneOf": [
            {**obj(a={"type": "integer"}), "required": ["a"]},
            {**obj(b={"type": "integer"}), "required": ["b"]},
        ]
    },
    "one of required": {
        **obj(a={"type": "integer"}, b={"type": "integer"}),
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "one of types": {"oneOf": [{"type": "integer"}, {"type": ["null", "boolean"]}, {"const": "x"}]},
    "all of objects": {
        "allOf": [
            {**obj(a={"type": "integer"}), "required": ["a"]},
            {**obj(b={"type": "string"}, a={"minimum": 3}), "required": ["b"]},
        ]
    },
    "a base with more keys": {
        "$ref": "#/definitions/Base",
        "properties": {"more": {"type": "boolean"}},
        "required": ["more"],
        "definitions": {"Base": {**obj(id={"type": "integer"}), "required": ["id"]}},
    },
    "all of, closed": {
        "allOf": [{**obj(a={"type": "integer"}), "additionalProperties": False}, obj(b={})]
    },
    "draft 7 tuple": {
        "type": "array",
        "items": [{"type": "integer"}, {"type": "string"}],
        "additionalItems": False,
        "minItems": 2,
    },
    "unique": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "uniqueItems": True},
    "unique of many": {
        "type": "array",
        "items": {"enum": list("abcdefgh")},
        "uniqueItems": True,
        "minItems": 1,
    },
    "decimal": {
        "anyOf": [
            {"type": "number"},
            {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"},
        ]
    },
    "password": {
        "type": "string",
        "pattern": r"^(?=.*[A-Z])(?=.*\d)[A-Za-z\d]{3,9}$",
    },
    "pattern and length": {"type": "string", "pattern": "^[a-z]*$", "minLength": 2, "maxLength": 5},
    "names of an enum": {
        "type": "object",
        "propertyNames": {"enum": ["x", "y"]},
        "additionalProperties": {"type": "integer"},
    },
    "names of a pattern": {
        "type": "object",
        "propertyNames": {"pattern": "^[a-c]{2}$"},
        "additionalProperties": {"type": "integer"},
        "maxProperties": 2,
    },
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^x-[a-z]{1,3}$": {"type": "integer"}},
        "additionalProperties": False,
    },
    "dependent": {
        **obj(card={"type": "integer"}, address={"type": "string", "maxLength": 3}),
        "dependentRequired": {"card": ["address"]},
    },
    "conditions": {
        **obj(
            country={"enum": ["US", "NL", "FR"]},
            code={"type": "string"},
            vat={"type": "boolean"},
        ),
        "required": ["country", "code"],
        "allOf": [
            {
                "if": obj(country={"const": "US"}),
                "then": obj(code={"pattern": "^[0-9]{5}$"}),
                "else": obj(code={"pattern": "^[A-Z]{2}$"}),
            },
            {
                "if": {**obj(vat={"const": True}), "required": ["vat"]},
                "then": obj(country={"enum": ["NL", "FR"]}),
            },
        ],
    },
    "not of values": {"type": "string", "maxLength": 3, "not": {"enum": ["a", "ab", ""]}},
    "not of keys": {
        **obj(a={"type": "integer"}, b={"type": "integer"}),
        "not": {"required": ["a", "b"]},
    },
    "dependent schemas": {
        **obj(card={"type": "integer"}, address={"type": "string", "maxLength": 3}),
        "dependentSchemas": {"card": {"required": ["address"]}},
    },
    "contains": {
        "type": "array",
        "items": {"type": ["integer", "boolean"]},
        "contains": {"type": "boolean"},
        "maxItems": 3,
    },
    "at least one key": {
        **obj(a={"type": "integer"}, b={"type": "integer"}, c={"type": "integer"}),
        "minProperties": 1,
        "maxProperties": 2,
    },
    "draft 4 bounds": {"type": "integer", "minimum": 3, "exclusiveMinimum": True, "maximum": 6},
    "an anchor": {
        "type": "array",
        "items": {"$ref": "#leaf"},
        "maxItems": 2,
        "$defs": {"l": {"$anchor": "leaf", "type": "integer"}},
    },
    "required without a property": {**obj(a={"type": "integer"}), "required": ["b"]},
    "not null": {"not": {"type": "null"}, "maxLength": 5},
    "annotations": {
        "type": "string",
        "maxLength": 4,
        "title": "T",
        "example": "x",
        "x-order": 3,
        "contentMediaType": "text/plain",
        "format": "password",
    },
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_is_rewritten_still_satisfies_the_schema(
    name: str, grammars: Grammars, seed: int
) -> None:
    import jsonschema  # takes a second, which only a process that runs this has to spend

    rng = random.Random(f"{seed} {name}")
    schema = REWRITTEN[name]
    draft = {
        "draft 7 tuple": jsonschema.Draft7Validator,
        "draft 4 bounds": jsonschema.Draft4Validator,
    }
    validator = draft.get(name, jsonschema.Draft202012Validator)(schema)
    compiled = grammars.compiled(schema_spec(schema))
    num_whole = 0
    for _ in range(20):
        output = run(grammars, compiled.state(frozenset({1})), rng)
        if output.is_whole:
            num_whole += 1
            validator.validate(json.loads(grammars.text(output.token_ids)))
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
