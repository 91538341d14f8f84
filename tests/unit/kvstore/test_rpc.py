"""A store connection that is closed under a call: the caller, whom nobody cancelled, must hear that
the store is away, or its request would wait until its deadline for an answer that cannot come."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from kvstore.rpc import StoreRpc
from process.deadline import Deadline
from process.errors import Unavailable


class _Slow:
    """A call that only ends by being cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def __call__(self, request: Any, timeout: float) -> Any:
        self.began.set()
        return await self.future


def _rpc() -> StoreRpc:
    rpc = StoreRpc.__new__(StoreRpc)
    rpc.address, rpc.broken = "there", None
    return rpc


async def test_a_call_cut_by_close_is_unavailable(tmp_path: Path) -> None:
    method = _Slow()
    task = asyncio.create_task(_rpc().call(method, None, Deadline.after(30)))
    await method.began.wait()
    method.future.cancel()  # what closing the channel does to its calls
    with pytest.raises(Unavailable, match="there"):
        await asyncio.wait_for(task, 5)


async def test_a_cancel_of_the_caller_stays_one() -> None:
    method = _Slow()
    task = asyncio.create_task(_rpc().call(method, None, Deadline.after(30)))
    await method.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert task.cancelled()
