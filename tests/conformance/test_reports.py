"""A block that arrives with a wrong checksum is told to its store, which looks for itself."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from process.rpc_errors import Unavailable
from tests.harness.store import Calls, LocalStore, NewWorker, anywhere, chain_of

pytestmark = pytest.mark.oracle


@anywhere
async def test_nobody_meets_the_same_bad_block_twice(
    store: LocalStore, new_worker: NewWorker, transport: str
) -> None:
    """The store drops it and all below it, once its reader's lease is over; parents stay."""
    worker = await new_worker(store.address, transport)
    hashes = chain_of("a", 6)
    put = await worker.put(hashes, range(6))
    store.flip_bit(put.refs[3], 7)
    assert await worker.get(put.lease_id, put.refs, range(10, 16)) == {3: "checksum"}
    assert worker.client.num_bad_blocks == 1
    await worker.client.settle()
    await worker.release(put.lease_id)
    matched = await worker.match(hashes)
    assert matched.blocks == put.refs[:3]
    again = await worker.put(hashes[3:], range(3, 6), parent=hashes[2])
    assert again.num_bytes == 3 * worker.view.shape[1]
    got = [*matched.blocks, *again.refs]
    assert await worker.get(again.lease_id, got[3:], range(23, 26)) == {}
    assert np.array_equal(worker.view[23:26], worker.view[3:6])
    await worker.release(matched.lease_id, again.lease_id)
    await worker.status()


async def test_a_damaged_generation_is_repaired(store: LocalStore, new_worker: NewWorker) -> None:
    """Of every 64 bits one flips: the block is refused once, and read again after the report."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain_of("a", 3), range(3))
    for bit in range(64):
        store.flip_generation(put.refs[1], bit)
        assert await worker.get(put.lease_id, put.refs, range(10, 13)) == {1: "generation"}
        await worker.client.settle()
        assert await worker.get(put.lease_id, put.refs, range(20, 23)) == {}, bit
    assert np.array_equal(worker.view[20:23], worker.view[:3])
    assert worker.client.num_bad_blocks == 0  # its bytes were right
    assert (await worker.status()).num_damaged == 64
    await worker.release(put.lease_id)


async def test_a_stale_reference_repairs_nothing(store: LocalStore, new_worker: NewWorker) -> None:
    """The reader names an earlier life of the frame: the store has nothing to mend."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain_of("a", 1), range(1))
    stale = dataclasses.replace(put.refs[0], generation=put.refs[0].generation + 2)
    assert await worker.get(put.lease_id, [stale], [10]) == {0: "generation"}
    await worker.client.settle()
    assert await worker.get(put.lease_id, put.refs, [11]) == {}
    assert (await worker.status()).num_damaged == 0
    await worker.release(put.lease_id)


async def test_a_wrong_complaint_costs_no_block(store: LocalStore, new_worker: NewWorker) -> None:
    """The reader's ref was wrong, the store's bytes are right: they stay."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain_of("a", 3), range(3))
    wrong = dataclasses.replace(put.refs[1], checksum=put.refs[1].checksum ^ 1)
    assert await worker.get(put.lease_id, [wrong], [10]) == {0: "checksum"}
    await worker.client.settle()
    matched = await worker.match(chain_of("a", 3))
    assert matched.blocks == put.refs
    await worker.release(put.lease_id, matched.lease_id)


async def test_complaints_share_calls_and_none_is_lost(
    store: LocalStore, new_worker: NewWorker
) -> None:
    worker = await new_worker(store.address, "shm")
    client = worker.client
    put = await worker.put(chain_of("a", 8), range(8))
    calls = Calls(worker, "Report")
    for ref in put.refs:
        wrong = dataclasses.replace(ref, checksum=ref.checksum ^ 1)
        for _ in range(2):  # twice the same is told once
            assert await worker.get(put.lease_id, [wrong], [10]) == {0: "checksum"}
    assert len(calls.requests) == 1
    calls.may_go_on.set()
    await client.settle()
    assert len(calls.requests) == 2 and client.num_bad_blocks == 16
    assert {ref.frame for call in calls.requests for ref in call.blocks} == {
        ref.frame for ref in put.refs
    }


async def test_a_store_that_does_not_hear_it_changes_nothing(
    store: LocalStore, new_worker: NewWorker
) -> None:
    worker = await new_worker(store.address, "shm")
    client = worker.client
    put = await worker.put(chain_of("a", 2), range(2))
    Calls(worker, "Report", Unavailable("deaf"))
    wrong = dataclasses.replace(put.refs[0], checksum=put.refs[0].checksum ^ 1)
    for _ in range(2):
        assert await worker.get(put.lease_id, [wrong], [10]) == {0: "checksum"}
        await client.settle()
    assert await worker.get(put.lease_id, put.refs, [10, 11]) == {}


@pytest.mark.parametrize("is_lying", [False, True])
async def test_a_transport_that_computed_the_checksums_is_asked_not_trusted_blindly(
    store: LocalStore, new_worker: NewWorker, seed: int, is_lying: bool
) -> None:
    """Its checksums are compared; a block for which it gives none is bad."""
    worker = await new_worker(store.address, "shm")
    put = await worker.put(chain_of("a", 6), range(6))
    bad = random.Random(seed).randrange(1, 6)

    def computed(got: Any) -> Any:
        given = {index: each for index, each in got.checksums.items() if index != 0}
        if is_lying and bad in given:
            given[bad] ^= 1
        return dataclasses.replace(got, checksums=given)

    worker.alter_gets(computed)
    failed = await worker.get(put.lease_id, put.refs, range(10, 16))
    assert failed == dict.fromkeys({0, bad} if is_lying else {0}, "checksum")
    wrong_first = dataclasses.replace(put.refs[0], checksum=put.refs[0].checksum ^ 1)
    failed = await worker.get(put.lease_id, [wrong_first], [20])
    assert failed == {0: "checksum"}
