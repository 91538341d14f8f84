"""GrammarService: grammars for one engine. Compiles off the engine's thread, keeps what it
compiled, and makes masks while the model runs.

Life of a grammar: `submit` checks its size and gives a Compilation, which waits for its turn, is
compiled in a process of its own and is done, with a grammar or with an error. Senders take turns:
one that sends many waits for its own. A compilation whose last request left (`release`) is ended.
The model's vocabulary is loaded by `prepare`, or by the first that is compiled; the engine's thread
never reads a file once there are requests. The same spec of the same sender again gives the same
Compilation: refusals are kept as well, so a bomb costs its compile time once. Senders share none,
since outputs of one grammar share its lexer, and what one does to that, the others feel. Kept are
at most `max_num_cached` and `cache_bytes`, the least recently used go first; states made from one
that went stay valid.

Invariants (`check_integrity`): submitted == hits + misses + refused; misses == pending + compiled +
failed; pending and kept and dropped compilations are all there were.

`prepare`, `submit`, `release`, `close`: engine thread. `stats`, `check_integrity`: any thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import socket
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from engine.errors import EngineError, IntegrityError, InvalidRequest, fresh
from engine.grammar.compile_server import FIRST, NICENESS
from engine.grammar.compiler import CompileProcess, Compiler
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarBusy, GrammarFailed
from engine.grammar.fill import MaskFiller
from engine.grammar.source import check_size
from engine.grammar.state import CompiledGrammar, GrammarState
from engine.grammar.vocabulary import GrammarTokenizer
from engine.request import GrammarSpec

logger = logging.getLogger(__name__)

LoadTokenizer = Callable[[], GrammarTokenizer]
"""Blocks. Raises: InvalidRequest: grammars cannot be served with this model."""

_MAX_NUM_MASK_THREADS = 4


@dataclass(frozen=True)
class GrammarStats:
    """Counts since the start, and levels now."""

    num_submitted: int = 0
    num_hits: int = 0
    """Compiled, refused or pending already."""
    num_misses: int = 0
    num_refused: int = 0
    """At once: by size, or because too many wait."""
    num_compiled: int = 0
    num_failed: int = 0
    """Those that were ended with their last request, too."""
    num_pending: int = 0
    num_cached: int = 0
    num_dropped: int = 0
    """Least recently used ones that made room, those used often enough, and failures that were our
    own."""
    cached_bytes: int = 0
    num_masks: int = 0
    num_late_rows: int = 0
    """Rows that a step went on without, because their mask was not there."""


_Key = tuple[bytes, GrammarSpec]


class Compilation:
    """One GrammarSpec on its way to being a grammar. Made, finished and kept by GrammarService; any
    thread may read it."""

    def __init__(self, spec: GrammarSpec, sender: bytes = b"") -> None:
        self.spec = spec
        self.key: _Key = (sender, spec)
        self.num_holders = 0
        """Requests that wait for it or use it. Engine thread."""
        self.num_bytes = 0
        """About what the compiled grammar takes."""
        self.stream: socket.socket | None = None
        """Of the compilation that runs: to shut it down ends it. Service's lock."""
        self.grammar: CompiledGrammar | None = None
        self._done = threading.Event()
        self._error: EngineError | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> EngineError | None:
        """Why there is no grammar; None before `is_done`. Each caller gets one of its own."""
        return None if self._error is None else fresh(self._error)

    def wait(self, timeout_s: float) -> bool:
        """Block until it is done; False: it is not, after this time."""
        return self._done.wait(timeout_s)

    def state(self, end_token_ids: frozenset[int]) -> GrammarState:
        """A sequence at the beginning of the grammar.

        Args:
            end_token_ids: what may end the output (EOS unless ignored, stop ids): allowed where the
                text is complete, and nowhere else. May be empty: `is_complete` tells the end.
        Raises: `error`, or GrammarFailed if it is not done, or the library fails.
        """
        if self._error is not None:
            raise fresh(self._error)
        if self.grammar is None:
            raise GrammarFailed("a state was asked for before the grammar was compiled")
        try:
            return self.grammar.state(end_token_ids)
        except Exception as failure:
            raise GrammarFailed(f"the grammar library failed: {failure!r}") from failure

    def finish(self, grammar: CompiledGrammar | None, error: EngineError | None) -> None:
        """Called by the service, once."""
        self.grammar = grammar
        self._error = None if error is None else fresh(error)
        self._done.set()


def _run_nicely() -> None:
    """On a compile thread: behind the engine's own threads."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _trim() -> None:
    """Give memory of grammars that were dropped back to the system, where libc can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class GrammarService:
    """See the module. Build it with `from_checkpoint`."""

    def __init__(
        self, load: LoadTokenizer, limits: GrammarLimits, *, process: CompileProcess
    ) -> None:
        """Reads nothing. `load` is called by `prepare` or on a compile thread, and what it refuses
        is the error of every compilation. `process` has the same vocabulary; `close` closes it."""
        self.limits = limits
        self._load = load
        self._load_lock = threading.Lock()
        self._refusal: InvalidRequest | None = None
        self._lock = threading.Lock()
        self._stats = GrammarStats()
        self._cache: OrderedDict[_Key, Compilation] = OrderedDict()
        self._turns: OrderedDict[bytes, deque[Compilation]] = OrderedDict()
        self._has_dropped = False
        self._threads = ThreadPoolExecutor(
            limits.max_num_compiling, "grammar-compile", initializer=_run_nicely
        )
        self._process = process
        self._compiler: Compiler | None = None
        self.filler = MaskFiller(_MAX_NUM_MASK_THREADS)

    @classmethod
    def from_checkpoint(
        cls, folder: Path, vocab_size: int, limits: GrammarLimits
    ) -> GrammarService:
        """For the model in `folder`, whose logits have `vocab_size` columns. A tokenizer.json that
        is missing or of a kind that grammars cannot be served with fails every compilation, by
        name."""
        return cls(
            lambda: GrammarTokenizer.load(folder, vocab_size),
            limits,
            process=CompileProcess(folder, vocab_size),
        )

    def prepare(self) -> None:
        """Have ready what the first grammar would wait for: the vocabulary and the compiling
        process; a grammar has been compiled, and a mask made. Before the first request: reading a
        large vocabulary holds Python's lock for a second, which would hold running streams up. A
        model that grammars cannot be served with gets neither."""
        try:
            self._loaded()
            self._process.start()
            grammar, _ = self._loaded().compile(FIRST, socket.socketpair())
            state = grammar.state(frozenset())
            self.filler.submit([state])
            self.filler.wait([state], None)
        except InvalidRequest as refusal:
            logger.info("no grammar can be served: %s", refusal)
        except Exception as failure:
            # The worker serves all else; each grammar's request is told.
            logger.warning("grammars are not prepared: %r", failure)

    def submit(self, spec: GrammarSpec, sender: bytes = b"") -> Compilation:
        """Begin to compile, or find what is compiled; the caller holds it until `release`. Never
        blocks. What else is wrong with the spec, or with this model's tokenizer, is the
        compilation's error.

        Args:
            sender: whose turn it takes: the key that separates tenants.
        Raises: InvalidRequest (size), GrammarBusy.
        """
        with self._lock:
            self._count(num_submitted=1)
            found = self._found((sender, spec))
            if found is not None:
                self._count(num_hits=1)
                found.num_holders += 1
                return found
            try:
                self._check_room(sender)
                check_size(spec, self.limits)
            except EngineError:
                self._count(num_refused=1)
                raise
            compilation = Compilation(spec, sender)
            compilation.num_holders = 1
            self._cache[compilation.key] = compilation
            self._turns.setdefault(sender, deque()).append(compilation)
            self._count(num_misses=1, num_pending=1, num_cached=1)
        self._threads.submit(self._compile_next)
        return compilation

    def release(self, compilation: Compilation) -> None:
        """The caller's request is over. A compilation that no request waits for is ended."""
        with self._lock:
            compilation.num_holders -= 1
            if compilation.num_holders > 0 or compilation.is_done:
                return
            if self._cache.get(compilation.key) is compilation:
                self._drop(compilation.key)  # another request begins anew
            if compilation.stream is not None:
                with contextlib.suppress(OSError):
                    compilation.stream.shutdown(socket.SHUT_RDWR)
                return
            for sender, waiting in list(self._turns.items()):
                if compilation in waiting:
                    waiting.remove(compilation)
                    if not waiting:
                        del self._turns[sender]
                    self._finish(compilation, None, 0, GrammarFailed("no request waits for it"))
                    return

    def _found(self, key: _Key) -> Compilation | None:
        """What is kept, unless it must be compiled anew. Lock held."""
        found = self._cache.get(key)
        if found is None:
            return None
        grammar = found.grammar
        if grammar is not None and (
            grammar.is_broken or grammar.num_states >= self.limits.max_num_uses
        ):
            self._drop(key)
            return None
        self._cache.move_to_end(key)
        return found

    def _check_room(self, sender: bytes) -> None:
        """Lock held. Raises: GrammarBusy."""
        if self._stats.num_pending >= self.limits.max_num_waiting:
            raise GrammarBusy(f"{self._stats.num_pending} grammars wait to be compiled")
        num_own = len(self._turns.get(sender, ()))
        if num_own >= self.limits.max_num_waiting_per_sender:
            raise GrammarBusy(f"{num_own} grammars of this sender wait to be compiled")

    def close(self) -> None:
        """End the compiling process and the threads. Compilations that wait fail."""
        self._process.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.filler.close()
        with self._lock:
            self._turns.clear()
            for compilation in list(self._cache.values()):
                if not compilation.is_done:
                    closed = GrammarFailed("the grammar service is closed")
                    self._finish(compilation, None, 0, closed)

    def stats(self) -> GrammarStats:
        """Counts and levels now."""
        filler = self.filler
        with self._lock:
            return replace(self._stats, num_masks=filler.num_filled, num_late_rows=filler.num_late)

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        self.filler.check_integrity()
        with self._lock:
            stats = self._stats
            entries = list(self._cache.values())
            queued = [one for waiting in self._turns.values() for one in waiting]
            laws = {
                "submitted": (
                    stats.num_submitted,
                    stats.num_hits + stats.num_misses + stats.num_refused,
                ),
                "misses": (
                    stats.num_misses,
                    stats.num_pending + stats.num_compiled + stats.num_failed,
                ),
                "entries": (stats.num_misses, stats.num_cached + stats.num_dropped),
                "cached": (stats.num_cached, len(entries)),
                "queued": (
                    len(queued),
                    sum(self._cache.get(one.key) is one and not one.is_done for one in queued),
                ),
                "cached_bytes": (stats.cached_bytes, sum(entry.num_bytes for entry in entries)),
            }
        for name, (left, right) in laws.items():
            if left != right:
                raise IntegrityError(f"grammars: {name} is {left}, recomputed {right}")

    def _compile_next(self) -> None:
        """The oldest of the sender whose turn it is. On a compile thread."""
        pair = socket.socketpair()
        with self._lock:
            if not self._turns:  # closed, or ended meanwhile
                for end in pair:
                    end.close()
                return
            sender, waiting = self._turns.popitem(last=False)
            compilation = waiting.popleft()
            compilation.stream = pair[0]
            if waiting:
                self._turns[sender] = waiting
        grammar, num_bytes = None, 0
        error: EngineError | None = None
        try:
            grammar, num_bytes = self._loaded().compile(compilation.spec, pair)
        except EngineError as failure:
            error = failure
        except Exception as failure:
            error = GrammarFailed(f"compiling a grammar failed: {failure!r}")
        for end in pair:
            end.close()
        with self._lock:
            compilation.stream = None
            self._finish(compilation, grammar, num_bytes, error)
            has_dropped, self._has_dropped = self._has_dropped, False
        if has_dropped:
            _trim()

    def _loaded(self) -> Compiler:
        """The vocabulary is loaded by the first caller; the others wait for it. On a compile
        thread, or before the first request.

        Raises: InvalidRequest: it cannot be, now and ever.
        """
        with self._load_lock:
            if self._refusal is not None:
                raise fresh(self._refusal)
            if self._compiler is None:
                try:
                    tokenizer = self._load()
                except InvalidRequest as refusal:
                    self._refusal = fresh(refusal)
                    raise
                self._compiler = Compiler(self._process, tokenizer, self.limits)
            return self._compiler

    def _finish(
        self,
        compilation: Compilation,
        grammar: CompiledGrammar | None,
        num_bytes: int,
        error: EngineError | None,
    ) -> None:
        """Lock held."""
        if compilation.is_done:
            return  # closed meanwhile
        self._count(num_pending=-1)
        self._count(**{"num_compiled" if error is None else "num_failed": 1})
        is_kept = self._cache.get(compilation.key) is compilation
        if is_kept and error is None:
            compilation.num_bytes = num_bytes
            self._count(cached_bytes=num_bytes)
        compilation.finish(grammar, error)
        if is_kept and error is not None and not isinstance(error, InvalidRequest):
            self._drop(compilation.key)  # our own mistake: the next one tries again
        self._make_room()

    def _make_room(self) -> None:
        """Drop the least recently used that are done, until the bounds hold. Lock held."""
        for key in list(self._cache):
            is_over = (
                self._stats.num_cached > self.limits.max_num_cached
                or self._stats.cached_bytes > self.limits.cache_bytes
            )
            if not is_over:
                return
            if self._cache[key].is_done:
                self._drop(key)

    def _drop(self, key: _Key) -> None:
        dropped = self._cache.pop(key)
        self._has_dropped = True
        self._count(num_cached=-1, num_dropped=1, cached_bytes=-dropped.num_bytes)

    def _count(self, **changes: int) -> None:
        """Lock held."""
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + by for name, by in changes.items()}
        )
