"""One tool call written as a JSON object, read while it is still being written.

    {"name": "search", "arguments": {"query": "..."}}

The name is known as soon as its string ends, and the arguments are handed on as they come, as they
are written; `parameters` is another word for them. Other keys are passed over. Knows nothing of
what stands around the object. One thread at a time.
"""

from __future__ import annotations

import json
from typing import Protocol

_SPACE = " \t\r\n"
_ARGUMENTS = ("arguments", "parameters")


class CallObject(Protocol):
    """One object. Life: feed until `is_over` or `is_broken`."""

    is_over: bool
    """The object was closed: no character behind it belongs to it."""
    is_broken: bool
    """This is no call: no object, no name, or no JSON."""
    raw: str
    """All that was fed."""
    name: str | None
    """None: not known yet."""

    def feed(self, character: str) -> None:
        """Take the next one."""

    def take_arguments(self) -> str:
        """What came of the arguments since the last call, once the name is known."""


class Nesting:
    """Where JSON text is: inside a string, inside brackets, or at its top."""

    def __init__(self) -> None:
        self.is_broken = False
        """A bracket closed that was not open."""
        self._open: list[str] = []
        self._is_text = self._is_escape = False

    @property
    def is_top(self) -> bool:
        """Every string and bracket is closed."""
        return not (self._open or self._is_text)

    def feed(self, character: str) -> None:
        """Take the next one."""
        if self._is_escape:
            self._is_escape = False
        elif self._is_text:
            self._is_escape = character == "\\"
            self._is_text = character != '"'
        elif character == '"':
            self._is_text = True
        elif character in "{[":
            self._open.append("}" if character == "{" else "]")
        elif character in "}]" and (not self._open or self._open.pop() != character):
            self.is_broken = True


class ArgumentsOf:
    """The object is the arguments; the name stood before it."""

    def __init__(self, name: str) -> None:
        self.is_over = self.is_broken = False
        self.raw = ""
        self.name: str | None = name
        self._nesting = Nesting()
        self._taken = 0

    def feed(self, character: str) -> None:
        self.raw += character
        self._nesting.feed(character)
        self.is_broken = self._nesting.is_broken
        self.is_over = self._nesting.is_top and not self.is_broken

    def take_arguments(self) -> str:
        fresh, self._taken = self.raw[self._taken :], len(self.raw)
        return fresh


class JsonCall:
    """The object holds name and arguments."""

    def __init__(self) -> None:
        self.is_over = self.is_broken = False
        self.raw = ""
        self.name: str | None = None
        self._arguments = ""  # not handed on yet
        self._has_arguments = False
        self._state = self._before
        self._key = self._value = ""
        self._nesting = Nesting()

    def feed(self, character: str) -> None:
        self.raw += character
        self._state(character)

    def take_arguments(self) -> str:
        if self.name is None:
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    def _before(self, character: str) -> None:
        if character == "{":
            self._state = self._before_key
        elif character not in _SPACE:
            self.is_broken = True

    def _before_key(self, character: str) -> None:
        if character == '"':
            self._key, self._nesting = "", Nesting()
            self._state = self._in_key
            self._in_key(character)
        elif character == "}":
            self._close()
        elif character not in _SPACE and character != ",":
            self.is_broken = True

    def _in_key(self, character: str) -> None:
        self._key += character
        self._nesting.feed(character)
        if self._nesting.is_top:
            key = _parsed(self._key)
            self._key = key if isinstance(key, str) else ""
            self._state = self._before_value

    def _before_value(self, character: str) -> None:
        if character in _SPACE or character == ":":
            return
        self._value, self._nesting = "", Nesting()
        self._state = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if self._value and self._nesting.is_top and character in ",}":
            self._end_value()  # a number, true, false or null ends with what follows it
            self._state(character)
            return
        self._value += character
        if self._is_streamed():
            self._arguments += character
        self._nesting.feed(character)
        self.is_broken = self.is_broken or self._nesting.is_broken
        if self._nesting.is_top and character in '"}]' and not self.is_broken:
            self._end_value()

    def _is_streamed(self) -> bool:
        return self._key in _ARGUMENTS and self._value.startswith("{")

    def _end_value(self) -> None:
        self._state = self._before_key
        if self._key == "name":
            name = _parsed(self._value)
            if isinstance(name, str) and name:
                self.name = name
            else:
                self.is_broken = True
        elif self._key in _ARGUMENTS:
            self._has_arguments = True
            if not self._is_streamed():
                # Some models write the object as a string.
                text = _parsed(self._value)
                self._arguments += text if isinstance(text, str) else self._value.strip()

    def _close(self) -> None:
        if self.name is None:
            self.is_broken = True
            return
        if not self._has_arguments:
            self._arguments = "{}"
        self.is_over = True


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
