"""Pattern: a regular expression over modules' names that ends in bounded time, whatever it says.

An adapter's config is anyone's file, and Python's matcher goes back and tries again: a few
characters can keep it busy for years. Here all positions that are reachable are carried along
together, so the work is at most (length of the pattern) x (length of the name) x (length of the
name). Only which names match is answered, and so greedy and lazy are one.

Life: `parse` (refuses what it does not know) -> `is_whole`, `is_end`. Knows no adapter. Pure, any
thread. Source: Thompson, "Regular expression search algorithm" (1968), by sets of positions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NoReturn

_MAX_CHARS = 512
_MAX_REPEATS = 16
_MAX_COUNT = 256
_MAX_DEPTH = 16

_TOKEN = re.compile(
    r"(?P<escape>\\.)|(?P<set>\[\^?(?:\\.|[^\[\]\\])+\])|(?P<open>\((?:\?:)?)|(?P<close>\))"
    r"|(?P<either>\|)|(?P<repeat>(?:[*+?]|\{\d{1,3}(?:,\d{0,3})?\})\??)|(?P<edge>[\^$])"
    r"|(?P<one>[^\\\[\](){}|*+?^$])",
    re.DOTALL,
)
_PLAIN = re.compile(r"[\w.\-]+")


@dataclass(frozen=True)
class _One:
    """One character."""

    allowed: re.Pattern[str]


@dataclass(frozen=True)
class _Edge:
    """A place between characters."""

    place: re.Pattern[str]


@dataclass(frozen=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None
    """None: without end."""


@dataclass(frozen=True)
class _Either:
    """One of several rows. A group is one, too."""

    ways: tuple[tuple[_Node, ...], ...]


_Node = _One | _Edge | _Repeat | _Either


class NotAPattern(ValueError):
    """The text is no pattern, or more than what is matched here; says which and where."""


@dataclass(frozen=True)
class Pattern:
    """See the module. Equal where its text is."""

    text: str
    num_repeats: int = field(compare=False)
    _root: _Node = field(compare=False, repr=False)
    _plain: re.Pattern[str] | None = field(compare=False, repr=False)
    """For a name without repeats and alternatives: there Python's own matcher is bounded, too."""

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """Raises: NotAPattern."""
        parser = _Parser(text)
        root = parser.parse()
        plain = re.compile(rf"(?:.*\.)?(?:{text})$") if _PLAIN.fullmatch(text) else None
        return cls(text, parser.num_repeats, root, plain)

    @property
    def is_plain(self) -> bool:
        """Letters, digits, dots and dashes alone."""
        return self._plain is not None

    def is_whole(self, name: str) -> bool:
        """Whether it matches all of `name`."""
        return len(name) in _ends(self._root, name, {0})

    def is_end(self, name: str) -> bool:
        """Whether it matches all of `name`, or all that follows one of its dots."""
        if self._plain is not None:
            return self._plain.match(name) is not None
        starts = {0} | {index + 1 for index, character in enumerate(name) if character == "."}
        return len(name) in _ends(self._root, name, starts)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self.num_repeats = 0

    def parse(self) -> _Node:
        if len(self._text) > _MAX_CHARS:
            self._refuse(f"above {_MAX_CHARS} characters")
        root = self._either()
        if self._at < len(self._text):
            self._refuse("a closing bracket without an opening one")
        return root

    def _either(self) -> _Node:
        """Up to a closing bracket or the end."""
        ways: list[tuple[_Node, ...]] = []
        row: list[_Node] = []
        while self._at < len(self._text):
            found = _TOKEN.match(self._text, self._at)
            if found is None:
                self._refuse("not supported")
            if found.lastgroup == "close":
                break
            self._at = found.end()
            token = found.group()
            match found.lastgroup:
                case "either":
                    ways.append(tuple(row))
                    row = []
                case "repeat":
                    if not row:
                        self._refuse("nothing to repeat")
                    row.append(self._repeat(row.pop(), token))
                case "open":
                    row.append(self._group())
                case kind:
                    row.append(self._single(token, str(kind)))
        return _Either((*ways, tuple(row)))

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            self._refuse(f"groups more than {_MAX_DEPTH} deep")
        inner = self._either()
        if self._at == len(self._text):
            self._refuse("an opening bracket without a closing one")
        self._at += 1
        self._depth -= 1
        return inner

    def _single(self, token: str, kind: str) -> _Node:
        if kind == "edge" or token in (r"\b", r"\B", r"\A", r"\Z"):
            return _Edge(re.compile(token))
        if kind == "escape" and token[1].isalnum() and token[1] not in "dDwWsS":
            self._refuse(f"{token} is not supported")
        if kind == "set" and re.search(r"--|&&|\|\||~~", token):
            self._refuse(f"{token} is not supported")
        try:
            return _One(re.compile(re.escape(token) if kind == "one" and token != "." else token))
        except (re.error, OverflowError) as error:
            self._refuse(str(error))

    def _repeat(self, part: _Node, token: str) -> _Node:
        self.num_repeats += 1
        if self.num_repeats > _MAX_REPEATS:
            self._refuse(f"above {_MAX_REPEATS} repeats")
        if isinstance(part, _Repeat | _Edge):
            self._refuse("nothing to repeat")
        if token[0] != "?" and _has_repeat(part):
            self._refuse("a repeat of what repeats")
        bounds = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(token[0])
        if bounds is not None:
            return _Repeat(part, *bounds)
        first, comma, last = token.rstrip("?")[1:-1].partition(",")
        least = int(first)
        most = int(last) if last else None if comma else least
        if max(least, most or 0) > _MAX_COUNT or (most is not None and most < least):
            self._refuse(f"{token} is out of bounds")
        return _Repeat(part, least, most)

    def _refuse(self, problem: str) -> NoReturn:
        raise NotAPattern(f"character {self._at}: {problem}")


def _has_repeat(node: _Node) -> bool:
    if isinstance(node, _Either):
        return any(_has_repeat(part) for way in node.ways for part in way)
    return isinstance(node, _Repeat)


def _ends(node: _Node, text: str, starts: set[int]) -> set[int]:
    """Where it may end if it begins at any of `starts`."""
    match node:
        case _One(allowed):
            return {at + 1 for at in starts if allowed.fullmatch(text, at, at + 1)}
        case _Edge(place):
            return {at for at in starts if place.match(text, at)}
        case _Either(ways):
            return set().union(*(_row_ends(way, text, starts) for way in ways))
        case _Repeat(part, least, most):
            return _repeat_ends(part, least, most, text, starts)


def _row_ends(way: tuple[_Node, ...], text: str, starts: set[int]) -> set[int]:
    for node in way:
        if not starts:
            break
        starts = _ends(node, text, starts)
    return starts


def _repeat_ends(
    part: _Node, least: int, most: int | None, text: str, starts: set[int]
) -> set[int]:
    for _ in range(least):
        starts = _ends(part, text, starts)
    found = new = starts
    num_done = least
    while new and num_done != most:
        new = _ends(part, text, new) - found  # what was found before has been gone on from
        found = found | new
        num_done += 1
    return found
