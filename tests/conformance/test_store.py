"""What every worker may rely on from a store, through the real client and server, by each
transport."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import redis.asyncio

from kvstore import service, store_node, store_process
from kvstore.block_source import ChainToReserve
from kvstore.block_store import WrittenFrame
from kvstore.client import KvStoreClient, PutChain, TransferStats
from kvstore.config import KvStoreSettings
from kvstore.index import PrefixIndex
from kvstore.service import KvStoreServicer
from kvstore.store_node import BLOCKS_A_TURN, MATCHED_PER_WRITTEN, TOUCH_AHEAD_BYTES
from process import grpc_server, registry, rpc
from process.rpc_errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NoCapacity,
    NotFound,
    Unavailable,
)
from protos import kvstore_pb2, kvstore_pb2_grpc
from tests.harness import forks
from tests.harness.redis_server import RedisServer
from tests.harness.store import (
    BLOCK_BYTES,
    TRANSPORTS,
    LocalStore,
    NewStore,
    NewWorker,
    OnDevice,
    Worker,
    anywhere,
    chain_of,
    driven,
    local_store,
    name_of,
)
from tests.harness.waiting import until, within


@anywhere
async def test_two_writers_of_one_block(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    """Both write at once; both are told of one frame, whose bytes fit its checksum."""
    one, two = [await new_worker(store.address, transport) for _ in range(2)]
    hashes = chain_of("a", 7)
    puts = await asyncio.gather(one.put(hashes, range(7)), two.put(hashes, range(7)))
    assert puts[0].refs == puts[1].refs
    for worker, put in ((one, puts[1]), (two, puts[0])):
        assert await worker.get(put.lease_id, put.refs, range(20, 27)) == {}
    assert np.array_equal(one.view[20:27], two.view[20:27])
    assert store.node.store is not None
    status = await one.status()
    assert (status.num_committed, status.num_writing, status.num_quarantined) == (7, 0, 0)
    assert status.num_bytes_written == 7 * 5000


@pytest.fixture(params=[store_node.BLOCKS_A_TURN, 3])
def few_at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reservation goes over one turn of the store's loop, and over several."""
    monkeypatch.setattr(store_node, "BLOCKS_A_TURN", request.param)


@pytest.mark.usefixtures("few_at_once")
async def test_a_chain_grows_by_several_puts_under_one_lease(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    hashes = chain_of("a", 9)
    first = await worker.put(hashes[:4], range(4))
    second = await worker.put(
        hashes[4:], range(4, 9), parent=hashes[3], lease_id=first.lease_id, tail=("r", 9, 5)
    )
    assert second.lease_id == first.lease_id
    matched = await worker.client.match(hashes, pin=False, ttl_s=5, deadline=within())
    assert matched.blocks == first.refs + second.refs and matched.lease_id == ""
    with pytest.raises(FailedPrecondition, match="parent"):
        await worker.put(chain_of("b", 2)[1:], [0], parent=chain_of("b", 1)[0])
    assert (await worker.status()).num_leases == 1


@pytest.mark.usefixtures("few_at_once")
async def test_blocks_of_several_prompts_go_in_one_put_that_keeps_no_lease(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    """Two of them begin alike, one goes on behind another, one lacks its parent, the last finds no
    room for all of it."""
    worker = await new_worker(store.address, transport)
    a, b, c, d = chain_of("a", 6), chain_of("b", 3), chain_of("c", 3), chain_of("d", 40)
    known = await worker.put(b[:1], [40])

    def put(hashes: list[bytes], first: int, parent: bytes = b"", again: bool = False) -> PutChain:
        blocks = [(each, first + index) for index, each in enumerate(hashes)]
        return PutChain(parent, blocks, 16, puts_again=again)

    chains = [
        put(a[:4], 0),
        put([*a[:2], *chain_of("e", 2)], 10),  # the first two are those of the chain before
        put(a[4:], 4, a[3]),
        put(b, 20),  # the first is there
        put(c[1:], 30, c[0], again=True),
        put(d, 0),
    ]
    puts = await worker.client.put_chains(chains, 60.0, within())
    frame_bytes = worker.view.shape[1]
    written = [result.num_bytes // frame_bytes for result in puts]
    assert written[:5] == [4, 2, 2, 2, 0]
    assert [result.lacks_parent for result in puts] == [False] * 4 + [True, False]
    assert [len(result.refs) for result in puts[:5]] == [4, 4, 2, 3, 0]
    assert puts[1].refs[:2] == puts[0].refs[:2] and puts[3].refs[:1] == known.refs
    assert len(puts[5].refs) == written[5] == 40 - puts[5].not_stored < 40
    await worker.release(known.lease_id)
    status = await worker.status()
    assert (status.num_leases, status.num_writing, status.num_pinned) == (0, 0, 0)
    assert status.num_committed == sum(written) + 1
    for hashes, first in ((a, 0), (b[1:], 21), (d[: written[5]], 0)):
        matched = await worker.match([*b[:1], *hashes] if first == 21 else hashes)
        refs = matched.blocks[-len(hashes) :][:7]
        assert [ref.chain_hash for ref in refs] == hashes[:7]
        num = len(refs)
        assert await worker.get(matched.lease_id, refs, range(41, 41 + num)) == {}
        assert np.array_equal(worker.view[41 : 41 + num], worker.view[first : first + num])
        await worker.release(matched.lease_id)


async def test_a_put_of_chains_that_all_lack_their_parent_takes_nothing(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    lacking = PutChain(chain_of("a", 1)[0], [(chain_of("a", 2)[1], 0)], 16)
    seen: list[TransferStats] = []
    worker.client.on_transfer = seen.append
    again = dataclasses.replace(lacking, puts_again=True)
    puts = await worker.client.put_chains([lacking, again], 60.0, within())
    assert [(put.lacks_parent, put.lease_id, put.not_stored) for put in puts] == [(True, "", 0)] * 2
    assert [(stats.failed, stats.num_put_again) for stats in seen] == [({"missing": 1}, 1)]
    status = await worker.status()
    assert (status.num_leases, status.num_writing, status.num_committed) == (0, 0, 0)


async def test_a_refused_chain_leaves_nothing_of_the_others_reserved(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    fine = kvstore_pb2.ReserveChain(chain_hashes=b"".join(chain_of("a", 2)))
    one = chain_of("b", 1)[0]
    for wrong, field in (
        (kvstore_pb2.ReserveChain(chain_hashes=one[:-1]), "chain_hashes"),
        (kvstore_pb2.ReserveChain(chain_hashes=one + one), "chain_hashes"),
        (kvstore_pb2.ReserveChain(chain_hashes=one, tenant="t" * 200), "tenant"),
        (kvstore_pb2.ReserveChain(chain_hashes=one, parent=b"short"), "parent"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            await worker.call(
                "Reserve", attachment_id=worker.attachment_id, ttl_ms=1000, chains=[fine, wrong]
            )
        assert (await worker.status()).num_writing == 0


@pytest.mark.parametrize("ends", ["cancelled", "cancelled under a lease", "lease ended"])
async def test_a_reservation_that_fails_between_two_turns_leaves_nothing_of_it_reserved(
    store: LocalStore,
    new_worker: NewWorker,
    transport: str,
    ends: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller never hears of its frames, so they are free at once. What an earlier call reserved
    under the same lease, for the same hashes, too, is not touched."""
    worker, node = await new_worker(store.address, transport), store.node
    monkeypatch.setattr(node.turns, "max_blocks", 3)
    options: dict[str, Any] = {"is_probe": False, "ttl_s": 60.0}
    lease_id, num_before = "", 0

    def reserve(*names: str) -> Any:
        chains = [ChainToReserve(b"", chain_of(name, 4), "", "") for name in names]
        return node.reserve(worker.attachment_id, lease_id, chains, **options)

    if ends != "cancelled":
        lease_id, _ = await reserve("a")
        num_before = 4
    call = asyncio.create_task(reserve("a", "b"))
    while node.stats().num_writing <= num_before:
        await asyncio.sleep(0)
    assert not call.done()
    if ends == "lease ended":
        assert node.release([lease_id], num_bytes_read=0) == 1
        with pytest.raises(NotFound, match="lease"):
            await call
        # A one-sided writer may still write into what it was told of.
        expected = (0, 0 if transport == "grpc" else num_before, 0)
    else:
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        expected = (num_before, 0, 1 if lease_id else 0)
    status = await worker.status()
    assert (status.num_writing, status.num_quarantined, status.num_leases) == expected


async def test_no_commit_of_a_large_put_keeps_other_calls_waiting_for_long(
    new_worker: NewWorker, store_settings: KvStoreSettings
) -> None:
    """The blocks of one put are committed by several calls, parents first, the lease ends with the
    last one."""
    num_blocks = 1100
    settings = dataclasses.replace(store_settings, capacity_bytes=num_blocks * 4096)
    async with local_store(settings) as store:
        worker = await new_worker(store.address, "shm", block_bytes=64, num_blocks=num_blocks)
        commit, sizes = store.node.commit, list[int]()

        def counted(attachment_id: str, lease_id: str, written: Any, **options: Any) -> Any:
            sizes.append(len(written))
            return commit(attachment_id, lease_id, written, **options)

        store.node.commit = counted  # type: ignore[method-assign]
        hashes = chain_of("a", num_blocks)
        put = PutChain(b"", list(zip(hashes, range(num_blocks), strict=True)), 16)
        (result,) = await worker.client.put_chains([put], 60.0, within())
        assert sum(sizes) == num_blocks == len(result.refs) and max(sizes) <= 512
        status = await worker.status()
        assert (status.num_committed, status.num_leases, status.num_writing) == (num_blocks, 0, 0)
        matched = await worker.match(hashes)
        assert matched.blocks == result.refs


async def test_a_commit_whose_lease_ends_between_two_turns_keeps_what_is_visible(
    store: LocalStore,
    new_worker: NewWorker,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest is given back, as of any lease that ends before its blocks are committed."""
    worker, node = await new_worker(store.address, transport), store.node
    monkeypatch.setattr(node.turns, "max_blocks", 3)
    asked = [ChainToReserve(b"", chain_of("a", 8), "", "")]
    lease_id, (reserved,) = await node.reserve(
        worker.attachment_id, "", asked, is_probe=False, ttl_s=60.0
    )
    assert reserved is not None
    written = [WrittenFrame(each.frame, each.generation, 1, 16) for each in reserved.blocks]
    call = asyncio.create_task(
        node.commit(worker.attachment_id, lease_id, written, ends_lease=False)
    )
    while not node.stats().num_committed:
        await asyncio.sleep(0)
    assert not call.done()
    node.release([lease_id], num_bytes_read=0)
    with pytest.raises(NotFound, match="lease"):
        await call
    status = await worker.status()
    assert (status.num_committed, status.num_writing, status.num_pinned) == (3, 0, 0)
    assert status.num_quarantined == (0 if transport == "grpc" else 5)
    assert (await node.status(check_integrity=True)).integrity_error == ""


async def test_a_long_match_goes_over_several_turns(
    store: LocalStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one lookup, under one lease; one that is cancelled on the way leaves no lease."""
    worker, node = await new_worker(store.address, "grpc"), store.node
    put = await worker.put(chain_of("a", 20), range(20))
    await worker.client.release([put.lease_id], deadline=within())
    monkeypatch.setattr(node.turns, "max_blocks", 1)  # a piece of a match is of 8 blocks
    before, hashes = node.stats(), chain_of("a", 26)
    matched = await worker.match(hashes)
    after = node.stats()
    assert (matched.blocks, after.num_pinned, after.num_leases) == (put.refs, 20, 1)
    assert after.num_lookups - before.num_lookups == 1
    assert after.num_blocks_asked - before.num_blocks_asked == 26
    assert after.num_blocks_matched - before.num_blocks_matched == 20
    assert (await worker.match(chain_of("b", 20) + hashes)).lease_id == ""
    assert node.stats().num_blocks_asked - after.num_blocks_asked == 46
    await worker.client.release([matched.lease_id], deadline=within())
    for num_turns in range(8):
        call = asyncio.create_task(
            node.match(
                worker.attachment_id, hashes, pin=True, lease_id="", ttl_s=60.0, budget_s=10.0
            )
        )
        for _ in range(num_turns):
            await asyncio.sleep(0)
        if not call.done():
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        else:
            node.release([call.result().lease_id], num_bytes_read=0)
        assert (node.stats().num_leases, node.stats().num_pinned) == (0, 0)


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_match_that_is_cancelled_while_its_answer_is_made_leaves_no_lease_of_its_own(
    store: LocalStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    """A lease that the worker named is the worker's, and stays."""
    worker, node, hashes = await new_worker(store.address, "grpc"), store.node, chain_of("a", 20)
    put = await worker.put(hashes, range(20))
    if is_own:
        await worker.client.release([put.lease_id], deadline=within())
    num_before = node.stats().num_lookups
    monkeypatch.setattr(service, "_MATCHED_A_TURN", 2)
    asked = kvstore_pb2.MatchRequest(
        attachment_id=worker.attachment_id, chain_hashes=hashes, pin=True, ttl_ms=60_000
    )
    if not is_own:
        asked.lease_id = put.lease_id
    context: Any = SimpleNamespace(time_remaining=lambda: None, invocation_metadata=lambda: ())
    call = asyncio.create_task(KvStoreServicer(node).Match(asked, context))
    while node.stats().num_lookups == num_before:
        await asyncio.sleep(0)
    assert not call.done()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert node.stats().num_leases == (0 if is_own else 1)


async def test_no_turn_of_the_loop_handles_more_blocks_than_its_budget(
    new_worker: NewWorker, store_settings: KvStoreSettings
) -> None:
    """Large puts, which evict one another's blocks, and long matches, all at once."""
    num_blocks = 600
    settings = dataclasses.replace(store_settings, capacity_bytes=2 * num_blocks * 4096)
    async with local_store(settings) as store:
        workers = [
            await new_worker(store.address, "shm", block_bytes=64, num_blocks=num_blocks)
            for _ in range(3)
        ]
        truth, loop = store.node.store, asyncio.get_running_loop()
        assert truth is not None
        handled = [0.0]
        """Blocks in each turn of the loop."""

        def tick() -> None:
            nonlocal next_tick
            handled.append(0)
            next_tick = loop.call_soon(tick)

        def counting(call: Callable[..., Any], num_blocks: Callable[..., float]) -> Any:
            def counted(*arguments: Any, **options: Any) -> Any:
                handled[-1] += num_blocks(*arguments)
                return call(*arguments, **options)

            return counted

        written = counting(truth.commit, lambda _worker, _lease, blocks, _now: len(blocks))
        reserved = counting(truth.reserve, lambda _worker, _parent, hashes: len(hashes))
        matched = counting(truth.match, lambda hashes: len(hashes) / MATCHED_PER_WRITTEN)
        truth.commit, truth.reserve, truth.match = written, reserved, matched  # type: ignore[method-assign]
        next_tick = loop.call_soon(tick)

        async def put_and_match(worker: Any, name: str) -> None:
            hashes = chain_of(name, num_blocks)
            put = PutChain(b"", list(zip(hashes, range(num_blocks), strict=True)), 16)
            await worker.client.put_chains([put], 60.0, within())
            found = await worker.match(hashes)
            await worker.client.release([found.lease_id], deadline=within())

        for turn in range(2):
            await asyncio.gather(
                *(put_and_match(each, f"{at} {turn}") for at, each in enumerate(workers))
            )
        next_tick.cancel()
        assert max(handled) <= 2 * BLOCKS_A_TURN
        assert sum(handled) > 3 * num_blocks
        assert (await store.node.status(check_integrity=True)).integrity_error == ""


async def test_a_tail_travels_and_is_gone_with_its_lease(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    prefill, decode = [await new_worker(store.address, transport) for _ in range(2)]
    put = await prefill.put(chain_of("a", 2), range(2), tail=("request 1", 2, 11))
    assert put.tail is not None
    assert (put.tail.chain_hash, put.tail.num_tokens) == (b"", 11)
    refs = [*put.refs, put.tail]
    assert await decode.get(put.lease_id, refs, [7, 8, 9]) == {}
    assert np.array_equal(decode.view[7:10], prefill.view[:3])
    assert (await decode.status()).num_tails == 1
    # Whoever holds the handle may renew and release its lease.
    await decode.client.renew(put.lease_id, ttl_s=30, deadline=within())
    assert await decode.release(put.lease_id, "") == 1
    assert await decode.release(put.lease_id) == 0
    status = await decode.status()
    assert (status.num_tails, status.num_committed, status.num_pinned) == (0, 2, 0)
    with pytest.raises(NotFound):
        await decode.client.renew(put.lease_id, ttl_s=30, deadline=within())
    assert set((await decode.get(put.lease_id, refs[2:], [7])).values()) == {"lease_lapsed"}


async def test_a_handle_is_pinned_as_far_as_it_holds(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain_of("a", 3), range(3), tail=("r", 3, 1))
    refs = [*put.refs, put.tail]
    lease_id, num_pinned = await worker.client.pin(refs, ttl_s=5, deadline=within())
    assert num_pinned == 4
    await worker.release(put.lease_id, lease_id)
    lease_id, num_pinned = await worker.client.pin(refs, ttl_s=5, deadline=within())
    assert num_pinned == 3  # the tail went with its last lease
    assert await worker.client.pin(refs[3:], ttl_s=5, deadline=within()) == ("", 0)


@pytest.mark.usefixtures("few_at_once")
async def test_no_room_is_an_answer_not_an_error(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    num_frames = worker.client.num_frames
    long = chain_of("a", num_frames + 5)
    blocks = [i % 48 for i in range(num_frames + 5)]
    put = await worker.put(long, blocks, tail=("r", 0, 3))
    assert len(put.refs) == num_frames and put.tail is None
    assert put.not_stored == 6
    none = await worker.put(chain_of("b", 2), range(2))
    assert (none.refs, none.not_stored, none.num_bytes) == ((), 2, 0)
    await worker.release(put.lease_id, none.lease_id)
    status = await worker.status()
    assert (status.num_leases, status.num_pinned) == (0, 0)


async def test_eviction_under_pressure_keeps_what_is_used(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str, seed: int
) -> None:
    """Many prompts through a small store, some leased: leased ones stay, the rest stays
    prefix-closed, and every hit has the bytes that were put."""
    worker = await new_worker(store.address, transport)
    draw = random.Random(seed)
    kept = await worker.put(chain_of("kept", 5), range(5))
    for _ in range(40):
        name, length = f"p{draw.randrange(12)}", draw.randrange(1, 9)
        ids = [(int(name[1:]) * 3 + i) % 30 for i in range(length)]
        matched = await worker.match(chain_of(name, length))
        targets = list(range(30, 30 + len(matched.blocks)))
        assert await worker.get(matched.lease_id, matched.blocks, targets) == {}
        assert np.array_equal(worker.view[targets], worker.view[ids[: len(targets)]])
        put = await worker.put(chain_of(name, length), ids)
        assert put.refs[: len(matched.blocks)] == matched.blocks
        await worker.release(matched.lease_id, put.lease_id)
    status = await worker.status()
    assert status.num_evictions > 0
    assert await worker.get(kept.lease_id, kept.refs, range(40, 45)) == {}
    assert np.array_equal(worker.view[40:45], worker.view[:5])
    # One lookup for each match, heartbeats aside.
    assert status.num_lookups == 40


@anywhere
async def test_many_workers_at_once_keep_every_law(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str, seed: int
) -> None:
    """Cancelled, late and lapsing puts and gets of overlapping chains from three workers."""
    workers = [await new_worker(store.address, transport) for _ in range(3)]

    async def busy(worker: Any, draw: random.Random) -> None:
        for _ in range(25):
            hashes = chain_of(f"p{draw.randrange(4)}", draw.randrange(1, 7))
            ids = draw.sample(range(20), len(hashes))
            tail = ("t", 21, 4) if draw.random() < 0.5 else None
            work = worker.put(hashes, ids, tail=tail, ttl_s=draw.choice([0.02, 30]))
            task = asyncio.create_task(work)
            if draw.random() < 0.4:
                await asyncio.sleep(draw.random() * 0.005)
                task.cancel()
            try:
                put = await task
            except (asyncio.CancelledError, NotFound, FailedPrecondition):
                continue
            refs = [*put.refs, *([put.tail] if put.tail else [])]
            await worker.get(put.lease_id, refs, range(30, 30 + len(refs)))
            if draw.random() < 0.7:
                await worker.release(put.lease_id)
            assert await store.node.check_integrity() == ""

    await asyncio.gather(*(busy(w, random.Random(seed + i)) for i, w in enumerate(workers)))
    for worker in workers:
        await worker.client.close()
    truth: Any = store.node.store
    truth.release([lease.lease_id for lease in truth.leases], now_s=0.0)
    await until(lambda: len(truth.quarantined) == 0 and len(truth.attachments) == 0)
    assert await store.node.check_integrity() == ""
    assert (truth.num_pinned(), truth.num_tails, len(truth.leases)) == (0, 0, 0)


async def test_bytes_read_are_told_once(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    """Through shared memory the store sees no read; releases at the same time must not tell it
    twice (the count once became negative)."""
    worker = await new_worker(store.address, transport)
    puts = [await worker.put(chain_of(f"p{i}", 2), range(2)) for i in range(4)]
    for put in puts:
        assert await worker.get(put.lease_id, put.refs, [7, 8]) == {}
    await asyncio.gather(*(worker.release(put.lease_id) for put in puts), return_exceptions=False)
    with pytest.raises(DeadlineExceeded):
        await worker.client.release(["x"], deadline=within(0.0))
    assert (await worker.status()).num_bytes_read == 8 * 5000


async def test_a_reported_block_is_dropped_only_if_it_is_bad(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str, seed: int
) -> None:
    """One flipped bit in a frame: gone with all below it, and stale to whoever leased it."""
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain_of("a", 6), range(6), tail=("t", 6, 3))
    refs = [*put.refs, put.tail]
    assert await worker.report(refs) == 0
    draw = random.Random(seed)
    assert store.node.slab is not None
    store.node.slab.block(refs[2].frame)[draw.randrange(5000)] ^= 1 << draw.randrange(8)
    assert await worker.report(refs) == 4
    failed = await worker.get(put.lease_id, refs, range(20, 27))
    assert failed == {2: "generation"}
    matched = await worker.match(chain_of("a", 6))
    assert matched.blocks == put.refs[:2]
    status = await worker.status()
    assert (status.num_quarantined, status.num_committed) == (1, 6)
    await worker.release(put.lease_id, matched.lease_id)
    status = await worker.status()
    assert (status.num_quarantined, status.num_committed, status.num_pinned) == (0, 2, 0)
    refused = {each.reason: each.num_blocks for each in status.refused}
    assert refused["checksum"] == 1
    put = await worker.put(chain_of("a", 6), range(6))
    assert await worker.get(put.lease_id, put.refs, range(20, 26)) == {}
    assert np.array_equal(worker.view[20:26], worker.view[:6])


async def test_everything_present_is_listed(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    """In several messages, by a server whose messages hold four."""
    servicer = KvStoreServicer(store.node, list_chunk=4)
    async with contextlib.AsyncExitStack() as stack:
        server, address = await grpc_server.listen("127.0.0.1:0", [servicer.add_to])
        stack.push_async_callback(server.stop, 0)
        channel = await stack.enter_async_context(rpc.channel(address))
        stub = kvstore_pb2_grpc.KvStoreStub(channel)

        async def listed() -> list[kvstore_pb2.ListReply]:
            return [reply async for reply in stub.List(kvstore_pb2.ListRequest(), timeout=10)]

        (empty,) = await listed()
        assert (empty.incarnation, len(empty.chain_hashes)) == (store.node.incarnation, 0)
        worker = await new_worker(store.address, "grpc")
        await worker.put(chain_of("a", 9), range(9), tail=("t", 6, 3))
        replies = await listed()
    assert [len(reply.chain_hashes) for reply in replies] == [4, 4, 1]
    assert sorted(h for reply in replies for h in reply.chain_hashes) == sorted(chain_of("a", 9))


async def test_a_store_is_no_lender_and_says_so(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    worker = await new_worker(store.address, "grpc")
    for method, why in (("AwaitLent", "only a lender's leases grow"), ("Hold", "whose slab says")):
        with pytest.raises(FailedPrecondition, match=why):
            await worker.call(method, attachment_id=worker.attachment_id)
    assert worker.client.broken is None


async def test_a_worker_that_says_goodbye_is_gone(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    assert store.node.store is not None and len(store.node.store.attachments) == 1
    await worker.client.close()
    assert len(store.node.store.attachments) == 0
    with pytest.raises(Unavailable, match="closed"):
        await worker.match([])
    await worker.client.close()  # twice is once


async def test_a_silent_worker_is_given_up_and_told_to_attach_again(
    store: LocalStore, new_worker: NewWorker
) -> None:
    """Over gRPC; a shared-memory worker is known by its lock instead."""
    worker, mapped = [
        await new_worker(store.address, name, heartbeat_s=1000.0) for name in ("grpc", "shm")
    ]
    truth: Any = store.node.store
    await driven(store)(lambda: len(truth.attachments) == 1)
    with pytest.raises(Unavailable, match="attach again"):
        await worker.match(chain_of("a", 1))
    assert worker.client.broken is not None
    await mapped.match(chain_of("a", 1))


async def test_a_heartbeat_notices_another_life(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    worker = await new_worker(store.address, "grpc", heartbeat_s=0.01)
    client: KvStoreClient = worker.client
    await asyncio.wait([client._heartbeat], timeout=0.1)
    assert client.broken is None
    store.node.incarnation = b"another life 123"
    await until(lambda: client.broken is not None)
    assert client.broken is not None and "restarted" in client.broken


@pytest.mark.parametrize(
    "change", [{"ttl_s": 0.0}, {"tail": ("t", 1, 0)}], ids=["no time to live", "empty tail"]
)
async def test_nonsense_is_refused_by_field(
    store: store_process.RunningStore, new_worker: NewWorker, change: dict[str, Any]
) -> None:
    worker = await new_worker(store.address, "grpc")
    with pytest.raises(InvalidArgument):
        await worker.put(chain_of("a", 1), [0], **change)
    await worker.client.settle()
    status = await worker.status()
    assert (status.num_writing, status.num_leases, status.num_quarantined) == (0, 0, 0)


# A device's part in attaching is that the slab is locked for it.
@pytest.mark.parametrize("transport", [*TRANSPORTS, OnDevice("shm")], ids=name_of)
async def test_a_worker_that_leaves_while_attaching_does_not_take_the_slab_along(
    store: store_process.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    """Cancelled at every stage of the very first attachment, the next one finds things in order."""
    for turns in [*range(0, 40, 2), *range(40, 400, 40)]:
        task = asyncio.create_task(new_worker(store.address, transport))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await task.result().client.close()
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain_of("a", 3), range(3))
    assert await worker.get(put.lease_id, put.refs, [7, 8, 9]) == {}


async def test_attaching_to_a_stalled_store_is_bounded(
    new_store: NewStore, new_worker: NewWorker, transport: str
) -> None:
    process = await new_store()
    await process.pause()
    worker = Worker(transport, BLOCK_BYTES, 4, 1)
    with pytest.raises((DeadlineExceeded, Unavailable)):
        await worker.attach(process.address, timeout_s=2.0 if transport == "nixl" else 0.3)
    process.wake()


@pytest.mark.parametrize(
    ("transport", "number"), [("shm", signal.SIGINT), ("nixl", signal.SIGTERM)]
)
async def test_a_store_in_use_stops_cleanly(
    new_store: NewStore, new_worker: NewWorker, transport: str, number: signal.Signals
) -> None:
    process = await new_store(is_forked=False)
    worker = await new_worker(process.address, transport)
    await worker.put(chain_of("a", 3), range(3))
    assert await process.end(number) == 0
    await worker.client.close()


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("capacity_byte=1", "nearest is 'capacity_bytes'"),
        ("slab_dir=/nowhere", "slab_dir"),
        ("capacity_bytes=1000000000000000", "capacity_bytes"),
        ("listen=127.0.0.1:99999", "listen"),
    ],
)
async def test_a_wrong_setting_is_one_line_and_exit_code_2(override: str, says: str) -> None:
    process = await forks.start("-m", "kvstore", f"--set={override}", "--log-level=error")
    _, stderr = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    lines = [line for line in stderr.decode().splitlines() if line.startswith("kvstore: ")]
    assert len(lines) == 1 and says in lines[0]


async def test_memory_is_made_ready_ahead_of_its_use(
    store_settings: KvStoreSettings, new_worker: NewWorker
) -> None:
    """Of a slab that is larger than what is made ready at once."""
    num_ahead = TOUCH_AHEAD_BYTES // 8192
    capacity_bytes = (num_ahead + 24) * 8192
    settings = dataclasses.replace(store_settings, capacity_bytes=capacity_bytes)
    async with store_process.running(settings) as store:
        worker = await new_worker(store.address, "grpc")
        await until(lambda: store.node.num_touched == num_ahead)
        await worker.put(chain_of("a", 5), range(5))
        await until(lambda: store.node.num_touched == num_ahead + 5)
        await worker.put(chain_of("b", 27), range(27))
        await until(lambda: store.node.num_touched == num_ahead + 24 == worker.client.num_frames)


async def test_the_garbage_collector_does_not_look_at_the_blocks(
    store: store_process.RunningStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a million of them each look would stop the loop for a second."""
    monkeypatch.setattr(store_node, "FREEZE_EVERY", 5)
    worker = await new_worker(store.address, "grpc")
    before = gc.get_freeze_count()
    try:
        await worker.put(chain_of("a", 4), range(4))
        await worker.put(chain_of("b", 1), range(1))
        await until(lambda: gc.get_freeze_count() > before)
        truth = store.node.store
        assert truth is not None and len(truth.tree) == 5
        seen = {id(each) for each in gc.get_objects()}
        assert not seen & {id(each) for each in truth.tree}
    finally:
        gc.unfreeze()


async def test_a_folder_too_small_is_named(store_settings: KvStoreSettings) -> None:
    settings = dataclasses.replace(store_settings, capacity_bytes=2**60)
    with pytest.raises(NoCapacity, match=r"slab_dir.*capacity_bytes"):
        async with store_process.running(settings):
            raise AssertionError("it started")


async def test_a_busy_port_is_named(store: store_process.RunningStore) -> None:
    settings = dataclasses.replace(KvStoreSettings(), listen=store.address)
    with pytest.raises(Unavailable, match=store.address):
        async with store_process.running(settings):
            raise AssertionError("it started")


async def test_integrity_is_watched_in_the_background(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    """A broken law is found without anybody asking, and shown in the status."""
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain_of("a", 1), [0])
    truth: Any = store.node.store
    node = truth.tree.find(put.refs[0].chain_hash)
    assert node is not None
    node.num_pins += 1
    await worker.match([])
    await until(lambda: "pins" in store.node.integrity_error)
    status = await worker.client.status(deadline=within())
    assert "pins" in status.integrity_error
    node.num_pins -= 1


@pytest.fixture
async def redis_url(tmp_path: Path) -> AsyncIterator[str]:
    server = RedisServer(tmp_path)
    await server.start()
    yield server.url
    server.kill()


async def test_the_index_follows_the_store(
    store_settings: KvStoreSettings, new_worker: NewWorker, redis_url: str
) -> None:
    """From put to lookup and from eviction to its absence, and away with the store."""
    settings = dataclasses.replace(store_settings, redis_url=redis_url, heartbeat_s=0.05)
    client: redis.asyncio.Redis = registry.connect_redis(redis_url, 2.0)
    lookup = PrefixIndex(client, 5.0)
    async with store_process.running(settings) as running:
        worker = await new_worker(running.address, "grpc")
        put = await worker.put(chain_of("a", 6), range(6), tail=("t", 7, 2))
        assert running.publisher is not None
        publisher = running.publisher
        await until(lambda: publisher.synced)
        (row,) = await lookup.stores()
        assert (row.node_id, row.address) == (running.node.node_id, running.address)
        nodes = {row.node_id: row.incarnation}
        assert await lookup.lookup(chain_of("a", 9), nodes) == {row.node_id: 6}
        await worker.release(put.lease_id)
        num_frames = worker.client.num_frames
        await worker.put(chain_of("b", num_frames - 2), [i % 48 for i in range(num_frames - 2)])
        await until(lambda: publisher.synced)
        assert await lookup.lookup(chain_of("a", 9), nodes) == {row.node_id: 2}
        status = await worker.status()
        assert status.index_synced and status.index_sequence == publisher.sequence
    assert await lookup.stores() == []
    assert await lookup.lookup(chain_of("b", 9), nodes) == {row.node_id: 0}
    await client.aclose()
