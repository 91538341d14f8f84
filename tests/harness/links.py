"""Measurements of a worker's way to a store: what they leave there, on a clock that transfers
move."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

from kvstore import link_quality
from kvstore.errors import TransferFailed as TransferFailed
from kvstore.errors import quarantine_of
from kvstore.link_quality import MAX_BLOCKS as MAX_BLOCKS
from kvstore.link_quality import MAX_SHARE as MAX_SHARE
from kvstore.link_quality import LinkRates
from kvstore.link_quality import num_blocks_wanted as num_blocks_wanted
from process.deadline import Deadline
from tests.harness.store import Worker
from tests.harness.waiting import WAIT_S, until


async def assert_clean(worker: Worker) -> None:
    """The store has no lease, no reservation, no private frame, nothing in the index, no byte in
    its counters, as it says itself."""
    await worker.client.settle()

    async def is_settled() -> bool:  # and told in the background
        return (await worker.status()).num_quarantined == 0

    await until(is_settled)
    status = await worker.status()
    assert (status.num_leases, status.num_tails, status.num_pinned) == (0, 0, 0)
    assert (status.num_writing, status.num_committed) == (0, 0)
    assert (status.num_bytes_written, status.num_bytes_read) == (0, 0), "no request moved anything"


async def measure_and_settle(
    worker: Worker, block_ids: Sequence[int], deadline: Deadline
) -> LinkRates | None:
    """Whatever becomes of it, nothing writes into the blocks any more when this returns."""
    try:
        return await worker.client.measure(block_ids, deadline)
    except (Exception, asyncio.CancelledError) as error:
        held = quarantine_of(error)
        if held is not None:
            await asyncio.wait([held.settled], timeout=WAIT_S)
        raise


@contextlib.contextmanager
def transfer_clock(
    worker: Worker, *, put_s: Callable[[int], float], get_s: Callable[[int], float]
) -> Iterator[None]:
    """What a measurement takes for seconds: transfers of so many blocks, and nothing else."""
    transport: Any = worker.client.transport
    put, get, clock = transport.put, transport.get, mock.Mock()
    clock.perf_counter.side_effect = lambda: now_s
    now_s = 0.0

    async def slow_put(lease_id: str, items: Any, deadline: Deadline) -> Any:
        nonlocal now_s
        now_s += put_s(len(items))
        return await put(lease_id, items, deadline)

    async def slow_get(lease_id: str, items: Any, deadline: Deadline) -> Any:
        nonlocal now_s
        now_s += get_s(len(items))
        return await get(lease_id, items, deadline)

    transport.put, transport.get = slow_put, slow_get
    with mock.patch.object(link_quality, "time", clock):
        yield
    transport.put, transport.get = put, get
