"""Hashes that are made in turns must be those that are made at once, and leave others their
turns."""

from __future__ import annotations

import asyncio

import pytest

from kvstore.block_hash import TURN_TOKENS, HashTurns
from services.worker.runtime import Chain


@pytest.mark.parametrize("block_size", [1, 16, 48, 2 * TURN_TOKENS])
@pytest.mark.parametrize("num_tokens", [0, 15, 16, 1023, 1024, 1025, 5000])
async def test_hashes_in_turns_are_the_hashes(block_size: int, num_tokens: int) -> None:
    chain, prompt = Chain(b"r" * 32, block_size), tuple(range(num_tokens))
    assert await chain.hashes_in_turns(prompt, HashTurns()) == chain.hashes(prompt)


async def test_others_have_turns_while_a_long_prompt_is_hashed() -> None:
    chain, num_turns, is_over = Chain(b"r" * 32, 16), 0, False

    async def other() -> None:
        nonlocal num_turns
        while not is_over:
            num_turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    await chain.hashes_in_turns(tuple(range(8 * TURN_TOKENS)), HashTurns())
    is_over = True
    await beside
    assert num_turns >= 7
