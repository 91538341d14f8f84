"""TurnBudget: how many blocks each turn of an event loop gets, in which order, and what becomes of
a call that is cancelled while it waits."""

from __future__ import annotations

import asyncio
from collections import Counter

import hypothesis.strategies as st
from hypothesis import given

from kvstore.turn_budget import TurnBudget

MAX_BLOCKS = 10


class _Turns:
    """Numbers the turns of the loop, and counts the blocks that each one handles."""

    def __init__(self) -> None:
        self.number = 0
        self.num_blocks: Counter[int] = Counter()
        self._tick()

    def handle(self, num_blocks: int) -> None:
        self.num_blocks[self.number] += num_blocks

    def end(self) -> None:
        self._handle.cancel()

    def _tick(self) -> None:
        self.number += 1
        self._handle = asyncio.get_running_loop().call_soon(self._tick)


@given(
    st.lists(
        st.tuples(st.integers(0, 6), st.lists(st.integers(1, MAX_BLOCKS), max_size=6)), max_size=8
    )
)
async def test_no_turn_handles_more_than_twice_its_blocks(
    calls: list[tuple[int, list[int]]],
) -> None:
    """Whatever number of calls there are, when they begin, and of how many pieces they are."""
    budget, turns = TurnBudget(MAX_BLOCKS), _Turns()

    async def call(after: int, pieces: list[int]) -> None:
        for _ in range(after):
            await asyncio.sleep(0)
        for piece in pieces:
            await budget.take(piece)
            turns.handle(piece)

    await asyncio.gather(*(call(after, pieces) for after, pieces in calls))
    turns.end()
    assert max(turns.num_blocks.values(), default=0) <= 2 * MAX_BLOCKS
    assert turns.num_blocks.total() == sum(sum(pieces) for _, pieces in calls)


async def test_calls_come_in_the_order_in_which_they_asked() -> None:
    """A small one does not overtake a large one, which may be larger than a turn."""
    budget, order = TurnBudget(MAX_BLOCKS), list[int]()

    async def call(num_blocks: int) -> None:
        await budget.take(num_blocks)
        order.append(num_blocks)

    sizes = [9, 8, 1, 25, 2, 7]
    await asyncio.gather(*map(call, sizes))
    assert order == sizes


async def test_a_turn_with_room_is_not_waited_for() -> None:
    budget = TurnBudget(MAX_BLOCKS)
    for _ in range(MAX_BLOCKS):
        taking = budget.take(1)
        try:
            taking.send(None)
        except StopIteration:
            continue
        raise AssertionError("it waited")


async def test_a_cancelled_call_takes_nothing() -> None:
    budget, done = TurnBudget(MAX_BLOCKS), list[str]()

    async def call(name: str) -> None:
        await budget.take(MAX_BLOCKS)
        done.append(name)

    first, second, third = [asyncio.create_task(call(name)) for name in "abc"]
    await first
    second.cancel()
    await asyncio.wait([second, third])
    assert done == ["a", "c"]
