"""Room for messages: who gets it, who waits, and that none of it is ever lost."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from process.memory_budget import MemoryBudget
from process.rpc_errors import Internal, InvalidArgument, NoCapacity
from tests.harness.waiting import settled

WAIT_S = 60.0


def impatient() -> MemoryBudget:
    """Who sends slowly gives way at once, and who waits for that has all the time: a loop that is
    held up makes nobody wait in vain."""
    budget = MemoryBudget(100, wait_s=WAIT_S)
    budget.patience_s = 0.001
    return budget


async def test_who_sends_slowly_leaves_others_theirs() -> None:
    budget = MemoryBudget(100, wait_s=WAIT_S)
    await budget.grant("noisy", 25).take()
    await budget.grant("noisy", 25).take()
    third = asyncio.create_task(budget.grant("noisy", 25).take())
    await settled()
    assert not third.done() and budget.num_waiting == 1
    # It waits for its own share, and is in nobody's way.
    await budget.grant("quiet", 25).take()
    budget.check_integrity()
    third.cancel()
    await settled()
    assert budget.num_waiting == 0 and budget.num_bytes == 75
    budget.check_integrity()


async def test_in_the_order_of_coming() -> None:
    budget = MemoryBudget(100, wait_s=WAIT_S)
    rooms = [budget.grant(name, 50) for name in "ab"]
    for grant in rooms:
        await grant.take()
    order: list[str] = []

    async def wait(name: str, num_bytes: int) -> None:
        async with budget.grant(name, num_bytes):
            order.append(name)
            await settled()

    large = asyncio.create_task(wait("large", 50))
    await settled()
    small = asyncio.create_task(wait("small", 1))
    await settled()
    rooms[0].shrink(10)  # enough for the small one, which came later
    await settled()
    assert order == []
    budget.check_integrity()
    rooms[0].release()
    await asyncio.gather(large, small)
    assert order == ["large", "small"]
    rooms[1].release()
    assert budget.num_bytes == 0
    budget.check_integrity()


async def test_a_wait_in_vain_is_refused_with_a_retry_time() -> None:
    budget = MemoryBudget(10, wait_s=0.01)
    await budget.grant("a", 5).take()
    with pytest.raises(NoCapacity) as caught:
        await budget.grant("a", 5).take()
    assert caught.value.retry_after_s and budget.num_refused == 1
    assert budget.num_bytes == 5 and budget.num_waiting == 0
    with pytest.raises(InvalidArgument):
        await budget.grant("b", 6).take()
    budget.check_integrity()


async def test_more_than_was_taken_is_a_mistake_of_ours() -> None:
    async with MemoryBudget(10, wait_s=WAIT_S).grant("a", 2) as grant:
        with pytest.raises(Internal):
            grant.shrink(3)


async def _read(budget: MemoryBudget, owner: str, num_bytes: int, done: asyncio.Event) -> str:
    """One call, whose message is there when `done` is set. Returns: what became of it."""
    try:
        async with budget.grant(owner, num_bytes) as grant:
            async with grant.reading():
                await done.wait()
            grant.shrink(1)
            await settled()
    except NoCapacity as error:
        assert error.retry_after_s
        return "too slow" if "slowly" in str(error) else "no room"
    return "served"


async def test_one_that_sends_slowly_gives_way_when_others_of_its_host_wait() -> None:
    """Behind an ingress all callers are one host."""
    budget = impatient()
    never, at_once = asyncio.Event(), asyncio.Event()
    at_once.set()
    slow = [asyncio.create_task(_read(budget, "host", 25, never)) for _ in range(2)]
    await settled()
    assert budget.num_bytes == budget.max_owner_bytes
    assert [await _read(budget, "host", 25, at_once) for _ in range(5)] == ["served"] * 5
    # No more than was needed: the other one is read on.
    assert [task.done() for task in slow] == [True, False] and slow[0].result() == "too slow"
    assert budget.num_recalled == 1 and budget.num_refused == 0
    budget.check_integrity()
    never.set()
    assert await slow[1] == "served"
    assert budget.num_bytes == 0


async def test_slow_ones_in_a_row_all_give_way() -> None:
    budget = impatient()
    never, at_once = asyncio.Event(), asyncio.Event()
    at_once.set()
    slow = [asyncio.create_task(_read(budget, "host", 25, never)) for _ in range(4)]
    await asyncio.sleep(0)  # the first step of each: no alarm comes in between
    assert budget.num_waiting == 2
    assert await _read(budget, "host", 50, at_once) == "served"
    assert [task.result() for task in slow] == ["too slow"] * 4
    budget.check_integrity()


async def test_who_sends_slowly_is_left_alone_while_nobody_waits_for_its_room() -> None:
    """Others that wait do so for their own owner's share."""
    budget = impatient()
    budget._wait_s = 0.01  # where a wait is to be in vain
    arrived = asyncio.Event()
    slow = asyncio.create_task(_read(budget, "slow", 40, arrived))
    await settled()
    async with budget.grant("busy", 50):  # read, and served
        with pytest.raises(NoCapacity, match="in time"):
            await budget.grant("busy", 5).take()
        assert not slow.done() and budget.num_recalled == 0
        # All of it is held from here on, so that anybody may be in the way.
        async with budget.grant("other", 10):
            with pytest.raises(NoCapacity, match="in time"):
                await budget.grant("busy", 5).take()
            assert not slow.done()
            budget._wait_s = WAIT_S
            await budget.grant("third", 5).take()
    assert await slow == "too slow"


async def test_what_was_read_is_nobodys_to_call_in() -> None:
    budget = MemoryBudget(10, wait_s=0.02)
    async with budget.grant("a", 5) as grant:
        async with grant.reading():
            pass
        with pytest.raises(NoCapacity, match="in time"):
            await budget.grant("a", 5).take()
    assert budget.num_recalled == 0 and budget.num_bytes == 0


async def test_a_message_is_read_with_room_only() -> None:
    grant = MemoryBudget(10, wait_s=WAIT_S).grant("a", 2)
    with pytest.raises(Internal, match="without a grant"):
        async with grant.reading():
            pass


async def test_nothing_is_lost_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    budget = MemoryBudget(200, wait_s=0.005)
    num_served = 0

    async def call() -> None:
        nonlocal num_served
        with contextlib.suppress(NoCapacity):
            async with budget.grant(rng.choice("abc"), rng.randint(0, 100)) as grant:
                num_served += 1
                async with contextlib.AsyncExitStack() as stack:
                    if rng.random() < 0.8:
                        await stack.enter_async_context(grant.reading())
                    await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004, 0.02)))
                grant.shrink(rng.randint(0, grant.num_bytes))
                await asyncio.sleep(rng.choice((0, 0.002)))

    calls = []
    for _ in range(300):
        calls.append(asyncio.create_task(call()))
        budget.check_integrity()
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0, 0.001)))
        if rng.random() < 0.2:
            rng.choice(calls).cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    budget.check_integrity()
    assert not budget._reading and budget._leaving is None
    assert num_served and budget.num_bytes == 0 and budget.num_waiting == 0
