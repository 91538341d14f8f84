"""BlockWriter: parent first, without gaps, behind the engine's back, and nothing left after a
cancel.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine.outputs import FilledBlock
from kvstore.block_refs import Block
from kvstore.client import PutResult
from process.deadline import Deadline
from process.rpc_errors import BatonError, DeadlineExceeded
from services.worker.config import WorkerLimits
from services.worker.store_pool import StoreConnector
from services.worker.store_writer import BlockWriter, TailSource
from tests.harness.gated_engine import fake_engine, running
from tests.harness.waiting import settled

SIZE = 4


def name_of(index: int) -> bytes:
    return bytes([index]) * 16


def filled(*indices: int) -> list[FilledBlock]:
    return [FilledBlock(index, 100 + index, name_of(index)) for index in indices]


class FakeStore:
    """Takes puts, with room for so many blocks, and remembers them."""

    def __init__(self, room: int = 1000) -> None:
        self.room = room
        self.stored: list[bytes] = []
        self.puts: list[list[int]] = []
        self.tenants: set[str] = set()
        self.released: list[str] = []
        self.renewed = asyncio.Event()
        self.renew_error: BatonError | None = None
        self.error: BatonError | None = None
        self.broken: str | None = None
        self.frame_bytes = 32
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()

    async def put_blocks(
        self,
        lease_id: str | None,
        parent: bytes,
        blocks: Sequence[tuple[bytes, int]],
        tail: tuple[str, int, int] | None,
        ttl_s: float,
        deadline: Deadline,
        *,
        num_tokens: int,
        tenant: str = "",
    ) -> PutResult:
        self.tenants.add(tenant)
        self.entered.set()
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        assert parent == (self.stored[-1] if self.stored else b""), "a child before its parent"
        fit = blocks[: max(0, self.room - len(self.stored))]
        refs = tuple(Block(name, 7, 2, 0, num_tokens) for name, _ in fit)
        self.stored += [name for name, _ in fit]
        self.puts.append([block_id - 100 for _, block_id in fit])
        has_room = tail is not None and len(self.stored) < self.room
        stored_tail = Block(b"", 8, 2, 0, tail[2]) if tail and has_room else None
        lost = len(blocks) - len(refs) + (tail is not None and stored_tail is None)
        return PutResult("lease", refs, stored_tail, 32 * len(refs), lost)

    async def renew(self, lease_id: str, *, ttl_s: float, deadline: Deadline) -> None:
        assert lease_id == "lease"
        self.renewed.set()
        if self.renew_error is not None:
            raise self.renew_error

    async def release(self, lease_ids: list[str], *, deadline: Deadline) -> int:
        self.released += lease_ids
        return len(lease_ids)


@asynccontextmanager
async def writing(
    store: FakeStore,
    refs: Sequence[Block] = (),
    ttl_s: float = 5,
    budget_s: float = 5,
    **options: Any,
) -> AsyncIterator[tuple[BlockWriter, StoreConnector]]:
    async with running(fake_engine(num_blocks=64)) as thread:
        connector = StoreConnector(None, thread, WorkerLimits())
        client: Any = store
        writer = BlockWriter(
            connector,
            client,
            lease_id="lease" if refs else "",
            refs=refs,
            block_size=SIZE,
            ttl_s=ttl_s,
            put_budget_s=5,
            deadline=Deadline.after(budget_s),
            **options,
        )
        yield writer, connector
        writer.cancel()
        await connector.settle()
        await connector.stop(timeout_s=1)


async def test_any_batching_ends_with_the_same_chain(seed: int) -> None:
    """Blocks come in random handfuls while puts take random time; the chain has no gap, no
    repeat.
    """
    rng = random.Random(seed)
    for _ in range(30):
        store = FakeStore()
        async with writing(store) as (writer, _):
            index, total = 0, rng.randint(0, 40)
            while index < total:
                count = rng.randint(1, 5)
                writer.add(filled(*range(index, min(total, index + count))))
                index += count
                if rng.random() < 0.5:
                    store.gate.clear()
                if rng.random() < 0.7:
                    store.gate.set()
                for _ in range(rng.randint(0, 3)):
                    await asyncio.sleep(0)
            asyncio.get_running_loop().call_soon(store.gate.set)
            written = await writer.finish(TailSource("tail", 99, 3))
        assert store.stored == [name_of(i) for i in range(total)]
        assert [ref.chain_hash for ref in written.refs] == store.stored
        assert written.tail is not None and written.tail.num_tokens == 3
        assert written.problem is None
        assert written.num_bytes == 32 * total


async def test_a_lease_is_renewed_while_its_prompt_queues_in_the_engine() -> None:
    """Otherwise what a long-waiting prompt found in the store lapses under load."""
    store = FakeStore()
    ref = Block(name_of(0), 7, 2, 0, SIZE)
    store.stored.append(ref.chain_hash)
    async with writing(store, refs=[ref], ttl_s=0.03) as (writer, _):
        async with asyncio.timeout(30):
            await store.renewed.wait()
        writer.add(filled(1))
        written = await writer.finish(None)
        assert (len(written.refs), written.problem) == (2, None)


async def test_the_tail_is_put_even_when_finish_comes_in_the_middle_of_a_put() -> None:
    store = FakeStore()
    store.gate.clear()
    async with writing(store) as (writer, _):
        writer.add(filled(0))
        await store.entered.wait()
        finish = asyncio.create_task(writer.finish(TailSource("tail", 99, 1)))
        await settled()
        store.gate.set()
        written = await asyncio.wait_for(finish, 30)
    assert (len(written.refs), written.tail is not None) == (1, True)


async def test_what_is_much_goes_in_batches_the_tail_with_the_last() -> None:
    """A copied prefix must not take one put's time for all of it; `refs` grow with each batch."""
    store = FakeStore()
    grown: list[int] = []
    options = {"batch_bytes": 3 * 32, "on_stored": lambda: grown.append(len(store.stored))}
    async with writing(store, **options) as (writer, _):
        writer.add(filled(*range(8)))
        written = await writer.finish(TailSource("tail", 99, 1))
        assert len(writer.refs) == writer.num_stored == 8
    assert store.puts == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert (len(written.refs), written.tail is not None, written.problem) == (8, True, None)
    assert grown == [3, 6, 8]


async def test_a_ref_that_names_another_block_is_not_believed() -> None:
    store = FakeStore()
    async with writing(store) as (writer, _):
        real = store.put_blocks

        async def wrong(*arguments: Any, **options: Any) -> PutResult:
            result = await real(*arguments, **options)
            other = Block(b"x" * 16, 0, 2, 0, SIZE)
            return PutResult("lease", (result.refs[0], other), other, 0, 0)

        store.put_blocks = wrong  # type: ignore[method-assign]
        writer.add(filled(0, 1))
        written = await writer.finish(TailSource("tail", 99, 1))
    assert (len(written.refs), written.tail) == (1, None)
    assert written.problem is not None


@pytest.mark.parametrize("budget_s", [0.2, 5.0])
@pytest.mark.parametrize("what", ["put", "renewal"])
async def test_a_request_without_time_takes_the_store_from_nobody(
    budget_s: float, what: str
) -> None:
    store = FakeStore()
    store.error = store.renew_error = DeadlineExceeded("late")
    refs = [Block(name_of(0), 7, 2, 0, SIZE)]
    ttl_s = 5 if what == "put" else 0.03
    async with writing(store, refs, ttl_s=ttl_s, budget_s=budget_s) as (writer, connector):
        client: Any = store
        connector._client = client
        if what == "put":
            writer.add(filled(1))
            await writer.finish(None)
        else:
            await store.renewed.wait()
        assert (connector.client is None) == (budget_s == 5.0), "held against it or not"
        connector._client = None
