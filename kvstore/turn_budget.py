"""TurnBudget: bounds the number of KV blocks that all calls together handle in one turn of an event
loop, so that a call of many blocks, or many calls at once, keep no other call waiting for long.

asyncio runs everything that is ready in one turn: ten calls that each yield after 100 blocks are
still a turn of 1,000. One asyncio loop.
"""

from __future__ import annotations

import asyncio
from collections import deque


class TurnBudget:
    """Gives each turn of the loop `max_blocks` blocks, to calls in the order in which they ask. The
    count begins anew once a turn, in the middle of it, so that one turn may see twice as many."""

    def __init__(self, max_blocks: int) -> None:
        self.max_blocks = max_blocks
        self._num_taken = 0
        """Blocks given since the count last began anew."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    async def take(self, num_blocks: int) -> None:
        """Wait until the turn has room for `num_blocks`, to be handled before the next `await`. A
        number above `max_blocks` gets a turn of its own. Never waits where the turn has room."""
        if not self._waiting and self._has_room(num_blocks):
            self._give(num_blocks)
            return
        given = asyncio.get_running_loop().create_future()
        self._waiting.append((given, num_blocks))
        await given

    def _has_room(self, num_blocks: int) -> bool:
        return not self._num_taken or self._num_taken + num_blocks <= self.max_blocks

    def _give(self, num_blocks: int) -> None:
        if not self._num_taken:
            asyncio.get_running_loop().call_soon(self._begin_anew)
        self._num_taken += num_blocks

    def _begin_anew(self) -> None:
        self._num_taken = 0
        while self._waiting:
            given, num_blocks = self._waiting[0]
            if not given.done():  # else its call was cancelled
                if not self._has_room(num_blocks):
                    break
                self._give(num_blocks)
                given.set_result(None)
            self._waiting.popleft()
