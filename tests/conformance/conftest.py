"""Stores and workers for the conformance suites: a real server in this process or in its own, real
slabs in shared memory, real NIXL agents."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
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
    NewWorker,
    OnDevice,
    StoreProcess,
    Worker,
    chain_of,
    local_store,
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
def chain() -> Callable[[str, int], list[bytes]]:
    return chain_of
