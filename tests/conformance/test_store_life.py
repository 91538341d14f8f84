"""What a store owes itself whoever calls: nothing stays held when a caller leaves or the store
stops, what is told wrongly ends nothing, and the watch over its laws goes on."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
from collections.abc import Iterator
from typing import Any

import pytest

from process.rpc_errors import InvalidArgument
from tests.harness.store import SETTINGS, LocalStore, NewWorker, chain_of, local_store
from tests.harness.waiting import until, within

pytestmark = pytest.mark.oracle

LARGE = 1 << 20


@pytest.fixture
def no_gc() -> Iterator[None]:
    """What is let go is let go by us, not by a collection that happens to come."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
async def test_a_reader_that_leaves_midway_holds_nothing(new_worker: NewWorker) -> None:
    async with local_store(dataclasses.replace(SETTINGS, capacity_bytes=16 * LARGE)) as store:
        worker = await new_worker(store.address, "grpc", block_bytes=LARGE, num_blocks=8)
        put = await worker.put(chain_of("a", 8), range(8))
        for _ in range(10):
            call = worker.begin_reading(put.lease_id, put.refs, chunk_bytes=64 * 1024)
            await call.read()
            assert (await worker.status()).num_leases > 1
            call.cancel()
        await worker.release(put.lease_id)

        async def is_idle() -> bool:
            status = await worker.status()
            return bool(status.num_leases == 0 and status.num_pinned == 0)

        await until(is_idle)


async def test_a_bad_block_is_counted_once_however_many_complain(
    store: LocalStore, new_worker: NewWorker
) -> None:
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain_of("a", 4), range(4))
    store.flip_bit(put.refs[2], 7)
    told = [put.refs[2], put.refs[2]]
    dropped = await asyncio.gather(*(worker.report(told) for _ in range(3)))
    assert sorted(dropped) == [0, 0, 2]
    refused = {each.reason: each.num_blocks for each in (await worker.status()).refused}
    assert refused == {"checksum": 1}
    await worker.release(put.lease_id)


async def integrity_error(worker: Any, *, check: bool = False) -> str:
    status = await worker.client.status(check_integrity=check, deadline=within())
    return str(status.integrity_error)


async def test_a_broken_law_is_told_and_does_not_end_the_watch(new_worker: NewWorker) -> None:
    """Lapsed leases go on being ended without a call; what broke stays in the status."""
    async with local_store(law="broken once") as store:
        worker = await new_worker(store.address, "grpc")
        await worker.put(chain_of("a", 1), [0], ttl_s=0.3)
        store.break_a_law_once("a law that was broken once")

        async def is_told() -> bool:
            return "broken once" in await integrity_error(worker)

        async def is_over() -> bool:
            status = await worker.client.status(deadline=within())
            return bool(status.num_leases == 0)

        await until(is_told)
        await until(is_over)
        assert "broken once" in await integrity_error(worker, check=True)


async def test_heartbeats_do_not_keep_the_laws_from_being_checked(new_worker: NewWorker) -> None:
    """A store of many workers hears one between any two looks."""
    settings = dataclasses.replace(SETTINGS, sweep_interval_s=0.25)
    async with local_store(settings) as store:
        worker = await new_worker(store.address, "grpc")
        put = await worker.put(chain_of("a", 1), [0])

        async def beat() -> None:
            while True:
                await worker.match([], 1)

        async def is_told() -> bool:
            return "pins" in await integrity_error(worker)

        beating = [asyncio.create_task(beat()) for _ in range(4)]
        with store.miscounting_pins(put.refs[0]):
            try:
                await until(is_told)
            finally:
                for task in beating:
                    task.cancel()
                await asyncio.wait(beating)


async def test_numbers_that_cannot_be_are_refused_and_the_status_goes_on(
    store: LocalStore, new_worker: NewWorker
) -> None:
    """A spoiled count would not fit into the status, nor into the row in the registry."""
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain_of("a", 1), [0])
    for _ in range(2):
        for method, fields in (("Renew", {"lease_id": put.lease_id}), ("Release", {})):
            with pytest.raises(InvalidArgument) as caught:
                await worker.call(method, num_bytes_read=2**64 - 1, **fields)
            assert caught.value.field == "num_bytes_read"
    assert (await worker.status()).num_bytes_read == 0
    assert store.row().num_leases == 1


async def test_a_pin_that_would_be_over_at_once_is_refused(
    store: LocalStore, new_worker: NewWorker
) -> None:
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain_of("a", 2), range(2))
    match = {"attachment_id": worker.attachment_id, "chain_hashes": chain_of("a", 2), "pin": True}
    with pytest.raises(InvalidArgument, match="ttl_ms"):
        await worker.call("Match", **match)
    reply = await worker.call("Match", **match, lease_id=put.lease_id)  # whose own end counts
    assert len(reply.blocks) == 2
