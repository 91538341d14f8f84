"""What JSON values may look like: shapes that read a value strictly and say themselves as JSON
Schema; objects of known keys are in `records`.

One table of shapes is both the check of a body and its description in the OpenAPI document, so the
two cannot differ. Pure; any thread.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from process.errors import InvalidArgument
from services.router.chat_messages import MAX_DEPTH

SHOWN_CHARS = 40
"""Of a key of the sender's, in an error."""
_NUM_AT_ONCE = 16_384
"""Entries: about half a millisecond."""
_EXACT = 2**53
"""Whole numbers up to here are the same as a float."""


class Shape(Protocol):
    """One kind of value."""

    @property
    def what(self) -> str:
        """In an error: "must be <what>"."""

    def takes(self, value: object) -> bool:
        """Whether a value is of this JSON type at all; `read` may still refuse it."""

    def read(self, value: Any, path: str) -> Any:
        """The value as the program uses it. Raises: InvalidArgument naming the place."""

    def schema(self) -> dict[str, Any]:
        """As JSON Schema."""


@dataclass(frozen=True)
class Text:
    """A string of whole characters."""

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
    """A number within bounds, both included."""

    low: float
    high: float
    what: str = "a number"

    def takes(self, value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    def read(self, value: Any, path: str) -> float:
        if not self.takes(value):
            raise wrong(path, self.what, value)
        # Compared before it is converted: an int may be beyond every float. NaN fails, too.
        if not self.low <= value <= self.high:
            raise InvalidArgument(path, f"must be from {self.low:g} to {self.high:g}")
        return float(value)

    def schema(self) -> dict[str, Any]:
        return {"type": "number", "minimum": self.low, "maximum": self.high}


@dataclass(frozen=True)
class Integer:
    """A whole number within bounds, both included."""

    low: int
    high: int
    what: str = "a whole number"

    def takes(self, value: object) -> bool:
        if isinstance(value, float):
            # JSON knows one kind of number: 5.0 is 5.
            return math.isfinite(value) and value.is_integer() and abs(value) <= _EXACT
        return isinstance(value, int) and not isinstance(value, bool)

    def read(self, value: Any, path: str) -> int:
        if not self.takes(value):
            raise wrong(path, self.what, value)
        if not self.low <= value <= self.high:
            raise InvalidArgument(path, f"must be from {self.low} to {self.high}")
        return int(value)

    def read_all(self, values: Sequence[Any], path: str) -> list[int]:
        """A whole list. Costs nanoseconds an entry, where `read` costs a microsecond: lists of ids
        are long. Part by part: each is one call into C, for which every other thread waits.
        """
        read: list[int] = []
        for begin in range(0, len(values), _NUM_AT_ONCE):
            read += self._read_part(values[begin : begin + _NUM_AT_ONCE], path, begin)
        return read

    def _read_part(self, values: Sequence[Any], path: str, begin: int) -> list[int]:
        if set(map(type, values)) <= {int, float}:
            with contextlib.suppress(OverflowError, ValueError):  # infinite, or no number
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
    """True or false."""

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
    """A list of alike values."""

    item: Shape
    least: int = 0
    most: int | None = None

    @property
    def what(self) -> str:
        return f"a list, each entry {self.item.what}"

    def takes(self, value: object) -> bool:
        # By its first entry: what tells a list of strings from a list of ids.
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
    """An object with any keys and alike values."""

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
    """An object that is handed on as it is: a JSON schema, a template's arguments."""

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
    """The first shape that reads it, of those whose JSON type fits: an empty list is a list of
    anything."""

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
    """Raises: InvalidArgument for half a character, which JSON's escapes allow to write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(path, "holds half a surrogate pair, which is no character") from None


def _check_inside(value: object, path: str) -> None:
    """Every string inside, keys too, and how deep it goes: what reads it later is recursive. This
    is not.
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
    """The error for a value of another JSON type."""
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    kind = "nothing" if value is None else kinds.get(type(value), "a number")
    return InvalidArgument(path, f"must be {what}, but is {kind}")


def shown(key: str) -> str:
    """A key of the sender's, short and printable."""
    return key[:SHOWN_CHARS].encode("unicode_escape").decode()


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}
