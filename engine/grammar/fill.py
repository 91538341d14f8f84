"""Fill: the bitmasks of one step's rows, filled on a worker thread while the model runs.

Rows are taken one by one from a common list. If a row's parser runs away, another thread goes on
with the rows after it; the row itself is given up on after `token_timeout_s`, its state breaks, and
its mask is empty. So a bomb costs its neighbours at most one wait.

Life: made by GrammarService.begin_fill, then `result` once. Engine thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence

import torch

from engine.grammar.state import GrammarState, Surroundings
from engine.grammar.workers import Task

_ROWS_PER_THREAD = 16
_STALL_S = 0.1
"""Without an end after this long, one more thread helps with rows that nobody has begun."""


class Fill:
    """See the module."""

    def __init__(self, surroundings: Surroundings, rows: Sequence[GrammarState | None]) -> None:
        self._surroundings = surroundings
        self._rows = rows
        size = (len(rows), surroundings.num_words)
        self._masks = torch.full(size, -1, dtype=torch.int32)
        self._open = deque(index for index, state in enumerate(rows) if state is not None)
        self._unfinished = set(self._open)
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._tasks: list[Task] = []
        if not self._open:
            self._done.set()
        for _ in range(-(-len(self._open) // _ROWS_PER_THREAD)):
            self._help()

    def result(self) -> torch.Tensor:
        """[R, ceil(V / 32)] int32, bit i of word w set: token 32 * w + i may come next. All ones in
        a row of None (beyond V, too); all zeros where nothing may come or the state is broken
        (`GrammarState.error`)."""
        deadline = time.monotonic() + self._surroundings.limits.token_timeout_s
        while not self._done.wait(max(0.0, min(_STALL_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                break
            if self._open:
                self._help()
        with self._lock:
            late = sorted(self._unfinished)
            masks = self._masks.clone() if late else self._masks
            self._open.clear()
        for index in late:
            state = self._rows[index]
            if state is not None:
                state.break_off()
            masks[index].zero_()
        if late:
            for task in self._tasks:
                self._surroundings.workers.give_up(task)
        return masks[:, : (self._surroundings.vocabulary.size + 31) // 32]

    def _help(self) -> None:
        self._tasks.append(self._surroundings.workers.submit(self._fill_rows))

    def _fill_rows(self) -> None:
        while True:
            with self._lock:
                if not self._open:
                    return
                index = self._open.popleft()
            state = self._rows[index]
            if state is not None:
                state.fill(self._masks, index)
            with self._lock:
                self._unfinished.discard(index)
                if not self._unfinished:
                    self._done.set()
