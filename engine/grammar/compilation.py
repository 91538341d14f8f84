"""Compilation: one GrammarSpec on its way to being a grammar. Made, finished and kept by
engine/grammar/service.py; any thread may read it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine.errors import EngineError, fresh
from engine.grammar.errors import GrammarFailed
from engine.grammar.state import GrammarState, Surroundings, new_state
from engine.request import GrammarSpec


class Compilation:
    """See the module."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.spec = spec
        self._surroundings: Surroundings | None = None
        self._compiled: Any = None
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._error: EngineError | None = None
        self.num_bytes = 0
        """Memory of the compiled grammar when it was last measured."""

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> EngineError | None:
        """Why there is no grammar; None before `is_done`. Each who asks gets one of its own."""
        return None if self._error is None else fresh(self._error)

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
        Raises: `error`, or GrammarFailed if it is not done, or the library fails.
        """
        if self._error is not None:
            raise fresh(self._error)
        if not self.is_done or self._surroundings is None:
            raise GrammarFailed("a state was asked for before the grammar was compiled")
        try:
            return new_state(self._compiled, self._surroundings, end_token_ids)
        except Exception as failure:
            raise GrammarFailed(f"the grammar library failed: {failure!r}") from failure

    def measure(self) -> int:
        """Look at the compiled grammar's memory again: it grows while masks are made, for the
        library keeps them. Only while nobody makes one. Returns: by how much `num_bytes`
        changed."""
        before = self.num_bytes
        if self._compiled is not None:
            self.num_bytes = int(self._compiled.memory_size_bytes)
        return self.num_bytes - before

    def finish(self, compiled: Any, surroundings: Surroundings, error: EngineError | None) -> None:
        """Called by the service, once; `call_back` follows, without the service's lock."""
        self._compiled, self._surroundings = compiled, surroundings
        self._error = None if error is None else fresh(error)
        self.measure()  # nobody has a state of it yet
        self._done.set()

    def call_back(self) -> None:
        """Tell who asked with `when_done`."""
        with self._lock:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
