"""Prefill -> handle -> decode over the real wire and a real store: the tokens of one engine alone,
and not one prompt token computed twice unless verification fails.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from protos import common_pb2, prefill_pb2
from services.decode.states import DecodeState
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.prefill_decode_pair import WAIT_S, Answer, PrefillCall, pair, whole
from tests.harness.waiting import until

TRANSPORTS = ("shm", "nixl", "grpc")


def assert_handed_over(answer: Answer, num_prompt_tokens: int, num_local: int = 0) -> None:
    """Decode computed nothing of the prompt, and says where all of it came from."""
    leg = answer.leg
    assert leg.num_tokens_computed == 0, leg
    assert leg.num_tokens_local == num_local
    assert sum(count.num_tokens for count in leg.from_store) == num_prompt_tokens - num_local
    assert all(count.tier == common_pb2.TIER_HOST for count in leg.from_store)
    assert answer.recomputed == {}


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_tokens_are_those_of_one_engine_and_decode_computes_nothing(
    tmp_path: Path, transport: str
) -> None:
    """Prompt lengths at block edges and across prefill chunks."""
    lengths = [1, 2, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 15, 16, 17, 33, 64, 67]
    async with pair(tmp_path, transport=transport) as p:
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
            block_bytes = p.model.layout.block_bytes
            assert answer.leg.num_bytes_read == num_blocks * block_bytes
            assert answer.prefill.leg.num_bytes_written == num_blocks * block_bytes
            num_bytes += num_blocks * block_bytes
            await p.check()
        # What decode stored of the answers, beside.
        num_back = p.decode.core.counts.num_blocks_written_back
        status = await p.store_status()
        num_written_back = sum((n + 8) // BLOCK_SIZE - n // BLOCK_SIZE for n in lengths)
        assert num_back == num_written_back and not p.decode.core.counts.not_written_back
        num_bytes_back = num_back * block_bytes
        assert status.num_bytes_written - num_bytes_back == num_bytes
        assert status.num_bytes_read == num_bytes


async def test_a_second_identical_prompt_computes_only_what_follows_its_last_full_block(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as p:
        for n in (3, 4, 5, 16, 30):
            prompt = prompt_of(n, start=n)
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
    """Decode's blocks are in the store as prefill wrote them; a worker without them fetches
    them.
    """
    async with pair(tmp_path, prefill_blocks=64) as p:
        prompt = prompt_of(30)
        await p.generate(prompt, name="first")
        # Other prompts push the first one's blocks out of the small device cache of the prefill
        # worker.
        for start in range(50, 53):
            await p.generate(prompt_of(200, start=start), name=f"other{start}")
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
        old = p.store.node.incarnation
        await p.kill_store()
        await p.start_store()
        for worker in (p.prefill, p.decode):
            connector = worker.core.connector
            await until(lambda c=connector: c.client is not None and c.client.incarnation != old)
        answer = await p.generate(prompt)
        assert answer.token_ids == p.expected(prompt, 8)
        assert answer.prefill is not None
        assert answer.prefill.leg.num_tokens_computed == 2
        assert_handed_over(answer, len(prompt))
        await p.check()


async def test_ragged_concurrent_requests_share_one_stream(
    tmp_path: Path, seed: int, scale: Callable[[int], int]
) -> None:
    """Requests of one stream that step together ride in one message, and each gets its own
    tokens.
    """
    rng = random.Random(seed)
    async with pair(tmp_path) as p, p.stream() as stream:
        worker = p.decode_role.worker
        num_generating = 0

        async def one(index: int) -> None:
            nonlocal num_generating
            prompt = prompt_of(rng.randint(1, 50), start=rng.randint(1, 5))
            num_tokens = rng.randint(2, 24)
            name = f"r{index}"
            key = await stream.reserve(p.reserve(prompt, name=name, max_tokens=num_tokens))
            assert (await stream.next(key)).WhichOneof("event") == "reserved"
            reply = await p.run_prefill(prompt, name=name, max_tokens=num_tokens)
            num_generating += 1
            await until(lambda: num_generating == 8)  # a step that is held reserves nothing
            await stream.generate(key, reply)
            answer = await stream.collect(key)
            assert [*reply.token_ids, *answer.token_ids] == p.expected(prompt, num_tokens)
            assert answer.leg.num_tokens_computed == 0

        num_requests = scale(320)
        for first in range(0, num_requests, 8):
            num_generating = 0
            p.decode_model.hold()  # so that they run together
            group = asyncio.gather(*(one(index) for index in range(first, first + 8)))
            await until(lambda: [*worker.states.values()] == [DecodeState.RUNNING] * 8)
            p.decode_model.release()
            await group
        messages = [m for m in stream.messages if any(e.HasField("tokens") for e in m.events)]
        events = sum(len(m.events) for m in messages)
        assert events > len(messages)  # steps of several requests were not torn apart
        await p.check()


async def test_sampled_tokens_do_not_depend_on_the_path(tmp_path: Path) -> None:
    """The same seed over the handover and, with a one-token prefill only, over decode alone."""
    async with pair(tmp_path) as p:
        prompt = prompt_of(21)
        answer = await p.generate(prompt, temperature=1.0, seed=123, max_tokens=12)
        async with p.stream() as stream:
            key = await stream.reserve(
                p.reserve(prompt, name="alone", temperature=1.0, seed=123, max_tokens=12)
            )
            await stream.next(key)
            await stream.generate(key, prefill_pb2.PrefillReply())
            alone = await stream.collect(key)
        assert alone.token_ids == answer.token_ids
        assert alone.leg.num_tokens_computed + alone.leg.num_tokens_local == len(prompt)
        # Blocks that decode holds already are not counted as recomputed.
        assert alone.recomputed == {"missing": 1}
        other = await p.generate(prompt, temperature=1.0, seed=124, max_tokens=12, name="other")
        assert other.token_ids != answer.token_ids
        await p.check()


@pytest.mark.parametrize("preemption", ["never", "recompute"])
async def test_a_stream_is_taken_up_again_from_its_tokens(tmp_path: Path, preemption: str) -> None:
    """Tokens drawn before are context: prefill computes and hands over their KV, too, and nothing
    is drawn twice. Where decode preempts it has places for the prompt's blocks only."""
    async with pair(tmp_path, decode_preemption=preemption) as p, p.stream() as stream:
        for num_drawn in (1, 5, 6, 7, 12):
            prompt = prompt_of(30, start=num_drawn)
            expected = p.expected(prompt, 16)
            name = f"r{num_drawn}"
            key = await stream.reserve(p.reserve(prompt, name=name, max_tokens=16))
            await stream.next(key)
            request = p.prefill_request(prompt, name=name, max_tokens=16)
            request.output_token_ids.extend(expected[:num_drawn])
            reply = await whole(PrefillCall(p.prefill_stub, request, timeout_s=WAIT_S))
            assert list(reply.token_ids) == expected[num_drawn : num_drawn + 1]
            assert reply.handle.num_tokens == len(prompt) + num_drawn
            del reply.token_ids[:]
            reply.token_ids.extend(expected[: num_drawn + 1])
            await stream.generate(key, reply)
            answer = await stream.collect(key)
            assert answer.token_ids == expected[num_drawn + 1 :]
            assert_handed_over(answer, len(prompt))
            await p.check()


async def test_logprobs_travel_with_their_tokens(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        prompt = prompt_of(9)
        key = await stream.reserve(p.reserve(prompt, max_tokens=4, logprobs=2))
        await stream.next(key)
        reply = await p.run_prefill(prompt, max_tokens=4, logprobs=2)
        await stream.generate(key, reply)
        entries = list(reply.logprobs)
        token_ids = list(reply.token_ids)
        finished = False
        while not finished:
            event = await stream.next(key)
            part = event.finished if event.HasField("finished") else event.tokens
            finished = event.HasField("finished")
            entries += part.logprobs
            token_ids += part.token_ids
        assert [entry.chosen.token_id for entry in entries] == token_ids
        assert all(len(entry.top) == 2 and entry.chosen.logprob <= 0 for entry in entries)
        await p.check()
