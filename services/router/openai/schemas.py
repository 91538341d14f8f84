"""COMPLETION, CHAT and EMBEDDING: the schemas of the OpenAI API's bodies, with their strict parser
and the translation of the fields that the APIs share. Pure; any thread.

Shapes (`Shape`: Text, Number, ListOf, BodyRecord, ...) read a JSON value strictly and describe
themselves as JSON Schema. The three tables are built from them. A table is both the check of a body
and its description in the OpenAPI document, so the two cannot differ.

Null means absent. An unknown key is refused, and the error names the closest known key. A field of
OpenAI's API that is not served is in the table as `RefusedField`, and is refused with a reason.

`base_request`, `sampling_of` and `response_options` translate the shared fields to GenerateRequest.
Only the form is checked here. RouterService checks the meaning, and its errors name fields of
GenerateRequest; `json_name` returns the name that the body has for such a field.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from process.rpc_errors import InvalidArgument
from protos import common_pb2, inference_pb2
from services.router.request import MAX_DEPTH


@dataclass(frozen=True)
class RefusedField:
    """A field of the API that is not served. Values in `unless`, which change nothing, are
    accepted.
    """

    why: str
    unless: tuple[Any, ...] = ()
    what: str = "absent"

    def takes(self, value: object) -> bool:
        return True

    def read(self, value: Any, path: str) -> None:
        if not any(type(value) is type(harmless) and value == harmless for harmless in self.unless):
            raise InvalidArgument(path, self.why)

    def schema(self) -> dict[str, Any]:
        return {"enum": [*self.unless, None], "description": f"Not served: {self.why}"}


@dataclass(frozen=True)
class BodyField:
    """One key of a record."""

    name: str
    shape: Shape
    note: str = ""
    is_needed: bool = False


@dataclass(frozen=True)
class BodyRecord:
    """An object with known keys."""

    fields: Sequence[BodyField]
    what: str = "an object"
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """Hints for keys that have another name here: other servers' names, and Baton's."""
    _by_name: Mapping[str, BodyField] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {entry.name: entry for entry in self.fields})

    def has(self, key: str) -> bool:
        """Return whether the record has this key."""
        return key in self._by_name

    def takes(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str) -> dict[str, Any]:
        """Return the keys that are present and not null. Raises: InvalidArgument naming the key."""
        if not isinstance(value, dict):
            raise wrong(path or "body", self.what, value)
        prefix = f"{path}." if path else ""
        for key in value:
            if key not in self._by_name:
                raise InvalidArgument(f"{prefix}{shown(key)}", self._unknown(key))
        found = {}
        for entry in self.fields:
            given = value.get(entry.name)
            if given is not None:
                found[entry.name] = entry.shape.read(given, prefix + entry.name)
            elif entry.is_needed:
                raise InvalidArgument(prefix + entry.name, "is needed")
        return found

    def schema(self) -> dict[str, Any]:
        properties = {}
        for entry in self.fields:
            schema = entry.shape.schema()
            if not entry.is_needed and None not in schema.get("enum", ()):
                schema = {"anyOf": [schema, {"type": "null"}]}
            if entry.note:
                schema = {**schema, "description": entry.note}
            properties[entry.name] = schema
        needed = [entry.name for entry in self.fields if entry.is_needed]
        return {
            "type": "object",
            "properties": properties,
            "additionalProperties": False,
            **({"required": needed} if needed else {}),
        }

    def _unknown(self, key: str) -> str:
        near = self._near(key)
        return "is unknown here" + (f"; did you mean {near}?" if near else "")

    def _near(self, key: str) -> str:
        """Return the key that an unknown one may have meant; empty: no guess."""
        if key in self.elsewhere:
            return self.elsewhere[key]
        for entry in self.fields:
            if isinstance(entry.shape, BodyRecord) and entry.shape.has(key):
                return f"{entry.name}.{key}"
        # Only the beginning of a long key is compared: the cost grows with its length.
        return next(iter(difflib.get_close_matches(key[:SHOWN_CHARS], self._by_name, n=1)), "")


@dataclass(frozen=True)
class Tagged:
    """One of several records, chosen by the value of one key."""

    tag: str
    records: Mapping[str, BodyRecord]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Values of the API that are not served, and why."""
    what: str = "an object"

    def takes(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(path, self.what, value)
        kind = value.get(self.tag)
        if isinstance(kind, str) and kind in self.refused:
            raise InvalidArgument(f"{path}.{self.tag}", self.refused[kind])
        if not isinstance(kind, str) or kind not in self.records:
            raise InvalidArgument(f"{path}.{self.tag}", f"must be one of {', '.join(self.records)}")
        return self.records[kind].read(value, path)

    def schema(self) -> dict[str, Any]:
        return {"oneOf": [record.schema() for record in self.records.values()]}


SHOWN_CHARS = 40
"""Characters of an unknown key that an error shows."""
_NUM_AT_ONCE = 16_384
"""List entries that are checked in one call: about half a millisecond."""
_EXACT = 2**53
"""Limit up to which a float holds every whole number exactly."""


class Shape(Protocol):
    """A kind of JSON value, with a parser and a JSON Schema."""

    @property
    def what(self) -> str:
        """Description for errors: "must be <what>"."""

    def takes(self, value: object) -> bool:
        """Return whether a value is of this JSON type; `read` may still refuse it."""

    def read(self, value: Any, path: str) -> Any:
        """Return the value in the form that the program uses. Raises: InvalidArgument naming the
        field.
        """

    def schema(self) -> dict[str, Any]:
        """Return the shape as JSON Schema."""


@dataclass(frozen=True)
class Text:
    """A string of valid Unicode."""

    min_chars: int = 0
    max_chars: int | None = None
    what: str = "a string"

    def takes(self, value: object) -> bool:
        return isinstance(value, str)

    def read(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise wrong(path, self.what, value)
        check_unicode(value, path)
        if len(value) < self.min_chars:
            raise InvalidArgument(path, "is empty" if not value else "is too short")
        if self.max_chars is not None and len(value) > self.max_chars:
            raise InvalidArgument(path, f"must be at most {self.max_chars} characters")
        return value

    def schema(self) -> dict[str, Any]:
        bounds = {"minLength": self.min_chars or None, "maxLength": self.max_chars}
        return {"type": "string", **_given(bounds)}


@dataclass(frozen=True)
class Number:
    """A number within inclusive bounds."""

    low: float
    high: float
    what: str = "a number"

    def takes(self, value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def read(self, value: Any, path: str) -> float:
        if not self.takes(value):
            raise wrong(path, self.what, value)
        # Compared before conversion: an int may be too large for a float. NaN fails, too.
        if not self.low <= value <= self.high:
            raise InvalidArgument(path, f"must be from {self.low:g} to {self.high:g}")
        return float(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Integer:
    """A whole number within inclusive bounds."""

    low: int
    high: int
    what: str = "a whole number"

    def takes(self, value: object) -> bool:
        if isinstance(value, float):
            # JSON has one number type: 5.0 is 5.
            return math.isfinite(value) and value.is_integer() and abs(value) <= _EXACT
        return isinstance(value, int) and not isinstance(value, bool)

    def read(self, value: Any, path: str) -> int:
        if not self.takes(value):
            raise wrong(path, self.what, value)
        if not self.low <= value <= self.high:
            raise InvalidArgument(path, f"must be from {self.low} to {self.high}")
        return int(value)

    def read_all(self, values: Sequence[Any], path: str) -> list[int]:
        """Read a whole list; `path` names the list. An entry costs nanoseconds, where `read` costs
        a microsecond: lists of token ids are long. The list is read in parts, since no other thread
        runs during one call into C.
        """
        read: list[int] = []
        for begin in range(0, len(values), _NUM_AT_ONCE):
            read += self._read_part(values[begin : begin + _NUM_AT_ONCE], path, begin)
        return read

    def _read_part(self, values: Sequence[Any], path: str, begin: int) -> list[int]:
        if set(map(type, values)) <= {int, float}:
            with contextlib.suppress(OverflowError, ValueError):  # infinity or NaN
                whole = list(map(int, values))
                if whole == values and self.low <= min(whole) and max(whole) <= self.high:
                    return whole
        return [
            entry
            if type(entry) is int and self.low <= entry <= self.high
            else self.read(entry, f"{path}[{index}]")
            for index, entry in enumerate(values, begin)
        ]

    def schema(self) -> dict[str, Any]:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Flag:
    """A boolean."""

    what: str = "true or false"

    def takes(self, value: object) -> bool:
        return isinstance(value, bool)

    def read(self, value: Any, path: str) -> bool:
        if not isinstance(value, bool):
            raise wrong(path, self.what, value)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True)
class OneOf:
    """One of a few strings."""

    values: tuple[str, ...]

    @property
    def what(self) -> str:
        return "one of " + ", ".join(self.values)

    def takes(self, value: object) -> bool:
        return isinstance(value, str)

    def read(self, value: Any, path: str) -> str:
        if not isinstance(value, str):
            raise wrong(path, self.what, value)
        if value not in self.values:
            raise InvalidArgument(path, f"must be {self.what}")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "enum": list(self.values)}


@dataclass(frozen=True)
class ListOf:
    """A list of values of one shape."""

    item: Shape
    least: int = 0
    most: int | None = None

    @property
    def what(self) -> str:
        return f"a list, each entry {self.item.what}"

    def takes(self, value: object) -> bool:
        # The first entry tells a list of strings from a list of token ids.
        return isinstance(value, list) and (not value or self.item.takes(value[0]))

    def read(self, value: Any, path: str) -> list[Any]:
        if not isinstance(value, list):
            raise wrong(path, self.what, value)
        if len(value) < self.least:
            raise InvalidArgument(path, "is empty")
        if self.most is not None and len(value) > self.most:
            raise InvalidArgument(path, f"must have at most {self.most} entries")
        if isinstance(self.item, Integer):
            return self.item.read_all(value, path)
        return [self.item.read(entry, f"{path}[{index}]") for index, entry in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        bounds = {"minItems": self.least or None, "maxItems": self.most}
        return {"type": "array", "items": self.item.schema(), **_given(bounds)}


@dataclass(frozen=True)
class MapOf:
    """An object with any keys and values of one shape."""

    item: Shape
    most: int
    what: str = "an object"

    def takes(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(path, self.what, value)
        if len(value) > self.most:
            raise InvalidArgument(path, f"must have at most {self.most} entries")
        return {key: self.item.read(entry, f"{path}[{shown(key)}]") for key, entry in value.items()}

    def schema(self) -> dict[str, Any]:
        return {
            "type": "object",
            "additionalProperties": self.item.schema(),
            "maxProperties": self.most,
        }


@dataclass(frozen=True)
class AnyObject:
    """An object that is passed on unchanged, such as a JSON schema or a template's arguments."""

    what: str = "an object"

    def takes(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise wrong(path, self.what, value)
        _check_inside(value, path)
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "object"}


@dataclass(frozen=True)
class Either:
    """One of several shapes: the first one of a matching JSON type that reads the value. An empty
    list matches every list shape.
    """

    shapes: tuple[Shape, ...]

    @property
    def what(self) -> str:
        return ", or ".join(shape.what for shape in self.shapes)

    def takes(self, value: object) -> bool:
        return any(shape.takes(value) for shape in self.shapes)

    def read(self, value: Any, path: str) -> Any:
        refusal: InvalidArgument | None = None
        for shape in self.shapes:
            if shape.takes(value):
                try:
                    return shape.read(value, path)
                except InvalidArgument as error:
                    refusal = refusal or error
        raise refusal or wrong(path, self.what, value)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [shape.schema() for shape in self.shapes]}


def check_unicode(text: str, path: str) -> None:
    """Check that a string has no lone surrogate, which JSON's escapes can produce. Raises:
    InvalidArgument.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(path, "holds half a surrogate pair, which is no character") from None


def _check_inside(value: object, path: str) -> None:
    """Check every string inside a value, keys included, and the depth, since later readers of the
    value are recursive. This function is not.
    """
    left = [(value, 1)]
    while left:
        part, level = left.pop()
        if isinstance(part, str):
            check_unicode(part, path)
        elif isinstance(part, dict | list):
            if level > MAX_DEPTH:
                raise InvalidArgument(path, f"is nested deeper than {MAX_DEPTH} levels")
            left += [(each, level + 1) for each in part]
            if isinstance(part, dict):
                left += [(each, level + 1) for each in part.values()]


def wrong(path: str, what: str, value: object) -> InvalidArgument:
    """Return the error for a value of the wrong JSON type."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    kind = "nothing" if value is None else kinds.get(type(value), "a number")
    return InvalidArgument(path, f"must be {what}, but is {kind}")


def shown(key: str) -> str:
    """Return a client's key, shortened and printable."""
    return key[:SHOWN_CHARS].encode("unicode_escape").decode()


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


MAX_PROMPTS = 64
"""Limit of prompts in one body of /v1/completions."""
MAX_INPUTS = 2048
"""Limit of inputs in one body of /v1/embeddings."""
MAX_TOOLS = 128
_MAX_ID = 2**31 - 1
_MAX_MESSAGES = 16_384
_MAX_BUDGET_MS = 2**32 - 1

TOKEN_IDS = ListOf(Integer(0, _MAX_ID, what="a token id"), least=1)
_NAME = Text(1, 256)
_LABEL = Text(0, 512)

_OWN = (
    BodyField("provenance", Flag(), "Have the answer say where its KV came from, and stage times."),
    BodyField("budget_ms", Integer(0, _MAX_BUDGET_MS), "Time the whole request may take."),
    BodyField("tenant", Text(0, 64), "Where no key says it."),
    BodyField("session", Text(0, 256), "Conversation, for affinity; as prompt_cache_key."),
    BodyField("adapter", Text(0, 128), "A loaded LoRA adapter; `model` may name it as well."),
    BodyField("priority", Integer(-(2**31), 2**31 - 1), "Larger is sooner."),
)
BATON_OF_EMBEDDING = BodyRecord(_OWN)
BATON = BodyRecord(
    (
        *_OWN,
        BodyField("token_ids", Flag(), "Have each choice carry its token ids."),
        BodyField(
            "regex",
            Text(1),
            "The answer matches it as a whole. \\d, \\w and \\s are ASCII; no look-around.",
        ),
        BodyField(
            "ebnf",
            Text(1),
            "The answer follows this grammar: Lark's dialect (start: ...) or GBNF (root ::= ...).",
        ),
        BodyField("choice", ListOf(Text(1), least=1, most=1024), "The answer is one of these."),
        BodyField("no_repeat_ngram", Integer(0, 64), "No n-gram of so many tokens comes twice."),
    ),
    what="an object",
)

SAMPLING = (
    BodyField("temperature", Number(0, 100), "0 is greedy. Absent: as the model says."),
    BodyField("top_p", Number(0, 1), "Above 0. Absent: as the model says."),
    BodyField("top_k", Integer(-1, _MAX_ID), "0 or -1: off."),
    BodyField("min_p", Number(0, 1), "Below 1."),
    BodyField(
        "seed",
        Integer(-(2**63), 2**64 - 1),
        "Absent: another one each time; the same for one idempotency key.",
    ),
    BodyField("n", Integer(1, 128), "Samples of each prompt."),
    BodyField("stop", Either((Text(), ListOf(Text(1), most=16))), "The answer ends before it."),
    BodyField("stop_token_ids", ListOf(Integer(0, _MAX_ID)), "The answer ends with one of them."),
    BodyField("include_stop_str_in_output", Flag(), "What stopped the answer is part of it."),
    BodyField("presence_penalty", Number(-2, 2)),
    BodyField("frequency_penalty", Number(-2, 2)),
    BodyField("repetition_penalty", Number(0.01, 100), "1: off."),
    BodyField("logit_bias", MapOf(Number(-100, 100), most=1024), "By token id."),
    BodyField("allowed_token_ids", ListOf(Integer(0, _MAX_ID)), "No other token is drawn."),
    BodyField("bad_words", ListOf(Text(1), most=128), "Words that do not come."),
    BodyField("min_tokens", Integer(0, _MAX_ID), "No end before so many tokens."),
    BodyField("ignore_eos", Flag(), "Go on to max_tokens."),
    BodyField("skip_special_tokens", Flag(), "False: control tokens are shown as text."),
)

STREAM_OPTIONS = BodyRecord(
    (
        BodyField("include_usage", Flag(), "A last chunk, without choices, with the usage."),
        BodyField("continuous_usage_stats", Flag(), "The usage so far with every chunk."),
        BodyField(
            "include_obfuscation", RefusedField("chunks are not padded; send false", (False,))
        ),
    )
)

_ELSEWHERE = {
    "guided_regex": "baton.regex",
    "guided_grammar": "baton.ebnf",
    "guided_choice": "baton.choice",
    "guided_json": "response_format",
    "no_repeat_ngram_size": "baton.no_repeat_ngram",
    "num_return_sequences": "n",
    "max_new_tokens": "max_tokens",
}
"""Names that other servers use, and the name here."""

_SHARED = (
    BodyField("model", _LABEL, "A name of /v1/models. Absent: the only model."),
    BodyField("stream", Flag(), "Server-sent events instead of one object."),
    BodyField("stream_options", STREAM_OPTIONS, "With `stream` only."),
    BodyField("user", _LABEL, "A label of yours; ignored."),
    BodyField("safety_identifier", _LABEL, "A label of yours; ignored."),
    BodyField("metadata", MapOf(Text(0, 512), most=16), "Labels of yours; ignored."),
    BodyField("store", RefusedField("nothing is stored here; send false", (False,))),
    BodyField("baton", BATON, "What OpenAI's API has no word for."),
)

_PROMPTS = Either(
    (
        Text(1),
        ListOf(Text(1), least=1, most=MAX_PROMPTS),
        TOKEN_IDS,
        ListOf(TOKEN_IDS, least=1, most=MAX_PROMPTS),
    )
)

COMPLETION = BodyRecord(
    (
        *_SHARED,
        BodyField("prompt", _PROMPTS, "Text, token ids, or several of one kind.", is_needed=True),
        BodyField(
            "max_tokens",
            Integer(0, _MAX_ID),
            "Absent: the router's default. 0: nothing is drawn; with `echo`, the prompt alone.",
        ),
        *SAMPLING,
        BodyField(
            "logprobs",
            Integer(0, 20),
            "Of each token, beside so many others; with `echo`, of the prompt's, too.",
        ),
        BodyField("echo", Flag(), "The text begins with the prompt. With `logprobs`: `n` is 1."),
        BodyField(
            "best_of", RefusedField("not served; ask for n samples and choose among them", (1,))
        ),
        BodyField("suffix", RefusedField("not served: no model here fills in the middle", ("",))),
    ),
    elsewhere=_ELSEWHERE,
)

_INPUTS = Either(
    (
        Text(1),
        ListOf(Text(1), least=1, most=MAX_INPUTS),
        TOKEN_IDS,
        ListOf(TOKEN_IDS, least=1, most=MAX_INPUTS),
    )
)

EMBEDDING = BodyRecord(
    (
        BodyField("model", _LABEL, "A name of /v1/models. Absent: the only model."),
        BodyField("input", _INPUTS, "Text, token ids, or several of one kind.", is_needed=True),
        BodyField("encoding_format", OneOf(("float", "base64")), "Absent: float."),
        BodyField("dimensions", RefusedField("not served: an embedding has the model's own size")),
        BodyField("user", _LABEL, "A label of yours; ignored."),
        BodyField("baton", BATON_OF_EMBEDDING, "What OpenAI's API has no word for."),
    )
)

FUNCTION = BodyRecord(
    (
        BodyField("name", Text(1, 64), "Letters, digits, _ - and .", is_needed=True),
        BodyField("description", Text()),
        BodyField("parameters", AnyObject(), "JSON schema of its arguments."),
        BodyField("strict", Flag(), "A call that is forced follows the schema in any case."),
    )
)
_TYPE_FUNCTION = BodyField("type", OneOf(("function",)), is_needed=True)
TOOL = Tagged(
    "type",
    {"function": BodyRecord((_TYPE_FUNCTION, BodyField("function", FUNCTION, is_needed=True)))},
    {"custom": "only tools of type function are served"},
)
_NAMED_TOOL = Tagged(
    "type",
    {
        "function": BodyRecord(
            (
                _TYPE_FUNCTION,
                BodyField(
                    "function",
                    BodyRecord((BodyField("name", _NAME, is_needed=True),)),
                    is_needed=True,
                ),
            )
        )
    },
    {
        "custom": "only tools of type function are served",
        "allowed_tools": "not served; send only the tools that are allowed",
    },
)
TOOL_CHOICE = Either((OneOf(("none", "auto", "required")), _NAMED_TOOL))

RESPONSE_FORMAT = Tagged(
    "type",
    {
        "text": BodyRecord((BodyField("type", OneOf(("text",)), is_needed=True),)),
        "json_object": BodyRecord((BodyField("type", OneOf(("json_object",)), is_needed=True),)),
        "json_schema": BodyRecord(
            (
                BodyField("type", OneOf(("json_schema",)), is_needed=True),
                BodyField(
                    "json_schema",
                    BodyRecord(
                        (
                            BodyField("name", _NAME, is_needed=True),
                            BodyField("schema", AnyObject(), is_needed=True),
                            BodyField("description", Text()),
                            BodyField("strict", Flag(), "The schema holds in any case."),
                        )
                    ),
                    is_needed=True,
                ),
            )
        ),
    },
)

_NO_PARTS = dict.fromkeys(
    ("image_url", "input_audio", "file"), "only parts of type text are served"
)
_PART = Tagged(
    "type",
    {
        "text": BodyRecord(
            (
                BodyField("type", OneOf(("text",)), is_needed=True),
                BodyField("text", Text(), is_needed=True),
                BodyField("cache_control", AnyObject(), "Of another API; means nothing here."),
            )
        )
    },
    _NO_PARTS,
)
_SAID_PART = Tagged(
    "type",
    {
        **_PART.records,
        "refusal": BodyRecord(
            (
                BodyField("type", OneOf(("refusal",)), is_needed=True),
                BodyField("refusal", Text(), is_needed=True),
            )
        ),
    },
    _NO_PARTS,
)
"""A content part of an assistant's message."""
_CONTENT = BodyField("content", Either((Text(), ListOf(_PART))), is_needed=True)
_TOOL_CALL = BodyRecord(
    (
        BodyField("id", _NAME, is_needed=True),
        _TYPE_FUNCTION,
        BodyField(
            "function",
            BodyRecord(
                (
                    BodyField("name", _NAME, is_needed=True),
                    BodyField("arguments", Text(), "As the model wrote them: JSON, if not cut."),
                )
            ),
            is_needed=True,
        ),
        BodyField("index", Integer(0, _MAX_ID), "As a stream gave it; means nothing here."),
    )
)


def _message(role: str, *more: BodyField) -> BodyRecord:
    return BodyRecord(
        (BodyField("role", OneOf((role,)), is_needed=True), *more, BodyField("name", _LABEL))
    )


MESSAGE = Tagged(
    "role",
    {
        "system": _message("system", _CONTENT),
        "developer": _message("developer", _CONTENT),
        "user": _message("user", _CONTENT),
        "assistant": _message(
            "assistant",
            BodyField(
                "content",
                Either((Text(), ListOf(_SAID_PART))),
                "May be absent beside tool_calls, a refusal, or reasoning_content.",
            ),
            BodyField("tool_calls", ListOf(_TOOL_CALL, most=MAX_TOOLS)),
            BodyField("refusal", Text(), "Shown to the model where there is no content."),
            BodyField("reasoning_content", Text(), "For chat templates that show it."),
            BodyField("reasoning", Text(), "Another name of reasoning_content."),
            BodyField("annotations", ListOf(AnyObject()), "Means nothing here."),
            BodyField("audio", RefusedField("only text is served")),
            BodyField("function_call", RefusedField("deprecated; send tool_calls")),
        ),
        "tool": _message(
            "tool",
            BodyField("content", _CONTENT.shape, "Absent: the call gave nothing."),
            BodyField("tool_call_id", _NAME, is_needed=True),
        ),
    },
    {"function": "deprecated; send role tool with a tool_call_id"},
)

CHAT = BodyRecord(
    (
        *_SHARED,
        BodyField("messages", ListOf(MESSAGE, least=1, most=_MAX_MESSAGES), is_needed=True),
        BodyField("max_completion_tokens", Integer(1, _MAX_ID), "Absent: the router's default."),
        BodyField("max_tokens", Integer(1, _MAX_ID), "The older name of max_completion_tokens."),
        *SAMPLING,
        BodyField("logprobs", Flag(), "Of each token."),
        BodyField(
            "top_logprobs", Integer(0, 20), "With `logprobs`: of so many others, too. 0: none."
        ),
        BodyField("response_format", RESPONSE_FORMAT),
        BodyField(
            "tools", ListOf(TOOL, most=MAX_TOOLS), "For models whose chat template takes them."
        ),
        BodyField("tool_choice", TOOL_CHOICE, "Absent: auto if there are tools."),
        BodyField("parallel_tool_calls", Flag(), "False: at most one call in an answer."),
        BodyField("chat_template_kwargs", AnyObject(), "Variables of the chat template."),
        BodyField("prompt_cache_key", _LABEL, "Requests of one key meet the same workers."),
        BodyField("service_tier", RefusedField("there is one tier", ("auto", "default"))),
        BodyField("modalities", RefusedField("only text is served", (["text"],))),
        BodyField("audio", RefusedField("only text is served")),
        BodyField("prediction", RefusedField("not served")),
        BodyField("reasoning_effort", RefusedField("not served; say it in chat_template_kwargs")),
        BodyField("verbosity", RefusedField("not served; say it in a message", ("medium",))),
        BodyField("web_search_options", RefusedField("there is no web search here")),
        BodyField("prompt_cache_retention", RefusedField("the store decides what is kept")),
        BodyField("functions", RefusedField("deprecated; send tools", ([],))),
        BodyField("function_call", RefusedField("deprecated; send tool_choice", ("none",))),
    ),
    elsewhere=_ELSEWHERE,
)


_AS_THEY_ARE = (
    *("temperature", "top_p", "min_p", "n", "stop_token_ids", "presence_penalty"),
    *("frequency_penalty", "repetition_penalty", "allowed_token_ids", "bad_words", "min_tokens"),
    "ignore_eos",
)
_TOKEN_ID = re.compile(r"\d{1,10}")

_PROMPT_NAMES = ("text", "token_ids.ids")
_CALL = re.compile(r"chat\.(messages\[\d+\]\.tool_calls\[\d+\])\.(name|arguments)")
_JSON_NAMES = {
    "chat": "messages",
    "chat.messages": "messages",
    "chat.tools": "tools",
    "chat.template_arguments": "chat_template_kwargs",
    "request_id": "idempotency-key",
    "sampling.include_stop_text": "include_stop_str_in_output",
    "sampling.json_schema": "response_format",
    "sampling.choice.values": "baton.choice",
    "sampling.stop_at_tool_call": "parallel_tool_calls",
    **{f"sampling.{name}": f"baton.{name}" for name in ("regex", "ebnf", "no_repeat_ngram")},
    **{name: f"baton.{name}" for name in ("budget_ms", "tenant", "session", "adapter", "priority")},
}


def sampling_of(body: Mapping[str, Any], max_tokens: int | None) -> common_pb2.SamplingParams:
    """Translate a body's sampling fields, except logprobs and the grammar of a chat. Raises:
    InvalidArgument.
    """
    sampling = common_pb2.SamplingParams()
    for name in _AS_THEY_ARE:
        if name in body:
            _set(sampling, name, body[name])
    if max_tokens is not None:
        sampling.max_tokens = max_tokens
    if "top_k" in body:
        sampling.top_k = max(0, body["top_k"])
    if "seed" in body:
        sampling.seed = body["seed"] % 2**64  # OpenAI's seeds are signed
    stop = body.get("stop", ())
    sampling.stop.extend([stop] if isinstance(stop, str) else stop)
    sampling.include_stop_text = body.get("include_stop_str_in_output", False)
    for token, bias in body.get("logit_bias", {}).items():
        if not _TOKEN_ID.fullmatch(token) or int(token) >= 2**31:
            raise InvalidArgument("logit_bias", "its keys must be token ids")
        sampling.logit_bias[int(token)] = bias
    own = body.get("baton", {})
    sampling.no_repeat_ngram = own.get("no_repeat_ngram", 0)
    grammars = [name for name in ("regex", "ebnf", "choice") if name in own]
    if len(grammars) > 1:
        raise InvalidArgument(f"baton.{grammars[1]}", f"does not go with baton.{grammars[0]}")
    for name in grammars:
        force(sampling, name, own[name])
    return sampling


def force(sampling: common_pb2.SamplingParams, kind: str, grammar: Any) -> None:
    """Constrain the text by a grammar. `kind`: a member of the message's oneof `grammar`;
    `grammar`: its value, a JSON schema as an object.
    """
    if kind == "choice":
        sampling.choice.values.extend(grammar)
    elif kind == "json_schema":
        sampling.json_schema = json.dumps(grammar, ensure_ascii=False)
    else:
        setattr(sampling, kind, grammar)


def json_name(field: str, *, body: Mapping[str, Any]) -> str:
    """Return the name that `body`, as the client sent it, has for a field of GenerateRequest."""
    own = body.get("baton", {})
    if field == "prompt_logprobs":
        return "logprobs"
    if field == "sampling.logprobs" and "messages" in body:
        return "top_logprobs"
    if field == "sampling.max_tokens" and "max_completion_tokens" in body:
        return "max_completion_tokens"
    if field == "sampling.json_schema" and "response_format" not in body:
        return "tools"  # the schema of a forced call
    if field == "session" and "session" not in own:
        return "prompt_cache_key"
    if field == "adapter" and "adapter" not in own:
        return "model"
    whole, bracket, rest = field.partition("[")
    if whole in _PROMPT_NAMES:
        return ("input" if "input" in body else "prompt") + bracket + rest
    if call := _CALL.fullmatch(field):
        return f"{call[1]}.function.{call[2]}"
    for known in (field, whole):
        if known in _JSON_NAMES:
            return _JSON_NAMES[known] + (bracket + rest if known == whole else "")
    return field.removeprefix("sampling.").removeprefix("chat.")


def _set(sampling: common_pb2.SamplingParams, name: str, value: Any) -> None:
    if isinstance(value, list):
        getattr(sampling, name).extend(value)
    else:
        setattr(sampling, name, value)


_BATON_FIELDS = ("tenant", "session", "adapter", "priority", "budget_ms")


@dataclass(frozen=True)
class ResponseOptions:
    """Which parts the answer has."""

    is_streamed: bool = False
    has_usage: bool = False
    """Whether a stream ends with the usage."""
    has_running_usage: bool = False
    """Whether every chunk of a stream has the usage so far."""
    has_account: bool = False
    """Whether the answer says where its KV came from, with stage times."""
    has_token_ids: bool = False


def response_options(body: Mapping[str, Any]) -> ResponseOptions:
    """Return the options of a body. Raises: InvalidArgument for stream options without `stream`."""
    options, own = body.get("stream_options", {}), body.get("baton", {})
    is_streamed = body.get("stream", False)
    if options and not is_streamed:
        raise InvalidArgument("stream_options", "needs stream: true")
    return ResponseOptions(
        is_streamed,
        has_usage=options.get("include_usage", False),
        has_running_usage=options.get("continuous_usage_stats", False),
        has_account=own.get("provenance", False),
        has_token_ids=own.get("token_ids", False),
    )


def base_request(body: Mapping[str, Any]) -> inference_pb2.GenerateRequest:
    """Translate the fields that both APIs share, without prompt and sampling."""
    request = inference_pb2.GenerateRequest(
        model=body.get("model", ""),
        session=body.get("prompt_cache_key", ""),
        show_special_tokens=not body.get("skip_special_tokens", True),
    )
    own = body.get("baton", {})
    for name in _BATON_FIELDS:
        if name in own:
            setattr(request, name, own[name])
    return request
