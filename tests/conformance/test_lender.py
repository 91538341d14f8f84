"""A lender is a store to its readers, and a store of nothing to writers: leases, measurements and
refusals of its own. The reading half of what every transport must do is in test_transport.py."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from process.rpc_errors import BatonError, FailedPrecondition, NoCapacity, NotFound
from tests.harness.sources import LENDING, MAPPED, TTL_S, Lending, lending
from tests.harness.store import BLOCK_BYTES, NewWorker, OnDevice, Worker, name_of
from tests.harness.waiting import until, within

pytestmark = pytest.mark.oracle


@pytest.fixture
async def lent(seed: int) -> AsyncIterator[Lending]:
    async with lending(seed) as made:
        yield made


@pytest.fixture(params=["grpc", "nixl", MAPPED], ids=name_of)
async def pair(
    request: pytest.FixtureRequest, new_worker: NewWorker, seed: int
) -> AsyncIterator[tuple[Lending, Worker]]:
    """A lender, and a reader for each way to read where leases and generations are looked at."""
    async with lending(seed + 1, is_on_device=isinstance(request.param, OnDevice)) as made:
        yield made, await new_worker(made.address, request.param)


# ---- leases


async def test_a_block_is_read_under_several_leases(pair: tuple[Lending, Worker]) -> None:
    """A prefix that several requests share: one lease's end is not the others'."""
    lent, reader = pair
    first, blocks = await lent.lend([3, 4, 5])
    assert [block.frame for block in blocks] == [3, 4, 5]
    assert {block.tier.name for block in blocks} == {"DEVICE"}
    second, same = await lent.lend([3, 4, 9])
    assert same[:2] == blocks[:2]
    lent.check()
    await reader.release(first)
    lent.check()
    assert await reader.get(second, same, [0, 1, 2]) == {}
    assert await reader.get(second, blocks, [0, 1, 2]) == {2: "generation"}


async def test_an_old_handle_never_fits_a_block_that_is_lent_again(
    pair: tuple[Lending, Worker],
) -> None:
    lent, reader = pair
    lease_id, old = await lent.lend([4, 5])
    await reader.release(lease_id)
    again, new = await lent.lend([4, 5])
    assert [b.generation - a.generation for a, b in zip(old, new, strict=True)] == [2, 2]
    assert await reader.get(again, old, [0, 1]) == dict.fromkeys(range(2), "generation")


async def test_bytes_that_changed_end_their_leases(pair: tuple[Lending, Worker]) -> None:
    lent, reader = pair
    lease_id, blocks = await lent.lend(range(5))
    lent.flip_bit(blocks[3])
    assert await reader.get(lease_id, blocks, range(10, 15)) == {3: "checksum"}
    await reader.client.settle()
    assert await reader.get(lease_id, blocks[:1], [0]) == {0: "lease_lapsed"}


async def test_a_lease_lapses_and_a_renewed_one_does_not(pair: tuple[Lending, Worker]) -> None:
    lent, reader = pair
    kept, blocks = await lent.lend([1, 2], ttl_s=0.3 * TTL_S)
    await reader.client.renew(kept, ttl_s=1e6, deadline=within())  # the lender's bound counts
    lapsing, _ = await lent.lend([2, 3], ttl_s=0.3 * TTL_S)
    lent.ahead_s = 0.5 * TTL_S

    async def is_over() -> bool:
        return bool((await reader.status()).num_leases == 1)

    await until(is_over)
    lent.check()
    assert lent.num_lent == 2
    with pytest.raises(NotFound):
        await reader.client.renew(lapsing, ttl_s=1.0, deadline=within())
    assert await reader.get(kept, blocks, [0, 1]) == {}


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_block_stays_while_it_is_read(
    new_worker: NewWorker, seed: int, is_slow: bool
) -> None:
    """Its lease ends under the reader: the bytes are whole, and then the block is free; also of one
    that never takes what it asked for, by its deadline."""
    block_bytes = 4 * 2**20
    async with lending(seed, block_bytes, 8) as lent:
        reader = await new_worker(lent.address, "grpc", block_bytes=block_bytes, num_blocks=1)
        lease_id, blocks = await lent.lend(range(8))
        call = reader.begin_reading(
            lease_id, blocks, chunk_bytes=2**20, timeout_s=2.0 if is_slow else 30.0
        )
        pieces = aiter(call)
        first = await anext(pieces)
        lent.take_back(lease_id)
        lent.check()
        assert lent.num_lent == 8
        if not is_slow:
            content = first.data + b"".join([piece.data async for piece in pieces])
            assert content == lent.view.tobytes()
        await until(lambda: lent.num_lent == 0)
        call.cancel()


async def test_a_push_that_cannot_begin_holds_nothing(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, "nixl")
    lease_id, blocks = await lent.lend([1, 2])
    lent.refuse_pushes()
    assert (await reader.get(lease_id, blocks, [0, 1])).keys() == {0, 1}
    lent.take_back(lease_id)
    assert lent.num_lent == 0


# ---- who may come, and what is refused


async def test_shared_memory_and_strangers_are_refused(
    lent: Lending, new_worker: NewWorker, seed: int
) -> None:
    reader = await new_worker(lent.address, "grpc")
    with pytest.raises(FailedPrecondition, match=r"^transport shm: .* cuda_ipc or nixl or grpc"):
        await new_worker(lent.address, "shm")
    stranger = Worker("grpc", BLOCK_BYTES, 1, seed)
    with pytest.raises(FailedPrecondition, match="another model"):
        await stranger.attach(lent.address, fingerprint="cd" * 16)
    assert (await reader.status()).num_attachments == 1


async def test_every_write_is_refused_by_name(lent: Lending, new_worker: NewWorker) -> None:
    reader = await new_worker(lent.address, "grpc")
    _, blocks = await lent.lend([1])
    with pytest.raises(FailedPrecondition, match="lends its blocks for reading; it reserves no"):
        await reader.put([b"1" * 16], [0])
    with pytest.raises(FailedPrecondition, match="it pins nothing"):
        await reader.client.pin(blocks, ttl_s=1.0, deadline=within())
    for method in ("Commit", "Abort", "Write", "GetBlockHistory"):
        with pytest.raises(FailedPrecondition, match="lends its blocks for reading"):
            await reader.call(method)
    matched = await reader.match([b"%16d" % 1])
    assert matched.blocks == () and matched.lease_id == ""
    assert await reader.listed() == []


async def test_a_new_life_takes_the_old_ones_place_and_goodbye_ends_an_attachment(
    pair: tuple[Lending, Worker], new_worker: NewWorker
) -> None:
    lent, reader = pair
    other = await new_worker(lent.address, reader.transport_of)
    former = reader.client
    reader.incarnation = secrets.token_bytes(16)
    await reader.attach(lent.address)
    assert (await other.status()).num_attachments == 2
    lease_id, blocks = await lent.lend([1])
    with pytest.raises(BatonError):
        await former.match([], ttl_s=1.0, deadline=within())
    await former.close()
    assert await reader.get(lease_id, blocks, [1]) == {}
    await reader.client.close()
    assert (await other.status()).num_attachments == 1


# ---- the way, measured


@pytest.mark.parametrize("transport", LENDING, ids=name_of)
async def test_the_way_is_measured_by_reading_and_given_back(
    new_worker: NewWorker, transport: str, seed: int
) -> None:
    async with lending(seed + 1, is_on_device=isinstance(transport, OnDevice)) as lent:
        lent.num_probes_free = 4
        reader = await new_worker(lent.address, transport)
        untouched = reader.view[4:].copy()
        for _ in range(2):
            rates = await reader.client.measure(range(8), within())
            assert rates.num_bytes == 4 * BLOCK_BYTES and rates.write_bytes_per_s == 0
            for rate in (rates.read_bytes_per_s, rates.copy_bytes_per_s, rates.latency_s):
                assert 0 < rate < float("inf")
            assert np.array_equal(reader.view[:4], lent.view[-4:]), "real bytes came"
            assert np.array_equal(reader.view[4:], untouched)
            assert lent.num_lent == 0


@pytest.mark.parametrize("where", ["here", "there"])
async def test_without_room_nothing_is_measured(
    lent: Lending, new_worker: NewWorker, where: str
) -> None:
    lent.num_probes_free = 4 if where == "here" else 0
    reader = await new_worker(lent.address, "grpc")
    with pytest.raises(NoCapacity, match="free blocks"):
        await reader.client.measure(range(4 if where == "there" else 0), within())
    assert lent.num_lent == 0


async def test_what_a_reader_measures_with_it_has_once_and_loses_when_it_leaves(
    lent: Lending, new_worker: NewWorker
) -> None:
    lent.num_probes_free = 4
    reader = await new_worker(lent.address, "grpc")
    for _ in range(3):  # as after answers that were lost
        assert await lent.probe(reader, 3) == 3 == lent.num_lent
        assert (await reader.status()).num_leases == 1
    await reader.client.close()
    assert lent.num_lent == 0


@pytest.mark.parametrize("num_turns", range(1, 60, 8))
async def test_a_cancelled_measurement_gives_the_blocks_back(
    lent: Lending, new_worker: NewWorker, num_turns: int
) -> None:
    lent.num_probes_free = 4
    reader, other = [await new_worker(lent.address, "grpc") for _ in range(2)]
    tasks: list[asyncio.Task[Any]] = [
        asyncio.create_task(reader.client.measure(range(4), within())),
        asyncio.create_task(lent.probe(other, 4)),
    ]
    for _ in range(num_turns):
        await asyncio.sleep(0)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in (reader, other):
        await each.client.close()
    await until(lambda: lent.num_lent == 0, timeout_s=5.0)  # sooner than by lapsing


# ---- the end


async def test_a_lender_that_stops_lends_no_more(pair: tuple[Lending, Worker]) -> None:
    lent, reader = pair
    lease_id, blocks = await lent.lend([1, 2])
    await lent.stop()
    assert lent.num_lent == 0
    lent.check()
    failed = await reader.get(lease_id, blocks, [1, 2])
    assert failed == dict.fromkeys(range(2), "lease_lapsed")
    with pytest.raises(NotFound):
        await lent.lend([5])
