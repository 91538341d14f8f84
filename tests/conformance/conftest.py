"""Stores and workers for the conformance suites: a real server in this process or in its own, real
slabs in shared memory, real NIXL agents."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvstore.config import KvStoreSettings
from kvstore.store_connection import HEARTBEAT_S
from kvstore.transport.device import PEER_COPIES, PeerCopies
from tests.harness.store import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    SETTINGS,
    TRANSPORTS,
    LocalStore,
    NewStore,
    NewWorker,
    StoreProcess,
    Worker,
    local_store,
)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """The worker's blocks lie in host memory; where that matters, see `anywhere`."""
    return str(request.param)


@pytest.fixture
def store_settings() -> KvStoreSettings:
    return SETTINGS


@pytest.fixture
async def store(store_settings: KvStoreSettings) -> AsyncIterator[LocalStore]:
    async with local_store(store_settings) as running:
        yield running


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
        heartbeat_s: float = HEARTBEAT_S,
        peer_copies: PeerCopies = PEER_COPIES,
    ) -> Worker:
        worker = Worker(
            transport, block_bytes, num_blocks, seed + len(workers), peer_copies=peer_copies
        )
        await worker.attach(address, heartbeat_s=heartbeat_s)
        workers.append(worker)
        return worker

    yield make
    async with AsyncExitStack() as stack:
        for worker in workers:
            stack.push_async_callback(worker.client.close)


@pytest.fixture
async def new_store() -> AsyncIterator[NewStore]:
    """Start stores in processes of their own: new_store(settings)."""
    processes: list[StoreProcess] = []

    async def make(settings: KvStoreSettings = SETTINGS, **options: bool) -> StoreProcess:
        process = StoreProcess(settings, **options)
        processes.append(process)
        await process.start()
        return process

    yield make
    for process in processes:
        await process.end()
