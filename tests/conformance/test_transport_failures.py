"""Stalled, killed and restarted peers: nothing is used that should not be, nothing stays taken."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors, store_process
from kvstore.client import KvStoreClient
from kvstore.config import KvStoreSettings
from kvstore.slot_pool import SlotState
from kvstore.transport import nixl
from kvstore.transport.base import GetItems, PutUnsettled
from process.deadline import Deadline
from process.rpc_errors import DeadlineExceeded, Unavailable
from tests.harness import forks
from tests.harness.forks import Forked
from tests.harness.store import NewStore, NewWorker, chain_of, driven, paused
from tests.harness.waiting import WAIT_S, until, within

LONE_WORKER = Path(__file__).parents[1] / "harness" / "lone_worker.py"


class LoneWorker:
    """See lone_worker.py."""

    def __init__(self, process: Forked) -> None:
        self.process = process
        self.attachment_id = ""


NewLoneWorker = Callable[[str, str, str], Awaitable[LoneWorker]]
"""`lone_worker(address, transport, what)`"""


@pytest.fixture
async def lone_worker() -> AsyncIterator[NewLoneWorker]:
    workers: list[LoneWorker] = []

    async def make(address: str, transport: str, what: str) -> LoneWorker:
        worker = LoneWorker(await forks.start(str(LONE_WORKER), address, transport, what))
        workers.append(worker)
        async with asyncio.timeout(WAIT_S):
            worker.attachment_id = (await worker.process.stdout.readline()).decode().strip()
        assert worker.attachment_id
        return worker

    yield make
    for worker in workers:
        worker.process.kill()  # also one that is stopped
        await worker.process.communicate()


@pytest.fixture
def tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over CMA the memory of a stopped process is written all the same; between hosts it is TCP."""
    monkeypatch.setenv("UCX_TLS", "tcp")


# -- the store fails


async def test_a_restarted_store_is_another_life(
    new_store: NewStore, new_worker: NewWorker, transport: str
) -> None:
    process = await new_store()
    worker = await new_worker(process.address, transport)
    put = await worker.put(chain_of("a", 3), range(3))
    old, life = worker.client, worker.client.incarnation
    await process.end()
    ready = await process.start()
    items = list(zip(put.refs, range(10, 13), strict=True))
    before = worker.view.copy()
    if transport != "shm":  # shared memory outlives the store: what was committed can be read
        got = await old.get_blocks(put.lease_id, items, within())
        assert got.failed == dict.fromkeys(range(3), errors.STORE_UNAVAILABLE)
        assert np.array_equal(worker.view, before)
    with pytest.raises(Unavailable):
        await old.match(chain_of("a", 3), ttl_s=5, deadline=within())
    assert old.broken is not None
    with pytest.raises(Unavailable):
        await worker.put(chain_of("b", 1), [0])
    await old.close()

    again = await worker.attach(process.address)
    assert again.incarnation != life and again.incarnation.hex() == ready["incarnation"]
    assert (await again.match(chain_of("a", 3), ttl_s=5, deadline=within())).blocks == ()
    got = await again.get_blocks(put.lease_id, items, within(), incarnation=life)
    assert got.failed == dict.fromkeys(range(3), errors.INCARNATION)
    fresh = await worker.put(chain_of("a", 3), range(3))
    assert await worker.get(fresh.lease_id, fresh.refs, range(10, 13)) == {}
    await worker.status()


async def test_a_dead_store_fails_calls_at_once(
    new_store: NewStore, new_worker: NewWorker, transport: str
) -> None:
    """And a push whose answer never came is known to be over: its process is gone."""
    process = await new_store()
    worker = await new_worker(process.address, transport)
    put = await worker.put(chain_of("a", 3), range(3))
    await process.end()
    items = list(zip(put.refs, range(10, 13), strict=True))
    if transport != "shm":
        try:
            got = await worker.client.get_blocks(put.lease_id, items, within(5))
        except errors.TransferTimeout as error:
            await asyncio.wait_for(error.quarantine.settled, 20)
        else:
            assert got.failed == dict.fromkeys(range(3), errors.STORE_UNAVAILABLE)
    with pytest.raises(Unavailable):
        await worker.put(chain_of("b", 1), [0], deadline=within(5))


async def test_a_push_from_a_stalled_store_is_quarantined_until_it_is_over(
    new_store: NewStore, new_worker: NewWorker, tcp_only: None
) -> None:
    process = await new_store()
    worker = await new_worker(process.address, "nixl")
    put = await worker.put(chain_of("a", 3), range(3))
    await process.pause()
    items = list(zip(put.refs, range(10, 13), strict=True))
    with pytest.raises(errors.TransferTimeout) as caught:
        await worker.client.get_blocks(put.lease_id, items, within(1.0))
    quarantine = caught.value.quarantine
    assert quarantine.block_ids == (10, 11, 12)
    assert errors.quarantine_of(caught.value) is quarantine
    await asyncio.wait([quarantine.settled], timeout=1.0)
    assert not quarantine.settled.done()
    process.wake()
    await asyncio.wait_for(quarantine.settled, 30)
    worker.view[10:13] = 1
    status = await worker.client.status(check_integrity=True, deadline=within())
    assert (status.integrity_error, status.num_leases) == ("", 1)
    assert (worker.view[10:13] == 1).all()


async def test_a_cancelled_push_from_a_stalled_store_is_quarantined(
    new_store: NewStore, new_worker: NewWorker, tcp_only: None
) -> None:
    process = await new_store()
    worker = await new_worker(process.address, "nixl")
    put = await worker.put(chain_of("a", 1), [0])
    await process.pause()
    rpc = worker.client._connection
    call, is_asked = rpc.call, asyncio.Event()

    async def noted(method: Any, request: Any, deadline: Deadline, **options: Any) -> Any:
        if method is rpc.stub.Push:
            is_asked.set()
        return await call(method, request, deadline, **options)

    rpc.call = noted
    task = asyncio.create_task(
        worker.client.get_blocks(put.lease_id, [(put.refs[0], 10)], within(30))
    )
    async with asyncio.timeout(20):
        await is_asked.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert isinstance(caught.value, errors.TransferCancelled)
    assert caught.value.quarantine.block_ids == (10,)
    assert not caught.value.quarantine.settled.done()
    process.wake()
    await asyncio.wait_for(caught.value.quarantine.settled, 30)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_without_pushes_a_stalled_store_needs_no_quarantine(
    new_store: NewStore, new_worker: NewWorker, transport: str
) -> None:
    process = await new_store()
    worker = await new_worker(process.address, transport)
    put = await worker.put(chain_of("a", 3), range(3))
    await process.pause()
    # The store has no part in a copy out of shared memory.
    seconds = 10.0 if transport == "shm" else 0.3
    failed = await worker.get(put.lease_id, put.refs, range(10, 13), seconds=seconds)
    expected = {} if transport == "shm" else dict.fromkeys(range(3), errors.DEADLINE)
    assert failed == expected
    process.wake()


async def test_a_put_to_a_stalled_store_leaves_nothing_reserved_when_it_wakes(
    new_store: NewStore, new_worker: NewWorker, transport: str, tcp_only: None
) -> None:
    process = await new_store()
    worker = await new_worker(process.address, transport)
    await worker.put(chain_of("a", 1), [0])
    await process.pause()
    with pytest.raises(DeadlineExceeded):
        await worker.put(chain_of("b", 3), range(3), deadline=within(0.3))
    process.wake()
    async with asyncio.timeout(30):
        while (status := await worker.status()).num_leases != 1:
            await asyncio.sleep(0.02)
    assert (status.num_writing, status.num_quarantined, status.num_committed) == (0, 0, 1)
    assert worker.client.broken is None


async def test_bytes_that_a_late_put_may_still_write_are_quarantined_at_the_store(
    new_store: NewStore, new_worker: NewWorker, tcp_only: None
) -> None:
    """The store stalls between the reservation and the WRITE: the frames go out of use until the
    WRITE is over, then they come free."""
    process = await new_store()
    worker = await new_worker(process.address, "nixl", block_bytes=8192)
    client: KvStoreClient = worker.client
    await worker.put(chain_of("a", 1), [0])
    put = client.transport.put
    unsettled: list[PutUnsettled] = []
    abort, aborts = client._abort, []

    async def watched_abort(*args: Any, quarantine: bool) -> None:
        aborts.append((quarantine, unsettled[0].settled.done()))
        await abort(*args, quarantine=quarantine)

    async def stalled(*args: Any) -> None:
        await process.pause()
        try:
            await put(*args)
        except PutUnsettled as error:
            unsettled.append(error)
            raise
        finally:
            process.wake()

    client.transport.put = stalled  # type: ignore[method-assign]
    client._abort = watched_abort  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded):
        await worker.put(chain_of("b", 20), range(20), deadline=within(1.5))
    assert len(unsettled) == 1
    client.transport.put = put  # type: ignore[method-assign]
    async with asyncio.timeout(30):
        while (status := await worker.status()).num_leases != 1:
            await asyncio.sleep(0.02)
    assert (status.num_writing, status.num_quarantined, status.num_committed) == (0, 0, 1)
    assert aborts == [(True, False), (False, True)]  # the second word only when it was over
    assert (await worker.put(chain_of("b", 20), range(20))).not_stored == 0


async def test_closing_with_a_stalled_transfer_is_bounded_and_still_settles(
    new_store: NewStore, new_worker: NewWorker, tcp_only: None
) -> None:
    process = await new_store()
    worker = await new_worker(process.address, "nixl")
    put = await worker.put(chain_of("a", 1), [0])
    await process.pause()
    with pytest.raises(errors.TransferTimeout) as caught:
        await worker.client.get_blocks(put.lease_id, [(put.refs[0], 10)], within(1.0))
    async with asyncio.timeout(10):
        await worker.client.close()
    assert not caught.value.quarantine.settled.done()
    process.wake()
    await asyncio.wait_for(caught.value.quarantine.settled, 30)


# -- a worker fails


@pytest.mark.parametrize("what", ["reserve", "hold"])
async def test_a_killed_worker_leaks_nothing(
    store_settings: KvStoreSettings, lone_worker: NewLoneWorker, transport: str, what: str
) -> None:
    async with store_process.running(store_settings) as running:
        passes = driven(running)
        worker = await lone_worker(running.address, transport, what)
        truth = running.node.store
        assert truth is not None and len(truth.leases) == 1
        worker.process.kill()
        await passes(lambda: len(truth.leases) == 0 and len(truth.attachments) == 0)
        num_committed = 3 if what == "hold" else 0  # they stay, unpinned; the tail does not
        free = truth.frames.num_slots - num_committed
        await passes(lambda: truth.frames.count(SlotState.FREE) == free)
        assert (truth.num_pinned(), truth.num_tails) == (0, 0)
        assert await running.node.check_integrity() == ""


async def test_frames_of_a_stalled_one_sided_writer_stay_out_of_use(
    store: store_process.RunningStore, lone_worker: NewLoneWorker
) -> None:
    """Its lease lapsed, but it may wake up inside its copy; only its death ends that."""
    passes = driven(store)
    worker = await lone_worker(store.address, "shm", "reserve")
    truth: Any = store.node.store
    await paused(worker.process)
    await passes(lambda: len(truth.leases) == 0)
    assert len(truth.quarantined) == 4
    assert store.node._maintenance is not None
    await asyncio.wait([store.node._maintenance], timeout=0.5)
    assert len(truth.quarantined) == 4
    assert await store.node.check_integrity() == ""
    worker.process.kill()
    await passes(lambda: len(truth.quarantined) == 0)
    assert await store.node.check_integrity() == ""


async def test_frames_being_pushed_to_a_stalled_worker_are_held_until_it_is_over(
    store: store_process.RunningStore,
    new_worker: NewWorker,
    lone_worker: NewLoneWorker,
    tcp_only: None,
) -> None:
    """The store reads those frames as long as the peer may take the bytes; then the peer dies."""
    writer = await new_worker(store.address, "nixl")
    put = await writer.put(chain_of("a", 20), range(20))
    lone = await lone_worker(store.address, "nixl", "receive")
    node, truth = store.node, store.node.store
    assert truth is not None
    args = (lone.attachment_id, put.lease_id)
    outcome = await node.push(*args, "first", put.refs[:1], [0], 10.0)
    assert outcome.terminal
    await paused(lone.process)
    outcome = await node.push(*args, "second", put.refs, range(20), 0.3)
    assert not outcome.terminal
    await writer.release(put.lease_id)
    assert not node.close_push("second")
    assert truth.num_pinned() == 20
    assert await node.check_integrity() == ""
    lone.process.kill()
    await until(lambda: node.close_push("second"))
    assert truth.num_pinned() == 0
    assert await node.check_integrity() == ""


async def test_a_push_that_nobody_knows_is_over_and_stays_so(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    """The question overtook the request: the request is refused when it comes."""
    worker = await new_worker(store.address, "nixl")
    put = await worker.put(chain_of("a", 1), [0])
    assert store.node.close_push("late")
    before = worker.view.copy()
    with pytest.raises(Exception, match="already"):
        await store.node.push(
            worker.client._attachment_id, put.lease_id, "late", put.refs, [10], 5.0
        )
    assert np.array_equal(worker.view, before)
    items = GetItems([(put.refs[0], 10)])
    got = await worker.client.transport.get(put.lease_id, items, within())
    assert got.failed == {}


async def test_a_refused_push_has_its_own_reason_however_busy_the_store_is(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    """A lapsed lease is no stalled store: that would take the store from everybody."""
    worker = await new_worker(store.address, "nixl")
    put = await worker.put(chain_of("a", 1), [0])
    await worker.release(put.lease_id)
    rpc = worker.client._connection
    call = rpc.call

    async def slow_to_say(method: Any, request: Any, deadline: Deadline, **options: Any) -> Any:
        if method is rpc.stub.GetPush:
            await asyncio.sleep(5 * nixl.SETTLE_AT_ONCE_S)
        return await call(method, request, deadline, **options)

    rpc.call = slow_to_say
    assert await worker.get(put.lease_id, put.refs, [10]) == {0: errors.LEASE_LAPSED}


async def test_the_slab_goes_with_its_store(new_store: NewStore, new_worker: NewWorker) -> None:
    process = await new_store()
    worker = await new_worker(process.address, "shm")
    path = worker.client.transport._slab.path
    assert path.exists()
    assert await process.end(signal.SIGTERM) == 0
    assert not path.exists()
    await process.start()
    await worker.client.close()
    await worker.attach(process.address)
    killed = worker.client.transport._slab.path
    await process.end(signal.SIGKILL)
    assert killed.exists()
    await process.start()  # a later store cleans up
    assert not killed.exists()
