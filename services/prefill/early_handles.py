"""EarlyHandles: schedule of the partial handles of one request, sent while prefill still runs. Pure
state, no I/O; belongs to the loop's thread.

Laws: at most one per engine step, beside the first; and each names more than a sixteenth more than
the one before. A handle names all that is stored so far, so without the second law a prompt of n
chunks would cost n * n / 2 chunks' worth of references; with it about 17 n.
"""

from __future__ import annotations

import asyncio

MIN_GROWTH = 16
"""Least growth of a handle over the previous one: one block in so many. Guessed: decode then
fetches at most that share of the prompt at the end, and making the handles of a prompt of 8,192
blocks takes some 1 s of a CPU in all (8 us a reference, measured on two shared cores)."""


class EarlyHandles:
    """Schedule of one request's partial handles. `news` is set whenever `is_due` may have become
    true."""

    def __init__(self, *, wanted: bool) -> None:
        """Create a schedule. wanted: False where no KV will be handed over; then no handle is ever
        due."""
        self.news = asyncio.Event()
        self._wanted = wanted
        self._num_stored = 0
        self._num_told = 0
        self._has_stepped = True

    @property
    def is_due(self) -> bool:
        has_more = self._num_stored - self._num_told > self._num_told // MIN_GROWTH
        return self._wanted and self._has_stepped and has_more

    def stored(self, num_blocks: int) -> None:
        """Record that the prompt's first `num_blocks` blocks can be fetched now."""
        self._num_stored = num_blocks
        self._wake()

    def stepped(self) -> None:
        """Record that the engine has made a step for this request."""
        self._has_stepped = True
        self._wake()

    def told(self, num_blocks: int) -> None:
        """Record that a partial handle of `num_blocks` blocks is being sent."""
        self._num_told = max(self._num_told, num_blocks)
        self._has_stepped = False

    def _wake(self) -> None:
        if self.is_due:
            self.news.set()
