"""GrammarService: grammars for one engine. Compiles off the engine's thread, keeps what it
compiled, fills bitmasks while the model runs.

Life of a grammar: `submit` checks its size and gives a Compilation, which waits for its turn, is
read, is compiled in a process of its own and is done, with a grammar or with an error. Senders take
turns: one who sends many waits for its own. The model's vocabulary is loaded by `prepare`, or by
the first that is compiled; the engine's thread never reads a file once there are requests.
The same spec again gives the same Compilation, whoever asks: refusals are kept as well, so a bomb
costs its compile time once. Kept are at most `max_num_cached` and `cache_bytes`, the least recently
used go first; states made from one that went stay valid.

Invariants (`check_integrity`): submitted == hits + misses + refused; misses == pending + compiled +
failed; pending and kept and dropped compilations are all there were.

`prepare`, `submit`, `begin_fill`, `close`: engine thread. `stats`, `check_integrity`: any thread.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from engine.errors import EngineError, IntegrityError, InvalidRequest, fresh
from engine.grammar.compilation import Compilation
from engine.grammar.compiler import CompileProcess, Compiler
from engine.grammar.config import GrammarLimits
from engine.grammar.errors import GrammarBusy, GrammarFailed, refuse
from engine.grammar.fill import Fill
from engine.grammar.jump import Cutter
from engine.grammar.source import check_size, source
from engine.grammar.state import GrammarState, Surroundings
from engine.grammar.vocabulary import Vocabulary
from engine.grammar.workers import Workers
from engine.request import GrammarSpec
from tokens.errors import TokenizerError
from tokens.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

LoadVocabulary = Callable[[], tuple[Vocabulary, Tokenizer | None]]
"""Blocks. Raises: InvalidRequest: grammars cannot be served with this model. Without a tokenizer
there are no jumps."""

_MAX_NUM_FILL_THREADS = 4
_NUM_MEASURED_AGAIN = 4
"""Kept grammars whose memory each `submit` looks at; microseconds each."""


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
    num_pending: int = 0
    num_cached: int = 0
    num_dropped: int = 0
    """Least recently used ones that made room, and failures that were our own."""
    cached_bytes: int = 0
    """When each was last measured."""
    num_filled_rows: int = 0
    num_stuck_threads: int = 0
    """Threads given up on whose call has not returned."""


class GrammarService:
    """See the module. Build it with `from_checkpoint`."""

    def __init__(
        self,
        load: LoadVocabulary,
        vocab_size: int,
        limits: GrammarLimits,
        *,
        process: CompileProcess,
    ) -> None:
        """Reads nothing. `load` is called on a compile thread, gives a vocabulary of `vocab_size`
        ids, and what it refuses is the error of every compilation. `process` has the same
        vocabulary; `close` closes it."""
        self._limits = limits
        self._load = load
        self._load_lock = threading.Lock()
        self._refusal: InvalidRequest | None = None
        self._lock = threading.Lock()
        self._stats = GrammarStats()
        self._cache: OrderedDict[GrammarSpec, Compilation] = OrderedDict()
        self._turns: OrderedDict[bytes, deque[Compilation]] = OrderedDict()
        self._measured: dict[GrammarSpec, Compilation] = {}  # compiled and kept, oldest look first
        self._fill: Fill | None = None
        self._compile_workers = Workers("grammar-compile", limits.max_num_compiling)
        self._fill_workers = Workers("grammar-fill", _MAX_NUM_FILL_THREADS)
        unknown = Vocabulary((b"",) * vocab_size)  # until it is loaded
        self._surroundings = Surroundings(unknown, limits, self._fill_workers, None)
        self._process = process
        self._compiler: Compiler | None = None

    @classmethod
    def from_checkpoint(
        cls, folder: Path, vocab_size: int, limits: GrammarLimits
    ) -> GrammarService:
        """For the model in `folder`, whose logits have `vocab_size` columns. A tokenizer.json that
        is missing or of a kind that grammars cannot be served with fails every compilation, by
        name."""

        def load() -> tuple[Vocabulary, Tokenizer | None]:
            try:
                return Vocabulary.load(folder, vocab_size), Tokenizer.load(folder)
            except TokenizerError as error:
                raise refuse(str(error)) from error

        return cls(load, vocab_size, limits, process=CompileProcess(folder, vocab_size))

    def prepare(self) -> None:
        """Have ready what the first grammar would wait for; before the first request.

        Reads the vocabulary here and now: a large one holds Python's lock for a second, which would
        hold running streams up. Begins to start the compiling process, which goes on by itself.
        A model that grammars cannot be served with gets neither.
        """
        try:
            self._loaded()
        except InvalidRequest as refusal:
            logger.info("no grammar can be served: %s", refusal)
            return
        except Exception as failure:
            # The worker serves all else; each grammar's request is told.
            logger.warning("grammars are not prepared: %r", failure)
            return
        self._compile_workers.submit(self._start_process)

    def _start_process(self) -> None:
        """On a compile thread."""
        try:
            self._process.start()
        except GrammarFailed as failure:
            # The first grammar tries again, and its request is told.
            logger.warning("grammars are not prepared: %s", failure)

    def submit(self, spec: GrammarSpec, sender: bytes = b"") -> Compilation:
        """Begin to compile, or find what is compiled. Never blocks. What else is wrong with the
        spec, or with this model's tokenizer, is the compilation's error.

        Args:
            sender: whose turn it takes: the key that separates tenants.
        Raises: InvalidRequest (size), GrammarBusy.
        """
        with self._lock:
            self._measure_again()
            self._count(num_submitted=1)
            found = self._cache.get(spec)
            if found is not None:
                self._cache.move_to_end(spec)
                self._count(num_hits=1)
                return found
            try:
                self._check_room(sender)
                check_size(spec, self._limits)
            except EngineError:
                self._count(num_refused=1)
                raise
            compilation = Compilation(spec)
            self._cache[spec] = compilation
            self._turns.setdefault(sender, deque()).append(compilation)
            self._count(num_misses=1, num_pending=1, num_cached=1)
        self._compile_workers.submit(self._compile_next)
        return compilation

    def _check_room(self, sender: bytes) -> None:
        """Lock held. Raises: GrammarBusy."""
        if self._stats.num_pending >= self._limits.max_num_waiting:
            raise GrammarBusy(f"{self._stats.num_pending} grammars wait to be compiled")
        num_own = len(self._turns.get(sender, ()))
        if num_own >= self._limits.max_num_waiting_per_sender:
            raise GrammarBusy(f"{num_own} grammars of this sender wait to be compiled")

    def begin_fill(self, rows: Sequence[GrammarState | None]) -> Fill:
        """Fill one mask per state on worker threads, while the caller runs the model; the states
        belong to the fill until `Fill.result`. Each at most once."""
        with self._lock:
            self._count(num_filled_rows=sum(state is not None for state in rows))
        self._fill = Fill(self._surroundings, rows)
        return self._fill

    def close(self) -> None:
        """End the compiling process and the threads. Compilations that wait fail."""
        self._compile_workers.close()
        self._process.close()
        self._fill_workers.close()
        with self._lock:
            self._turns.clear()
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
            queued = [one for waiting in self._turns.values() for one in waiting]
            num_queued = sum(self._cache.get(one.spec) is one for one in queued if not one.is_done)
            is_kept = all(self._cache.get(spec) is one for spec, one in self._measured.items())
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
            "queued": (len(queued), num_queued),
            "measured ones kept": (is_kept, True),
            "cached_bytes": (stats.cached_bytes, sum(entry.num_bytes for entry in entries)),
        }
        for name, (left, right) in laws.items():
            if left != right:
                raise IntegrityError(f"grammars: {name} is {left}, recomputed {right}")

    def _compile_next(self) -> None:
        """The oldest of the sender whose turn it is. On a compile thread."""
        with self._lock:
            if not self._turns:
                return  # closed meanwhile
            sender, waiting = self._turns.popitem(last=False)
            compilation = waiting.popleft()
            if waiting:
                self._turns[sender] = waiting
        self._compile(compilation)

    def _loaded(self) -> Compiler:
        """The vocabulary is loaded by who comes first; the others wait for it. On a compile thread,
        or before the first request.

        Raises: InvalidRequest: it cannot be, now and ever.
        """
        with self._load_lock:
            if self._refusal is not None:
                raise fresh(self._refusal)
            if self._compiler is None:
                try:
                    vocabulary, tokenizer = self._load()
                except InvalidRequest as refusal:
                    self._refusal = fresh(refusal)
                    raise
                cutter = None if tokenizer is None else Cutter(tokenizer, vocabulary)
                self._surroundings = replace(
                    self._surroundings, vocabulary=vocabulary, cutter=cutter
                )
                self._compiler = Compiler(self._process, vocabulary, self._limits)
            return self._compiler

    def _compile(self, compilation: Compilation) -> None:
        compiled: Any = None
        error: EngineError | None = None
        try:
            compiled = self._loaded().compile(source(compilation.spec, self._limits))
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
            compilation.finish(compiled, self._surroundings, error)
            self._count(cached_bytes=compilation.num_bytes)
            if error is None:
                self._measured[compilation.spec] = compilation
            if error is not None and not isinstance(error, InvalidRequest):
                self._drop(compilation.spec)  # our own mistake: the next one tries again
            self._make_room()
        compilation.call_back()

    def _measure_again(self) -> None:
        """Look at the memory of some compiled grammars, in turns. Lock held. Engine thread: states
        are used there, or by the fill, or by a thread that was given up on."""
        is_filling = self._fill is not None and not self._fill.is_over
        if is_filling or self._fill_workers.num_stuck:
            return
        for spec in list(islice(self._measured, _NUM_MEASURED_AGAIN)):
            compilation = self._measured.pop(spec)
            self._count(cached_bytes=compilation.measure())
            self._measured[spec] = compilation
        self._make_room()

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
        self._measured.pop(spec, None)
        self._count(num_cached=-1, num_dropped=1, cached_bytes=-dropped.num_bytes)

    def _count(self, **changes: int) -> None:
        """Lock held."""
        self._stats = replace(
            self._stats, **{name: getattr(self._stats, name) + by for name, by in changes.items()}
        )
