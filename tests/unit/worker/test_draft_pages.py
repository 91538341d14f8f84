"""StoreDraftPages over a real store: pages come back exactly or with a reason, and rows and leases
are all given back, whatever happens when."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import IntegrityError
from engine.speculation.draft_pages import Fetched, Pages, PagesRefused
from kvstore import block_hash
from process.settings import SettingsError
from services.worker.config import WorkerLimits
from services.worker.draft_pages import StoreDraftPages
from tests.harness.waiting import settled, until
from tests.unit.worker.staging_bench import WAIT_S, MakeConnector, StalledReads, StoreBench, gated

PAGE_BYTES = 1000
NUM_TOKENS = 12
LIMITS = WorkerLimits(attach_budget_s=WAIT_S, transfer_budget_s=WAIT_S, put_budget_s=WAIT_S)
"""A transfer that is late on a busy machine is none that failed: tests count those."""


class Lot(StoreBench[StoreDraftPages]):
    """A store and pages over it."""

    @property
    def pages(self) -> StoreDraftPages:
        return self.user

    async def stored(self, num_pages: int) -> None:
        self.pages.put(keys_of(num_pages), b"", pages_of(num_pages), NUM_TOKENS)
        await until(lambda: not self.pages._puts)

    async def fetched(self, num_pages: int) -> Fetched:
        fetch = self.pages.get(keys_of(num_pages), NUM_TOKENS)
        await until(lambda: fetch.is_done)
        found = fetch.result()
        self.pages.drop(fetch)
        return found


@contextlib.asynccontextmanager
async def lot(
    tmp_path: Path, *, transport: str = "shm", num_rows: int = 8, num_frames: int = 32
) -> AsyncIterator[Lot]:
    def pages(make_connector: MakeConnector) -> StoreDraftPages:
        return StoreDraftPages(
            PAGE_BYTES, num_rows * PAGE_BYTES, LIMITS, make_connector=make_connector
        )

    made = Lot(tmp_path, num_frames)
    async with made.over_the_store(pages, LIMITS, transport=transport):
        yield made


def pages_of(num_pages: int, seed: int = 0) -> Pages:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_pages, PAGE_BYTES), dtype=np.uint8)


def keys_of(num_pages: int) -> list[bytes]:
    return [block_hash.draft_page("cd", NUM_TOKENS, bytes([i]) * 16) for i in range(num_pages)]


async def test_they_come_back_over_the_network_too(tmp_path: Path) -> None:
    async with lot(tmp_path, transport="grpc") as made:
        await made.stored(3)
        made.rows.memory.view[:] = 255
        found = await made.fetched(3)
        assert np.array_equal(found.pages, pages_of(3)) and not found.reason
        await made.check_empty()


async def test_bytes_that_changed_in_the_store_are_not_used(tmp_path: Path) -> None:
    async with lot(tmp_path) as made:
        await made.stored(3)
        frame = made.store.tree.find(keys_of(3)[1]).block.frame  # type: ignore[union-attr]
        made.node.slab.frames[frame, 0] ^= 1
        found = await made.fetched(3)
        assert np.array_equal(found.pages, pages_of(3)[:1]) and found.reason == "checksum"
        assert made.pages.counts.not_fetched == {"checksum": 2}
        assert made.pages.counts.num_fetched == 1
        await made.check_empty()


async def test_a_full_store_or_none_is_a_reason(tmp_path: Path) -> None:
    async with lot(tmp_path, num_rows=32, num_frames=3) as made:
        assert made.store.frames.num_slots < 16
        put = made.pages.put(keys_of(16), b"", pages_of(16), NUM_TOKENS)
        await until(lambda: not made.pages._puts)
        counts = made.pages.counts
        assert put.is_lost and counts.not_put == {"no_room": 16 - counts.num_put}
        await made.check_empty()
        await made.kill_store()
        assert (await made.fetched(2)).reason == "store_unavailable"
        put = made.pages.put(keys_of(2), b"", pages_of(2), NUM_TOKENS)
        await until(lambda: put.is_lost)
        assert counts.not_put["store_unavailable"] == 2
        made.pages.check_integrity([])
        assert made.rows.num_free == 32


async def test_puts_stand_back_for_fetches_and_take_half_of_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lot(tmp_path) as made:
        gate, puts = gated(made.client, "match", monkeypatch), []
        put_blocks = made.client.put_blocks

        async def put(*arguments: Any, **options: Any) -> Any:
            puts.append(arguments)
            return await put_blocks(*arguments, **options)

        monkeypatch.setattr(made.client, "put_blocks", put)
        fetch = made.pages.get(keys_of(2), NUM_TOKENS)
        await until(lambda: made.pages._num_moving == 1)
        made.pages.put(keys_of(2), b"", pages_of(2), NUM_TOKENS)
        made.pages.put(keys_of(4)[2:], keys_of(2)[1], pages_of(2, 1), NUM_TOKENS)
        with pytest.raises(PagesRefused):
            made.pages.put(keys_of(1), b"", pages_of(1), NUM_TOKENS)
        made.pages.check_integrity([fetch])
        await settled()
        assert made.rows.num_free == 2 and made.pages._putting is not None and not puts
        gate.set()
        await until(lambda: made.pages.counts.num_put == 4)
        made.pages.drop(fetch)
        await made.check_empty()


@pytest.mark.parametrize("num_stored", [3, 1, 0])
async def test_a_fetch_that_is_done_moves_nothing_any_more(num_stored: int, tmp_path: Path) -> None:
    """Whoever sees that it is done may drop it in the same turn of the loop and have its rows."""
    async with lot(tmp_path) as made:
        if num_stored:
            await made.stored(num_stored)
        fetch = made.pages.get(keys_of(3), NUM_TOKENS)
        async with asyncio.timeout(WAIT_S):
            while not fetch.is_done:
                await asyncio.sleep(0)
        assert made.rows.num_free == 8 - num_stored
        assert np.array_equal(fetch.result().pages, pages_of(3)[:num_stored])
        made.pages.drop(fetch)
        assert made.rows.num_free == 8
        await made.check_empty()


@pytest.mark.parametrize("how", ["timeout", "stop"])
async def test_rows_that_may_still_be_written_into_are_out_of_use_until_it_is_settled(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lot(tmp_path) as made:
        await made.stored(3)

        stalled = StalledReads(made.client, how, monkeypatch)
        fetch = made.pages.get(keys_of(3), NUM_TOKENS)
        if how == "stop":
            await until(stalled.has_begun.is_set)
            await made.pages.stop(timeout_s=1)
        await until(lambda: fetch.is_done)
        found = fetch.result()
        assert len(found.pages) == 0
        assert found.reason == ("deadline" if how == "timeout" else "stopped")
        assert made.pages.counts.not_fetched == {found.reason: 3}
        made.pages.check_integrity([fetch])
        made.pages.drop(fetch)
        made.pages.check_integrity([])
        assert (made.rows.num_quarantined, made.rows.num_free) == (3, 5)
        stalled.settled.set_result(None)
        await until(lambda: made.rows.num_free == 8)
        made.pages.check_integrity([])


async def test_a_put_that_is_under_way_at_the_stop_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lot(tmp_path) as made:
        gated(made.client, "put_blocks", monkeypatch)
        puts = [
            made.pages.put(keys_of(2), b"", pages_of(2), NUM_TOKENS),
            made.pages.put(keys_of(4)[2:], keys_of(2)[1], pages_of(2), NUM_TOKENS),
        ]
        await until(lambda: made.pages._putting is not None)
        await made.pages.stop(timeout_s=1)
        assert all(put.is_lost for put in puts)
        assert made.pages.counts.not_put == {"stopped": 4}
        made.pages.check_integrity([])
        assert made.rows.num_free == 8


async def test_a_mistake_of_our_own_keeps_no_rows_of_the_puts_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with lot(tmp_path) as made:
        with monkeypatch.context() as patched:

            async def fails(*_: Any, **__: Any) -> Any:
                raise RuntimeError("a mistake")

            patched.setattr(made.client, "put_blocks", fails)
            puts = [
                made.pages.put(keys_of(2), b"", pages_of(2), NUM_TOKENS),
                made.pages.put(keys_of(4)[2:], keys_of(2)[1], pages_of(2), NUM_TOKENS),
            ]
            await until(lambda: made.rows.num_free == 8)
        assert all(put.is_lost for put in puts)
        assert made.pages.counts.not_put == {"failed": 4}

        def told() -> list[logging.LogRecord]:
            return [each for each in caplog.records if each.message == "background_task_died"]

        await until(told)
        (record,) = told()
        assert record.exc_info is not None and "a mistake" in str(record.exc_info[1])
        made.pages.check_integrity([])
        await made.stored(2)  # the next one finds its way
        assert made.pages.counts.num_put == 2
        await made.check_empty()


async def test_a_row_that_nobody_has_is_found_out(tmp_path: Path) -> None:
    async with lot(tmp_path) as made:
        assert made.rows.take(1) is not None
        with pytest.raises(IntegrityError, match="of 8"):
            made.pages.check_integrity([])
        made.rows.give_back([0])
        await made.check_empty()


def test_a_bound_without_room_for_a_page_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match="draft_share_bytes"):
        StoreDraftPages(100, 99, LIMITS, make_connector=lambda memory: pytest.fail("too late"))
