"""Decode reads the prefill worker's own cache: tokens exact, nothing of the prompt computed again,
and the store has it in the end; where it cannot be; and all lent blocks come back, however it ends.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from protos import common_pb2
from tests.conftest import third
from tests.harness.direct_pair import lender_of, on_devices
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.handles import blocks_of
from tests.harness.prefill_decode_pair import (
    WAIT_S,
    Answer,
    Pair,
    handover_of,
    pair,
    patient,
    whole,
)
from tests.harness.waiting import until
from tests.harness.worker_probe import HeldWrites, is_account

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

DIRECT = common_pb2.HANDOVER_PATH_DIRECT
STORE = common_pb2.HANDOVER_PATH_STORE
NUM_TOKENS = 30
FULL = NUM_TOKENS // BLOCK_SIZE


async def generate(p: Pair, prompt: Any, *, name: str = "r") -> Answer:
    """As a router does it that has chosen the direct way; the answer is exact."""
    answer = await p.generate(prompt, name=name, handover=DIRECT)
    assert answer.token_ids == p.expected(prompt, 8)
    return answer


def lender(p: Pair) -> str:
    """The node id under which prefill lends."""
    found: str = p.at_prefill.status().lender_node_id
    assert found
    return found


# ---- the way


@pytest.mark.parametrize("setting", ["remote_transport", "direct_transport"])
@pytest.mark.parametrize("transport", ["grpc", "nixl"])
async def test_decode_reads_the_prefill_workers_own_cache(
    tmp_path: Path, transport: str, setting: str
) -> None:
    options: dict[str, Any] = {setting: transport}
    async with pair(tmp_path, **options) as p:
        answer = await generate(p, p.new_prompt(NUM_TOKENS))
        reply = answer.prefill
        assert reply is not None and reply.leg.handover == DIRECT
        (run,) = reply.handle.runs
        assert run.node_id == lender(p) == reply.handle.tail.node_id
        assert run.store_address == p.prefill.address
        assert len(blocks_of(run)) == FULL and run.first_block == 0
        leg = answer.leg
        assert leg.num_tokens_computed == 0 and answer.recomputed == {}
        (count,) = leg.from_store
        assert (count.node_id, count.num_tokens) == (lender(p), NUM_TOKENS)
        assert count.tier == common_pb2.TIER_DEVICE
        # Not "shm", by which each of the two workers reaches its own store.
        assert leg.transport == count.transport == transport
        (moved,) = leg.transports
        assert (moved.transport, moved.num_bytes_read) == (transport, leg.num_bytes_read)
        assert leg.num_bytes_read > 0 == moved.num_bytes_written
        assert reply.leg.transport in ("", "shm")  # what it had written behind by then
        (link,) = [link for link in await p.at_decode.links() if link.node_id == lender(p)]
        assert (link.transport, link.problem, link.degraded) == (transport, "", False)
        assert p.at_decode.status().direct_transport == transport
        assert link.read_bytes_per_s > 0 == link.write_bytes_per_s
        await p.check()


async def test_decode_maps_the_prefill_workers_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No byte of the prompt passes through the store or a socket on its way to decode."""
    devices = on_devices(monkeypatch)
    async with pair(tmp_path, direct_transport="cuda_ipc", lend_mapped=True) as p:
        answer = await generate(p, p.new_prompt(NUM_TOKENS))
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        (count,) = answer.leg.from_store
        assert (count.node_id, count.num_tokens) == (lender(p), NUM_TOKENS)
        assert count.transport == answer.leg.transport == "cuda_ipc"
        (link,) = [link for link in await p.at_decode.links() if link.node_id == lender(p)]
        assert (link.transport, link.problem) == ("cuda_ipc", "")
        (mapped,) = devices[1].num_mapped.values()
        assert mapped == 1
        await p.check()
    assert list(devices[1].num_mapped.values()) == [0]


async def test_a_worker_that_lets_none_in_costs_the_way_and_not_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leg says why decode computed the prompt. The lease cannot be given back: it lapses."""
    on_devices(monkeypatch)
    limits = patient(lease_ttl_s=1.0)
    async with pair(tmp_path, direct_transport="cuda_ipc", limits=limits) as p:
        answer = await generate(p, p.new_prompt(NUM_TOKENS))
        assert answer.recomputed == {"transport": FULL + 1}
        await p.check()


async def test_every_sample_goes_on_from_one_lent_prompt(p: Pair) -> None:
    prompt = p.new_prompt(NUM_TOKENS)
    options: dict[str, Any] = {"n": 3, "temperature": 1.0}
    samples = await p.generate_samples(prompt, handover=DIRECT, **options)
    alone = p.alone(prompt, **options)
    assert [samples[index].token_ids for index in range(3)] == [each.token_ids for each in alone]
    leg = samples[0].leg
    assert leg is not None and leg.num_tokens_computed == 0
    assert [count.node_id for count in leg.from_store] == [lender(p)]


@pytest.mark.parametrize("num_tokens", [1, 4, 9, 60])
async def test_prompts_of_any_length(p: Pair, num_tokens: int) -> None:
    prompt = p.new_prompt(num_tokens)
    answer = await generate(p, prompt)
    assert answer.recomputed == {}
    assert answer.prefill is not None and answer.prefill.leg.handover == DIRECT
    await generate(p, prompt, name="again")


async def test_requests_that_share_a_prefix_lend_it_once(p: Pair) -> None:
    """One's end is not the other's."""
    prompt = p.new_prompt(NUM_TOKENS)
    other = (*prompt[:20], *p.new_prompt(9))
    first = await p.run_prefill(prompt, name="a", handover=DIRECT)
    second = await p.run_prefill(other, name="b", handover=DIRECT)
    assert second.leg.num_tokens_local == 20
    num_shared = 20 // BLOCK_SIZE
    num_alone = -(-len(prompt) // BLOCK_SIZE) + -(-len(other) // BLOCK_SIZE)
    assert p.at_prefill.num_lent_blocks == num_alone - num_shared
    p.at_prefill.release_loan(first.handle.runs[0].lease_id)
    answer = await p.decode_from(second, other, name="b")
    assert answer.token_ids == p.expected(other, 8)
    assert answer.leg.num_tokens_computed == 0


async def test_what_is_computed_is_read_meanwhile(tmp_path: Path) -> None:
    """By partial handles; prefill stands still until what they name is there. No put ends."""
    limits = patient(transfer_budget_s=WAIT_S, put_budget_s=WAIT_S)
    async with pair(tmp_path, limits=limits) as p:
        prompt = p.new_prompt(60)
        gate = p.at_prefill.home.hold("put")
        p.prefill_model.hold_at(3)
        async with p.reserved(prompt) as (stream, key):

            async def go_on(told: common_pb2.KvHandle) -> None:
                # It may be there before: decode asks the lender for what comes, too.
                num_named = told.num_tokens // BLOCK_SIZE
                await until(lambda: p.at_decode.num_blocks_read(key) >= num_named)
                await until(lambda: p.at_decode.states() == ["reserved"])
                p.prefill_model.allow(2)

            call = p.call(prompt, handover=DIRECT)
            firsts, account = await stream.forward(key, call, go_on)
            await stream.generate_from(key, handover_of(account, firsts))
            answer = await stream.collect(key)
        tokens = [token for first in firsts for token in first.token_ids]
        assert [*tokens, *answer.token_ids] == p.expected(prompt, 8)
        assert answer.leg.num_tokens_early >= 16
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert {count.node_id for count in answer.leg.from_store} == {lender(p)}
        assert account.leg.num_blocks_behind == len(prompt) // BLOCK_SIZE
        gate.open()
        p.prefill_model.release()
        await p.check()


async def test_the_first_token_does_not_wait_for_blocks_to_be_lent(p: Pair) -> None:
    """A long prefix that is here already is lent early, which reads all of it."""
    prompt = p.new_prompt(NUM_TOKENS)
    gate = p.at_prefill.hold_sealing()
    p.prefill_model.hold_at(2)  # the first step is what is lent early
    async with p.reserved(prompt) as (stream, key):
        call = p.call(prompt, handover=DIRECT)
        await until(p.prefill_model.is_held.is_set)
        await gate.wait_entered()
        p.prefill_model.release()
        messages = aiter(call)
        async with asyncio.timeout(WAIT_S):
            first = await anext(messages)
        assert list(first.token_ids) == p.expected(prompt, 1)
        gate.open()
        reply = await whole(messages)
        assert reply.leg.handover == DIRECT
        reply.MergeFrom(first)
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 0


# ---- and where it cannot be


async def test_a_worker_that_does_not_lend_uses_the_store_and_says_so(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(lend_blocks=False)) as p:
        status = p.at_prefill.status()
        assert status.lender_node_id == "" and status.remote_transport == "grpc"
        answer = await generate(p, p.new_prompt(NUM_TOKENS))
        assert answer.prefill is not None and answer.prefill.leg.handover == STORE
        (count,) = answer.leg.from_store
        assert count.node_id == (await p.store_status()).node_id
        await p.check()


@pytest.mark.parametrize(
    ("role", "options", "lends"),
    [
        ("prefill", {}, True),
        ("decode", {}, False),
        ("prefill", {"has_store": False}, False),
        ("prefill", {"preemption": "recompute"}, False),  # it might wait for what it has lent
    ],
)
async def test_which_worker_lends(
    tmp_path: Path, role: str, options: dict[str, Any], lends: bool
) -> None:
    assert bool(lender_of(tmp_path, role, **options)) == lends


@pytest.mark.parametrize("asked", [STORE, common_pb2.HANDOVER_PATH_UNSPECIFIED])
async def test_a_worker_that_is_not_asked_to_lend_does_not(p: Pair, asked: int) -> None:
    prompt, before = p.new_prompt(NUM_TOKENS), p.at_prefill.num_bytes_lent
    answer = await p.generate(prompt, handover=asked)
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.prefill is not None and answer.prefill.leg.handover == STORE
    assert lender(p) and p.at_prefill.num_bytes_lent == before


@pytest.mark.parametrize("is_released", [False, True])
async def test_trouble_with_lending_falls_to_the_store_and_is_told(
    p: Pair, is_released: bool
) -> None:
    p.at_prefill.break_sealing(is_released=is_released)
    answer = await generate(p, p.new_prompt(NUM_TOKENS))
    p.at_prefill.mend_sealing()
    assert answer.leg.num_tokens_computed == 0
    assert answer.prefill is not None and answer.prefill.leg.handover == STORE


async def test_bytes_that_changed_are_computed_again(p: Pair) -> None:
    prompt = p.new_prompt(NUM_TOKENS)
    async with p.reserved(prompt) as (stream, key):
        reply = await p.run_prefill(prompt, handover=DIRECT)
        frame = blocks_of(reply.handle.runs[0])[2].frame
        p.at_prefill.flip_bit(frame)
        answer = await stream.answer(key, reply)
        p.at_prefill.flip_bit(frame)
    assert answer.token_ids == p.expected(prompt, 8)
    assert set(answer.recomputed) == {"checksum"}


# ---- the store has it in the end, and costs the handover nothing


async def test_the_store_has_the_prompt_behind(p: Pair) -> None:
    """Its blocks stay until the put has read them, although decode has given the lease back."""
    prompt, before = p.new_prompt(NUM_TOKENS), p.at_prefill.not_stored_behind
    gate = p.at_prefill.home.hold("put")
    answer = await generate(p, prompt)
    reply = answer.prefill
    assert reply is not None
    assert reply.leg.num_blocks_behind == FULL and not reply.leg.not_stored
    await until(lambda: p.at_prefill.num_loans == 0)
    assert p.at_prefill.num_chains_behind == 1
    await until(lambda: p.at_prefill.num_quarantined_blocks >= 4)
    gate.open()
    await p.check()
    assert p.num_stored(prompt) == FULL
    assert p.at_prefill.not_stored_behind == before


@pytest.mark.parametrize("is_read", [True, False])
async def test_the_last_puts_wait_for_the_reader_but_not_for_ever(
    tmp_path: Path, is_read: bool
) -> None:
    """A prompt of one chunk: all of its blocks are the last step's."""
    limits = patient(put_budget_s=1e6, put_yield_s=1e5 if is_read else 0.01)
    async with pair(tmp_path, limits=limits) as p:
        prompt = p.new_prompt(6)
        reply = await p.run_prefill(prompt, handover=DIRECT)
        assert reply.leg.num_blocks_behind == 1
        if is_read:
            await until(lambda: p.at_prefill.num_chains_behind == 1)
            assert p.num_stored(prompt) == 0
        else:
            await until(lambda: p.num_stored(prompt) == 1)
        assert p.at_prefill.num_loans == 1
        p.at_prefill.release_loan(reply.handle.runs[0].lease_id)
        await until(lambda: p.num_stored(prompt) == 1)
        await p.check()


async def test_a_put_behind_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    async with pair(tmp_path, limits=patient(put_budget_s=0.3)) as p:
        prompt, gate = p.new_prompt(NUM_TOKENS), p.at_prefill.home.hold("put")
        await generate(p, prompt)
        await p.check()
        gate.open()
        assert p.at_prefill.not_stored_behind == {"deadline": FULL}
        await generate(p, prompt, name="again")
        await p.check()


async def test_a_store_that_is_away_costs_the_handover_nothing(tmp_path: Path) -> None:
    async with pair(tmp_path) as p:
        await p.kill_store()
        await until(lambda: not p.at_prefill.has_store)
        answer = await generate(p, p.new_prompt(NUM_TOKENS))
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert answer.prefill is not None
        (count,) = answer.prefill.leg.not_stored
        assert (count.reason, count.num_blocks) == ("store_unavailable", FULL)
        await p.check()


# ---- all lent blocks come back


@pytest.mark.parametrize("transport", third(["grpc", "nixl"]))
async def test_many_at_once_with_little_room_and_some_that_leave(
    tmp_path: Path, transport: str, seed: int, scale: Callable[[int], int]
) -> None:
    """They share prefixes, and a third is cancelled or never taken up."""
    draw = random.Random(seed)
    options: dict[str, Any] = {"prefill_blocks": 64, "remote_transport": transport}
    async with pair(tmp_path, limits=patient(lease_ttl_s=1.0), **options) as p:

        async def one(number: int, num_shared: int, num_own: int, fate: float) -> None:
            prompt = (*prompt_of(num_shared, start=2), *prompt_of(num_own, start=number))
            name = f"r{number}"
            if fate > 0.7:
                await generate(p, prompt, name=name)
                return
            call = p.call(prompt, name=name, handover=DIRECT)
            if fate > 0.5:
                await whole(call)  # the lease lapses
                return
            await asyncio.sleep(fate / 20)
            call.cancel()
            await call.error()  # or the account crossed it: then its lease lapses, too

        num_rounds = 0
        while num_rounds < scale(60) or p.at_prefill.num_blocks_ever_lent <= 100:
            assert num_rounds < 20 * scale(60), p.at_prefill.num_blocks_ever_lent
            num_rounds += 1
            fates = [draw.choice([0.1, 0.3, 0.6, 0.8, 0.8, 0.8]) for _ in range(8)]
            asked = [(draw.randint(0, 40), draw.randint(1, 60), fate) for fate in fates]
            await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked)))
        await p.check()


async def test_a_handle_that_never_reached_the_router_is_taken_back_and_its_prompt_is_stored(
    p: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream breaks while the account waits to be written."""
    prompt, before = p.new_prompt(NUM_TOKENS), p.at_prefill.not_stored_behind
    writes, gate = HeldWrites(monkeypatch, until=is_account), p.at_prefill.home.hold("put")
    ask = p.prefill_request(prompt, handover=DIRECT)
    # The lease would live longer than any wait here.
    call = p.call(ask, timeout_s=6 * WAIT_S)
    await writes.wait_held()
    assert p.at_prefill.num_loans == 1 and p.at_prefill.num_lent_blocks == FULL + 1
    call.vanish()
    await until(lambda: p.at_prefill.num_loans == 0)
    await until(lambda: p.at_prefill.num_quarantined_blocks >= 4)
    gate.open()
    await p.check()
    assert p.num_stored(prompt) == FULL and p.at_prefill.not_stored_behind == before


@pytest.mark.parametrize("how", ["never taken", "given up by decode"])
async def test_a_dead_decode_workers_blocks_come_back(tmp_path: Path, how: str) -> None:
    """Its lease lapses; one that is cancelled gives it back."""
    limits = patient(lease_ttl_s=0.5 if how == "never taken" else 300.0)
    async with pair(tmp_path, limits=limits) as p:
        prompt = p.new_prompt(NUM_TOKENS)
        reply = await p.run_prefill(prompt, handover=DIRECT)
        assert reply.leg.handover == DIRECT
        if how == "given up by decode":
            async with p.reserved(prompt) as (stream, key):
                p.decode_model.hold()
                await stream.generate(key, reply)
                await stream.end(key)
                p.decode_model.release()
        await p.check()
        assert (await generate(p, p.new_prompt(35), name="after")).leg.num_tokens_computed == 0
        await p.check()


async def test_a_prefill_worker_that_stops_has_all_blocks_back(tmp_path: Path) -> None:
    """With a handle out that none took, and a put behind under way."""
    async with pair(tmp_path) as p:
        gate = p.at_prefill.home.hold("put")
        await p.run_prefill(p.new_prompt(NUM_TOKENS), handover=DIRECT)
        assert p.at_prefill.num_lent_blocks == FULL + 1
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.at_prefill.is_draining)
        gate.open()
        await stopping
        assert p.at_prefill.num_lent_blocks == p.at_prefill.num_loans == 0
        await p.at_prefill.unreferenced(is_engine_dead=True)


async def test_a_prefill_worker_that_is_gone_costs_recomputation_only(tmp_path: Path) -> None:
    """A new life of it is met, which an old handle never reads from."""
    async with pair(tmp_path) as p:
        prompt = p.new_prompt(NUM_TOKENS)

        async def decoded(name: str, reply: Any, reasons: set[str]) -> None:
            """The answer is exact, whatever could not be read; that is counted under `reasons`."""
            answer = await p.decode_from(reply, prompt, name=name)
            assert answer.token_ids == p.expected(prompt, 8)
            assert set(answer.recomputed) <= reasons
            assert bool(answer.recomputed) == bool(reasons)

        warm = await generate(p, p.new_prompt(20), name="warm")
        assert warm.leg.num_tokens_computed == 0
        old = [await p.run_prefill(prompt, name=f"r{i}", handover=DIRECT) for i in range(2)]
        await p.prefill.stop()
        await decoded("r0", old[0], {"store_unavailable"})
        async with p.next_prefill_life():
            await decoded("r1", old[1], {"incarnation", "store_unavailable"})
            reply = await p.run_prefill(prompt, name="new", handover=DIRECT)
            assert reply.leg.handover == DIRECT
            # The way to the new life is tried again after a back-off.
            await until(lambda: p.at_decode.can_reach(reply.handle))
            await decoded("new", reply, set())
