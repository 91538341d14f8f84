"""A lender's cache that its reader has mapped, beyond what every way out of a lender must do: who
is let in, that only what was lent all the time counts, what a promise to hold it is worth, that a
device or a lender that goes costs blocks and nothing else. Over real gRPC; devices are fakes as
strict as real ones.

A long copy is asked about while it runs, for a promise to keep its blocks: what that says must be
as much as a look behind the copy would, or there is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from process.rpc_errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from tests.harness.mapping import (
    ALL_ARE_LONG,
    FOR_LONG_S,
    HELD_FOR_LONG,
    DeviceHasher,
    Mapping,
    OneThread,
    PeerCopies,
    hosts,
    mapping,
    pieces_of,
    promise,
    reader_clock,
)
from tests.harness.sources import MAPPED, Lending, lending
from tests.harness.store import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    NewWorker,
    OnDevice,
    TransferTimeout,
    Worker,
)
from tests.harness.waiting import WAIT_S, until, within

pytestmark = pytest.mark.oracle

GONE = {"store_unavailable", "deadline"}
LAPSED = dict.fromkeys(range(3), "lease_lapsed")


@pytest.fixture
async def lent(seed: int) -> AsyncIterator[Lending]:
    async with lending(seed, is_on_device=True) as made:
        yield made


@pytest.fixture
async def told(seed: int) -> AsyncIterator[Mapping]:
    """What is told of is kept for long; copies are short."""
    async with mapping(seed, HELD_FOR_LONG) as made:
        yield made


@pytest.fixture
async def asked(seed: int) -> AsyncIterator[Mapping]:
    """Copies are long."""
    async with mapping(seed, ALL_ARE_LONG) as made:
        yield made


# ---- who is let in


async def test_nobody_is_let_in_unasked(new_worker: NewWorker, seed: int) -> None:
    async with lending(seed, is_on_device=True, lets_map=False) as closed:
        with pytest.raises(FailedPrecondition, match=r"^transport cuda_ipc: .*lend_mapped=true"):
            await new_worker(closed.address, MAPPED)
        assert not closed.is_shared and closed.num_attached == 0
        reader = await new_worker(closed.address, OnDevice("grpc"))
        assert reader.client.transport_name == "grpc"


@pytest.mark.parametrize(
    ("lenders", "readers"), [("another boot", None), ("", "")], ids=["another", "no kernel says"]
)
async def test_another_host_is_not_let_in(
    lent: Lending, new_worker: NewWorker, lenders: str, readers: str | None
) -> None:
    """And two that cannot be told apart are two."""
    refused = pytest.raises(FailedPrecondition, match=r"on another host.*direct_transport")
    with hosts(lenders, readers), refused:
        await new_worker(lent.address, MAPPED)
    assert not lent.is_shared


async def test_host_memory_is_not_mapped(lent: Lending, new_worker: NewWorker, seed: int) -> None:
    async with lending(seed) as in_host_memory:
        with pytest.raises(FailedPrecondition, match="this worker's cache lies in host memory"):
            await new_worker(in_host_memory.address, MAPPED)
    with pytest.raises(FailedPrecondition, match="this worker's cache lies in host memory"):
        await new_worker(lent.address, "cuda_ipc")
    assert lent.num_attached == 0, "the refused one said goodbye"


async def test_a_device_that_cannot_reach_the_other_is_an_error_not_another_transport(
    lent: Lending, seed: int
) -> None:
    reader = Worker(MAPPED, BLOCK_BYTES, NUM_BLOCKS, seed)
    reader.device.refusal = "cuIpcOpenMemHandle_v2: CUDA_ERROR_PEER_ACCESS_UNSUPPORTED (217)"
    with pytest.raises(FailedPrecondition, match=r"^transport cuda_ipc: .*\(217\).*nixl or grpc"):
        await reader.attach(lent.address)
    assert lent.num_attached == 0


async def test_a_handle_is_given_to_nobody_else(lent: Lending, new_worker: NewWorker) -> None:
    """Also once it was made, other transports are not told of it."""
    await new_worker(lent.address, MAPPED)
    assert lent.is_shared
    other = await new_worker(lent.address, OnDevice("grpc"))
    assert other.client.transport_name == "grpc"
    reply = await other.introduce("grpc")
    assert reply.attachment_id and not reply.ipc_handle


async def test_it_is_unmapped_with_the_last_client(lent: Lending, seed: int) -> None:
    reader = Worker(MAPPED, BLOCK_BYTES, NUM_BLOCKS, seed)
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
    lent: Lending, seed: int
) -> None:
    reader = Worker(MAPPED, BLOCK_BYTES, NUM_BLOCKS, seed)
    may_go_on, has_begun = threading.Event(), threading.Event()
    map_shared = reader.device.map_shared

    def slow(shared: Any) -> int:
        has_begun.set()
        assert may_go_on.wait(WAIT_S)
        return map_shared(shared)

    reader.device.map_shared = slow  # type: ignore[method-assign]
    attaching = asyncio.create_task(reader.attach(lent.address))
    assert await asyncio.to_thread(has_begun.wait, WAIT_S)
    attaching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await attaching
    may_go_on.set()
    await until(lambda: list(reader.device.num_mapped.values()) == [0])


# ---- how it is copied


async def test_no_byte_passes_through_the_host_or_the_lender(
    lent: Lending, new_worker: NewWorker
) -> None:
    """One copy of each byte, given by the reader's device; neighbours go together."""
    reader = await new_worker(lent.address, MAPPED)
    sizes: list[int] = []
    reader.device.on_move = lambda _target, _source, num_bytes: sizes.append(num_bytes)
    lease_id, blocks = await lent.lend([3, 4, 5, 9])
    before = lent.num_moved_bytes
    assert await reader.get(lease_id, blocks, [10, 11, 12, 13]) == {}
    copies = [size for size in sizes if size % BLOCK_BYTES == 0]
    assert copies[:2] == [3 * BLOCK_BYTES, BLOCK_BYTES]
    assert lent.num_moved_bytes == before
    await reader.release(lease_id)
    assert lent.num_bytes_read == 4 * BLOCK_BYTES


async def test_a_copy_goes_in_pieces(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, MAPPED, peer_copies=pieces_of(3))
    lease_id, blocks = await lent.lend(range(20))
    assert await reader.get(lease_id, blocks, range(20, 40)) == {}
    assert reader.device.num_pieces == 7
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
    assert len(reader.device.peer_queues) == has_queue
    thread, before = OneThread(), reader.device.num_pieces
    held_until_s = promise(FOR_LONG_S) if is_promised else 0.0
    items = list(zip(blocks, places, strict=True))
    getting = asyncio.create_task(
        reader.client.get_blocks(lease_id, items, within(), held_until_s=held_until_s)
    )
    while not thread.num_waiting and not getting.done():
        await asyncio.sleep(0)
    assert reader.device.num_pieces - before == num_early and not getting.done()
    thread.let_go()
    assert not (await getting).failed
    assert np.array_equal(reader.view[list(places)], lent.view[:4])
    assert len(reader.device.peer_queues) == 1


async def test_what_was_promised_is_not_begun_when_its_time_is_over(told: Mapping) -> None:
    lent, reader = told.lent, told.reader
    lease_id, blocks = await lent.lend(range(4))
    assert await reader.get(lease_id, blocks, range(4)) == {}
    before = reader.view[20:24].copy()
    reader.device.is_given.clear()
    with pytest.raises(DeadlineExceeded):
        await told.get_by_transport(lease_id, blocks, range(20, 24), held_for_s=FOR_LONG_S)
    assert not reader.device.is_given.is_set()
    assert np.array_equal(reader.view[20:24], before)


async def test_a_pieces_checksums_are_behind_its_copy_and_asked_for_while_it_runs(
    lent: Lending, new_worker: NewWorker
) -> None:
    """Not when all of it is here; and they are of what arrived."""
    reader = await new_worker(lent.address, MAPPED, peer_copies=pieces_of(3))
    hasher = DeviceHasher(reader)
    lease_id, blocks = await lent.lend(range(20))
    began: list[bool] = []

    def move(*_: int) -> None:
        """The first piece's copy goes on when its checksums were asked for."""
        ends_s = time.monotonic() + WAIT_S
        while not hasher.begun and time.monotonic() < ends_s:
            time.sleep(0.001)
        began.append(bool(hasher.begun))

    reader.device.on_move = move
    assert await reader.get(lease_id, blocks, range(20, 40)) == {}
    assert all(began), "while it was still copied"
    reader.device.on_move = lambda *_: None
    assert hasher.begun == [list(range(at, min(at + 3, 40))) for at in range(20, 40, 3)]
    lent.view[1, 0] ^= 1
    assert await reader.get(lease_id, blocks[:2], [0, 1]) == {1: "checksum"}


async def test_the_last_pieces_are_short(lent: Lending, new_worker: NewWorker) -> None:
    """Nothing is copied while the checksums of the very last one are computed."""
    sizes = pieces_of(8, least_piece_bytes=2 * BLOCK_BYTES)
    reader = await new_worker(lent.address, MAPPED, peer_copies=sizes)
    hasher = DeviceHasher(reader)
    await reader.attach(lent.address)
    lease_id, blocks = await lent.lend(range(20))
    assert await reader.get(lease_id, blocks, range(20, 40)) == {}
    assert [len(block_ids) for block_ids in hasher.begun] == [8, 6, 4, 2]


# ---- what counts, by a look behind the copy


async def test_what_was_given_back_while_it_was_copied_does_not_count(told: Mapping) -> None:
    """Its lease ends under the copy, others still lend some of it: the same bytes or not, what was
    not lent all the time is refused, and what was is not."""
    lent, reader = told.lent, told.reader
    ending, blocks = await lent.lend([1, 2, 3])
    other, _ = await lent.lend([2])
    told.while_copied(lambda: lent.take_back(ending))
    assert await reader.get(ending, blocks, [1, 2, 3]) == LAPSED
    failed = await reader.get(other, blocks, [1, 2, 3])
    assert failed == {0: "generation", 2: "generation"}
    assert lent.refused["generation"] == 2
    lent.take_back(other)


@pytest.mark.parametrize("peer_copies", [HELD_FOR_LONG, ALL_ARE_LONG], ids=["behind", "early"])
async def test_a_lent_block_that_changes_under_the_copy_is_found(
    seed: int, peer_copies: PeerCopies
) -> None:
    """A promise says nothing of the bytes: their checksums are compared as ever."""
    async with mapping(seed, peer_copies) as made:
        lease_id, blocks = await made.lent.lend([1, 2, 3])

        def spoil() -> None:
            made.lent.view[2, 77] ^= 1

        is_asked = peer_copies is ALL_ARE_LONG
        made.while_copied(spoil, is_asked=is_asked)
        assert await made.reader.get(lease_id, blocks, [4, 5, 6]) == {1: "checksum"}
        assert (made.num_asked, made.num_confirmed) == ((1, 0) if is_asked else (0, 1))


async def test_a_call_that_makes_no_sense_is_refused(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend([1])
    asked = {"attachment_id": reader.attachment_id, "lease_id": lease_id}
    with pytest.raises(InvalidArgument, match="generations"):
        await reader.call("Hold", **asked, frames=[1, 2], generations=[2])
    frames, generations = [10_000, blocks[0].frame], [2, blocks[0].generation]
    for ttl_ms in (0, 20):
        reply = await reader.call(
            "Hold", **asked, frames=frames, generations=generations, ttl_ms=ttl_ms
        )
        assert list(reply.stale) == [0] and reply.held_ms == ttl_ms
    with pytest.raises(InvalidArgument, match="num_bytes_read"):
        await reader.call("Release", lease_ids=[lease_id], num_bytes_read=1 << 60)
    with pytest.raises(FailedPrecondition, match="takes no bytes"):
        await reader.write_nothing(WAIT_S)


# ---- promises on what was told before anybody vouched for it


async def test_what_was_promised_to_stay_is_not_asked_about(told: Mapping) -> None:
    """Also when its lease is over before it is copied; the lender hears how much was read."""
    lent, reader = told.lent, told.reader
    lease_id, blocks, held_until_s = await told.told(1, 2, 3)
    lent.take_back(lease_id)
    lent.check()
    assert lent.num_lent == 3, "they stay for whoever was promised so"
    got = await told.get(lease_id, blocks, [4, 5, 6], held_until_s, num_unsealed=3)
    assert not got.failed and told.num_confirmed == 0
    assert np.array_equal(reader.view[4:7], lent.view[1:4])
    assert got.checksums == dict(enumerate(reader.checksums([4, 5, 6])))
    assert got.num_bytes == 3 * BLOCK_BYTES
    assert lent.num_bytes_read == 0
    await reader.release(lease_id)
    assert lent.num_bytes_read == 3 * BLOCK_BYTES
    lent.end_promises()
    assert lent.num_lent == 0
    assert (await told.get(lease_id, blocks, [4, 5, 6], num_unsealed=3)).failed == LAPSED


async def test_a_copy_that_ends_behind_its_promise_is_asked_about(told: Mapping) -> None:
    lent = told.lent
    lease_id, blocks, held_until_s = await told.told(1, 2, 3)
    assert held_until_s > time.monotonic()
    over = time.monotonic()
    assert not (await told.get(lease_id, blocks, [4, 5, 6], over, num_unsealed=3)).failed
    assert told.num_confirmed == 1
    told.while_copied(lambda: (lent.end_promises(), lent.take_back(lease_id)))
    got = await told.get(lease_id, blocks, [4, 5, 6], over, num_unsealed=3)
    assert got.failed == LAPSED and not got.checksums


async def test_a_promise_must_last_until_the_last_byte_is_here(told: Mapping) -> None:
    lease_id, blocks, _ = await told.told(1, 2, 3)
    with reader_clock() as clock:
        held_until_s = clock.now_s + 50.0

        async def get() -> Any:
            return await told.get(lease_id, blocks, [4, 5, 6], held_until_s, num_unsealed=3)

        def takes_long(*_: int) -> None:
            clock.now_s += 100.0

        assert not (await get()).failed
        assert told.num_confirmed == 0
        told.reader.device.on_move = takes_long
        assert not (await get()).failed
        assert told.num_confirmed == 1, "it was over before the copy was"


async def test_a_promise_counts_from_the_question_and_not_from_its_answer(told: Mapping) -> None:
    with reader_clock() as clock:
        asked_s, way_s = clock.now_s, 60.0

        def is_late() -> None:
            clock.now_s += way_s  # of the answer: the lender's hold began before it

        told.when_answered(is_late)
        _, _, held_until_s = await told.told(1, 2, 3)
    assert asked_s < held_until_s - FOR_LONG_S < asked_s + way_s / 2


async def test_only_whoever_has_mapped_it_is_promised_anything(
    seed: int, new_worker: NewWorker
) -> None:
    """All others read by the lender's own hand. And only so many are."""
    async with mapping(seed, max_holds=1) as made:
        lent = made.lent
        held = []
        for _ in range(2):
            _, _, held_until_s = await made.told(1, 2, 3)
            held.append(held_until_s > 0)
            lent.end_leases()
        assert held == [True, False]
        lent.end_promises()
        made.reader = await new_worker(lent.address, OnDevice("grpc"), peer_copies=HELD_FOR_LONG)
        lease_id, blocks, held_until_s = await made.told(1, 2, 3)
        assert held_until_s == 0.0
        pairs = {"frames": [blocks[0].frame], "generations": [blocks[0].generation]}
        asked = {"attachment_id": made.reader.attachment_id, "lease_id": lease_id}
        with pytest.raises(FailedPrecondition, match="hold: only for a reader of transport cuda"):
            await made.reader.call("Hold", **asked, **pairs, ttl_ms=50)
        got = await made.get(lease_id, blocks, [4, 5, 6], num_unsealed=3)
        assert not got.failed and len(got.checksums) == 3
        lent.take_back(lease_id)
        assert lent.num_lent == 0


async def test_a_promise_that_is_not_held_breaks_a_law_of_the_lender(told: Mapping) -> None:
    async def problem() -> str:
        status = await told.reader.client.status(check_integrity=True, deadline=within())
        return str(status.integrity_error)

    await told.told(1, 2, 3)
    assert await problem() == ""
    told.lent.break_promises()
    assert "promised blocks that are not held" in await problem()
    told.lent.end_promises()
    assert await problem() == ""


# ---- promises that are asked for while it is copied


async def test_a_long_copy_is_asked_about_while_it_runs(asked: Mapping) -> None:
    """And not behind it; the lender hears how much was read when it hears of the lease."""
    lent, reader = asked.lent, asked.reader
    lease_id, blocks = await lent.lend(range(6))
    seen: list[bool] = []
    asked.while_copied(lambda: seen.append(True), is_asked=True)
    assert await reader.get(lease_id, blocks[1:5], [23, 20, 21, 22]) == {}
    assert seen and (asked.num_asked, asked.num_confirmed) == (1, 0)
    assert np.array_equal(reader.view[[23, 20, 21, 22]], lent.view[1:5])
    assert lent.num_bytes_read == 0
    await reader.release(lease_id)
    assert lent.num_bytes_read == 4 * BLOCK_BYTES


async def test_a_short_copy_is_only_confirmed(seed: int) -> None:
    sizes = PeerCopies(ask_early_bytes=3 * BLOCK_BYTES, hold_s=FOR_LONG_S)
    async with mapping(seed, sizes) as made:
        lease_id, blocks = await made.lent.lend([1, 2, 3])
        assert await made.reader.get(lease_id, blocks[:2], [4, 5]) == {}
        assert (made.num_asked, made.num_confirmed) == (0, 1)
        assert await made.reader.get(lease_id, blocks, [4, 5, 6]) == {}
        assert (made.num_asked, made.num_confirmed) == (1, 1)


async def test_a_promise_is_not_asked_for_where_there_is_one(asked: Mapping) -> None:
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    got = await asked.get(lease_id, blocks, [4, 5, 6], promise(WAIT_S))
    assert got.failed == {}
    assert (asked.num_asked, asked.num_confirmed) == (0, 0)


async def test_what_is_given_back_behind_the_promise_stays_until_it_is_copied(
    asked: Mapping,
) -> None:
    lent = asked.lent
    lease_id, blocks = await lent.lend([1, 2, 3])
    asked.while_copied(lambda: lent.take_back(lease_id), is_asked=True)
    assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == {}
    assert lent.num_lent == 3
    assert np.array_equal(asked.reader.view[4:7], lent.view[1:4])
    lent.end_promises()
    assert lent.num_lent == 0
    assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == LAPSED


async def test_a_promise_that_ends_before_the_copy_is_no_promise(asked: Mapping) -> None:
    """Then it is asked about as ever, and what was given back is found."""
    lent = asked.lent
    with reader_clock() as clock:

        def over() -> None:
            clock.now_s += 2 * FOR_LONG_S
            lent.end_promises()

        lease_id, blocks = await lent.lend([1, 2, 3])
        asked.while_copied(over, is_asked=True)
        assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == {}
        assert (asked.num_asked, asked.num_confirmed) == (1, 1)
        other, _ = await lent.lend([2])
        asked.has_answered.clear()
        asked.while_copied(lambda: (over(), lent.take_back(lease_id)), is_asked=True)
        assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == LAPSED
        failed = await asked.reader.get(other, blocks, [4, 5, 6])
        assert failed == {0: "generation", 2: "generation"}


async def test_only_what_its_lease_lends_at_its_generation_is_held(asked: Mapping) -> None:
    lent, reader = asked.lent, asked.reader
    lease_id, blocks = await lent.lend([1, 2, 3])
    beside, others = await lent.lend([7])
    assert await reader.get(lease_id, [*blocks, *others], [4, 5, 6, 8]) == {}
    assert (asked.num_asked, asked.num_confirmed) == (1, 1), "lent, but not under this lease"
    old = dataclasses.replace(blocks[1], generation=blocks[1].generation - 2)
    failed = await reader.get(lease_id, [blocks[0], old], [4, 5])
    assert failed == {1: "generation"} and asked.num_confirmed == 1, "the other one is held"
    lent.take_back(lease_id, beside)
    lent.end_promises()
    lent.view[1] ^= 1
    again, newer = await lent.lend([1, 2, 3])
    failed = await reader.get(again, blocks, [4, 5, 6])
    assert failed == dict.fromkeys(range(3), "generation")
    num_confirmed = asked.num_confirmed
    assert await reader.get(again, newer, [4, 5, 6]) == {} and asked.num_confirmed == num_confirmed


async def test_what_is_stale_and_what_is_held_are_told_apart_in_one_answer(asked: Mapping) -> None:
    """A lease ends while its blocks are copied, after the answer; another had one of them anew."""
    lent, reader = asked.lent, asked.reader
    former, old = await lent.lend([2])
    lent.take_back(former)
    lease_id, blocks = await lent.lend([1, 2, 3])
    asked.while_copied(lambda: lent.take_back(lease_id), is_asked=True)
    failed = await reader.get(lease_id, [blocks[0], *old, blocks[2]], [4, 5, 6])
    assert failed == {1: "lease_lapsed"} and (asked.num_asked, asked.num_confirmed) == (1, 0)
    assert np.array_equal(reader.view[[4, 6]], lent.view[[1, 3]])
    assert lent.refused["generation"] == 1 and lent.num_lent == 2


async def test_who_lends_nothing_any_more_is_not_asked_twice(asked: Mapping) -> None:
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    asked.lent.take_back(lease_id)
    assert await asked.reader.get(lease_id, blocks, [4, 5, 6]) == LAPSED
    assert (asked.num_asked, asked.num_confirmed) == (1, 0)
    assert asked.lent.refused["lease_lapsed"] == 1


@pytest.mark.parametrize("why", ["no room", "no answer"])
async def test_without_a_promise_it_is_asked_about_as_ever(asked: Mapping, why: str) -> None:
    """There is no room for another one, or the question fails."""
    if why == "no room":
        asked.lent.bound(max_holds=0)
    asked.refuses = why == "no answer"
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    old = dataclasses.replace(blocks[0], generation=blocks[0].generation - 2)
    assert await asked.reader.get(lease_id, [*blocks, old], [4, 5, 6, 7]) == {3: "generation"}
    assert (asked.num_asked, asked.num_confirmed) == (1, 1)
    assert asked.reader.client.broken is None and asked.lent.refused["generation"] == 1
    await asked.reader.release(lease_id)
    assert asked.lent.num_bytes_read == 3 * BLOCK_BYTES


async def test_a_promise_that_was_kept_is_not_taken_back(asked: Mapping) -> None:
    """The copy ends within its promise while the loop is busy; when the loop looks, the promise has
    ended, and no other is to be had. Nobody is asked about what was kept, and nobody waits."""
    asked.lent.bound(max_holds=0)
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    with reader_clock() as clock, asked.slow_checksums() as (is_here, goes_on):

        async def answered() -> None:
            await until(asked.has_answered.is_set)
            await asyncio.sleep(0.05)  # its answer has come
            goes_on.set()

        def busy() -> None:
            assert is_here.wait(WAIT_S)  # the last byte was, before
            clock.now_s += 100.0

        held_until_s = clock.now_s + 50.0
        getting = asyncio.create_task(asked.get(lease_id, blocks, [4, 5, 6], held_until_s))
        asyncio.get_running_loop().call_soon(busy)
        answering = asyncio.create_task(answered())
        done, _ = await asyncio.wait([getting], timeout=WAIT_S)
        getting.cancel()
        answering.cancel()
    assert done and getting.result().failed == {}
    assert np.array_equal(asked.reader.view[4:7], asked.lent.view[1:4])
    assert (asked.num_asked, asked.num_confirmed) == (1, 0)


async def test_a_copy_that_fails_leaves_nobody_waiting_for_it(asked: Mapping) -> None:
    lease_id, blocks = await asked.lent.lend([1, 2, 3])
    asked.reader.device.problem = "cuMemcpyDtoDAsync: CUDA_ERROR_ILLEGAL_ADDRESS (700)"
    num_tasks = len(asyncio.all_tasks())
    failed = await asked.reader.get(lease_id, blocks, [4, 5, 6])
    assert failed == dict.fromkeys(range(3), "transport")
    await until(lambda: len(asyncio.all_tasks()) <= num_tasks)


# ---- who goes


@pytest.mark.parametrize("peer_copies", [HELD_FOR_LONG, ALL_ARE_LONG], ids=["behind", "early"])
async def test_a_lender_that_died_says_nothing(
    new_worker: NewWorker, seed: int, peer_copies: PeerCopies
) -> None:
    """Its memory may still be there: what is copied out of it is not used."""
    async with contextlib.AsyncExitStack() as stack:
        lent = await stack.enter_async_context(lending(seed, is_on_device=True))
        reader = await new_worker(lent.address, MAPPED, peer_copies=peer_copies)
        lease_id, blocks = await lent.lend([1, 2])
        await stack.aclose()
        failed = await reader.get(lease_id, blocks, [1, 2], 2.0)
        assert set(failed) == {0, 1} and set(failed.values()) <= GONE


async def test_a_device_that_stalls_costs_its_blocks(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, MAPPED)
    lease_id, blocks = await lent.lend([1, 2])
    reader.device.engine_runs.clear()
    with pytest.raises(TransferTimeout) as caught:
        await reader.get(lease_id, blocks, [4, 5], 0.05)
    assert caught.value.quarantine.block_ids == (4, 5)
    assert not caught.value.quarantine.settled.done()
    reader.device.engine_runs.set()
    await asyncio.wait_for(caught.value.quarantine.settled, WAIT_S)
    assert await reader.get(lease_id, blocks, [4, 5]) == {}
