"""Whoever is cancelled while a failed transfer is waited for is cancelled, whatever it failed by: a
cancellation that got lost there would leave a request waiting until its deadline."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvstore.block_refs import Block
from kvstore.errors import TransferFailed
from kvstore.transport.base import GetItems, PutItem
from kvstore.transport.nixl import NixlTransport
from process.deadline import Deadline
from process.errors import NotFound

_BLOCK = Block(frame=0, generation=1, chain_hash=bytes(16), checksum=1, num_tokens=16)


class _Rpc:
    """A store that refuses each push, and says whether one is over when it is told to."""

    def __init__(self) -> None:
        self.stub = SimpleNamespace(Push="push", GetPush="get")
        self.is_asked, self.is_over = asyncio.Event(), asyncio.Event()

    def check(self) -> None:
        pass

    def mark_broken(self, why: str) -> None:
        pass

    def reading(self) -> contextlib.nullcontext[None]:
        return contextlib.nullcontext()

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        if method == "push":
            raise NotFound("the lease is over")
        self.is_asked.set()
        await self.is_over.wait()
        return SimpleNamespace(terminal=True)


def _transport(rpc: _Rpc, write: Callable[..., Any]) -> NixlTransport:
    memory = SimpleNamespace(
        address=0, num_blocks=4, block_bytes=64, device=None, checksums=lambda ids: [0] * len(ids)
    )
    agent = SimpleNamespace(write=write)
    attached = SimpleNamespace(frame_bytes=64, num_frames=4, region_address=0, attachment_id="a")
    return NixlTransport(memory, rpc, agent, "peer", attached)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_over", [False, True])
async def test_of_a_push_that_was_refused(is_over: bool) -> None:
    rpc = _Rpc()
    transport = _transport(rpc, write=lambda: None)
    items = GetItems([(_BLOCK, 0)])
    getting = asyncio.create_task(transport.get("lease", items, Deadline.after(30.0)))
    await rpc.is_asked.wait()
    if is_over:
        rpc.is_over.set()
    getting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await getting
    rpc.is_over.set()


async def test_of_a_put_that_failed() -> None:
    done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    transfer = SimpleNamespace(done=done, settled=settled, abandon=lambda: None)
    transport = _transport(_Rpc(), write=lambda *_, **__: transfer)
    item = PutItem(block_id=0, frame=0, generation=1)
    putting = asyncio.create_task(transport.put("lease", [item], Deadline.after(30.0)))
    await asyncio.sleep(0)
    done.set_result(TransferFailed("the peer has gone"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    putting.cancel()
    with pytest.raises(BaseException) as caught:
        await putting
    cause = getattr(caught.value, "cause", caught.value)
    assert isinstance(cause, asyncio.CancelledError), caught.value
    settled.set_result(None)
