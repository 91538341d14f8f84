"""Pairs of a prefill worker that lends and a decode worker that reads of it, and what a router asks
of them. Also on devices; and ahead of a handle: a prompt whose first chunk decode was
told of, while prefill stands in the second one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from kvstore.block_lender import LenderLimits
from kvstore.exported_blocks import LeaseUpdate
from kvstore.transport.base import BlockMemory
from kvstore.transport.device import PEER_COPIES, PeerCopies
from process import signing_keys
from protos import common_pb2, prefill_pb2
from services.decode.request_spec import DecodeState
from services.worker import store_pool
from services.worker.config import WorkerSettings
from services.worker.runtime import Identity, WorkerCore
from tests.harness.fake_device import FakeDevice
from tests.harness.gated_engine import BLOCK_SIZE, fake_engine, prompt_of
from tests.harness.handles import partial
from tests.harness.prefill_decode_pair import (
    LEASE_TTL_S,
    WAIT_S,
    Pair,
    PrefillCall,
    RouterStream,
    pair,
    patient,
    whole,
)
from tests.harness.waiting import until

DIRECT = common_pb2.HANDOVER_PATH_DIRECT
STORE = common_pb2.HANDOVER_PATH_STORE
PROMPT = prompt_of(30, start=3)
FULL = len(PROMPT) // BLOCK_SIZE


def on_devices(
    monkeypatch: pytest.MonkeyPatch, peer_copies: PeerCopies = PEER_COPIES
) -> list[FakeDevice]:
    """Every worker's cache lies on a device of its own from now on; in the order of workers."""
    devices: list[FakeDevice] = []

    def block_memory(kv: Any) -> BlockMemory:
        devices.append(device := FakeDevice())
        device.peer_copies = peer_copies
        address = device.holding(kv.host_view)
        return BlockMemory.on_device(device, address, kv.layout.block_bytes, kv.num_blocks)

    monkeypatch.setattr(store_pool, "block_memory", block_memory)
    monkeypatch.setattr(store_pool, "check_transports", lambda *_: None)
    return devices


def lender_of(folder: Path, role: str, *, has_store: bool = True, preemption: str = "never") -> str:
    """The node id under which such a worker would lend; "": it does not."""
    key_file = folder / "handle.keys"
    signing_keys.create(key_file)
    settings = WorkerSettings(
        store_address="127.0.0.1:1" if has_store else "",
        handle_keys_file=str(key_file),
        engine=EngineConfig(preemption=preemption),
    )
    core = WorkerCore(fake_engine(preemption=preemption), settings, Identity.new(role, "w"))
    return core.status().lender_node_id


NUM_BLOCKS = -(-len(PROMPT) // BLOCK_SIZE)
CHUNK = 16
FOR_EVER_S = 1e6
PATIENT = LenderLimits(max_wait_s=FOR_EVER_S)
"""Nobody who waits is told of anything because a time was over."""


class Ahead:
    """A prompt of two chunks: decode was told of the first one, and prefill stands in the second.

    `key` is decode's, `call` prefill's, `first` names all of the first chunk."""

    def __init__(
        self,
        p: Pair,
        stream: RouterStream,
        key: int,
        call: PrefillCall,
        first: common_pb2.KvHandle,
        num_told: int,
    ) -> None:
        """num_told: blocks that decode was told of."""
        self.p, self.stream, self.key, self.call = p, stream, key, call
        self.first, self._num_told = first, num_told
        assert p.prefill.core.lender is not None
        self.lender = p.prefill.core.lender
        self.num_asked = 0
        """Questions that came to the lender."""
        await_lent = self.lender.lender.await_lent

        async def counted(*question: Any, **options: Any) -> LeaseUpdate:
            self.num_asked += 1
            return await await_lent(*question, **options)

        self.lender.lender.await_lent = counted  # type: ignore[method-assign]

    @property
    def num_waiting(self) -> int:
        return self.lender.lender.num_waiting

    @property
    def num_read(self) -> int:
        """Blocks that decode has copied for it."""
        (request,) = self.p.decode_role.worker._requests.values()
        return request._leg.num_bytes_read // self.lender.loans.frame_bytes

    @property
    def state(self) -> list[DecodeState]:
        return list(self.p.decode_role.worker.states.values())

    async def asked(self) -> None:
        """Decode has what it was told of, and waits at the lender for the rest."""
        await until(lambda: self.num_read >= self._num_told)
        await until(lambda: self.num_waiting == 1 and self.state == [DecodeState.RESERVED])

    async def computed(self) -> prefill_pb2.PrefillReply:
        """Prefill goes on to its end. Returns: its last word, which decode has not got."""
        self.p.prefill_model.release()
        async with asyncio.timeout(WAIT_S):
            return await whole(self.call)

    async def copied(self) -> prefill_pb2.PrefillReply:
        """Until the rest has come, too."""
        reply = await self.computed()
        await until(lambda: self.num_read == NUM_BLOCKS)
        await until(lambda: self.num_waiting == 0 and self.state == [DecodeState.RESERVED])
        return reply

    async def answer(self, reply: prefill_pb2.PrefillReply) -> Any:
        """Decode gets the last word. The answer is exact, whatever that says."""
        await self.stream.generate(self.key, reply)
        answer = await self.stream.collect(self.key)
        assert [*reply.token_ids, *answer.token_ids] == self.p.expected(PROMPT, 8)
        return answer


@contextlib.asynccontextmanager
async def ahead(
    folder: Path,
    *,
    num_told: int = CHUNK // BLOCK_SIZE,
    lender_limits: LenderLimits = PATIENT,
    **options: Any,
) -> AsyncIterator[Ahead]:
    """num_told: blocks of the first chunk that decode is told of."""
    limits = patient(attach_budget_s=WAIT_S, transfer_budget_s=WAIT_S, put_budget_s=WAIT_S)
    async with pair(folder, chunk=CHUNK, limits=limits, **options) as p, p.stream() as stream:
        assert p.prefill.core.lender is not None
        lender = p.prefill.core.lender.lender
        lender.limits = lender_limits
        key = await stream.reserve(p.reserve(PROMPT, budget_ms=int(10 * WAIT_S * 1000)))
        await stream.next(key)
        p.prefill_model.hold_at(2)
        ask = p.prefill_request(PROMPT, handover=DIRECT)
        call = PrefillCall(p.prefill_stub, ask, timeout_s=LEASE_TTL_S)
        async with asyncio.timeout(WAIT_S):
            first = await call.read()
        assert first.handle.is_partial and first.handle.num_tokens == CHUNK
        made = Ahead(p, stream, key, call, first.handle, num_told)
        is_all = num_told == CHUNK // BLOCK_SIZE
        told = first.handle if is_all else partial(p, first.handle, num_told)
        await stream.prefetch(key, told)
        yield made
        p.prefill_model.release()
        call.vanish()
        await until(lambda: made.num_waiting == 0)
        await p.check()
