"""Stores and workers for the conformance suites: a real server in this process or in its own, real
slabs in shared memory, real NIXL agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest

from kvstore import block_hash, serve
from kvstore.config import KvStoreSettings
from tests.harness.store import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    FINGERPRINT,
    NUM_BLOCKS,
    SETTINGS,
    TRANSPORTS,
    NewWorker,
    OnDevice,
    StoreProcess,
    Worker,
    paused,
)


@pytest.fixture
def pause() -> Callable[[asyncio.subprocess.Process], Awaitable[None]]:
    return paused


@pytest.fixture(
    params=[*TRANSPORTS, *map(OnDevice, TRANSPORTS)],
    ids=[*TRANSPORTS, *(f"{name}-device" for name in TRANSPORTS)],
)
def transport(request: pytest.FixtureRequest) -> str:
    """Equal to its name, wherever the worker's blocks lie."""
    return request.param


@pytest.fixture
def store_settings() -> KvStoreSettings:
    return SETTINGS


@pytest.fixture
async def store(store_settings: KvStoreSettings) -> AsyncIterator[serve.RunningStore]:
    """A store in this process. At the end nothing may be left: no reservation, no lease."""
    async with serve.running(store_settings) as running:
        yield running
        assert await running.node.check_integrity() == ""


@pytest.fixture
async def new_worker(seed: int) -> AsyncIterator[NewWorker]:
    """Make attached workers: new_worker(address, transport, block_bytes=, num_blocks=)."""
    workers: list[Worker] = []

    async def make(
        address: str,
        transport: str,
        *,
        block_bytes: int = BLOCK_BYTES,
        num_blocks: int = NUM_BLOCKS,
    ) -> Worker:
        worker = Worker(transport, block_bytes, num_blocks, seed + len(workers))
        await worker.attach(address)
        workers.append(worker)
        return worker

    yield make
    async with AsyncExitStack() as stack:
        for worker in workers:
            stack.push_async_callback(worker.client.close)


@pytest.fixture
async def new_store() -> AsyncIterator[Callable[..., Awaitable[StoreProcess]]]:
    """Start stores in processes of their own: new_store(settings)."""
    processes: list[StoreProcess] = []

    async def make(settings: KvStoreSettings = SETTINGS) -> StoreProcess:
        process = StoreProcess(settings)
        processes.append(process)
        await process.start()
        return process

    yield make
    for process in processes:
        await process.end()


@pytest.fixture
def chain(seed: int) -> Callable[[str, int], list[bytes]]:
    """chain(name, n): the chain hashes of n full blocks of a prompt of that name."""

    def make(name: str, num_blocks: int) -> list[bytes]:
        root = block_hash.root_key(name.encode(), FINGERPRINT)
        return block_hash.chain(root, range(num_blocks * BLOCK_SIZE), BLOCK_SIZE)

    return make
