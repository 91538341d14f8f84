"""A lender's cache that its reader has mapped, beyond what every way out of a lender must do: who
is let in, that only what was lent all the time counts, that a device or a lender that goes costs
blocks and nothing else. Over real gRPC; devices are fakes as strict as real ones."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore import attaching, block_hash, errors, wire
from kvstore.lending import lender
from kvstore.transport import copy_job, mapped
from kvstore.transport.device import Shared
from process.errors import FailedPrecondition, InvalidArgument
from protos import kvstore_pb2
from tests.conformance.conftest import BLOCK_BYTES, OnDevice, Worker
from tests.conformance.test_lender import MAPPED, Lending, lending, within

NewWorker = Callable[..., Any]


@pytest.fixture
async def lent(seed: int) -> Any:
    async with lending(seed, is_on_device=True) as made:
        yield made


# ---- who is let in


async def test_nobody_is_let_in_unasked(new_worker: NewWorker, seed: int) -> None:
    async with lending(seed, is_on_device=True, lets_map=False) as closed:
        with pytest.raises(FailedPrecondition, match=r"^transport cuda_ipc: .*lend_mapped=true"):
            await new_worker(closed.address, MAPPED)
        assert closed.lender.shared is None and len(closed.lender.attachments) == 0
        reader = await new_worker(closed.address, OnDevice("grpc"))
        assert reader.client.transport_name == "grpc"


async def test_another_host_is_not_let_in(
    lent: Lending, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender, "own_host_id", lambda: "another boot")
    with pytest.raises(FailedPrecondition, match=r"on another host.*direct_transport"):
        await new_worker(lent.address, MAPPED)
    assert lent.lender.shared is None


async def test_two_hosts_that_cannot_be_told_apart_are_two(
    lent: Lending, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no kernel says which host it is."""
    monkeypatch.setattr(lender, "own_host_id", lambda: "")
    monkeypatch.setattr(attaching, "own_host_id", lambda: "")
    with pytest.raises(FailedPrecondition, match=r"on another host.*direct_transport"):
        await new_worker(lent.address, MAPPED)
    assert lent.lender.shared is None


async def test_host_memory_is_not_mapped(lent: Lending, new_worker: NewWorker, seed: int) -> None:
    async with lending(seed) as in_host_memory:
        with pytest.raises(FailedPrecondition, match="this worker's cache lies in host memory"):
            await new_worker(in_host_memory.address, MAPPED)
    with pytest.raises(FailedPrecondition, match="this worker's cache lies in host memory"):
        await new_worker(lent.address, "cuda_ipc")
    assert len(lent.lender.attachments) == 0, "the refused one said goodbye"


async def test_a_device_that_cannot_reach_the_other_is_an_error_not_another_transport(
    lent: Lending, seed: int
) -> None:
    reader = Worker(MAPPED, BLOCK_BYTES, 48, seed)
    reader.device.refusal = "cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)"
    with pytest.raises(FailedPrecondition, match=r"^transport cuda_ipc: .*\(217\).*nixl or grpc"):
        await reader.attach(lent.address)
    assert len(lent.lender.attachments) == 0


def test_a_handle_is_in_no_repr() -> None:
    shared = Shared(b"secret" * 10, 4096)
    assert "secret" not in repr(shared) and "4096" not in repr(shared)


async def test_a_handle_is_given_to_nobody_else(lent: Lending, new_worker: NewWorker) -> None:
    """Also once it was made, other transports are not told of it."""
    await new_worker(lent.address, MAPPED)
    assert lent.lender.shared is not None
    other = await new_worker(lent.address, OnDevice("grpc"))
    assert other.client._transport.name == "grpc"
    request = kvstore_pb2.AttachRequest(
        worker_id="w", worker_incarnation=bytes(16), block_bytes=BLOCK_BYTES, transport="grpc"
    )
    request.model_fingerprint = lent.lender.identity.fingerprint
    request.checksum = wire.checksum_of(request)
    reply = await other.client._rpc.call(other.client._rpc.stub.Attach, request, within())
    assert reply.attachment_id and not reply.ipc_handle


async def test_it_is_unmapped_with_the_last_client(lent: Lending, seed: int) -> None:
    reader = Worker(MAPPED, BLOCK_BYTES, 48, seed)
    await reader.attach(lent.address)
    first = reader.client
    await reader.attach(lent.address)
    (start,) = reader.device.num_mapped
    assert reader.device.num_mapped[start] == 2
    await first.close()
    assert reader.device.num_mapped[start] == 1
    lease_id, blocks = await lent.lend([1])
    assert await reader.get(lease_id, blocks, [2]) == {}
    await reader.client.close()
    assert reader.device.num_mapped[start] == 0


async def test_a_mapping_that_nobody_waits_for_any_more_is_given_back(
    lent: Lending, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = Worker(MAPPED, BLOCK_BYTES, 48, seed)
    may_go_on, has_begun = threading.Event(), threading.Event()
    map_shared = reader.device.map_shared

    def slow(shared: Shared) -> int:
        has_begun.set()
        assert may_go_on.wait(20)
        return map_shared(shared)

    reader.device.map_shared = slow  # type: ignore[method-assign]
    attaching = asyncio.create_task(reader.attach(lent.address))
    assert await asyncio.to_thread(has_begun.wait, 20)
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    may_go_on.set()
    async with asyncio.timeout(10):
        while list(reader.device.num_mapped.values()) != [0]:
            await asyncio.sleep(0.005)


# ---- what counts


async def test_no_byte_passes_through_the_host_or_the_lender(
    lent: Lending, new_worker: NewWorker
) -> None:
    """One copy of each byte, given by the reader's device; neighbours go together."""
    reader = await new_worker(lent.address, MAPPED)
    sizes: list[int] = []
    reader.device.on_move = lambda _target, _source, num_bytes: sizes.append(num_bytes)
    lease_id, blocks = await lent.lend([3, 4, 5, 9])
    lenders_device: Any = lent.lender.memory.device
    before = lenders_device.num_moved_bytes
    assert await reader.get(lease_id, blocks, [10, 11, 12, 13]) == {}
    copies = [size for size in sizes if size % BLOCK_BYTES == 0]
    assert copies[:2] == [3 * BLOCK_BYTES, BLOCK_BYTES]
    assert lenders_device.num_moved_bytes == before
    assert lent.loans.counters.num_bytes_read == 4 * BLOCK_BYTES


async def test_a_copy_goes_in_pieces(
    lent: Lending, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "PIECE_BYTES", 3 * BLOCK_BYTES)
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend(range(20))
    assert await reader.get(lease_id, blocks, range(20, 40)) == {}
    assert np.array_equal(reader.view[20:40], lent.view[:20])


class Hasher:
    """Computes checksums where blocks lie, when they are asked for."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.begun: list[list[int]] = []

    def begin(self, block_ids: Any) -> Any:
        self.begun.append(list(block_ids))
        return SimpleNamespace(
            result=lambda: [block_hash.checksum(self.view[block_id]) for block_id in block_ids]
        )


async def test_a_pieces_checksums_begin_when_it_is_here(
    lent: Lending, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not when all of it is; and they are of what arrived."""
    monkeypatch.setattr(mapped, "PIECE_BYTES", 3 * BLOCK_BYTES)
    reader = await new_worker(lent.address, MAPPED)
    hasher = Hasher(reader.view)
    object.__setattr__(reader.memory, "device_checksums", hasher)
    lease_id, blocks = await lent.lend(range(20))
    seen: list[int] = []
    reader.device.on_move = lambda *_: seen.append(len(hasher.begun))
    assert await reader.get(lease_id, blocks, range(20, 40)) == {}
    assert hasher.begun == [list(range(at, min(at + 3, 40))) for at in range(20, 40, 3)]
    assert max(seen) > 0, "some began while others were still to come"
    lent.view[1, 0] ^= 1
    assert await reader.get(lease_id, blocks[:2], [0, 1]) == {1: errors.CHECKSUM}


async def test_what_was_given_back_while_it_was_copied_does_not_count(
    lent: Lending, new_worker: NewWorker
) -> None:
    """Its lease ends under the copy, others still lend some of it: the same bytes or not, what was
    not lent all the time is refused, and what was is not."""
    reader = await new_worker(lent.address, MAPPED)
    ending, blocks = await lent.lend([1, 2, 3])
    other, _ = await lent.lend([2])

    def end(*_: int) -> None:
        reader.device.on_move = lambda *_: None
        loop.call_soon_threadsafe(lent.loans.release, [ending], lent.lender.now_s())

    loop = asyncio.get_running_loop()
    reader.device.on_move = end
    failed = await reader.get(ending, blocks, [1, 2, 3])
    assert failed == dict.fromkeys(range(3), errors.LEASE_LAPSED)
    failed = await reader.get(other, blocks, [1, 2, 3])
    assert failed == {0: errors.GENERATION, 2: errors.GENERATION}
    assert lent.loans.refused[errors.GENERATION] == 2


async def test_a_lent_block_that_changes_under_the_copy_is_found(
    lent: Lending, new_worker: NewWorker
) -> None:
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend([1, 2, 3])

    def spoil(*_: int) -> None:
        reader.device.on_move = lambda *_: None
        lent.view[2, 77] ^= 1

    reader.device.on_move = spoil
    assert await reader.get(lease_id, blocks, [1, 2, 3]) == {1: errors.CHECKSUM}


async def test_a_call_that_makes_no_sense_is_refused(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend([1])
    rpc, attachment_id = reader.client._rpc, reader.client._attachment_id
    request = kvstore_pb2.ConfirmRequest(
        attachment_id=attachment_id, lease_id=lease_id, frames=[1, 2], generations=[2]
    )
    with pytest.raises(InvalidArgument, match="generations"):
        await rpc.call(rpc.stub.Confirm, request, within())
    absent = kvstore_pb2.ConfirmRequest(
        attachment_id=attachment_id,
        lease_id=lease_id,
        frames=[10_000, blocks[0].frame],
        generations=[2, blocks[0].generation],
        num_bytes_read=1 << 60,
    )
    reply = await rpc.call(rpc.stub.Confirm, absent, within())
    assert list(reply.stale) == [0]
    assert lent.loans.counters.num_bytes_read <= 2 * BLOCK_BYTES
    with pytest.raises(FailedPrecondition, match="takes no bytes"):
        await reader.client._transport.put("", [], within())


# ---- who goes


async def test_a_lender_that_died_confirms_nothing(new_worker: NewWorker, seed: int) -> None:
    """Its memory may still be there: what is copied out of it is not used."""
    async with contextlib.AsyncExitStack() as stack:
        lent = await stack.enter_async_context(lending(seed, is_on_device=True))
        reader = await new_worker(lent.address, MAPPED)
        lease_id, blocks = await lent.lend([1, 2])
        await stack.aclose()
        failed = await reader.get(lease_id, blocks, [1, 2], 2.0)
        assert set(failed) == {0, 1}
        assert set(failed.values()) <= {errors.STORE_UNAVAILABLE, errors.DEADLINE}


async def test_a_device_that_stalls_costs_its_blocks(
    lent: Lending, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_job, "STALL_S", 0.05)
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend([1, 2])
    reader.device.engine_runs.clear()
    with pytest.raises(errors.TransferTimeout) as caught:
        await reader.get(lease_id, blocks, [4, 5], 1.0)
    assert caught.value.quarantine.block_ids == (4, 5)
    assert not caught.value.quarantine.settled.done()
    reader.device.engine_runs.set()
    await asyncio.wait_for(caught.value.quarantine.settled, 10)
    assert await reader.get(lease_id, blocks, [4, 5]) == {}


async def test_a_device_that_fails_is_a_reason(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend([1, 2])
    reader.device.problem = "cuMemcpyDtoDAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    assert await reader.get(lease_id, blocks, [4, 5]) == dict.fromkeys(range(2), errors.TRANSPORT)
