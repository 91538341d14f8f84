"""A handle whose blocks lie in other nodes' stores: each part is fetched from its own store, over
the transport for other nodes, and its lease given back there; what cannot be had is computed again
and counted. What decode fills goes to its own store, behind the prompt.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from protos import common_pb2
from tests.harness.handles import blocks_of, partial, sign, split
from tests.harness.prefill_decode_pair import Answer, Pair, pair
from tests.harness.waiting import until

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 30
NUM_BLOCKS = 8  # seven full ones and the tail
SIZE = 4
HOME = "decode-home"

Spoil = Callable[[common_pb2.KvHandle], Awaitable[None]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def p(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    """Prefill beside its store, and a decode worker that has another store at home."""
    async with pair(tmp_path_factory.mktemp("pair"), has_two_nodes=True) as made:
        yield made


@pytest.fixture
def far(p: Pair) -> str:
    """The prefill worker's node."""
    return p.node_id


def from_store(answer: Answer) -> dict[str, int]:
    """Tokens by the node that they came from."""
    return {count.node_id: count.num_tokens for count in answer.leg.from_store}


def transports(answer: Answer) -> dict[str, str]:
    """By the node that was read."""
    return {count.node_id: count.transport for count in answer.leg.from_store}


async def generate(p: Pair, prompt: Sequence[int], spoil: Spoil | None = None) -> Answer:
    """A request whose handle may be spoiled, and is signed again."""
    async with p.reserved(prompt) as (stream, key):
        reply = await p.run_prefill(prompt)
        if spoil is not None:
            await spoil(reply.handle)
            sign(p, reply.handle)
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    leg = answer.leg
    num_from_store = sum(from_store(answer).values())
    assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(prompt)
    return answer


async def forget(p: Pair) -> None:
    """Push everything out of decode's device cache; its store keeps it, once it has it."""
    await p.check()
    for _ in range(5):
        async with p.reserved(p.new_prompt(200), name="filler", max_tokens=40) as (stream, key):
            await stream.compute(key)
            await stream.collect(key)
    await p.check()


async def failed_writes(p: Pair) -> dict[tuple[str, ...], float]:
    """Blocks that decode's puts failed to store, by reason."""
    shown = await p.at_decode.metrics()
    return {
        name: value
        for name, value in shown.items()
        if name[0] == "baton_transfer_failed_blocks_total" and "write" in name and value
    }


async def put_again(p: Pair) -> float:
    """Blocks that decode put again with what they follow."""
    shown = await p.at_decode.metrics()
    return sum(shown[name] for name in shown if name[0] == "baton_transfer_put_again_blocks_total")


async def test_another_nodes_blocks_are_fetched_from_there(p: Pair, far: str) -> None:
    prompt, before = p.new_prompt(NUM_TOKENS), p.at_decode.count("baton_kv_written_back_blocks")
    answer = await generate(p, prompt)
    assert from_store(answer) == {far: NUM_TOKENS} and answer.recomputed == {}
    assert answer.leg.num_tokens_computed == 0
    assert transports(answer) == {far: "grpc"} and answer.leg.transport == "grpc"
    await p.check()  # the lease was given back there
    # The prompt came into decode's own store before the answer.
    text = [*prompt, *answer.token_ids]
    assert p.num_stored(text, p.decode_store) == (NUM_TOKENS + 7) // SIZE
    assert p.at_decode.count("baton_kv_written_back_blocks") == before + 2
    assert await failed_writes(p) == {}  # it was not tried without the prompt first


async def test_a_put_whose_parent_the_store_lost_is_put_again_with_it(p: Pair) -> None:
    """The prompt was taken to be at home and is not any more: the put is refused, the chain is
    stored from its beginning, and that is counted apart: no transfer failed."""
    prompt = p.new_prompt(NUM_TOKENS)

    async def lose(handle: common_pb2.KvHandle) -> None:
        await split(p, handle, at=7)
        p.lose_chain(prompt, p.decode_store)

    await generate(p, prompt)
    await p.check()
    answer = await generate(p, prompt, lose)
    await p.check()
    text = [*prompt, *answer.token_ids]
    assert p.num_stored(text, p.decode_store) == (NUM_TOKENS + 7) // SIZE
    assert await failed_writes(p) == {} and await put_again(p) > 0


async def test_a_handle_of_two_stores_is_fetched_from_both(p: Pair, far: str) -> None:
    prompt = p.new_prompt(NUM_TOKENS)
    await generate(p, prompt)
    await forget(p)
    answer = await generate(p, prompt, lambda handle: split(p, handle))
    assert from_store(answer) == {HOME: 16, far: 14} and answer.recomputed == {}
    assert transports(answer) == {HOME: "shm", far: "grpc"}
    assert answer.leg.transport == "grpc, shm"
    assert answer.leg.num_tokens_computed == 0
    await p.check()


async def test_what_lies_behind_a_store_that_is_gone_is_computed(tmp_path: Path) -> None:
    async with pair(tmp_path, has_two_nodes=True) as p:
        prompt = p.new_prompt(NUM_TOKENS)
        await generate(p, prompt)
        await forget(p)

        async def in_two(handle: common_pb2.KvHandle) -> None:
            way = await p.at_decode.way_by(handle)
            await split(p, handle)
            await p.kill_store()
            await until(lambda: way.is_broken)

        answer = await generate(p, prompt, in_two)
        assert from_store(answer) == {HOME: 16}
        assert answer.recomputed == {"store_unavailable": 4}
        await p.check()


async def test_a_store_in_another_life_is_not_used(p: Pair) -> None:
    """Nothing that may gives its lease back: it lapses by itself."""
    given: list[common_pb2.KvHandle] = []

    async def other_life(handle: common_pb2.KvHandle) -> None:
        given.append(common_pb2.KvHandle())
        given[0].CopyFrom(handle)
        for run in (handle.runs[0], handle.tail):
            run.store_incarnation = secrets.token_bytes(16)

    answer = await generate(p, p.new_prompt(NUM_TOKENS), other_life)
    assert answer.recomputed == {"incarnation": NUM_BLOCKS} and from_store(answer) == {}
    await p.check_store(leases=1)
    p.at_prefill.release_later(*given)
    await p.check()
    await p.at_decode.forget_ways()


async def test_a_bad_block_of_another_node_is_computed(p: Pair, far: str) -> None:
    async def flip(handle: common_pb2.KvHandle) -> None:
        p.flip_bit(blocks_of(handle.runs[0])[2])

    answer = await generate(p, p.new_prompt(NUM_TOKENS), flip)
    assert answer.recomputed == {"checksum": 6} and from_store(answer) == {far: 8}
    await p.check()


async def test_without_a_transport_for_other_nodes_nothing_is_pulled(tmp_path: Path) -> None:
    async with pair(tmp_path, has_two_nodes=True, remote_transport="") as p:
        answer = await generate(p, p.new_prompt(NUM_TOKENS))
        assert answer.recomputed == {"store_unavailable": NUM_BLOCKS}
        await p.check_store(leases=1)  # there is no way to give it back


async def test_early_pulls_come_from_other_nodes_too(p: Pair, far: str) -> None:
    prompt = p.new_prompt(NUM_TOKENS)
    reply = await p.run_prefill(prompt)
    gate = (await p.at_decode.way_by(reply.handle)).hold("get")
    async with p.reserved(prompt) as (stream, key):
        await stream.prefetch(key, partial(p, reply.handle, 5))
        await gate.wait_entered()
        await stream.generate(key, reply)
        gate.open()
        answer = await stream.collect(key)
    assert [*reply.token_ids, *answer.token_ids] == p.expected(prompt, 8)
    assert from_store(answer) == {far: NUM_TOKENS}
    assert answer.leg.num_tokens_early == 20
    await p.check()


@pytest.mark.parametrize("how", ["cancel", "stream"])
async def test_a_cancel_in_the_middle_of_a_pull_from_another_node(p: Pair, how: str) -> None:
    """Quarantine first; the lease goes back to the store that granted it."""
    prompt = p.new_prompt(NUM_TOKENS)
    reply = await p.run_prefill(prompt)
    way = await p.at_decode.way_by(reply.handle)
    late = way.uncallable_gets()
    async with p.reserved(prompt) as (stream, key):
        await stream.generate(key, reply)
        await late.wait_entered()
        if how == "cancel":
            await stream.cancel(key)
            assert (await stream.collect(key)).finished is not None
        else:
            await stream.close()
    await p.at_decode.quarantined(NUM_BLOCKS)
    late.settle()
    await p.at_decode.quarantined(0)
    way.restore("get")
    await p.check()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_cancel_while_the_other_store_is_being_met(tmp_path: Path, stops: bool) -> None:
    """The lease goes back all the same; a worker that stops meets the store for it."""
    async with pair(tmp_path, has_two_nodes=True) as p:
        prompt = p.new_prompt(NUM_TOKENS)
        reply = await p.run_prefill(prompt)
        gate: Any = p.at_decode.hold_meeting()
        async with p.reserved(prompt) as (stream, key):
            await stream.generate(key, reply)
            await gate.wait_entered()
            await stream.cancel(key)
            assert (await stream.collect(key)).finished is not None
        assert (await p.store_status()).num_leases == 1
        gate.open()
        if stops:
            await p.decode.stop()
            assert (await p.store_status()).num_leases == 0
        else:
            await p.check()
