"""GrammarService: the grammars of one engine: compiles them outside of the engine's thread, caches
the results, and fills masks while the model runs.

Life of a grammar: `submit` checks its size and returns a Compilation, which waits for its turn, is
compiled in a process of its own, and ends with a grammar or an error. Senders take turns: one that
submits many waits for its own. A compilation ends when its last request is released. The model's
vocabulary is loaded by `prepare`, or by the first compilation; the engine's thread never reads a
file once there are requests.

The same specification of the same sender returns the same Compilation: rejections are cached, too,
so that an expensive grammar costs its compile time once. Senders share none, since outputs of one
grammar share its lexer, whose cost one sender could raise for others. At most `max_num_cached`
results and `cache_bytes` are cached, without the least recently used ones; states of a dropped
grammar stay valid.

Invariants (`check_integrity`): submitted == hits + misses + refused; misses == pending + compiled +
failed; every compilation is pending, cached or dropped. `prepare`, `submit`, `release`, `close`:
engine thread. `stats`, `check_integrity`: any thread.
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
from engine.grammar.llguidance_source import check_size
from engine.grammar.mask_filler import MaskFiller
from engine.grammar.state import CompiledGrammar, GrammarState
from engine.grammar.vocabulary import GrammarTokenizer
from engine.request import GrammarSpec

logger = logging.getLogger(__name__)

LoadTokenizer = Callable[[], GrammarTokenizer]
"""Returns the model's tokenizer; blocks. Raises: InvalidRequest if grammars cannot be used with
this model."""

_MAX_NUM_MASK_THREADS = 4


@dataclass(frozen=True)
class GrammarStats:
    """Counts since the start, and present levels."""

    num_submitted: int = 0
    num_hits: int = 0
    """Number of submissions that were compiled, rejected or pending already."""
    num_misses: int = 0
    num_refused: int = 0
    """Number of submissions rejected at once: by size, or because too many wait."""
    num_compiled: int = 0
    num_failed: int = 0
    """Number of compilations that failed or were ended with their last request."""
    num_pending: int = 0
    num_cached: int = 0
    num_dropped: int = 0
    """Number of compilations dropped from the cache: least recently used ones, those with too many
    uses, and failures that are bugs."""
    cached_bytes: int = 0
    num_masks: int = 0
    num_late_rows: int = 0
    """Number of rows that a step did not wait for because their mask was late."""


_Key = tuple[bytes, GrammarSpec]


class Compilation:
    """The compilation of one GrammarSpec. GrammarService creates and finishes it; any thread may
    read it."""

    def __init__(self, spec: GrammarSpec, sender: bytes = b"") -> None:
        self.spec = spec
        self.key: _Key = (sender, spec)
        self.num_holders = 0
        """Number of requests that wait for it or use it. Engine thread."""
        self.num_bytes = 0
        """Approximate size of the compiled grammar in bytes."""
        self.stream: socket.socket | None = None
        """The stream of a running compilation: shutting it down ends the compilation. Guarded by
        the service's lock."""
        self.grammar: CompiledGrammar | None = None
        self._done = threading.Event()
        self._error: EngineError | None = None

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> EngineError | None:
        """The error in place of a grammar, a new one for each caller; None if there is a grammar,
        or before `is_done`."""
        return None if self._error is None else fresh(self._error)

    def wait(self, timeout_s: float) -> bool:
        """Block until the compilation is done, for at most `timeout_s` seconds. Returns: whether it
        is done."""
        return self._done.wait(timeout_s)

    def state(self, end_token_ids: frozenset[int]) -> GrammarState:
        """Create the state of a sequence at the beginning of the grammar.

        Args: end_token_ids: the tokens that may end the output (EOS unless ignored, stop ids):
            allowed where the text is complete, and nowhere else. May be empty: `is_complete` then
            tells the end.
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
        """Set the result. The service calls it once."""
        self.grammar = grammar
        self._error = None if error is None else fresh(error)
        self._done.set()


def _run_nicely() -> None:
    """Set the niceness of a compile thread, below the engine's own threads."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _trim() -> None:
    """Return the memory of dropped grammars to the system, if libc supports it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class GrammarService:
    """Compiles and caches grammars, and fills masks. Created by `from_checkpoint`."""

    def __init__(
        self, load: LoadTokenizer, limits: GrammarLimits, *, process: CompileProcess
    ) -> None:
        """Create the service without reading a file. `prepare` or a compile thread calls `load`,
        whose error is then that of every compilation. `process` must have the same vocabulary;
        `close` closes it."""
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
        """Create the service of the model in `folder`, whose logits have `vocab_size` columns. If
        its tokenizer.json is missing or of an unsupported kind, every compilation fails with
        that reason."""
        return cls(
            lambda: GrammarTokenizer.load(folder, vocab_size),
            limits,
            process=CompileProcess(folder, vocab_size),
        )

    def prepare(self) -> None:
        """Load the vocabulary, start the compiling process, compile a grammar and fill a mask, so
        that the first grammar waits for none of them. Called before the first request: reading a
        large vocabulary holds Python's lock for a second, which would stall running streams.
        Does nothing for a model whose tokenizer is not supported."""
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
        """Start a compilation, or find it in the cache; the caller holds it until `release`. Never
        blocks. Other errors of the specification, or of this model's tokenizer, are the
        compilation's error.

        Args: sender: the key by which senders take turns, which separates tenants.
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
        """End the use of a compilation by one request. A compilation that no request waits for is
        ended."""
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
        """Return the cached compilation of a key, unless it must be compiled again. Called with the
        lock held."""
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
        """Check the number of waiting compilations. Called with the lock held. Raises:
        GrammarBusy."""
        if self._stats.num_pending >= self.limits.max_num_waiting:
            raise GrammarBusy(f"{self._stats.num_pending} grammars wait to be compiled")
        num_own = len(self._turns.get(sender, ()))
        if num_own >= self.limits.max_num_waiting_per_sender:
            raise GrammarBusy(f"{num_own} grammars of this sender wait to be compiled")

    def close(self) -> None:
        """End the compiling process and the threads. Waiting compilations fail."""
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
        """Return the present counts and levels."""
        filler = self.filler
        with self._lock:
            return replace(self._stats, num_masks=filler.num_filled, num_late_rows=filler.num_late)

    def check_integrity(self) -> None:
        """Check the counts and the cache. Raises: IntegrityError."""
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
        """Run the oldest compilation of the sender whose turn it is. Runs on a compile thread."""
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
        """Return the compiler; the first caller loads the vocabulary, and others wait for it. On a
        compile thread, or before the first request. Raises: InvalidRequest if it can never be
        loaded."""
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
        """Set the result of a compilation and cache it. Called with the lock held."""
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
        """Drop the least recently used finished compilations until the limits hold. Called with the
        lock held."""
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
        """Add to the counts. Called with the lock held."""
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + by for name, by in changes.items()}
        )
