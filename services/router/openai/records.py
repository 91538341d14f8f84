"""Objects of known keys: a body, a message, a tool. Null is as good as absent; a key that no record
has is refused with the nearest that one has. Pure; any thread.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from process.errors import InvalidArgument
from services.router.openai.shapes import SHOWN_CHARS, Shape, shown, wrong


@dataclass(frozen=True)
class Refused:
    """A field of the API that is not served, but for values that change nothing."""

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
class Field:
    """One key of a record."""

    name: str
    shape: Shape
    note: str = ""
    is_needed: bool = False


@dataclass(frozen=True)
class Record:
    """An object of known keys."""

    fields: Sequence[Field]
    what: str = "an object"
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    """What stands here under another name: names that other servers have, and ours."""
    _by_name: Mapping[str, Field] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {entry.name: entry for entry in self.fields})

    def has(self, key: str) -> bool:
        """Whether it is one of these keys."""
        return key in self._by_name

    def takes(self, value: object) -> bool:
        return isinstance(value, dict)

    def read(self, value: Any, path: str) -> dict[str, Any]:
        """The keys that were given and are not null."""
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
        """What a key that is none of these might have meant; empty: no guess."""
        if key in self.elsewhere:
            return self.elsewhere[key]
        for entry in self.fields:
            if isinstance(entry.shape, Record) and entry.shape.has(key):
                return f"{entry.name}.{key}"
        # Of a long key only the beginning: what it costs grows with its length.
        return next(iter(difflib.get_close_matches(key[:SHOWN_CHARS], self._by_name, n=1)), "")


@dataclass(frozen=True)
class Tagged:
    """One of several records, told apart by one of their keys."""

    tag: str
    records: Mapping[str, Record]
    refused: Mapping[str, str] = field(default_factory=dict)
    """Kinds of the API that are not served, and why."""
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
