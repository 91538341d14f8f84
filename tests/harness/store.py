"""Stores in processes of their own and workers of them: real slabs in shared memory, real NIXL
agents."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import numpy as np

from kvstore.block import Block
from kvstore.client import StoreClient
from kvstore.config import KvStoreSettings
from kvstore.putting import PutResult
from kvstore.transport.base import BlockMemory
from process.deadline import Deadline
from protos import kvstore_pb2
from tests.harness.fake_device import FakeDevice
from tests.harness.service_process import own_address
from tests.harness.waiting import within

FINGERPRINT = "ab" * 16
BLOCK_BYTES = 5000  # no multiple of a page
NUM_BLOCKS = 48
BLOCK_SIZE = 16
START_S = 30.0
CALL_S = 10.0
TRANSPORTS = ("shm", "nixl", "grpc")

SETTINGS = KvStoreSettings(
    capacity_bytes=32 * 8192,
    sweep_interval_s=0.02,
    integrity_interval_s=0.05,
    attachment_ttl_s=60.0,
    quarantine_grace_s=0.2,
    drain_s=0.3,
)


class OnDevice(str):
    """The name of a transport, for a worker whose blocks lie on a device."""


class Worker:
    """A worker's memory and its client, with shorthands. Block i begins with random bytes."""

    def __init__(self, transport: str, block_bytes: int, num_blocks: int, seed: int) -> None:
        self.transport = str(transport)
        self.view = np.random.default_rng(seed).integers(
            0, 256, (num_blocks, block_bytes), dtype=np.uint8
        )
        self.memory = BlockMemory.of(self.view)
        self.device = FakeDevice()
        if isinstance(transport, OnDevice):
            address = self.device.holding(self.view)
            self.memory = BlockMemory.on_device(self.device, address, block_bytes, num_blocks)
        self.worker_id = f"worker-{secrets.token_hex(4)}"
        self.incarnation = secrets.token_bytes(16)
        self.client: StoreClient

    async def attach(self, address: str) -> StoreClient:
        self.client = await StoreClient.attach(
            address,
            worker_id=self.worker_id,
            worker_incarnation=self.incarnation,
            fingerprint=FINGERPRINT,
            memory=self.memory,
            transport=self.transport,
            timeout_s=START_S,
        )
        return self.client

    async def put(
        self,
        chain: Sequence[bytes],
        block_ids: Sequence[int],
        *,
        parent: bytes = b"",
        tail: tuple[str, int, int] | None = None,
        lease_id: str | None = None,
        ttl_s: float = 60.0,
        deadline: Deadline | None = None,
    ) -> PutResult:
        return await self.client.put_blocks(
            lease_id,
            parent,
            list(zip(chain, block_ids, strict=True)),
            tail,
            ttl_s,
            deadline or within(),
            num_tokens=BLOCK_SIZE,
        )

    async def get(
        self,
        lease_id: str,
        refs: Sequence[Block],
        block_ids: Sequence[int],
        seconds: float = CALL_S,
    ) -> dict[int, str]:
        """Returns: what failed; the byte count must fit to that."""
        items = list(zip(refs, block_ids, strict=True))
        result = await self.client.get_blocks(lease_id, items, within(seconds))
        assert result.num_bytes == (len(items) - len(result.failed)) * self.view.shape[1]
        return result.failed

    async def status(self) -> kvstore_pb2.GetStatusReply:
        status = await self.client.status(check_integrity=True, deadline=within())
        assert status.integrity_error == ""
        return status


NewWorker = Callable[..., Awaitable[Worker]]
"""`new_worker(address, transport, block_bytes=, num_blocks=)`: attached."""


class StoreProcess:
    """`python -m kvstore` in a process of its own, always on one port."""

    def __init__(self, settings: KvStoreSettings) -> None:
        self.settings = dataclasses.replace(settings, listen=own_address())
        self.address = self.settings.listen
        self.process: asyncio.subprocess.Process

    async def start(self) -> dict[str, str]:
        """Returns: the fields of the ready line."""
        defaults = KvStoreSettings()
        overrides = [
            f"--set={field.name}={value}"
            for field in dataclasses.fields(defaults)
            if (value := getattr(self.settings, field.name)) != getattr(defaults, field.name)
        ]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "kvstore", *overrides, stderr=asyncio.subprocess.PIPE
        )
        return await self.line("ready")

    async def line(self, event: str) -> dict[str, str]:
        """The next log line of that event."""
        assert self.process.stderr is not None
        async with asyncio.timeout(START_S):
            while line := await self.process.stderr.readline():
                try:
                    fields = json.loads(line)
                except ValueError:
                    continue  # NIXL writes lines of its own
                if fields.get("event") == event:
                    return dict(fields)
        raise AssertionError(f"the store ended without '{event}'")

    async def pause(self) -> None:
        await paused(self.process)

    def wake(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    async def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Returns: the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.send_signal(number)
        async with asyncio.timeout(START_S):
            # Draining its log lets the pipe close with the process.
            await self.process.communicate()
        return self.process.returncode or 0


async def paused(process: asyncio.subprocess.Process) -> None:
    """Stop a process, and wait until each of its threads has stopped."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    async with asyncio.timeout(START_S):
        while True:
            stats = [(task / "stat").read_text() for task in tasks.iterdir()]
            if all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats):
                return
            await asyncio.sleep(0.001)
