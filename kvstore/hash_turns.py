"""Chain hashes on an event loop that has others to serve meanwhile. One asyncio loop."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvstore import block_hash

TURN_TOKENS = 1024
"""Hashed in one turn of a loop at least: 0.05 ms, about what a turn costs beside."""

SHARE = 0.2
"""Of a loop's time that hashing takes where it could take more: with one part a turn alone, long
turns of others would let prompts come faster than they are hashed; guessed."""


def parts(num_tokens: int, block_size: int) -> Iterator[slice]:
    """A prompt's tokens, TURN_TOKENS at a time or one block."""
    step = max(1, TURN_TOKENS // block_size) * block_size
    for start in range(0, num_tokens, step):
        yield slice(start, start + step)


class HashTurns:
    """`block_hash.chain` from a prompt's first block on, with turns between its parts for whatever
    else the loop has to do. Prompts share them: the one with the least left comes first, so that
    short ones do not wait for long ones, and of those that are alike one is done before the next is
    begun. A turn is one part, and as many more as are SHARE of the time since the turn before."""

    def __init__(self, now_s: Callable[[], float] = time.perf_counter) -> None:
        self._now_s = now_s
        self._waiting: list[tuple[int, int, _Prompt]] = []
        """A heap, by tokens left and turn. Who gave up is taken out when it is first."""
        self._turns = itertools.count()
        self._is_asked = False
        """The loop was asked for a turn."""
        self._ended_s = 0.0
        """When the turn before was over, or the first one asked for."""

    async def chain(self, root: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
        """See the class. At once if it is one part; else not before the loop's next turn."""
        if len(token_ids) <= TURN_TOKENS:
            return block_hash.chain(root, token_ids, block_size)
        done: asyncio.Future[list[bytes]] = asyncio.get_running_loop().create_future()
        prompt = _Prompt(root, token_ids, block_size, done)
        heapq.heappush(self._waiting, (prompt.num_left, next(self._turns), prompt))
        if not self._is_asked:
            self._ended_s = self._now_s()
            self._ask()
        return await done

    def _ask(self) -> None:
        self._is_asked = True
        asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        begun_s = self._now_s()
        ends_s = begun_s + SHARE * (begun_s - self._ended_s)
        while self._waiting:
            _, turn, prompt = self._waiting[0]
            if not prompt.done.done():
                prompt.go_on()
            if prompt.done.done():
                heapq.heappop(self._waiting)
            else:
                heapq.heapreplace(self._waiting, (prompt.num_left, turn, prompt))
            if self._now_s() >= ends_s:
                break
        self._ended_s = self._now_s()
        self._is_asked = False
        if self._waiting:
            self._ask()


@dataclass
class _Prompt:
    root: bytes
    token_ids: Sequence[int]
    block_size: int
    done: asyncio.Future[list[bytes]]

    def __post_init__(self) -> None:
        self._hashes: list[bytes] = []
        self._parts = parts(len(self.token_ids), self.block_size)
        self.num_left = len(self.token_ids)

    def go_on(self) -> None:
        """One part more; `done` with the last one, or with what went wrong."""
        part = next(self._parts)
        parent = self._hashes[-1] if self._hashes else b""
        try:
            self._hashes += block_hash.chain(
                self.root, self.token_ids[part], self.block_size, parent
            )
        except Exception as error:  # it is who asked that hears of it
            self.done.set_exception(error)
            return
        self.num_left = len(self.token_ids) - part.stop
        if self.num_left <= 0:
            self.done.set_result(self._hashes)
