"""Places in a decode worker's steps, over its own gRPC: a request without is told so, gets them in
order, and is not to begin before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.gated_engine import prompt_of
from tests.harness.prefill_decode_pair import Pair, RouterStream, pair

pytestmark = pytest.mark.oracle

NUM_PLACES = 8


async def _reserve(p: Pair, stream: RouterStream, number: int, **sampling: Any) -> int:
    return await stream.reserve(p.reserve(prompt_of(5, start=number), name=str(number), **sampling))


async def _kind(stream: RouterStream, key: int) -> str | None:
    return (await stream.next(key)).WhichOneof("event")


async def _end(stream: RouterStream, key: int) -> None:
    await stream.cancel(key)
    assert (await stream.collect(key)).finished is not None


async def test_places_are_given_in_order_and_none_begins_without(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        async with p.stream() as stream:
            held = [await _reserve(p, stream, number) for number in range(NUM_PLACES)]
            for key in held:
                assert await _kind(stream, key) == "reserved"
            one = await _reserve(p, stream, 11)
            three = await _reserve(p, stream, 12, n=3)
            last = await _reserve(p, stream, 13)
            for key in (one, three, last):
                assert await _kind(stream, key) == "queued"
            assert (p.at_decode.status().num_free_places, p.at_decode.num_in_line) == (0, 3)
            await _end(stream, held.pop())
            assert await _kind(stream, one) == "reserved"
            for _ in range(2):
                await _end(stream, held.pop())
            # Two are free, the next in line needs three, and none passes it.
            newcomer = await _reserve(p, stream, 14)
            assert await _kind(stream, newcomer) == "queued"
            assert p.at_decode.num_in_line == 3
            await _end(stream, held.pop())
            assert await _kind(stream, three) == "reserved"
            # What leaves the line holds up none behind it.
            await _end(stream, last)
            await _end(stream, three)
            assert await _kind(stream, newcomer) == "reserved"
            assert p.at_decode.num_in_line == 0
        await p.check()


async def test_an_answer_that_has_begun_has_blocks_at_once_and_the_next_place(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        held = [await _reserve(p, stream, number) for number in range(NUM_PLACES)]
        for key in held:
            assert await _kind(stream, key) == "reserved"
        waiting = await _reserve(p, stream, 11)
        assert await _kind(stream, waiting) == "queued"
        prompt = prompt_of(9, start=12)
        first = p.expected(prompt, 8)[:1]
        moved = await stream.reserve(p.reserve(prompt, name="begun", has_begun=True))
        assert await _kind(stream, moved) == "reserved"
        await stream.compute(moved, first, is_told=True)
        await _end(stream, held[0])
        answer = await stream.collect(moved)
        assert first + answer.token_ids == p.expected(prompt, 8)
        assert await _kind(stream, waiting) == "reserved"
        keys = [event.key for message in stream.messages for event in message.events]
        assert keys.index(moved) < len(keys) - 1 == keys.index(waiting, keys.index(moved))
        for key in (*held[1:], waiting):
            await _end(stream, key)
