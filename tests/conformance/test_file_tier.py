"""What lies on disk under a store: it comes back exact, or not at all, whatever happened to the
disk, the file or the process. Real stores, real files."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from process.rpc_errors import DeadlineExceeded, NoCapacity
from tests.harness.file_tier import FileTierOf, StalledReads
from tests.harness.store import (
    SETTINGS,
    LocalStore,
    NewStore,
    NewWorker,
    anywhere,
    chain_of,
    local_store,
)
from tests.harness.waiting import until, within

pytestmark = pytest.mark.oracle

Settings = Any  # a store's
NUM_FRAMES = 32
LENGTH = 8  # blocks of a prompt


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return dataclasses.replace(
        SETTINGS,
        node_id="tiered",
        file_tier_dir=str(tmp_path),
        file_tier_bytes=120 * 8192,
        demote_below_free=0.5,
    )


def ids_of(prompt: int) -> list[int]:
    """Which of the worker's blocks a prompt is put from: distinct bytes for each."""
    return [(prompt * 3 + i) % 40 for i in range(LENGTH)]


async def put(worker: Any, prompt: int) -> None:
    done = await worker.put(chain_of(f"p{prompt}", LENGTH), ids_of(prompt))
    await worker.release(done.lease_id)


async def fill(store: LocalStore, worker: Any, num_prompts: int) -> None:
    """Put more than fits into memory, at the pace of the disk, so that nothing is lost."""
    for prompt in range(num_prompts):
        await put(worker, prompt)
        await FileTierOf(store).caught_up()


async def worker_of(new_worker: NewWorker, address: str, transport: str = "grpc") -> Any:
    """The same bytes in every worker, so that whoever stored a block, it is known what it was."""
    worker = await new_worker(address, transport)
    worker.view[:40] = np.random.default_rng(1).integers(0, 256, (40, 5000), dtype=np.uint8)
    return worker


async def read(worker: Any, prompt: int) -> tuple[int, list[str]]:
    """Match, load and compare. Returns: how many blocks there were, and where each lay."""
    matched = await worker.match(chain_of(f"p{prompt}", LENGTH))
    targets = list(range(40, 40 + len(matched.blocks)))
    worker.view[targets] = 0
    assert await worker.get(matched.lease_id, matched.blocks, targets) == {}
    assert np.array_equal(worker.view[targets], worker.view[ids_of(prompt)[: len(targets)]])
    await worker.release(matched.lease_id)
    return len(targets), [block.tier.name for block in matched.blocks]


@anywhere
async def test_what_leaves_memory_comes_back_from_disk(
    settings: Settings, new_worker: NewWorker, transport: str
) -> None:
    """Three times as much as the frames hold, all of it there, each byte right."""
    async with local_store(settings) as store:
        worker = await worker_of(new_worker, store.address, transport)
        await fill(store, worker, 12)
        status = await worker.status()
        assert status.num_pages >= 96 and status.num_pages_used >= 96 - NUM_FRAMES // 2
        assert (status.num_evictions, status.num_pages_bad, status.file_tier_problem) == (0, 0, "")
        tiers: set[str] = set()
        for prompt in range(12):
            num_blocks, lay = await read(worker, prompt)
            assert num_blocks == LENGTH
            tiers |= set(lay)
            assert await read(worker, prompt) == (LENGTH, ["HOST"] * LENGTH)
        assert tiers == {"HOST", "FILE"}
        status = await worker.status()
        assert status.num_promoted >= 96 - NUM_FRAMES and status.num_leases == 0


async def test_the_next_life_uses_what_verifies(settings: Settings, new_worker: NewWorker) -> None:
    async with local_store(settings) as store:
        worker = await worker_of(new_worker, store.address)
        await fill(store, worker, 10)
        in_pages = FileTierOf(store).names()
        await worker.client.close()
    async with local_store(settings) as store:
        worker = await worker_of(new_worker, store.address)
        assert set(await worker.listed()) == in_pages
        found = [(await read(worker, prompt))[0] for prompt in range(10)]
        assert sum(found) == len(in_pages)
        assert (await worker.status()).num_pages_bad == 0


async def test_a_store_that_was_killed_while_it_demotes_leaves_nothing_wrong(
    settings: Settings,
    new_store: NewStore,
    new_worker: NewWorker,
    seed: int,
    scale: Callable[[int], int],
) -> None:
    """kill -9 at random moments under load, life after life over one file."""
    draw = random.Random(seed)
    process = await new_store(settings)
    num_kept = 0
    for _ in range(scale(60)):
        worker = await worker_of(new_worker, process.address)
        num_kept += sum([(await read(worker, prompt))[0] for prompt in range(12)])

        async def load(worker: Any) -> None:
            while True:
                await put(worker, draw.randrange(12))

        task = asyncio.create_task(load(worker))
        async with asyncio.timeout(30):  # from when on there is something to keep
            while not num_kept and not (await worker.status()).num_demoted:
                await asyncio.sleep(0.005)
        await asyncio.sleep(draw.random() * 0.15)
        await process.end()
        await asyncio.wait([task])
        await worker.client.close()
        await process.start()
    worker = await worker_of(new_worker, process.address)
    num_kept += sum([(await read(worker, prompt))[0] for prompt in range(12)])
    assert num_kept > 0
    await worker.status()


@anywhere
async def test_a_flipped_byte_on_disk_costs_its_block_and_those_below(
    settings: Settings, new_worker: NewWorker, transport: str, seed: int
) -> None:
    draw = random.Random(seed)
    async with local_store(settings) as store:
        worker = await worker_of(new_worker, store.address, transport)
        await fill(store, worker, 12)
        damaged = chain_of("p0", LENGTH)[3]
        FileTierOf(store).flip_bit(damaged, draw.randrange(5000), draw.randrange(8))
        assert (await read(worker, 0))[0] == 3
        status = await worker.status()
        assert (status.num_pages_bad, status.num_leases, status.num_pinned) == (1, 0, 0)
        await put(worker, 0)
        assert (await read(worker, 0))[0] == LENGTH


async def test_bad_memory_is_never_written_to_disk(
    settings: Settings, new_worker: NewWorker
) -> None:
    async with local_store(settings) as store:
        worker = await worker_of(new_worker, store.address)
        await put(worker, 0)
        tier = FileTierOf(store)
        store.flip_bit(tier.in_memory_only(chain_of("p0", LENGTH)[5]), 7)
        for prompt in (1, 2, 3):
            await put(worker, prompt)
            await tier.caught_up()
        assert (await read(worker, 0))[0] == 5
        refused = {each.reason: each.num_blocks for each in (await worker.status()).refused}
        assert refused == {"checksum": 1}


async def test_a_full_disk_switches_the_tier_off_by_name_and_the_store_lives(
    settings: Settings, new_store: NewStore, new_worker: NewWorker
) -> None:
    """The kernel refuses every further write of that process to a file."""
    process = await new_store(settings)
    worker = await worker_of(new_worker, process.address, "shm")
    for prompt in range(5):
        await put(worker, prompt)
    async with asyncio.timeout(30):
        while not (await worker.status()).num_pages_used:
            await asyncio.sleep(0.01)
    resource.prlimit(process.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
    prompt = 5
    async with asyncio.timeout(30):
        while not (status := await worker.status()).file_tier_problem:
            await put(worker, prompt)
            prompt += 1
    assert "file_tier_dir" in status.file_tier_problem and "tiered" in status.file_tier_problem
    await put(worker, 40)
    assert await read(worker, 40) == (LENGTH, ["HOST"] * LENGTH)
    async with asyncio.timeout(30):
        while (status := await worker.status()).num_pages:
            await asyncio.sleep(0.01)
    assert (status.num_pages_used, status.num_quarantined, status.num_writing) == (0, 0, 0)


@pytest.mark.parametrize(
    ("change", "why"),
    [({"file_tier_bytes": 1 << 55}, "no room"), ({"file_tier_bytes": 10_000}, "holds no block")],
)
async def test_a_tier_that_cannot_be_made_is_named_in_the_status(
    settings: Settings, new_worker: NewWorker, change: dict[str, Any], why: str
) -> None:
    async with local_store(dataclasses.replace(settings, **change)) as store:
        worker = await worker_of(new_worker, store.address)
        status = await worker.status()
        assert why in status.file_tier_problem and "file_tier_bytes" in status.file_tier_problem
        assert why in store.row().file_tier_problem
        await put(worker, 0)
        assert await read(worker, 0) == (LENGTH, ["HOST"] * LENGTH)


async def test_a_folder_that_is_missing_is_refused_at_the_start(settings: Settings) -> None:
    missing = dataclasses.replace(settings, file_tier_dir="/nowhere/at/all")
    with pytest.raises(NoCapacity, match="file_tier_dir"):
        async with local_store(missing):
            raise AssertionError("it started")


async def test_another_frame_size_clears_the_file_and_the_log_says_so(
    settings: Settings, new_worker: NewWorker, caplog: pytest.LogCaptureFixture
) -> None:
    async with local_store(settings) as store:
        worker = await worker_of(new_worker, store.address)
        await fill(store, worker, 6)
        await worker.client.close()
    async with local_store(settings) as store:
        worker = await new_worker(store.address, "grpc", block_bytes=6000)
        assert await worker.listed() == []
        assert (await worker.status()).num_pages > 0
    assert [record for record in caplog.records if record.getMessage() == "file_tier_cleared"]


async def test_a_match_waits_for_the_disk_no_longer_than_it_may(
    settings: Settings, new_worker: NewWorker
) -> None:
    """Late pages cost a shorter prefix, not the request; they are there for the next one."""
    one_thread = dataclasses.replace(settings, num_file_io_threads=1)
    async with local_store(one_thread) as store:
        worker = await worker_of(new_worker, store.address)
        await fill(store, worker, 12)
        tier = FileTierOf(store)
        with StalledReads(num_quick=3):
            matched = await worker.client.match(
                chain_of("p0", LENGTH), ttl_s=30, deadline=within(3.0)
            )
            assert len(matched.blocks) == 3
            await worker.status()
            # What is cancelled, or gives up, leaves no lease behind.
            task = asyncio.create_task(worker.match(chain_of("p2", LENGTH)))
            await until(lambda: tier.num_moving >= 2 * LENGTH - 3)
            task.cancel()
            await asyncio.wait([task])
            with contextlib.suppress(DeadlineExceeded):
                late = await worker.client.match(
                    chain_of("p1", LENGTH), ttl_s=30, deadline=within(0.05)
                )
                assert (late.blocks, late.lease_id) == ((), "")

        async def is_idle() -> bool:
            return tier.num_moving == 0 and (await worker.status()).num_leases == 1

        await until(is_idle)
        assert (await read(worker, 0))[0] == LENGTH


async def test_two_who_want_the_same_blocks_share_one_reading(
    settings: Settings, new_worker: NewWorker
) -> None:
    async with local_store(settings) as store:
        one, two = [await worker_of(new_worker, store.address, name) for name in ("shm", "grpc")]
        await fill(store, one, 12)
        hashes = chain_of("p0", LENGTH)
        found = await asyncio.gather(*(each.match(hashes) for each in (one, two)))
        refs = [[(b.frame, b.generation) for b in matched.blocks] for matched in found]
        assert refs[0] == refs[1] and len(refs[0]) == LENGTH
        assert (await one.status()).num_promoted == LENGTH


async def test_memory_full_of_leases_gives_a_shorter_prefix(
    settings: Settings, new_worker: NewWorker
) -> None:
    async with local_store(settings) as store:
        worker = await worker_of(new_worker, store.address)
        await fill(store, worker, 12)
        leases = []
        found = []
        for prompt in range(6):
            matched = await worker.match(chain_of(f"p{prompt}", LENGTH))
            leases.append(matched.lease_id)
            found.append(len(matched.blocks))
        assert found == [LENGTH] * 4 + [0, 0] and leases[4:] == ["", ""]
        await worker.status()
        await worker.release(*leases)
        assert (await read(worker, 5))[0] == LENGTH


async def test_many_workers_over_a_small_memory_keep_every_law(
    settings: Settings, new_worker: NewWorker, seed: int
) -> None:
    async with local_store(settings) as store:
        workers = [
            await worker_of(new_worker, store.address, name) for name in ("shm", "grpc", "grpc")
        ]

        async def busy(worker: Any, draw: random.Random) -> None:
            for _ in range(40):
                prompt = draw.randrange(12)
                if draw.random() < 0.4:
                    await put(worker, prompt)
                else:
                    await read(worker, prompt)
                await worker.status()

        await asyncio.gather(*(busy(w, random.Random(seed + i)) for i, w in enumerate(workers)))
        status = await workers[0].status()
        assert status.num_demoted > 0 and status.num_pages_bad == 0
        assert (status.num_leases, status.num_pinned, status.num_quarantined) == (0, 0, 0)


async def test_tenants_are_charged_and_told(settings: Settings, new_worker: NewWorker) -> None:
    shared = dataclasses.replace(settings, tenant_shares=("a=0.25",), file_tier_dir="")
    async with local_store(shared) as store:
        worker = await worker_of(new_worker, store.address)
        for tenant, length in (("a", 5), ("b", 30)):
            done = await worker.client.put_blocks(
                None,
                b"",
                list(zip(chain_of(tenant, length), range(length), strict=True)),
                None,
                60.0,
                within(),
                num_tokens=16,
                tenant=tenant,
            )
            await worker.release(done.lease_id)
        rows = [
            (row.tenant, row.num_blocks, row.num_blocks_guaranteed)
            for row in (await worker.status()).tenants
        ]
        assert rows == [("a", 5, 8), ("b", 27, 0)]
