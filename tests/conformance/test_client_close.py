"""A client that is closed lets go only when nothing of its own moves any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvstore import serve
from process.deadline import Deadline
from process.errors import Unavailable

Chain = Callable[[str, int], list[bytes]]
NewWorker = Callable[..., Any]


async def test_a_close_waits_for_what_moves(
    store: serve.RunningStore,
    new_worker: NewWorker,
    chain: Chain,
    transport: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store must not hear that this worker is gone while its copy is under way: it would give
    the frames to somebody else."""
    worker = await new_worker(store.address, transport)
    put = await worker.put(chain("a", 3), range(3))
    client, real = worker.client, worker.client._transport
    gate, began, let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()
    get, close = real.get, real.close

    async def slow_get(*args: Any) -> Any:
        began.set()
        await gate.wait()
        return await get(*args)

    async def noted_close() -> None:
        let_go.set()
        await close()

    monkeypatch.setattr(real, "get", slow_get)
    monkeypatch.setattr(real, "close", noted_close)
    items = [(ref, 10 + index) for index, ref in enumerate(put.refs)]
    getting = asyncio.create_task(client.get_blocks(put.lease_id, items, Deadline.after(20)))
    await began.wait()
    closing = asyncio.create_task(client.close())
    for _ in range(50):
        await asyncio.sleep(0)
    assert not let_go.is_set()
    with pytest.raises(Unavailable, match="closed"):
        await client.get_blocks(put.lease_id, items, Deadline.after(20))
    gate.set()
    assert (await getting).failed == {}
    await closing
    async with asyncio.timeout(20):
        await let_go.wait()
    assert store.node.store is not None
    async with asyncio.timeout(20):
        while len(store.node.store.attachments):
            await asyncio.sleep(0.01)
