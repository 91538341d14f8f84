"""Blocks that are dealt out over devices are read and written as whole ones."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import Future

import numpy as np
import numpy.typing as npt
import pytest

from engine.kv.layout import KvLayout
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_memory import runs
from kvstore import block_hash
from kvstore.transport.base import BlockMemory
from kvstore.transport.device import wait_for
from services.worker.sharded_device import BASE, DevicePart, RecordRun, ShardedDevice
from tests.harness.fake_device import FakeDevice, FakeStream

LAYOUT = KvLayout.plain(num_layers=3, num_kv_heads=4, head_dim=16, block_size=4, dtype="float32")
NUM_BLOCKS = 7
Bytes = npt.NDArray[np.uint8]


def _spread(grid: Grid) -> tuple[ShardedDevice, list[Bytes]]:
    parts, memories = [], []
    registered: dict[int, int] = {}
    for rank in range(grid.num_ranks):
        device = FakeDevice()
        device.registered = registered  # host memory is locked once, for all
        record_bytes = grid.place(rank).layout(LAYOUT).block_bytes
        memory = np.zeros((NUM_BLOCKS, record_bytes), dtype=np.uint8)
        own = tuple(RecordRun(*run) for run in runs(LAYOUT, grid.place(rank)))
        parts.append(DevicePart(device, device.holding(memory), record_bytes, own))
        memories.append(memory)
    return ShardedDevice(parts, LAYOUT.block_bytes), memories


def _whole(device: ShardedDevice, memories: list[Bytes]) -> Bytes:
    whole = np.zeros((NUM_BLOCKS, LAYOUT.block_bytes), dtype=np.uint8)
    for part, memory in zip(device.parts, memories, strict=True):
        for block_offset, record_offset, num_bytes in part.runs:
            whole[:, block_offset : block_offset + num_bytes] = memory[
                :, record_offset : record_offset + num_bytes
            ]
    return whole


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(2, 1), Grid(1, 2), Grid(2, 2)], ids=str)
def test_copies_of_any_cut_are_those_of_whole_blocks(grid: Grid, seed: int) -> None:
    rng = random.Random(seed)
    device, memories = _spread(grid)
    for number, memory in enumerate(memories):
        memory[:] = np.random.default_rng(seed + number).integers(0, 256, memory.shape)
    expected = _whole(device, memories)
    size = NUM_BLOCKS * LAYOUT.block_bytes
    buffer = np.zeros(size + 4096, dtype=np.uint8)
    first = -buffer.ctypes.data % 4096
    host = buffer[first : first + size]
    device.register(host.ctypes.data, size)
    queue = device.new_queue()

    start = rng.randrange(LAYOUT.block_bytes)
    cuts = [start, *sorted(rng.sample(range(start + 1, size), 20))]
    copies = [(BASE + a, host.ctypes.data + a, b - a) for a, b in itertools.pairwise(cuts)]
    rng.shuffle(copies)
    queue.to_host(np.array(copies, dtype=np.uint64))
    assert wait_for(queue.mark())
    assert np.array_equal(host[start : cuts[-1]], expected.reshape(-1)[start : cuts[-1]])
    assert not host[:start].any() and not host[cuts[-1] :].any()

    host[:] = np.random.default_rng(seed).integers(0, 256, size)
    queue.to_device(np.array(copies, dtype=np.uint64))
    assert wait_for(queue.mark())
    queue.close()
    expected.reshape(-1)[start : cuts[-1]] = host[start : cuts[-1]]
    assert np.array_equal(_whole(device, memories), expected)


def test_checksums_are_those_of_whole_blocks(seed: int) -> None:
    device, memories = _spread(Grid(2, 2))
    for memory in memories:
        memory[:] = np.random.default_rng(seed).integers(0, 256, memory.shape)
    memory = BlockMemory.on_device(device, BASE, LAYOUT.block_bytes, NUM_BLOCKS)
    whole = _whole(device, memories)
    assert memory.checksums([5, 0, 6]) == [block_hash.checksum(whole[b]) for b in (5, 0, 6)]


def test_a_mark_is_over_when_all_devices_are(seed: int) -> None:
    device, _ = _spread(Grid(2, 1))
    host = np.zeros(2 * 4096 + LAYOUT.block_bytes, dtype=np.uint8)
    address = host.ctypes.data + -host.ctypes.data % 4096
    device.register(address, LAYOUT.block_bytes)
    slow = device.parts[1].device
    assert isinstance(slow, FakeDevice)
    slow.engine_runs.clear()
    queue = device.new_queue()
    queue.to_host(np.array([(BASE, address, LAYOUT.block_bytes)], dtype=np.uint64))
    mark = queue.mark()
    assert not mark.is_over()
    stream, found = FakeStream(), Future[bool]()
    mark.before(stream.handle)
    stream.give(lambda: found.set_result(mark.is_over()))
    with pytest.raises(TimeoutError):
        found.result(0.05)
    slow.engine_runs.set()
    assert wait_for(mark)
    assert found.result(20), "what the stream was given then waits for all of them, too"
    queue.close()


@pytest.mark.parametrize(
    "parts",
    [
        ((0, 0, 60),),
        ((0, 0, 60), (70, 60, 30)),
        ((0, 0, 60), (50, 60, 50)),
        ((0, 0, 100), (100, 100, 10)),
    ],
)
def test_what_does_not_make_up_a_block_is_refused(parts: tuple[tuple[int, int, int], ...]) -> None:
    part = DevicePart(FakeDevice(), 4096, 110, tuple(RecordRun(*run) for run in parts))
    with pytest.raises(ValueError, match="parts"):
        ShardedDevice([part], 100)
