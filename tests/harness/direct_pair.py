"""Pairs of a prefill worker that lends and a decode worker that reads of it, and what a router asks
of them. Also on devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvstore.transport.base import BlockMemory
from protos import common_pb2
from services.worker import store_target
from tests.harness.fake_device import FakeDevice
from tests.harness.gated_engine import BLOCK_SIZE, prompt_of
from tests.harness.prefill_decode_pair import Answer, Pair, pair, until

DIRECT = common_pb2.HANDOVER_PATH_DIRECT
STORE = common_pb2.HANDOVER_PATH_STORE
PROMPT = prompt_of(30, start=3)
FULL = len(PROMPT) // BLOCK_SIZE


@contextlib.asynccontextmanager
async def direct(folder: Path, **options: Any) -> AsyncIterator[Pair]:
    """A pair that has met: what lends blocks to be measured with has them back."""
    async with pair(folder, **options) as p:
        yield p
        await all_back(p)


async def all_back(p: Pair) -> None:
    """No block is lent or held, and every law holds."""
    await until(lambda: p.prefill_role.worker.behind.num_writers == 0)
    lender = p.prefill.core.lender
    if lender is not None:
        await until(lambda: lender.num_lent_blocks == lender.loans.num_leases == 0)
    await p.check()


async def generate(
    p: Pair, prompt: Any, *, name: str = "r", handover: int = DIRECT, max_tokens: int = 8
) -> Answer:
    """As a router does it that has chosen the direct way."""
    async with p.stream() as stream:
        key = await stream.reserve(p.reserve(prompt, name=name, max_tokens=max_tokens))
        assert (await stream.next(key)).WhichOneof("event") == "reserved"
        reply = await p.run_prefill(prompt, name=name, handover=handover, max_tokens=max_tokens)
        await stream.generate(key, reply)
        answer = await stream.collect(key)
    answer.prefill = reply
    answer.token_ids[:0] = reply.token_ids
    return answer


def on_devices(monkeypatch: pytest.MonkeyPatch) -> list[FakeDevice]:
    """Every worker's cache lies on a device of its own from now on; in the order of workers."""
    devices: list[FakeDevice] = []

    def block_memory(kv: Any) -> BlockMemory:
        devices.append(device := FakeDevice())
        address = device.holding(kv.host_view)
        return BlockMemory.on_device(device, address, kv.layout.block_bytes, kv.num_blocks)

    monkeypatch.setattr(store_target, "block_memory", block_memory)
    monkeypatch.setattr(store_target, "check_transports", lambda *_: None)
    return devices
