"""Fill: the bitmasks of one step's rows, filled on worker threads while the model runs.

Rows are taken one by one from a common list. A row has `token_timeout_s` from when a thread began
it: then it is given up on, its state breaks, its mask is empty, and another thread takes the place
of the one that is stuck. Rows that nobody has begun are charged nothing. So a row that runs away
costs its neighbours at most one wait, and rows that are merely many cost no one.

Life: made by GrammarService.begin_fill, then `result` once. Engine thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from engine.grammar.state import GrammarState, Surroundings
from engine.grammar.workers import Task

logger = logging.getLogger(__name__)

_ROWS_PER_THREAD = 16
_STALL_S = 0.1
"""Without an end after this long, one more thread helps with rows that nobody has begun."""


class _Helper:
    """One thread's work on a fill: the row that it is at, and since when."""

    def __init__(self) -> None:
        self.task: Task | None = None
        """Set by the engine thread before it looks at the others' deadlines."""
        self.index: int | None = None
        self.began_s = 0.0


class Fill:
    """See the module."""

    def __init__(self, surroundings: Surroundings, rows: Sequence[GrammarState | None]) -> None:
        self._surroundings = surroundings
        self._rows = rows
        size = (len(rows), surroundings.num_words)
        self._masks = torch.full(size, -1, dtype=torch.int32)
        self._open = deque(index for index, state in enumerate(rows) if state is not None)
        self._unfinished = set(self._open)
        self._late: list[int] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._helpers: list[_Helper] = []
        if not self._open:
            self._done.set()
        for _ in range(-(-len(self._open) // _ROWS_PER_THREAD)):
            self._help()

    @property
    def is_over(self) -> bool:
        """Every row is filled, or given up on."""
        return self._done.is_set()

    def result(self) -> torch.Tensor:
        """[R, ceil(V / 32)] int32, bit i of word w set: token 32 * w + i may come next. All ones in
        a row of None (beyond V, too); all zeros where nothing may come or the state is broken
        (`GrammarState.error`). Waits for at most `token_timeout_s` per row."""
        while not self._done.wait(_STALL_S):
            self._give_up_late()
            if self._open:
                self._help()
        # A thread that was given up on may still write into the first ones.
        masks = self._masks.clone() if self._late else self._masks
        for index in self._late:
            masks[index].zero_()
        return masks[:, : (self._surroundings.vocabulary.size + 31) // 32]

    def _help(self) -> None:
        helper = _Helper()
        helper.task = self._surroundings.workers.submit(lambda: self._fill_rows(helper))
        self._helpers.append(helper)

    def _give_up_late(self) -> None:
        oldest_s = time.monotonic() - self._surroundings.limits.token_timeout_s
        for helper in self._helpers:
            with self._lock:
                index = helper.index
                if index is None or helper.began_s > oldest_s:
                    continue
                helper.index = None  # what it still does is nobody's
                self._late.append(index)
            state = self._rows[index]
            if state is not None:
                state.break_off()
            if helper.task is not None:
                self._surroundings.workers.give_up(helper.task)
            self._finish(index)

    def _fill_rows(self, helper: _Helper) -> None:
        while True:
            with self._lock:
                if not self._open:
                    return
                index = self._open.popleft()
                helper.index, helper.began_s = index, time.monotonic()
            state = self._rows[index]
            if state is not None:
                self._fill_row(state, index)
            with self._lock:
                if helper.index is None:
                    return
                helper.index = None
            self._finish(index)

    def _fill_row(self, state: GrammarState, index: int) -> None:
        try:
            state.fill(self._masks, index)
        except Exception as error:
            logger.exception("a mask could not be filled")
            state.fail(error)
            self._masks[index].zero_()

    def _finish(self, index: int) -> None:
        with self._lock:
            self._unfinished.discard(index)
            if not self._unfinished:
                self._done.set()
