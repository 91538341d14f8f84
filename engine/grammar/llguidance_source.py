"""A GrammarSpec as a grammar of llguidance. Pure functions over values; any thread.

    choice       one Lark terminal of literals
    regex        a full match; \\d \\w \\s are ASCII
    json_schema  engine/grammar/json_schema.py, one line with ", " and ": "
    ebnf         Lark's dialect, or GBNF's (llama.cpp's, `root ::= ...`), which is translated

A grammar in EBNF may not name special tokens, nor set options of its own: they would let tokens
into an output that are no text, or take text back that a client has.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from engine.grammar import cost_limits, json_schema
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import refuse
from engine.request import GrammarKind, GrammarSpec

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_JSON: JsonCompileOptions = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
# llguidance 1.9.1 follows forced text without an end where a grammar has no other, as in
# `start: "a" start` or /x+/ before "x". A schema's and a pattern's text always ends.
_NO_FORCING = '%llguidance {"no_forcing": true}\n'
_PIECES = re.compile(
    r'"(?:[^"\\\n]|\\.)*"i?'  # a literal
    r"|//[^\n]*|\#[^\n]*"  # a comment
    r"|/(?![/*])(?:[^/\\\n]|\\.)+/[imslux]*"  # a pattern
    r"|\[(?:[^\]\\\n]|\\.)*\]"  # a class of GBNF, an optional part or the options of Lark
    r"|(?P<directive>%[a-z]+)"
    r"|(?P<token><[^\n>]*>)"
)
_OPTIONS = re.compile(r"\[\s*(?:capture|lazy|max_tokens|temperature|stop|suffix|stop_capture)\b")
_DIRECTIVES = frozenset({"%ignore", "%import"})
_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)
_UNICODE = re.compile(r"\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}")


def check_size(spec: GrammarSpec, limits: GrammarLimits) -> None:
    """Check the size of a specification, without reading it. Raises: InvalidRequest, field
    "grammar"."""
    try:
        num_bytes = sum(len(text.encode()) for text in (spec.text, *spec.choices))
    except UnicodeEncodeError as error:
        raise refuse(f"no Unicode text: {error}") from error
    if num_bytes > limits.max_spec_bytes:
        raise refuse(f"{num_bytes} bytes are more than {limits.max_spec_bytes}")
    if spec.choices and spec.kind is not GrammarKind.CHOICE:
        raise refuse(f"choices: they belong to kind choice, not {spec.kind.value}")
    if spec.kind is GrammarKind.CHOICE:
        if spec.text:
            raise refuse("text: it belongs to other kinds than choice")
        if not spec.choices:
            raise refuse("choices: there is none")
        if len(spec.choices) > limits.max_num_choices:
            raise refuse(f"choices: {len(spec.choices)} are more than {limits.max_num_choices}")


def source(spec: GrammarSpec, limits: GrammarLimits) -> str:
    """Return llguidance's text of the grammar. It may need much time and memory, so that it runs in
    the compiling process. Raises: InvalidRequest, field "grammar"."""
    check_size(spec, limits)
    if spec.kind is GrammarKind.CHOICE:
        choices = " | ".join(
            json.dumps(one, ensure_ascii=False) for one in dict.fromkeys(spec.choices)
        )
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}\n")
    if spec.kind is GrammarKind.REGEX:
        cost_limits.check_pattern(spec.text)
        return LLMatcher.grammar_from_regex(regex_to_lark(spec.text, "dws"))
    if spec.kind is GrammarKind.JSON_SCHEMA:
        return of_schema(json_schema.lower(spec.text, limits))
    return LLMatcher.grammar_from_lark(_NO_FORCING + _lark(spec.text))


def of_schema(lowered: json_schema.Schema) -> str:
    """Return llguidance's text of a rewritten schema."""
    return LLMatcher.grammar_from_json_schema(json.dumps(lowered), overrides=_JSON)


def _lark(text: str) -> str:
    is_gbnf = _GBNF.search(text) is not None
    (cost_limits.check_gbnf if is_gbnf else cost_limits.check_lark)(text)
    for found in _PIECES.finditer(text):
        piece = found.group()
        line = f"grammar text, line {text.count(chr(10), 0, found.start()) + 1}"
        if found["directive"] and piece not in _DIRECTIVES:
            raise refuse(f"{line}: {piece} is not supported")
        if found["token"] and not is_gbnf:
            raise refuse(f"{line}: a special token ({piece[:40]}) is not supported")
        if not is_gbnf and _OPTIONS.match(piece):
            raise refuse(f"{line}: options of a rule are not supported")
    if not is_gbnf:
        return text
    try:
        return gbnf_to_lark(_UNICODE.sub(_character, text)).removeprefix("%llguidance {}")
    except RecursionError:
        raise refuse("grammar text: nested too deep") from None
    except Exception as error:  # the translator raises whatever its parser meets
        raise refuse(f"grammar text: {error}") from error


def _character(found: re.Match[str]) -> str:
    r"""Return the character of a \u escape of GBNF, which the library's translator writes
    wrongly."""
    code = int(found.group()[2:], 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        return found.group()
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
