"""A worker's home store that dies and returns under its name and address, over every transport:
met again without a crash, without a stale client, and measured again."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvstore.block import Block
from kvstore.config import KvStoreSettings
from kvstore.transport.base import BlockMemory
from services.worker.config import WorkerLimits
from services.worker.connector import StoreConnector
from services.worker.engine_thread import EngineThread
from services.worker.links import Links
from services.worker.store_target import StoreTarget
from tests.harness.gated_engine import fake_engine, prompt_of, request, running
from tests.harness.store import TRANSPORTS, StoreProcess
from tests.harness.waiting import within

Chain = Callable[[str, int], list[bytes]]
WAIT_S = 30.0
NUM_ITEMS = 5


@asynccontextmanager
async def connected(
    process: StoreProcess, transport: str
) -> AsyncIterator[tuple[Any, EngineThread, StoreConnector, Links]]:
    """An engine, its connector and what it measures."""
    engine = fake_engine(num_blocks=128)
    memory = BlockMemory.of(engine.kv.host_view)
    target = StoreTarget(
        process.address, "w", b"i" * 16, engine.model_info.fingerprint, memory, transport
    )
    async with running(engine) as thread:
        links = Links(thread, memory.block_bytes, 0.0)
        connector = StoreConnector(target, thread, WorkerLimits(), on_attached=links.measure_later)
        assert await connector.start(wait_s=WAIT_S)
        try:
            yield engine, thread, connector, links
        finally:
            await links.stop()
            await connector.stop(timeout_s=5)
        assert await thread.call(lambda e: e.stats().num_referenced_blocks) == 0


async def store_and_load(
    connector: StoreConnector, thread: EngineThread, engine: Any, hashes: list[bytes]
) -> tuple[list[tuple[Block, int]], bytes]:
    """Put blocks of a reserved request, fetch them into others. Returns: what was fetched, and the
    life that it was fetched from."""
    client = connector.client
    assert client is not None
    wanted = request(engine, prompt_of(42))
    block_ids = (await thread.call(lambda e: e.reserve(wanted))).block_ids
    view = engine.kv.host_view
    view[list(block_ids[:NUM_ITEMS])] = 7
    sources = list(zip(hashes, block_ids[:NUM_ITEMS], strict=True))
    put = await client.put_blocks(None, b"", sources, None, 30.0, within(), num_tokens=4)
    items = list(zip(put.refs, block_ids[NUM_ITEMS : 2 * NUM_ITEMS], strict=True))
    loaded = await connector.load(
        client, "r", put.lease_id, items, within(), incarnation=client.incarnation
    )
    assert (loaded.num_usable, loaded.not_usable) == (NUM_ITEMS, {})
    assert (view[[block_id for _, block_id in items]] == 7).all()
    connector.release_later(client, [put.lease_id])
    await connector.settle()
    thread.post(lambda e: e.abort("r"))
    return items, client.incarnation


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("num_lives", [2])
async def test_the_home_store_dies_and_returns(
    new_store: Callable[..., Any],
    store_settings: KvStoreSettings,
    chain: Chain,
    transport: str,
    num_lives: int,
) -> None:
    process = await new_store(dataclasses.replace(store_settings, node_id="home"))
    async with connected(process, transport) as (engine, thread, connector, links):
        clients, lives = [], []
        for life in range(num_lives):
            async with asyncio.timeout(WAIT_S):
                while connector.client is None or connector.client in clients:
                    await asyncio.sleep(0.01)  # shared memory does not break by itself
            client = connector.client
            clients.append(client)
            items, incarnation = await store_and_load(
                connector, thread, engine, chain(f"life {life}", NUM_ITEMS)
            )
            lives.append(incarnation)
            await links.settle()
            ((link, verdict),) = links.links
            assert link.node_id == "home" and link.problem == "" and not verdict.degraded
            assert link.transport == transport
            for former in lives[:-1]:
                stale = await connector.load(
                    client, "r", "no lease", items, within(), incarnation=former
                )
                assert stale.not_usable == {"incarnation": NUM_ITEMS}
            if life == num_lives - 1:
                break
            await process.end()
            away = await connector.load(client, "r", "no lease", items, within(5.0))
            assert away.num_usable < NUM_ITEMS or transport == "shm"  # its mapping stays
            await process.start()
        assert len(set(lives)) == num_lives == connector.num_attached
        assert all(former.broken is not None for former in clients[:-1])
