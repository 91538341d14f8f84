"""A point where tests hold requests for as long as they want. One asyncio loop."""

from __future__ import annotations

import asyncio


class Gate:
    """A point that requests pass; closed, it holds them. `reached` is set when one arrives."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._num_free = 0

    @property
    def is_open(self) -> bool:
        """Whether requests pass."""
        return self._open.is_set()

    def close(self) -> None:
        """Hold whoever comes from now on."""
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        """Let all pass."""
        self._open.set()

    def let_pass(self, count: int) -> None:
        """The next `count` go through although it is closed."""
        self._num_free = count

    async def passed(self) -> None:
        """Arrive, and go on when the gate is open."""
        self.reached.set()
        if self._num_free:
            self._num_free -= 1
            return
        await self._open.wait()
