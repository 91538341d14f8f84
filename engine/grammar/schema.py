"""The JSON schemas that a grammar may be: every keyword is looked at, and what the grammar compiler
would ignore or get wrong is refused with its place.

The compiler reads a schema generously: `not`, `if`, `uniqueItems`, `contains`, `allOf` of several,
bounds beside `$ref`, `required` names without a property and others have no effect on its grammar,
and an output could break the schema. So only what it represents exactly goes through (measured by
the tests against a checker of their own), in a schema that is written anew:

- Every output is valid under the schema. Not every valid document can be an output: keys come in
  the order of `properties`, without others beside them (`additionalProperties` is taken as false
  there, as in a strict schema), on one line with ", " and ": " between.
- A string with `minLength` or `maxLength` has characters that stand for themselves in JSON: no
  quotes, backslashes or control characters.
- A `pattern` is a full match, by engine/grammar/regex.py, of characters that stand for themselves
  in JSON, too: its classes have no others, and a quote, backslash or control character is refused.
- `format` is taken where the compiler has a grammar for it.

Pure functions over values; any thread.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any, NoReturn, TypeAlias

from engine.grammar import json_values, regex
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import refuse
from engine.grammar.json_values import MAX_INTEGER

Schema: TypeAlias = dict[str, Any]

_ANNOTATIONS = frozenset(
    "title description default examples $comment deprecated readOnly writeOnly $schema $id".split()
)
_DEFINITIONS = ("$defs", "definitions")
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset("minLength maxLength pattern format".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum".split()),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset("items prefixItems minItems maxItems uniqueItems".split()),
    "object": frozenset(
        "properties required additionalProperties minProperties maxProperties".split()
    ),
}
_TYPED = frozenset().union(*_OF_TYPE.values())
_WHOLE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords that say all there is: nothing but annotations beside them (`type` beside the last
two)."""
# Others of the compiler's formats give text that is no JSON (json-pointer and email take quotes and
# backslashes unescaped).
_FORMATS = frozenset(
    "date time date-time duration hostname ipv4 ipv6 uri uri-reference uuid".split()
)
_MAX_NUMBER = Decimal(10) ** 12
_MAX_NUM_DECIMALS = 6


def normalise(text: str, limits: GrammarLimits) -> str:
    """The schema in `text`, checked and written anew for the compiler.

    Raises: InvalidRequest naming the place and the keyword.
    """
    try:
        schema = json_values.read(text)
    except (ValueError, RecursionError) as error:
        raise refuse(f"the schema is no JSON: {error or 'nested too deep'}") from error
    return json.dumps(_Walk(schema, limits).root(), ensure_ascii=False)


class _Walk:
    """One pass over one schema."""

    def __init__(self, schema: object, limits: GrammarLimits) -> None:
        self._root = schema
        self._limits = limits

    def root(self) -> Schema:
        """The schema written anew."""
        return self._schema(self._root, "$", 0)

    def _schema(self, schema: object, path: str, level: int) -> Schema:
        if level > self._limits.max_num_levels:
            self._refuse(path, f"nested deeper than {self._limits.max_num_levels} levels")
        if schema is True:
            return {}
        if schema is False:
            self._refuse(path, "false: no value is valid")
        if not isinstance(schema, dict):
            self._refuse(path, "a schema is an object or true")
        known = _ANNOTATIONS | _TYPED | {"type", *_WHOLE, *_DEFINITIONS}
        for keyword in schema:
            if keyword not in known:
                self._refuse(f"{path}.{keyword}", "this keyword is not supported")
        written = self._definitions(schema, path, level)
        whole = [keyword for keyword in _WHOLE if keyword in schema]
        if whole:
            self._alone(schema, whole[0], path)
            handle = {"$ref": self._ref, "enum": self._enum, "const": self._enum}
            written.update(handle.get(whole[0], self._union)(schema, path, level))
        else:
            written.update(self._typed(schema, path, level))
        return written

    def _definitions(self, schema: Schema, path: str, level: int) -> Schema:
        found: Schema = {}
        for keyword in _DEFINITIONS:
            if keyword in schema:
                if path != "$":
                    self._refuse(f"{path}.{keyword}", "definitions stand at the top only")
                found[keyword] = self._named(schema[keyword], f"{path}.{keyword}", level)
        return found

    def _named(self, schemas: object, path: str, level: int) -> Schema:
        if not isinstance(schemas, dict):
            self._refuse(path, "an object of schemas is needed")
        return {
            name: self._schema(inner, f"{path}.{name}", level + 1)
            for name, inner in schemas.items()
        }

    def _alone(self, schema: Schema, keyword: str, path: str) -> None:
        allowed = _ANNOTATIONS | {keyword, *_DEFINITIONS}
        if keyword in ("enum", "const"):
            allowed |= {"type"}
        beside = sorted(set(schema) - allowed)
        if beside:
            self._refuse(f"{path}.{beside[0]}", f"not supported beside {keyword}")

    # -- schemas that say all with one keyword

    def _ref(self, schema: Schema, path: str, level: int) -> Schema:
        self._target(schema["$ref"], f"{path}.$ref")
        return {"$ref": schema["$ref"]}

    def _target(self, ref: object, path: str) -> object:
        if ref == "#":
            return self._root
        parts = ref.split("/") if isinstance(ref, str) else []
        if len(parts) != 3 or parts[0] != "#" or parts[1] not in _DEFINITIONS:
            self._refuse(path, "only #, #/$defs/NAME and #/definitions/NAME are supported")
        if any(c in parts[2] for c in "~%"):
            self._refuse(path, "an escape in a reference is not supported")
        definitions = self._root.get(parts[1]) if isinstance(self._root, dict) else None
        if not isinstance(definitions, dict) or parts[2] not in definitions:
            self._refuse(path, f"{ref} is not defined")
        return definitions[parts[2]]

    def _union(self, schema: Schema, path: str, level: int) -> Schema:
        (keyword,) = (name for name in ("anyOf", "oneOf", "allOf") if name in schema)
        place = f"{path}.{keyword}"
        branches = schema[keyword]
        if not isinstance(branches, list) or not branches:
            self._refuse(place, "a list of schemas is needed")
        if len(branches) > self._limits.max_num_choices:
            self._refuse(place, f"more than {self._limits.max_num_choices} schemas")
        if keyword == "allOf" and len(branches) > 1:
            self._refuse(place, "allOf of more than one schema is not supported; merge them")
        written = [
            self._schema(branch, f"{place}[{index}]", level + 1)
            for index, branch in enumerate(branches)
        ]
        if keyword == "oneOf":
            self._check_apart(branches, place)
        return {"anyOf": written}

    def _check_apart(self, branches: list[Any], place: str) -> None:
        shapes = [self._shape(branch, place, 0) for branch in branches]
        for index, (values, types) in enumerate(shapes):
            for other_values, other_types in shapes[:index]:
                both = values is not None and other_values is not None
                if values & other_values if both else types & other_types:  # type: ignore[operator]
                    self._refuse(
                        f"{place}[{index}]",
                        "oneOf whose schemas may share a value is not supported; use anyOf",
                    )

    def _shape(
        self, schema: Any, place: str, num_refs: int
    ) -> tuple[frozenset[str] | None, frozenset[str]]:
        """(its values, where it lists them, else None; the types that they may be of)."""
        if num_refs > self._limits.max_num_levels:
            self._refuse(place, "a reference to itself")
        if isinstance(schema, dict) and "$ref" in schema:
            return self._shape(self._target(schema["$ref"], place), place, num_refs + 1)
        values = _listed(schema)
        if values is not None:
            return (
                frozenset(json_values.canonical(value) for value in values),
                frozenset(json_values.type_of(value) for value in values),
            )
        types = schema.get("type") if isinstance(schema, dict) else None
        if types is None:
            return None, frozenset({*_OF_TYPE} - {"integer"})
        named = [types] if isinstance(types, str) else types
        return None, frozenset("number" if name == "integer" else name for name in named)

    def _enum(self, schema: Schema, path: str, level: int) -> Schema:
        values = _listed(schema)
        if values is None or not values:
            self._refuse(f"{path}.enum", "a list of values is needed")
        if len(values) > self._limits.max_num_choices:
            self._refuse(f"{path}.enum", f"more than {self._limits.max_num_choices} values")
        types = self._types(schema, path) if "type" in schema else None
        for value in values:
            problem = json_values.problem_of(value, level, self._limits.max_num_levels)
            if problem:
                self._refuse(path, problem)
            if types is not None and not json_values.types_of(value) & set(types):
                self._refuse(path, f"the value {json.dumps(value)[:40]} is not of its type")
        return {"enum": values}

    # -- schemas by type

    def _types(self, schema: Schema, path: str) -> list[str]:
        types = schema["type"]
        named = [types] if isinstance(types, str) else types
        if not isinstance(named, list) or not named:
            self._refuse(f"{path}.type", "a type, or a list of types, is needed")
        for name in named:
            if name not in _OF_TYPE:
                self._refuse(f"{path}.type", f"{json.dumps(name)} is no type")
        return named

    def _typed(self, schema: Schema, path: str, level: int) -> Schema:
        used = [keyword for keyword in schema if keyword in _TYPED]
        if "type" not in schema:
            fitting = [name for name in _OF_TYPE if set(used) <= _OF_TYPE[name]]
            if not used:
                return {}
            if len(fitting) != 1:
                self._refuse(f"{path}.{used[0]}", "say the `type` that it is about")
            types = fitting
        else:
            types = self._types(schema, path)
        for keyword in used:
            if not any(keyword in _OF_TYPE[name] for name in types):
                self._refuse(f"{path}.{keyword}", f"it says nothing about {' or '.join(types)}")
        if len(types) > 1:
            # One branch each: the compiler mixes up the bounds of several types.
            return {
                "anyOf": [self._of_type(name, schema, path, level) for name in dict.fromkeys(types)]
            }
        return self._of_type(types[0], schema, path, level)

    def _of_type(self, name: str, schema: Schema, path: str, level: int) -> Schema:
        own = {key: value for key, value in schema.items() if key in _OF_TYPE[name]}
        if name == "string":
            return {"type": name, **self._string(own, path)}
        if name in ("integer", "number"):
            return {"type": name, **self._number(own, name, path)}
        if name == "array":
            return {"type": name, **self._array(own, path, level)}
        if name == "object":
            return {"type": name, **self._object(own, path, level)}
        return {"type": name}

    def _count(self, own: Mapping[str, Any], keyword: str, path: str) -> int | None:
        value = own.get(keyword)
        if keyword not in own:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._refuse(f"{path}.{keyword}", "a count is needed")
        if value > self._limits.max_num_repeats:
            self._refuse(f"{path}.{keyword}", f"beyond {self._limits.max_num_repeats}")
        return value

    def _counts(self, own: Schema, low: str, high: str, path: str) -> Schema:
        least, most = self._count(own, low, path), self._count(own, high, path)
        if least is not None and most is not None and least > most:
            self._refuse(f"{path}.{low}", f"above {high}: no value is valid")
        return {key: value for key, value in ((low, least), (high, most)) if value is not None}

    def _string(self, own: Schema, path: str) -> Schema:
        if len(own.keys() & {"pattern", "format"}) == 2 or (
            own.keys() & {"pattern", "format"} and own.keys() & {"minLength", "maxLength"}
        ):
            self._refuse(f"{path}.{sorted(own)[-1]}", f"only one of {', '.join(sorted(own))}")
        if "pattern" in own:
            return {"pattern": self._pattern(own["pattern"], f"{path}.pattern")}
        if "format" in own:
            if own["format"] not in _FORMATS:
                known = ", ".join(sorted(_FORMATS))
                self._refuse(f"{path}.format", f"only these are supported: {known}")
            return {"format": own["format"]}
        counts = self._counts(own, "minLength", "maxLength", path)
        if not counts:
            return {}
        # The compiler's own counted string lets control characters through unescaped. Escapes are
        # left out of ours: with them every mask would cost 500 times as much (13 ms with 2,048
        # tokens, measured).
        least, most = counts.get("minLength", 0), counts.get("maxLength")
        node = regex.Repeat(regex.PLAIN_IN_JSON, least, most)
        return {"pattern": f"^{regex.write(node)}$"}

    def _pattern(self, pattern: object, path: str) -> str:
        if not isinstance(pattern, str):
            self._refuse(path, "a string is needed")
        node = regex.parse(
            pattern,
            max_num_levels=self._limits.max_num_levels,
            max_num_repeats=self._limits.max_num_repeats,
        )
        if regex.is_empty(node):
            self._refuse(path, "it matches no text")
        node = regex.prune(node)
        character = regex.escaped_in_json(node)
        if character is not None:
            self._refuse(path, f"{character!r}: what JSON must escape is not supported")
        return f"^{regex.write(regex.in_json(node))}$"

    def _number(self, own: Schema, name: str, path: str) -> Schema:
        for keyword, value in own.items():
            place = f"{path}.{keyword}"
            if isinstance(value, bool) or not isinstance(value, int | float):
                self._refuse(place, "a number is needed")
            if name == "integer" or keyword == "multipleOf":
                if not json_values.is_whole(value) or abs(value) > MAX_INTEGER:
                    self._refuse(place, f"a whole number within {MAX_INTEGER} is needed")
            elif not math.isfinite(value) or abs(Decimal(repr(value))) > _MAX_NUMBER:
                self._refuse(place, f"a number within {_MAX_NUMBER} is needed")
            elif -int(Decimal(repr(value)).normalize().as_tuple().exponent) > _MAX_NUM_DECIMALS:
                self._refuse(place, f"more than {_MAX_NUM_DECIMALS} decimals")
        if own.get("multipleOf", 1) < 1:
            self._refuse(f"{path}.multipleOf", "a positive number is needed")
        if own.get("multipleOf", 1) > self._limits.max_num_repeats:
            self._refuse(f"{path}.multipleOf", f"beyond {self._limits.max_num_repeats}")
        return {key: int(value) if name == "integer" else value for key, value in own.items()}

    def _array(self, own: Schema, path: str, level: int) -> Schema:
        if own.get("uniqueItems", False) is not False:
            self._refuse(f"{path}.uniqueItems", "not supported")
        written = self._counts(own, "minItems", "maxItems", path)
        prefix = own.get("prefixItems", [])
        if not isinstance(prefix, list) or ("prefixItems" in own and not prefix):
            self._refuse(f"{path}.prefixItems", "a list of schemas is needed")
        if prefix:
            written["prefixItems"] = [
                self._schema(item, f"{path}.prefixItems[{index}]", level + 1)
                for index, item in enumerate(prefix)
            ]
        items = own.get("items", not prefix)
        if items is False:
            if written.get("minItems", 0) > len(prefix):
                self._refuse(f"{path}.minItems", "more than there are: no value is valid")
            return {**written, "items": False}
        return {**written, "items": self._schema(items, f"{path}.items", level + 1) or True}

    def _object(self, own: Schema, path: str, level: int) -> Schema:
        written = self._counts(own, "minProperties", "maxProperties", path)
        properties = self._named(own.get("properties", {}), f"{path}.properties", level)
        required = own.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._refuse(f"{path}.required", "a list of names is needed")
        for name in required:
            if name not in properties:
                self._refuse(f"{path}.required", f"{json.dumps(name)} is not in `properties`")
        others = own.get("additionalProperties", not properties)
        if others is False:
            if written.get("minProperties", 0) > len(properties):
                self._refuse(f"{path}.minProperties", "more than there are: no value is valid")
        elif properties:
            # A key that is written with escapes is the same key to a reader, another to the
            # compiler: the same name could come twice, the second time with any value.
            self._refuse(
                f"{path}.additionalProperties", "only false is supported beside `properties`"
            )
        elif written.get("minProperties", 0) > 1:
            self._refuse(f"{path}.minProperties", "above 1 it needs `properties`")
        if len(required) > written.get("maxProperties", len(required)):
            self._refuse(f"{path}.maxProperties", "fewer than are required: no value is valid")
        if properties:
            written["properties"] = properties
            written["required"] = list(dict.fromkeys(required))
        if others is not False:
            place = f"{path}.additionalProperties"
            return {
                **written,
                "additionalProperties": self._schema(others, place, level + 1) or True,
            }
        return {**written, "additionalProperties": False}

    def _refuse(self, path: str, problem: str) -> NoReturn:
        raise refuse(f"schema at {path}: {problem}")


def _listed(schema: Any) -> list[Any] | None:
    """The values of an `enum` or `const`."""
    if isinstance(schema, dict) and "const" in schema:
        return [schema["const"]]
    values = schema.get("enum") if isinstance(schema, dict) else None
    return values if isinstance(values, list) else None
