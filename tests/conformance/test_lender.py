"""A lender is a store to its readers, and a store of nothing to writers: the reading half of what
every transport must do, over real gRPC and NIXL, out of host memory and off a device."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvstore import errors
from kvstore.block import Block, Tier
from kvstore.lending import PROBE_HASH, is_lender, lender_node_id
from kvstore.lending.lender import Lender, LenderIdentity
from kvstore.lending.loans import LoanTable, Offer
from kvstore.lending.server import LenderServicer
from kvstore.transport.base import BlockMemory
from process import serving
from process.errors import BatonError, FailedPrecondition, NoCapacity, NotFound
from protos import kvstore_pb2
from tests.harness.fake_device import FakeDevice
from tests.harness.store import BLOCK_BYTES, FINGERPRINT, NUM_BLOCKS, OnDevice
from tests.harness.waiting import within

NewWorker = Callable[..., Any]
MAPPED = OnDevice("cuda_ipc")
TRANSPORTS = ("grpc", "nixl", OnDevice("grpc"), OnDevice("nixl"), MAPPED)
TTL_S = 30.0


class Lending:
    """A worker that lends, without an engine: what it kept in place is counted here."""

    def __init__(
        self,
        seed: int,
        block_bytes: int,
        num_blocks: int,
        *,
        is_on_device: bool,
        lets_map: bool = True,
    ) -> None:
        draw = np.random.default_rng(seed)
        self.view = draw.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        memory = BlockMemory.of(self.view)
        if is_on_device:
            device = FakeDevice()
            address = device.holding(self.view)
            memory = BlockMemory.on_device(device, address, block_bytes, num_blocks)
        self.num_kept: dict[int, int] = {}
        self.num_probes_free = 0
        self.loans = LoanTable(num_blocks, block_bytes, TTL_S, self.on_free)
        self.lender = Lender(
            LenderIdentity(
                lender_node_id("lending"), secrets.token_bytes(16), bytes.fromhex(FINGERPRINT)
            ),
            memory,
            self.loans,
            self.find_free,
            lets_map=lets_map,
        )
        self.address = ""

    def on_free(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.num_kept[block_id] -= 1

    async def find_free(self, num_blocks: int, budget_s: float) -> Sequence[int]:
        end = len(self.view)
        block_ids = range(end - min(num_blocks, self.num_probes_free), end)
        self.keep(block_ids)
        return block_ids

    def keep(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.num_kept[block_id] = self.num_kept.get(block_id, 0) + 1

    async def lend(
        self, block_ids: Sequence[int], lease_id: str = "", ttl_s: float = TTL_S
    ) -> tuple[str, tuple[Block, ...]]:
        """Under a lease that is handed over."""
        self.keep(block_ids)
        offers = [Offer(block_id, b"%16d" % block_id, None, 16) for block_id in block_ids]
        lease_id = self.lender.enter(offers, lease_id)
        blocks = await self.lender.seal(lease_id)
        self.loans.hand_over(lease_id, ttl_s, self.lender.now_s())
        return lease_id, blocks

    def check(self) -> None:
        """Every law; and kept in place is what is lent, and nothing else."""
        assert self.lender.check_integrity() == ""
        kept = {block_id for block_id, num in self.num_kept.items() if num}
        assert set(self.num_kept.values()) <= {0, 1}
        assert len(kept) == self.loans.num_lent


@contextlib.asynccontextmanager
async def lending(
    seed: int,
    block_bytes: int = BLOCK_BYTES,
    num_blocks: int = NUM_BLOCKS,
    *,
    is_on_device: bool = False,
    lets_map: bool = True,
) -> AsyncIterator[Lending]:
    made = Lending(seed, block_bytes, num_blocks, is_on_device=is_on_device, lets_map=lets_map)
    server, made.address = await serving.listen("127.0.0.1:0", [LenderServicer(made.lender).add_to])
    made.lender.start()
    try:
        yield made
        made.check()
    finally:
        await server.stop(0)
        await made.lender.stop(5.0)
        made.check()
        assert made.loans.num_lent == 0


def _is_mapped(request: pytest.FixtureRequest) -> bool:
    """Whether this test's reader maps the lender's memory, which lies on a device then."""
    names = {"reading", "reading_anywhere"} & set(request.fixturenames)
    return any(request.getfixturevalue(name) == MAPPED for name in names)


@pytest.fixture
async def lent(request: pytest.FixtureRequest, seed: int) -> AsyncIterator[Lending]:
    """Out of host memory, unless the reader needs a device's."""
    async with lending(seed, is_on_device=_is_mapped(request)) as made:
        yield made


@pytest.fixture(params=[False, True], ids=["host", "device"])
async def lent_anywhere(request: pytest.FixtureRequest, seed: int) -> AsyncIterator[Lending]:
    async with lending(seed, is_on_device=request.param or _is_mapped(request)) as made:
        yield made


@pytest.fixture(params=["grpc", "nixl", MAPPED])
def reading(request: pytest.FixtureRequest) -> str:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(params=TRANSPORTS, ids=["grpc", "nixl", "grpc-device", "nixl-device", "mapped"])
def reading_anywhere(request: pytest.FixtureRequest) -> str:
    """Equal to its name, wherever the reader's blocks lie."""
    return request.param  # type: ignore[no-any-return]


# ---- bytes


@pytest.mark.parametrize("num_blocks", [1, 13])
async def test_blocks_come(
    lent_anywhere: Lending, new_worker: NewWorker, reading_anywhere: str, num_blocks: int, seed: int
) -> None:
    """Scattered and neighbouring blocks, in any order; nothing else is touched, here or there."""
    reader = await new_worker(lent_anywhere.address, reading_anywhere)
    assert is_lender(reader.client.node_id) and reader.client.frame_bytes == BLOCK_BYTES
    draw = random.Random(seed)
    theirs = lent_anywhere.view.copy()
    for attempt in range(3):
        ids = list(range(20)) if attempt == 0 else draw.sample(range(NUM_BLOCKS), 20)
        sources, targets = ids[:num_blocks], sorted(draw.sample(range(NUM_BLOCKS), num_blocks))
        lease_id, blocks = await lent_anywhere.lend(sources)
        assert [block.frame for block in blocks] == sources
        assert {block.tier for block in blocks} == {Tier.DEVICE}
        before = reader.view.copy()
        assert await reader.get(lease_id, blocks, targets) == {}
        before[targets] = lent_anywhere.view[sources]
        assert np.array_equal(reader.view, before)
        assert await reader.client.release([lease_id, lease_id], deadline=within()) == 1
    assert np.array_equal(lent_anywhere.view, theirs)
    status = await reader.status()
    assert status.num_bytes_read == 3 * num_blocks * BLOCK_BYTES
    assert (status.num_pinned, status.num_leases) == (0, 0)


async def test_blocks_larger_than_any_chunk(
    new_worker: NewWorker, reading_anywhere: str, seed: int
) -> None:
    block_bytes = 5 * 2**20 + 1234
    is_mapped = reading_anywhere == MAPPED
    async with lending(seed, block_bytes, 5, is_on_device=is_mapped) as lent:
        reader = await new_worker(
            lent.address, reading_anywhere, block_bytes=block_bytes, num_blocks=9
        )
        lease_id, blocks = await lent.lend([0, 1, 2, 4])
        assert await reader.get(lease_id, blocks, [5, 6, 7, 8]) == {}
        assert np.array_equal(reader.view[[5, 6, 7, 8]], lent.view[[0, 1, 2, 4]])
        await reader.client.close()


async def test_a_block_is_read_under_several_leases(
    lent: Lending, new_worker: NewWorker, reading: str
) -> None:
    """A prefix that several requests share: one lease's end is not the others'."""
    reader = await new_worker(lent.address, reading)
    first, blocks = await lent.lend([3, 4, 5])
    second, same = await lent.lend([3, 4, 9])
    assert same[:2] == blocks[:2]
    lent.check()
    await reader.client.release([first], deadline=within())
    lent.check()
    assert await reader.get(second, same, [0, 1, 2]) == {}
    assert await reader.get(second, blocks, [0, 1, 2]) == {2: errors.GENERATION}


# ---- what is not there any more


async def test_bytes_that_changed_are_detected_and_end_the_lease(
    lent: Lending, new_worker: NewWorker, reading: str
) -> None:
    """A block that changed although it was lent: the reader reports it, and its leases end."""
    reader = await new_worker(lent.address, reading)
    bad, blocks = await lent.lend(range(5))
    good, others = await lent.lend([10, 11])
    lent.view[3, -1] ^= 1
    assert await reader.get(bad, blocks, range(10, 15)) == {3: errors.CHECKSUM}
    await reader.client.settle()
    failed = await reader.get(bad, blocks[:1], [0])
    assert failed == {0: errors.LEASE_LAPSED}
    assert await reader.get(good, others, [0, 1]) == {}
    assert lent.loans.refused[errors.CHECKSUM] == 1


async def test_a_report_of_good_bytes_drops_nothing(
    lent: Lending, new_worker: NewWorker, reading: str
) -> None:
    reader = await new_worker(lent.address, reading)
    lease_id, blocks = await lent.lend(range(3))
    wrong = dataclasses.replace(blocks[1], checksum=blocks[1].checksum ^ 1)
    failed = await reader.get(lease_id, [blocks[0], wrong], [8, 9])
    assert failed == {1: errors.CHECKSUM}
    await reader.client.settle()
    assert await reader.get(lease_id, blocks, [8, 9, 10]) == {}


async def test_an_old_handle_never_fits_a_block_that_is_lent_again(
    lent: Lending, new_worker: NewWorker, reading: str
) -> None:
    reader = await new_worker(lent.address, reading)
    lease_id, old = await lent.lend([4, 5])
    await reader.client.release([lease_id], deadline=within())
    assert await reader.get(lease_id, old, [0, 1]) == dict.fromkeys(range(2), errors.LEASE_LAPSED)
    again, new = await lent.lend([4, 5])
    assert [b.generation - a.generation for a, b in zip(old, new, strict=True)] == [2, 2]
    assert await reader.get(again, old, [0, 1]) == dict.fromkeys(range(2), errors.GENERATION)
    odd = [dataclasses.replace(block, generation=block.generation - 1) for block in new]
    assert await reader.get(again, odd, [0, 1]) == dict.fromkeys(range(2), errors.GENERATION)
    absent = dataclasses.replace(new[0], frame=10_000)
    assert (await reader.get(again, [new[0], absent], [0, 1])).keys() == {1}


async def test_a_lease_lapses_and_a_renewed_one_does_not(
    lent: Lending, new_worker: NewWorker, reading: str
) -> None:
    reader = await new_worker(lent.address, reading)
    ahead_s = 0.0
    lent.lender._clock = lambda: time.monotonic() + ahead_s
    kept, blocks = await lent.lend([1, 2], ttl_s=0.3 * TTL_S)
    await reader.client.renew(kept, ttl_s=1e6, deadline=within())  # the lender's bound counts
    lapsing, _ = await lent.lend([2, 3], ttl_s=0.3 * TTL_S)
    ahead_s = 0.5 * TTL_S
    async with asyncio.timeout(10):
        while lent.loans.num_leases > 1:
            await asyncio.sleep(0.005)
    lent.check()
    assert lent.loans.num_lent == 2
    with pytest.raises(errors.LeaseLapsed):
        await reader.client.renew(lapsing, ttl_s=1.0, deadline=within())
    assert await reader.get(kept, blocks, [0, 1]) == {}


async def test_another_life_is_not_even_asked(
    lent: Lending, new_worker: NewWorker, reading: str
) -> None:
    reader = await new_worker(lent.address, reading)
    lease_id, blocks = await lent.lend([1])
    got = await reader.client.get_blocks(
        lease_id, [(blocks[0], 10)], within(), incarnation=b"another life 123"
    )
    assert got.failed == {0: errors.INCARNATION}


async def test_a_cancelled_read_holds_nothing_and_writes_nothing_later(
    lent_anywhere: Lending, new_worker: NewWorker, reading_anywhere: str
) -> None:
    """Cancelled after every number of loop turns from 0 on until it is too late to."""
    reader = await new_worker(lent_anywhere.address, reading_anywhere)
    lease_id, blocks = await lent_anywhere.lend(range(8))
    turns = num_cancelled = 0
    while True:
        if turns < 8:  # a device that is quick must not be done before the loop has turned so often
            reader.device.engine_runs.clear()
        work = reader.client.get_blocks(
            lease_id, list(zip(blocks, range(8), strict=True)), within()
        )
        task = asyncio.create_task(work)
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        reader.device.engine_runs.set()
        try:
            await task
        except errors.TransferCancelled as error:
            await asyncio.wait_for(error.quarantine.settled, 10)
        except asyncio.CancelledError:
            pass
        else:
            break  # it was over before the cancellation came
        num_cancelled += 1
        turns = turns + 1 if turns < 60 else int(turns * 1.2)
        reader.view[:8] = 1  # whatever still writes is seen
        await reader.client.match([], ttl_s=1, deadline=within())
        assert (reader.view[:8] == 1).all()
    assert num_cancelled > 5
    await reader.client.release([lease_id], deadline=within())
    async with asyncio.timeout(10):
        while lent_anywhere.loans.num_lent:
            await asyncio.sleep(0.005)


async def test_a_block_stays_while_it_is_read(new_worker: NewWorker, seed: int) -> None:
    """Its lease ends under the reader: the bytes are whole, and then the block is free."""
    async with lending(seed) as lent:
        reader = await new_worker(lent.address, "grpc")
        lease_id, blocks = await lent.lend([1, 2])
        pieces = lent.lender.copy_out(reader.client._attachment_id, lease_id, blocks, 1000)
        first = await anext(pieces)
        lent.loans.release([lease_id], lent.lender.now_s())
        lent.check()
        assert lent.loans.num_lent == 2
        rest = [piece async for piece in pieces]
        content = b"".join(data for _, _, data, _ in (first, *rest))
        assert content == lent.view[[1, 2]].tobytes()
        assert lent.loans.num_lent == 0


async def test_a_push_that_cannot_begin_holds_nothing(
    lent: Lending, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = await new_worker(lent.address, "nixl")
    lease_id, blocks = await lent.lend([1, 2])
    agent = lent.lender.peers._agent
    assert agent is not None

    def closed(*arguments: Any, **options: Any) -> Any:
        raise errors.TransferFailed("the agent is closed")

    monkeypatch.setattr(agent, "write", closed)
    failed = await reader.get(lease_id, blocks, [0, 1])
    assert failed.keys() == {0, 1}
    lent.loans.release([lease_id], lent.lender.now_s())
    assert lent.loans.num_lent == 0


# ---- who may come, and what is refused


async def test_shared_memory_and_strangers_are_refused(
    lent: Lending, new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(FailedPrecondition, match=r"^transport shm: .* cuda_ipc or nixl or grpc"):
        await new_worker(lent.address, "shm")
    for reading in ("grpc", "nixl"):
        with pytest.raises(FailedPrecondition, match="block_bytes"):
            await new_worker(lent.address, reading, block_bytes=6000)
    monkeypatch.setattr("tests.harness.store.FINGERPRINT", "cd" * 16)
    with pytest.raises(FailedPrecondition, match="another model"):
        await new_worker(lent.address, "grpc")
    assert len(lent.lender.attachments) == 0


async def test_every_write_is_refused_by_name(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, "grpc")
    _, blocks = await lent.lend([1])
    with pytest.raises(FailedPrecondition, match="lends its blocks for reading; it reserves no"):
        await reader.put([b"1" * 16], [0])
    with pytest.raises(FailedPrecondition, match="it pins nothing"):
        await reader.client.pin(blocks, ttl_s=1.0, deadline=within())
    stub = reader.client._rpc.stub
    for method, request in (
        (stub.Commit, kvstore_pb2.CommitRequest()),
        (stub.Abort, kvstore_pb2.AbortRequest()),
        (stub.Write, iter([kvstore_pb2.WriteChunk()])),
    ):
        with pytest.raises(FailedPrecondition, match="lends its blocks for reading"):
            await reader.client._rpc.call(method, request, within())
    matched = await reader.client.match([b"%16d" % 1], ttl_s=1.0, deadline=within())
    assert matched.blocks == () and matched.lease_id == ""
    listed = [reply async for reply in stub.List(kvstore_pb2.ListRequest())]
    assert [list(reply.chain_hashes) for reply in listed] == [[]]


async def test_a_new_life_takes_the_old_ones_place_and_goodbye_ends_an_attachment(
    lent: Lending, new_worker: NewWorker, reading: str
) -> None:
    reader = await new_worker(lent.address, reading)
    former = reader.client
    reader.incarnation = secrets.token_bytes(16)
    await reader.attach(lent.address)
    assert len(lent.lender.attachments) == 1
    lease_id, blocks = await lent.lend([1])
    with pytest.raises(BatonError):
        await former.match([], ttl_s=1.0, deadline=within())
    await former.close()
    assert await reader.get(lease_id, blocks, [1]) == {}
    await reader.client.close()
    assert len(lent.lender.attachments) == 0


# ---- the way, measured


async def test_the_way_is_measured_by_reading_and_given_back(
    lent_anywhere: Lending, new_worker: NewWorker, reading_anywhere: str
) -> None:
    lent_anywhere.num_probes_free = 4
    reader = await new_worker(lent_anywhere.address, reading_anywhere)
    untouched = reader.view[4:].copy()
    for _ in range(2):
        rates = await reader.client.measure(range(8), within())
        assert rates.num_bytes == 4 * BLOCK_BYTES and rates.write_bytes_per_s == 0
        for rate in (rates.read_bytes_per_s, rates.copy_bytes_per_s, rates.latency_s):
            assert 0 < rate < float("inf")
        assert np.array_equal(reader.view[:4], lent_anywhere.view[-4:]), "real bytes came"
        assert np.array_equal(reader.view[4:], untouched)
        assert lent_anywhere.loans.num_lent == 0


@pytest.mark.parametrize("who", ["here", "there"])
async def test_without_room_nothing_is_measured(
    lent: Lending, new_worker: NewWorker, who: str
) -> None:
    lent.num_probes_free = 4 if who == "here" else 0
    reader = await new_worker(lent.address, "grpc")
    with pytest.raises(NoCapacity, match="free blocks"):
        await reader.client.measure(range(4 if who == "there" else 0), within())
    assert lent.loans.num_lent == 0


async def test_what_a_reader_measures_with_it_has_once_and_loses_when_it_leaves(
    lent: Lending, new_worker: NewWorker
) -> None:
    lent.num_probes_free = 4
    reader = await new_worker(lent.address, "grpc")
    asked = [PROBE_HASH] * 3
    for _ in range(3):  # as after answers that were lost
        matched = await reader.client.match(asked, ttl_s=5.0, deadline=within())
        assert len(matched.blocks) == 3 == lent.loans.num_lent
        assert lent.loans.num_leases == 1
    await reader.client.close()
    assert lent.loans.num_lent == 0


@pytest.mark.parametrize("turns", range(1, 60, 8))
async def test_a_cancelled_measurement_gives_the_blocks_back(
    new_worker: NewWorker, seed: int, turns: int
) -> None:
    async with lending(seed) as lent:
        lent.num_probes_free = 4
        reader = await new_worker(lent.address, "grpc")
        measuring = asyncio.create_task(reader.client.measure(range(4), within()))
        probing = asyncio.create_task(lent.lender.probes.lend("another", 4, 1.0))
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in (measuring, probing):
            task.cancel()
        _, probe = await asyncio.gather(measuring, probing, return_exceptions=True)
        if isinstance(probe, tuple):
            lent.loans.release([probe[0]], lent.lender.now_s())
        if not measuring.cancelled():
            measuring.exception()
        await reader.client.close()
        async with asyncio.timeout(5):  # sooner than by lapsing
            while lent.loans.num_lent:
                await asyncio.sleep(0.005)


# ---- the end


async def test_a_lender_that_stops_lends_no_more(
    new_worker: NewWorker, reading: str, seed: int
) -> None:
    async with lending(seed, is_on_device=reading == MAPPED) as lent:
        reader = await new_worker(lent.address, reading)
        lease_id, blocks = await lent.lend([1, 2])
        await lent.lender.stop(5.0)
        assert lent.loans.num_lent == 0
        lent.check()
        failed = await reader.get(lease_id, blocks, [1, 2])
        assert failed == dict.fromkeys(range(2), errors.LEASE_LAPSED)
        lent.keep([5])
        with pytest.raises(NotFound):
            lent.lender.enter([Offer(5, b"x", None, 1)])
        lent.on_free([5])


async def test_a_slow_reader_ends_by_its_deadline(new_worker: NewWorker, seed: int) -> None:
    """One that never takes what it asked for: its blocks come back all the same."""
    block_bytes = 4 * 2**20
    async with lending(seed, block_bytes, 16) as lent:
        reader = await new_worker(lent.address, "grpc", block_bytes=block_bytes, num_blocks=1)
        lease_id, blocks = await lent.lend(range(16))
        request = kvstore_pb2.ReadRequest(
            attachment_id=reader.client._attachment_id,
            lease_id=lease_id,
            chunk_bytes=2**20,
        )
        for block in blocks:
            request.blocks.add(
                chain_hash=block.chain_hash, frame=block.frame, generation=block.generation
            )
        call = reader.client._rpc.stub.Read(request, timeout=2.0)
        await call.read()
        lent.loans.release([lease_id], lent.lender.now_s())
        assert lent.loans.num_lent == 16
        async with asyncio.timeout(10):
            while lent.loans.num_lent:
                await asyncio.sleep(0.005)
        call.cancel()
