"""Prompts that are hashed at once on one loop: in whose turn, how much of it, and who gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvstore import block_hash
from kvstore.block_hash import MAX_LOOP_SHARE, TURN_TOKENS, HashTurns

ROOT = b"r" * 32
SIZE = 16
PART_S = 50e-6


def prompt_of(num_parts: int, start: int = 0) -> range:
    return range(start, start + num_parts * TURN_TOKENS)


class _Loop:
    """Counts the turns of the loop, each of which takes others so long, and hashing a part of a
    prompt PART_S."""

    def __init__(self, others_s: float = 0.0) -> None:
        self.others_s = others_s
        self.now_s = 0.0
        self.num_turns = 0
        self.num_parts: list[int] = []
        """In each turn."""
        self._counting: asyncio.Task[None] | None = None

    def read(self) -> float:
        return self.now_s

    def hashed(self) -> None:
        self.now_s += PART_S
        self.num_parts[-1] += 1

    async def __aenter__(self) -> _Loop:
        self._counting = asyncio.create_task(self._count())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._counting is not None
        self._counting.cancel()

    async def _count(self) -> None:
        while True:
            self.num_turns += 1
            self.num_parts.append(0)
            self.now_s += self.others_s
            await asyncio.sleep(0)


@pytest.fixture
def hashing(monkeypatch: pytest.MonkeyPatch) -> Callable[[_Loop], HashTurns]:
    """Of a loop whose clock goes on with what is hashed."""
    real = block_hash.chain

    def of(loop: _Loop) -> HashTurns:
        def chain(*args: object) -> list[bytes]:
            loop.hashed()
            return real(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(block_hash, "chain", chain)
        return HashTurns(loop.read)

    return of


async def test_a_short_prompt_does_not_wait_for_long_ones() -> None:
    turns = HashTurns()
    async with _Loop() as loop:
        long = [asyncio.create_task(turns.chain(ROOT, prompt_of(64), SIZE)) for _ in range(5)]
        await asyncio.sleep(0)
        begun = loop.num_turns
        short = prompt_of(2, start=7)
        assert await turns.chain(ROOT, short, SIZE) == block_hash.chain(ROOT, short, SIZE)
        assert loop.num_turns - begun <= 4
        assert not any(task.done() for task in long)
        wanted = block_hash.chain(ROOT, prompt_of(64), SIZE)
        assert await asyncio.gather(*long) == [wanted] * 5


async def test_of_those_that_are_alike_one_is_done_before_the_next_is_begun() -> None:
    turns, ended = HashTurns(lambda: 0.0), []

    async def one(index: int) -> None:
        await turns.chain(ROOT, prompt_of(8, start=index), SIZE)
        ended.append((index, loop.num_turns))

    async with _Loop() as loop:
        begun = loop.num_turns
        await asyncio.gather(*(one(index) for index in range(6)))
    assert [index for index, _ in ended] == list(range(6))
    assert ended[0][1] - begun <= 8 + 3 and ended[-1][1] - begun >= 6 * 8


async def test_of_an_idle_loop_a_turn_is_one_part(hashing: Callable[[_Loop], HashTurns]) -> None:
    async with _Loop() as loop:
        turns = hashing(loop)
        await asyncio.gather(*(turns.chain(ROOT, prompt_of(8), SIZE) for _ in range(3)))
        assert sum(loop.num_parts) == 24
        assert max(loop.num_parts) == 1


async def test_long_turns_of_others_leave_hashing_its_share(
    hashing: Callable[[_Loop], HashTurns],
) -> None:
    others_s = 40 * PART_S
    async with _Loop(others_s) as loop:
        turns = hashing(loop)
        await asyncio.gather(*(turns.chain(ROOT, prompt_of(16), SIZE) for _ in range(10)))
        assert sum(loop.num_parts) == 160
        assert max(loop.num_parts) <= MAX_LOOP_SHARE * 40 + 1
        # All but the first and the last turn are full.
        assert (
            len([number for number in loop.num_parts if number]) <= 160 / (MAX_LOOP_SHARE * 40) + 2
        )


async def test_who_gives_up_is_not_hashed_and_holds_nobody_up(
    hashing: Callable[[_Loop], HashTurns],
) -> None:
    async with _Loop() as loop:
        turns = hashing(loop)
        gone = [asyncio.create_task(turns.chain(ROOT, prompt_of(4), SIZE)) for _ in range(3)]
        stays = asyncio.create_task(turns.chain(ROOT, prompt_of(8), SIZE))
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await stays
        assert all(isinstance(e, asyncio.CancelledError) for e in await _ends(gone))
        assert sum(loop.num_parts) <= 8 + 1
        # And where all have gone, the next one is served.
        last = asyncio.create_task(turns.chain(ROOT, prompt_of(4), SIZE))
        await asyncio.sleep(0)
        last.cancel()
        await _ends([last])
        assert len(await turns.chain(ROOT, prompt_of(2), SIZE)) == 2 * TURN_TOKENS // SIZE


async def test_what_cannot_be_hashed_is_told_to_who_asked() -> None:
    turns = HashTurns()
    bad = [*prompt_of(2), -1, *range(TURN_TOKENS)]
    good = asyncio.create_task(turns.chain(ROOT, prompt_of(4), SIZE))
    with pytest.raises((OverflowError, ValueError)):
        await turns.chain(ROOT, bad, SIZE)
    assert await good == block_hash.chain(ROOT, prompt_of(4), SIZE)


async def _ends(tasks: list[asyncio.Task[list[bytes]]]) -> list[object]:
    return list(await asyncio.gather(*tasks, return_exceptions=True))
