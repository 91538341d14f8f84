"""StoreParking over a real store: bytes come back exactly or are lost with a reason, and rows,
leases and tails are all given back, whatever happens when.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.errors import IntegrityError, ParkingRefused, WrongState
from engine.parking import Blocks
from process.settings import SettingsError
from services.worker.kv_swap import Stage, StoreParking
from tests.harness.gated_engine import fake_engine
from tests.harness.waiting import Gate, until
from tests.harness.workloads import PLAIN, disturbed, undisturbed, workload
from tests.unit.worker.parking_bench import LAYOUT, LIMITS, WAIT_S, StalledReads, lot


def blocks_of(num_blocks: int, seed: int = 0) -> Blocks:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_blocks, LAYOUT.block_bytes), dtype=np.uint8)


def hashes_of(num_blocks: int, seed: int = 0) -> list[bytes]:
    return [bytes([1 + seed, index]) * 8 for index in range(num_blocks)]


@pytest.mark.parametrize("transport", ["shm", "nixl", "grpc"])
@pytest.mark.parametrize("num_full", [3, 4])
async def test_what_was_put_comes_back_byte_for_byte(
    transport: str, num_full: int, tmp_path: Path
) -> None:
    async with lot(tmp_path, transport=transport) as made:
        blocks = blocks_of(4)
        given = blocks.copy()
        made.parking.put("a", hashes_of(num_full), given)
        given[:] = 0  # they may change as soon as put returns
        made.parking.check_integrity({"a"})
        await made.stored("a")
        assert made.rows.num_free == 8  # the bytes are the store's now
        assert made.store.num_tails == 4 - num_full
        assert made.store.num_pinned() == 4 and len(made.store.leases) == 1
        assert made.parking.num_bytes_stored == 4 * LAYOUT.block_bytes
        made.parking.check_integrity({"a"})
        made.rows.memory.view[:] = 255
        assert np.array_equal(await made.fetched("a"), blocks)
        assert made.parking.num_bytes_fetched == 4 * LAYOUT.block_bytes
        made.parking.check_integrity({"a"})
        made.parking.drop("a")
        await made.check_empty()
        assert not made.parking.lost


async def test_nothing_at_all_comes_back_as_nothing(tmp_path: Path) -> None:
    """As a quantized cache has it before its first block is full."""
    async with lot(tmp_path) as made:
        made.parking.put("a", (), blocks_of(0))
        made.parking.check_integrity({"a"})
        coming = made.parking.get("a")
        found = coming.result()
        assert coming.is_done and found is not None and found.shape == (0, LAYOUT.block_bytes)
        made.parking.drop("a")
        await made.check_empty()


async def test_what_is_still_staged_is_answered_at_once(tmp_path: Path) -> None:
    async with lot(tmp_path) as made:
        gate = Gate(made.client, "put_blocks")
        blocks = blocks_of(3)
        made.parking.put("a", hashes_of(2), blocks)
        coming = made.parking.get("a")
        assert coming.is_done and np.array_equal(coming.result(), blocks)
        await asyncio.sleep(0)
        made.parking.drop("a")
        assert made.rows.num_free == 5  # the put may be reading them
        made.parking.check_integrity(())
        gate.open()
        await made.check_empty()
        assert not made.parking.lost


@pytest.mark.parametrize("stage", [*Stage])
async def test_a_drop_in_any_stage_leaves_nothing(stage: Stage, tmp_path: Path) -> None:
    async with lot(tmp_path) as made:
        held = {Stage.STAGED: "put_blocks", Stage.COMING: "get_blocks"}.get(stage)
        gate = Gate(made.client, held) if held else None
        made.parking.put("a", hashes_of(2), blocks_of(3))
        if stage is not Stage.STAGED:
            await made.stored("a")
        if stage is Stage.LOST:
            put = made.parking._kept["a"]
            assert made.store.release([put.lease_id], now_s=made.node.now_s()) == 1
            assert await made.fetched("a") is None
        elif stage is Stage.HERE:
            assert await made.fetched("a") is not None
        elif stage is Stage.COMING:
            assert not made.parking.get("a").is_done
            await until(lambda: made.rows.num_free == 5)
        else:
            await asyncio.sleep(0)
        assert made.stage("a") is stage
        made.parking.drop("a")
        made.parking.drop("a")  # not known any more
        made.parking.check_integrity(())
        unknown = made.parking.get("a")
        assert unknown.is_done and unknown.result() is None
        made.parking.put("a", hashes_of(2), blocks_of(3))  # the key is free again
        if gate is not None:
            gate.open()
        assert np.array_equal(await made.fetched("a"), blocks_of(3))
        made.parking.drop("a")
        await made.check_empty()


async def test_without_rows_a_put_is_refused_and_keeps_nothing(tmp_path: Path) -> None:
    async with lot(tmp_path, num_rows=4) as made:
        with pytest.raises(ParkingRefused, match="park_bytes"):
            made.parking.put("a", hashes_of(4), blocks_of(5))
        await made.check_empty()
        made.parking.put("b", hashes_of(3), blocks_of(3))
        with pytest.raises(ParkingRefused):
            made.parking.put("c", hashes_of(1), blocks_of(2))
        with pytest.raises(IntegrityError, match="already"):
            made.parking.put("b", (), blocks_of(1))
        made.parking.check_integrity({"b"})
        await made.stored("b")
        made.parking.put("c", hashes_of(1, seed=3), blocks_of(2))  # b's rows are free again
        await made.stored("c")
        made.parking.drop("b")
        made.parking.drop("c")
        await made.check_empty()


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_store_that_died_lost_what_was_parked(comes_back: bool, tmp_path: Path) -> None:
    async with lot(tmp_path) as made:
        made.parking.put("a", hashes_of(2), blocks_of(3))
        await made.stored("a")
        await made.kill_store()
        if comes_back:
            await made.start_store()
            await until(lambda: made.parking.connector.num_attached == 2)
        assert await made.fetched("a") is None
        assert sum(made.parking.lost.values()) == 1
        if comes_back:
            assert set(made.parking.lost) == {"incarnation"}
        made.parking.check_integrity({"a"})
        assert made.rows.num_free == 8
        made.parking.drop("a")
        made.parking.put("b", hashes_of(2), blocks_of(3))
        found = await made.fetched("b")  # from its rows, whatever the store says
        assert np.array_equal(found, blocks_of(3))
        made.parking.drop("b")
        await until(lambda: made.rows.num_free == 8)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_what_is_here_or_lost_moves_nothing_any_more(is_lost: bool, tmp_path: Path) -> None:
    """Whoever sees that it is done may drop it in the same turn of the loop and have its rows."""
    async with lot(tmp_path) as made:
        made.parking.put("a", hashes_of(2), blocks_of(3))
        await made.stored("a")
        if is_lost:
            made.node.slab.frames[made.parking._kept["a"].refs[1].frame, 0] ^= 1
        coming = made.parking.get("a")
        async with asyncio.timeout(WAIT_S):
            while not coming.is_done:
                await asyncio.sleep(0)
        assert (coming.result() is None) == is_lost
        assert made.parking.lost == ({"checksum": 1} if is_lost else {})
        assert made.rows.num_free == (8 if is_lost else 5)
        made.parking.drop("a")
        assert made.rows.num_free == 8
        await made.check_empty()


@pytest.mark.parametrize("how", ["timeout", "stop"])
async def test_rows_that_may_still_be_written_into_are_out_of_use_until_it_is_settled(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lot(tmp_path) as made:
        made.parking.put("a", hashes_of(2), blocks_of(3))
        await made.stored("a")

        stalled = StalledReads(made.client, how, monkeypatch)
        coming = made.parking.get("a")
        if how == "stop":
            await until(lambda: made.rows.num_free == 5)
            await made.parking.stop(timeout_s=1)
        await until(lambda: coming.is_done)
        assert coming.result() is None
        assert made.parking.lost == {"deadline" if how == "timeout" else "stopped": 1}
        assert (made.rows.num_free, made.rows.num_quarantined) == (5, 3)
        made.parking.check_integrity({"a"})
        made.parking.drop("a")
        made.parking.check_integrity(())
        if how == "timeout":
            with pytest.raises(ParkingRefused):
                made.parking.put("b", hashes_of(6), blocks_of(6))
        stalled.settled.set_result(None)
        await until(lambda: made.rows.num_free == 8)
        assert made.rows.num_quarantined == 0
        made.parking.check_integrity(())


async def test_who_comes_back_waits_for_rows_but_not_for_ever(tmp_path: Path) -> None:
    async with lot(tmp_path, num_rows=3) as made:
        for index, key in enumerate(("a", "b")):
            made.parking.put(key, hashes_of(2, index), blocks_of(3, index))
            await made.stored(key)
        assert np.array_equal(await made.fetched("a"), blocks_of(3, 0))
        limits = made.parking._limits
        made.parking._limits = replace(limits, transfer_budget_s=0.1)
        assert await made.fetched("b") is None  # a has all rows for longer than that
        made.parking._limits = limits
        assert made.parking.lost == {"deadline": 1}
        made.parking.drop("b")
        made.parking.drop("a")
        made.parking.put("c", hashes_of(2, 2), blocks_of(3, 2))
        await made.stored("c")
        made.parking.put("d", hashes_of(2, 3), blocks_of(3, 3))
        await made.stored("d")
        assert await made.fetched("c") is not None
        coming = made.parking.get("d")
        made.parking.drop("c")
        await until(lambda: coming.is_done)
        assert np.array_equal(coming.result(), blocks_of(3, 3))
        made.parking.drop("d")
        await made.check_empty()


async def test_a_lease_lives_as_long_as_something_is_parked(tmp_path: Path) -> None:
    async with lot(tmp_path, renewals_per_ttl=300.0) as made:
        made.parking.put("a", hashes_of(2), blocks_of(3))
        await made.stored("a")
        (lease,) = made.store.leases
        expires_at_s = lease.expires_at_s
        await until(lambda: lease.expires_at_s > expires_at_s)
        expires_at_s = lease.expires_at_s
        await until(lambda: lease.expires_at_s > expires_at_s)
        made.store.release([lease.lease_id], now_s=made.node.now_s())
        await until(lambda: made.stage("a") is Stage.LOST)
        assert made.parking.lost == {"lease_lapsed": 1}
        made.parking.drop("a")
        await made.check_empty()


async def test_after_the_stop_everything_is_refused_or_lost(tmp_path: Path) -> None:
    async with lot(tmp_path) as made:
        made.parking.put("a", hashes_of(2), blocks_of(3))
        await made.stored("a")
        made.parking.put("b", hashes_of(1, 1), blocks_of(2))  # its task has not begun
        await made.parking.stop(timeout_s=1)
        with pytest.raises(ParkingRefused, match="not open"):
            made.parking.put("c", hashes_of(1), blocks_of(1))
        for key in ("a", "b"):
            assert await made.fetched(key) is None
            made.parking.drop(key)
        assert made.parking.lost == {"stopped": 2}
        await made.check_empty()


async def test_the_laws_are_checked(tmp_path: Path) -> None:
    async with lot(tmp_path) as made:
        made.parking.put("a", hashes_of(2), blocks_of(3))
        with pytest.raises(IntegrityError, match="parked are"):
            made.parking.check_integrity({"a", "b"})
        with pytest.raises(IntegrityError, match="2 of them full"):
            made.parking.put("b", hashes_of(2), blocks_of(4))
        await made.stored("a")
        assert made.rows.take(1) is not None  # by nobody
        with pytest.raises(IntegrityError, match="of 8"):
            made.parking.check_integrity({"a"})
        made.rows.give_back([0])
        made.parking.drop("a")
        await made.check_empty()


def test_a_bound_without_room_for_a_block_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="park_bytes"):
        StoreParking(
            LAYOUT,
            LAYOUT.block_bytes - 1,
            LIMITS,
            worker_incarnation=b"i",
            make_connector=lambda memory: pytest.fail("too late"),
        )


async def test_random_workloads_with_a_store_are_told_nothing_of_it(
    tmp_path: Path, seed: int, scale: Callable[[int], int]
) -> None:
    """200 random workloads on hardly any blocks, preempted at random: outcomes equal the
    undisturbed run, and every law holds after every step."""
    causes: Counter[str] = Counter()
    layout = PLAIN.make_model().layout
    async with lot(tmp_path, num_rows=20, num_frames=40, layout=layout) as made:
        for index in range(scale(200)):
            rng = random.Random(f"{seed} {index}")
            config = EngineConfig(
                num_blocks=rng.randint(12, 20),
                max_num_tokens_per_step=rng.randint(4, 12),
                max_num_running=4,
                preemption="swap",
            )
            engine = PLAIN.engine(config)
            engine.use_parking(made.parking)
            requests = workload(rng)
            found = await asyncio.to_thread(disturbed, engine, requests, rng)
            assert found == undisturbed(requests), index
            causes.update(dict(engine.stats().num_preemptions))
        assert causes["swap"] > 0 and made.parking.num_bytes_stored > 0
        assert causes["lost"] == sum(made.parking.lost.values())
        await made.check_empty()


def test_a_parking_is_for_an_engine_that_swaps() -> None:
    engine = fake_engine(num_blocks=64, preemption="recompute")
    assert engine.park_bytes == 0
    with pytest.raises(WrongState, match="swaps"):
        engine.use_parking(None)  # type: ignore[arg-type]
