"""Transports of a worker whose blocks lie on a device, beyond what every transport must do: no byte
is copied twice, nothing slow is used in silence, and a device that does not answer costs blocks,
not correctness. A fake device, as strict as a real one; the real one where there is CUDA."""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import gc
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import errors, store_process
from kvstore.block_source import StoreInfo
from kvstore.client import connect_transport
from kvstore.slab import Slab, SlabLayout
from kvstore.transport import shm
from kvstore.transport.base import BlockMemory
from kvstore.transport.device import STAGING_BYTES, PinnedStaging, Shared, wait_for
from kvstore.transport.grpc import StagedTransport
from kvstore.transport.shm import DeviceShmTransport
from process.rpc_errors import BatonError, DeadlineExceeded, FailedPrecondition
from tests.harness.fake_device import FakeDevice
from tests.harness.mapping import DeviceHasher
from tests.harness.store import NewWorker, OnDevice, Worker, chain_of
from tests.harness.waiting import until, within

SHM, GRPC = OnDevice("shm"), OnDevice("grpc")


@pytest.mark.parametrize("name", [SHM, GRPC])
async def test_every_byte_is_copied_once_each_way(
    store: store_process.RunningStore, new_worker: NewWorker, name: str
) -> None:
    """Also the checksums of both directions come without another copy from the device."""
    worker = await new_worker(store.address, name)
    expected = DeviceShmTransport if name == "shm" else StagedTransport
    assert type(worker.client.transport) is expected
    put = await worker.put(chain_of("a", 20), range(20))
    assert worker.device.num_moved_bytes == 20 * worker.view.shape[1]
    assert await worker.get(put.lease_id, put.refs, range(20, 40)) == {}
    assert worker.device.num_moved_bytes == 40 * worker.view.shape[1]
    assert np.array_equal(worker.view[20:40], worker.view[:20])


async def test_a_device_that_can_computes_the_checksums_of_what_is_put(
    store: store_process.RunningStore, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No thread hashes beside the engine, and a reader finds the bytes that the bus changed."""
    worker = await new_worker(store.address, SHM)
    hasher = DeviceHasher(worker)
    with monkeypatch.context() as patch:
        patch.setattr(DeviceShmTransport, "_hash", None)
        put = await worker.put(chain_of("a", 20), range(20))
        assert hasher.begun == [list(range(20))]
        worker.device.move = lambda target, source, num_bytes: ctypes.memset(target, 1, num_bytes)
        spoiled = await worker.put(chain_of("b", 1), [7])
        del worker.device.move
    assert await worker.get(put.lease_id, put.refs, range(20, 40)) == {}
    assert np.array_equal(worker.view[20:40], worker.view[:20])
    assert await worker.get(spoiled.lease_id, spoiled.refs, [40]) == {0: errors.CHECKSUM}


@pytest.mark.parametrize("name", [SHM, GRPC])
async def test_host_memory_is_given_back(
    store: store_process.RunningStore, name: str, seed: int
) -> None:
    worker = Worker(name, 5000, 48, seed)
    await worker.attach(store.address)
    put = await worker.put(chain_of("a", 3), range(3))
    assert worker.device.registered
    await worker.release(put.lease_id)
    await worker.client.close()
    await until(lambda: not worker.device.registered)


@pytest.mark.parametrize("name", [SHM, GRPC])
async def test_memory_that_cannot_be_locked_is_refused_not_copied_slowly(
    store: store_process.RunningStore, new_worker: NewWorker, name: str, seed: int
) -> None:
    worker = Worker(name, 5000, 48, seed)
    worker.device.refusal = "cuMemHostRegister_v2: CUDA_ERROR_OUT_OF_MEMORY (2)"
    with pytest.raises(FailedPrecondition, match="CUDA_ERROR_OUT_OF_MEMORY") as caught:
        await worker.attach(store.address)
    if name == "shm":
        assert "cannot be page-locked" in str(caught.value)
        assert "capacity_bytes" in str(caught.value)
    other = await new_worker(store.address, "shm")
    assert (await other.status()).num_attachments == 1  # the refused one said goodbye


async def test_a_large_slab_is_locked_in_parts_and_no_copy_crosses_two(
    store: store_process.RunningStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "LOCKED_BYTES", 3 * 4096)
    worker = Worker(SHM, 4096, 48, seed)  # frames without a gap between them: copies are merged
    await worker.attach(store.address)
    parts = dict(worker.device.registered)
    assert len(parts) > 3
    assert set(list(parts.values())[:-1]) == {3 * 4096}
    moved: list[tuple[int, int]] = []
    worker.device.on_move = lambda target, _, num_bytes: moved.append((target, num_bytes))
    put = await worker.put(chain_of("a", 8), range(8))
    assert put.not_stored == 0
    for target, num_bytes in moved:
        start = max(part for part in parts if part <= target)
        assert target + num_bytes <= start + parts[start]
    assert max(num_bytes for _, num_bytes in moved) == 3 * 4096
    assert await worker.get(put.lease_id, put.refs, list(range(10, 18))) == {}
    await worker.client.close()


async def test_a_part_that_cannot_be_locked_leaves_none_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shm, "LOCKED_BYTES", 4096)
    created = Slab.create(tmp_path, "n", bytes(16), SlabLayout(4096, 3))
    device = FakeDevice()
    register = device.register

    def only_one(address: int, num_bytes: int) -> None:
        device.refusal = "no more" if device.registered else ""
        register(address, num_bytes)

    device.register = only_one  # type: ignore[method-assign]
    with pytest.raises(FailedPrecondition, match="no more"):
        await open_for_a_moment(device, created.path)
    assert not device.registered
    created.close()


async def test_locking_that_outlasts_an_attempt_is_not_begun_again(
    store: store_process.RunningStore, seed: int
) -> None:
    worker = Worker(SHM, 5000, 48, seed)
    may_go_on, begun = threading.Event(), []
    register = worker.device.register

    def slow(address: int, num_bytes: int) -> None:
        begun.append(address)
        assert may_go_on.wait(20)
        register(address, num_bytes)

    worker.device.register = slow  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await worker.attach(store.address, timeout_s=0.3)
    may_go_on.set()
    await worker.attach(store.address)
    assert len(begun) == 1
    assert (await worker.put(chain_of("a", 2), range(2))).not_stored == 0
    await worker.client.close()


async def test_locked_memory_that_nobody_takes_is_given_back(tmp_path: Path) -> None:
    slab = Slab.create(tmp_path, "n", bytes(16), SlabLayout(4096, 4))
    device = FakeDevice()
    task = asyncio.create_task(open_for_a_moment(device, slab.path))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: not _opening_for(device))
    await until(lambda: not device.registered)
    slab.close()


async def open_for_a_moment(device: FakeDevice, path: Path) -> Slab:
    """What nobody takes is given back soon."""
    return await shm.open_registered(device, path, bytes(16), keep_s=0.05)


def _opening_for(*devices: FakeDevice) -> list[Any]:
    """Slabs that are being locked for these, or wait to be taken; of other tests' nothing."""
    return [key for key in shm._opening if key[1] in devices]


async def test_of_two_that_wait_each_gets_a_slab_of_its_own_or_none_is_left(tmp_path: Path) -> None:
    """Two clients of a process attach at once; the second is cancelled while its own is locked."""
    created = Slab.create(tmp_path, "n", bytes(16), SlabLayout(4096, 4))
    device = FakeDevice()
    register, num_begun, may_go_on = device.register, 0, threading.Event()
    num_over = 0

    def second_is_slow(address: int, num_bytes: int) -> None:
        nonlocal num_begun, num_over
        num_begun += 1
        if num_begun > 1:
            assert may_go_on.wait(20)
        register(address, num_bytes)
        num_over += 1

    device.register = second_is_slow  # type: ignore[method-assign]
    one, two = (asyncio.create_task(open_for_a_moment(device, created.path)) for _ in range(2))
    slab = await one
    await until(lambda: num_begun == 2)
    two.cancel()
    with pytest.raises(asyncio.CancelledError):
        await two
    may_go_on.set()
    await until(lambda: num_over == 2)
    await until(lambda: list(device.registered) == [slab.frames_address])
    assert not _opening_for(device)
    shm.close_registered(device, slab)
    assert not device.registered
    created.close()


async def test_a_slab_is_locked_for_the_device_that_asked(tmp_path: Path) -> None:
    """What was locked for one device, and left, is of no use to another of the same number."""
    created = Slab.create(tmp_path, "n", bytes(16), SlabLayout(4096, 4))
    left, device = FakeDevice(), FakeDevice()
    attempt = asyncio.create_task(open_for_a_moment(left, created.path))
    await asyncio.sleep(0)
    attempt.cancel()
    slab = await shm.open_registered(device, created.path, bytes(16))
    assert list(device.registered) == [slab.frames_address]
    shm.close_registered(device, slab)
    await until(lambda: not _opening_for(left, device))
    await until(lambda: not left.registered)
    created.close()


async def test_who_hears_late_of_a_failure_takes_nothing_of_a_later_attempt(tmp_path: Path) -> None:
    created = Slab.create(tmp_path, "n", bytes(16), SlabLayout(4096, 4))
    device = FakeDevice()
    device.refusal = "out of memory"

    async def twice() -> Slab:
        with pytest.raises(FailedPrecondition, match="out of memory"):
            await shm.open_registered(device, created.path, bytes(16))
        device.refusal = ""
        return await shm.open_registered(device, created.path, bytes(16))

    first = asyncio.create_task(twice())
    await asyncio.sleep(0)  # it waits first, so it hears first and tries again before we hear
    with pytest.raises(FailedPrecondition, match="out of memory"):
        await shm.open_registered(device, created.path, bytes(16))
    slab = await first
    assert list(device.registered) == [slab.frames_address]
    assert not _opening_for(device)
    shm.close_registered(device, slab)
    created.close()


async def test_a_copy_torn_by_a_writer_is_detected(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    """The generation changes while the device copies."""
    worker = await new_worker(store.address, SHM)
    put = await worker.put(chain_of("a", 3), range(3))
    slab: Any = store.node.slab

    def torn(*_: int) -> None:
        slab.publish(put.refs[1].frame, put.refs[1].generation + 1)

    worker.device.on_move = torn
    assert await worker.get(put.lease_id, put.refs, [10, 11, 12]) == {1: errors.GENERATION}


async def test_a_failing_device_is_a_reason_and_leaves_nothing(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    for name in (SHM, GRPC):
        worker = await new_worker(store.address, name)
        put = await worker.put(chain_of(f"kept {name}", 3), range(3))
        worker.device.problem = "cuMemcpy: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
        failed = await worker.get(put.lease_id, put.refs, [10, 11, 12])
        assert failed == dict.fromkeys(range(3), errors.TRANSPORT)
        with pytest.raises(errors.TransferFailed, match="ILLEGAL_ADDRESS"):
            await worker.put(chain_of(f"b {name}", 3), range(3))
        worker.device.problem = ""
        assert await worker.get(put.lease_id, put.refs, [10, 11, 12]) == {}
        await worker.release(put.lease_id)
        truth: Any = store.node.store
        await until(lambda truth=truth: len(truth.leases) == 0)


@pytest.mark.parametrize("cancelled", [False, True], ids=["late", "cancelled"])
@pytest.mark.parametrize("name", [SHM, GRPC])
async def test_blocks_that_a_stalled_device_may_still_write_are_quarantined(
    store: store_process.RunningStore, new_worker: NewWorker, name: str, cancelled: bool
) -> None:
    worker = await new_worker(store.address, name)
    put = await worker.put(chain_of("a", 3), range(3))
    worker.device.engine_runs.clear()
    worker.device.is_given.clear()
    items = list(zip(put.refs, range(10, 13), strict=True))
    before = worker.view[10:13].copy()
    task = asyncio.create_task(
        worker.client.get_blocks(put.lease_id, items, within(30 if cancelled else 1.0))
    )
    await until(worker.device.is_given.is_set)
    if cancelled:
        task.cancel()
    expected = errors.TransferCancelled if cancelled else errors.TransferTimeout
    with pytest.raises(expected) as caught:
        await task
    quarantine = errors.quarantine_of(caught.value)
    assert quarantine is not None and quarantine.block_ids == (10, 11, 12)
    assert not quarantine.settled.done() and np.array_equal(worker.view[10:13], before)
    worker.device.engine_runs.set()
    async with asyncio.timeout(10):
        await quarantine.settled
    worker.view[10:13] = 1
    assert await worker.get(put.lease_id, put.refs, [20, 21, 22]) == {}  # it goes on
    assert (worker.view[10:13] == 1).all()


async def test_frames_that_a_stalled_device_may_still_write_are_quarantined(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    worker = await new_worker(store.address, SHM)
    truth = store.node.store
    await worker.match([])
    worker.device.engine_runs.clear()
    with pytest.raises(DeadlineExceeded):
        await worker.put(chain_of("a", 4), range(4), deadline=within(1.0))
    truth: Any = store.node.store
    await until(lambda: len(truth.quarantined) == 4)
    worker.device.engine_runs.set()
    await until(lambda: len(truth.quarantined) == 0 and len(truth.leases) == 0)
    assert (await worker.put(chain_of("a", 4), range(4))).not_stored == 0


async def test_a_stalled_device_costs_a_staged_put_only_time(
    store: store_process.RunningStore, new_worker: NewWorker
) -> None:
    """It fills rows of ours, no frame; the rows stay taken until it is done."""
    worker = await new_worker(store.address, GRPC)
    worker.device.engine_runs.clear()
    with pytest.raises(DeadlineExceeded):
        await worker.put(chain_of("a", 4), range(4), deadline=within(1.0))
    with pytest.raises(DeadlineExceeded, match="turn"):
        await worker.client.transport.put("", [], within(0.1))
    worker.device.engine_runs.set()
    assert (await worker.put(chain_of("a", 4), range(4))).not_stored == 0


def test_checksums_on_a_device_are_those_of_the_bytes(seed: int) -> None:
    """More blocks than staging rows."""
    block_bytes = STAGING_BYTES // 3
    view = np.random.default_rng(seed).integers(0, 256, (8, block_bytes), dtype=np.uint8)
    device = FakeDevice()
    memory = BlockMemory.on_device(device, device.holding(view), block_bytes, 8)
    ids = [3, 7, 0, 5, 5, 6, 2, 1]
    assert memory.checksums(ids) == BlockMemory.of(view).checksums(ids)
    assert memory.staging is not None and memory.staging.num_rows == 3


def test_a_handle_is_in_no_repr() -> None:
    shared = Shared(b"secret" * 10, 4096)
    assert "secret" not in repr(shared) and "4096" not in repr(shared)


def test_staging_memory_is_unlocked_before_it_is_freed() -> None:
    device = FakeDevice()
    view = np.zeros((4, 4096), dtype=np.uint8)
    memory = BlockMemory.on_device(device, device.holding(view), 4096, 4)
    memory.checksums([0])
    assert len(device.registered) == 1
    del memory
    gc.collect()
    assert device.registered == {}


def test_staging_that_a_stalled_device_may_still_fill_is_never_used_again() -> None:
    device = FakeDevice()
    view = np.zeros((4, 4096), dtype=np.uint8)
    rows = PinnedStaging(device, device.holding(view), 4096, 4, stall_s=0.1)
    device.engine_runs.clear()
    with pytest.raises(errors.TransferFailed, match="did not copy"):
        rows.checksums([0])
    device.engine_runs.set()
    with pytest.raises(errors.TransferFailed, match="out of use"):
        rows.checksums([0])


async def test_nixl_from_a_gpu_to_a_store_of_this_host_is_refused(tmp_path: Path) -> None:
    """It would run 100 times below the bus."""
    slab = Slab.create(tmp_path, "n", bytes(16), SlabLayout(4096, 4))
    device = FakeDevice()
    device.memory = "VRAM"
    memory = BlockMemory.on_device(device, 4096, 4096, 4)
    here = StoreInfo("ab" * 8, "n", bytes(16), 4096, 4, str(slab.path), b"", 0)
    agent: Any = _Agent()
    rpc: Any = None
    with pytest.raises(FailedPrecondition, match="set transport to shm"):
        await connect_transport("nixl", memory, rpc, agent, here)
    assert agent.num_peers == 0
    elsewhere = dataclasses.replace(here, slab_path=str(tmp_path / "not here"))
    await connect_transport("nixl", memory, rpc, agent, elsewhere)
    assert agent.num_peers == 1
    slab.close()


class _Agent:
    num_peers = 0

    async def add_peer(self, _: bytes) -> str:
        self.num_peers += 1
        return "peer"


def _cuda_missing() -> str:
    """Why the tests of a real device cannot run; empty: they can."""
    try:
        import torch
    except ImportError as error:
        return str(error)
    return "" if torch.cuda.is_available() else "torch finds no CUDA device"


needs_cuda = pytest.mark.skipif(bool(_cuda_missing()), reason=f"NO GPU TEST: {_cuda_missing()}")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("block_bytes", [5000, 8192, 200_000])
async def test_a_real_device(
    store_settings: Any, seed: int, transport: str, block_bytes: int
) -> None:
    """Scattered blocks there and back, a corrupt frame, and nothing else touched."""
    import torch

    from kvstore.transport.cuda_device import CudaDevice

    settings = dataclasses.replace(store_settings, capacity_bytes=64 * 2**20)
    generator = torch.Generator("cuda:0").manual_seed(seed)
    cache = torch.randint(
        0, 256, (48, block_bytes), dtype=torch.uint8, device="cuda:0", generator=generator
    )
    torch.cuda.synchronize()
    device = CudaDevice.open(0)
    assert wait_for(device.compute_mark())
    async with store_process.running(settings) as running:
        worker = Worker(transport, block_bytes, 48, seed)
        worker.device = device  # type: ignore[assignment]
        worker.memory = BlockMemory.on_device(device, cache.data_ptr(), block_bytes, 48)
        await worker.attach(running.address)
        sources, targets = [1, 2, 3, 9, 5, 30], [40, 41, 11, 12, 7, 47]
        put = await worker.put(chain_of("a", 6), sources)
        before = cache.clone()
        assert await worker.get(put.lease_id, put.refs, targets) == {}
        before[targets] = before[sources]
        assert torch.equal(cache, before)
        found = worker.memory.checksums(sources)
        assert found == BlockMemory.of(cache.cpu().numpy()).checksums(sources)
        assert found == [ref.checksum for ref in put.refs]
        slab: Any = running.node.slab
        slab.block(put.refs[3].frame)[-1] ^= 1
        failed = await worker.get(put.lease_id, put.refs, targets)
        assert failed == {3: errors.CHECKSUM}
        await worker.client.close()


@pytest.mark.gpu
@needs_cuda
def test_a_real_device_refuses_what_is_no_memory() -> None:
    from kvstore.transport.cuda_device import CudaDevice

    with pytest.raises(BatonError, match="CUDA_ERROR"):
        CudaDevice.open(0).register(4096, 4096)
    with pytest.raises(FailedPrecondition, match="CUDA_ERROR_INVALID_DEVICE"):
        CudaDevice.open(1000)
