"""A lender's cache that its reader has mapped, beyond what every way out of a lender must do: who
is let in, that only what was lent all the time counts, that a device or a lender that goes costs
blocks and nothing else. Over real gRPC; devices are fakes as strict as real ones."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore import attaching, block_hash, errors, lease_calls, wire
from kvstore.lending import lender
from kvstore.lending.limits import LENDER_LIMITS
from kvstore.lending.loans import Offer
from kvstore.lending.told import Word
from kvstore.transport import mapped
from kvstore.transport.base import GetItems
from kvstore.transport.device import Mark, PeerCopies, Shared
from process.deadline import Deadline
from process.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from protos import kvstore_pb2
from tests.harness.fake_device import FakeQueue, FakeStream
from tests.harness.sources import MAPPED, Lending, lending
from tests.harness.store import BLOCK_BYTES, OnDevice, Worker
from tests.harness.waiting import Clock, within

NewWorker = Callable[..., Any]

FOR_LONG_S = 1e4
HELD_FOR_LONG = PeerCopies(hold_s=FOR_LONG_S)


def pieces_of(num_blocks: int, **sizes: int) -> PeerCopies:
    return PeerCopies(piece_bytes=num_blocks * BLOCK_BYTES, **sizes)


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


async def test_a_copy_goes_in_pieces(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, MAPPED, peer_copies=pieces_of(3))
    lease_id, blocks = await lent.lend(range(20))
    assert await reader.get(lease_id, blocks, range(20, 40)) == {}
    assert np.array_equal(reader.view[20:40], lent.view[:20])


@pytest.mark.parametrize(
    ("is_promised", "has_queue", "max_copies", "num_early"),
    [
        (True, True, 1, 2),
        (True, True, 0, 0),
        (True, False, 1, 0),
        (False, True, 1, 2),
        (True, True, None, 1),
    ],
    ids=["promised", "many copies", "without a queue", "not promised", "many copies in all"],
)
async def test_a_copy_is_begun_before_a_thread_has_come_to_it(
    lent: Lending,
    new_worker: NewWorker,
    monkeypatch: pytest.MonkeyPatch,
    is_promised: bool,
    has_queue: bool,
    max_copies: int | None,
    num_early: int,
) -> None:
    """Promised or not; but what may take long leaves the loop alone."""
    sizes = pieces_of(2, max_copies_at_once=1 if max_copies is None else max_copies)
    reader = await new_worker(lent.address, MAPPED, peer_copies=sizes)
    lease_id, blocks = await lent.lend(range(4))
    places = range(20, 24) if max_copies is not None else (20, 21, 23, 22)
    if has_queue:
        assert await reader.get(lease_id, blocks, range(4)) == {}
    pump_of_it = reader.client._transport._pump
    assert len(pump_of_it._queues) == has_queue
    pool, is_busy, may_go_on = ThreadPoolExecutor(1), threading.Event(), threading.Event()
    asyncio.get_running_loop().set_default_executor(pool)
    pool.submit(lambda: (is_busy.set(), may_go_on.wait(20)))
    assert is_busy.wait(20)
    given: list[int] = []
    between = FakeQueue.between

    def noted(queue: FakeQueue, copies: Any) -> None:
        given.append(len(copies))
        between(queue, copies)

    monkeypatch.setattr(FakeQueue, "between", noted)
    items = list(zip(blocks, places, strict=True))
    word = Word(held_until_s=time.monotonic() + FOR_LONG_S) if is_promised else Word()
    getting = asyncio.create_task(reader.client.get_blocks(lease_id, items, within(), word=word))
    while pool._work_queue.empty() and not getting.done():
        await asyncio.sleep(0)
    assert len(given) == num_early and not getting.done()
    may_go_on.set()
    assert not (await getting).failed
    assert np.array_equal(reader.view[list(places)], lent.view[:4])
    assert len(pump_of_it._queues) == 1


async def test_what_was_promised_is_not_begun_when_its_time_is_over(
    lent: Lending, new_worker: NewWorker
) -> None:
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend(range(4))
    assert await reader.get(lease_id, blocks, range(4)) == {}
    before = reader.view[20:24].copy()
    reader.device.is_given.clear()
    items = GetItems(list(zip(blocks, range(20, 24), strict=True)), time.monotonic() + FOR_LONG_S)
    with pytest.raises(DeadlineExceeded):
        await reader.client._transport.get(lease_id, items, Deadline.after(0.0))
    assert not reader.device.is_given.is_set()
    assert np.array_equal(reader.view[20:24], before)


class Hasher:
    """Computes checksums where blocks lie, on a stream of its own."""

    def __init__(self, view: Any) -> None:
        self.view = view
        self.begun: list[list[int]] = []
        self._stream = FakeStream()

    def begin(self, block_ids: Any, after: Mark) -> Any:
        """Computed when that is over, and no sooner."""
        self.begun.append(list(block_ids))
        after.before(self._stream.handle)
        found: Future[list[int]] = Future()

        def compute() -> None:
            found.set_result([block_hash.checksum(self.view[each]) for each in block_ids])

        self._stream.give(compute)
        return SimpleNamespace(result=lambda: found.result(20))


async def test_a_pieces_checksums_are_behind_its_copy_and_asked_for_while_it_runs(
    lent: Lending, new_worker: NewWorker
) -> None:
    """Not when all of it is here; and they are of what arrived."""
    reader = await new_worker(lent.address, MAPPED, peer_copies=pieces_of(3))
    hasher = Hasher(reader.view)
    object.__setattr__(reader.memory, "device_checksums", hasher)
    lease_id, blocks = await lent.lend(range(20))
    began: list[bool] = []

    def move(*_: int) -> None:
        """The first piece's copy goes on when its checksums were asked for."""
        ends_s = time.monotonic() + 10.0
        while not hasher.begun and time.monotonic() < ends_s:
            time.sleep(0.001)
        began.append(bool(hasher.begun))

    reader.device.on_move = move
    assert await reader.get(lease_id, blocks, range(20, 40)) == {}
    assert all(began), "while it was still copied"
    reader.device.on_move = lambda *_: None
    assert hasher.begun == [list(range(at, min(at + 3, 40))) for at in range(20, 40, 3)]
    lent.view[1, 0] ^= 1
    assert await reader.get(lease_id, blocks[:2], [0, 1]) == {1: errors.CHECKSUM}


async def test_the_last_pieces_are_short(lent: Lending, seed: int) -> None:
    """Nothing is copied while the checksums of the very last one are computed."""
    sizes = pieces_of(8, least_piece_bytes=2 * BLOCK_BYTES)
    reader = Worker(MAPPED, BLOCK_BYTES, 48, seed, peer_copies=sizes)
    hasher = Hasher(reader.view)
    object.__setattr__(reader.memory, "device_checksums", hasher)
    await reader.attach(lent.address)
    lease_id, blocks = await lent.lend(range(20))
    assert await reader.get(lease_id, blocks, range(20, 40)) == {}
    assert [len(block_ids) for block_ids in hasher.begun] == [8, 6, 4, 2]
    await reader.client.close()


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


class Promised:
    """Blocks that a reader was told of before anybody vouched for them, and a promise on them."""

    def __init__(self, lent: Lending, reader: Worker) -> None:
        self.lent, self.reader = lent, reader
        self.num_confirmed = 0
        confirm = lent.lender.confirm

        def counted(*arguments: Any) -> list[int]:
            self.num_confirmed += 1
            return confirm(*arguments)

        lent.lender.confirm = counted  # type: ignore[method-assign]

    async def told(self) -> tuple[str, Any, Word]:
        """Of blocks 1 to 3: their lease, they, and the word on them."""
        self.lent.keep([1, 2, 3])
        offers = [Offer(each, b"%16d" % each, None, 16) for each in (1, 2, 3)]
        lease_id = self.lent.lender.enter(offers)
        told, word = await self.reader.client.await_lent(
            lease_id, num_known=0, num_wanted=3, wait_s=5.0, deadline=within()
        )
        assert told.is_all and word.num_unsealed == 3
        return lease_id, told.blocks, word

    async def get(self, lease_id: str, blocks: Any, word: Word) -> Any:
        items = list(zip(blocks, (4, 5, 6), strict=True))
        return await self.reader.client.get_blocks(lease_id, items, within(), word=word)

    def let_go(self) -> None:
        """All promises have ended."""
        holds = self.lent.lender.reader_holds
        for hold_id, timer in list(holds._ends.items()):
            timer.cancel()
            holds._end(hold_id, 0.0)


@pytest.fixture
async def promised(lent: Lending, new_worker: NewWorker) -> Promised:
    lent.bound(max_hold_s=FOR_LONG_S)
    return Promised(lent, await new_worker(lent.address, MAPPED, peer_copies=HELD_FOR_LONG))


async def test_what_was_promised_to_stay_is_not_asked_about(
    lent: Lending, promised: Promised
) -> None:
    """Also when its lease is over before it is copied; the lender hears how much was read."""
    lease_id, blocks, word = await promised.told()
    lent.loans.release([lease_id], lent.lender.now_s())
    lent.check()
    assert lent.loans.num_lent == 3, "they stay for whoever was promised so"
    got = await promised.get(lease_id, blocks, word)
    assert not got.failed and promised.num_confirmed == 0
    assert np.array_equal(promised.reader.view[4:7], lent.view[1:4])
    assert got.checksums == {at: block_hash.checksum(lent.view[1 + at]) for at in range(3)}
    assert got.num_bytes == 3 * BLOCK_BYTES
    assert lent.loans.counters.num_bytes_read == 0
    await promised.reader.client.release([lease_id], deadline=within())
    assert lent.loans.counters.num_bytes_read == 3 * BLOCK_BYTES
    promised.let_go()
    assert lent.loans.num_lent == 0
    stale = await promised.get(lease_id, blocks, Word(3))
    assert stale.failed == dict.fromkeys(range(3), errors.LEASE_LAPSED)


async def test_a_copy_that_ends_behind_its_promise_is_asked_about(
    lent: Lending, promised: Promised
) -> None:
    lease_id, blocks, word = await promised.told()
    over = Word(word.num_unsealed, time.monotonic())
    assert not (await promised.get(lease_id, blocks, over)).failed and promised.num_confirmed == 1

    def end(*_: int) -> None:
        promised.reader.device.on_move = lambda *_: None
        loop.call_soon_threadsafe(promised.let_go)
        loop.call_soon_threadsafe(lent.loans.release, [lease_id], lent.lender.now_s())

    loop = asyncio.get_running_loop()
    promised.reader.device.on_move = end
    got = await promised.get(lease_id, blocks, over)
    assert got.failed == dict.fromkeys(range(3), errors.LEASE_LAPSED) and not got.checksums


async def test_a_promise_must_last_until_the_last_byte_is_here(
    lent: Lending, promised: Promised, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease_id, blocks, _ = await promised.told()
    clock = Clock(1000.0)
    monkeypatch.setattr(mapped, "time", clock)
    word = Word(3, clock.now_s + 50.0)

    def takes_long(*_: int) -> None:
        clock.now_s += 100.0

    assert not (await promised.get(lease_id, blocks, word)).failed
    assert promised.num_confirmed == 0
    promised.reader.device.on_move = takes_long
    assert not (await promised.get(lease_id, blocks, word)).failed
    assert promised.num_confirmed == 1, "it was over before the copy was"
    promised.let_go()
    lent.loans.release([lease_id], lent.lender.now_s())


async def test_a_promise_counts_from_the_question_and_not_from_its_answer(
    lent: Lending, promised: Promised, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(1000.0)
    asked_s, way_s = clock.now_s, 60.0
    monkeypatch.setattr(lease_calls, "time", clock)
    rpc = promised.reader.client._leases._rpc
    call = rpc.call

    async def slow(*arguments: Any, **options: Any) -> Any:
        reply = await call(*arguments, **options)
        clock.now_s += way_s  # of the answer: the lender's hold began before it
        return reply

    monkeypatch.setattr(rpc, "call", slow)
    lease_id, _, word = await promised.told()
    assert asked_s < word.held_until_s - FOR_LONG_S < asked_s + way_s / 2
    promised.let_go()
    lent.loans.release([lease_id], lent.lender.now_s())


async def test_a_hold_lasts_as_long_as_was_promised(lent: Lending) -> None:
    holds = lent.lender.reader_holds
    lent.keep([1])
    lease_id = lent.lender.enter([Offer(1, b"%16d" % 1, None, 16)])
    before_s = asyncio.get_running_loop().time()
    held_s = holds.keep(lease_id, 0, 0.9)
    ((hold_id, timer),) = holds._ends.items()
    assert held_s == 0.9 and timer.when() - before_s >= held_s
    timer.cancel()
    holds._end(hold_id, 0.0)
    lent.loans.release([lease_id], lent.lender.now_s())


async def test_only_whoever_has_mapped_it_is_promised_anything(
    lent: Lending, new_worker: NewWorker
) -> None:
    """All others read by the lender's own hand. And only so many are."""
    reader = await new_worker(lent.address, OnDevice("grpc"), peer_copies=HELD_FOR_LONG)
    promised = Promised(lent, reader)
    lease_id, blocks, word = await promised.told()
    assert word.held_until_s == 0.0
    got = await promised.get(lease_id, blocks, word)
    assert not got.failed and len(got.checksums) == 3
    lent.loans.release([lease_id], lent.lender.now_s())
    assert lent.loans.num_lent == 0
    lent.bound(max_holds=1, max_hold_s=FOR_LONG_S)
    reader = await new_worker(lent.address, MAPPED, peer_copies=HELD_FOR_LONG)
    promised = Promised(lent, reader)
    leases = []
    for num_held in (1, 0):
        lease_id, _, word = await promised.told()
        assert (word.held_until_s > 0) == bool(num_held)
        leases.append(lease_id)
    lent.loans.release(leases, lent.lender.now_s())
    promised.let_go()


async def test_a_promise_lasts_its_time_also_when_a_timer_is_early(lent: Lending) -> None:
    holds = lent.lender.reader_holds
    lent.keep([1])
    lease_id = lent.lender.enter([Offer(1, b"x" * 16, None, 16)])
    held_s = holds.keep(lease_id, 0, 1e9)
    assert held_s == LENDER_LIMITS.max_hold_s
    assert holds.keep(lease_id, 0, 0.0) == 0.0
    lent.loans.release([lease_id], lent.lender.now_s())
    (hold_id,) = holds._ends
    holds._end(hold_id, time.monotonic() + FOR_LONG_S)
    lent.check()
    assert lent.loans.num_lent == 1 and list(holds._ends) == [hold_id]
    holds._ends[hold_id].cancel()
    lent.loans.unhold(hold_id)
    assert "promised" in lent.lender.check_integrity()
    holds._end(hold_id, 0.0)
    assert lent.lender.check_integrity() == ""


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


async def test_a_device_that_stalls_costs_its_blocks(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend([1, 2])
    reader.device.engine_runs.clear()
    with pytest.raises(errors.TransferTimeout) as caught:
        await reader.get(lease_id, blocks, [4, 5], 0.05)
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
