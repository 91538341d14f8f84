"""What every transport of block bytes must do, out of a store and out of a worker that lends, and
what no failure may leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import random
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from process.rpc_errors import BatonError, FailedPrecondition, Unavailable
from tests.conftest import LONG
from tests.harness.sources import LENDING, MAPPED, Lending, Stored, lending, stored
from tests.harness.store import (
    TRANSPORTS,
    HeldCopies,
    LocalStore,
    NewWorker,
    OnDevice,
    anywhere,
    cancelled,
    chain_of,
)
from tests.harness.waiting import until, within

pytestmark = pytest.mark.oracle

STORED = (*TRANSPORTS, *map(OnDevice, TRANSPORTS))
WAYS = [(stored, transport) for transport in STORED] + [
    (lending, transport) for transport in LENDING
]


@dataclasses.dataclass
class Way:
    """A transport out of a source, whose blocks lie on a device where the reader's do."""

    make: Any
    transport: str

    def source(self, seed: int, **sizes: int) -> AbstractAsyncContextManager[Any]:
        if self.make is stored:
            return stored(self.transport, seed, **sizes)
        return lending(seed, is_on_device=isinstance(self.transport, OnDevice), **sizes)


FROM_HOST = [way for way in WAYS if way[1] == MAPPED or not isinstance(way[1], OnDevice)]
"""For what is decided before a byte moves: where blocks lie plays no part."""


def name_of(way: tuple[Any, str]) -> str:
    make, transport = way
    on_device = "-device" if isinstance(transport, OnDevice) and transport != MAPPED else ""
    return f"{make.__name__}-{transport}{on_device}"


in_host_memory = pytest.mark.parametrize("way", FROM_HOST, ids=name_of, indirect=True)


@pytest.fixture(params=WAYS, ids=name_of)
def way(request: pytest.FixtureRequest) -> Way:
    return Way(*request.param)


@pytest.fixture
async def source(way: Way, seed: int) -> AsyncIterator[Any]:
    async with way.source(seed + 1) as made:
        yield made


@pytest.fixture
async def reader(source: Stored | Lending, way: Way, new_worker: NewWorker) -> Any:
    return await new_worker(source.address, way.transport)


@pytest.mark.parametrize(
    ("num_blocks", "block_bytes"),
    itertools.product([1, 2, 3, 7, 13], [5000, 8192]) if LONG else [(1, 8192), (13, 5000)],
)
async def test_blocks_go_and_come_back(
    way: Way, new_worker: NewWorker, num_blocks: int, block_bytes: int, seed: int
) -> None:
    """Scattered and neighbouring blocks, in any order; nothing else is touched, here or there."""
    async with way.source(seed + 1, block_bytes=block_bytes) as source:
        reader = await new_worker(source.address, way.transport, block_bytes=block_bytes)
        assert reader.client.frame_bytes == block_bytes
        draw, theirs = random.Random(seed), source.view.copy()
        for attempt in range(3):
            ids = list(range(20)) if attempt == 0 else draw.sample(range(48), 20)
            sources, targets = ids[:num_blocks], sorted(draw.sample(range(48), num_blocks))
            lease_id, blocks = await source.give(sources, f"prompt {attempt}")
            before = reader.view.copy()
            assert await reader.get(lease_id, blocks, targets) == {}
            before[targets] = source.view[sources]
            assert np.array_equal(reader.view, before)
            assert await reader.release(lease_id, lease_id) == 1
        assert np.array_equal(source.view, theirs)
        status = await reader.status()
        num_bytes = 3 * num_blocks * block_bytes
        assert status.num_bytes_read == num_bytes
        assert status.num_bytes_written == (num_bytes if way.make is stored else 0)
        assert (status.num_pinned, status.num_leases, status.num_writing) == (0, 0, 0)


async def test_blocks_larger_than_any_chunk(way: Way, new_worker: NewWorker, seed: int) -> None:
    """5 MiB and some: several gRPC chunks, several shared-memory pieces, two NIXL pieces
    together."""
    block_bytes = 5 * 2**20 + 1234
    async with way.source(seed + 1, block_bytes=block_bytes, num_blocks=4) as source:
        reader = await new_worker(
            source.address, way.transport, block_bytes=block_bytes, num_blocks=4
        )
        lease_id, blocks = await source.give([0, 1, 2, 3])
        assert await reader.get(lease_id, blocks, [3, 0, 1, 2]) == {}
        assert np.array_equal(reader.view[[3, 0, 1, 2]], source.view)
        await reader.client.close()


@in_host_memory
async def test_nothing_to_move(source: Stored | Lending, reader: Any) -> None:
    lease_id, _ = await source.give([1])
    assert await reader.get(lease_id, [], []) == {}


async def test_bytes_that_changed_are_detected_and_reported(
    source: Stored | Lending, reader: Any
) -> None:
    """Of one block; those of another lease stay."""
    lease_id, blocks = await source.give(range(5))
    other, others = await source.give([10, 11], "b")
    source.flip_bit(blocks[3])
    assert await reader.get(lease_id, blocks, range(10, 15)) == {3: "checksum"}
    await reader.client.settle()
    assert (await reader.get(lease_id, blocks[3:4], [0])).keys() == {0}
    assert await reader.get(other, others, [0, 1]) == {}
    refused = {each.reason: each.num_blocks for each in (await reader.status()).refused}
    assert refused["checksum"] == 1 and reader.client.num_bad_blocks >= 1


async def test_a_wrong_complaint_costs_no_block(source: Stored | Lending, reader: Any) -> None:
    """What the writer said of its bytes is compared to the reader's own memory: a wrong reference
    is as bad as a bad byte. What is at the source is right, and stays."""
    lease_id, blocks = await source.give(range(3))
    wrong = dataclasses.replace(blocks[1], checksum=blocks[1].checksum ^ 1)
    assert await reader.get(lease_id, [blocks[0], wrong], [8, 9]) == {1: "checksum"}
    await reader.client.settle()
    assert await reader.get(lease_id, blocks, [8, 9, 10]) == {}


@in_host_memory
async def test_a_stale_generation_is_detected(source: Stored | Lending, reader: Any) -> None:
    lease_id, blocks = await source.give(range(3))
    refs = list(blocks)
    refs[1] = dataclasses.replace(refs[1], generation=refs[1].generation + 2)
    assert await reader.get(lease_id, refs, [10, 11, 12]) == {1: "generation"}
    odd = [dataclasses.replace(ref, generation=ref.generation - 1) for ref in blocks]
    failed = await reader.get(lease_id, odd, [10, 11, 12])
    assert failed == dict.fromkeys(range(3), "generation")


@in_host_memory
async def test_a_frame_that_does_not_exist_is_refused(
    source: Stored | Lending, reader: Any
) -> None:
    lease_id, blocks = await source.give([0])
    absent = dataclasses.replace(blocks[0], frame=10_000)
    failed = await reader.get(lease_id, [blocks[0], absent], [10, 11])
    assert failed.keys() == {1} and failed[1] in ("missing", "generation")


@in_host_memory
async def test_after_the_lease_the_frames_may_be_anothers(
    source: Stored | Lending, reader: Any
) -> None:
    """Used again for another prompt: the reader must see it and say why."""
    given = await source.give(range(20))
    await source.use_again(given)
    failed = await reader.get(*given, range(20, 40))
    assert failed == dict.fromkeys(range(20), "lease_lapsed")


@in_host_memory
async def test_another_life_of_the_source_is_not_even_asked(
    source: Stored | Lending, reader: Any
) -> None:
    before = reader.view.copy()
    lease_id, blocks = await source.give(range(2))
    failed = await reader.get(lease_id, blocks, [10, 11], incarnation=b"another life 123")
    assert failed == dict.fromkeys(range(2), "incarnation")
    assert np.array_equal(reader.view, before)


@in_host_memory
async def test_a_deadline_that_passed_is_a_reason(source: Stored | Lending, reader: Any) -> None:
    lease_id, blocks = await source.give(range(2))
    failed = await reader.get_too_late(lease_id, blocks, [10, 11])
    assert failed == dict.fromkeys(range(2), "deadline")
    assert await reader.get(lease_id, blocks, [10, 11]) == {}


async def test_a_cancelled_read_leaves_nothing_behind(
    source: Stored | Lending, way: Way, new_worker: NewWorker
) -> None:
    """Cancelled after every number of loop turns from 0 on until it is too late to: nothing writes
    into the destinations later, and nothing stays held."""
    with HeldCopies() if way.transport == "shm" else contextlib.nullcontext() as copies:
        reader = await new_worker(source.address, way.transport)
        lease_id, blocks = await source.give(range(8))
        num_turns = num_cancelled = 0

        def hold() -> None:
            """A quick copy must not be done before the loop has turned so often."""
            reader.device.engine_runs.clear()
            if copies is not None:
                copies.may_go_on.clear()

        def release() -> None:
            reader.device.engine_runs.set()
            if copies is not None:
                copies.may_go_on.set()

        while True:
            if num_turns < 8:
                hold()
            items = list(zip(blocks, range(8), strict=True))
            work = reader.client.get_blocks(lease_id, items, within())
            if await cancelled(work, num_turns, release) is not None:
                break
            num_cancelled += 1
            num_turns = num_turns + 1 if num_turns < 60 else int(num_turns * 1.2)
            reader.view[:8] = 1  # whatever still writes is seen
            await reader.client.settle()
            await reader.match([])
            assert (reader.view[:8] == 1).all()
        assert num_cancelled > 5
        status = await reader.status()
        assert (status.num_leases, status.num_pinned) == (1, 8)
        await reader.release(lease_id)
        await until(lambda: is_idle(reader))


async def is_idle(worker: Any) -> bool:
    """Nothing is held where it is attached."""
    status = await worker.status()
    held = (status.num_leases, status.num_pinned, status.num_writing, status.num_quarantined)
    return held == (0, 0, 0, 0)


@in_host_memory
async def test_another_block_size_is_refused(
    source: Stored | Lending, way: Way, new_worker: NewWorker
) -> None:
    with pytest.raises(FailedPrecondition, match="block_bytes"):
        await new_worker(source.address, way.transport, block_bytes=6000)
    with pytest.raises(ValueError, match="transport"):
        await new_worker(source.address, "carrier pigeon")


@in_host_memory
async def test_a_close_waits_for_what_moves(
    source: Stored | Lending, reader: Any, way: Way, new_worker: NewWorker
) -> None:
    """The source must not hear that this reader is gone while its copy is under way: it would give
    the frames to another."""
    lease_id, blocks = await source.give(range(3))
    other = await new_worker(source.address, way.transport)
    num_attachments = (await other.status()).num_attachments
    gate = reader.hold_gets()
    getting = asyncio.create_task(reader.get(lease_id, blocks, [10, 11, 12]))
    await gate.wait_entered()
    closing = asyncio.create_task(reader.client.close())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="closed"):
        await reader.get(lease_id, blocks, [10, 11, 12])
    assert (await other.status()).num_attachments == num_attachments
    gate.open()
    assert await getting == {}
    await closing

    async def is_gone() -> bool:
        return bool((await other.status()).num_attachments == num_attachments - 1)

    await until(is_gone)
    await other.release(lease_id)


# ---- into a store


@pytest.fixture
async def writer(store: LocalStore, new_worker: NewWorker, transport: str) -> Any:
    return await new_worker(store.address, transport)


@anywhere
async def test_what_cannot_be_put_leaves_nothing(writer: Any) -> None:
    put = await writer.put([], [])
    assert (put.refs, put.num_bytes, put.not_stored) == ((), 0, 0)
    await writer.release(put.lease_id)
    with pytest.raises(BatonError):
        await writer.put(chain_of("b", 2), range(2), deadline=within(0.0))
    await writer.client.settle()
    await until(lambda: is_idle(writer))


@anywhere
async def test_checksums_are_of_the_writers_own_bytes(
    new_worker: NewWorker, transport: str, seed: int
) -> None:
    """Also of blocks that are hashed in several pieces while they move."""
    sizes = {"block_bytes": 5 * 2**18 + 77, "num_blocks": 12}
    async with stored(transport, seed, **sizes) as source:
        ids = [7, 8, 2, 0]
        put = await source.writer.put(chain_of("large", 3), ids[:3], tail=("tail", ids[3], 5))
        assert put.tail is not None
        told = [ref.checksum for ref in (*put.refs, put.tail)]
        assert told == source.writer.checksums(ids)


@anywhere
async def test_a_cancelled_put_leaves_nothing_behind(store: LocalStore, writer: Any) -> None:
    """As a read: no reservation, no quarantine, no lease but our own stays."""
    await writer.put(chain_of("kept", 8), range(8))
    num_turns = num_cancelled = 0
    while True:
        if num_turns < 8:
            writer.device.engine_runs.clear()
        work = writer.put(chain_of(f"c{num_turns}", 8), range(8), tail=("t", 9, 3))
        put = await cancelled(work, num_turns, writer.device.engine_runs.set)
        if put is not None:
            await writer.release(put.lease_id)
            break
        num_cancelled += 1
        num_turns = num_turns + 1 if num_turns < 60 else int(num_turns * 1.1)
        await writer.client.settle()
        await writer.match([])
    assert num_cancelled > 5
    status = await writer.status()
    assert (status.num_writing, status.num_quarantined, status.num_tails) == (0, 0, 0)
    assert (status.num_leases, status.num_pinned) == (1, 8)


async def test_a_copy_torn_by_a_writer_is_detected(
    store: LocalStore, new_worker: NewWorker
) -> None:
    """Shared memory only: the generation changes while the copy runs. The other transports copy on
    the store's own loop, where nothing comes between."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain_of("a", 3), range(3))
    with store.tearing(put.refs[1]):
        assert await worker.get(put.lease_id, put.refs, [10, 11, 12]) == {1: "generation"}


async def test_shared_memory_that_cannot_be_mapped_is_an_error_not_another_transport(
    store: LocalStore, new_worker: NewWorker
) -> None:
    first = await new_worker(store.address, "grpc")
    path = store.slab_path
    hidden = Path(f"{path}.hidden")
    os.rename(path, hidden)  # as for a worker in another mount namespace
    try:
        with pytest.raises(FailedPrecondition, match="set transport to grpc or nixl"):
            await new_worker(store.address, "shm")
    finally:
        os.rename(hidden, path)
    assert (await first.status()).num_attachments == 1  # the refused one said goodbye
    put = await first.put(chain_of("a", 1), [0])
    assert put.not_stored == 0


async def test_transports_meet_in_one_store(store: LocalStore, new_worker: NewWorker) -> None:
    """What one worker wrote by one transport another reads by another."""
    workers = [await new_worker(store.address, name) for name in TRANSPORTS]
    for writer in workers:
        put = await writer.put(chain_of(f"by {writer.transport}", 3), [3, 5, 6])
        for reader in workers:
            assert await reader.get(put.lease_id, put.refs, [40, 41, 47]) == {}
            assert np.array_equal(reader.view[[40, 41, 47]], writer.view[[3, 5, 6]])
