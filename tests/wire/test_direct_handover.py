"""Decode reads the prefill worker's own cache: tokens exact, nothing of the prompt computed again,
the store written behind; and all lent blocks come back, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from kvstore import errors
from kvstore.lending import is_lender, lender_node_id
from kvstore.transport.base import BlockMemory
from process import keys, serving
from process.deadline import Deadline
from process.errors import Cancelled, DeadlineExceeded
from protos import common_pb2, prefill_pb2_grpc
from services.decode.states import DecodeState
from services.prefill import puts_behind
from services.prefill.handover import PrefillAnswer
from services.prefill.job import Firsts, PrefillState
from services.prefill.pins import Pins
from services.prefill.role import PrefillRole
from services.worker import handle as handles
from services.worker import links, main, request_spans, store_target
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.core import WorkerCore
from services.worker.identity import Identity
from tests.conformance.fake_device import FakeDevice
from tests.deadlines import Deadlines
from tests.handle_blocks import blocks_of
from tests.unit.worker.builders import BLOCK_SIZE, GATE_S, fake_engine, prompt_of
from tests.wire.decode_movers import hold_at
from tests.wire.partial_handles import prefetch
from tests.wire.prefill_call import KEY, PrefillCall
from tests.wire.prefill_decode_pair import WAIT_S, Answer, Gate, Pair, handover, pair, until, whole

DIRECT = common_pb2.HANDOVER_PATH_DIRECT
STORE = common_pb2.HANDOVER_PATH_STORE
PROMPT = prompt_of(30, start=3)
FULL = len(PROMPT) // BLOCK_SIZE


@contextlib.asynccontextmanager
async def direct(folder: Path, **options: Any) -> AsyncIterator[Pair]:
    """A pair that has met: what lends blocks to be measured with has them back."""
    async with pair(folder, **options) as p:
        yield p
        await all_back(p)


async def all_back(p: Pair) -> None:
    """No block is lent or held, and every law holds."""
    await until(lambda: p.prefill_role.worker.behind.num_writers == 0)
    lender = p.prefill.core.lender
    if lender is not None:
        await until(lambda: lender.num_lent_blocks == lender.loans.num_leases == 0)
    await p.check()


async def generate(
    p: Pair, prompt: Any, *, name: str = "r", handover: int = DIRECT, max_tokens: int = 8
) -> Answer:
    """As a router does it that has chosen the direct way."""
    async with p.stream() as stream:
        key = await stream.reserve(p.reserve(prompt, name=name, max_tokens=max_tokens))
        assert (await stream.next(key)).WhichOneof("event") == "reserved"
        reply = await p.run_prefill(prompt, name=name, handover=handover, max_tokens=max_tokens)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
    answer.prefill = reply
    answer.token_ids[:0] = reply.token_ids
    return answer


@pytest.fixture
def patient_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need more for its measurements than a link that is well."""
    monkeypatch.setattr(links, "PATIENT_BUDGET_S", WAIT_S)


@pytest.mark.parametrize("transport", ["grpc", "nixl"])
async def test_decode_reads_the_prefill_workers_own_cache(
    tmp_path: Path, transport: str, patient_links: None
) -> None:
    async with direct(tmp_path, remote_transport=transport) as p:
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        reply = answer.prefill
        assert reply is not None and reply.leg.handover == DIRECT
        (run,) = reply.handle.runs
        assert run.node_id == lender_node_id("prefill-0") == reply.handle.tail.node_id
        assert run.store_address == p.prefill.address
        assert len(blocks_of(run)) == FULL and run.first_block == 0
        leg = answer.leg
        assert leg.num_tokens_computed == 0 and answer.recomputed == {}
        (count,) = leg.from_store
        assert (count.node_id, count.num_tokens) == (lender_node_id("prefill-0"), len(PROMPT))
        assert count.tier == common_pb2.TIER_DEVICE
        await p.decode.core.links.settle()
        (link,) = [
            link
            for link in (await p.decode.core.checked_status()).links
            if link.node_id == lender_node_id("prefill-0")
        ]
        assert (link.transport, link.problem, link.degraded) == (transport, "", False)
        assert link.read_bytes_per_s > 0 == link.write_bytes_per_s


def on_devices(monkeypatch: pytest.MonkeyPatch) -> list[FakeDevice]:
    """Every worker's cache lies on a device of its own from now on; in the order of workers."""
    devices: list[FakeDevice] = []

    def block_memory(kv: Any) -> BlockMemory:
        devices.append(device := FakeDevice())
        address = device.holding(kv.host_view)
        return BlockMemory.on_device(device, address, kv.layout.block_bytes, kv.num_blocks)

    monkeypatch.setattr(store_target, "block_memory", block_memory)
    monkeypatch.setattr(store_target, "check_transports", lambda *_: None)
    return devices


async def test_decode_maps_the_prefill_workers_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patient_links: None
) -> None:
    """No byte of the prompt passes through the store or a socket on its way to decode."""
    devices = on_devices(monkeypatch)
    async with direct(tmp_path, direct_transport="cuda_ipc", lend_mapped=True) as p:
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        (count,) = answer.leg.from_store
        assert (count.node_id, count.num_tokens) == (lender_node_id("prefill-0"), len(PROMPT))
        await p.decode.core.links.settle()
        (link,) = [link for link, _ in p.decode.core.links.links if is_lender(link.node_id)]
        assert (link.transport, link.problem) == ("cuda_ipc", "")
        (mapped,) = devices[1].num_mapped.values()
        assert mapped == 1
    assert list(devices[1].num_mapped.values()) == [0]


async def test_a_worker_that_lets_nobody_in_costs_the_way_and_not_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leg says why decode computed the prompt. Nobody can give the lease back: it lapses."""
    on_devices(monkeypatch)
    limits = WorkerLimits(store_wait_s=WAIT_S, lease_ttl_s=1.0, drain_s=0.2)
    async with direct(tmp_path, direct_transport="cuda_ipc", limits=limits) as p:
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.recomputed == {errors.TRANSPORT: FULL + 1}


async def test_every_sample_goes_on_from_one_lent_prompt(tmp_path: Path) -> None:
    async with direct(tmp_path) as p:
        options: dict[str, Any] = {"n": 3, "temperature": 1.0}
        ask = p.prefill_request
        p.prefill_request = lambda prompt, **more: ask(  # type: ignore[method-assign]
            prompt, handover=DIRECT, **more
        )
        samples = await p.generate_samples(PROMPT, **options)
        alone = p.alone(PROMPT, **options)
        assert [samples[index].token_ids for index in range(3)] == [
            each.token_ids for each in alone
        ]
        leg = samples[0].leg
        assert leg is not None and leg.num_tokens_computed == 0
        assert [count.node_id for count in leg.from_store] == [lender_node_id("prefill-0")]


@pytest.mark.parametrize("num_tokens", [1, 4, 9, 60])
async def test_prompts_of_any_length(tmp_path: Path, num_tokens: int) -> None:
    async with direct(tmp_path) as p:
        prompt = prompt_of(num_tokens, start=5)
        answer = await generate(p, prompt)
        assert answer.token_ids == p.expected(prompt, 8) and answer.recomputed == {}
        assert answer.prefill is not None and answer.prefill.leg.handover == DIRECT
        again = await generate(p, prompt, name="again")
        assert again.token_ids == answer.token_ids


async def test_requests_that_share_a_prefix_lend_it_once(tmp_path: Path) -> None:
    """One's end is not the other's."""
    async with direct(tmp_path) as p:
        other = (*PROMPT[:20], *prompt_of(9, start=40))
        first = await p.run_prefill(PROMPT, name="a", handover=DIRECT)
        second = await p.run_prefill(other, name="b", handover=DIRECT)
        assert second.leg.num_tokens_local == 20
        lender = p.prefill.core.lender
        assert lender is not None
        num_shared = 20 // BLOCK_SIZE
        num_alone = -(-len(PROMPT) // BLOCK_SIZE) + -(-len(other) // BLOCK_SIZE)
        assert lender.num_lent_blocks == num_alone - num_shared
        lender.release(first.handle.runs[0].lease_id)
        async with p.stream() as stream:
            key = await stream.reserve(p.reserve(other, name="b"))
            await stream.next(key)
            await stream.generate(key, second)
            answer = await stream.collect(key)
        assert [*second.token_ids, *answer.token_ids] == p.expected(other, 8)
        assert answer.leg.num_tokens_computed == 0


async def test_what_is_computed_is_read_meanwhile(tmp_path: Path) -> None:
    """Prefill's own partial handles, as the router forwards them; it stands still after two steps
    until what they name is there. Nothing waits for the store: its puts are held."""
    prompt = prompt_of(60, start=3)
    limits = WorkerLimits(
        store_wait_s=WAIT_S,
        lease_ttl_s=2 * WAIT_S,
        transfer_budget_s=WAIT_S,
        put_budget_s=WAIT_S,
        drain_s=0.2,
    )
    async with direct(tmp_path, limits=limits) as p, p.stream() as stream:
        gate = Gate(p.prefill.core.connector.client, "put_blocks")
        steps = threading.Semaphore(2)
        forward = p.prefill_model.forward

        def in_turn(batch: Batch) -> torch.Tensor:
            assert steps.acquire(timeout=GATE_S)
            return forward(batch)

        p.prefill_model.forward = in_turn  # type: ignore[method-assign]
        key = await stream.reserve(p.reserve(prompt))
        await stream.next(key)
        ask = p.prefill_request(prompt, handover=DIRECT)
        call = PrefillCall(p.prefill_stub, ask, timeout_s=WAIT_S)
        rest = []
        lender = p.prefill.core.lender
        assert lender is not None
        frame_bytes = lender.loans.frame_bytes
        (request,) = p.decode_role.worker._requests.values()
        async for message in call:
            if not message.handle.is_partial:
                rest.append(message)
                continue
            await prefetch(stream, key, message.handle)
            # It may be there before: decode asks the lender for what comes, too.
            num_named = message.handle.num_tokens // BLOCK_SIZE
            await until(lambda n=num_named: request._leg.num_bytes_read >= n * frame_bytes)
            await until(
                lambda: list(p.decode_role.worker.states.values()) == [DecodeState.RESERVED]
            )
            steps.release(2)
        *firsts, account = rest
        await stream.generate_from(key, handover(account, firsts))
        answer = await stream.collect(key)
        tokens = [token for first in firsts for token in first.token_ids]
        assert [*tokens, *answer.token_ids] == p.expected(prompt, 8)
        assert answer.leg.num_tokens_early >= 16
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert {count.node_id for count in answer.leg.from_store} == {lender.node_id}
        assert account.leg.num_blocks_behind == len(prompt) // BLOCK_SIZE
        gate.open()


async def test_the_first_token_does_not_wait_for_blocks_to_be_lent(tmp_path: Path) -> None:
    """A long prefix that is here already is lent early, which reads all of it."""
    async with direct(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        gate = Gate(p.prefill.core.lender, "seal")
        hold_at(p.prefill_model, 2)  # the first step is what is lent early
        call = PrefillCall(
            p.prefill_stub, p.prefill_request(PROMPT, handover=DIRECT), timeout_s=WAIT_S
        )
        await until(p.prefill_model.is_held.is_set)
        await gate.wait_entered()
        p.prefill_model.release()
        messages = aiter(call)
        async with asyncio.timeout(WAIT_S):
            first = await anext(messages)
        assert list(first.token_ids) == p.expected(PROMPT, 1)
        gate.open()
        reply = await whole(messages)
        assert reply.leg.handover == DIRECT
        reply.MergeFrom(first)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_computed == 0


# ---- the store behind


def stored(p: Pair, reply: Any) -> list[bool]:
    """Whether each full block of the handle lies in the store."""
    hashes = [block.chain_hash for block in blocks_of(reply.handle.runs[0])]
    return [p.store.node.store.catalog.find(each) is not None for each in hashes]


async def test_the_store_has_the_prompt_behind(tmp_path: Path) -> None:
    """The handle goes out while the put is held, and its blocks stay although decode has read them
    and given the lease back; then the put ends and the store has them."""
    async with direct(tmp_path) as p:
        client = p.prefill.core.connector.client
        gate = Gate(client, "put_blocks")
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        reply, lender = answer.prefill, p.prefill.core.lender
        assert reply is not None and lender is not None
        assert reply.leg.num_blocks_behind == FULL and not reply.leg.not_stored
        await until(lambda: lender.loans.num_leases == 0)
        assert lender.num_lent_blocks == FULL
        assert p.prefill_role.worker.behind.num_writers == 1
        gate.open()
        await all_back(p)
        assert stored(p, reply) == [True] * FULL
        assert not p.prefill_role.worker.behind.not_stored


@pytest.mark.parametrize("is_read", [True, False])
async def test_the_last_puts_wait_for_whoever_reads_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read: bool
) -> None:
    """A prompt of one chunk: all of its blocks are the last step's."""
    monkeypatch.setattr(puts_behind, "YIELD_S", 1e9 if is_read else 0.01)
    limits = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, put_budget_s=1e10)
    async with direct(tmp_path, limits=limits) as p:
        reply = await p.run_prefill(PROMPT[:6], handover=DIRECT)
        lender = p.prefill.core.lender
        assert lender is not None and reply.leg.num_blocks_behind == 1
        if is_read:
            await until(lambda: p.prefill_role.worker.behind.num_writers == 1)
            assert stored(p, reply) == [False] and lender.loans.num_leases == 1
        else:
            await until(lambda: stored(p, reply) == [True])
            assert lender.loans.num_leases == 1
        lender.release(reply.handle.runs[0].lease_id)
        await until(lambda: stored(p, reply) == [True])


async def test_a_put_behind_that_takes_too_long_is_given_up(tmp_path: Path) -> None:
    limits = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, put_budget_s=0.3)
    async with direct(tmp_path, limits=limits) as p:
        gate = Gate(p.prefill.core.connector.client, "put_blocks")
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        await all_back(p)
        gate.open()
        assert p.prefill_role.worker.behind.not_stored == {errors.DEADLINE: FULL}
        assert (await generate(p, PROMPT, name="again")).token_ids == answer.token_ids


async def test_a_store_that_is_away_costs_the_handover_nothing(tmp_path: Path) -> None:
    async with direct(tmp_path) as p:
        client = p.prefill.core.connector.client
        assert client is not None
        await p.kill_store()
        await until(lambda: p.prefill.core.connector.client is None)
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert answer.prefill is not None
        (count,) = answer.prefill.leg.not_stored
        assert (count.reason, count.num_blocks) == (errors.STORE_UNAVAILABLE, FULL)


# ---- where it cannot be


async def test_a_worker_that_does_not_lend_uses_the_store_and_says_so(tmp_path: Path) -> None:
    limits = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, lend_blocks=False)
    async with direct(tmp_path, limits=limits) as p:
        status = await p.prefill.core.checked_status()
        assert status.lender_node_id == "" and status.remote_transport == "grpc"
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.prefill is not None and answer.prefill.leg.handover == STORE
        assert [count.node_id for count in answer.leg.from_store] == [p.store.node.node_id]


@pytest.mark.parametrize(
    ("role", "has_store", "preemption", "lends"),
    [
        ("prefill", True, "never", True),
        ("decode", True, "never", False),
        ("prefill", False, "never", False),
        ("prefill", True, "recompute", False),  # it might wait for blocks that it has lent
    ],
)
def test_who_lends(
    tmp_path: Path, role: str, has_store: bool, preemption: str, lends: bool
) -> None:
    key_file = tmp_path / "handle.keys"
    keys.create(key_file)
    settings = WorkerSettings(
        store_address="127.0.0.1:1" if has_store else "",
        handle_keys_file=str(key_file),
        engine=EngineConfig(preemption=preemption),
    )
    core = WorkerCore(fake_engine(preemption=preemption), settings, Identity.new(role, "w"))
    assert core.status().lender_node_id == (lender_node_id("w") if lends else "")


@pytest.mark.parametrize("asked", [STORE, common_pb2.HANDOVER_PATH_UNSPECIFIED])
async def test_who_is_not_asked_to_lend_does_not(tmp_path: Path, asked: int) -> None:
    async with direct(tmp_path) as p:
        assert p.prefill.core.status().lender_node_id == lender_node_id("prefill-0")
        answer = await generate(p, PROMPT, handover=asked)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.prefill is not None and answer.prefill.leg.handover == STORE
        assert p.prefill.core.lender is not None
        assert p.prefill.core.lender.loans.counters.num_bytes_read == 0


@pytest.mark.parametrize("how", ["fails", "released by another"])
async def test_trouble_with_lending_falls_to_the_store_and_is_told(
    tmp_path: Path, how: str
) -> None:
    async with direct(tmp_path) as p:
        lender = p.prefill.core.lender
        assert lender is not None
        real = lender.seal

        async def troubled(lease_id: str) -> Any:
            if how == "fails":
                raise errors.TransferFailed("the test says so")
            sealed = await real(lease_id)
            lender.release(lease_id)
            return sealed

        lender.seal = troubled  # type: ignore[method-assign]
        answer = await generate(p, PROMPT)
        assert answer.token_ids == p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_computed == 0
        assert answer.prefill is not None and answer.prefill.leg.handover == STORE


async def test_bytes_that_changed_are_computed_again(tmp_path: Path) -> None:
    async with direct(tmp_path) as p, p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        reply = await p.run_prefill(PROMPT, handover=DIRECT)
        lender = p.prefill.core.lender
        assert lender is not None
        frame = blocks_of(reply.handle.runs[0])[2].frame
        lender.lender.memory.view[frame, 5] ^= 1
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        lender.lender.memory.view[frame, 5] ^= 1
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert set(answer.recomputed) == {errors.CHECKSUM}


# ---- however it ends

STATES = {
    "queued": PrefillState.QUEUED,
    "matching": PrefillState.FETCHING,
    "computing": PrefillState.COMPUTING,
    "early": PrefillState.COMPUTING,
    "lending": PrefillState.STORING,
}


@contextlib.asynccontextmanager
async def held_in(p: Pair, state: str) -> AsyncIterator[Any]:
    """A Prefill call on PROMPT that stays in `state`; the way is free again at the end."""
    gate: Gate | None = None
    filler: asyncio.Task[Any] | None = None
    if state == "queued":
        p.prefill_model.hold()
        long = prompt_of(250, start=9)
        filler = asyncio.create_task(p.run_prefill(long, name="filler", wants_handle=False))
        await until(p.prefill_model.is_held.is_set)
    elif state == "matching":
        gate = Gate(p.prefill.core.connector.client, "match")
    elif state == "computing":
        p.prefill_model.hold()
    else:
        gate = Gate(p.prefill.core.lender, "seal")
    steps = threading.Semaphore(1 if state == "early" else 1000)
    forward = p.prefill_model.forward

    def in_turn(batch: Batch) -> torch.Tensor:
        assert steps.acquire(timeout=GATE_S)
        return forward(batch)

    p.prefill_model.forward = in_turn  # type: ignore[method-assign]
    # One step: there is no partial handle.
    prompt = PROMPT[:10] if state == "lending" else PROMPT
    ask = p.prefill_request(prompt, handover=DIRECT)
    call = PrefillCall(p.prefill_stub, ask, timeout_s=WAIT_S)
    try:
        if gate is not None:
            await gate.wait_entered()
        await until(lambda: STATES[state] in p.prefill_role.worker.states.values())
        yield call
    finally:
        p.prefill_model.release()
        steps.release(1000)
        if gate is not None:
            gate.open()
        if filler is not None:
            await filler
        call.vanish()


async def assert_served(p: Pair) -> None:
    """The worker is as good as new."""
    prompt = prompt_of(35, start=8)
    answer = await generate(p, prompt, name="after")
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 0


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("state", STATES)
async def test_ended_in_each_state_nothing_stays_lent(
    tmp_path: Path, state: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadlines = Deadlines(monkeypatch)
    async with direct(tmp_path, prefill_blocks=64) as p:
        async with held_in(p, state) as call:
            if how == "cancel":
                call.cancel()
            else:
                deadlines.end_newest(f"prefill {KEY}")
            with pytest.raises(Cancelled if how == "cancel" else DeadlineExceeded):
                await asyncio.wait_for(whole(call), WAIT_S)
        await all_back(p)
        await assert_served(p)


@pytest.mark.parametrize("transport", ["grpc", "nixl"])
async def test_many_at_once_with_little_room_and_some_that_leave(
    tmp_path: Path, transport: str, seed: int, scale: Callable[[int], int]
) -> None:
    """Prompts that share prefixes, more of them than fit, and a third is cancelled or never taken
    up: every answer is exact, and every block comes back."""
    limits = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, lease_ttl_s=1.0)
    draw = random.Random(seed)
    options: dict[str, Any] = {"prefill_blocks": 64, "remote_transport": transport}
    async with direct(tmp_path, limits=limits, **options) as p:

        async def one(number: int, num_shared: int, num_own: int, fate: float) -> None:
            prompt = (*prompt_of(num_shared, start=2), *prompt_of(num_own, start=number))
            name = f"r{number}"
            if fate > 0.7:
                answer = await generate(p, prompt, name=name)
                assert answer.token_ids == p.expected(prompt, 8)
                return
            ask = p.prefill_request(prompt, name=name, handover=DIRECT)
            call = PrefillCall(p.prefill_stub, ask, timeout_s=WAIT_S)
            if fate > 0.5:
                await whole(call)  # the lease lapses
                return
            await asyncio.sleep(fate / 20)
            call.cancel()
            await call.error()  # or the account crossed it: then its lease lapses, too

        lender = p.prefill.core.lender
        assert lender is not None
        num_rounds = 0
        while num_rounds < scale(60) or lender.loans.counters.num_blocks_lent <= 100:
            assert num_rounds < 20 * scale(60), lender.loans.counters.num_blocks_lent
            num_rounds += 1
            fates = [draw.choice([0.1, 0.3, 0.6, 0.8, 0.8, 0.8]) for _ in range(8)]
            asked = [(draw.randint(0, 40), draw.randint(1, 60), fate) for fate in fates]
            await asyncio.gather(*(one(number, *each) for number, each in enumerate(asked)))


class Deaf:
    async def show_firsts(self, firsts: Firsts) -> None: ...
    async def show_partial(self, handle: handles.Handle) -> None: ...


async def test_a_handle_that_nobody_could_be_told_of_is_taken_back(tmp_path: Path) -> None:
    async with direct(tmp_path) as p:
        servicer = p.prefill_role._servicer
        ask = servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        answer = await p.prefill_role.worker.prefill(ask, Deadline.after(WAIT_S), Deaf())
        lender = p.prefill.core.lender
        assert lender is not None and lender.loans.num_leases == 1
        answer.take_back()
        answer.take_back()
        assert lender.loans.num_leases == 0


async def test_a_handle_whose_telling_failed_is_taken_back_and_its_prompt_is_stored(
    tmp_path: Path,
) -> None:
    def tell(answer: PrefillAnswer) -> None:
        assert answer.handle is not None
        raise Cancelled("the stream is gone")

    async with direct(tmp_path) as p:
        ask = p.prefill_role._servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        worker, lender = p.prefill_role.worker, p.prefill.core.lender
        with pytest.raises(Cancelled):
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), tell)
        assert lender is not None and lender.loans.num_leases == 0 and not worker.states
        await all_back(p)
        assert not worker.behind.not_stored


async def test_a_stream_that_breaks_as_the_account_is_told_costs_the_store_no_block(
    tmp_path: Path,
) -> None:
    """Its end takes the leases back before anything that the request leaves on the loop has run."""
    async with direct(tmp_path) as p:
        ask = p.prefill_role._servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        worker, lender = p.prefill_role.worker, p.prefill.core.lender
        assert lender is not None
        gate = Gate(p.prefill.core.connector.client, "put_blocks")
        answers: list[PrefillAnswer] = []
        num_lent: list[int] = []

        def break_off() -> None:
            answers[0].take_back()
            num_lent.append(lender.num_lent_blocks)

        def tell(answer: PrefillAnswer) -> None:
            answers.append(answer)
            asyncio.get_running_loop().call_soon(break_off)

        await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), tell)
        await until(lambda: bool(num_lent))
        assert lender.loans.num_leases == 0 and num_lent == [FULL]
        gate.open()
        await all_back(p)
        assert not worker.behind.not_stored


async def test_an_end_that_fails_in_part_still_gives_back_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Exception):
        pass

    def broken(*_: object) -> None:
        raise Broken

    def deaf(answer: PrefillAnswer) -> None:
        raise Cancelled("the stream is gone")

    async with direct(tmp_path) as p:
        worker, lender = p.prefill_role.worker, p.prefill.core.lender
        assert lender is not None
        ask = p.prefill_role._servicer._ask(p.prefill_request(PROMPT, handover=DIRECT))
        with monkeypatch.context() as patched, pytest.raises(Broken):
            patched.setattr(Pins, "hand_over", broken)
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), deaf)
        assert lender.loans.num_leases == 0
        await all_back(p)
        told: list[PrefillAnswer] = []
        with monkeypatch.context() as patched, pytest.raises(Broken):
            patched.setattr(request_spans, "tell", broken)
            await worker.prefill(ask, Deadline.after(WAIT_S), Deaf(), told.append)
        await until(lambda: not worker.states)
        told[0].take_back()
        await all_back(p)


@pytest.mark.parametrize("how", ["never taken", "given up by decode"])
async def test_a_dead_decode_workers_blocks_come_back(tmp_path: Path, how: str) -> None:
    """Nobody releases the lease: it lapses. Somebody who was cancelled with the handle in hand
    does."""
    ttl_s = 0.5 if how == "never taken" else 300.0
    limits = WorkerLimits(store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, lease_ttl_s=ttl_s)
    async with direct(tmp_path, limits=limits) as p, p.stream() as stream:
        reply = await p.run_prefill(PROMPT, handover=DIRECT)
        assert reply.leg.handover == DIRECT
        if how == "given up by decode":
            key = await stream.reserve(p.reserve(PROMPT))
            await stream.next(key)
            p.decode_model.hold()
            await stream.generate(key, reply)
            await stream.cancel(key)
            await stream.collect(key)
            p.decode_model.release()
        await all_back(p)
        await assert_served(p)


async def test_a_prefill_worker_that_stops_has_all_blocks_back(tmp_path: Path) -> None:
    """With a handle out that nobody took, and a put behind under way."""
    async with pair(tmp_path) as p:
        gate = Gate(p.prefill.core.connector.client, "put_blocks")
        await p.run_prefill(PROMPT, handover=DIRECT)
        lender = p.prefill.core.lender
        assert lender is not None and lender.num_lent_blocks == FULL + 1
        stopping = asyncio.create_task(p.prefill.stop())
        await until(lambda: p.prefill.core.draining)
        gate.open()
        await stopping
        assert lender.num_lent_blocks == lender.loans.num_leases == 0
        engine = p.prefill.core.thread._engine
        engine.check_integrity()
        stats = engine.stats()
        assert stats.num_quarantined_blocks == stats.num_referenced_blocks == 0


async def test_a_prefill_worker_that_is_gone_costs_recomputation_only(tmp_path: Path) -> None:
    """Between the handle and its use; and then a new life under the same name and address is met,
    which an old handle never reads from."""
    async with pair(tmp_path) as p, p.stream() as stream:
        warm = await generate(p, prompt_of(20, start=50), name="warm")
        assert warm.leg.num_tokens_computed == 0
        replies = {}
        for name in ("away", "another"):
            replies[name] = await p.run_prefill(PROMPT, name=name, handover=DIRECT)
        settings = p.prefill.core.settings
        address = p.prefill.address
        await p.prefill.stop()
        await decoded(p, stream, "away", replies["away"], {errors.STORE_UNAVAILABLE})
        again = await main.start(
            fake_engine(),
            type(settings)(**{**vars(settings), "listen": address}),
            "prefill",
            PrefillRole,
        )
        try:
            async with serving.channel(again.address) as channel:
                stub = prefill_pb2_grpc.PrefillStub(channel)
                await decoded(
                    p,
                    stream,
                    "another",
                    replies["another"],
                    {errors.INCARNATION, errors.STORE_UNAVAILABLE},
                )
                reply = await whole(
                    PrefillCall(
                        stub,
                        p.prefill_request(PROMPT, name="new", handover=DIRECT),
                        timeout_s=WAIT_S,
                    )
                )
                assert reply.leg.handover == DIRECT
                await decoded(p, stream, "new", reply, set(), is_patient=True)
        finally:
            await again.stop()


async def decoded(
    p: Pair,
    stream: Any,
    name: str,
    reply: Any,
    reasons: set[str],
    *,
    is_patient: bool = False,
) -> None:
    """The answer is exact, whatever could not be read; that is counted under one of `reasons`."""
    if is_patient:  # the way to the new life is tried again after a back-off
        run = reply.handle.runs[0]

        async def met() -> bool:
            try:
                await p.decode.core.remote_stores.client(
                    run.node_id, run.store_address, run.store_incarnation, Deadline.after(2.0)
                )
            except Exception:
                return False
            return True

        await until(met)
    key = await stream.reserve(p.reserve(PROMPT, name=name))
    await stream.next(key)
    await stream.generate(key, reply)
    answer = await stream.collect(key)
    assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
    assert set(answer.recomputed) <= reasons
    assert bool(answer.recomputed) == bool(reasons)
