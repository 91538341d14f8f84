"""A block that arrives with a wrong checksum is told to its store, which looks for itself."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore import errors, serve
from kvstore.transport.base import GetResult
from process.deadline import Deadline
from process.errors import Unavailable
from tests.harness.waiting import within

Chain = Callable[[str, int], list[bytes]]
NewWorker = Callable[..., Any]


async def test_nobody_meets_the_same_bad_block_twice(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    """The store drops it and all below it, once its reader's lease is over; parents stay."""
    worker = await new_worker(store.address, transport)
    hashes = chain("a", 6)
    put = await worker.put(hashes, range(6))
    assert store.node.slab is not None
    store.node.slab.block(put.refs[3].frame)[7] ^= 1
    assert await worker.get(put.lease_id, put.refs, range(10, 16)) == {3: errors.CHECKSUM}
    assert worker.client.num_bad_blocks == 1
    await worker.client.settle()
    await worker.client.release([put.lease_id], deadline=within())
    matched = await worker.client.match(hashes, ttl_s=30, deadline=within())
    assert matched.blocks == put.refs[:3]
    again = await worker.put(hashes[3:], range(3, 6), parent=hashes[2])
    assert again.num_bytes == 3 * worker.view.shape[1]
    got = [*matched.blocks, *again.refs]
    assert await worker.get(again.lease_id, got[3:], range(23, 26)) == {}
    assert np.array_equal(worker.view[23:26], worker.view[3:6])
    await worker.client.release([matched.lease_id, again.lease_id], deadline=within())
    await worker.status()


async def test_a_damaged_generation_is_repaired(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain
) -> None:
    """Of every 64 bits one flips: the block is refused once, and read again after the report."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain("a", 3), range(3))
    slab = store.node.slab
    assert slab is not None
    for bit in range(64):
        slab.generations[put.refs[1].frame] ^= np.uint64(1 << bit)
        assert await worker.get(put.lease_id, put.refs, range(10, 13)) == {1: errors.GENERATION}
        await worker.client.settle()
        assert await worker.get(put.lease_id, put.refs, range(20, 23)) == {}, bit
    assert np.array_equal(worker.view[20:23], worker.view[:3])
    assert worker.client.num_bad_blocks == 0  # its bytes were right
    assert (await worker.status()).num_damaged == 64
    await worker.client.release([put.lease_id], deadline=within())


async def test_a_stale_reference_repairs_nothing(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain
) -> None:
    """The reader names an earlier life of the frame: the store has nothing to mend."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain("a", 1), range(1))
    stale = dataclasses.replace(put.refs[0], generation=put.refs[0].generation + 2)
    assert await worker.get(put.lease_id, [stale], [10]) == {0: errors.GENERATION}
    await worker.client.settle()
    assert await worker.get(put.lease_id, put.refs, [11]) == {}
    assert (await worker.status()).num_damaged == 0
    await worker.client.release([put.lease_id], deadline=within())


async def test_a_wrong_complaint_costs_no_block(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, transport: str
) -> None:
    """The reader's ref was wrong, the store's bytes are right: they stay."""
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 3), range(3))
    wrong = dataclasses.replace(put.refs[1], checksum=put.refs[1].checksum ^ 1)
    assert await worker.get(put.lease_id, [wrong], [10]) == {0: errors.CHECKSUM}
    await worker.client.settle()
    matched = await worker.client.match(chain("a", 3), ttl_s=30, deadline=within())
    assert matched.blocks == put.refs
    await worker.client.release([put.lease_id, matched.lease_id], deadline=within())


async def test_complaints_share_calls_and_none_is_lost(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, monkeypatch: Any
) -> None:
    worker = await new_worker(store.address, "shm")
    client = worker.client
    put = await worker.put(chain("a", 8), range(8))
    real, told, gate = client._rpc.call, [], asyncio.Event()

    async def watched(method: Any, request: Any, deadline: Deadline, **options: Any) -> Any:
        if method is client._rpc.stub.Report:
            told.append([ref.frame for ref in request.blocks])
            await gate.wait()
        return await real(method, request, deadline, **options)

    monkeypatch.setattr(client._rpc, "call", watched)
    for ref in put.refs:
        wrong = dataclasses.replace(ref, checksum=ref.checksum ^ 1)
        for _ in range(2):  # twice the same is told once
            assert await worker.get(put.lease_id, [wrong], [10]) == {0: errors.CHECKSUM}
    assert len(told) == 1
    gate.set()
    await client.settle()
    assert len(told) == 2 and client.num_bad_blocks == 16
    assert {frame for call in told for frame in call} == {ref.frame for ref in put.refs}


async def test_a_store_that_does_not_hear_it_changes_nothing(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, monkeypatch: Any
) -> None:
    worker = await new_worker(store.address, "shm")
    client = worker.client
    put = await worker.put(chain("a", 2), range(2))
    real = client._rpc.call

    async def deaf(method: Any, request: Any, deadline: Deadline, **options: Any) -> Any:
        if method is client._rpc.stub.Report:
            raise Unavailable("deaf")
        return await real(method, request, deadline, **options)

    monkeypatch.setattr(client._rpc, "call", deaf)
    wrong = dataclasses.replace(put.refs[0], checksum=put.refs[0].checksum ^ 1)
    for _ in range(2):
        assert await worker.get(put.lease_id, [wrong], [10]) == {0: errors.CHECKSUM}
        await client.settle()
    assert await worker.get(put.lease_id, put.refs, [10, 11]) == {}


@pytest.mark.parametrize("is_lying", [False, True])
async def test_a_transport_that_computed_the_checksums_is_asked_not_trusted_blindly(
    store: serve.RunningStore, new_worker: NewWorker, chain: Chain, seed: int, is_lying: bool
) -> None:
    """Its checksums are compared; a block for which it gives none is bad."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain("a", 6), range(6))
    real = worker.client._transport.get
    bad = random.Random(seed).randrange(1, 6)

    async def computed(lease_id: str, items: Any, deadline: Deadline) -> GetResult:
        got: GetResult = await real(lease_id, items, deadline)
        given = {index: each for index, each in got.checksums.items() if index != 0}
        if is_lying and bad in given:
            given[bad] ^= 1
        return dataclasses.replace(got, checksums=given)

    worker.client._transport.get = computed
    failed = await worker.get(put.lease_id, put.refs, range(10, 16))
    assert failed == dict.fromkeys({0, bad} if is_lying else {0}, errors.CHECKSUM)
    wrong_first = dataclasses.replace(put.refs[0], checksum=put.refs[0].checksum ^ 1)
    failed = await worker.get(put.lease_id, [wrong_first], [20])
    assert failed == {0: errors.CHECKSUM}
