"""The process that compiles grammars: `python -m engine.grammar.compile_server FD SIZE FOLDER`.

Why a process: compiling cannot be interrupted. A harmless pattern (`.{1,200}` with 152,000 tokens)
takes seconds, one of 64 KiB can take minutes and GB, and a thread cannot be killed. So this process
reads the vocabulary once, keeps a single thread, and forks a child for every compilation: the child
has a timer, a memory bound and lower priority, and ends with its own result or by its own limits.
Forking costs milliseconds; the vocabulary is shared with the parent's pages.

What comes back: a grammar that compiled in under `cheap_s` of CPU is only reported; the engine
compiles it again itself, in about as long. The serialised form would be far larger (55 MB and 7 s
for 300 optional keys that compile in 0.1 s; measured). A dear one comes back serialised: for
`.{1,200}` 12 s to compile, 0.4 s to take over.

Wire: over the socket FD comes one byte with a descriptor (a stream of its own) per compilation; on
that stream a JSON line asks (form, text, timeout_s, cheap_s, bytes, compiled_bytes) and a JSON line
answers (ok, problem, costly, num_bytes), with num_bytes of serialised grammar after it. End of file
instead of an answer: the child hit a limit. The server ends when FD is closed. The functions that
compile are used by the engine, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import xgrammar

from engine.errors import InvalidRequest
from engine.grammar.classes import rewrite
from engine.grammar.emptiness import has_text
from engine.grammar.source import EBNF, REGEX
from engine.grammar.vocabulary import Vocabulary

NICENESS = 10
"""The process is given it by who starts it, and its children have it from it."""
MAX_NUM_THREADS = 8
_SIGNS_OF_A_LIMIT = ("bad_alloc", "Resource temporarily unavailable")
"""In messages of the compiler's: no memory, or none for the stack of one more thread."""


def tokenizer_info(vocabulary: Vocabulary) -> Any:
    """The vocabulary as the compiler takes it. One more id than the model has, without bytes, is
    the stop token where a request has no other; ids without bytes are special to the compiler, so
    never inside text."""
    return xgrammar.TokenizerInfo(
        [*vocabulary.token_bytes, b""],
        xgrammar.VocabType.RAW,
        vocab_size=vocabulary.size + 1,
        stop_token_ids=[vocabulary.size],
    )


def parse(form: str, text: str) -> Any:
    """A Source as the compiler's grammar. Raises: RuntimeError of the compiler.

    JSON is on one line with json.dumps' separators: without free white space no model can spin in
    it, and more of the text is forced.
    """
    if form == REGEX:
        return xgrammar.Grammar.from_regex(text)
    if form == EBNF:
        grammar = xgrammar.Grammar.from_ebnf(text)
    else:
        grammar = xgrammar.Grammar.from_json_schema(text, any_whitespace=False, strict_mode=True)
    return xgrammar.Grammar.from_ebnf(rewrite(str(grammar)))


def compile_grammar(info: Any, form: str, text: str, *, num_threads: int = 1) -> Any:
    """Raises: RuntimeError of the compiler."""
    compiler = xgrammar.GrammarCompiler(info, max_threads=num_threads, cache_enabled=False)
    return compiler.compile_grammar(parse(form, text))


def first_line(error: Exception) -> str:
    """The compiler's message without its own place in its own source."""
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else repr(error)
    if text.startswith("[") and ".cc:" in text:
        text = text.partition(".cc:")[2].partition(":")[2]
    return text.strip() or repr(error)


def main() -> None:
    """Serve until the socket ends."""
    asked = socket.socket(fileno=int(sys.argv[1]))
    vocabulary = Vocabulary.load(Path(sys.argv[3]), int(sys.argv[2]))
    info = tokenizer_info(vocabulary)
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
                _child(info, vocabulary.usable_bytes, stream)
            os._exit(0)
        os.close(stream)


def _child(info: Any, usable_bytes: frozenset[int], stream: int) -> None:
    with socket.socket(fileno=stream) as wire:
        request = json.loads(wire.makefile("r", encoding="utf-8").readline())
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, request["timeout_s"])
        _bound_memory(request["bytes"])
        answer, body = _compile(info, usable_bytes, request)
        wire.sendall(json.dumps(answer).encode() + b"\n" + body)


def _compile(
    info: Any, usable_bytes: frozenset[int], request: dict[str, Any]
) -> tuple[dict[str, Any], bytes]:
    began = time.process_time()
    try:
        grammar = parse(request["form"], request["text"])
        if not has_text(str(grammar.serialize_json()), usable_bytes):
            raise InvalidRequest("grammar", "no text of this model's tokens satisfies it")
        num_threads = min(MAX_NUM_THREADS, os.cpu_count() or 1)
        compiled = compile_grammar(info, request["form"], request["text"], num_threads=num_threads)
        matcher = xgrammar.GrammarMatcher(compiled)
        mask = xgrammar.allocate_token_bitmask(1, info.vocab_size)
        matcher.fill_next_token_bitmask(mask)
        if not mask.any():
            raise InvalidRequest("grammar", "no token can begin it")
        seconds = time.process_time() - began
        body = b"" if seconds <= request["cheap_s"] else compiled.serialize_json().encode()
    except MemoryError:
        return {"ok": False, "problem": "it takes too much memory", "costly": True}, b""
    except InvalidRequest as error:
        return {"ok": False, "problem": str(error).partition(": ")[2], "costly": False}, b""
    except RuntimeError as error:
        is_costly = any(sign in str(error) for sign in _SIGNS_OF_A_LIMIT)
        problem = "it takes too much memory" if is_costly else first_line(error)
        return {"ok": False, "problem": problem, "costly": is_costly}, b""
    if len(body) > request["compiled_bytes"]:
        problem = f"compiled it has {len(body)} bytes, more than {request['compiled_bytes']}"
        return {"ok": False, "problem": problem, "costly": True}, b""
    return {"ok": True, "problem": "", "costly": False, "num_bytes": len(body)}, body


def _bound_memory(num_bytes: int) -> None:
    """`num_bytes` more address space than the process has already."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
