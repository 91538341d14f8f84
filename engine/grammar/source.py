"""A GrammarSpec checked and brought into a form that the compiler takes: what a client wrote never
reaches it as it was. Pure functions over values; any thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from engine.grammar import regex, schema
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import refuse
from engine.request import GrammarKind, GrammarSpec

EBNF, REGEX, SCHEMA = "ebnf", "regex", "schema"

# Extensions of the compiler's EBNF dialect that are about tokens, not text: they could let special
# tokens into an output.
_TOKEN_MACROS = frozenset({"TagDispatch", "TokenTagDispatch", "Token", "ExcludeToken"})
_EBNF_PIECES = re.compile(
    r'"(?:[^"\\\n]|\\.)*"'  # a literal
    r"|\[(?:[^\]\\\n]|\\.)*\]"  # a class
    r"|#[^\n]*"  # a comment
    r"|\{[^{}\n]*\}"  # a repetition
    r"|\(\s*="  # a look-ahead
    r"|[A-Za-z_][\w.-]*"
    r"|[()\"\[{]"
)


@dataclass(frozen=True)
class Source:
    """What goes to the compiler."""

    form: str
    """EBNF, REGEX or SCHEMA."""
    text: str


def check_size(spec: GrammarSpec, limits: GrammarLimits) -> None:
    """What can be said without reading it. Raises: InvalidRequest, field "grammar"."""
    try:
        num_bytes = sum(len(text.encode()) for text in (spec.text, *spec.choices))
    except UnicodeEncodeError as error:
        raise refuse(f"no Unicode text: {error}") from error
    if num_bytes > limits.max_spec_bytes:
        raise refuse(f"{num_bytes} bytes are more than {limits.max_spec_bytes}")


def source(spec: GrammarSpec, limits: GrammarLimits) -> Source:
    """Check `spec` against the limits and write it for the compiler. Takes tenths of a second for
    the largest ones: not for the engine's thread.

    Raises: InvalidRequest, field "grammar".
    """
    check_size(spec, limits)
    if spec.kind is GrammarKind.CHOICE:
        if spec.text:
            raise refuse("text: it belongs to other kinds than choice")
        return Source(EBNF, _choice(spec.choices, limits))
    if spec.choices:
        raise refuse(f"choices: they belong to kind choice, not {spec.kind.value}")
    if spec.kind is GrammarKind.REGEX:
        return Source(REGEX, _regex(spec.text, limits))
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return Source(SCHEMA, schema.normalise(spec.text, limits))
    return Source(EBNF, _ebnf(spec.text, limits))


def _choice(choices: tuple[str, ...], limits: GrammarLimits) -> str:
    if not choices:
        raise refuse("choices: there is none")
    if len(choices) > limits.max_num_choices:
        raise refuse(f"choices: {len(choices)} are more than {limits.max_num_choices}")
    if any("\0" in choice for choice in choices):
        raise refuse("choices: NUL is not supported")
    return "root ::= " + " | ".join(f'"{_escape(choice)}"' for choice in dict.fromkeys(choices))


def _escape(text: str) -> str:
    named = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return "".join(
        named.get(c) or (f"\\u{ord(c):04x}" if ord(c) < 0x20 or ord(c) == 0x7F else c) for c in text
    )


def _regex(pattern: str, limits: GrammarLimits) -> str:
    node = regex.parse(
        pattern, max_num_levels=limits.max_num_levels, max_num_repeats=limits.max_num_repeats
    )
    if regex.is_empty(node):
        raise refuse("pattern: it matches no text")
    return regex.write(regex.prune(node))


def _ebnf(text: str, limits: GrammarLimits) -> str:
    """The grammar itself is read by the compiler; here is refused what it would overdo."""
    if "\0" in text:
        raise refuse("grammar text: NUL is not supported")
    level = 0
    for found in _EBNF_PIECES.finditer(text):
        piece = found.group()
        level += (piece == "(") - (piece == ")")
        problem = _ebnf_problem(piece, level, limits)
        if problem:
            line = text.count("\n", 0, found.start()) + 1
            raise refuse(f"grammar text, line {line}: {problem}")
    return text


def _ebnf_problem(piece: str, level: int, limits: GrammarLimits) -> str:
    """What is wrong with one piece, with so many groups open; empty: nothing."""
    if piece in _TOKEN_MACROS:
        return f"{piece} is not supported"
    if piece.startswith("(") and piece.endswith("="):
        return "a look-ahead is not supported"
    if piece in ('"', "[", "{"):
        return f"an unmatched {piece}"
    if piece.startswith("{"):
        numbers = [number.strip() for number in piece[1:-1].split(",")]
        if any(len(n) > 9 or int(n) > limits.max_num_repeats for n in numbers if n.isdigit()):
            return f"a repetition beyond {limits.max_num_repeats}"
    if level > limits.max_num_levels:
        return f"groups nested deeper than {limits.max_num_levels} levels"
    return ""
