"""Partial handles: what prefill has stored can be fetched while it still runs, and the final handle
loads only the rest. Their leases stay prefill's, whatever comes of the request; an early pull that
fails costs nothing, and what it may still write into is out of use.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from process.rpc_errors import Cancelled, DeadlineExceeded
from protos import common_pb2
from tests.harness.gated_engine import BLOCK_SIZE
from tests.harness.handles import blocks_of, partial, sign
from tests.harness.prefill_decode_pair import (
    LEASE_TTL_S,
    WAIT_S,
    Pair,
    PrefillCall,
    handover_of,
    pair,
)
from tests.harness.prefill_nodes import Node, Nodes, Reader, nodes, stepped_model
from tests.harness.waiting import Deadlines, until
from tests.harness.worker_probe import HeldWrites, is_account, leases_of

pytestmark = [pytest.mark.oracle, pytest.mark.asyncio(loop_scope="module")]

NUM_TOKENS = 90
"""Six chunks of 16 tokens."""
NUM_FULL = 22


# ---- what prefill tells


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def n(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Nodes]:
    """One node, whose model makes a step when it is allowed one."""
    folder = tmp_path_factory.mktemp("nodes")
    async with nodes(folder, num_nodes=1, make_model=stepped_model) as made:
        yield made


@pytest.fixture
def node(n: Nodes) -> Node:
    n[0].model.hold()
    return n[0]


def _refs_of(handle: common_pb2.KvHandle) -> list[Any]:
    """All full blocks, without a gap."""
    refs: list[Any] = []
    for run in handle.runs:
        assert run.first_block == len(refs)
        refs += blocks_of(run)
    return refs


def _call(n: Nodes, prompt: tuple[int, ...]) -> PrefillCall:
    return PrefillCall(n[0].stub, n.request(prompt), timeout_s=LEASE_TTL_S)


async def test_what_is_stored_is_told_while_prefill_runs(n: Nodes, node: Node) -> None:
    """After each step one handle more, a prefix of the last; none after the first token."""
    prompt = n.new_prompt(NUM_TOKENS)
    async with Reader(node) as reader:
        call = _call(n, prompt)
        partials: list[common_pb2.KvHandle] = []
        for num_steps in range(1, 6):
            node.model.allow()
            message = await call.read()
            told = message.handle
            assert message == type(message)(handle=told), "only a handle"
            assert told.is_partial and not told.HasField("tail")
            assert len(_refs_of(told)) == 4 * num_steps
            assert told.num_tokens == 4 * num_steps * BLOCK_SIZE
            assert await reader.fetch(told) == 4 * num_steps
            partials.append(told)
        node.model.allow()
        first, account = await call.read(), await call.read()
        assert list(first.token_ids) == n.model.generate(prompt, 1)
        whole = account.handle
        assert len(_refs_of(whole)) == NUM_FULL and not whole.is_partial
        for told in partials:
            assert _refs_of(whole)[: len(_refs_of(told))] == _refs_of(told)
            assert [run.lease_id for run in told.runs] == [whole.runs[0].lease_id]
        assert len({handle.nonce for handle in (*partials, whole)}) == 6
        assert await call.read() is grpc.aio.EOF
        assert (await node.store_status()).num_leases == 1  # the whole handle's
        await n.check(whole)


async def test_what_the_store_had_is_told_before_the_first_step(n: Nodes, node: Node) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    node.model.allow(4)
    await n.run(node, prompt[:50], name="fill", wants_handle=False)
    call = _call(n, prompt)
    message = await call.read()
    assert len(_refs_of(message.handle)) == 12
    node.model.release()
    _, account = await call.answer()
    await n.check(account.handle)


async def test_a_request_that_wants_no_handle_is_told_of_none(n: Nodes, node: Node) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    request = n.request(prompt, wants_handle=False)
    call = PrefillCall(node.stub, request, timeout_s=LEASE_TTL_S)
    node.model.release()
    messages = [message async for message in call]
    assert list(messages[0].token_ids) == n.model.generate(prompt, 1)
    assert not [message for message in messages if message.HasField("handle")]
    await until(lambda: node.holds(node.hashes(prompt)) == NUM_FULL)
    await n.check()


async def test_a_cancel_takes_the_leases_of_a_partial_handle_along(n: Nodes, node: Node) -> None:
    call = _call(n, n.new_prompt(NUM_TOKENS))
    node.model.allow()
    told = (await call.read()).handle
    assert node.has_lease(told.runs[0].lease_id)
    call.cancel()
    await until(lambda: not node.has_lease(told.runs[0].lease_id))
    node.model.release()
    await n.check()


async def test_the_store_dies_after_a_partial_handle_and_the_answer_still_comes(
    n: Nodes, node: Node
) -> None:
    prompt = n.new_prompt(NUM_TOKENS)
    call = _call(n, prompt)
    node.model.allow()
    await call.read()
    home = node.home
    await node.kill_store()
    await until(lambda: home.is_broken)
    node.model.release()
    first, account = await call.answer()
    assert list(first.token_ids) == n.model.generate(prompt, 1)
    assert {count.reason for count in account.leg.not_stored} == {"store_unavailable"}
    await n.check()
    await node.start_store()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_the_end_while_a_partial_handle_is_on_its_way(
    n: Nodes, node: Node, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that does not read holds nothing for ever."""
    deadlines, writes = Deadlines(monkeypatch), HeldWrites(monkeypatch)
    call = _call(n, n.new_prompt(NUM_TOKENS))
    node.model.allow()
    await writes.wait_held()
    if how == "cancel":
        call.cancel()
    else:
        deadlines.end_prefill()
    await until(lambda: not node.states())
    node.model.release()
    await n.check()
    writes.open()
    error = await call.error()
    assert isinstance(error, Cancelled if how == "cancel" else DeadlineExceeded)


async def test_of_partial_handles_that_wait_only_the_newest_is_kept(
    n: Nodes, node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router that does not read holds one of each prompt, however much is computed."""
    prompt = n.new_prompt(NUM_TOKENS)
    writes = HeldWrites(monkeypatch)
    call = _call(n, prompt)
    node.model.allow()
    await writes.wait_held()
    for num_steps in range(2, 6):
        node.model.allow()
        await until(lambda: node.holds(node.hashes(prompt)) == 4 * num_steps)  # noqa: B023
    writes.open()
    node.model.release()
    messages = [message async for message in call]
    told = [message.handle.num_tokens for message in messages if message.handle.is_partial]
    # Of five steps: the first one's, the newest that waited, and the last one's where that was
    # made behind the opening.
    assert told[0] == 4 * BLOCK_SIZE and told == sorted(told) and 2 <= len(told) <= 3
    await n.check(messages[-1].handle)


async def test_handles_over_two_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first step; and a final one that nobody got is taken back at each store."""
    async with nodes(tmp_path, replicate_after_hits=100, make_model=stepped_model) as n:
        n[1].model.release()
        prompt = n.new_prompt(NUM_TOKENS)
        n[0].model.allow(2)
        await n.run(n[1], prompt[:40], name="fill", wants_handle=False)
        await n.run(n[0], prompt[:20], name="fill", wants_handle=False)
        hints = [n[0].hint(0, 5), n[1].hint(5, 5)]
        writes = HeldWrites(monkeypatch, until=is_account)
        # The leases would live longer than the check waits.
        call = PrefillCall(n[0].stub, n.request(prompt, hints), timeout_s=6 * WAIT_S)
        told = (await call.read()).handle
        shape = [(run.node_id, run.first_block, len(blocks_of(run))) for run in told.runs]
        assert shape == [("store-0", 0, 5), ("store-1", 5, 5)]
        n[0].model.release()
        await writes.wait_held()
        for node in n.all:
            assert (await node.store_status()).num_leases >= 1
        call.vanish()
        await n.check()


# ---- what decode makes of it


async def _pulled(p: Pair, num_loads: int, loads: list[Any]) -> None:
    """Until so many loads are over and the request waits again."""
    await until(lambda: len(loads) == num_loads and p.at_decode.states() == ["reserved"])


@pytest.fixture
def loads(p: Pair) -> Any:
    """The chain hashes of each of decode's loads; a tail is b""."""
    home = p.at_decode.home
    yield home.loads()
    home.restore("get")


async def _failed_early(p: Pair, before: dict[str, int], reason: str) -> None:
    """Until one more early pull has failed, for this reason."""
    expected = before | {reason: before.get(reason, 0) + 1}

    await until(lambda: p.at_decode.counts("baton_kv_early_pulls_failed") == expected)


async def test_the_final_handle_loads_only_the_rest(p: Pair, loads: list[list[bytes]]) -> None:
    prompt = p.new_prompt(30)
    before = p.at_decode.count("baton_kv_early_tokens")
    failed = p.at_decode.count("baton_kv_early_pulls_failed")
    reply = await p.run_prefill(prompt)
    async with p.reserved(prompt) as (stream, key):
        hashes = [block.chain_hash for block in blocks_of(reply.handle.runs[0])]
        assert len(hashes) == 7
        for index, num_blocks in enumerate((2, 5), 1):
            await stream.prefetch(key, partial(p, reply.handle, num_blocks))
            await _pulled(p, index, loads)
        await stream.prefetch(key, partial(p, reply.handle, 5))  # nothing new
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    assert loads == [hashes[:2], hashes[2:5], [*hashes[5:], b""]]
    assert answer.leg.num_tokens_early == 20
    assert [count.num_tokens for count in answer.leg.from_store] == [30]
    assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
    assert p.at_decode.count("baton_kv_early_tokens") == before + 20
    assert p.at_decode.count("baton_kv_early_pulls_failed") == failed


async def test_what_a_running_prefill_has_stored_is_pulled_meanwhile(
    p: Pair, loads: list[list[bytes]]
) -> None:
    """It stands still after two steps until what its partial handles name is there."""
    prompt = p.new_prompt(60)
    async with p.reserved(prompt) as (stream, key):
        p.prefill_model.hold_at(3)

        async def go_on(told: common_pb2.KvHandle) -> None:
            seen.append(told)
            if len(seen) == 1:  # of one step's blocks, or of both's
                await until(lambda: sum(map(len, loads)) == told.num_tokens // 4)
                await _pulled(p, len(loads), loads)
                p.prefill_model.release()

        seen: list[common_pb2.KvHandle] = []
        firsts, account = await stream.forward(key, p.call(prompt), go_on)
        await stream.generate_from(key, handover_of(account, firsts))
        answer = await stream.collect(key)
    tokens = [token for first in firsts for token in first.token_ids]
    assert [*tokens, *answer.token_ids] == p.expected(prompt, 8)
    assert answer.leg.num_tokens_early >= 16
    assert answer.leg.num_tokens_computed == 0 and answer.recomputed == {}
    assert sum(count.num_tokens for count in answer.leg.from_store) == 60


async def test_all_of_a_prompt_may_come_early(p: Pair, loads: list[list[bytes]]) -> None:
    """Whole blocks only, and no token drawn yet but the one that prefill drew."""
    prompt = p.new_prompt(28)
    reply = await p.run_prefill(prompt)
    async with p.reserved(prompt) as (stream, key):
        await stream.prefetch(key, partial(p, reply.handle, 7))
        await _pulled(p, 1, loads)
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    assert len(loads) == 1
    assert answer.leg.num_tokens_early == 28 and answer.leg.num_tokens_computed == 0


async def test_of_a_prompt_that_came_early_the_last_token_is_computed(
    p: Pair, loads: list[list[bytes]]
) -> None:
    """Where no token is drawn yet: its logits draw the first one. It came in the second pull."""
    prompt = p.new_prompt(28)
    reply = await p.run_prefill(prompt)
    async with p.reserved(prompt) as (stream, key):
        for index, num_blocks in enumerate((2, 7), 1):
            await stream.prefetch(key, partial(p, reply.handle, num_blocks))
            await _pulled(p, index, loads)
        await stream.compute(key)
        answer = await stream.collect(key)
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_early == 27 and answer.leg.num_tokens_computed == 1
    p.at_prefill.release_later(reply.handle)


async def test_without_a_final_handle_what_came_early_is_used(
    p: Pair, loads: list[list[bytes]]
) -> None:
    """Prefill died: what it had stored is not computed again."""
    prompt = p.new_prompt(30)
    reply = await p.run_prefill(prompt)
    final = common_pb2.KvHandle()
    final.CopyFrom(reply.handle)
    async with p.reserved(prompt) as (stream, key):
        await stream.prefetch(key, partial(p, reply.handle, 5))
        await _pulled(p, 1, loads)
        reply.ClearField("handle")
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 10 and answer.leg.num_tokens_early == 20
    assert answer.recomputed == {"missing": 3}
    await p.check_store(leases=1)  # not decode's to give back
    p.at_prefill.release_later(final)


async def test_a_partial_handle_as_the_last_word_hands_over_no_lease(p: Pair) -> None:
    prompt = p.new_prompt(30)
    reply = await p.run_prefill(prompt)
    final = common_pb2.KvHandle()
    final.CopyFrom(reply.handle)
    reply.handle.CopyFrom(partial(p, reply.handle, 5))
    answer = await p.decode_from(reply, prompt)
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.leg.num_tokens_computed == 10 and answer.leg.num_tokens_early == 0
    await p.check_store(leases=1)
    p.at_prefill.release_later(final)


async def test_an_early_pull_that_fails_is_tried_again_by_the_final_handle(p: Pair) -> None:
    prompt = p.new_prompt(30)
    home, before = p.at_decode.home, p.at_decode.counts("baton_kv_early_pulls_failed")
    reply = await p.run_prefill(prompt)
    async with p.reserved(prompt) as (stream, key):
        home.fail("get", times=1)
        await stream.prefetch(key, partial(p, reply.handle, 5))
        await _failed_early(p, before, "transport")
        answer = await stream.answer(key, reply)
    home.restore("get")
    assert answer.token_ids == p.expected(prompt, 8)
    assert answer.recomputed == {} and answer.leg.num_tokens_early == 0
    assert answer.leg.num_tokens_computed == 0


async def test_a_bad_block_ends_an_early_pull_and_the_final_one_at_the_same_place(p: Pair) -> None:
    prompt = p.new_prompt(30)
    before = p.at_decode.counts("baton_kv_early_pulls_failed")
    reply = await p.run_prefill(prompt)
    p.flip_bit(blocks_of(reply.handle.runs[0])[3])
    async with p.reserved(prompt) as (stream, key):
        await stream.prefetch(key, partial(p, reply.handle, 5))
        await _failed_early(p, before, "checksum")
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    # The store may have dropped it meanwhile: then its generation is another one.
    assert sum(answer.recomputed.values()) == 5
    assert set(answer.recomputed) <= {"checksum", "generation"}
    assert answer.leg.num_tokens_early == 12 and answer.leg.num_tokens_computed == 18


async def test_a_timed_out_early_pull_leaves_its_blocks_to_the_late_write(p: Pair) -> None:
    """The final handle loads everything into other blocks."""
    prompt = p.new_prompt(30)
    home = p.at_decode.home
    late = home.late_gets()
    reply = await p.run_prefill(prompt)
    async with p.reserved(prompt, max_tokens=20) as (stream, key):
        await stream.prefetch(key, partial(p, reply.handle, 5))
        await p.at_decode.quarantined(5)
        home.restore("get")
        await until(lambda: p.at_decode.has_store)  # it answered a ping
        p.decode_model.hold()
        await stream.generate(key, reply)
        await until(p.decode_model.is_held.is_set)
        p.at_decode.write_late(late.block_ids)
        p.decode_model.release()
        answer = await stream.collect(key)
    assert [*reply.token_ids, *answer.token_ids] == p.expected(prompt, 20)
    assert answer.recomputed == {} and answer.leg.num_tokens_computed == 0
    # Its own write-back holds blocks, too, until the store has them.
    await p.at_decode.quarantined(5)
    late.settle()
    await p.at_decode.quarantined(0)


async def test_without_other_blocks_the_final_load_ends_before_the_first_that_is_lost(
    tmp_path: Path,
) -> None:
    """Every block is taken: what lies behind the hole is computed when there is room again."""
    num_blocks = 10
    async with pair(tmp_path, decode_blocks=64) as p, p.stream() as stream:
        prompt, home = p.new_prompt(30), p.at_decode.home
        late = home.late_gets(num_in_time=2)
        reply = await p.run_prefill(prompt)
        key = await stream.begin(p.reserve(prompt, max_tokens=num_blocks * 4 - 29))
        rest = await stream.begin(p.reserve(p.new_prompt(200), name="rest", max_tokens=17))
        assert p.at_decode.status().num_free_blocks == 0
        await stream.prefetch(key, partial(p, reply.handle, 5))
        await p.at_decode.quarantined(3)
        home.restore("get")
        await until(lambda: p.at_decode.has_store)
        await stream.generate(key, reply)
        failed = (await stream.collect(key)).failed
        assert failed is not None  # no block can stand in for those that are lost
        assert failed.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        await stream.end(rest)
        late.settle()
        await p.at_decode.quarantined(0)
        await p.check()


async def test_the_final_handle_waits_for_an_early_pull_that_is_under_way(
    p: Pair, loads: list[list[bytes]]
) -> None:
    prompt = p.new_prompt(30)
    reply = await p.run_prefill(prompt)
    async with p.reserved(prompt) as (stream, key):
        gate = p.at_decode.home.hold("get")
        await stream.prefetch(key, partial(p, reply.handle, 5))
        await gate.wait_entered()
        await stream.prefetch(key, partial(p, reply.handle, 6))  # never gets its turn
        await stream.generate(key, reply)
        await stream.prefetch(key, partial(p, reply.handle, 6))  # too late
        await stream.in_order()  # the final handle is there before the pull is over
        gate.open()
        answer = await stream.collect(key)
        await stream.prefetch(key, partial(p, reply.handle, 6))  # it is over: nothing to say
        await stream.in_order()
    assert [*reply.token_ids, *answer.token_ids] == p.expected(prompt, 8)
    assert [len(load) for load in loads] == [5, 3]
    assert answer.leg.num_tokens_early == 20


def _unsigned(p: Pair, early: common_pb2.KvHandle) -> None:
    early.num_tokens -= 4


def _of_another_request(p: Pair, early: common_pb2.KvHandle) -> None:
    early.request_id = "another"
    sign(p, early)


def _too_old(p: Pair, early: common_pb2.KvHandle) -> None:
    early.deadline_unix_ms = 1
    sign(p, early)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(_unsigned, "signature"), (_of_another_request, "fingerprint"), (_too_old, "deadline")],
)
async def test_a_partial_handle_is_checked_like_any(
    p: Pair, loads: list[list[bytes]], spoil: Any, reason: str
) -> None:
    """What is refused costs nothing: the final handle is looked at by itself."""
    prompt = p.new_prompt(30)
    before = p.at_decode.counts("baton_kv_early_pulls_failed")
    reply = await p.run_prefill(prompt)
    async with p.reserved(prompt) as (stream, key):
        early = partial(p, reply.handle, 5)
        spoil(p, early)
        await stream.prefetch(key, early)
        await _failed_early(p, before, reason)
        answer = await stream.answer(key, reply)
    assert answer.token_ids == p.expected(prompt, 8)
    assert len(loads) == 1 and answer.recomputed == {}
    assert answer.leg.num_tokens_early == 0


async def test_a_final_handle_is_refused_as_an_early_one(p: Pair) -> None:
    """It would hand over leases that nothing gives back."""
    prompt = p.new_prompt(30)
    reply = await p.run_prefill(prompt)
    assert leases_of(reply.handle)
    async with p.reserved(prompt) as (stream, key):
        await stream.prefetch(key, reply.handle)
        failed = (await stream.next(key)).failed
        assert failed.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert failed.message.startswith("prefetch.handle")
        assert (await stream.answer(key, reply)).finished is not None
