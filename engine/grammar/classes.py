"""Character classes of a grammar in the compiler's EBNF, written anew.

Two things are wrong with them as they are. A negated class takes the bytes of surrogates, which are
no UTF-8: a model with byte tokens could put them into a JSON string, and no reader would take it.
And with two ranges beyond ASCII in one class the compiler's masks allow tokens that its parser then
refuses. So each class becomes a choice of positive ones without surrogates, one range beyond ASCII
in each (but where it is counted). The language is the same but for text that is no text.

Pure functions; any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from engine.grammar.ranges import Ranges, minus, union

_PIECES = re.compile(r'"(?:[^"\\]|\\.)*"|#[^\n]*|\[(?:[^\]\\]|\\.)*\]', re.DOTALL)
_RULE_HEAD = re.compile(r"(\S+) ::= \(\($")
_ESCAPE = re.compile(
    r"\\(?:x([0-9A-Fa-f]{1,8})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|(.))", re.DOTALL
)
_NAMED = {"n": 10, "r": 13, "t": 9, "0": 0, "a": 7, "b": 8, "f": 12, "v": 11, "e": 27}
_SURROGATES: Ranges = ((0xD800, 0xDFFF),)
_LAST = 0x10FFFF


def rewrite(ebnf: str) -> str:
    """`ebnf` as the compiler prints it, with its classes written anew."""
    return _PIECES.sub(lambda piece: _class(piece.group(), is_whole=_is_counted(piece, ebnf)), ebnf)


def _is_counted(piece: re.Match[str], ebnf: str) -> bool:
    """It is all of a rule that is repeated a counted number of times: masks are right there, and
    cost 500 times as much for a choice of classes."""
    start, end = piece.span()
    if ebnf[end : end + 2] != "))":
        return False
    head = _RULE_HEAD.search(ebnf, ebnf.rfind("\n", 0, start) + 1, start)
    return head is not None and f"{head.group(1)}{{" in ebnf


def _class(piece: str, *, is_whole: bool) -> str:
    if not piece.startswith("["):
        return piece
    is_negated = piece.startswith("[^")
    ranges = union(_ranges(piece[2 if is_negated else 1 : -1]))
    if is_negated:
        ranges = minus(((0, _LAST),), ranges)
    ranges = minus(ranges, _SURROGATES)
    if is_whole and ranges:
        return _write(list(ranges))
    ascii_part = [(low, min(high, 0x7F)) for low, high in ranges if low < 0x80]
    others = [[(max(low, 0x80), high)] for low, high in ranges if high >= 0x80]
    options = [_write(part) for part in (ascii_part, *others) if part]
    if not options:
        return piece  # nothing is in it: found by the check for texts
    return options[0] if len(options) == 1 else "(" + " | ".join(options) + ")"


def _ranges(inside: str) -> Iterator[tuple[int, int]]:
    codes = list(_codes(inside))
    at = 0
    while at < len(codes):
        code, _ = codes[at]
        # A "-" between two characters makes a range; a first, last or escaped one is itself.
        if at + 2 < len(codes) and codes[at + 1] == (0x2D, False):
            yield code, codes[at + 2][0]
            at += 3
        else:
            yield code, code
            at += 1


def _codes(inside: str) -> Iterator[tuple[int, bool]]:
    """(code point, whether it was escaped) of each character."""
    at = 0
    while at < len(inside):
        escape = _ESCAPE.match(inside, at)
        if escape is None:
            yield ord(inside[at]), False
            at += 1
            continue
        digits = escape.group(1) or escape.group(2) or escape.group(3)
        character = escape.group(4)
        yield (int(digits, 16) if digits else _NAMED.get(character, ord(character or "\0"))), True
        at = escape.end()


def _write(ranges: list[tuple[int, int]]) -> str:
    return "[" + "".join(f"{_escape(low)}-{_escape(high)}" for low, high in ranges) + "]"


def _escape(code: int) -> str:
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
