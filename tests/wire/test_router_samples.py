"""Several samples of one prompt through a whole router with fake workers: each has its own text,
end and stop, and the request one account.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from process.errors import Unavailable
from protos import common_pb2, inference_pb2
from tests.harness.router_bench import BOUND_S, TOKENIZER, Bench, fake_model, request, running
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

PROMPT = TOKENIZER.encode("hello")


def _expected(bench: Bench, seed: int, num_tokens: int, sample_index: int) -> list[int]:
    params = common_pb2.SamplingParams(seed=seed)
    return [bench.model.token(PROMPT, params, at, sample_index) for at in range(num_tokens)]


def _by_sample(messages: Sequence[Any]) -> dict[int, list[Any]]:
    parts: dict[int, list[Any]] = defaultdict(list)
    for message in messages:
        parts[message.sample_index].append(message)
    return parts


def _ids(messages: Sequence[Any]) -> list[int]:
    return [token_id for message in messages for token_id in message.token_ids]


def _check_account(messages: list[inference_pb2.GenerateResponse], n: int) -> None:
    """Each sample ends once; the request's account comes with its very last message."""
    *earlier, last = messages
    assert all(not m.HasField("provenance") and not m.times for m in earlier)
    assert [leg.role for leg in last.provenance.legs][:1] == ["prefill"]
    for index, part in _by_sample(messages).items():
        assert [bool(m.finish_reason) for m in part] == [False] * (len(part) - 1) + [True], index
        assert part[-1].usage.num_output_tokens == len(_ids(part))
        assert part[-1].usage.num_prompt_tokens == len(PROMPT)
    assert set(_by_sample(messages)) == set(range(n))


async def test_each_sample_is_drawn_for_itself() -> None:
    async with running() as bench:
        messages = await bench.generate(request(sampling={"max_tokens": 12, "seed": 4, "n": 3}))
        _check_account(messages, 3)
        for index, part in _by_sample(messages).items():
            ids = _expected(bench, 4, 12, index)
            assert _ids(part) == ids
            assert "".join(m.text for m in part) == TOKENIZER.decode(ids)
        (asked,) = bench.prefill.requests
        assert asked.sampling.n == 3
        (generate,) = bench.decode.generated
        assert [list(o.token_ids) for o in generate.outputs] == [
            _expected(bench, 4, 1, index) for index in range(3)
        ]
        assert not generate.output_token_ids


async def test_a_stop_string_ends_its_own_sample_only() -> None:
    async with running() as bench:
        texts = [TOKENIZER.decode(_expected(bench, 9, 60, index)) for index in range(3)]
        stop = next(
            texts[1][at : at + 3]
            for at in range(5, 40)
            if all(texts[1][at : at + 3] not in texts[other] for other in (0, 2))
        )
        # Nobody runs to the end before the worker has heard of the stop.
        bench.decode.pause_at = 50
        asked = request(sampling={"max_tokens": 60, "seed": 9, "n": 3, "stop": [stop]})
        generating = asyncio.create_task(bench.generate(asked))
        gate = bench.decode.token_gate
        await until(lambda: bench.decode.num_samples_cancelled == 1 and not gate.is_open)
        gate.open()
        messages = await generating
        _check_account(messages, 3)
        parts = _by_sample(messages)
        reasons = {index: part[-1].finish_reason for index, part in parts.items()}
        assert reasons == {
            0: common_pb2.FINISH_REASON_LENGTH,
            1: common_pb2.FINISH_REASON_STOP_STRING,
            2: common_pb2.FINISH_REASON_LENGTH,
        }
        assert "".join(m.text for m in parts[1]) == texts[1][: texts[1].index(stop)]
        for index in (0, 2):
            assert "".join(m.text for m in parts[index]) == texts[index]
        assert bench.decode.num_cancelled == 0


async def test_stops_of_all_samples_cancel_the_request() -> None:
    async with running() as bench:
        texts = [TOKENIZER.decode(_expected(bench, 2, 400, index)) for index in range(2)]
        messages = await bench.generate(
            request(sampling={"max_tokens": 400, "seed": 2, "n": 2, "stop": ["e"]})
        )
        _check_account(messages, 2)
        for index, part in _by_sample(messages).items():
            assert "".join(m.text for m in part) == texts[index].partition("e")[0]
            assert part[-1].stop_string == "e"


async def test_samples_that_end_with_their_first_token_are_not_decoded() -> None:
    async with running() as bench:
        firsts = [_expected(bench, 5, 1, index)[0] for index in range(4)]
        over = [index for index in range(4) if firsts[index] == firsts[0]]
        assert len(over) < 4
        messages = await bench.generate(
            request(sampling={"max_tokens": 6, "seed": 5, "n": 4, "stop_token_ids": [firsts[0]]})
        )
        _check_account(messages, 4)
        (generate,) = bench.decode.generated
        assert [o.is_over for o in generate.outputs] == [index in over for index in range(4)]
        for index in over:
            assert _ids(_by_sample(messages)[index]) == [firsts[0]]


async def test_all_samples_over_at_once_never_decode() -> None:
    async with running(model=fake_model(eos_at=0)) as bench:
        messages = await bench.generate(request(sampling={"max_tokens": 6, "n": 3}))
        _check_account(messages, 3)
        assert not bench.decode.generated
        single = await bench.generate(request(sampling={"max_tokens": 1, "n": 3}))
        _check_account(single, 3)


async def test_a_prefill_worker_lost_between_two_first_tokens() -> None:
    """What was shown is not shown again; the other worker draws the same."""
    async with running(num_prefill=2) as bench:
        for worker in bench.prefills:
            worker.error, worker.error_after = Unavailable("lost"), 1
        bench.prefills[1].error = None
        messages: list[Any] = []
        async with asyncio.timeout(BOUND_S):
            for attempt in range(20):  # until the choice falls on the worker that fails
                messages = await bench.generate(
                    request(
                        text="hello",
                        sampling={"max_tokens": 5, "seed": attempt, "n": 3},
                        session=f"s{attempt}",
                    )
                )
                for index, part in _by_sample(messages).items():
                    assert _ids(part) == _expected(bench, attempt, 5, index)
                if bench.prefills[0].requests:
                    break
        assert bench.prefills[0].requests, "the failing worker was never chosen"
        _check_account(messages, 3)


async def test_logprobs_go_with_their_sample() -> None:
    async with running() as bench:
        messages = await bench.generate(request(sampling={"max_tokens": 7, "n": 2, "logprobs": 0}))
        for message in messages:
            assert [e.chosen.token_id for e in message.logprobs] == list(message.token_ids)


async def test_random_stops_and_lengths(seed: int, scale: Callable[[int], int]) -> None:
    """Each sample's text is what its tokens give, cut at its first stop, whatever the others do."""
    rng = random.Random(seed)
    async with running() as bench:
        for _ in range(scale(200)):
            n, draw, num_tokens = rng.randint(1, 5), rng.randrange(2**32), rng.randint(1, 40)
            stops = ["".join(rng.choices("abcdefghijkl", k=rng.randint(1, 2))) for _ in range(2)]
            messages = await bench.generate(
                request(sampling={"max_tokens": num_tokens, "seed": draw, "n": n, "stop": stops})
            )
            _check_account(messages, n)
            for index, part in _by_sample(messages).items():
                text = TOKENIZER.decode(_expected(bench, draw, num_tokens, index))
                ends = [(text.index(s) + len(s), text.index(s)) for s in stops if s in text]
                expected = text[: min(ends)[1]] if ends else text
                assert "".join(m.text for m in part) == expected


@pytest.mark.parametrize("n", [0, 1])
async def test_one_sample_is_as_before(n: int) -> None:
    async with running() as bench:
        messages = await bench.generate(request(sampling={"max_tokens": 4, "n": n, "seed": 1}))
        assert _ids(messages) == _expected(bench, 1, 4, 0)
        (generate,) = bench.decode.generated
        assert len(generate.output_token_ids) == 1 and not generate.outputs
