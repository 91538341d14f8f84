"""A store answers while its laws are recomputed, however long that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore import invariants, store_process
from kvstore.block_store import BlockStore
from kvstore.store_node import WorkerInfo
from process import rpc
from process.deadline import Deadline
from protos import kvstore_pb2, kvstore_pb2_grpc
from tests.harness.waiting import until

WAIT_S = 30.0


async def test_a_status_does_not_wait_for_the_end_of_a_check(
    store: store_process.RunningStore,
    new_worker: Callable[..., Any],
    chain: Callable[[str, int], list[bytes]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a store of millions of blocks: a check begins and does not end until it may."""
    worker = await new_worker(store.address, "grpc")
    put = await worker.put(chain("a", 4), range(4))
    began, may_end, has_ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    real = invariants.check_store

    def check_store(truth: BlockStore) -> Iterator[None]:
        began.set()
        while not may_end.is_set():
            yield
        yield from real(truth)
        has_ended.set()

    monkeypatch.setattr(invariants, "check_store", check_store)
    async with rpc.channel(store.address) as channel, asyncio.timeout(WAIT_S):
        stub: Any = kvstore_pb2_grpc.KvStoreStub(channel)
        await began.wait()  # the store begins by itself when something was put
        for asks_for_one in (False, True, False):
            request = kvstore_pb2.GetStatusRequest(check_integrity=asks_for_one)
            status = await stub.GetStatus(request, timeout=WAIT_S)
            assert (status.num_committed, status.integrity_error) == (4, "")
        await worker.put(chain("b", 2), range(4, 6))
        assert not has_ended.is_set()
        may_end.set()
        await has_ended.wait()
        await worker.client.release([put.lease_id], deadline=Deadline.after(WAIT_S))
        status = await stub.GetStatus(
            kvstore_pb2.GetStatusRequest(check_integrity=True), timeout=WAIT_S
        )
        assert (status.num_committed, status.integrity_error) == (6, "")


async def test_leases_end_while_a_check_goes_on(
    store: store_process.RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a store of a million blocks, whose only worker is silent: no check comes to its end."""
    began = asyncio.Event()

    def check_store(truth: BlockStore) -> Iterator[None]:
        began.set()
        while True:
            yield

    monkeypatch.setattr(invariants, "check_store", check_store)
    worker = await store.node.attach(WorkerInfo("w", bytes(16), bytes(32), 4096, "grpc"))
    truth = store.node.store
    assert truth is not None
    truth.reserve(worker.attachment_id, b"", [bytes(16)], ttl_s=1.0, now_s=store.node.now_s())
    async with asyncio.timeout(WAIT_S):
        await began.wait()
    await until(lambda: len(truth.leases) == 0)
