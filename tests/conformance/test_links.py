"""A link is measured through the real transport, and leaves nothing behind, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest

from process.rpc_errors import BatonError, DeadlineExceeded, NoCapacity, Unavailable
from tests.harness.links import (
    MAX_BLOCKS,
    MAX_SHARE,
    TransferFailed,
    assert_clean,
    measure_and_settle,
    num_blocks_wanted,
    transfer_clock,
)
from tests.harness.store import BLOCK_BYTES, LocalStore, NewStore, NewWorker, anywhere, chain_of
from tests.harness.waiting import within


@anywhere
async def test_every_transport_is_measured_and_leaves_nothing(
    store: LocalStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    num_blocks = int(worker.client.num_frames * MAX_SHARE)
    untouched = worker.view[2 * num_blocks :].copy()
    rates = await worker.client.measure(range(24), within())
    assert rates.num_bytes == num_blocks * BLOCK_BYTES, "a small store: few of its frames"
    for rate in (rates.write_bytes_per_s, rates.read_bytes_per_s, rates.copy_bytes_per_s):
        assert 0 < rate < float("inf")
    assert rates.latency_s > 0
    assert np.array_equal(worker.view[2 * num_blocks :], untouched), "only what was lent is written"
    assert len({bytes(row) for row in worker.view[: 2 * num_blocks]}) == 1, "real bytes came back"
    await assert_clean(worker)


@anywhere
async def test_bytes_of_requests_are_counted_behind_a_measurement(
    store: LocalStore, new_worker: NewWorker, transport: str
) -> None:
    """Through the same client, whose measurement is not counted."""
    worker = await new_worker(store.address, transport)
    await worker.client.measure(range(24), within())
    put = await worker.put(chain_of("real", 2), [0, 1], tail=("tail", 2, 1))
    assert put.tail is not None
    assert await worker.get(put.lease_id, [*put.refs, put.tail], [3, 4, 5]) == {}
    await worker.release(put.lease_id)
    status = await worker.status()
    assert status.num_bytes_written == status.num_bytes_read == 3 * BLOCK_BYTES


async def test_latency_is_the_fastest_of_several_reads_of_one_block(
    store: LocalStore, new_worker: NewWorker
) -> None:
    """Neither the puts nor the first, cold read are in it. On a clock that only transfers move."""
    worker = await new_worker(store.address, "shm")
    read_s = [9.0, 3.0, 7.0]
    with transfer_clock(
        worker,
        put_s=lambda num_blocks: 1000.0,
        get_s=lambda num_blocks: read_s.pop(0) if num_blocks == 1 and read_s else 20.0,
    ):
        rates = await worker.client.measure(range(16), within(3600.0))
    assert rates.latency_s == 3.0
    await assert_clean(worker)


@pytest.mark.parametrize("num_lent", [0, 1])
async def test_without_blocks_it_says_so(
    store: LocalStore, new_worker: NewWorker, num_lent: int
) -> None:
    worker = await new_worker(store.address, "grpc")
    with pytest.raises(NoCapacity, match="free blocks"):
        await worker.client.measure(range(num_lent), within())
    await assert_clean(worker)


@pytest.mark.parametrize("num_free", [0, 1, 3])
async def test_a_full_store_is_not_made_emptier(
    store: LocalStore, new_worker: NewWorker, num_free: int
) -> None:
    """Every frame is pinned but a few: no measurement, and none of them is lost."""
    worker = await new_worker(store.address, "grpc")
    num_pinned = worker.client.num_frames - num_free
    put = await worker.put(chain_of("full", num_pinned), [i % 48 for i in range(num_pinned)])
    with pytest.raises(NoCapacity, match="frame"):
        await worker.client.measure(range(24), within())
    await worker.client.settle()
    status = await worker.status()
    assert (status.num_writing, status.num_leases) == (0, 1)
    assert status.num_committed == num_pinned and status.num_free == num_free
    await worker.release(put.lease_id)


async def test_cancelled_anywhere_it_leaves_nothing(
    store: LocalStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    for stage in range(1, 40, 6):
        measuring = asyncio.create_task(measure_and_settle(worker, range(16), within()))
        for _ in range(stage * 3):
            await asyncio.sleep(0)
        await asyncio.sleep(0.0005 * stage)
        measuring.cancel()
        await asyncio.wait([measuring])
        assert measuring.cancelled() or measuring.exception() is None
        await assert_clean(worker)


async def test_out_of_time_it_leaves_nothing(
    store: LocalStore, new_worker: NewWorker, transport: str
) -> None:
    worker = await new_worker(store.address, transport)
    for budget_s in (0.0, 0.001, 0.003, 0.01):
        with contextlib.suppress(BatonError):
            await measure_and_settle(worker, range(24), within(budget_s))
        assert worker.client.broken is None
        await assert_clean(worker)


async def test_bytes_that_come_back_wrong_are_a_fault(
    store: LocalStore, new_worker: NewWorker
) -> None:
    """A transport that is fast and moves the wrong bytes is not a fast one."""
    worker = await new_worker(store.address, "shm")
    with worker.spoiling_gets(num_blocks=4):  # the measured transfer itself
        with pytest.raises(TransferFailed, match="not what was sent"):
            await worker.client.measure(range(16), within())
    await assert_clean(worker)


async def test_a_put_that_fails_at_its_measured_part_gives_everything_back(
    store: LocalStore, new_worker: NewWorker
) -> None:
    worker = await new_worker(store.address, "shm")
    with worker.failing_puts(num_blocks=4, error=TransferFailed("the test says so")):
        with pytest.raises(TransferFailed, match="the test says so"):
            await worker.client.measure(range(16), within())
    await assert_clean(worker)


async def test_a_stalled_store_ends_the_measurement_in_time(
    new_store: NewStore, new_worker: NewWorker
) -> None:
    process = await new_store()
    worker = await new_worker(process.address, "grpc")
    await process.pause()
    async with asyncio.timeout(10):
        with pytest.raises((DeadlineExceeded, Unavailable)):
            await worker.client.measure(range(16), within(0.2))
    process.wake()


def test_large_blocks_are_measured_by_few() -> None:
    assert num_blocks_wanted(64 * 1024) == 2 * MAX_BLOCKS
    assert num_blocks_wanted(2 * 2**20) == 4
    assert num_blocks_wanted(64 * 2**20) == 2
