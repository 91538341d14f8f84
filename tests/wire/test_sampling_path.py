"""Everything that shapes a draw, and several samples of one prompt, over the real wire and a real
store: what one engine alone gives, token for token and trace for trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2, decode_pb2
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, PrefillCall, Sample, handover, pair
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

VOCAB = 97


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
    tmp_path: Path, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed)
    async with pair(tmp_path) as p:
        for index in range(scale(400)):
            prompt = prompt_of(rng.randint(1, 40), start=rng.randint(1, 9))
            fields = _random_sampling(rng) | {"n": rng.choice((1, 1, 2, 3, 4))}
            num_tokens = rng.randint(max(1, fields.get("min_tokens", 0)), 20)
            samples = await p.generate_samples(
                prompt, name=f"r{index}", max_tokens=num_tokens, **fields
            )
            expected = p.alone(prompt, max_tokens=num_tokens, **fields)
            assert [samples[i] for i in range(len(expected))] == expected, fields
        await p.check()


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 21])
async def test_samples_share_one_prompt_and_one_handover(tmp_path: Path, length: int) -> None:
    """Around a block's border, where the last block is shared and written by all."""
    prompt = prompt_of(length)
    async with pair(tmp_path) as p:
        samples = await p.generate_samples(prompt, max_tokens=9, temperature=1.0, n=4)
        assert list(samples.values()) == p.alone(prompt, max_tokens=9, temperature=1.0, n=4)
        assert len({tuple(sample.token_ids) for sample in samples.values()}) > 1
        leg = samples[0].leg
        assert leg is not None and leg.num_tokens_computed == 0 and not leg.recomputed
        assert sum(count.num_tokens for count in leg.from_store) == length
        await p.check()


async def test_a_sample_that_is_cancelled_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    prompt = prompt_of(10)
    asked: dict[str, Any] = {"max_tokens": 30, "temperature": 1.0, "n": 3}
    async with pair(tmp_path) as p, p.stream() as stream:
        expected = p.alone(prompt, **asked)
        key = await stream.reserve(p.reserve(prompt, **asked))
        await stream.next(key)
        call = PrefillCall(p.prefill_stub, p.prefill_request(prompt, **asked), timeout_s=WAIT_S)
        *firsts, account = await call.answer()
        samples = [Sample() for _ in firsts]
        for first in firsts:
            samples[first.sample_index].add(first)
        await stream.generate_from(key, handover(account, firsts))
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
        await p.check()


async def test_the_last_cancelled_sample_ends_the_request(tmp_path: Path) -> None:
    prompt = prompt_of(10)
    asked: dict[str, Any] = {"max_tokens": 200, "temperature": 1.0, "n": 2}
    async with pair(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(prompt, **asked))
        await stream.next(key)
        call = PrefillCall(p.prefill_stub, p.prefill_request(prompt, **asked), timeout_s=WAIT_S)
        *firsts, account = await call.answer()
        p.decode_model.hold()
        await stream.generate_from(key, handover(account, firsts))
        await until(p.decode_model.is_held.is_set)
        for index in (0, 1):
            await stream.cancel_sample(key, index)
        # Commands are read in their order: whoever refuses this one has heard of those.
        wrong = await stream.reserve(decode_pb2.ReserveDecode(model_fingerprint="another"))
        assert (await stream.next(wrong)).HasField("failed")
        p.decode_model.release()
        answer = await stream.collect(key)
        assert answer.finished is not None
        assert answer.finished.finish_reason == common_pb2.FINISH_REASON_CANCELLED
        await p.check()


@pytest.mark.parametrize(
    "fields", [{"temperature": 1.0}, {"beam": common_pb2.BeamParams(num_beams=3)}]
)
async def test_without_a_handle_decode_computes_the_prompt_itself(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """The first tokens, or a beam search's candidates, are all that it was given."""
    prompt = prompt_of(3 * BLOCK_SIZE + 2)
    asked: dict[str, Any] = {"max_tokens": 9, "n": 3, **fields}
    async with pair(tmp_path) as p:
        expected = p.alone(prompt, **asked)
        samples = await p.generate_samples(prompt, loses_handle=True, **asked)
        assert [samples[index] for index in range(3)] == expected
        leg = samples[0].leg
        assert leg is not None and leg.num_tokens_computed == len(prompt)
        assert {count.reason for count in leg.recomputed} == {"missing"}
        await p.check()


async def test_traces_say_how_each_token_came_to_be(tmp_path: Path) -> None:
    prompt = prompt_of(9)
    asked: dict[str, Any] = {"max_tokens": 6, "temperature": 0.7, "top_k": 5, "trace": True}
    async with pair(tmp_path) as p:
        (sample,) = (await p.generate_samples(prompt, **asked)).values()
        assert [trace.token_id for trace in sample.traces] == sample.token_ids
        assert [trace.position for trace in sample.traces] == list(range(9, 15))
        assert all(1 <= trace.support_size <= 5 for trace in sample.traces)
        assert all(trace.HasField("rng_key") and trace.processors for trace in sample.traces)
        assert sample.traces == p.alone(prompt, **asked)[0].traces
        await p.check()


async def test_another_number_of_outputs_is_refused(tmp_path: Path) -> None:
    prompt = prompt_of(10)
    async with pair(tmp_path) as p, p.stream() as stream:
        for n, outputs in ((3, [[1], [2]]), (2, [[1], [2], [3]])):
            key = await stream.reserve(p.reserve(prompt, name=f"r{n}", n=n))
            await stream.next(key)
            command = decode_pb2.GenerateFromHandle()
            for token_ids in outputs:
                command.outputs.add(token_ids=token_ids)
            await stream.generate_from(key, command)
            answer = await stream.collect(key)
            assert answer.failed is not None and answer.failed.message.startswith("outputs: ")
        await p.check()
