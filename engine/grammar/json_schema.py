"""The front before llguidance's JSON schemas: a schema as users write it, rewritten into what the
library takes.

Three kinds of keywords: annotations, which are ignored by list; those that the library has; and the
rest, which is refused by its name and path, because a library that ignored it would let an output
break the schema. Rewrites never let more through than the schema does; where they let less through,
it is one of these:

- Keys come in the order of `properties`. Where `properties` is given and nothing is said of others
  (`additionalProperties`, `unevaluatedProperties`), there are no others, as in a strict schema.
- `oneOf` becomes `anyOf` where no two branches can share an output (types, listed values, a tag
  with other constants, a key that one requires and the other does not have).
- What `if`, `not` and `dependentSchemas` leave is written out case by case.
- `contains`: the first elements are such.
- A unique array of few listed values becomes the list of all such arrays.
- `format` is a pattern of ours: every value parses with Python's parser of that format.

Pure functions over values; any thread.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeAlias
from urllib.parse import unquote

from engine.errors import InvalidRequest
from engine.grammar import cost_limits
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import refuse
from engine.grammar.formats import BOUNDS, PATTERNS

Schema: TypeAlias = dict[str, Any]
_Case: TypeAlias = list[tuple[Schema, str]]
"""A case: schemas that must all hold, with their paths; none of them applies further schemas."""

_ANNOTATIONS = frozenset(
    "title description default examples example $comment deprecated readOnly writeOnly $schema $id "
    "id $anchor $dynamicAnchor $vocabulary $defs definitions discriminator xml externalDocs "
    "contentMediaType contentEncoding contentSchema enumNames enumDescriptions enum_descriptions "
    "markdownDescription deprecationMessage errorMessage propertyOrdering order "
    "components tsType tsEnumNames".split()
)
_OF_TYPE: dict[str, frozenset[str]] = {
    "string": frozenset("minLength maxLength pattern format".split()),
    "integer": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "number": frozenset("minimum maximum exclusiveMinimum exclusiveMaximum multipleOf".split()),
    "boolean": frozenset(),
    "null": frozenset(),
    "array": frozenset(
        "items prefixItems additionalItems unevaluatedItems minItems maxItems uniqueItems contains "
        "minContains maxContains".split()
    ),
    "object": frozenset(
        "properties required additionalProperties unevaluatedProperties patternProperties "
        "propertyNames minProperties maxProperties".split()
    ),
}
_TYPED = frozenset().union(*_OF_TYPE.values())
_PLAIN = frozenset("type enum const nullable".split())
_JOINING = frozenset(
    "$ref allOf anyOf oneOf not if then else "
    "dependentRequired dependentSchemas dependencies".split()
)
"""Keywords that apply further schemas to the same value."""
_MAX_NUM_CASES = 64
"""Largest number of cases of keywords that must all hold, multiplied out."""
_MAX_SHAPE_DEPTH = 8
"""Largest depth of references and schemas that are inspected to distinguish branches of `oneOf`."""
_OPPOSITES = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}

# Patterns that libraries write, and the same languages without look-ahead: a Decimal of pydantic's,
# an email of zod's.
_DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_KNOWN_PATTERNS = {
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$",
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]" + _DOMAIN: (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]" + _DOMAIN
    ),
}
_LOOK_AHEAD = re.compile(r"\(\?=")


def lower(text: str, limits: GrammarLimits) -> Schema:
    """Check the schema in `text` and rewrite it for llguidance. Raises: InvalidRequest naming path
    and keyword."""
    return Lowering(read(text), limits).schema_at("$", None)


def read(text: str) -> object:
    """Parse JSON. Raises: InvalidRequest for text that is not JSON, has a key twice, or costs too
    much."""
    try:
        schema = json.loads(text, object_pairs_hook=_without_twins, parse_constant=_no_constant)
        cost_limits.check_schema(schema)
        return schema
    except RecursionError:
        raise refuse("the schema is no JSON: nested too deep") from None
    except ValueError as error:
        raise refuse(f"the schema is no JSON: {error}") from error


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice in one object")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def children(schema: object, path: str) -> Iterator[tuple[object, str]]:
    """Iterate over the schemas directly below one, with their paths."""
    if not isinstance(schema, dict):
        return
    for keyword, value in schema.items():
        place = f"{path}.{keyword}"
        if keyword in ("properties", "patternProperties", "$defs", "definitions"):
            if isinstance(value, dict):
                yield from ((inner, f"{place}.{name}") for name, inner in value.items())
        elif keyword in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if isinstance(value, list):
                yield from ((inner, f"{place}[{i}]") for i, inner in enumerate(value))
        elif keyword in ("items", "additionalProperties", "additionalItems"):
            if isinstance(value, list):
                yield from ((inner, f"{place}[{i}]") for i, inner in enumerate(value))
            elif isinstance(value, dict):
                yield value, place


class Lowering:
    """The rewriting of one schema document. Call `schema_at` once."""

    def __init__(self, root: object, limits: GrammarLimits) -> None:
        self._root = root
        self._limits = limits
        self._names: dict[str, str] = {}  # reference -> name in the written $defs
        self._open: list[tuple[str, str, str]] = []  # references to write: name, reference, path
        self._places: dict[int, tuple[object, str]] = {}  # of schemas that were merged away
        self._shapes: dict[int, tuple[object, _Shape]] = {}  # by the id of a schema, which is kept

    def schema_at(self, path: str, schema: object | None) -> Schema:
        """Rewrite the whole document (None), or a part of it, which keeps the document's
        definitions."""
        written = self._schema(self._root if schema is None else schema, path, 0)
        definitions: Schema = {}
        while self._open:
            name, reference, place = self._open.pop()
            definitions[name] = self._schema(self._target(reference, place), reference, 1)
        if definitions:
            written = {"$defs": definitions, **written}
        return written

    # -- one schema

    def _schema(self, schema: object, path: str, level: int) -> Schema:
        path = self._places.get(id(schema), (None, path))[1]
        if level > self._limits.max_num_levels:
            self._refuse(path, f"nested deeper than {self._limits.max_num_levels} levels")
        if schema is True:
            return {}
        if schema is False:
            return {"anyOf": []}
        known = self._known(schema, path)
        if known.pop("nullable", None) is True:
            return {"anyOf": [self._schema(known, path, level + 1), {"type": "null"}]}
        joined = known.keys() & _JOINING
        if len(known) == 1 and "allOf" in known and len(self._branches(known, "allOf", path)) == 1:
            return self._schema(known["allOf"][0], f"{path}.allOf[0]", level)
        if not joined:
            return self._plain(known, path, level)
        if len(known) == 1 and "$ref" in known:
            return {"$ref": f"#/$defs/{self._name(known['$ref'], f'{path}.$ref')}"}
        if len(known) == 1 and joined & {"anyOf", "oneOf"}:
            return self._union(known, path, level)
        return self._any_of(self._cases(known, path, 0), level)

    def _known(self, schema: object, path: str) -> Schema:
        """Remove annotations. Raises: InvalidRequest for an unknown keyword."""
        if not isinstance(schema, dict):
            self._refuse(path, "a schema is an object, true or false")
        known = {}
        for keyword, value in schema.items():
            if keyword in _ANNOTATIONS or keyword.startswith("x-"):
                continue
            if keyword == "$dynamicRef":  # no schema here is included by another
                known["$ref"] = value
            elif keyword in _TYPED or keyword in _JOINING or keyword in _PLAIN:
                known[keyword] = value
            else:
                self._refuse(f"{path}.{keyword}", "this keyword is not supported")
        return known

    def _union(self, known: Schema, path: str, level: int) -> Schema:
        """Rewrite an anyOf or oneOf without other keywords."""
        (keyword,) = known
        branches = self._branches(known, keyword, path)
        if keyword == "oneOf":
            branches = _with_items(branches)
        written = [
            self._schema(branch, f"{path}.{keyword}[{index}]", level + 1)
            for index, branch in enumerate(branches)
        ]
        if keyword == "oneOf" and not self._are_apart(branches):
            return {"oneOf": written}  # the library may know better, or refuses it
        return {"anyOf": written}

    def _branches(self, known: Schema, keyword: str, path: str) -> list[Any]:
        branches = known[keyword]
        if not isinstance(branches, list) or not branches:
            self._refuse(f"{path}.{keyword}", "a list of schemas is needed")
        if len(branches) > self._limits.max_num_choices:
            self._refuse(f"{path}.{keyword}", f"more than {self._limits.max_num_choices} schemas")
        return branches

    # -- conjunctions: schemas that must hold together

    def _cases(self, schema: object, path: str, depth: int) -> list[_Case]:
        """Return cases, one of which holds for exactly the values that satisfy the schema.
        References are followed."""
        if depth > self._limits.max_num_levels:
            self._refuse(
                path, "it refers to itself where it must hold together with other keywords"
            )
        if schema is True:
            return [[]]
        if schema is False:
            return []
        known = self._known(schema, path)
        rest = {key: value for key, value in known.items() if key not in _JOINING}
        found: list[_Case] = [[(rest, path)] if rest else []]
        for alternatives in self._joined(known, rest, path, depth + 1):
            found = [[*one, *other] for one in found for other in alternatives]
            if len(found) > _MAX_NUM_CASES:
                self._refuse(path, f"its keywords come to more than {_MAX_NUM_CASES} cases")
        return found

    def _joined(self, known: Schema, rest: Schema, path: str, depth: int) -> Iterator[list[_Case]]:
        """Iterate over the cases of each keyword that applies further schemas to the same value."""
        if rest.get("unevaluatedProperties") is False and _has_conditions(known):
            self._refuse(f"{path}.unevaluatedProperties", "not supported beside conditions")
        if "$ref" in known:
            place = f"{path}.$ref"
            yield self._cases(self._target(known["$ref"], place), place, depth)
        for index, member in enumerate(
            self._branches(known, "allOf", path) if "allOf" in known else ()
        ):
            yield self._cases(member, f"{path}.allOf[{index}]", depth)
        for keyword in ("anyOf", "oneOf"):
            if keyword not in known:
                continue
            branches = self._branches(known, keyword, path)
            if keyword == "oneOf":
                branches = _with_items(_without_others_keys(branches))
                base = {key: value for key, value in known.items() if key not in ("anyOf", "oneOf")}
                whole = [{"allOf": [base, branch]} for branch in branches]
                is_apart = self._are_apart(branches, depth, are_closed=False)
                if not is_apart and not self._are_apart(whole, depth):
                    yield [[({"oneOf": branches}, path)]]
                    continue
            yield [
                case
                for index, branch in enumerate(branches)
                for case in self._cases(branch, f"{path}.{keyword}[{index}]", depth)
            ]
        if "not" in known:
            yield self._cases_of(self._negated(known["not"], f"{path}.not"), f"{path}.not", depth)
        if "if" in known:
            condition, place = known["if"], f"{path}.if"
            then, other = known.get("then", True), known.get("else", True)
            unless = [{"allOf": [one, other]} for one in self._negated(condition, place)]
            yield self._cases_of([{"allOf": [condition, then]}, *unless], place, depth)
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            for name, needed in known.get(keyword, {}).items():
                whole_needed = {"required": needed} if isinstance(needed, list) else needed
                present = {"type": "object", "required": [name], "properties": {name: True}}
                options = [
                    {"type": "object", "properties": {name: False}},
                    {"allOf": [present, whole_needed]},
                ]
                yield self._cases_of(options, f"{path}.{keyword}.{name}", depth)

    def _cases_of(self, schemas: list[Any], path: str, depth: int) -> list[_Case]:
        return [case for schema in schemas for case in self._cases(schema, path, depth)]

    def _negated(self, schema: object, path: str) -> list[Any]:
        """Return schemas whose values do not satisfy this one."""
        if isinstance(schema, bool):
            return [] if schema else [True]
        known = self._known(schema, path)
        if "$ref" in known and len(known) == 1:
            return self._negated(self._target(known["$ref"], path), path)
        found: list[Any] = []
        values = _listed(known)
        is_object = known.get("type", "object") == "object" and not known.keys() - {"type"} - {
            "properties",
            "required",
        }
        if values is not None:
            found += _others(values)
        elif set(known) == {"type"}:
            types = [known["type"]] if isinstance(known["type"], str) else known["type"]
            kinds = [name for name in _OF_TYPE if name not in types and name != "integer"]
            if "integer" in types and "number" not in types:
                kinds.remove("number")
            found += [{"type": kinds}] if kinds else []
        elif set(known) <= {"anyOf"} and known:
            every = [self._negated(branch, path) for branch in known["anyOf"]]
            found += [{"allOf": list(one)} for one in itertools.product(*every)]
        elif set(known) <= {"allOf"} and known:
            found += [one for branch in known["allOf"] for one in self._negated(branch, path)]
        elif set(known) <= {"not"} and known:
            found.append(known["not"])
        elif set(known) <= {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "type"}:
            for keyword, opposite in _OPPOSITES.items():
                if keyword in known:
                    found.append({"type": "number", opposite: known[keyword]})
        elif is_object:
            for name, inner in known.get("properties", {}).items():
                for one in self._negated(inner, f"{path}.properties.{name}"):
                    found.append({"type": "object", "properties": {name: one}, "required": [name]})
            for name in known.get("required", ()):
                found.append({"type": "object", "properties": {name: False}})
        else:
            self._refuse(path, "what does not satisfy this schema cannot be said")
        return found

    def _any_of(self, cases: list[_Case], level: int) -> Schema:
        written = [self._all_of(case, level) for case in cases]
        return written[0] if len(written) == 1 else {"anyOf": written}

    def _all_of(self, case: _Case, level: int) -> Schema:
        """Rewrite the conjunction of all members. Objects are merged here, so that they can be
        closed; the library intersects other schemas."""
        if not case:
            return {}
        merged = self._merged([member for member, _ in case])
        if merged is not None:
            for member, place in case:
                for name, inner in member.get("properties", {}).items():
                    self._places[id(inner)] = inner, f"{place}.properties.{name}"
            return self._schema(merged, case[0][1], level + 1)
        if len(case) == 1:
            return self._schema(*case[0], level + 1)
        return {
            "allOf": [self._schema(_opened(member), place, level + 1) for member, place in case]
        }

    def _merged(self, members: list[Schema]) -> Schema | None:
        """Merge members that apply no further schemas into one object schema; None if that needs
        more than a union of keys."""
        if not any(member.get("type") == "object" or "properties" in member for member in members):
            return None
        properties: dict[str, list[Any]] = {}
        required: list[str] = []
        closed: list[set[str]] = []
        merged: Schema = {"type": "object"}
        is_open = False
        for one in members:
            own, names = one.get("properties", {}), one.get("required", [])
            kinds = one.get("type", "object")
            is_object = kinds == "object" or (isinstance(kinds, list) and "object" in kinds)
            if not is_object or not isinstance(own, dict) or not isinstance(names, list):
                return None
            for name, schema in own.items():
                properties.setdefault(name, []).append(schema)
            required += [name for name in names if name not in required]
            others = one.get("additionalProperties")
            if others is False:
                closed.append(set(own))
            is_open |= others in (True, {}) and others is not None
            if others not in (None, True, False, {}):
                return None
            for keyword in one.keys() - {"type", "properties", "required", "additionalProperties"}:
                is_there = keyword == "unevaluatedProperties" and one[keyword] is False
                if not is_there and (keyword not in _OF_TYPE["object"] or keyword in merged):
                    return None
                if not is_there:
                    merged[keyword] = one[keyword]
        if "patternProperties" in merged and closed:
            return None
        for keys in closed:
            properties.update({name: [False] for name in properties.keys() - keys})
        merged["properties"] = {name: _both(schemas) for name, schemas in properties.items()}
        merged["required"] = required
        merged.setdefault("additionalProperties", is_open and not closed)
        return merged

    # -- oneOf

    def _are_apart(self, branches: list[Any], depth: int = 0, *, are_closed: bool = True) -> bool:
        """Return whether no output of one branch satisfies another one."""
        shapes = [self._shape(branch, depth) for branch in branches]
        return all(
            _is_apart(one, other, is_closed=are_closed)
            and _is_apart(other, one, is_closed=are_closed)
            for index, one in enumerate(shapes)
            for other in shapes[:index]
        )

    def _shape(self, schema: Any, depth: int) -> _Shape:
        if depth > _MAX_SHAPE_DEPTH:
            return _Shape()
        if id(schema) in self._shapes:
            return self._shapes[id(schema)][1]
        self._shapes[id(schema)] = schema, _Shape()  # what a schema that refers to itself finds
        self._shapes[id(schema)] = schema, self._made_shape(schema, depth)
        return self._shapes[id(schema)][1]

    def _made_shape(self, schema: Any, depth: int) -> _Shape:
        try:
            cases = self._cases(schema, "$", depth)
        except InvalidRequest:
            return _Shape()
        shapes = [self._shape_of([member for member, _ in case], depth) for case in cases]
        return _either(shapes) if shapes else _Shape(set(), set())

    def _shape_of(self, members: list[Schema], depth: int) -> _Shape:
        """Return the shape of members that apply no further schemas."""
        merged = self._merged(members)
        found = _Shape()
        for one in [merged] if merged is not None else members:
            values = _listed(one)
            if values is not None:
                found.values = {_canonical(value) for value in values}
                found.types &= {_type(value) for value in values}
                continue
            used = one.keys() & _TYPED
            types = one.get("type")
            if types is None:
                fitting = [name for name, own in _OF_TYPE.items() if used and used <= own]
                types = fitting if fitting in (["string"], ["array"], ["object"]) else [*_OF_TYPE]
            named = {types} if isinstance(types, str) else set(types)
            named |= {"null"} if one.get("nullable") is True else set()
            found.types &= {"number" if name == "integer" else name for name in named}
            if "pattern" in one or one.get("format") in PATTERNS:
                found.pattern = one.get("pattern") or f"^(?:{PATTERNS[one['format']]})$"
            if named == {"array"} and one.get("minItems", 0) and isinstance(one.get("items"), dict):
                found.items = self._shape(one["items"], depth + 1)
        if merged is not None:
            if merged["additionalProperties"] is False and "patternProperties" not in merged:
                found.names = {
                    name for name, one in merged["properties"].items() if one is not False
                }
            found.required = set(merged["required"])
            for name in found.required & merged["properties"].keys():
                tag = self._shape(merged["properties"][name], depth + 1)
                if tag.values is not None:
                    found.tags[name] = tag.values
        return found

    # -- references

    def _name(self, reference: object, path: str) -> str:
        self._target(reference, path)
        assert isinstance(reference, str)
        if reference not in self._names:
            self._names[reference] = f"d{len(self._names)}"
            self._open.append((self._names[reference], reference, path))
        return self._names[reference]

    def _target(self, reference: object, path: str) -> object:
        if not isinstance(reference, str):
            self._refuse(path, "a reference is a string")
        if not reference.startswith("#"):
            base, _, fragment = reference.partition("#")
            found = _identified(self._root, base)
            if found is None or (fragment.startswith("/") and found is not self._root):
                self._refuse(path, f"{reference} is not in this schema")
            if not fragment:
                return found
            reference = f"#{fragment}"
        if reference == "#":
            return self._root
        if not reference.startswith("#/"):
            found = _anchored(self._root, reference[1:])
            if found is None:
                self._refuse(path, f"{reference} is not defined")
            return found
        target: Any = self._root
        for part in reference[2:].split("/"):
            key = unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(target, dict) and key in target:
                target = target[key]
            elif isinstance(target, list) and key.isdigit() and int(key) < len(target):
                target = target[int(key)]
            else:
                self._refuse(path, f"{reference} is not defined")
        return target

    # -- schemas by type

    def _plain(self, known: Schema, path: str, level: int) -> Schema:
        if "enum" in known or "const" in known:
            return self._values(known, path)
        if not known:
            return {}
        used = [keyword for keyword in known if keyword in _TYPED]
        types = self._types(known, path, used)
        if len(types) == 1:
            return self._of_type(types[0], known, path, level)
        return {"anyOf": [self._of_type(name, known, path, level) for name in types]}

    def _types(self, known: Schema, path: str, used: list[str]) -> list[str]:
        if "type" not in known:
            fitting = [name for name in _OF_TYPE if set(used) <= _OF_TYPE[name]]
            if fitting == ["integer", "number"]:
                return ["number"]
            if len(fitting) != 1:
                self._refuse(f"{path}.{used[0]}", "say the `type` that it is about")
            return fitting
        types = known["type"]
        named = [types] if isinstance(types, str) else types
        if not isinstance(named, list) or not named:
            self._refuse(f"{path}.type", "a type, or a list of types, is needed")
        for name in named:
            if name not in _OF_TYPE:
                self._refuse(f"{path}.type", f"{json.dumps(name)[:40]} is no type")
        found = list(dict.fromkeys(named))
        return [name for name in found if not (name == "integer" and "number" in found)]

    def _values(self, known: Schema, path: str) -> Schema:
        values = _listed(known)
        keyword = "const" if "const" in known else "enum"
        if values is None or not values:
            self._refuse(f"{path}.{keyword}", "a list of values is needed")
        if len(values) > self._limits.max_num_choices:
            self._refuse(f"{path}.{keyword}", f"more than {self._limits.max_num_choices} values")
        if "type" in known:
            types = set(self._types(known, path, []))
            values = [value for value in values if _types_of(value) & types]
            if not values:
                self._refuse(f"{path}.{keyword}", "no value is of its type")
        rest = {key: known[key] for key in known.keys() - {"enum", "const", "type"}}
        if rest:
            return {"allOf": [{"enum": values}, self._plain(rest, path, 0)]}
        return {"enum": values}

    def _of_type(self, name: str, known: Schema, path: str, level: int) -> Schema:
        own = {key: value for key, value in known.items() if key in _OF_TYPE[name]}
        if name == "string":
            return self._string(own, path)
        if name in ("integer", "number"):
            return {"type": name, **self._number(own, known, path)}
        if name == "array":
            return self._array(own, path, level)
        if name == "object":
            return self._object(own, path, level)
        return {"type": name}

    def _count(self, own: Mapping[str, Any], keyword: str, path: str, default: int = 0) -> int:
        value = own.get(keyword, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            self._refuse(f"{path}.{keyword}", "a count is needed")
        if keyword in own and value > self._limits.max_num_repeats:
            self._refuse(f"{path}.{keyword}", f"beyond {self._limits.max_num_repeats}")
        return value

    def _string(self, own: Schema, path: str) -> Schema:
        written: Schema = {"type": "string"}
        for keyword in ("minLength", "maxLength"):
            if keyword in own:
                written[keyword] = self._count(own, keyword, path)
        patterns = []
        if "pattern" in own:
            patterns = self._patterns(own["pattern"], f"{path}.pattern")
        if "format" in own:
            name = own["format"]
            if not isinstance(name, str):
                self._refuse(f"{path}.format", "a string is needed")
            if name in PATTERNS:
                patterns.append(f"^(?:{PATTERNS[name]})$")
        if len(patterns) > 1:
            return {"allOf": [written, *({"type": "string", "pattern": p} for p in patterns)]}
        return {**written, **({"pattern": patterns[0]} if patterns else {})}

    def _patterns(self, pattern: object, path: str) -> list[str]:
        """Split a pattern into patterns that must all be found: leading look-aheads become patterns
        of their own."""
        if not isinstance(pattern, str):
            self._refuse(path, "a string is needed")
        cost_limits.check_pattern(pattern)
        pattern = _KNOWN_PATTERNS.get(pattern, pattern)
        is_anchored = pattern.startswith("^")
        rest = pattern[is_anchored:]
        found = []
        while is_anchored and _LOOK_AHEAD.match(rest):
            end = _end_of_group(rest)
            if end is None:
                break
            found.append(f"^(?:{rest[3:end]})")
            rest = rest[end + 1 :]
        if found:
            return [*found, *([f"^{rest}"] if rest else [])]
        return [pattern]

    def _number(self, own: Schema, known: Schema, path: str) -> Schema:
        written = dict(own)
        for edge, exclusive in (("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")):
            if isinstance(written.get(exclusive), bool):  # as draft 4 has it
                if written.pop(exclusive) and edge in written:
                    written[exclusive] = written.pop(edge)
        for keyword, value in written.items():
            if isinstance(value, bool) or not isinstance(value, int | float):
                self._refuse(f"{path}.{keyword}", "a number is needed")
        if written.get("multipleOf", 1) <= 0:
            self._refuse(f"{path}.multipleOf", "a positive number is needed")
        if known.get("format") in BOUNDS:
            low, high = BOUNDS[known["format"]]
            written["minimum"] = max(low, written.get("minimum", low))
            written["maximum"] = min(high, written.get("maximum", high))
        return written

    def _array(self, own: Schema, path: str, level: int) -> Schema:
        least = self._count(own, "minItems", path)
        most = self._count(own, "maxItems", path, self._limits.max_num_repeats)
        prefix = own.get("prefixItems", [])
        items = own.get("items", own.get("unevaluatedItems", True))
        if isinstance(items, list):  # as up to draft 2019
            prefix, items = items, own.get("additionalItems", own.get("unevaluatedItems", True))
        if not isinstance(prefix, list):
            self._refuse(f"{path}.prefixItems", "a list of schemas is needed")
        if "contains" in own and own.get("minContains", 1) > 0:
            prefix, least = self._containing(own, prefix, items, least, path)
        if own.get("uniqueItems", False) is not False and most > 1:
            return self._unique(prefix, items, least, most, path)
        written: Schema = {"type": "array"}
        if least:
            written["minItems"] = least
        if "maxItems" in own:
            written["maxItems"] = most
        if prefix:
            written["prefixItems"] = [
                self._schema(item, f"{path}.prefixItems[{index}]", level + 1)
                for index, item in enumerate(prefix)
            ]
            if not own.keys() & {"items", "additionalItems", "contains"}:
                # Nothing is said of what follows a tuple: nothing does.
                items = True if least > len(prefix) else False
        if items is False:
            written["items"] = False
        else:
            written["items"] = self._schema(items, f"{path}.items", level + 1) or True
        return written

    def _containing(
        self, own: Schema, prefix: list[Any], items: Any, least: int, path: str
    ) -> tuple[list[Any], int]:
        """Rewrite `contains` so that the first elements match. Returns: (prefixItems, minItems)."""
        num = self._count(own, "minContains", path, 1)
        if prefix or "maxContains" in own or num > _MAX_NUM_CASES:
            self._refuse(f"{path}.contains", "not supported beside prefixItems or maxContains")
        return [{"allOf": [items, own["contains"]]}] * num, max(least, num)

    def _unique(self, prefix: list[Any], items: Any, least: int, most: int, path: str) -> Schema:
        """List all arrays of different listed values: in any order if there are few, else in the
        schema's order."""
        known = self._single(items)
        values = None if known is None else _listed(known)
        if values is None and known is not None and known.get("type") == "boolean":
            values = [False, True]
        if prefix or values is None:
            self._refuse(
                f"{path}.uniqueItems", "only arrays of values that an enum lists can be kept unique"
            )
        values = list({_canonical(value): value for value in values}.values())
        for arrange in (itertools.permutations, itertools.combinations):
            arrays = itertools.chain.from_iterable(
                arrange(values, size) for size in range(least, min(most, len(values)) + 1)
            )
            found = list(itertools.islice(arrays, self._limits.max_num_choices + 1))
            if 0 < len(found) <= self._limits.max_num_choices:
                return {"enum": [list(one) for one in found]}
        self._refuse(f"{path}.uniqueItems", "too many arrays of so many values")

    def _object(self, own: Schema, path: str, level: int) -> Schema:
        properties = own.get("properties", {})
        patterns = own.get("patternProperties", {})
        required = own.get("required", [])
        if not isinstance(properties, dict):
            self._refuse(f"{path}.properties", "an object of schemas is needed")
        if not isinstance(patterns, dict):
            self._refuse(f"{path}.patternProperties", "an object of schemas is needed")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            self._refuse(f"{path}.required", "a list of names is needed")
        others = own.get("additionalProperties", own.get("unevaluatedProperties"))
        if others is None:
            others = not properties and not patterns
        if "propertyNames" in own:
            properties, patterns, others = self._named(
                own["propertyNames"], properties, patterns, others, path
            )
        written: Schema = {"type": "object"}
        if others is False:
            # Names that are required without a property: nothing is said of their values.
            missing = [
                name
                for name in required
                if name not in properties and not any(_finds(p, name) for p in patterns)
            ]
            properties = {
                **properties,
                **dict.fromkeys(missing, own.get("additionalProperties", True) is not False),
            }
        if properties:
            written["properties"] = {
                name: self._schema(inner, f"{path}.properties.{name}", level + 1)
                for name, inner in properties.items()
            }
        if patterns:
            written["patternProperties"] = {
                name: self._schema(inner, f"{path}.patternProperties.{name}", level + 1)
                for name, inner in patterns.items()
            }
        if required:
            written["required"] = list(dict.fromkeys(required))
        if others is False:
            written["additionalProperties"] = False
        else:
            place = f"{path}.additionalProperties"
            written["additionalProperties"] = self._schema(others, place, level + 1) or True
        least = self._count(own, "minProperties", path)
        most = self._count(own, "maxProperties", path, self._limits.max_num_repeats)
        if others is False and not patterns:
            return self._counted(written, least, most, path)
        if least > len(set(required)):
            written["minProperties"] = least
        if "maxProperties" in own:
            written["maxProperties"] = most
        return written

    def _counted(self, written: Schema, least: int, most: int, path: str) -> Schema:
        """Rewrite an object without other keys that must have a number of keys, as one case for
        each choice of keys."""
        properties, required = written.get("properties", {}), written.get("required", [])
        optional = [name for name in properties if name not in required]
        num_more, num_left = max(0, least - len(required)), max(0, most - len(required))
        if num_more == 0 and num_left >= len(optional):
            return written
        if len(required) > most or num_more > len(optional):
            return {"anyOf": []}  # no object has so many of these keys
        found = []
        for kept in itertools.combinations(optional, min(num_left, len(optional))):
            for needed in itertools.combinations(kept, num_more):
                gone = set(optional) - set(kept)
                left = {name: one for name, one in properties.items() if name not in gone}
                found.append({**written, "properties": left, "required": [*required, *needed]})
                if len(found) > _MAX_NUM_CASES:
                    self._refuse(f"{path}.minProperties", f"more than {_MAX_NUM_CASES} cases")
        return {"anyOf": found}

    def _named(
        self,
        names: Any,
        properties: Schema,
        patterns: Schema,
        others: Any,
        path: str,
    ) -> tuple[Schema, Schema, Any]:
        """Apply `propertyNames` to the properties. Returns: (properties, patternProperties,
        additionalProperties)."""
        place = f"{path}.propertyNames"
        known = self._single(names)
        if known is None:
            self._refuse(place, "only an enum, a pattern or a length")
        if not known or known == {"type": "string"}:
            return properties, patterns, others
        listed = _listed(known)
        if listed is not None and not patterns:
            allowed = [name for name in listed if isinstance(name, str)]
            kept = {name: one for name, one in properties.items() if name in allowed}
            if others is not False:
                kept.update({name: others for name in allowed if name not in properties})
            return kept, {}, False
        own = self._string({key: known[key] for key in known.keys() - {"type"}}, place)
        pattern = own.get("pattern")
        if pattern is None and own.keys() & {"minLength", "maxLength"}:
            pattern = f"^[\\s\\S]{{{own.get('minLength', 0)},{own.get('maxLength', '')}}}$"
        elif own.keys() & {"minLength", "maxLength"}:
            pattern = None
        if pattern is None or patterns or known.keys() - {"type", *_OF_TYPE["string"]}:
            self._refuse(place, "only an enum, a pattern or a length, without patternProperties")
        kept = {name: one for name, one in properties.items() if _finds(pattern, name)}
        # Properties come first; what follows them has other names in the library, too.
        if others is False or kept:
            return kept, {}, False
        return {}, {pattern: others}, False

    def _single(self, schema: Any) -> Schema | None:
        """Return an equivalent schema that applies no further schemas; None if there is none."""
        try:
            cases = self._cases(schema, "$", 0)
        except InvalidRequest:
            return None
        if len(cases) != 1 or len(cases[0]) > 1:
            return None
        return cases[0][0][0] if cases[0] else {}

    def _refuse(self, path: str, problem: str) -> NoReturn:
        raise refuse(f"schema at {path}: {problem}")


class _Shape:
    """The known properties of a schema's values."""

    def __init__(self, values: set[str] | None = None, types: set[str] | None = None) -> None:
        self.values = values
        """All values, if they are listed; else None."""
        self.types = set(_OF_TYPE) - {"integer"} if types is None else types
        self.pattern: str | None = None
        """The pattern of values that are strings."""
        self.items: _Shape | None = None
        """The shape of the elements of arrays that are not empty."""
        self.tags: dict[str, set[str]] = {}
        """The listed values of required keys."""
        self.required: set[str] = set()
        self.names: set[str] | None = None
        """All keys of an output, if it is an object without other keys; else None."""


def _either(shapes: list[_Shape]) -> _Shape:
    """Return the shape of values that have one of these shapes."""
    if len(shapes) == 1:
        return shapes[0]
    values = [shape.values for shape in shapes]
    listed = None if None in values else set().union(*(one for one in values if one is not None))
    found = _Shape(listed, set().union(*(shape.types for shape in shapes)))
    for name in set.intersection(*(set(shape.tags) for shape in shapes)):
        found.tags[name] = set().union(*(shape.tags[name] for shape in shapes))
    found.required = set.intersection(*(shape.required for shape in shapes))
    return found


def _is_apart(one: _Shape, other: _Shape, *, is_closed: bool = True) -> bool:
    """Return whether no output of `one` satisfies `other`."""
    if one.values is not None and other.values is not None:
        return not one.values & other.values
    if not one.types & other.types:
        return True
    for listed, pattern in ((one.values, other.pattern), (other.values, one.pattern)):
        if listed is not None and pattern is not None:
            texts = [json.loads(value) for value in listed]
            if not any(isinstance(text, str) and _finds(pattern, text) for text in texts):
                return True
    if one.items is not None and other.items is not None and one.types == other.types == {"array"}:
        return _is_apart(one.items, other.items)
    if any(not one.tags[name] & other.tags[name] for name in one.tags.keys() & other.tags.keys()):
        return True
    return is_closed and one.names is not None and bool(other.required - one.names)


def _with_items(branches: list[Any]) -> list[Any]:
    """Rewrite branches of `oneOf` that are arrays so that they have elements, since only these
    distinguish them."""
    arrays = [one for one in branches if isinstance(one, dict) and one.get("type") == "array"]
    if len(arrays) < 2:
        return branches
    return [
        {**one, "minItems": max(1, one.get("minItems", 0))} if one in arrays else one
        for one in branches
    ]


def _without_others_keys(branches: list[Any]) -> list[Any]:
    """Rewrite branches of `oneOf` that only require keys so that each excludes the others' keys."""
    required = []
    for branch in branches:
        names = branch.get("required") if isinstance(branch, dict) else None
        if not isinstance(names, list) or branch.keys() - _ANNOTATIONS - {"required"}:
            return branches
        required.append(set(names))
    every = set().union(*required)
    return [
        {"required": sorted(own), "properties": {name: False for name in sorted(every - own)}}
        for own in required
    ]


def _others(values: list[Any]) -> list[Schema]:
    """Return schemas of the values that have these values' types and equal none of them."""
    found: list[Schema] = []
    texts = [value for value in values if isinstance(value, str)]
    if texts:
        found.append({"allOf": [{"type": "string", "pattern": _not_equal(text)} for text in texts]})
    if any(isinstance(value, bool) for value in values):
        left = [value for value in (False, True) if value not in values]
        found += [{"enum": left}] if left else []
    numbers = sorted(value for value in values if _type(value) == "number")
    edges = [{"exclusiveMaximum": numbers[0]}] if numbers else []
    edges += [
        {"exclusiveMinimum": low, "exclusiveMaximum": high}
        for low, high in itertools.pairwise(numbers)
    ]
    edges += [{"exclusiveMinimum": numbers[-1]}] if numbers else []
    found += [{"type": "number", **edge} for edge in edges]
    if None in values:
        found.append({"type": [name for name in _OF_TYPE if name not in ("null", "integer")]})
    return found


def _not_equal(text: str) -> str:
    """Return a pattern of all strings but this one."""
    ends = [f"{re.escape(text[:index])}$" for index in range(len(text))]
    splits = [
        f"{re.escape(text[:index])}[^{re.escape(text[index])}][\\s\\S]*$"
        for index in range(len(text))
    ]
    return "^(?:" + "|".join([*ends, *splits, f"{re.escape(text)}[\\s\\S]+$"]) + ")"


def _opened(schema: Any) -> Any:
    """Return a member of a conjunction, which the library intersects, without closing it on its
    own."""
    if isinstance(schema, dict) and "properties" in schema and "additionalProperties" not in schema:
        return {**schema, "additionalProperties": True}
    return schema


def _has_conditions(schema: object) -> bool:
    """Return whether the evaluated properties depend on a condition."""
    if not isinstance(schema, dict):
        return False
    inner = [one for key in ("allOf", "anyOf", "oneOf") for one in schema.get(key, ())]
    return bool(schema.keys() & {"if", "not"}) or any(map(_has_conditions, inner))


def _both(schemas: list[Any]) -> Any:
    """Return one schema for the conjunction of all."""
    different = list({_canonical(one): one for one in schemas}.values())
    if any(one is False for one in different):
        return False
    return different[0] if len(different) == 1 else {"allOf": different}


def _identified(schema: object, name: str) -> object | None:
    """Return the schema, this one or one below it, whose $id is `name` or ends with it; None if
    there is none."""
    inner: Iterator[object] = iter(())
    if isinstance(schema, dict):
        own = schema.get("$id", schema.get("id"))
        if isinstance(own, str) and (own == name or own.endswith(f"/{name}")):
            return schema
        inner = iter(schema.values())
    elif isinstance(schema, list):
        inner = iter(schema)
    return next((found for one in inner if (found := _identified(one, name)) is not None), None)


def _anchored(schema: object, anchor: str) -> object | None:
    """Return the schema below this one that has the anchor; None if there is none."""
    if isinstance(schema, dict):
        if anchor in (schema.get("$anchor"), schema.get("$dynamicAnchor")):
            return schema
        inner: Iterator[object] = iter(schema.values())
    elif isinstance(schema, list):
        inner = iter(schema)
    else:
        return None
    return next((found for one in inner if (found := _anchored(one, anchor)) is not None), None)


def _end_of_group(pattern: str) -> int | None:
    """Return the index of the parenthesis that closes the one at the beginning of the pattern; None
    if there is none."""
    level = 0
    is_class = False
    index = 0
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 1
        elif is_class:
            is_class = character != "]"
        elif character == "[":
            is_class = True
        elif character == "(":
            level += 1
        elif character == ")":
            level -= 1
            if level == 0:
                return index
        index += 1
    return None


def _finds(pattern: str, name: str) -> bool:
    try:
        return re.search(pattern, name) is not None
    except re.error:
        return False


def _listed(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the values of an `enum` or `const`; None if there is neither."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) else None


def _canonical(value: object) -> str:
    """Return a text that is equal for equal JSON values: 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)


def _type(value: object) -> str:
    """Return the type of a value as schemas name it; "number" for integers, too."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "number"


def _types_of(value: object) -> set[str]:
    """Return all type names of a value in schemas."""
    is_whole = isinstance(value, int | float) and not isinstance(value, bool)
    is_whole = is_whole and float(value).is_integer()  # type: ignore[arg-type]
    return {_type(value)} | ({"integer"} if is_whole else set())
