"""The process that compiles grammars: `python -m engine.grammar.compile_server FD SIZE FOLDER`.

Why a process: compiling cannot be interrupted, and what one client wrote may take all memory or end
its process. So this one reads the vocabulary once, keeps a single thread, and forks a child for
every compilation: the child has a timer, a memory bound and lower priority, and ends with its own
result, by its own limits, or when the engine closes its end of the stream (the last request left).

What comes back is the grammar as llguidance's text. The library has no form of a compiled grammar
that can be sent, so the engine compiles the text again; the child has shown that this is quick and
small, and compiling lets go of Python's lock.

Wire: over the socket FD comes one byte with a descriptor (a stream of its own) per compilation; on
that stream a JSON line asks (kind, text, choices, limits) and a JSON line answers (ok, problem,
costly, grammar, num_bytes). End of file instead of an answer: the child hit a limit. The server
answers "R" on FD when it has compiled once itself, and ends when FD is closed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from engine.errors import InvalidRequest
from engine.grammar import json_schema
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarTooCostly, refuse
from engine.grammar.llguidance_source import of_schema, source
from engine.grammar.vocabulary import GrammarTokenizer
from engine.request import GrammarKind, GrammarSpec

NICENESS = 10
"""The niceness of the compiling process and its children, set by the engine that starts it."""
_NUM_TRIED = 32
"""Number of tokens for which a compiled grammar is followed before it is accepted."""
_LOCATE_S = 1.0
"""Longest time in seconds that a child looks for the part of a schema that the library rejects."""
_SIGNS_OF_A_LIMIT = (
    "fuel",
    "limit",
    "max is",
    "too big",
    "too complex",
    "too large",
    "too many",
)
"""Words in messages of llguidance which show that one of LLParserLimits was reached."""
FIRST = GrammarSpec(GrammarKind.JSON_SCHEMA, '{"type": "object", "properties": {"a": {}}}')


def parser_limits(limits: GrammarLimits) -> LLParserLimits:
    """Return the library's own limits, the same wherever a grammar is compiled."""
    return LLParserLimits(
        initial_lexer_fuel=limits.max_num_compile_fuel,
        step_lexer_fuel=limits.max_num_token_fuel,
        step_max_items=limits.max_num_token_items,
        max_lexer_states=limits.max_num_lexer_states,
        max_grammar_size=limits.max_grammar_size,
        precompute_large_lexemes=False,
        verbose_errors=False,
    )


def compile_grammar(tokenizer: GrammarTokenizer, grammar: str, limits: GrammarLimits) -> LLMatcher:
    """Compile a grammar and follow it for some tokens. Returns: a matcher at the beginning, whose
    first lexer states are cached. Raises: GrammarError with the library's message."""
    matcher = LLMatcher(tokenizer.library, grammar, log_level=0, limits=parser_limits(limits))
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))
    _try_out(tokenizer, matcher.deep_copy(), limits)
    return matcher


class GrammarError(Exception):
    """Raised if llguidance rejects a grammar."""

    @property
    def is_limit(self) -> bool:
        """Whether the grammar was rejected for its cost, not for its contents."""
        return is_limit(str(self))


def is_limit(message: str) -> bool:
    """Return whether the library's message says that one of its limits was reached."""
    return any(sign in message.lower() for sign in _SIGNS_OF_A_LIMIT)


def first_line(message: str) -> str:
    """Return the library's message without the excerpt of the grammar that it appends."""
    if "oneOf constraints" in message:
        return "two schemas of oneOf may share a value; use anyOf, or a constant tag in each"
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    if "regex parse error" in message:
        lines = [line for line in lines if line.startswith("error: ")] or lines
    return lines[0][:300] if lines else "refused"


def main() -> None:
    """Serve compilations until the socket is closed."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    tokenizer = GrammarTokenizer.load(Path(sys.argv[3]), int(sys.argv[2]))
    limits = GrammarLimits()
    compile_grammar(tokenizer, source(FIRST, limits), limits)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no zombies
    with contextlib.suppress(OSError):  # the engine may be gone by now: the next read says so
        asked.sendall(b"R")
    while True:
        data, descriptors, _, _ = socket.recv_fds(asked, 1, 1)
        if not data:
            return
        (stream,) = descriptors
        if os.fork() == 0:
            asked.close()
            with contextlib.suppress(OSError):  # the engine gave up and closed its end
                _child(tokenizer, stream)
            os._exit(0)
        os.close(stream)


def _child(tokenizer: GrammarTokenizer, stream: int) -> None:
    with socket.socket(fileno=stream) as wire:
        request = json.loads(wire.makefile("r", encoding="utf-8").readline())
        limits = GrammarLimits(**request["limits"])
        spec = GrammarSpec(GrammarKind(request["kind"]), request["text"], tuple(request["choices"]))
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limits.compile_timeout_s)
        _end_with(stream)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the library's last words without memory
        _bound_memory(limits.compile_bytes)
        answer = json.dumps(_compile(tokenizer, spec, limits)).encode()
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        wire.sendall(answer + b"\n")


def _end_with(stream: int) -> None:
    """End this process, by the kernel's SIGIO, when the other end of the stream is closed."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(stream, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(stream, fcntl.F_SETFL, fcntl.fcntl(stream, fcntl.F_GETFL) | os.O_ASYNC)


def _bound_memory(num_bytes: int) -> None:
    """Limit the address space of this process to `num_bytes` more than it has now."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _compile(
    tokenizer: GrammarTokenizer, spec: GrammarSpec, limits: GrammarLimits
) -> dict[str, Any]:
    # What is touched for the first time in this process is not the grammar's.
    compile_grammar(tokenizer, source(FIRST, limits), limits)
    before = _resident_bytes()
    try:
        grammar = source(spec, limits)
        try:
            compile_grammar(tokenizer, grammar, limits)
        except GrammarError as error:
            if error.is_limit or spec.kind is not GrammarKind.JSON_SCHEMA:
                raise
            raise refuse(_located(tokenizer, spec.text, limits, str(error))) from error
    except MemoryError:
        return {"ok": False, "problem": "it takes too much memory", "costly": True}
    except InvalidRequest as error:
        is_costly = isinstance(error, GrammarTooCostly)
        return {"ok": False, "problem": str(error).partition(": ")[2], "costly": is_costly}
    except GrammarError as error:
        problem = f"{error}; make it smaller" if error.is_limit else str(error)
        return {"ok": False, "problem": problem, "costly": error.is_limit}
    except RecursionError:
        return {"ok": False, "problem": "nested too deep", "costly": False}
    except Exception as error:  # of keywords whose values are not of the type that they must have
        problem = f"malformed: {type(error).__name__}: {str(error)[:200]}"
        return {"ok": False, "problem": problem, "costly": False}
    num_bytes = max(0, _resident_bytes() - before) + len(grammar)
    return {"ok": True, "problem": "", "costly": False, "grammar": grammar, "num_bytes": num_bytes}


def _try_out(tokenizer: GrammarTokenizer, matcher: LLMatcher, limits: GrammarLimits) -> None:
    """Follow an output for some tokens, in which most grammars that cost too much reach a limit.
    Raises: GrammarError if no token can begin an output, or a limit is reached."""
    mask = allocate_token_bitmask(1, tokenizer.library.vocab_size)
    rng = random.Random(0)
    for index in range(_NUM_TRIED):
        began = time.thread_time()
        fill_next_token_bitmask(matcher, mask)
        filled = time.thread_time()
        _check(matcher)
        if index == 0 and (matcher.is_error() or not np.any(mask)):
            raise GrammarError("no text of this model's tokens satisfies it")
        allowed = np.nonzero(np.unpackbits(mask[0].view(np.uint8), bitorder="little"))[0]
        if matcher.is_error() or matcher.is_stopped() or not len(allowed):
            return
        moved = time.thread_time()
        matcher.consume_token(int(rng.choice(allowed)))
        matcher.compute_ff_tokens()
        _check(matcher)
        cost = max(filled - began, time.thread_time() - moved)
        if cost > limits.token_cpu_s:
            raise GrammarError(f"a token takes {cost:.2f} s, the limit is {limits.token_cpu_s:g} s")


def _check(matcher: LLMatcher) -> None:
    """Check the matcher. Raises: GrammarError if a limit was reached."""
    message = first_line(matcher.get_error())
    if matcher.is_error() and is_limit(message):
        raise GrammarError(message)


def _located(tokenizer: GrammarTokenizer, text: str, limits: GrammarLimits, problem: str) -> str:
    """Return the library's message about a schema, with the path and keyword that cause it: the
    deepest part that is rejected by itself, and the keyword without which it is not."""
    root = json_schema.read(text)
    deadline = time.monotonic() + _LOCATE_S

    def refusal(part: object, path: str) -> str | None:
        try:
            lowered = json_schema.Lowering(root, limits).schema_at(path, part)
            compile_grammar(tokenizer, of_schema(lowered), limits)
        except GrammarError as error:
            return None if error.is_limit else str(error)
        except InvalidRequest:
            return None
        return None

    schema, path = root, "$"
    is_deeper = True
    while is_deeper:
        is_deeper = False
        for inner, place in json_schema.children(schema, path):
            if time.monotonic() > deadline:
                break
            message = refusal(inner, place)
            if message is not None:
                schema, path, problem, is_deeper = inner, place, message, True
                break
    for keyword in reversed(schema if isinstance(schema, dict) else {}):
        rest = {key: value for key, value in schema.items() if key != keyword}  # type: ignore[attr-defined]
        if time.monotonic() <= deadline and keyword != "type" and refusal(rest, path) is None:
            path = f"{path}.{keyword}"
            break
    return f"schema at {path}: {problem}"


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
