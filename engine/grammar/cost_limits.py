"""Checks of costs that llguidance's own limits do not bound, made before the library reads a
grammar.

Each bound excludes a family of grammars that was measured (llguidance 1.9.1): forced text without
an end in sight (3 us a byte, with Python's lock held), sums of many repetitions (memory grows with
the square of their number), common multiples (a lexer state for each residue), chains of references
(the stack), and Lark's parametric rules (they do not end). Pure functions; any thread.
"""

from __future__ import annotations

import re
from decimal import Decimal
from math import lcm
from typing import Any, NamedTuple

from engine.grammar.errors import GrammarTooCostly

MAX_PATTERN_BYTES = 32 << 10
MAX_NUM_QUANTIFIERS = 500
MAX_FORCED_CHARACTERS = 20_000
"""Largest length in characters of the shortest match of one pattern."""
MAX_FORCED_BYTES = 1 << 20
"""Largest number of bytes of forced text in a schema; the library stops after some 650 consecutive
pieces of forced text."""
_MAX_NUM_PIECES = 650
MAX_NUM_REFERENCES = 1000
MAX_MULTIPLE = 30_000
MAX_LARK_BYTES = 16 << 10
MAX_GBNF_BYTES = 8 << 10
MAX_NUM_TERMINALS = 256
MAX_NUM_OPERATORS = 64

_QUANTIFIER = re.compile(r"[*+?{]")
_COUNT = re.compile(r"\{(\d{1,9})(?:,\d{0,9})?\}")
_HEAD = re.compile(r"\((?:\?(?:[:=!]|<[=!]|P?<\w+>|[a-z-]+:))?")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[uxpP]\{[^}]*\}|.)", re.DOTALL)
_TERMINAL = re.compile(r"^\s*[A-Z_][A-Z0-9_]*\s*(?:\.\d+)?\s*:", re.MULTILINE)


def check_pattern(pattern: str) -> None:
    """Check the cost of a regular expression. Raises: GrammarTooCostly."""
    _at_most(len(pattern), MAX_PATTERN_BYTES, "characters of a pattern")
    _at_most(len(_QUANTIFIER.findall(pattern)), MAX_NUM_QUANTIFIERS, "repetitions in patterns")
    _at_most(shortest(pattern), MAX_FORCED_CHARACTERS, "characters that a pattern needs at least")


def shortest(pattern: str) -> int:
    """Return about the smallest number of characters of a match: exact but for flags, anchors and
    look-around, which count as characters."""
    levels: list[list[int]] = [[0]]  # for each open group the lengths of its alternatives
    last = 0  # of the piece that a count would repeat
    index = 0
    while index < len(pattern):
        character = pattern[index]
        found = _COUNT.match(pattern, index)
        if character == "(":
            levels.append([0])
            index = _HEAD.match(pattern, index).end() - 1  # type: ignore[union-attr]
        elif character == ")" and len(levels) > 1:
            last = min(levels.pop())
            levels[-1][-1] += last
        elif character == "|":
            levels[-1].append(0)
        elif found is not None:
            levels[-1][-1] += (int(found.group(1)) - 1) * last
            last *= int(found.group(1))
            index = found.end() - 1
        elif character in "*?":
            levels[-1][-1] -= last
            last = 0
        elif character != "+":
            if escape := _ESCAPE.match(pattern, index):
                index = escape.end() - 1
            elif character == "[":
                index = _end_of_class(pattern, index)
            last = 1
            levels[-1][-1] += 1
        index += 1
    return max(sum(min(one) for one in levels), 0)


def _end_of_class(pattern: str, start: int) -> int:
    """Return the index of the bracket that closes the character class that begins at `start`, or of
    the end of the pattern."""
    index = start + 1
    index += pattern[index : index + 1] == "^"
    index += pattern[index : index + 1] == "]"
    while index < len(pattern) and pattern[index] != "]":
        index += 2 if pattern[index] == "\\" else 1
    return index


class _Counts(NamedTuple):
    references: int = 0
    quantifiers: int = 0
    repeated: int = 0
    longest: int = 0
    multiple: int = 1


def check_schema(schema: object) -> None:
    """Check the cost of a JSON schema. Raises: GrammarTooCostly, RecursionError."""
    counts = _counted(schema)
    _at_most(counts.references, MAX_NUM_REFERENCES, "references")
    _at_most(counts.quantifiers, MAX_NUM_QUANTIFIERS, "repetitions in patterns")
    _at_most(counts.multiple, MAX_MULTIPLE, "for the common multiple of all multipleOf")
    pieces = min(_MAX_NUM_PIECES, 1 + counts.references + counts.repeated)
    _at_most(counts.longest * pieces, MAX_FORCED_BYTES, "characters of constants in a row")


def _counted(value: object) -> _Counts:
    if isinstance(value, str):
        return _Counts(longest=len(value))
    found = _Counts()
    if isinstance(value, dict):
        inner = [one for key, one in value.items() if key != "description"]
        pattern, step, least = (value.get(key) for key in ("pattern", "multipleOf", "minItems"))
        texts = [pattern, *value.get("patternProperties", ())] if _is_pattern(value) else []
        found = _Counts(
            references=int("$ref" in value),
            quantifiers=sum(len(_QUANTIFIER.findall(one)) for one in texts if isinstance(one, str)),
            repeated=least if isinstance(least, int) and least > 0 else 0,
            longest=max(map(len, value), default=0),
            multiple=_whole(step),
        )
    elif isinstance(value, list):
        inner = value
    else:
        return found
    for one in map(_counted, inner):
        found = _Counts(
            found.references + one.references,
            found.quantifiers + one.quantifiers,
            found.repeated + one.repeated,
            max(found.longest, one.longest),
            lcm(found.multiple, one.multiple),
        )
    return found


def _is_pattern(value: dict[str, Any]) -> bool:
    return isinstance(value.get("patternProperties", {}), dict)


def _whole(step: object) -> int:
    """Return the digits of a `multipleOf` step as an integer; 1 for an invalid one."""
    if isinstance(step, bool) or not isinstance(step, int | float) or not 0 < step < 1e18:
        return 1
    _, digits, exponent = Decimal(str(step)).normalize().as_tuple()
    scale: int = 10 ** max(0, int(exponent))
    return int("".join(map(str, digits))) * scale


def check_lark(text: str) -> None:
    """Check the cost of a Lark grammar. Raises: GrammarTooCostly."""
    _at_most(len(text), MAX_LARK_BYTES, "characters of a grammar")
    _at_most(text.count("::"), 0, "parametric rules (::)")
    _at_most(text.count("&") + text.count("~"), MAX_NUM_OPERATORS, "operators & and ~")
    _at_most(len(_TERMINAL.findall(text)), MAX_NUM_TERMINALS, "terminals")
    _at_most(len(_QUANTIFIER.findall(text)), MAX_NUM_QUANTIFIERS, "repetitions")


def check_gbnf(text: str) -> None:
    """Check the cost of a GBNF grammar. Raises: GrammarTooCostly."""
    _at_most(len(text), MAX_GBNF_BYTES, "characters of a grammar")
    _at_most(len(_QUANTIFIER.findall(text)), MAX_NUM_QUANTIFIERS, "repetitions")


def _at_most(number: int, most: int, what: str) -> None:
    if number > most:
        raise GrammarTooCostly("grammar", f"{number} are more than {most} {what}")
