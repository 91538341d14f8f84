"""Stop strings in text that comes in pieces: finds the first, and holds back exactly what could
still become one.

First means: the one that is complete first. Of several complete at the same character, the one that
began first (the longest), so that no part of it stays visible. This depends on the text alone,
never on how it was cut.

One Knuth-Morris-Pratt automaton per stop string: its state is the length of the longest prefix of
the string that the text ends with, so the longest state of all is what must be held back. O(number
of strings) per character.

Knows nothing of tokens. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """What one piece of text made visible, and the stop string it completed, if any."""

    text: str
    stop: str | None


class StopStrings:
    """Matcher over one text. After a match it is over: further text is dropped."""

    def __init__(
        self,
        stops: Sequence[str],
        *,
        include_stop_text: bool = False,
        visible: Collection[str] = (),
    ) -> None:
        """`include_stop_text`: the stop string itself becomes visible, too; those in `visible` do
        in any case. Raises: ValueError for an empty string.
        """
        if not all(stops):
            raise ValueError("a stop string is empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._failures = tuple(_failure_table(stop) for stop in self._stops)
        self._states = [0] * len(self._stops)
        self._visible = frozenset(self._stops if include_stop_text else visible)
        self._held = ""
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text."""
        return self._found

    def feed(self, text: str) -> StopMatch:
        """Take the next piece of text; returns what is visible now."""
        if self._found is not None or not self._stops:
            return StopMatch("" if self._found is not None else text, None)
        for position, character in enumerate(text):
            length = self._advance(character)
            if length:
                return self._match(self._held + text[: position + 1], length)
        self._held += text
        visible_end = len(self._held) - max(self._states)
        visible, self._held = self._held[:visible_end], self._held[visible_end:]
        return StopMatch(visible, None)

    def finish(self) -> str:
        """No more text will come; returns what was held back."""
        visible, self._held = self._held, ""
        self._states = [0] * len(self._stops)
        return visible

    def _advance(self, character: str) -> int:
        """Move every automaton by one character; returns the length of the longest stop string now
        complete.
        """
        completed = 0
        for index, stop in enumerate(self._stops):
            state, failure = self._states[index], self._failures[index]
            while state and stop[state] != character:
                state = failure[state - 1]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                completed = max(completed, state)
            self._states[index] = state
        return completed

    def _match(self, text: str, length: int) -> StopMatch:
        begin = len(text) - length
        self._found = text[begin:]
        self._held = ""
        return StopMatch(text if self._found in self._visible else text[:begin], self._found)


def _failure_table(stop: str) -> tuple[int, ...]:
    """For each prefix of `stop`: length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = table[length - 1]
        if stop[index] == stop[length]:
            length += 1
        table[index] = length
    return tuple(table)
