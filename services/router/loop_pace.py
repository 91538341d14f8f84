"""How far the event loop is behind, and how long a stream should pause for it between two messages.

One message a token is what readers want and what costs: with more tokens than one process can send
so, each stream's next tokens merge where they wait while it pauses, and all get through with fewer,
larger messages. Nobody pauses while the loop keeps up; a pause grows while it does not, and shrinks
again when it does. Bounded. One asyncio loop.
"""

from __future__ import annotations

import asyncio
import contextlib

_LOOK_S = 0.01
_BEHIND_S = 0.004
"""Later than this a timer does not come on a loop that keeps up: some 50 messages. Guessed."""
_GROWTH, _DECAY = 1.5, 0.8
_FIRST_S, _MOST_S = 0.002, 0.05
"""The longest is what a reader does not see."""


class LoopPace:
    """See the module."""

    def __init__(self) -> None:
        self.pause_s = 0.0
        """Of each stream after a message, now."""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._watch())

    async def stop(self) -> None:
        """No pauses from here on."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self.pause_s = 0.0

    def on_lag(self, lag_s: float) -> None:
        """A timer came `lag_s` after its time. Whether our own work or somebody else's on our cores
        made it late, fewer messages are what helps.
        """
        if lag_s > _BEHIND_S:
            self.pause_s = min(_MOST_S, max(_FIRST_S, self.pause_s * _GROWTH))
        else:
            self.pause_s = self.pause_s * _DECAY if self.pause_s > _FIRST_S / 2 else 0.0

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            self.on_lag(loop.time() - due_s)
