"""What every transport of block bytes must do, and what no failure may leave behind."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import block_hash, errors, serve
from kvstore.config import KvStoreSettings
from kvstore.transport.shm import ShmTransport
from process.errors import BatonError, FailedPrecondition
from tests.conftest import LONG
from tests.harness.waiting import within

Chain = Callable[[str, int], list[bytes]]
NewWorker = Callable[..., Any]
SHM_GIVES = {errors.GENERATION, errors.LEASE_LAPSED}


@pytest.mark.parametrize("num_blocks", [1, 2, 3, 7, 13] if LONG else [1, 7])
@pytest.mark.parametrize("block_bytes", [5000, 8192])
async def test_blocks_go_and_come_back(
    store: serve.RunningStore,
    new_worker: NewWorker,
    chain: Chain,
    transport: str,
    num_blocks: int,
    block_bytes: int,
    seed: int,
) -> None:
    """Scattered and neighbouring blocks, in any order; nothing else is touched."""
    writer = await new_worker(store.address, transport, block_bytes=block_bytes)
    reader = await new_worker(store.address, transport, block_bytes=block_bytes)
    draw = random.Random(seed)
    for attempt in range(3):
        ids = list(range(20)) if attempt == 0 else draw.sample(range(48), 20)
        sources, targets = ids[:num_blocks], sorted(draw.sample(range(48), num_blocks))
        hashes = chain(f"prompt {attempt}", num_blocks)
        put = await writer.put(hashes, sources)
        assert put.num_bytes == num_blocks * block_bytes and put.not_stored == 0
        matched = await reader.client.match(hashes, ttl_s=30, deadline=within())
        assert matched.blocks == put.refs
        before = reader.view.copy()
        assert await reader.get(matched.lease_id, matched.blocks, targets) == {}
        before[targets] = writer.view[sources]
        assert np.array_equal(reader.view, before)
        await reader.client.release([matched.lease_id, put.lease_id], deadline=within())
    status = await reader.status()
    assert status.num_bytes_written == status.num_bytes_read == 3 * num_blocks * block_bytes
    assert (status.num_pinned, status.num_leases, status.num_writing) == (0, 0, 0)


@pytest.fixture
def large_settings(store_settings: KvStoreSettings) -> KvStoreSettings:
    return dataclasses.replace(store_settings, capacity_bytes=48 * 2**20)


async def test_blocks_larger_than_any_chunk(
    large_settings: KvStoreSettings, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    """5 MiB and some: several gRPC chunks, several shared-memory pieces, two NIXL pieces
    together."""
    block_bytes = 5 * 2**20 + 1234
    async with serve.running(large_settings) as store:
        worker = await new_worker(store.address, transport, block_bytes=block_bytes, num_blocks=9)
        put = await worker.put(chain("large", 4), [0, 1, 2, 4])
        assert await worker.get(put.lease_id, put.refs, [5, 6, 7, 8]) == {}
        assert np.array_equal(worker.view[[5, 6, 7, 8]], worker.view[[0, 1, 2, 4]])
        await worker.client.close()


async def test_nothing_to_move(
    store: serve.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    put = await worker.put([], [])
    assert (put.refs, put.num_bytes, put.not_stored) == ((), 0, 0)
    assert await worker.get(put.lease_id, [], []) == {}


async def test_a_corrupt_frame_is_detected(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 5), range(5))
    assert store.node.slab is not None
    store.node.slab.block(put.refs[3].frame)[-1] ^= 1
    assert await worker.get(put.lease_id, put.refs, range(10, 15)) == {3: errors.CHECKSUM}


async def test_a_corrupt_copy_is_detected_by_the_readers_own_memory(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    """The writer says what the bytes were over its own memory: a wrong ref is as bad as a bad
    byte."""
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 2), range(2))
    wrong = dataclasses.replace(put.refs[1], checksum=put.refs[1].checksum ^ 1)
    assert await worker.get(put.lease_id, [put.refs[0], wrong], [8, 9]) == {1: errors.CHECKSUM}


async def test_checksums_are_of_the_writers_own_bytes(
    large_settings: KvStoreSettings, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    """Also of blocks that are hashed in several pieces while they move."""
    block_bytes = 5 * 2**18 + 77
    async with serve.running(large_settings) as store:
        worker = await new_worker(store.address, transport, block_bytes=block_bytes, num_blocks=12)
        ids = [7, 8, 2, 0]
        put = await worker.put(chain("large", 3), ids[:3], tail=("tail", ids[3], 5))
        assert put.tail is not None
        told = [ref.checksum for ref in (*put.refs, put.tail)]
        assert told == [block_hash.checksum(worker.view[block_id]) for block_id in ids]
        await worker.client.close()


async def test_a_stale_generation_is_detected(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 3), range(3))
    refs = list(put.refs)
    refs[1] = dataclasses.replace(refs[1], generation=refs[1].generation + 2)
    assert await worker.get(put.lease_id, refs, [10, 11, 12]) == {1: errors.GENERATION}
    odd = [dataclasses.replace(ref, generation=ref.generation - 1) for ref in put.refs]
    failed = await worker.get(put.lease_id, odd, [10, 11, 12])
    assert failed == dict.fromkeys(range(3), errors.GENERATION)


async def test_a_frame_that_does_not_exist_is_refused(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 1), [0])
    absent = dataclasses.replace(put.refs[0], frame=10_000)
    failed = await worker.get(put.lease_id, [put.refs[0], absent], [10, 11])
    assert failed.keys() == {1} and failed[1] in (errors.MISSING, errors.GENERATION)


async def test_after_the_lease_the_frames_may_be_anothers(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    """Evicted and written again by somebody: the reader must see it and say why."""
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 20), range(20))
    await worker.client.release([put.lease_id], deadline=within())
    num_frames = worker.client.num_frames
    other = await worker.put(chain("b", num_frames), [i % 40 for i in range(num_frames)])
    assert other.not_stored == 0
    failed = await worker.get(put.lease_id, put.refs, range(20, 40))
    assert failed == dict.fromkeys(range(20), errors.LEASE_LAPSED)


async def test_another_life_of_the_store_is_not_even_asked(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 2), range(2))
    before = worker.view.copy()
    items = [(put.refs[0], 10), (put.refs[1], 11)]
    got = await worker.client.get_blocks(
        put.lease_id, items, within(), incarnation=b"another life 123"
    )
    assert got.failed == {0: errors.INCARNATION, 1: errors.INCARNATION}
    assert np.array_equal(worker.view, before)


async def test_a_deadline_that_passed_is_a_reason(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 2), range(2))
    items = [(put.refs[0], 10), (put.refs[1], 11)]
    try:
        got = await worker.client.get_blocks(put.lease_id, items, within(0.0))
    except errors.TransferTimeout as error:
        await asyncio.wait_for(error.quarantine.settled, 10)
    else:
        assert got.failed == {0: errors.DEADLINE, 1: errors.DEADLINE}
    with pytest.raises(BatonError):
        await worker.put(chain("b", 2), range(2), deadline=within(0.0))
    assert await worker.get(put.lease_id, put.refs, [10, 11]) == {}


@pytest.mark.parametrize("operation", ["put", "get"])
async def test_a_cancelled_transfer_leaves_nothing_behind(
    store: serve.RunningStore,
    new_worker: NewWorker,
    chain: Chain,
    transport: str,
    operation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled after every number of loop turns from 0 on until it is too late to: no reservation,
    no quarantine, no lease but our own stays, and nothing writes into the destinations later."""
    copy_in, may_copy = ShmTransport._copy_in, threading.Event()

    def slowly(self: ShmTransport, *places: Any) -> list[int]:
        # Shared memory waits once only, for its thread: there shall be moments to cancel it in.
        assert may_copy.wait(20)
        time.sleep(0.002)
        return copy_in(self, *places)

    monkeypatch.setattr(ShmTransport, "_copy_in", slowly)
    worker = await new_worker(store.address, transport)
    reader = await new_worker(store.address, transport)
    may_copy.set()
    kept = await worker.put(chain("kept", 8), range(8))
    truth = store.node.store
    assert truth is not None
    num_cancelled, turns = 0, 0
    while True:
        if turns < 8:  # a quick copy must not be done before the loop has turned so often
            may_copy.clear()
            for each in (worker, reader):
                each.device.engine_runs.clear()
        if operation == "put":
            work = worker.put(chain(f"c{turns}", 8), range(8), tail=("t", 9, 3))
        else:
            work = reader.client.get_blocks(
                kept.lease_id, list(zip(kept.refs, range(8), strict=True)), within()
            )
        task = asyncio.create_task(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        may_copy.set()
        for each in (worker, reader):
            each.device.engine_runs.set()
        try:
            result = await task
        except errors.TransferCancelled as error:
            assert set(error.quarantine.block_ids) <= set(range(8))
            await asyncio.wait_for(error.quarantine.settled, 10)
        except asyncio.CancelledError:
            pass
        else:
            if operation == "put":
                await worker.client.release([result.lease_id], deadline=within())
            break  # it was over before the cancellation came
        num_cancelled += 1
        turns = turns + 1 if turns < 60 else int(turns * 1.1)
        if operation == "get":
            reader.view[:8] = 1  # whatever still writes is seen
        await worker.client.settle()
        await worker.client.match([], ttl_s=1, deadline=within())
        if operation == "get":
            assert (reader.view[:8] == 1).all()
    assert num_cancelled > 5
    status = await worker.status()
    assert (status.num_writing, status.num_quarantined, status.num_tails) == (0, 0, 0)
    assert (status.num_leases, status.num_pinned) == (1, 8)
    assert store.node.peers is not None and store.node.peers.num_moving == 0


async def test_a_copy_torn_by_a_writer_is_detected(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory only: the generation changes while the copy runs. The other transports copy on
    the store's own loop, where nothing comes between."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain("a", 3), range(3))
    slab = store.node.slab
    assert slab is not None
    original = ShmTransport._copy_in

    def torn(self: ShmTransport, blocks: Any, frames: Any) -> list[int]:
        checksums = original(self, blocks, frames)
        frame = put.refs[1].frame
        if frame in frames:  # after its copy, before the second look at its generation
            slab.publish(frame, put.refs[1].generation + 1)
        return checksums

    monkeypatch.setattr(ShmTransport, "_copy_in", torn)
    failed = await worker.get(put.lease_id, put.refs, [10, 11, 12])
    assert failed == {1: errors.GENERATION}


async def test_shared_memory_that_cannot_be_mapped_is_an_error_not_another_transport(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain
) -> None:
    first = await new_worker(store.address, "grpc")
    assert store.node.slab is not None
    path = store.node.slab.path
    hidden = Path(f"{path}.hidden")
    os.rename(path, hidden)  # as for a worker in another mount namespace
    try:
        with pytest.raises(FailedPrecondition, match="set transport to grpc or nixl"):
            await new_worker(store.address, "shm")
    finally:
        os.rename(hidden, path)
    assert (await first.status()).num_attachments == 1  # the refused one said goodbye
    put = await first.put(chain("a", 1), [0])
    assert put.not_stored == 0


async def test_another_block_size_is_refused(
    store: serve.RunningStore, new_worker: NewWorker, transport: str
) -> None:
    await new_worker(store.address, transport)
    with pytest.raises(FailedPrecondition, match="block_bytes"):
        await new_worker(store.address, transport, block_bytes=6000)
    with pytest.raises(ValueError, match="transport"):
        await new_worker(store.address, "carrier pigeon")


async def test_transports_meet_in_one_store(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain
) -> None:
    """What one worker wrote by one transport another reads by another."""
    workers = [await new_worker(store.address, name) for name in ("shm", "nixl", "grpc")]
    for writer in workers:
        hashes = chain(f"by {writer.transport}", 3)
        put = await writer.put(hashes, [3, 5, 6])
        for reader in workers:
            assert await reader.get(put.lease_id, put.refs, [40, 41, 47]) == {}
            assert np.array_equal(reader.view[[40, 41, 47]], writer.view[[3, 5, 6]])
