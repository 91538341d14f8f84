"""What is stored while prefill still runs is pulled then: the final handle loads only the rest. An
early pull that fails costs nothing, what it may still write into is out of use, and a partial
handle hands over no lease.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from engine.batch import Batch
from kvstore.errors import Quarantine, TransferFailed, TransferTimeout
from protos import common_pb2, decode_pb2
from services.decode.states import DecodeState
from services.worker import handle as handles
from tests.harness.gated_engine import GATE_S, prompt_of
from tests.harness.handles import blocks_of, partial, prefetch
from tests.harness.prefill_decode_pair import WAIT_S, Pair, PrefillCall, handover, pair
from tests.harness.waiting import Gate, until

PROMPT = prompt_of(30, start=3)
FULL = 7  # full blocks; then the tail


def record_loads(p: Pair) -> list[list[bytes]]:
    """The chain hashes of each load from here on; a tail is b""."""
    client = p.decode.core.connector.client
    assert client is not None
    real, loads = client.get_blocks, []

    async def recorded(lease_id: str, items: Any, *arguments: Any, **options: Any) -> Any:
        loads.append([block.chain_hash for block, _ in items])
        return await real(lease_id, items, *arguments, **options)

    client.get_blocks = recorded  # type: ignore[method-assign]
    return loads


def is_waiting(p: Pair) -> bool:
    """The only request waits for its final handle and nothing is on its way to it."""
    return list(p.decode_role.worker.states.values()) == [DecodeState.RESERVED]


async def pulled(p: Pair, num_loads: int, loads: list[Any]) -> None:
    """Until so many loads are over and the request waits again."""
    await until(lambda: len(loads) == num_loads and is_waiting(p))


async def test_the_final_handle_loads_only_the_rest(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        loads = record_loads(p)
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        hashes = [block.chain_hash for block in blocks_of(reply.handle.runs[0])]
        assert len(hashes) == FULL
        for index, num_blocks in enumerate((2, 5), 1):
            await prefetch(stream, key, partial(p, reply.handle, num_blocks))
            await pulled(p, index, loads)
        await prefetch(stream, key, partial(p, reply.handle, 5))  # nothing new
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert loads == [hashes[:2], hashes[2:5], [*hashes[5:], b""]]
        assert answer.leg.num_tokens_early == 20
        assert [count.num_tokens for count in answer.leg.from_store] == [30]
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert p.decode.core.counts.num_prompt_tokens_early == 20
        assert not p.decode.core.counts.early_pulls_failed
        await p.check()


async def test_what_a_running_prefill_has_stored_is_pulled_meanwhile(tmp_path: Path) -> None:
    """Prefill's own partial handles, as the router forwards them; it stands still after two steps
    until they are there."""
    prompt = prompt_of(60, start=3)
    async with pair(tmp_path) as p, p.stream() as stream:
        loads = record_loads(p)
        steps = threading.Semaphore(2)
        forward = p.prefill_model.forward

        def in_turn(batch: Batch) -> torch.Tensor:
            assert steps.acquire(timeout=GATE_S)
            return forward(batch)

        p.prefill_model.forward = in_turn  # type: ignore[method-assign]
        key = await stream.reserve(p.reserve(prompt))
        await stream.next(key)
        call = PrefillCall(p.prefill_stub, p.prefill_request(prompt), timeout_s=WAIT_S)
        rest = []
        is_first = True
        async for message in call:
            if not message.handle.is_partial:
                rest.append(message)
                continue
            await prefetch(stream, key, message.handle)
            if is_first:  # of one step's blocks, or of both's
                num_blocks = message.handle.num_tokens // 4
                await until(lambda n=num_blocks: sum(map(len, loads)) == n and is_waiting(p))
                steps.release(2)
            is_first = False
        *firsts, account = rest
        await stream.generate_from(key, handover(account, firsts))
        answer = await stream.collect(key)
        tokens = [token for first in firsts for token in first.token_ids]
        assert [*tokens, *answer.token_ids] == p.expected(prompt, 8)
        assert answer.leg.num_tokens_early >= 16
        assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
        assert sum(count.num_tokens for count in answer.leg.from_store) == 60
        await p.check()


async def test_all_of_a_prompt_may_come_early(tmp_path: Path) -> None:
    """Whole blocks only, and no token drawn yet but the one that prefill drew."""
    prompt = prompt_of(28, start=3)
    async with pair(tmp_path) as p, p.stream() as stream:
        loads = record_loads(p)
        reply = await p.run_prefill(prompt)
        key = await stream.reserve(p.reserve(prompt))
        await stream.next(key)
        await prefetch(stream, key, partial(p, reply.handle, 7))
        await pulled(p, 1, loads)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(prompt, 8)
        assert len(loads) == 1
        assert answer.leg.num_tokens_early == 28 and answer.leg.num_tokens_computed == 0
        await p.check()


async def test_without_a_final_handle_what_came_early_is_used(tmp_path: Path) -> None:
    """Prefill died: what it had stored is not computed again."""
    async with pair(tmp_path) as p, p.stream() as stream:
        loads = record_loads(p)
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        await prefetch(stream, key, partial(p, reply.handle, 5))
        await pulled(p, 1, loads)
        leases = [reply.handle.runs[0].lease_id]
        reply.ClearField("handle")
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_computed == 10 and answer.leg.num_tokens_early == 20
        assert answer.recomputed == {"missing": 3}
        await p.check_store(leases=1)  # not ours to give back
        p.prefill.core.connector.release_later(p.prefill.core.connector.client, leases)
        await p.check()


async def test_a_partial_handle_as_the_last_word_hands_over_no_lease(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        reply.handle.CopyFrom(partial(p, reply.handle, 5))
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert answer.leg.num_tokens_computed == 10 and answer.leg.num_tokens_early == 0
        await p.check_store(leases=1)
        leases = [reply.handle.runs[0].lease_id]
        p.prefill.core.connector.release_later(p.prefill.core.connector.client, leases)
        await p.check()


async def test_an_early_pull_that_fails_is_tried_again_by_the_final_handle(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        client = p.decode.core.connector.client
        assert client is not None
        real, num_calls = client.get_blocks, 0

        async def failing_once(*arguments: Any, **options: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 1:
                raise TransferFailed("the wire broke")
            return await real(*arguments, **options)

        client.get_blocks = failing_once  # type: ignore[method-assign]
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        await prefetch(stream, key, partial(p, reply.handle, 5))
        await until(lambda: p.decode.core.counts.early_pulls_failed == {"transport": 1})
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert answer.recomputed == {} and answer.leg.num_tokens_early == 0
        assert answer.leg.num_tokens_computed == 0
        await p.check()


async def test_a_bad_block_ends_an_early_pull_and_the_final_one_at_the_same_place(
    tmp_path: Path,
) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        reply = await p.run_prefill(PROMPT)
        p.store.node.slab.frames[blocks_of(reply.handle.runs[0])[3].frame, 3] ^= 1
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        await prefetch(stream, key, partial(p, reply.handle, 5))
        await until(lambda: p.decode.core.counts.early_pulls_failed == {"checksum": 1})
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        # The store may have dropped it meanwhile: then its generation is another one.
        assert sum(answer.recomputed.values()) == 5
        assert set(answer.recomputed) <= {"checksum", "generation"}
        assert answer.leg.num_tokens_early == 12 and answer.leg.num_tokens_computed == 18
        await p.check()


async def test_a_timed_out_early_pull_leaves_its_blocks_to_the_late_write(tmp_path: Path) -> None:
    """The final handle loads everything into other blocks."""
    async with pair(tmp_path) as p, p.stream() as stream:
        connector = p.decode.core.connector
        client = connector.client
        assert client is not None
        settled = asyncio.get_running_loop().create_future()
        late: list[int] = []

        async def too_late(lease_id: str, items: Any, deadline: Any, **options: Any) -> Any:
            late.extend(block_id for _, block_id in items)
            raise TransferTimeout("the time ran out", Quarantine(tuple(late), settled))

        real, client.get_blocks = client.get_blocks, too_late  # type: ignore[method-assign]
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT, max_tokens=20))
        await stream.next(key)
        await prefetch(stream, key, partial(p, reply.handle, 5))
        await until(lambda: p.decode.core.status().num_quarantined_blocks == 5)
        client.get_blocks = real  # type: ignore[method-assign]
        await until(lambda: connector.client is client)  # it answered a ping
        p.decode_model.hold()
        await stream.generate(key, reply)
        await until(p.decode_model.is_held.is_set)
        p.decode.core.thread._engine.kv.host_view[late] = 255  # the late write
        p.decode_model.release()
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 20)
        assert answer.recomputed == {} and answer.leg.num_tokens_computed == 0
        # Its own write-back holds blocks, too, until the store has them.
        await until(lambda: p.decode.core.status().num_quarantined_blocks == len(late) == 5)
        settled.set_result(None)
        await until(lambda: p.decode.core.status().num_quarantined_blocks == 0)
        await p.check()


async def test_without_other_blocks_the_final_load_ends_before_the_first_that_is_lost(
    tmp_path: Path,
) -> None:
    """Every block is taken: what lies behind the hole is computed when there is room again."""
    num_blocks = 10
    async with pair(tmp_path, decode_blocks=64) as p, p.stream() as stream:
        connector = p.decode.core.connector
        client = connector.client
        assert client is not None
        settled = asyncio.get_running_loop().create_future()

        async def too_late(lease_id: str, items: Any, deadline: Any, **options: Any) -> Any:
            late = tuple(block_id for _, block_id in items[2:])
            raise TransferTimeout("the time ran out", Quarantine(late, settled))

        real, client.get_blocks = client.get_blocks, too_late  # type: ignore[method-assign]
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT, max_tokens=num_blocks * 4 - 29))
        await stream.next(key)
        rest = await stream.reserve(p.reserve(prompt_of(200), name="rest", max_tokens=17))
        assert (await stream.next(rest)).HasField("reserved")
        assert p.decode.core.status().num_free_blocks == 0
        await prefetch(stream, key, partial(p, reply.handle, 5))
        await until(lambda: p.decode.core.status().num_quarantined_blocks == 3)
        client.get_blocks = real  # type: ignore[method-assign]
        await until(lambda: connector.client is client)
        await stream.generate(key, reply)
        failed = (await stream.collect(key)).failed
        assert failed is not None  # no block can stand in for those that are lost
        assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        await stream.cancel(rest)
        await stream.collect(rest)
        settled.set_result(None)
        await until(lambda: p.decode.core.status().num_quarantined_blocks == 0)
        await p.check()


async def test_the_final_handle_waits_for_an_early_pull_that_is_under_way(tmp_path: Path) -> None:
    async with pair(tmp_path) as p, p.stream() as stream:
        loads = record_loads(p)
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        gate = Gate(p.decode.core.connector.client, "get_blocks")
        await prefetch(stream, key, partial(p, reply.handle, 5))
        await gate.wait_entered()
        await prefetch(stream, key, partial(p, reply.handle, 6))  # never gets its turn
        await stream.generate(key, reply)
        await prefetch(stream, key, partial(p, reply.handle, 6))  # too late
        (waiting,) = p.decode_role.worker._requests.values()
        await until(
            lambda: waiting.arrival.is_over
        )  # the final handle is there before the pull is over
        gate.open()
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert [len(load) for load in loads] == [5, 3]
        assert answer.leg.num_tokens_early == 20
        await prefetch(stream, key, partial(p, reply.handle, 6))  # it is over: nothing to say
        await p.check()


def _unsigned(p: Pair, early: common_pb2.KvHandle) -> None:
    early.num_tokens -= 4


def _of_another_request(p: Pair, early: common_pb2.KvHandle) -> None:
    early.request_id = "another"
    handles.sign(early, p.prefill.core.handle_keys)


def _too_old(p: Pair, early: common_pb2.KvHandle) -> None:
    early.deadline_unix_ms = 1
    handles.sign(early, p.prefill.core.handle_keys)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(_unsigned, "signature"), (_of_another_request, "fingerprint"), (_too_old, "deadline")],
)
async def test_a_partial_handle_is_checked_like_any(
    tmp_path: Path, spoil: Any, reason: str
) -> None:
    """What is refused costs nothing: the final handle is looked at by itself."""
    async with pair(tmp_path) as p, p.stream() as stream:
        loads = record_loads(p)
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        early = partial(p, reply.handle, 5)
        spoil(p, early)
        await prefetch(stream, key, early)
        await until(lambda: p.decode.core.counts.early_pulls_failed == {reason: 1})
        await stream.generate(key, reply)
        answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert len(loads) == 1 and answer.recomputed == {}
        assert answer.leg.num_tokens_early == 0
        await p.check()


async def test_a_final_handle_is_refused_as_an_early_one(tmp_path: Path) -> None:
    """It would hand over leases that nobody gives back."""
    async with pair(tmp_path) as p, p.stream() as stream:
        reply = await p.run_prefill(PROMPT)
        key = await stream.reserve(p.reserve(PROMPT))
        await stream.next(key)
        await prefetch(stream, key, reply.handle)
        failed = (await stream.next(key)).failed
        assert failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert failed.message.startswith("prefetch.handle")
        await stream._write(
            decode_pb2.DecodeCommand(
                key=key, generate=decode_pb2.GenerateFromHandle(handle=reply.handle)
            )
        )
        assert (await stream.collect(key)).finished is not None
        await p.check()
