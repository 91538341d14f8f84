"""Workers write behind their requests: the next turn of a conversation fetches prompt and answer
from the store, whichever worker it meets; no token waits for it, and nothing stays held.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.harness.gated_engine import prompt_of
from tests.harness.prefill_decode_pair import Answer, Pair, pair, patient, whole
from tests.harness.waiting import until

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

SIZE = 4
WRITTEN = "baton_kv_written_back_blocks"
NOT_WRITTEN = "baton_kv_not_written_back_blocks"


async def turn(p: Pair, prompt: Sequence[int], name: str, **options: Any) -> Answer:
    answer = await p.generate(prompt, name=name, **options)
    assert answer.token_ids == p.expected(prompt, options.get("max_tokens", 8))
    await p.at_decode.settle()
    return answer


async def test_the_next_turn_fetches_prompt_and_answer(tmp_path: Path) -> None:
    """Three turns; prefill forgets everything between them."""
    async with pair(tmp_path, prefill_blocks=64) as p:
        context = prompt_of(30, start=3)
        num_computed = 0  # of the conversation so far, and so stored
        for index in range(3):
            answer = await turn(p, context, f"turn {index}", max_tokens=20)
            assert answer.prefill is not None
            from_store = sum(count.num_tokens for count in answer.prefill.leg.from_store)
            assert from_store == num_computed // SIZE * SIZE
            assert answer.prefill.leg.num_tokens_computed == len(context) - from_store
            num_computed = len(context) + 19  # the last token drawn is never computed
            context = (*context, *answer.token_ids)
            assert p.num_stored(context) == num_computed // SIZE
            await p.forget()
            context = (*context, *prompt_of(7, start=20 + index))
        assert p.at_decode.count(WRITTEN) == 5 + 5 + 4 and not p.at_decode.count(NOT_WRITTEN)
        await p.check()


@pytest.mark.parametrize("is_embedding", [False, True])
async def test_an_answer_without_a_handle_does_not_wait_for_the_store(
    p: Pair, is_embedding: bool
) -> None:
    """Not even for one that hangs; what it could not store then is stored behind the answer."""
    prompt, before = p.new_prompt(30), p.at_prefill.not_stored_behind
    written = p.at_prefill.count(WRITTEN)
    gate = p.at_prefill.home.hold("put")
    asked = p.prefill_request(prompt, max_tokens=1, wants_handle=False)
    asked.wants_embedding = is_embedding
    reply = await whole(p.call(asked))
    assert reply.leg.num_blocks_behind == 7 and not reply.leg.not_stored
    assert p.num_stored(prompt) == 0
    gate.open()
    await p.check()
    assert p.num_stored(prompt) == 7 and p.at_prefill.not_stored_behind == before
    assert p.at_prefill.count(WRITTEN) == written + 7


async def test_a_prompt_that_needs_the_blocks_of_a_put_does_not_wait_for_it(tmp_path: Path) -> None:
    """The store hangs, and the next prompt takes the whole cache."""
    async with pair(tmp_path, prefill_blocks=64) as p:
        gate = p.at_prefill.home.hold("put")
        first, second = p.new_prompt(120), p.new_prompt(252)
        await whole(p.call(first, max_tokens=1, wants_handle=False))
        await gate.wait_entered()
        reply = await whole(p.call(second, max_tokens=1, wants_handle=False))
        assert reply.leg.num_tokens_computed == 252 and p.num_stored(first) == 0
        gate.open()
        await p.check()
        assert p.num_stored(second) == 63


async def test_bytes_written_before_the_first_token_ended_the_answer_count(p: Pair) -> None:
    """A handle was to name the store; now the rest is stored behind the answer."""
    prompt = p.new_prompt(30)
    p.prefill_model.hold_at(2)
    asked, leg = p.prefill_request(prompt, max_tokens=1), None
    async for message in p.call(asked):
        if message.handle.is_partial:
            assert message.handle.num_tokens == 16
            p.prefill_model.release()
        leg = message.leg
    assert leg is not None and leg.num_blocks_behind == 3
    assert leg.num_bytes_written == 4 * p.model.layout.block_bytes
    await p.check()
    assert p.num_stored(prompt) == 7


async def test_the_leg_says_what_was_stored_while_the_request_ran(p: Pair) -> None:
    prompt, before = p.new_prompt(30), p.at_decode.count(WRITTEN)
    home, num_putting = p.at_decode.home, 0

    async def counted(put: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal num_putting
        num_putting += 1
        try:
            return await put(*arguments, **options)
        finally:
            num_putting -= 1

    home.replace("put", counted)
    async with p.reserved(prompt, max_tokens=200) as (stream, key):
        reply = await p.run_prefill(prompt, max_tokens=200)
        p.decode_model.hold()
        await stream.generate(key, reply)
        while p.at_decode.count(WRITTEN) - before < 8:
            # Step by step: a fake model would be through before the store has heard of it.
            await until(lambda: p.decode_model.is_held.is_set() and not num_putting)
            p.decode_model.allow()
        p.decode_model.release()
        answer = await stream.collect(key)
    home.restore("put")
    assert answer.leg.num_blocks_written_back >= 8
    await p.at_decode.settle()
    assert p.at_decode.count(WRITTEN) - before == (30 + 199) // SIZE - 7


async def test_a_slow_store_delays_no_token(p: Pair) -> None:
    prompt, other = p.new_prompt(30), p.new_prompt(30)
    gate = p.at_decode.home.hold("put")
    answer = await p.generate(prompt, max_tokens=40)
    assert answer.token_ids == p.expected(prompt, 40)
    assert answer.leg.num_blocks_written_back == 0
    await gate.wait_entered()
    again = await p.generate(other, name="again")
    assert again.token_ids == p.expected(other, 8)
    gate.open()
    await p.at_decode.settle()
    assert p.num_stored([*prompt, *answer.token_ids]) == (30 + 39) // SIZE
    assert p.num_stored([*other, *again.token_ids]) == (30 + 7) // SIZE


async def test_each_sample_has_its_own_chain(p: Pair) -> None:
    prompt = p.new_prompt(30)
    options: dict[str, Any] = {"n": 3, "temperature": 1.0, "max_tokens": 24}
    samples = await p.generate_samples(prompt, name="samples", **options)
    alone = p.alone(prompt, **options)
    assert [samples[i].token_ids for i in range(3)] == [one.token_ids for one in alone]
    await p.at_decode.settle()
    for sample in samples.values():
        num_computed = len(prompt) + len(sample.token_ids) - 1
        assert p.num_stored([*prompt, *sample.token_ids]) == num_computed // SIZE


async def test_a_cancelled_answer_is_stored_as_far_as_it_came(p: Pair) -> None:
    prompt = p.new_prompt(30)
    async with p.reserved(prompt, max_tokens=200) as (stream, key):
        reply = await p.run_prefill(prompt, max_tokens=200)
        await stream.generate(key, reply)
        num_tokens = 1
        while num_tokens < 20:
            num_tokens += len((await stream.next(key)).tokens.token_ids)
        await stream.end(key)
    await p.check()
    assert p.num_stored([*prompt, *p.expected(prompt, 200)]) >= (30 + 19) // SIZE


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
async def test_preempted_requests_store_what_is_right(tmp_path: Path, preemption: str) -> None:
    """Once; another worker's tokens after it say so."""
    async with pair(
        tmp_path, decode_blocks=64, prefill_blocks=64, decode_preemption=preemption
    ) as p:
        fits = prompt_of(40, start=9)
        assert (await p.generate(fits, max_tokens=60)).token_ids == p.expected(fits, 60)
        shown = await p.at_decode.metrics()
        assert not sum(shown[name] for name in shown if name[0] == "baton_preemptions_total")
        prompts = [prompt_of(40, start=start) for start in range(4)]
        answers = await p.generate_together(prompts, max_tokens=60)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == p.expected(prompt, 60)
        shown = await p.at_decode.metrics()
        assert sum(shown[name] for name in shown if name[0] == "baton_preemptions_total") > 0
        await p.at_decode.settle()
        assert p.at_decode.count(WRITTEN) > 0
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            context = (*prompt, *answer.token_ids, *prompt_of(3, start=30 + index))
            again = await p.generate(context, name=f"s{index}")
            assert again.token_ids == p.expected(context, 8)
        await p.check()


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(write_back=False)) as p:
        prompt = prompt_of(30)
        answer = await turn(p, prompt, "r", max_tokens=40)
        assert p.num_stored([*prompt, *answer.token_ids]) == 7
        await p.check()


async def test_a_store_that_fails_costs_the_answer_nothing(p: Pair) -> None:
    home, before = p.at_decode.home, p.at_decode.counts(NOT_WRITTEN)
    home.fail("put")
    await turn(p, p.new_prompt(30), "r", max_tokens=40)
    expected = before | {"transport": before.get("transport", 0) + 10}
    assert p.at_decode.counts(NOT_WRITTEN) == expected
    home.restore("put")
    prompt = p.new_prompt(30)
    answer = await turn(p, prompt, "s", max_tokens=40)
    assert p.num_stored([*prompt, *answer.token_ids]) == 17


async def test_a_store_without_room_keeps_what_it_has(tmp_path: Path) -> None:
    async with pair(tmp_path, num_frames=9) as p:
        prompt = prompt_of(30)
        answer = await turn(p, prompt, "r", max_tokens=40)
        assert p.num_stored([*prompt, *answer.token_ids]) <= 9
        await p.check()
