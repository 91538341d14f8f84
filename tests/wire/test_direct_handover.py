"""Decode reads the prefill worker's own cache: tokens exact, nothing of the prompt computed again;
and where it cannot be.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Batch
from engine.config import EngineConfig
from kvstore import errors
from kvstore.lending import is_lender, lender_node_id
from process import keys
from protos import common_pb2
from services.decode.states import DecodeState
from services.worker import links
from services.worker.config import WorkerLimits, WorkerSettings
from services.worker.core import WorkerCore
from services.worker.identity import Identity
from tests.harness.decode_movers import hold_at
from tests.harness.direct_pair import DIRECT, FULL, PROMPT, STORE, direct, generate, on_devices
from tests.harness.gated_engine import BLOCK_SIZE, GATE_S, fake_engine, prompt_of
from tests.harness.handles import blocks_of, prefetch
from tests.harness.prefill_decode_pair import WAIT_S, PrefillCall, handover, whole
from tests.harness.waiting import Gate, until


@pytest.fixture
def patient_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine may need more for its measurements than a link that is well."""
    monkeypatch.setattr(links, "PATIENT_BUDGET_S", WAIT_S)


@pytest.mark.parametrize("setting", ["remote_transport", "direct_transport"])
@pytest.mark.parametrize("transport", ["grpc", "nixl"])
async def test_decode_reads_the_prefill_workers_own_cache(
    tmp_path: Path, transport: str, setting: str, patient_links: None
) -> None:
    options: dict[str, Any] = {setting: transport}
    async with direct(tmp_path, **options) as p:
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
        # Not "shm", by which each of the two workers reaches its own store.
        assert leg.transport == count.transport == transport
        (moved,) = leg.transports
        assert (moved.transport, moved.num_bytes_read) == (transport, leg.num_bytes_read)
        assert leg.num_bytes_read > 0 == moved.num_bytes_written
        assert reply.leg.transport in ("", "shm")  # what it had written behind by then
        await p.decode.core.links.settle()
        (link,) = [
            link
            for link in (await p.decode.core.checked_status()).links
            if link.node_id == lender_node_id("prefill-0")
        ]
        assert (link.transport, link.problem, link.degraded) == (transport, "", False)
        assert p.decode.core.status().direct_transport == transport
        assert link.read_bytes_per_s > 0 == link.write_bytes_per_s


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
        assert count.transport == answer.leg.transport == "cuda_ipc"
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
    limits = WorkerLimits(store_wait_s=WAIT_S, lease_ttl_s=1.0, drain_s=0.2, stop_grace_s=0.05)
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
        stop_grace_s=0.05,
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


async def test_a_worker_that_does_not_lend_uses_the_store_and_says_so(tmp_path: Path) -> None:
    limits = WorkerLimits(
        store_wait_s=WAIT_S, attach_budget_s=5.0, drain_s=0.2, stop_grace_s=0.05, lend_blocks=False
    )
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
