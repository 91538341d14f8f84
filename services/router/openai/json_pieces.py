"""JsonPieces: a JSON parser for large texts that makes many short calls into C instead of one long
one. Pure; any thread.

`json.loads` holds the GIL until it returns: 0.1 s and more for 4 MiB, during which no other thread
runs. JsonPieces parses a container that is longer than a window of text in parts. It parses the
entries that fit into one window as a container of their own where that is valid JSON, else entry by
entry. It accepts the same texts as `json.loads` with the same values, but limits nesting to
MAX_DEPTH.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from json.decoder import JSONDecodeError
from typing import Any

WINDOW = 32 * 1024
"""Characters that are parsed in one call. An array of numbers of this length takes less than a
millisecond; guessed to hold for other values.
"""
MAX_DEPTH = 128
"""Nesting levels at which containers are parsed in parts."""

_SMALL = 2048
"""Length in characters up to which a whole entry is parsed in one call."""
_FEWEST_SINGLY, _MOST_SINGLY = 16, 4096
"""Entries that are parsed one by one before the next attempt at several: doubled after each attempt
that fails, up to the second value.
"""
_TAIL = 3
"""Characters at the end of an entry by which a later end is found: similar entries end alike."""
_SPACE = re.compile(r"[ \t\n\r]*")
_END = {"[": "]", "{": "}"}
_Scan = Callable[[str, int], tuple[Any, int]]
"""Parser of the value at a position of a text. Returns the value and its end; raises StopIteration
where there is no value.
"""


@dataclass(frozen=True)
class JsonPieces:
    """Parser of whole texts. Raises: JSONDecodeError with a position; ValueError for a number that
    Python cannot hold or a constant that `no_constant` refuses; RecursionError.
    """

    no_constant: Callable[[str], Any]
    """Called with NaN, Infinity or -Infinity, which Python accepts and JSON does not define."""
    window: int = WINDOW

    def loads(self, text: str) -> Any:
        """Parse a whole text."""
        decoder = json.JSONDecoder(parse_constant=self.no_constant)
        scan: _Scan = decoder.scan_once  # type: ignore[attr-defined]  # decoders call it
        value, at = _Reading(text, scan, self.window).value(_skip(text, 0), 0)
        if _skip(text, at) != len(text):
            raise JSONDecodeError("Extra data", text, at)
        return value


@dataclass
class _Tries:
    """State of one container: when to try to parse several entries at once."""

    num_singly: int = _FEWEST_SINGLY
    """Entries to parse one by one after the next attempt that fails."""
    num_left: int = 1
    """Entries until the next attempt."""
    tail: str = ""
    """End of the entry that was parsed last."""

    def is_due(self) -> bool:
        """Return whether to try now. Each call counts as one entry."""
        self.num_left -= 1
        if self.num_left:
            return False
        self.num_left, self.num_singly = self.num_singly, min(2 * self.num_singly, _MOST_SINGLY)
        return True

    def went_well(self) -> None:
        """Note that an attempt succeeded: the next one follows at once."""
        self.num_left, self.num_singly = 1, _FEWEST_SINGLY


@dataclass(frozen=True)
class _Reading:
    text: str
    scan: _Scan
    window: int

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """Return the value at `at`, and its end."""
        text = self.text
        opening = text[at : at + 1]
        if opening not in _END:
            return self._scalar(at)
        if depth >= MAX_DEPTH:
            raise RecursionError
        try:
            value, length = self.scan(text[at : at + min(_SMALL, self.window)], 0)
            return value, at + length
        except (StopIteration, ValueError):
            pass  # longer than that, or invalid: the code below tells which
        return self._list(at, depth) if opening == "[" else self._object(at, depth)

    def _scalar(self, at: int) -> tuple[Any, int]:
        try:
            return self.scan(self.text, at)
        except StopIteration:
            raise JSONDecodeError("Expecting value", self.text, at) from None

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        found: list[Any] = []
        at = _skip(self.text, at + 1)
        if self.text[at : at + 1] == "]":
            return found, at + 1
        tries = _Tries()
        while True:
            several = self._several("[", at, tries)
            if several is not None:
                values, at = several
                found += values
                continue
            value, at = self.value(at, depth + 1)
            found.append(value)
            tries.tail = self.text[at - _TAIL : at]
            at, is_over = self._after_entry(at, "]")
            if is_over:
                return found, at

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        at = _skip(self.text, at + 1)
        if self.text[at : at + 1] == "}":
            return found, at + 1
        tries = _Tries()
        while True:
            several = self._several("{", at, tries)
            if several is not None:
                values, at = several
                found.update(values)  # the last of two entries with one name counts
                continue
            name, at = self._name(at)
            found[name], at = self.value(at, depth + 1)
            tries.tail = self.text[at - _TAIL : at]
            at, is_over = self._after_entry(at, "}")
            if is_over:
                return found, at

    def _name(self, at: int) -> tuple[str, int]:
        """Return the name of an object's entry, and the position of its value."""
        text = self.text
        if text[at : at + 1] != '"':
            raise JSONDecodeError("Expecting property name", text, at)
        name, at = self._scalar(at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise JSONDecodeError("Expecting ':' delimiter", text, at)
        return name, _skip(text, at + 1)

    def _after_entry(self, at: int, end: str) -> tuple[int, bool]:
        """Return the position of the next entry and False, or the end of the container and True."""
        text = self.text
        at = _skip(text, at)
        mark = text[at : at + 1]
        if mark == end:
            return at + 1, True
        if mark != ",":
            raise JSONDecodeError("Expecting ',' delimiter", text, at)
        at = _skip(text, at + 1)
        if text[at : at + 1] == end:
            raise JSONDecodeError("Expecting value", text, at)
        return at, False

    def _several(self, opening: str, at: int, tries: _Tries) -> tuple[Any, int] | None:
        """Parse the next entries that lie within a window. Returns: them and the position of the
        entry after them; None where no cut is found or no attempt is due. Text before a comma that
        parses as entries can only be entries, since JSON is parsed from the left without ambiguity.
        """
        text, stop = self.text, at + self.window
        if stop >= len(text) or not tries.is_due():
            return None  # the container's end may be near: entry by entry
        for mark in (f"{tries.tail},", ","):
            cut = text.rfind(mark, at, stop)
            if cut < 0:
                continue
            cut += len(mark) - 1
            piece = f"{opening}{text[at:cut]}{_END[opening]}"
            try:
                values, length = self.scan(piece, 0)
            except (StopIteration, ValueError):
                continue
            if length != len(piece) or not values:
                continue
            at = _skip(text, cut + 1)
            if text[at : at + 1] == _END[opening]:
                raise JSONDecodeError("Expecting value", text, at)
            tries.went_well()
            return values, at
        return None


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None  # the pattern matches an empty string
    return match.end()
