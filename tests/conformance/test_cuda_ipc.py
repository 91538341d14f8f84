"""CUDA IPC between real processes on real devices: what is mapped is what is lent, checksums of the
device are those of the host, and a lender that dies or frees what it lent does not take the
reader's device along. On two devices where there are two, and on one."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import secrets
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import block_hash, errors
from kvstore.block_refs import Block, Tier
from kvstore.client import KvStoreClient
from kvstore.transport.base import BlockMemory
from kvstore.transport.device import wait_for
from process.deadline import Deadline

torch = pytest.importorskip("torch")
NUM_DEVICES = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not NUM_DEVICES, reason="NO GPU TEST: torch finds no CUDA device"),
]

SCRIPT = Path(__file__).parents[1] / "harness" / "lone_lender.py"
BLOCK_BYTES, NUM_BLOCKS = 2 * 2**20, 96
START_S = 60.0


class LoneLender:
    """A lending process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""
        self.checksums: list[int] = []

    async def line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        async with asyncio.timeout(START_S):
            line = await self.process.stdout.readline()
        assert line, "the lender ended"
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def ask(self, command: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(command.encode() + b"\n")
        return await self.line()

    async def lend(self) -> tuple[str, list[Block]]:
        told = await self.ask("lend")
        return told["lease_id"], [
            Block(bytes.fromhex(name), frame, generation, checksum, 16, Tier.DEVICE)
            for name, frame, generation, checksum in told["refs"]
        ]

    async def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.communicate()


@pytest.fixture
async def lent(seed: int) -> AsyncIterator[LoneLender]:
    """On device 0."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), "0", str(BLOCK_BYTES), str(NUM_BLOCKS), str(seed % 1000),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=2**24,
        env=os.environ | {"BATON_PARENT_PID": str(os.getpid())},
    )  # fmt: skip
    made = LoneLender(process)
    try:
        ready = await made.line()
        made.address, made.checksums = ready["address"], ready["checksums"]
        yield made
    finally:
        await made.end()


class Reader:
    """A cache on a device, and a client that maps the lender's."""

    def __init__(self, device_id: int) -> None:
        from kvstore.transport.cuda_device import CudaDevice
        from services.worker.device_checksums import CudaChecksums

        self.cache = torch.zeros(
            NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8, device=f"cuda:{device_id}"
        )
        torch.cuda.synchronize(device_id)
        self.memory = BlockMemory.on_device(
            CudaDevice.open(device_id), self.cache.data_ptr(), BLOCK_BYTES, NUM_BLOCKS,
            CudaChecksums(self.cache),
        )  # fmt: skip
        self.client: KvStoreClient

    async def attach(self, address: str) -> None:
        self.client = await KvStoreClient.attach(
            address,
            worker_id="reader",
            worker_incarnation=secrets.token_bytes(16),
            fingerprint="ab" * 16,
            memory=self.memory,
            transport="cuda_ipc",
            timeout_s=START_S,
        )

    async def get(
        self, lease_id: str, refs: list[Block], block_ids: list[int], seconds: float = 30.0
    ) -> dict[int, str]:
        items = list(zip(refs, block_ids, strict=True))
        return (await self.client.get_blocks(lease_id, items, Deadline.after(seconds))).failed

    def assert_device_lives(self) -> None:
        """Kernels run, copies move: nothing is left of what went wrong."""
        x = torch.ones(1 << 20, device=self.cache.device)
        assert float((x + x).sum()) == 2 << 20


@pytest.fixture(params=["same", "peer"])
async def reader(request: pytest.FixtureRequest, lent: LoneLender) -> AsyncIterator[Reader]:
    if request.param == "peer" and NUM_DEVICES < 2:
        pytest.skip(f"NO TEST ON 2 GPUS: torch finds {NUM_DEVICES}")
    made = Reader(1 if request.param == "peer" else 0)
    await made.attach(lent.address)
    yield made
    await made.client.close()


async def test_blocks_come_verified(lent: LoneLender, reader: Reader) -> None:
    lease_id, refs = await lent.lend()
    assert [ref.checksum for ref in refs[:4]] == lent.checksums, "the host's own"
    assert await reader.get(lease_id, refs, list(reversed(range(NUM_BLOCKS)))) == {}
    before = reader.cache.clone()
    wrong = dataclasses.replace(refs[5], checksum=refs[5].checksum ^ 1)
    assert await reader.get(lease_id, [refs[3], wrong], [0, 1]) == {1: errors.CHECKSUM}
    assert torch.equal(reader.cache[0], before[NUM_BLOCKS - 1 - 3])
    old = dataclasses.replace(refs[6], generation=refs[6].generation - 2)
    assert await reader.get(lease_id, [old], [2]) == {0: errors.GENERATION}
    await reader.client.release([lease_id], deadline=Deadline.after(5))
    assert await reader.get(lease_id, [refs[0]], [3]) == {0: errors.LEASE_LAPSED}
    reader.assert_device_lives()


async def test_a_killed_lender_costs_its_blocks_not_the_device(
    lent: LoneLender, reader: Reader, record_property: Any
) -> None:
    lease_id, refs = await lent.lend()
    assert await reader.get(lease_id, refs[:8], list(range(8))) == {}
    copying = [
        asyncio.create_task(reader.get(lease_id, refs, list(range(NUM_BLOCKS)), 5.0))
        for _ in range(4)
    ]
    await asyncio.sleep(0.002)  # some of them are under way
    lent.process.send_signal(signal.SIGKILL)
    await lent.process.wait()
    for failed in await asyncio.gather(*copying):
        assert set(failed.values()) <= {errors.STORE_UNAVAILABLE, errors.DEADLINE}
    after = await reader.get(lease_id, refs, list(range(NUM_BLOCKS)), 5.0)
    assert set(after) == set(range(NUM_BLOCKS))
    assert set(after.values()) <= {errors.STORE_UNAVAILABLE, errors.DEADLINE}
    # The mapping itself, which nothing looked at since it broke: what does the device say?
    transport: Any = reader.client.transport
    try:
        queue = reader.memory.device.new_queue()  # type: ignore[union-attr]
        places = (reader.memory.address, transport._address, BLOCK_BYTES)
        queue.between(np.array([places], dtype=np.uint64))
        wait_for(queue.mark())
        queue.close()
        record_property("a copy out of a dead lender's memory", "went through")
    except errors.TransferFailed as error:
        record_property("a copy out of a dead lender's memory", str(error))
    reader.assert_device_lives()


async def test_memory_that_is_freed_under_a_mapping_is_no_error(
    lent: LoneLender, reader: Reader, record_property: Any
) -> None:
    """A lender frees nothing as long as it lives; should it, a checksum says so."""
    lease_id, refs = await lent.lend()
    assert await reader.get(lease_id, refs[:8], list(range(8))) == {}
    record_property("left allocated", (await lent.ask("free"))["allocated"])
    failed = await reader.get(lease_id, refs[:8], list(range(8)))
    record_property("reads of freed memory", str(failed))
    reader.assert_device_lives()


def test_checksums_that_nobody_waits_for_keep_no_place() -> None:
    """More begun than there are places for; those that are asked are right, whatever the order."""
    from services.worker.device_checksums import NUM_SLOTS, CudaChecksums

    cache = torch.randint(0, 256, (64, 98304), dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    expected = [block_hash.checksum(row) for row in cache.cpu().numpy()]
    hasher = CudaChecksums(cache)
    for _ in range(3 * NUM_SLOTS):
        hasher.begin([1, 2, 3])
    kept = [hasher.begin([index, 63 - index]) for index in range(NUM_SLOTS - 1)]
    assert hasher.begin(range(64)).result() == expected
    for index in reversed(range(NUM_SLOTS - 1)):
        assert kept[index].result() == [expected[index], expected[63 - index]]
