"""A point where tests hold requests for as long as they want. One asyncio loop."""

from __future__ import annotations

import asyncio


class Gate:
    """A point that requests pass; closed, it holds them. `reached` is set when one arrives."""

    def __init__(self) -> None:
        self.reached = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()

    def close(self) -> None:
        """Hold whoever comes from now on."""
        self.reached.clear()
        self._open.clear()

    def open(self) -> None:
        """Let all pass."""
        self._open.set()

    async def passed(self) -> None:
        """Arrive, and go on when the gate is open."""
        self.reached.set()
        await self._open.wait()
