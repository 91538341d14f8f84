"""MaskFiller: fills the masks of one step's rows on worker threads while the model runs.

A late mask delays its own row only: the step waits for it for at most `mask_wait_s` while other
rows are ready; the thread continues, and a later step finds the mask in its state. All rows of the
same CompiledGrammar wait with a late row, since they share a lock. The library bounds the work for
one mask, so that a thread always returns.

Call `submit` with the states of a step, run the model, then call `wait`. Engine thread.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence

from engine.errors import IntegrityError
from engine.grammar.state import GrammarState

logger = logging.getLogger(__name__)

_STEP_WAIT_S = 30.0
"""Longest wait in seconds for one mask; above all limits of the library, so that exceeding it is a
bug."""


class MaskFiller:
    """Fills masks on worker threads."""

    def __init__(self, num_threads: int) -> None:
        """Create the filler. Threads are started on demand."""
        self._num_threads = num_threads
        self._work = threading.Condition()
        self._queue: deque[GrammarState] = deque()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False
        self.num_filled = 0
        """Number of masks filled."""
        self.num_late = 0
        """Number of rows that a step did not wait for."""

    def submit(self, states: Sequence[GrammarState]) -> None:
        """Begin to fill the masks that these states lack. The states must not be used until `wait`
        says that they may."""
        missing = [
            state for state in dict.fromkeys(states) if not state.has_mask and not state.is_filling
        ]
        if not missing:
            return
        with self._work:
            if self._is_closed:
                raise RuntimeError("masks were asked for after close")
            for state in missing:
                state.is_filling = True
                state.grammar.num_filling += 1
            self._queue.extend(missing)
            wanted = min(self._num_threads, len(self._threads) - self._num_idle + len(missing))
            while len(self._threads) < wanted:
                thread = threading.Thread(target=self._run, name="grammar-mask", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._work.notify_all()

    def wait(self, states: Sequence[GrammarState], timeout_s: float | None) -> set[int]:
        """Wait until these states have their masks, for at most `timeout_s` seconds; None: until
        all have. Returns: the indices of states that must not be used yet (`is_busy`), because
        they, or others of their grammar, have no mask. Raises: IntegrityError after the longest
        time that a mask can take."""
        with self._work:
            is_done = self._work.wait_for(
                lambda: not any(state.is_busy for state in states),
                _STEP_WAIT_S if timeout_s is None else timeout_s,
            )
            if is_done:
                return set()
            if timeout_s is None:
                raise IntegrityError(f"masks took more than {_STEP_WAIT_S} s")
            late = {index for index, state in enumerate(states) if state.is_busy}
            self.num_late += len(late)
            return late

    def close(self) -> None:
        """Stop the threads after their present mask."""
        with self._work:
            self._is_closed = True
            self._queue.clear()
            self._work.notify_all()

    def check_integrity(self) -> None:
        """Check the counts of masks being filled. Raises: IntegrityError."""
        with self._work:
            num_alive = sum(thread.is_alive() for thread in self._threads)
            if num_alive != len(self._threads) or not 0 <= self._num_idle <= num_alive:
                raise IntegrityError(
                    f"{num_alive} of {len(self._threads)} mask threads live, {self._num_idle} idle"
                )
            if len(self._queue) != sum(state.is_filling for state in self._queue):
                raise IntegrityError("a state is queued for its mask and not marked so")

    def _run(self) -> None:
        while True:
            with self._work:
                self._num_idle += 1
                while not self._queue and not self._is_closed:
                    self._work.wait()
                self._num_idle -= 1
                if self._is_closed:
                    self._threads.remove(threading.current_thread())
                    return
                state = self._queue.popleft()
            try:
                state.mask()
            except Exception as error:
                logger.exception("a mask could not be made")
                state.fail(repr(error))
                state.mask()
            with self._work:
                state.is_filling = False
                state.grammar.num_filling -= 1
                self.num_filled += 1
                self._work.notify_all()
