"""A handle whose blocks lie in other nodes' stores: each part is fetched from its own store, over
the transport for other nodes, and its lease given back there; what cannot be had is computed again
and counted. What decode fills goes to its own store, behind the prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore import serve
from kvstore.client import StoreClient
from kvstore.config import KvStoreSettings
from kvstore.errors import Quarantine, TransferCancelled
from process import incarnation, serving
from process.deadline import Deadline
from protos import common_pb2, decode_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc, prefill_pb2
from services.decode.leases import give_back
from services.decode.role import DecodeRole
from services.worker import handle as handles
from services.worker import main
from services.worker.config import WorkerLimits, WorkerSettings
from tests.harness.gated_engine import SALT, GatedModel, fake_engine, prompt_of
from tests.harness.handles import blocks_of, partial, prefetch, set_blocks
from tests.harness.prefill_decode_pair import FRAME_BYTES, LEASE_TTL_S, WAIT_S, Answer, Pair, pair
from tests.harness.waiting import Gate, until

PROMPT = prompt_of(30, start=3)
NUM_BLOCKS = 8  # seven full ones and the tail
SIZE = 4


@dataclasses.dataclass
class TwoNodes:
    """`pair`: prefill beside its store, and a decode worker that has another store at home."""

    pair: Pair
    store: Any
    """Of the decode worker's node; None: killed."""
    store_exit: contextlib.AsyncExitStack

    async def kill_far_store(self) -> None:
        """The prefill worker's."""
        await self.pair.kill_store()

    def num_stored(self, tokens: Sequence[int]) -> int:
        """Full blocks of this chain in decode's own store; no gaps."""
        chain = self.pair.decode.core.chain(SALT, "").hashes(tuple(tokens))
        found = [self.store.node.store.catalog.find(each) is not None for each in chain]
        assert found == sorted(found, reverse=True), "presence has a gap"
        return sum(found)

    async def check(self, *, leases: int = 0) -> None:
        """Every law, at both nodes."""
        decode = self.pair.decode.core
        await until(lambda: decode.thread.stats.num_referenced_blocks == 0)
        await self.pair.check(leases=leases)

        async def settled() -> bool:
            async with serving.channel(self.store.address) as channel:
                stub = kvstore_pb2_grpc.KvStoreStub(channel)
                request = kvstore_pb2.GetStatusRequest(check_integrity=True)
                status = await stub.GetStatus(request, timeout=WAIT_S)
            assert status.integrity_error == ""
            return not any((status.num_leases, status.num_writing, status.num_quarantined))

        await until(settled)


@contextlib.asynccontextmanager
async def two_nodes(folder: Path, *, remote_transport: str = "grpc") -> AsyncIterator[TwoNodes]:
    """A pair whose decode worker is another, with a store of its own."""
    limits = WorkerLimits(
        store_wait_s=WAIT_S,
        lease_ttl_s=LEASE_TTL_S,
        attach_budget_s=5.0,
        drain_s=0.2,
        stop_grace_s=0.05,
    )
    async with pair(folder, limits=limits) as p, contextlib.AsyncExitStack() as stack:
        store_exit = contextlib.AsyncExitStack()
        stack.push_async_callback(store_exit.aclose)
        settings = KvStoreSettings(
            node_id="home",
            slab_dir=str(folder),
            capacity_bytes=512 * FRAME_BYTES,
            stop_timeout_s=0.0,
        )
        store = await store_exit.enter_async_context(serve.running(settings))
        model = GatedModel()
        worker = await main.start(
            fake_engine(model=model),
            WorkerSettings(
                worker_id="decode-home",
                redis_url="",
                store_address=store.address,
                remote_transport=remote_transport,
                handle_keys_file=p.prefill.core.settings.handle_keys_file,
                limits=limits,
            ),
            "decode",
            DecodeRole,
        )
        stack.push_async_callback(worker.stop)
        stack.callback(model.release)
        channel = await stack.enter_async_context(serving.channel(worker.address))
        home = dataclasses.replace(
            p, decode=worker, decode_model=model, decode_stub=decode_pb2_grpc.DecodeStub(channel)
        )
        yield TwoNodes(home, store, store_exit)
        p.store, p.store_exit = home.store, home.store_exit


def from_store(answer: Answer) -> dict[str, int]:
    """Tokens by the node that they came from."""
    return {count.node_id: count.num_tokens for count in answer.leg.from_store}


def transports(answer: Answer) -> dict[str, str]:
    """By the node that was read."""
    return {count.node_id: count.transport for count in answer.leg.from_store}


async def generate(n: TwoNodes, spoil: Any = None, *, name: str = "r") -> Answer:
    """A request whose handle may be spoiled by someone who has the key."""
    p = n.pair
    async with p.stream() as stream:
        key = await stream.reserve(p.reserve(PROMPT, name=name))
        await stream.next(key)
        reply = await p.run_prefill(PROMPT, name=name)
        if spoil is not None:
            await spoil(n, reply)
            handles.sign(reply.handle, p.prefill.core.handle_keys)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
    answer.token_ids[:0] = reply.token_ids
    assert answer.token_ids == p.expected(PROMPT, 8)
    num_from_store = sum(from_store(answer).values())
    leg = answer.leg
    assert leg.num_tokens_computed + leg.num_tokens_local + num_from_store == len(PROMPT)
    return answer


async def test_another_nodes_blocks_are_fetched_from_there(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as n:
        far = n.pair.store.node.node_id
        answer = await generate(n)
        assert from_store(answer) == {far: 30} and answer.recomputed == {}
        assert answer.leg.num_tokens_computed == 0
        assert transports(answer) == {far: "grpc"} and answer.leg.transport == "grpc"
        await n.check()  # the lease was given back there
        # The prompt came into decode's own store before the answer.
        assert n.num_stored([*PROMPT, *answer.token_ids]) == (30 + 7) // SIZE
        assert n.pair.decode.core.counts.num_blocks_written_back == 2
        assert failed_writes(n) == {}  # it was not tried without the prompt first


def put_again(n: TwoNodes) -> float:
    """Blocks that decode put again with what they follow, as /metrics shows them."""
    return sum(
        sample.value
        for metric in n.pair.decode.core.transfers.collect()
        for sample in metric.samples
        if sample.name == "baton_transfer_put_again_blocks_total"
    )


def failed_writes(n: TwoNodes) -> dict[str, float]:
    """Blocks that decode's puts failed to store, by reason, as /metrics shows them."""
    return {
        sample.labels["reason"]: sample.value
        for metric in n.pair.decode.core.transfers.collect()
        for sample in metric.samples
        if sample.name == "baton_transfer_failed_blocks_total"
        and sample.labels["direction"] == "write"
        and sample.value
    }


async def test_a_put_whose_parent_the_store_lost_is_put_again_with_it(tmp_path: Path) -> None:
    """The prompt was taken to be at home and is not any more: the put is refused, the chain is
    stored from its beginning, and that is counted apart: no transfer failed."""
    async with two_nodes(tmp_path) as n:

        async def lose(n: TwoNodes, reply: prefill_pb2.PrefillReply) -> None:
            await split(n, reply, at=7)
            places = n.store.node.store.places
            chain = n.pair.decode.core.chain(SALT, "").hashes(PROMPT)
            places.lose([n.store.node.store.catalog.find(chain[0])])

        await generate(n, name="first")
        await n.check()
        answer = await generate(n, lose, name="second")
        await n.check()
        assert n.num_stored([*PROMPT, *answer.token_ids]) == (30 + 7) // SIZE
        assert failed_writes(n) == {} and put_again(n) > 0


async def remote_client(p: Pair, reply: prefill_pb2.PrefillReply) -> StoreClient:
    """Decode's way to the store that the handle names, made if need be."""
    run = reply.handle.runs[0]
    return await p.decode.core.remote_stores.client(
        run.node_id, run.store_address, run.store_incarnation, Deadline.after(WAIT_S)
    )


async def split(n: TwoNodes, reply: prefill_pb2.PrefillReply, at: int = 4) -> None:
    """The first `at` blocks lie in decode's own store, under a lease there; the handle says so."""
    decode = n.pair.decode.core
    client = decode.connector.client
    assert client is not None
    run = reply.handle.runs[0]
    blocks = blocks_of(run)
    hashes = [block.chain_hash for block in blocks]
    matched = await client.match(hashes[:at], ttl_s=LEASE_TTL_S, deadline=Deadline.after(WAIT_S))
    assert len(matched.blocks) == at
    home = common_pb2.BlockRun(
        node_id="home",
        store_address=client.address,
        store_incarnation=client.incarnation,
        lease_id=matched.lease_id,
    )
    at_home = [
        dataclasses.replace(
            block, frame=ref.frame, generation=ref.generation, checksum=ref.checksum
        )
        for block, ref in zip(blocks[:at], matched.blocks, strict=True)
    ]
    set_blocks(home, at_home)
    set_blocks(run, blocks[at:])
    run.first_block = at
    rest = common_pb2.BlockRun()
    rest.CopyFrom(run)
    del reply.handle.runs[:]
    reply.handle.runs.add().CopyFrom(home)
    reply.handle.runs.add().CopyFrom(rest)


async def forget(n: TwoNodes) -> None:
    """Push everything out of decode's device cache; its store keeps it."""
    p = n.pair
    for start in range(40, 45):
        async with p.stream() as stream:
            key = await stream.reserve(
                p.reserve(prompt_of(200, start=start), name=f"f{start}", max_tokens=40)
            )
            assert (await stream.next(key)).HasField("reserved")
            await stream.generate(key, prefill_pb2.PrefillReply())
            await stream.collect(key)


async def test_a_handle_of_two_stores_is_fetched_from_both(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as n:
        far = n.pair.store.node.node_id
        await generate(n, name="first")
        await n.check()
        await forget(n)
        answer = await generate(n, split)
        assert from_store(answer) == {"home": 16, far: 14} and answer.recomputed == {}
        assert transports(answer) == {"home": "shm", far: "grpc"}
        assert answer.leg.transport == "grpc, shm"
        assert answer.leg.num_tokens_computed == 0
        await n.check()


async def test_what_lies_behind_a_store_that_is_gone_is_computed(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as n:
        await generate(n, name="first")
        await n.check()
        await forget(n)

        async def in_two(n: TwoNodes, reply: prefill_pb2.PrefillReply) -> None:
            await split(n, reply)
            client = n.pair.decode.core.remote_stores.clients[0]
            await n.kill_far_store()
            await until(lambda: client.broken is not None)

        answer = await generate(n, in_two)
        assert from_store(answer) == {"home": 16}
        assert answer.recomputed == {"store_unavailable": 4}
        await n.check()


async def test_a_store_in_another_life_is_not_used(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as n:

        async def other_life(n: TwoNodes, reply: prefill_pb2.PrefillReply) -> None:
            for run in (reply.handle.runs[0], reply.handle.tail):
                run.store_incarnation = incarnation.new()

        answer = await generate(n, other_life)
        assert answer.recomputed == {"incarnation": NUM_BLOCKS} and from_store(answer) == {}
        await n.pair.check_store(leases=1)  # nobody who may gave it back: it lapses by itself


async def test_a_bad_block_of_another_node_is_computed(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as n:
        far = n.pair.store.node.node_id

        async def flip(n: TwoNodes, reply: prefill_pb2.PrefillReply) -> None:
            n.pair.store.node.slab.frames[blocks_of(reply.handle.runs[0])[2].frame, 3] ^= 1

        answer = await generate(n, flip)
        assert answer.recomputed == {"checksum": 6} and from_store(answer) == {far: 8}
        await n.check()


async def test_without_a_transport_for_other_nodes_nothing_is_pulled(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, remote_transport="") as n:
        answer = await generate(n)
        assert answer.recomputed == {"store_unavailable": NUM_BLOCKS}
        await n.pair.check_store(leases=1)  # there is no way to give it back


async def test_early_pulls_come_from_other_nodes_too(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as n:
        p = n.pair
        reply = await p.run_prefill(PROMPT)
        client = await remote_client(p, reply)
        gate = Gate(client, "get_blocks")
        async with p.stream() as stream:
            key = await stream.reserve(p.reserve(PROMPT))
            await stream.next(key)
            await prefetch(stream, key, partial(p, reply.handle, 5))
            await gate.wait_entered()
            await stream.generate(key, reply)
            gate.open()
            answer = await stream.collect(key)
        assert [*reply.token_ids, *answer.token_ids] == p.expected(PROMPT, 8)
        assert from_store(answer) == {p.store.node.node_id: 30}
        assert answer.leg.num_tokens_early == 20
        await n.check()


@pytest.mark.parametrize("how", ["cancel", "stream"])
async def test_a_cancel_in_the_middle_of_a_pull_from_another_node(tmp_path: Path, how: str) -> None:
    """Quarantine first; the lease goes back to the store that granted it."""
    async with two_nodes(tmp_path) as n:
        p = n.pair
        reply = await p.run_prefill(PROMPT)
        client = await remote_client(p, reply)
        settled = asyncio.get_running_loop().create_future()
        entered = asyncio.Event()

        async def stalled(lease_id: str, items: Any, deadline: Any, **options: Any) -> Any:
            entered.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                block_ids = tuple(block_id for _, block_id in items)
                raise TransferCancelled("cancelled", Quarantine(block_ids, settled)) from error

        client.get_blocks = stalled  # type: ignore[method-assign]
        async with p.stream() as stream:
            key = await stream.reserve(p.reserve(PROMPT))
            await stream.next(key)
            await stream.generate(key, reply)
            await entered.wait()
            if how == "cancel":
                await stream.cancel(key)
                assert (await stream.collect(key)).finished is not None
            else:
                await stream.close()
        stats = p.decode.core.thread
        await until(lambda: stats.stats.num_quarantined_blocks == NUM_BLOCKS)
        settled.set_result(None)
        await until(lambda: stats.stats.num_quarantined_blocks == 0)
        await n.check()


async def test_a_cancel_while_the_other_store_is_being_met(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as n:
        p = n.pair
        reply = await p.run_prefill(PROMPT)
        gate = Gate(p.decode.core.remote_stores, "client")
        async with p.stream() as stream:
            key = await stream.reserve(p.reserve(PROMPT))
            await stream.next(key)
            await stream.generate(key, reply)
            await gate.wait_entered()
            await stream.cancel(key)
            assert (await stream.collect(key)).finished is not None
        gate.open()
        await n.check()


async def test_a_worker_that_stops_gives_back_what_others_lent_it(tmp_path: Path) -> None:
    """Also where it has to meet the other store for it first."""
    async with two_nodes(tmp_path) as n:
        p = n.pair
        reply = await p.run_prefill(PROMPT)
        decode = p.decode.core
        assert (await p.store_status()).num_leases == 1 and not decode.remote_stores.clients
        give_back(decode, handles.from_proto(reply.handle, decode.handle_keys))
        await p.decode.stop()
        assert (await p.store_status()).num_leases == 0
