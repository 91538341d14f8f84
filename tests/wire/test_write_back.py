"""Decode writes back: the next turn of a conversation fetches prompt and answer from the store,
whichever worker it meets; no token waits for it, and nothing stays held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import TransferFailed
from services.worker.config import WorkerLimits
from tests.harness.gated_engine import SALT, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, Answer, Pair, pair
from tests.harness.waiting import Gate, until

PROMPT = prompt_of(30, start=3)
SIZE = 4


def hashes(p: Pair, tokens: Sequence[int]) -> list[bytes]:
    return p.decode.core.chain(SALT, "").hashes(tuple(tokens))


def num_stored(p: Pair, tokens: Sequence[int]) -> int:
    """Full blocks of this chain that the store has; no gaps."""
    found = [p.store.node.store.catalog.find(each) is not None for each in hashes(p, tokens)]
    assert found == sorted(found, reverse=True), "presence has a gap"
    return sum(found)


async def turn(p: Pair, prompt: Sequence[int], name: str, **options: Any) -> Answer:
    answer = await p.generate(prompt, name=name, **options)
    assert answer.token_ids == p.expected(prompt, options.get("max_tokens", 8))
    await p.decode.core.connector.settle()
    return answer


async def test_the_next_turn_fetches_prompt_and_answer(tmp_path: Path) -> None:
    """Three turns; prefill forgets everything between them."""
    async with pair(tmp_path, prefill_blocks=64) as p:
        context: tuple[int, ...] = PROMPT
        num_computed = 0  # of the conversation so far, and so stored
        for index in range(3):
            answer = await turn(p, context, f"turn {index}", max_tokens=20)
            assert answer.prefill is not None
            from_store = sum(count.num_tokens for count in answer.prefill.leg.from_store)
            assert from_store == num_computed // SIZE * SIZE
            assert answer.prefill.leg.num_tokens_computed == len(context) - from_store
            num_computed = len(context) + 19  # the last token drawn is never computed
            context = (*context, *answer.token_ids)
            assert num_stored(p, context) == num_computed // SIZE
            for start in (60, 61):
                await p.run_prefill(
                    prompt_of(200, start=start), name=f"f{index}{start}", wants_handle=False
                )
            context = (*context, *prompt_of(7, start=20 + index))
        counts = p.decode.core.counts
        assert counts.num_blocks_written_back == 5 + 5 + 4 and not counts.not_written_back
        await p.check()


async def test_the_leg_says_what_was_stored_while_the_request_ran(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT, max_tokens=200))
        await stream.next(key)
        reply = await p.run_prefill(PROMPT, max_tokens=200)
        p.decode_model.hold()
        await stream.generate(key, reply)
        while p.decode.core.counts.num_blocks_written_back < 8:
            # Step by step: a fake model would be through before the store has heard of it.
            await until(p.decode_model.is_held.is_set)
            p.decode_model.release()
            p.decode_model.hold()
            await asyncio.sleep(0.01)
        p.decode_model.release()
        answer = await stream.collect(key)
        assert answer.leg.num_blocks_written_back >= 8
        await p.decode.core.connector.settle()
        assert p.decode.core.counts.num_blocks_written_back == (30 + 199) // SIZE - 7
        await p.check()


async def test_a_slow_store_delays_no_token(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        gate = Gate(p.decode.core.connector.client, "put_blocks")
        answer = await p.generate(PROMPT, max_tokens=40)
        assert answer.token_ids == p.expected(PROMPT, 40)
        assert answer.leg.num_blocks_written_back == 0
        await gate.wait_entered()
        other = prompt_of(30, start=8)
        again = await p.generate(other, name="again")
        assert again.token_ids == p.expected(other, 8)
        gate.open()
        await p.decode.core.connector.settle()
        assert num_stored(p, [*PROMPT, *answer.token_ids]) == (30 + 39) // SIZE
        assert num_stored(p, [*other, *again.token_ids]) == (30 + 7) // SIZE
        await p.check()


async def test_each_sample_has_its_own_chain(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        samples = await p.generate_samples(
            PROMPT, n=3, temperature=1.0, max_tokens=24, name="samples"
        )
        alone = p.alone(PROMPT, n=3, temperature=1.0, max_tokens=24)
        assert [samples[i].token_ids for i in range(3)] == [one.token_ids for one in alone]
        await p.decode.core.connector.settle()
        for sample in samples.values():
            num_computed = len(PROMPT) + len(sample.token_ids) - 1
            assert num_stored(p, [*PROMPT, *sample.token_ids]) == num_computed // SIZE
        await p.check()


async def test_a_cancelled_answer_is_stored_as_far_as_it_came(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT, max_tokens=200))
        await stream.next(key)
        reply = await p.run_prefill(PROMPT, max_tokens=200)
        await stream.generate(key, reply)
        tokens = list(reply.token_ids)
        while len(tokens) < 20:
            tokens += (await stream.next(key)).tokens.token_ids
        await stream.cancel(key)
        await stream.collect(key)
        await p.check()
        assert num_stored(p, [*PROMPT, *p.expected(PROMPT, 200)]) >= (30 + 19) // SIZE


def _begin_together(engine: Any, num_requests: int) -> None:
    """Have it take no step until so many requests were started."""
    start, has_work, num_started = engine.start, engine.has_work, 0

    def counted(*arguments: Any, **options: Any) -> None:
        nonlocal num_started
        num_started += 1
        start(*arguments, **options)

    engine.start = counted
    engine.has_work = lambda: num_started >= num_requests and has_work()


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
async def test_preempted_requests_store_what_is_right(tmp_path: Path, preemption: str) -> None:
    """More wants than blocks: what is taken away and computed again is stored once, and right:
    another worker's tokens after it say so."""
    async with pair(
        tmp_path, decode_blocks=64, prefill_blocks=64, decode_preemption=preemption
    ) as p:
        prompts = [prompt_of(40, start=start) for start in range(4)]
        _begin_together(p.decode.core.thread._engine, len(prompts))
        answers = await asyncio.gather(
            *(
                p.generate(prompt, name=f"r{index}", max_tokens=60)
                for index, prompt in enumerate(prompts)
            )
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == p.expected(prompt, 60)
        assert p.decode.core.thread.stats.num_preemptions
        await p.decode.core.connector.settle()
        assert p.decode.core.counts.num_blocks_written_back > 0
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            context = (*prompt, *answer.token_ids, *prompt_of(3, start=30 + index))
            again = await p.generate(context, name=f"s{index}")
            assert again.token_ids == p.expected(context, 8)
        await p.check()


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    limits = WorkerLimits(store_wait_s=WAIT_S, drain_s=0.2, stop_grace_s=0.05, write_back=False)
    async with pair(tmp_path, limits=limits) as p:
        answer = await turn(p, PROMPT, "r", max_tokens=40)
        assert num_stored(p, [*PROMPT, *answer.token_ids]) == 7
        await p.check()


async def test_a_store_that_fails_costs_the_answer_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        client = p.decode.core.connector.client
        assert client is not None

        async def broken(*arguments: Any, **options: Any) -> Any:
            raise TransferFailed("the wire broke")

        real, client.put_blocks = client.put_blocks, broken  # type: ignore[method-assign]
        await turn(p, PROMPT, "r", max_tokens=40)
        assert p.decode.core.counts.not_written_back == {"transport": 10}
        client.put_blocks = real  # type: ignore[method-assign]
        other = prompt_of(30, start=8)
        answer = await turn(p, other, "s", max_tokens=40)
        assert num_stored(p, [*other, *answer.token_ids]) == 17
        await p.check()


async def test_a_store_without_room_keeps_what_it_has(tmp_path: Path) -> None:
    async with pair(tmp_path, num_frames=9) as p:
        answer = await turn(p, PROMPT, "r", max_tokens=40)
        assert num_stored(p, [*PROMPT, *answer.token_ids]) <= 9
        await p.check()
