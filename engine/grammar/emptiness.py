"""Whether a grammar has any text at all that a vocabulary can spell: `root ::= "a" root` has none,
nor has a character of which the vocabulary lacks a byte.

Without it such a grammar would not hang, but draw tokens to the request's length limit, or until
nothing is left to draw; said at compile time it is the sender's mistake, by name.

Reads the compiler's own serialised form, whose version it checks: a newer one must be looked at
before it is trusted. Exact but for classes of very many characters beyond ASCII in a vocabulary
that lacks bytes, and patterns in schemas there: those count as spellable. Pure functions; any
thread.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

KNOWN_VERSION = "v16"

(_BYTES, _CLASS, _CLASS_STAR, _EMPTY, _RULE, _SEQUENCE, _CHOICES, _DISPATCH, _REPEAT) = range(9)
_PATTERN = 12
"""A schema's pattern, repeated: engine/grammar/schema.py saw that it matches something."""
_MAX_NUM_TRIED = 4096
_ALL_BYTES = frozenset(range(256))


class UnknownForm(Exception):
    """The serialised form is not the one that this module knows."""


def has_text(serialised: str, usable_bytes: frozenset[int]) -> bool:
    """Some text of the grammar uses only these bytes.

    Args:
        serialised: a grammar's JSON, before it is optimised.
    Raises: UnknownForm.
    """
    grammar: dict[str, Any] = json.loads(serialised)
    if grammar.get("__VERSION__") != KNOWN_VERSION:
        raise UnknownForm(
            f"grammars are serialised as {grammar.get('__VERSION__')}, known is {KNOWN_VERSION}"
        )
    data, starts = grammar["grammar_expr_data"], grammar["grammar_expr_indptr"]
    bodies = [rule[1] for rule in grammar["rules"]]
    productive: list[bool] = [False] * len(bodies)

    def can(index: int) -> bool:
        kind, length = data[starts[index]], data[starts[index] + 1]
        values: Sequence[int] = data[starts[index] + 2 : starts[index] + 2 + length]
        if kind == _BYTES:
            return usable_bytes.issuperset(values)
        if kind == _CLASS:
            return _has_character(values[0] != 0, values[1:], usable_bytes)
        if kind in (_CLASS_STAR, _EMPTY, _PATTERN):
            return True
        if kind == _RULE:
            return productive[values[0]]
        if kind == _SEQUENCE:
            return all(can(value) for value in values)
        if kind == _CHOICES:
            return any(can(value) for value in values)
        if kind == _REPEAT:
            return values[1] == 0 or productive[values[0]]
        raise UnknownForm(f"an expression of kind {kind}")

    is_new = True
    while is_new:
        is_new = False
        for rule, body in enumerate(bodies):
            if not productive[rule] and can(body):
                productive[rule] = is_new = True
    root: int = grammar["root_rule_id"]
    return productive[root]


def _has_character(is_negated: bool, bounds: Sequence[int], usable_bytes: frozenset[int]) -> bool:
    ranges = sorted(zip(bounds[::2], bounds[1::2], strict=True))
    if is_negated:
        ranges = _complement(ranges)
    if usable_bytes == _ALL_BYTES:
        return bool(ranges)
    num_tried = 0
    for low, high in ranges:
        for code in range(low, high + 1):
            if 0xD800 <= code < 0xE000:
                continue
            if usable_bytes.issuperset(chr(code).encode()):
                return True
            num_tried += 1
            if num_tried > _MAX_NUM_TRIED:
                return True
    return False


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    left, start = [], 0
    for low, high in ranges:
        if low > start:
            left.append((start, low - 1))
        start = max(start, high + 1)
    if start <= 0x10FFFF:
        left.append((start, 0x10FFFF))
    return left
