"""Room for messages: who gets it, who waits, and that none of it is ever lost."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from process.errors import Internal, InvalidArgument, NoCapacity
from process.intake import Intake
from tests.harness.waiting import settled

WAIT_S = 60.0


def impatient() -> Intake:
    """Who sends slowly gives way at once, and who waits for that has all the time: a loop that is
    held up makes nobody wait in vain."""
    intake = Intake(100, wait_s=WAIT_S)
    intake.patience_s = 0.001
    return intake


async def test_who_sends_slowly_leaves_others_theirs() -> None:
    intake = Intake(100, wait_s=WAIT_S)
    await intake.room("noisy", 25).take()
    await intake.room("noisy", 25).take()
    third = asyncio.create_task(intake.room("noisy", 25).take())
    await settled()
    assert not third.done() and intake.num_waiting == 1
    # It waits for its own share, and is in nobody's way.
    await intake.room("quiet", 25).take()
    intake.check_integrity()
    third.cancel()
    await settled()
    assert intake.num_waiting == 0 and intake.num_bytes == 75
    intake.check_integrity()


async def test_in_the_order_of_coming() -> None:
    intake = Intake(100, wait_s=WAIT_S)
    rooms = [intake.room(name, 50) for name in "ab"]
    for room in rooms:
        await room.take()
    order: list[str] = []

    async def wait(name: str, num_bytes: int) -> None:
        async with intake.room(name, num_bytes):
            order.append(name)
            await settled()

    large = asyncio.create_task(wait("large", 50))
    await settled()
    small = asyncio.create_task(wait("small", 1))
    await settled()
    rooms[0].shrink(10)  # enough for the small one, which came later
    await settled()
    assert order == []
    intake.check_integrity()
    rooms[0].release()
    await asyncio.gather(large, small)
    assert order == ["large", "small"]
    rooms[1].release()
    assert intake.num_bytes == 0
    intake.check_integrity()


async def test_a_wait_in_vain_is_refused_with_a_retry_time() -> None:
    intake = Intake(10, wait_s=0.01)
    await intake.room("a", 5).take()
    with pytest.raises(NoCapacity) as caught:
        await intake.room("a", 5).take()
    assert caught.value.retry_after_s and intake.num_refused == 1
    assert intake.num_bytes == 5 and intake.num_waiting == 0
    with pytest.raises(InvalidArgument):
        await intake.room("b", 6).take()
    intake.check_integrity()


async def test_more_than_was_taken_is_a_mistake_of_ours() -> None:
    async with Intake(10, wait_s=WAIT_S).room("a", 2) as room:
        with pytest.raises(Internal):
            room.shrink(3)


async def _read(intake: Intake, owner: str, num_bytes: int, done: asyncio.Event) -> str:
    """One call, whose message is there when `done` is set. Returns: what became of it."""
    try:
        async with intake.room(owner, num_bytes) as room:
            async with room.reading():
                await done.wait()
            room.shrink(1)
            await settled()
    except NoCapacity as error:
        assert error.retry_after_s
        return "too slow" if "slowly" in str(error) else "no room"
    return "served"


async def test_one_that_sends_slowly_gives_way_when_others_of_its_host_wait() -> None:
    """Behind an ingress all callers are one host."""
    intake = impatient()
    never, at_once = asyncio.Event(), asyncio.Event()
    at_once.set()
    slow = [asyncio.create_task(_read(intake, "host", 25, never)) for _ in range(2)]
    await settled()
    assert intake.num_bytes == intake.max_owner_bytes
    assert [await _read(intake, "host", 25, at_once) for _ in range(5)] == ["served"] * 5
    # No more than was needed: the other one is read on.
    assert [task.done() for task in slow] == [True, False] and slow[0].result() == "too slow"
    assert intake.num_recalled == 1 and intake.num_refused == 0
    intake.check_integrity()
    never.set()
    assert await slow[1] == "served"
    assert intake.num_bytes == 0


async def test_slow_ones_in_a_row_all_give_way() -> None:
    intake = impatient()
    never, at_once = asyncio.Event(), asyncio.Event()
    at_once.set()
    slow = [asyncio.create_task(_read(intake, "host", 25, never)) for _ in range(4)]
    await asyncio.sleep(0)  # the first step of each: no alarm comes in between
    assert intake.num_waiting == 2
    assert await _read(intake, "host", 50, at_once) == "served"
    assert [task.result() for task in slow] == ["too slow"] * 4
    intake.check_integrity()


async def test_who_sends_slowly_is_left_alone_while_nobody_waits_for_its_room() -> None:
    """Others that wait do so for their own owner's share."""
    intake = impatient()
    intake._wait_s = 0.01  # where a wait is to be in vain
    arrived = asyncio.Event()
    slow = asyncio.create_task(_read(intake, "slow", 40, arrived))
    await settled()
    async with intake.room("busy", 50):  # read, and served
        with pytest.raises(NoCapacity, match="in time"):
            await intake.room("busy", 5).take()
        assert not slow.done() and intake.num_recalled == 0
        # All of it is held from here on, so that anybody may be in the way.
        async with intake.room("other", 10):
            with pytest.raises(NoCapacity, match="in time"):
                await intake.room("busy", 5).take()
            assert not slow.done()
            intake._wait_s = WAIT_S
            await intake.room("third", 5).take()
    assert await slow == "too slow"


async def test_what_was_read_is_nobodys_to_call_in() -> None:
    intake = Intake(10, wait_s=0.02)
    async with intake.room("a", 5) as room:
        async with room.reading():
            pass
        with pytest.raises(NoCapacity, match="in time"):
            await intake.room("a", 5).take()
    assert intake.num_recalled == 0 and intake.num_bytes == 0


async def test_a_message_is_read_with_room_only() -> None:
    room = Intake(10, wait_s=WAIT_S).room("a", 2)
    with pytest.raises(Internal, match="without room"):
        async with room.reading():
            pass


async def test_nothing_is_lost_whatever_comes(seed: int) -> None:
    rng = random.Random(seed)
    intake = Intake(200, wait_s=0.005)
    num_served = 0

    async def call() -> None:
        nonlocal num_served
        with contextlib.suppress(NoCapacity):
            async with intake.room(rng.choice("abc"), rng.randint(0, 100)) as room:
                num_served += 1
                async with contextlib.AsyncExitStack() as stack:
                    if rng.random() < 0.8:
                        await stack.enter_async_context(room.reading())
                    await asyncio.sleep(rng.choice((0, 0, 0.001, 0.004, 0.02)))
                room.shrink(rng.randint(0, room.num_bytes))
                await asyncio.sleep(rng.choice((0, 0.002)))

    calls = []
    for _ in range(300):
        calls.append(asyncio.create_task(call()))
        intake.check_integrity()
        if rng.random() < 0.3:
            await asyncio.sleep(rng.choice((0, 0.001)))
        if rng.random() < 0.2:
            rng.choice(calls).cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    intake.check_integrity()
    assert not intake._reading and intake._leaving is None
    assert num_served and intake.num_bytes == 0 and intake.num_waiting == 0
