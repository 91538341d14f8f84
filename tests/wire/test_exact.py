"""Prefill -> handle -> decode over the real wire and a real store: the tokens, log probabilities
and traces of one engine alone, whatever shapes the draw, and not one prompt token computed twice
unless verification fails.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.prefill_decode_pair import Answer, Pair, Sample, handover_of, pair, whole
from tests.harness.waiting import until

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

VOCAB = 97


def assert_handed_over(answer: Answer, num_prompt_tokens: int, num_local: int = 0) -> None:
    """Decode computed nothing of the prompt, and says where all of it came from."""
    leg = answer.leg
    assert leg.num_tokens_computed == 0, leg
    assert leg.num_tokens_local == num_local
    assert sum(count.num_tokens for count in leg.from_store) == num_prompt_tokens - num_local
    assert all(count.tier == common_pb2.TIER_HOST for count in leg.from_store)
    assert answer.recomputed == {}


@pytest.mark.parametrize("transport", ["shm", "nixl", "grpc"])
async def test_tokens_are_those_of_one_engine_and_decode_computes_nothing(
    tmp_path: Path, transport: str
) -> None:
    """Prompt lengths at block edges and across prefill chunks."""
    lengths = [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 15, 16, 17, 33, 64, 67]
    async with pair(tmp_path, transport=transport) as p:
        block_bytes = p.model.layout.block_bytes
        num_bytes = 0
        for n in lengths:
            prompt = prompt_of(n, start=n)
            answer = await p.generate(prompt, max_tokens=9)
            assert answer.token_ids == p.expected(prompt, 9)
            assert_handed_over(answer, n)
            assert answer.prefill is not None
            for leg in (answer.leg, answer.prefill.leg):
                assert leg.transport == transport
                assert [moved.transport for moved in leg.transports] == [transport]
                assert all(count.transport == transport for count in leg.from_store)
            assert answer.prefill.leg.num_tokens_computed == n
            num_blocks = -(-n // BLOCK_SIZE)
            assert answer.leg.num_bytes_read == num_blocks * block_bytes
            assert answer.prefill.leg.num_bytes_written == num_blocks * block_bytes
            num_bytes += num_blocks * block_bytes
            await p.check()
        # What decode stored of the answers, beside.
        num_back = sum((n + 8) // BLOCK_SIZE - n // BLOCK_SIZE for n in lengths)
        assert p.at_decode.count("baton_kv_written_back_blocks") == num_back
        assert not p.at_decode.count("baton_kv_not_written_back_blocks")
        status = await p.store_status()
        assert status.num_bytes_written - num_back * block_bytes == num_bytes
        assert status.num_bytes_read == num_bytes


async def test_a_second_identical_prompt_computes_only_what_follows_its_last_full_block(
    p: Pair,
) -> None:
    for n in (3, 4, 5, 16, 30):
        prompt = p.new_prompt(n)
        expected = p.expected(prompt, 6)
        for attempt in range(3):
            answer = await p.generate(prompt, max_tokens=6, name=f"r{n}.{attempt}")
            assert answer.token_ids == expected
            assert answer.prefill is not None
            num_local = 0 if attempt == 0 else (n - 1) // BLOCK_SIZE * BLOCK_SIZE
            assert answer.prefill.leg.num_tokens_computed == n - num_local
            assert answer.prefill.leg.num_tokens_local == num_local
            assert_handed_over(answer, n, num_local)
            await p.check()


async def test_another_prefill_life_takes_the_prefix_from_the_store(tmp_path: Path) -> None:
    """A worker without the blocks fetches them."""
    async with pair(tmp_path, prefill_blocks=64) as p:
        prompt = prompt_of(30)
        await p.generate(prompt, name="first")
        await p.forget()
        answer = await p.generate(prompt, name="again")
        assert answer.token_ids == p.expected(prompt, 8)
        assert answer.prefill is not None
        leg = answer.prefill.leg
        assert (leg.num_tokens_local, leg.num_tokens_computed) == (0, 2)
        assert [(count.tier, count.num_tokens) for count in leg.from_store] == [
            (common_pb2.TIER_HOST, 28)
        ]
        await p.check()


async def test_a_store_that_lost_everything_gets_the_local_prefix_again(tmp_path: Path) -> None:
    """Prefill computes two tokens, and still hands over the whole prompt."""
    async with pair(tmp_path) as p:
        prompt = prompt_of(30)
        await p.run_prefill(prompt, name="before")
        await p.kill_store()
        await p.start_store()
        await p.reattached()
        answer = await p.generate(prompt)
        assert answer.token_ids == p.expected(prompt, 8)
        assert answer.prefill is not None
        assert answer.prefill.leg.num_tokens_computed == 2
        assert_handed_over(answer, len(prompt))
        await p.check()


async def test_decode_says_where_its_time_went(p: Pair) -> None:
    answer = await p.generate(p.new_prompt(30))
    assert answer.finished is not None
    stages = [entry.stage for entry in answer.finished.times]
    assert {"decode_fetch", "decode_queue", "decode"} <= set(stages)


async def test_ragged_concurrent_requests_share_one_stream(
    p: Pair, seed: int, scale: Callable[[int], int]
) -> None:
    """Those that step together ride in one message."""
    rng = random.Random(seed)
    async with p.stream() as stream:
        num_generating = 0

        async def one(index: int) -> None:
            nonlocal num_generating
            prompt = prompt_of(rng.randint(1, 50), start=rng.randint(1, 5))
            num_tokens = rng.randint(2, 24)
            name = f"r{index}"
            key = await stream.begin(p.reserve(prompt, name=name, max_tokens=num_tokens))
            reply = await p.run_prefill(prompt, name=name, max_tokens=num_tokens)
            num_generating += 1
            await until(lambda: num_generating == 8)  # a step that is held reserves nothing
            answer = await stream.answer(key, reply)
            assert answer.token_ids == p.expected(prompt, num_tokens)
            assert answer.leg.num_tokens_computed == 0

        for first in range(0, scale(320), 8):
            num_generating = 0
            p.decode_model.hold()  # so that they run together
            group = asyncio.gather(*(one(index) for index in range(first, first + 8)))
            await until(lambda: p.at_decode.states() == ["running"] * 8)
            p.decode_model.release()
            await group
        messages = [m for m in stream.messages if any(e.HasField("tokens") for e in m.events)]
        events = sum(len(m.events) for m in messages)
        assert events > len(messages)  # steps of several requests were not torn apart
        await p.check()


async def test_sampled_tokens_do_not_depend_on_the_path(p: Pair) -> None:
    """The same seed over the handover and over decode alone."""
    prompt = p.new_prompt(21)
    sampling = {"temperature": 1.0, "max_tokens": 12}
    answer = await p.generate(prompt, seed=123, **sampling)
    async with p.reserved(prompt, name="alone", seed=123, **sampling) as (stream, key):
        await stream.compute(key)
        alone = await stream.collect(key)
    assert alone.token_ids == answer.token_ids
    assert alone.leg.num_tokens_computed + alone.leg.num_tokens_local == len(prompt)
    # Blocks that decode holds already are not counted as recomputed.
    assert alone.recomputed == {"missing": 1}
    other = await p.generate(prompt, seed=124, name="other", **sampling)
    assert other.token_ids != answer.token_ids


@pytest.mark.parametrize("preemption", ["never", "recompute"])
async def test_a_stream_is_taken_up_again_from_its_tokens(tmp_path: Path, preemption: str) -> None:
    """They are context, whose KV is handed over; where decode preempts it has room for no more."""
    async with pair(tmp_path, decode_preemption=preemption) as p:
        for num_drawn in (1, 5, 6, 7, 12):
            prompt = prompt_of(30, start=num_drawn)
            expected = p.expected(prompt, 16)
            async with p.reserved(prompt, max_tokens=16) as (stream, key):
                request = p.prefill_request(prompt, max_tokens=16)
                request.output_token_ids.extend(expected[:num_drawn])
                reply = await whole(p.call(request))
                assert list(reply.token_ids) == expected[num_drawn : num_drawn + 1]
                assert reply.handle.num_tokens == len(prompt) + num_drawn
                reply.token_ids[:] = expected[: num_drawn + 1]
                answer = await stream.answer(key, reply)
            assert answer.token_ids == expected
            assert_handed_over(answer, len(prompt))
            await p.check()


async def test_logprobs_travel_with_their_tokens(p: Pair) -> None:
    samples = await p.generate_samples(p.new_prompt(9), max_tokens=4, logprobs=2)
    entries = samples[0].logprobs
    assert [entry.chosen.token_id for entry in entries] == samples[0].token_ids
    assert len(entries) == 4
    assert all(len(entry.top) == 2 and entry.chosen.logprob <= 0 for entry in entries)


# ---- what shapes a draw, and several samples


def _random_sampling(rng: random.Random) -> dict[str, Any]:
    """Some of everything that the wire can ask of a draw."""
    fields: dict[str, Any] = {"seed": rng.randrange(2**64), "trace": rng.random() < 0.5}
    choices: dict[str, Callable[[], Any]] = {
        "temperature": lambda: rng.uniform(0.2, 2.0),
        "top_k": lambda: rng.randint(1, 20),
        "min_p": lambda: rng.uniform(0.0, 0.2),
        "presence_penalty": lambda: rng.uniform(-2.0, 2.0),
        "frequency_penalty": lambda: rng.uniform(-2.0, 2.0),
        "repetition_penalty": lambda: rng.uniform(0.5, 2.0),
        "logit_bias": lambda: {rng.randrange(VOCAB): rng.uniform(-9.0, 9.0) for _ in range(4)},
        "allowed_token_ids": lambda: rng.sample(range(VOCAB), 40),
        "bad_word_ids": lambda: [
            common_pb2.TokenSequence(ids=[rng.randrange(VOCAB) for _ in range(rng.randint(1, 2))])
            for _ in range(8)
        ],
        "no_repeat_ngram": lambda: rng.randint(2, 4),
        "min_tokens": lambda: rng.randint(0, 5),
        "logprobs": lambda: rng.randint(0, 3),
        "stop_token_ids": lambda: rng.sample(range(VOCAB), 6),
    }
    for name in rng.sample(sorted(choices), rng.randint(0, 6)):
        fields[name] = choices[name]()
    return fields


async def test_random_sampling_gives_what_one_engine_alone_gives(
    p: Pair, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    for index in range(scale(400)):
        prompt = prompt_of(rng.randint(1, 40), start=rng.randint(1, 9))
        fields = _random_sampling(rng) | {"n": rng.choice((1, 1, 2, 3, 4))}
        num_tokens = rng.randint(max(1, fields.get("min_tokens", 0)), 20)
        samples = await p.generate_samples(
            prompt, name=f"r{index}", max_tokens=num_tokens, **fields
        )
        expected = p.alone(prompt, max_tokens=num_tokens, **fields)
        assert [samples[i] for i in range(len(expected))] == expected, fields


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 21])
async def test_samples_share_one_prompt_and_one_handover(p: Pair, length: int) -> None:
    """Around a block's border, where the last block is shared and written by all."""
    prompt = p.new_prompt(length)
    asked: dict[str, Any] = {"max_tokens": 9, "temperature": 1.0, "n": 4}
    samples = await p.generate_samples(prompt, **asked)
    assert list(samples.values()) == p.alone(prompt, **asked)
    assert len({tuple(sample.token_ids) for sample in samples.values()}) > 1
    leg = samples[0].leg
    assert leg is not None and leg.num_tokens_computed == 0 and not leg.recomputed
    assert sum(count.num_tokens for count in leg.from_store) == length


async def test_a_sample_that_is_cancelled_leaves_the_others_as_they_were(p: Pair) -> None:
    prompt = p.new_prompt(10)
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "n": 3}
    expected = p.alone(prompt, **asked)
    async with p.reserved(prompt, **asked) as (stream, key):
        *firsts, account = await p.call(prompt, **asked).answer()
        samples = [Sample() for _ in firsts]
        for first in firsts:
            samples[first.sample_index].add(first)
        await stream.generate_from(key, handover_of(account, firsts))
        p.decode_model.hold()
        await stream.cancel_sample(key, 1)
        await stream.cancel_sample(key, 1)  # again: nothing
        p.decode_model.release()
        while True:
            event = await stream.next(key)
            part = event.finished if event.HasField("finished") else event.tokens
            if not samples[part.sample_index].finish_reason:
                samples[part.sample_index].add(part)
            if event.HasField("finished"):
                break
    assert [samples[0], samples[2]] == [expected[0], expected[2]]
    cancelled = samples[1].token_ids
    assert cancelled == expected[1].token_ids[: len(cancelled)]


async def test_a_cancelled_sample_is_decoded_no_further(p: Pair) -> None:
    prompt = p.new_prompt(10)
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "n": 3}
    before = (await p.at_decode.metrics())["baton_output_tokens_total",]
    async with p.reserved(prompt, **asked) as (stream, key):
        *firsts, account = await p.call(prompt, **asked).answer()
        p.decode_model.hold()
        await stream.generate_from(key, handover_of(account, firsts))
        await until(p.decode_model.is_held.is_set)
        await stream.cancel_sample(key, 1)
        await stream.in_order()
        p.decode_model.release()
        answer = await stream.collect(key)
    assert answer.finished is not None and answer.failed is None
    await p.check()
    num_decoded = (await p.at_decode.metrics())["baton_output_tokens_total",] - before
    assert 29 < num_decoded < 3 * 29


async def test_the_last_cancelled_sample_ends_the_request(p: Pair) -> None:
    prompt = p.new_prompt(10)
    asked: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "n": 2}
    async with p.reserved(prompt, **asked) as (stream, key):
        *firsts, account = await p.call(prompt, **asked).answer()
        p.decode_model.hold()
        await stream.generate_from(key, handover_of(account, firsts))
        await until(p.decode_model.is_held.is_set)
        for index in (0, 1):
            await stream.cancel_sample(key, index)
        await stream.in_order()
        p.decode_model.release()
        answer = await stream.collect(key)
    assert answer.finished is not None
    assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED


@pytest.mark.parametrize(
    "fields", [{"temperature": 1.0}, {"beam": common_pb2.BeamParams(num_beams=3)}]
)
async def test_without_a_handle_decode_computes_the_prompt_itself(
    p: Pair, fields: dict[str, Any]
) -> None:
    """The first tokens, or a beam search's candidates, are all that it was given."""
    prompt = p.new_prompt(3 * BLOCK_SIZE + 2)
    asked: dict[str, Any] = {"max_tokens": 9, "n": 3, **fields}
    samples = await p.generate_samples(prompt, loses_handle=True, **asked)
    assert [samples[index] for index in range(3)] == p.alone(prompt, **asked)
    leg = samples[0].leg
    assert leg is not None and leg.num_tokens_computed == len(prompt)
    assert {count.reason for count in leg.recomputed} == {"missing"}


async def test_traces_say_how_each_token_came_to_be(p: Pair) -> None:
    prompt = p.new_prompt(9)
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0.7, "top_k": 5, "trace": True}
    (sample,) = (await p.generate_samples(prompt, **asked)).values()
    assert [trace.token_id for trace in sample.traces] == sample.token_ids
    assert [trace.position for trace in sample.traces] == list(range(9, 15))
    assert all(1 <= trace.support_size <= 5 for trace in sample.traces)
    assert all(trace.HasField("rng_key") and trace.processors for trace in sample.traces)
    assert sample.traces == p.alone(prompt, **asked)[0].traces


async def test_another_number_of_outputs_is_refused(p: Pair) -> None:
    for n, outputs in ((3, [[1], [2]]), (2, [[1], [2], [3]])):
        async with p.reserved(p.new_prompt(10), n=n) as (stream, key):
            await stream.go_on(key, outputs)
            answer = await stream.collect(key)
        assert answer.failed is not None and answer.failed.message.startswith("outputs: ")


# ---- beam search


@pytest.mark.parametrize("length", [1, 3, 4, 5, 17])
async def test_a_beam_search_gives_what_one_engine_alone_gives(p: Pair, length: int) -> None:
    prompt = p.new_prompt(length)
    asked: dict[str, Any] = {"max_tokens": 12, "n": 3, "beam": common_pb2.BeamParams(num_beams=4)}
    samples = await p.generate_samples(prompt, **asked)
    alone = p.alone(prompt, **asked)
    assert [samples[index] for index in range(3)] == alone
    scores = [sample.score for sample in alone]
    assert scores == sorted(scores, reverse=True)
    leg = samples[0].leg
    assert leg is not None and leg.num_tokens_computed == 0


async def test_a_beam_search_can_be_cancelled(p: Pair) -> None:
    prompt = p.new_prompt(19)
    asked: dict[str, Any] = {"max_tokens": 200, "beam": common_pb2.BeamParams(num_beams=4)}
    async with p.reserved(prompt, **asked) as (stream, key):
        first, account = await p.call(prompt, **asked).answer()
        assert not first.token_ids and len(first.beam_start) >= 8
        await stream.generate_from(key, handover_of(account, [first]))
        answer = await stream.end(key)
    assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
