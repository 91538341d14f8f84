"""GrammarService: grammars for one engine. Compiles off the engine's thread, keeps what it
compiled, fills bitmasks while the model runs.

Life of a grammar: `submit` checks its size and syntax at once and gives a Compilation, which waits
for its turn, is compiled in a process of its own and is done, with a grammar or with an error.
The same spec again gives the same Compilation, whoever asks: refusals are kept as well, so a bomb
costs its compile time once. Kept are at most `max_num_cached` and `cache_bytes`, the least recently
used go first; states made from one that went stay valid.

Invariants (`check_integrity`): submitted == hits + misses + refused; misses == pending + compiled +
failed; pending and kept and dropped compilations are all there were.

`submit`, `begin_fill` and `close`: engine thread. `stats`, `check_integrity`: any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.errors import EngineError, IntegrityError, InvalidRequest
from engine.grammar.compiler import CompileProcess, Compiler
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarBusy, GrammarFailed
from engine.grammar.fill import Fill
from engine.grammar.jump import Cutter
from engine.grammar.source import Source, source
from engine.grammar.state import GrammarState, Surroundings, new_state
from engine.grammar.vocabulary import Vocabulary
from engine.grammar.workers import Workers
from engine.request import GrammarSpec
from tokens.errors import TokenizerError
from tokens.tokenizer import Tokenizer

_MAX_NUM_FILL_THREADS = 4


@dataclass(frozen=True)
class GrammarStats:
    """Counts since the start, and levels now."""

    num_submitted: int = 0
    num_hits: int = 0
    """Compiled, refused or pending already."""
    num_misses: int = 0
    num_refused: int = 0
    """At once: by size or syntax, or because too many wait."""
    num_compiled: int = 0
    num_failed: int = 0
    num_pending: int = 0
    num_cached: int = 0
    num_dropped: int = 0
    """Least recently used ones that made room, and failures that were our own."""
    cached_bytes: int = 0
    """When the last compilation was done."""
    num_filled_rows: int = 0
    num_stuck_threads: int = 0
    """Threads given up on whose call has not returned."""


class Compilation:
    """One spec on its way to being a grammar. Any thread may read it."""

    def __init__(self, spec: GrammarSpec, surroundings: Surroundings) -> None:
        self.spec = spec
        self._surroundings = surroundings
        self._compiled: Any = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self.error: EngineError | None = None
        """Why there is no grammar; None before `is_done`."""
        self.num_bytes = 0
        """Memory of the compiled grammar when it was last measured."""

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Block until it is done; False: it is not, after this time. Not for the engine's
        thread."""
        return self._done.wait(timeout_s)

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call `callback` once it is done, on whichever thread finishes it; at once if it is."""
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback()

    def state(self, end_token_ids: frozenset[int]) -> GrammarState:
        """A sequence at the beginning of the grammar.

        Args:
            end_token_ids: what may end the output (EOS unless ignored, stop ids): allowed where the
                text is complete, and nowhere else. May be empty: `is_complete` tells the end.
        Raises: `error`, or GrammarFailed if it is not done.
        """
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise GrammarFailed("a state was asked for before the grammar was compiled")
        return new_state(self._compiled, self._surroundings, end_token_ids)

    def measure(self) -> int:
        """Look at the compiled grammar's memory again: it grows while masks are made, for the
        library keeps them. Returns: by how much `num_bytes` changed."""
        before = self.num_bytes
        if self._compiled is not None:
            self.num_bytes = int(self._compiled.memory_size_bytes)
        return self.num_bytes - before

    def finish(self, compiled: Any, error: EngineError | None) -> None:
        """Called by the service, once; `call_back` follows, without the service's lock."""
        self._compiled, self.error = compiled, error
        self._done.set()

    def call_back(self) -> None:
        """Tell who asked with `when_done`."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class GrammarService:
    """See the module. Build it with `from_checkpoint`."""

    def __init__(
        self,
        vocabulary: Vocabulary | InvalidRequest,
        limits: GrammarLimits,
        *,
        process: CompileProcess | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        """`vocabulary`: an InvalidRequest says why no grammar can be served; `submit` raises it.
        Otherwise `process` is needed, with the same vocabulary; `close` closes it. Without
        `tokenizer` there are no jumps."""
        self._limits = limits
        self._refusal: InvalidRequest | None = None
        if isinstance(vocabulary, InvalidRequest):
            self._refusal, vocabulary = vocabulary, Vocabulary(())
        self._lock = threading.Lock()
        self._stats = GrammarStats()
        self._cache: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._compile_workers = Workers("grammar-compile", limits.max_num_compiling)
        self._fill_workers = Workers("grammar-fill", _MAX_NUM_FILL_THREADS)
        cutter = None if tokenizer is None else Cutter(tokenizer, vocabulary)
        self._surroundings = Surroundings(vocabulary, limits, self._fill_workers, cutter)
        self._process = process
        self._compiler = None if process is None else Compiler(process, vocabulary, limits)

    @classmethod
    def from_checkpoint(
        cls, folder: Path, vocab_size: int, limits: GrammarLimits
    ) -> GrammarService:
        """For the model in `folder`, whose logits have `vocab_size` columns. A tokenizer.json that
        is missing or of a kind that grammars cannot be served with makes every `submit` refuse by
        name."""
        try:
            vocabulary = Vocabulary.load(folder, vocab_size)
            tokenizer = Tokenizer.load(folder)
        except InvalidRequest as refusal:
            return cls(refusal, limits)
        except TokenizerError as error:
            return cls(InvalidRequest("grammar", str(error)), limits)
        process = CompileProcess(folder, vocab_size)
        return cls(vocabulary, limits, process=process, tokenizer=tokenizer)

    def submit(self, spec: GrammarSpec) -> Compilation:
        """Begin to compile, or find what is compiled. Never blocks.

        Raises: InvalidRequest (size, syntax, not supported, or this model's tokenizer),
            GrammarBusy.
        """
        with self._lock:
            self._count(num_submitted=1)
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
                self._count(num_hits=1)
                return found
            try:
                if self._refusal is not None:
                    raise self._refusal
                if self._stats.num_pending >= self._limits.max_num_waiting:
                    raise GrammarBusy(f"{self._stats.num_pending} grammars wait to be compiled")
                checked = source(spec, self._limits)
            except EngineError:
                self._count(num_refused=1)
                raise
            compilation = Compilation(spec, self._surroundings)
            self._cache[spec] = compilation
            self._count(num_misses=1, num_pending=1, num_cached=1)
        self._compile_workers.submit(lambda: self._compile(compilation, checked))
        return compilation

    def begin_fill(self, rows: Sequence[GrammarState | None]) -> Fill:
        """Fill one mask per state on worker threads, while the caller runs the model; the states
        belong to the fill until `Fill.result`. Each at most once."""
        with self._lock:
            self._count(num_filled_rows=sum(state is not None for state in rows))
        return Fill(self._surroundings, rows)

    def close(self) -> None:
        """End the compiling process and the threads. Compilations that wait fail."""
        self._compile_workers.close()
        if self._process is not None:
            self._process.close()
        self._fill_workers.close()
        with self._lock:
            waiting = [found for found in self._cache.values() if not found.is_done]
        for compilation in waiting:
            self._finish(compilation, None, GrammarFailed("the grammar service is closed"))

    def stats(self) -> GrammarStats:
        """Counts and levels now."""
        with self._lock:
            return replace(self._stats, num_stuck_threads=self._fill_workers.num_stuck)

    def check_integrity(self) -> None:
        """Raises: IntegrityError."""
        self._compile_workers.check_integrity()
        self._fill_workers.check_integrity()
        with self._lock:
            stats = self._stats
            entries = list(self._cache.values())
            # A compilation is marked done and counted under one lock.
            num_pending = sum(not entry.is_done for entry in entries)
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
            "pending": (stats.num_pending, num_pending),
            "cached_bytes": (stats.cached_bytes, sum(entry.num_bytes for entry in entries)),
        }
        for name, (left, right) in laws.items():
            if left != right:
                raise IntegrityError(f"grammars: {name} is {left}, recomputed {right}")

    def _compile(self, compilation: Compilation, checked: Source) -> None:
        """On a compile thread."""
        compiled: Any = None
        error: EngineError | None = None
        try:
            if self._compiler is None:
                raise GrammarFailed("this service has no process to compile in")
            compiled = self._compiler.compile(checked)
        except EngineError as failure:
            error = failure
        except Exception as failure:
            error = GrammarFailed(f"compiling a grammar failed: {failure!r}")
        self._finish(compilation, compiled, error)

    def _finish(self, compilation: Compilation, compiled: Any, error: EngineError | None) -> None:
        with self._lock:
            if compilation.is_done:
                return  # closed meanwhile
            self._count(num_pending=-1)
            self._count(**{"num_compiled" if error is None else "num_failed": 1})
            compilation.finish(compiled, error)
            grown = sum(entry.measure() for entry in self._cache.values())
            self._count(cached_bytes=grown)
            if error is not None and not isinstance(error, InvalidRequest):
                self._drop(compilation.spec)  # our own mistake: the next one tries again
            self._make_room()
        compilation.call_back()

    def _make_room(self) -> None:
        """Drop the least recently used that are done, until the bounds hold. Lock held."""
        for spec in list(self._cache):
            is_over = (
                self._stats.num_cached > self._limits.max_num_cached
                or self._stats.cached_bytes > self._limits.cache_bytes
            )
            if not is_over:
                return
            if self._cache[spec].is_done:
                self._drop(spec)

    def _drop(self, spec: GrammarSpec) -> None:
        dropped = self._cache.pop(spec)
        self._count(num_cached=-1, num_dropped=1, cached_bytes=-dropped.num_bytes)

    def _count(self, **changes: int) -> None:
        """Lock held."""
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + by for name, by in changes.items()}
        )
