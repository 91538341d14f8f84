"""Whether this process can work, and whether it should be sent work: what probes ask it.

`/livez` and `/readyz` of the port of metrics (`process.metrics`) show it. Alive depends on no load
and no peer: it is lost only when the event loop has not turned for STUCK_S, far longer than any
work takes there, so that whoever restarts a process for it ends none that is merely busy. Ready is
what the process's own check says at that moment, a reason or nothing; until there is one, it is
starting. Knows no process. `follow` and `end` belong to the event loop's thread, all else to any.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

STUCK_S = 60.0
"""Guessed: the longest hold of a loop that was measured is below a second."""

_TURN_S = 1.0

Check = Callable[[], str]
"""Why the process should get no work now, in one line; empty: it should. Called by another thread,
at any time: it waits for nothing and changes nothing."""


class Health:
    """See the module."""

    def __init__(
        self,
        why: str = "starting",
        clock: Callable[[], float] = time.monotonic,
        turn_s: float = _TURN_S,
    ) -> None:
        """`why`: the reason that is given until there is a check. turn_s: between two turns of the
        loop that are noted."""
        self._clock = clock
        self._turn_s = turn_s
        self._why = why
        self._check: Check | None = None
        self._turned_at_s: float | None = None
        self._turn: asyncio.TimerHandle | None = None

    def follow(self) -> None:
        """Watch the running loop from now on, until `end`."""
        loop = asyncio.get_running_loop()

        def turn() -> None:
            self._turned_at_s = self._clock()
            self._turn = loop.call_later(self._turn_s, turn)

        turn()

    def end(self) -> None:
        """Watch the loop no more: the process ends, and gets no work. Idempotent."""
        self._check, self._why = None, "stopping"
        if self._turn is not None:
            self._turn.cancel()
        self._turn = self._turned_at_s = None

    def say(self, why: str) -> None:
        """The reason from now on, as long as there is no check: how far the start has come."""
        self._why = why

    def judge_by(self, check: Check) -> None:
        """The process has come so far that `check` tells whether it is ready."""
        self._check = check

    def why_not_alive(self) -> str:
        """Empty: it can work."""
        turned_at_s = self._turned_at_s
        silent_s = 0.0 if turned_at_s is None else self._clock() - turned_at_s
        return f"the event loop has not turned for {silent_s:.0f} s" if silent_s > STUCK_S else ""

    def why_not_ready(self) -> str:
        """Empty: it should get work."""
        check = self._check
        return self._why if check is None else check()
