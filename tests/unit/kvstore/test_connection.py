"""A store connection that is closed under a call: the caller, whom nobody cancelled, must hear that
the store is away, or its request would wait until its deadline for an answer that cannot come."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvstore.store_connection import StoreConnection
from process.deadline import Deadline
from process.rpc_errors import Unavailable


class _Slow:
    """A call that only ends by being cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def __call__(self, request: Any, timeout: float, metadata: Any) -> Any:
        self.began.set()
        return await self.future


def _connection() -> StoreConnection:
    connection = StoreConnection.__new__(StoreConnection)
    connection.address, connection.broken = "there", None
    return connection


async def test_a_call_cut_by_close_is_unavailable(tmp_path: Path) -> None:
    method = _Slow()
    task = asyncio.create_task(_connection().call(method, None, Deadline.after(30)))
    await method.began.wait()
    method.future.cancel()  # what closing the channel does to its calls
    with pytest.raises(Unavailable, match="there"):
        await asyncio.wait_for(task, 30)


async def test_a_cancel_of_the_caller_stays_one() -> None:
    method = _Slow()
    task = asyncio.create_task(_connection().call(method, None, Deadline.after(30)))
    await method.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()


async def test_rests_on_one_connection_leave_one_watch_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """gRPC keeps a watch until the connection changes, whoever still waits for it."""
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    connection = StoreConnection(f"127.0.0.1:{port}")
    await asyncio.wait_for(connection._channel.channel_ready(), 30)
    num_watches = 0
    watch = connection._channel.wait_for_state_change

    async def counted(state: grpc.ChannelConnectivity) -> None:
        nonlocal num_watches
        num_watches += 1
        await watch(state)

    monkeypatch.setattr(connection._channel, "wait_for_state_change", counted)
    try:
        for _ in range(5):
            await connection.sleep_until_lost(0.001)
        assert num_watches == 1
        resting = asyncio.create_task(connection.sleep_until_lost(60))
        await server.stop(0)
        await asyncio.wait_for(resting, 30)  # the connection is lost
    finally:
        await server.stop(0)
        await connection.close()
