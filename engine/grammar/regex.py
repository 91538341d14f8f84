"""The regular expressions that a grammar may be: parsed into a small tree, and written out anew.

The compiler's own reader drops what it does not know (a look-ahead is skipped with a warning), and
in a JSON string's pattern copies a quote into the JSON unescaped, or ends there. So nothing of a
client's pattern reaches it: it is parsed here, what is not understood is refused by name and place,
and what is written out uses literals, classes, groups and {m,n} only.

The language is that of `re.fullmatch(pattern, text, re.ASCII)` for what is taken: \\d, \\w and \\s
are ASCII, `.` is any character but \\n, \\r, U+2028 and U+2029 (so never more than `re` allows). ^
and $ mean nothing in a full match: they are taken where an alternative of the whole pattern begins
or ends, and refused elsewhere. Lazy quantifiers have the language of greedy ones.

Pure functions over values; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from engine.grammar.errors import refuse
from engine.grammar.ranges import Ranges, everything_but, is_one, minus, union

_DIGIT: Ranges = ((0x30, 0x39),)
_WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Ranges = ((0x09, 0x0D), (0x20, 0x20))
_LINE_ENDS: Ranges = ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029))
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
# The compiler's input is a C string: NUL cannot be written.
_NUL: Ranges = ((0, 0),)
_CLASSES = {"d": _DIGIT, "w": _WORD, "s": _SPACE}
_CONTROLS = {"n": 0x0A, "t": 0x09, "r": 0x0D, "f": 0x0C, "v": 0x0B}
# What a JSON string must write as an escape.
_JSON_UNSAFE: Ranges = ((0, 0x1F), (0x22, 0x22), (0x5C, 0x5C))
_SPECIAL = frozenset("\\^$.|?*+()[]{}-/")


@dataclass(frozen=True)
class Characters:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True)
class Sequence:
    """One after the other; empty: the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Choice:
    """Any one of them."""

    options: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """`item` at least `low` times and at most `high`; None: without bound."""

    item: Node
    low: int
    high: int | None


Node: TypeAlias = Characters | Sequence | Choice | Repeat


PLAIN_IN_JSON = Characters(((0x20, 0x21), (0x23, 0x5B), (0x5D, 0xD7FF), (0xE000, 0x10FFFF)))
"""What stands for itself in a JSON string."""


def parse(pattern: str, *, max_num_levels: int, max_num_repeats: int) -> Node:
    """Raises: InvalidRequest saying what is wrong or not supported, and where."""
    return _Parser(pattern, max_num_levels, max_num_repeats).whole()


def escaped_in_json(node: Node) -> str | None:
    """A character that some part of `node` needs and that JSON must escape: `in_json` cannot keep
    it. None: there is none."""
    if isinstance(node, Characters):
        is_lost = node.ranges and not minus(node.ranges, _JSON_UNSAFE)
        return chr(node.ranges[0][0]) if is_lost else None
    if isinstance(node, Repeat):
        return escaped_in_json(node.item)
    parts = node.items if isinstance(node, Sequence) else node.options
    return next((found for part in parts if (found := escaped_in_json(part)) is not None), None)


def in_json(node: Node) -> Node:
    """The same inside a JSON string, its classes without what would have to be escaped there: the
    compiler knows escapes in a few shapes of patterns only, and has dead ends in others."""
    if isinstance(node, Characters):
        return Characters(minus(node.ranges, _JSON_UNSAFE))
    if isinstance(node, Sequence):
        return Sequence(tuple(map(in_json, node.items)))
    if isinstance(node, Choice):
        return Choice(tuple(map(in_json, node.options)))
    return Repeat(in_json(node.item), node.low, node.high)


def write(node: Node) -> str:
    """A pattern for the compiler."""
    if isinstance(node, Characters):
        return _write_class(node.ranges)
    if isinstance(node, Sequence):
        return "".join(map(write, node.items))
    if isinstance(node, Choice):
        return "(" + "|".join(map(write, node.options)) + ")"
    is_counted = node.high is not None and node.high > 1
    if isinstance(node.item, Characters) and is_counted:
        # A choice here would cost a mask 500 times as much; counted classes have right masks.
        inner = _write_ranges(list(node.item.ranges))
    else:
        inner = write(node.item)
    if node.high == 0 or not inner:
        return ""
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    bounds = short or f"{{{node.low},{'' if node.high is None else node.high}}}"
    return f"({inner}){bounds}"


def _write_class(ranges: Ranges) -> str:
    """Each range beyond ASCII apart: with two of them in one class the compiler's masks allow
    tokens that its parser then refuses (found by the tests, which compare the two)."""
    ascii_part = [(low, min(high, 0x7F)) for low, high in ranges if low < 0x80]
    others = [[(max(low, 0x80), high)] for low, high in ranges if high >= 0x80]
    options = [_write_ranges(part) for part in (ascii_part, *others) if part]
    return options[0] if len(options) == 1 else "(" + "|".join(options) + ")"


def _write_ranges(ranges: list[tuple[int, int]]) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _write_character(ranges[0][0])
    parts = (
        _write_character(low) + (f"-{_write_character(high)}" if high > low else "")
        for low, high in ranges
    )
    return "[" + "".join(parts) + "]"


def _write_character(code: int) -> str:
    if code < 0x20 or code == 0x7F:
        return f"\\u{code:04x}"  # \\x takes as many hex digits as follow
    character = chr(code)
    return f"\\{character}" if character in _SPECIAL else character


class _Parser:
    """Recursive descent over one pattern; one use."""

    def __init__(self, pattern: str, max_num_levels: int, max_num_repeats: int) -> None:
        self._pattern = pattern
        self._at = 0
        self._level = 0
        self._max_num_levels = max_num_levels
        self._max_num_repeats = max_num_repeats

    def whole(self) -> Node:
        node = self._choice()
        if self._at < len(self._pattern):
            self._refuse("an unmatched )")
        return node

    def _choice(self) -> Node:
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self) -> Node:
        items: list[Node] = []
        if self._level == 0:
            self._take("^")
        while self._at < len(self._pattern) and self._peek() not in "|)":
            if self._peek() == "$" and self._level == 0 and self._next() in ("", "|"):
                self._at += 1
                break
            items.append(self._quantified(self._atom()))
        return items[0] if len(items) == 1 else Sequence(tuple(items))

    def _atom(self) -> Node:
        character = self._peek()
        if character == "(":
            return self._group()
        if character == "[":
            return self._class()
        if character in "^$":
            self._refuse(f"{character} that is not at an end of the whole pattern")
        if character in "*+?":
            self._refuse(f"{character} with nothing to repeat")
        self._at += 1
        if character == "\\":
            return self._characters(self._escape(in_class=False))
        if character == ".":
            return self._characters(everything_but(_LINE_ENDS))
        if character == "{" and self._bounds(self._at) is not None:
            self._at -= 1
            self._refuse("{ with nothing to repeat")
        return self._characters(((ord(character), ord(character)),))

    def _group(self) -> Node:
        start = self._at
        self._at += 1
        if self._take("?"):
            named = next((n for n in ("P<", "<") if self._pattern.startswith(n, self._at)), "")
            if named and self._pattern[self._at + len(named) : self._at + len(named) + 1] in "=!":
                self._refuse("a look-behind", start)
            if named:
                end = self._pattern.find(">", self._at)
                if end < 0:
                    self._refuse("a group name without >", start)
                self._at = end + 1
            elif not self._take(":"):
                kind = {"=": "a look-ahead", "!": "a look-ahead"}.get(self._peek(), "(?" + "...)")
                self._refuse(kind, start)
        self._level += 1
        if self._level > self._max_num_levels:
            self._refuse(f"groups nested deeper than {self._max_num_levels} levels", start)
        node = self._choice()
        self._level -= 1
        if not self._take(")"):
            self._refuse("an unmatched (", start)
        return node

    def _quantified(self, node: Node) -> Node:
        low: int
        high: int | None
        start = self._at
        if self._take("*"):
            low, high = 0, None
        elif self._take("+"):
            low, high = 1, None
        elif self._take("?"):
            low, high = 0, 1
        elif self._peek() == "{" and (bounds := self._bounds(self._at + 1)) is not None:
            low, high, self._at = bounds
        else:
            return node
        if self._peek() == "+":
            self._refuse("a possessive quantifier")
        self._take("?")
        if self._peek() in ("*", "+", "?") or (
            self._peek() == "{" and self._bounds(self._at + 1) is not None
        ):
            self._refuse("two quantifiers in a row")
        if high is not None and high < low:
            self._refuse(f"a repetition of at least {low} and at most {high}", start)
        if max(low, high or 0) > self._max_num_repeats:
            self._refuse(f"a repetition beyond {self._max_num_repeats}", start)
        return Repeat(node, low, high)

    def _bounds(self, at: int) -> tuple[int, int | None, int] | None:
        """(low, high, place after "}") of what follows "{"; None: it is a literal."""
        end = self._pattern.find("}", at)
        if end < 0:
            return None
        low, comma, high = self._pattern[at:end].partition(",")
        if not (low or comma) or not all(c in "0123456789" for c in low + high):
            return None
        if not low and not high:
            return None
        if len(low) > 9 or len(high) > 9:
            self._refuse(f"a repetition beyond {self._max_num_repeats}")
        if not comma:
            return int(low), int(low), end + 1
        return int(low or 0), int(high) if high else None, end + 1

    def _class(self) -> Node:
        start = self._at
        self._at += 1
        is_negated = self._take("^")
        found: list[tuple[int, int]] = []
        is_first = True
        while is_first or self._peek() != "]":
            if self._at >= len(self._pattern):
                self._refuse("an unmatched [", start)
            if self._pattern.startswith(("[:", "[.", "[="), self._at):
                self._refuse("a POSIX class")
            if self._pattern.startswith(("&&", "--", "||", "~~"), self._at):
                self._refuse("a set operation in a class")
            is_first = False
            item = self._class_item()
            if self._peek() == "-" and self._next() not in ("]", ""):
                self._at += 1
                last = self._class_item()
                if not (is_one(item) and is_one(last)) or item[0][0] > last[0][0]:
                    self._refuse("a bad range in a class", start)
                item = ((item[0][0], last[0][0]),)
            found += item
        self._at += 1
        ranges = union(found)
        return self._characters(everything_but(ranges) if is_negated else ranges)

    def _class_item(self) -> Ranges:
        character = self._peek()
        self._at += 1
        if character == "\\":
            return self._escape(in_class=True)
        return ((ord(character), ord(character)),) if character else ()

    def _escape(self, *, in_class: bool) -> Ranges:
        """What follows a backslash."""
        character = self._peek()
        self._at += 1
        if character == "":
            self._refuse("a backslash at the end")
        if character in "dws":
            return _CLASSES[character]
        if character in "DWS":
            return everything_but(_CLASSES[character.lower()])
        if character in _CONTROLS:
            return ((_CONTROLS[character], _CONTROLS[character]),)
        if character == "b" and in_class:
            return ((8, 8),)
        if character in "xu":
            return self._hex(2 if character == "x" else 4)
        if character.isascii() and character.isalnum():
            self._at -= 2
            self._refuse(f"\\{character}")
        return ((ord(character), ord(character)),)

    def _hex(self, num_digits: int) -> Ranges:
        digits = self._pattern[self._at : self._at + num_digits]
        if len(digits) < num_digits or not all(c in "0123456789abcdefABCDEF" for c in digits):
            self._refuse(f"an escape without its {num_digits} hex digits")
        self._at += num_digits
        return ((int(digits, 16), int(digits, 16)),)

    def _characters(self, ranges: Ranges) -> Characters:
        return Characters(minus(minus(ranges, _SURROGATES), _NUL))

    def _peek(self) -> str:
        return self._pattern[self._at : self._at + 1]

    def _next(self) -> str:
        return self._pattern[self._at + 1 : self._at + 2]

    def _take(self, text: str) -> bool:
        found = self._peek() == text
        self._at += found
        return found

    def _refuse(self, what: str, at: int | None = None) -> NoReturn:
        place = self._at if at is None else at
        raise refuse(f"pattern, character {place}: {what} is not supported")


def is_empty(node: Node) -> bool:
    """No text matches it: some character that must come is of an empty class."""
    if isinstance(node, Characters):
        return not node.ranges
    if isinstance(node, Sequence):
        return any(is_empty(item) for item in node.items)
    if isinstance(node, Choice):
        return all(is_empty(option) for option in node.options)
    return node.low > 0 and is_empty(node.item)


def prune(node: Node) -> Node:
    """The same language without options that match nothing; `node` itself must match something."""
    if isinstance(node, Sequence):
        return Sequence(tuple(prune(item) for item in node.items))
    if isinstance(node, Choice):
        left = tuple(prune(option) for option in node.options if not is_empty(option))
        return left[0] if len(left) == 1 else Choice(left)
    if isinstance(node, Repeat):
        return (
            Sequence(()) if is_empty(node.item) else Repeat(prune(node.item), node.low, node.high)
        )
    return node
