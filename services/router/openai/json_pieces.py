"""A large JSON text to its value, in many short calls into C instead of one long one.

`json.loads` keeps the interpreter's lock until it is through: 0.1 s and more of 4 MiB, during which
no other thread does anything. Here a container that is not over after a window of text is taken
apart: as many of its entries as one window holds are read at once, as a container of their own,
where that is JSON; else entry by entry. The same texts are accepted as by `json.loads`, with the
same values, but for the one bound MAX_DEPTH. Pure; any thread.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from json.decoder import JSONDecodeError
from typing import Any

WINDOW = 32 * 1024
"""Characters that are read at once: below a millisecond of numbers, guessed to be the same of all
else."""
MAX_DEPTH = 128
"""Levels at which containers are taken apart."""

_SMALL = 2048
"""Characters of one entry that are tried at once."""
_FEWEST_SINGLY, _MOST_SINGLY = 16, 4096
"""Entries that are read one by one before several are tried again: twice as many after each try in
vain."""
_TAIL = 3
"""Characters at an entry's end by which a later one's is looked for: alike entries end alike."""
_SPACE = re.compile(r"[ \t\n\r]*")
_END = {"[": "]", "{": "}"}
_Scan = Callable[[str, int], tuple[Any, int]]
"""The value that begins at a place of a text, and where it ends; StopIteration: there is none."""


@dataclass(frozen=True)
class JsonPieces:
    """Reads texts. Raises: JSONDecodeError with a position, ValueError for a number that cannot be
    held or that `no_constant` refuses, RecursionError.
    """

    no_constant: Callable[[str], Any]
    """Called with NaN, Infinity or -Infinity, which Python writes and JSON does not know."""
    window: int = WINDOW

    def loads(self, text: str) -> Any:
        """The value of a whole text."""
        decoder = json.JSONDecoder(parse_constant=self.no_constant)
        scan: _Scan = decoder.scan_once  # type: ignore[attr-defined]  # it is what decoders call
        value, at = _Reading(text, scan, self.window).value(_skip(text, 0), 0)
        if _skip(text, at) != len(text):
            raise JSONDecodeError("Extra data", text, at)
        return value


@dataclass
class _Tries:
    """Of one container: when it is worth it to read several entries at once."""

    num_singly: int = _FEWEST_SINGLY
    """To read one by one after the next try in vain."""
    num_left: int = 1
    """Until the next try."""
    tail: str = ""
    """Of the entry that was read last."""

    def is_due(self) -> bool:
        """Whether to try now; each asking is for one entry."""
        self.num_left -= 1
        if self.num_left:
            return False
        self.num_left, self.num_singly = self.num_singly, min(2 * self.num_singly, _MOST_SINGLY)
        return True

    def went_well(self) -> None:
        """Go on like this."""
        self.num_left, self.num_singly = 1, _FEWEST_SINGLY


@dataclass(frozen=True)
class _Reading:
    text: str
    scan: _Scan
    window: int

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that begins at `at`, and where it ends."""
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
            pass  # not over by then, or wrong: both are found below
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
                found.update(values)  # of two entries of one name the last one counts
                continue
            name, at = self._name(at)
            found[name], at = self.value(at, depth + 1)
            tries.tail = self.text[at - _TAIL : at]
            at, is_over = self._after_entry(at, "}")
            if is_over:
                return found, at

    def _name(self, at: int) -> tuple[str, int]:
        """Of an entry, and where its value begins."""
        text = self.text
        if text[at : at + 1] != '"':
            raise JSONDecodeError("Expecting property name", text, at)
        name, at = self._scalar(at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise JSONDecodeError("Expecting ':' delimiter", text, at)
        return name, _skip(text, at + 1)

    def _after_entry(self, at: int, end: str) -> tuple[int, bool]:
        """Where the next entry begins, or where the container ends, and whether it does."""
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
        """The next entries that are whole within a window, and where the one behind them begins;
        None where no cut shows, or it is not their turn. What reads as entries up to a comma is
        entries: a text has one reading only, from its left.
        """
        text, stop = self.text, at + self.window
        if stop >= len(text) or not tries.is_due():
            return None  # the end of the container may be near: entry by entry
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
    assert match is not None  # nothing matches, too
    return match.end()
