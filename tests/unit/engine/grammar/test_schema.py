"""Schemas: every keyword that the grammar compiler ignores or gets wrong is refused, by its
place."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.errors import InvalidRequest
from engine.grammar.config import GrammarLimits
from engine.grammar.schema import normalise

LIMITS = GrammarLimits(max_num_levels=6, max_num_repeats=1000, max_num_choices=5)


def refusal(schema: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        normalise(json.dumps(schema), LIMITS)
    assert caught.value.field == "grammar"
    return str(caught.value)


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"not": {"type": "null"}}, "$.not"),
        ({"if": {}, "then": {}}, "$.if"),
        (obj(a={"type": "array", "uniqueItems": True}), "$.properties.a.uniqueItems"),
        (obj(a={"type": "array", "contains": {}}), "$.properties.a.contains"),
        ({"type": "array", "unevaluatedItems": False}, "$.unevaluatedItems"),
        ({"type": "object", "patternProperties": {}}, "$.patternProperties"),
        ({"type": "object", "propertyNames": {}}, "$.propertyNames"),
        ({"type": "object", "dependentRequired": {}}, "$.dependentRequired"),
        ({"type": "object", "dependencies": {}}, "$.dependencies"),
        ({"type": "string", "nullable": True}, "$.nullable"),
        ({"type": "string", "contentEncoding": "base64"}, "$.contentEncoding"),
        ({"$dynamicRef": "#x"}, "$.$dynamicRef"),
        ({"tipe": "integer"}, "$.tipe"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "$.allOf"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "$.oneOf[1]"),
        ({"oneOf": [{"const": 1}, {"enum": [2, 1.0]}]}, "$.oneOf[1]"),
        ({"anyOf": [{"type": "integer"}], "minimum": 3}, "$.minimum"),
        ({"anyOf": []}, "$.anyOf"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {}}, "minimum": 3}, "$.minimum"),
        ({"$ref": "#/$defs/b", "$defs": {"a": {}}}, "$.$ref"),
        ({"$ref": "http://x/y"}, "$.$ref"),
        ({"$ref": "#/properties/a", "properties": {"a": {}}}, "$.properties"),
        (obj(a={"$defs": {}}), "$.properties.a.$defs"),
        ({"minimum": 3}, "$.minimum"),
        ({"type": "string", "minimum": 3}, "$.minimum"),
        ({"type": "string", "pattern": "a", "maxLength": 2}, "$.pattern"),
        ({"type": "string", "format": "idn-email"}, "$.format"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "$.minLength"),
        ({"type": "string", "maxLength": 1001}, "$.maxLength"),
        ({"type": "integer", "minimum": 2.5}, "$.minimum"),
        ({"type": "integer", "minimum": 1 << 60}, "$.minimum"),
        ({"type": "integer", "exclusiveMinimum": True}, "$.exclusiveMinimum"),
        ({"type": "number", "multipleOf": 0.1}, "$.multipleOf"),
        ({"type": "number", "minimum": 1e300}, "$.minimum"),
        ({"type": "number", "minimum": 1e-9}, "$.minimum"),
        ({"type": "array", "items": [{"type": "integer"}]}, "$.items"),
        ({"type": "array", "prefixItems": [{}], "minItems": 2}, "$.minItems"),
        ({"type": "object", "required": ["b"], "properties": {"a": {}}}, "$.required"),
        ({**obj(a={}), "additionalProperties": True}, "$.additionalProperties"),
        ({**obj(a={}), "minProperties": 2}, "$.minProperties"),
        ({**obj(a={}, b={}), "required": ["a", "b"], "maxProperties": 1}, "$.maxProperties"),
        ({"type": "object", "minProperties": 2}, "$.minProperties"),
        ({"enum": []}, "$.enum"),
        ({"enum": [1, 2, 3, 4, 5, 6]}, "$.enum"),
        ({"type": "string", "const": 1}, "$"),
        ({"const": 1 << 60}, "$"),
        ({"type": "foo"}, "$.type"),
        (obj(a=False), "$.properties.a"),
        (obj(a=3), "$.properties.a"),
        ([], "$"),
    ],
)
def test_what_would_be_ignored_is_refused_with_its_place(schema: Any, place: str) -> None:
    assert refusal(schema).startswith(f"grammar: schema at {place}: ")


def test_a_pattern_is_refused_as_a_pattern_is() -> None:
    assert "a look-ahead" in refusal({"type": "string", "pattern": "(?=a)b"})
    assert "matches no text" in refusal({"type": "string", "pattern": "[^\\s\\S]"})


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "no JSON"),
        ('{"type": "string", "type": "null"}', "twice"),
        ('{"const": NaN}', "NaN"),
        ("[" * 100_000, "no JSON"),
        ('{"const": 1e999}', "beyond float64"),
    ],
)
def test_what_is_no_json_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        normalise(text, LIMITS)


def test_depth_is_bounded() -> None:
    schema: dict[str, Any] = {"type": "string"}
    value: Any = 1
    for _ in range(7):
        schema = {"type": "array", "items": schema}
        value = [value]
    assert "deeper than 6 levels" in refusal(schema)
    assert "deeper than 6 levels" in refusal({"const": value})


def test_what_is_written_for_the_compiler() -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "T",
        "type": ["integer", "string"],
        "minimum": 3.0,
        "maxLength": 2,
        "default": 3,
    }
    written = json.loads(normalise(json.dumps(schema), LIMITS))
    assert [branch["type"] for branch in written["anyOf"]] == ["integer", "string"]
    assert written["anyOf"][0]["minimum"] == 3
    assert json.loads(normalise('{"oneOf": [{"const": 1}, {"type": "null"}]}', LIMITS)) == {
        "anyOf": [{"enum": [1]}, {"type": "null"}]
    }
    assert json.loads(normalise('{"required": ["a"], "properties": {"a": {}}}', LIMITS)) == {
        "type": "object",
        "properties": {"a": {}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert json.loads(normalise("true", LIMITS)) == {}
