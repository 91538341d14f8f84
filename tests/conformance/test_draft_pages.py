"""Pages of a draft model's KV: the fake that ships, and the real way to a store, do the same."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.errors import IntegrityError
from engine.speculation.draft_pages import DraftPages, Fetch, Fetched, Pages, PagesRefused
from engine.speculation.draft_pages_fake import FakeDraftPages
from kvstore import invariants, serve
from kvstore.config import KvStoreSettings
from services.worker.config import WorkerLimits
from services.worker.connector import StoreConnector
from services.worker.draft_pages import StoreDraftPages
from services.worker.store_target import StoreTarget
from tests.harness.waiting import until

PAGE_BYTES = 1000
NUM_TOKENS = 12
NUM_ROWS = 6
WAIT_S = 30.0


class Case:
    """One implementation, and what tests of it ask besides."""

    pages: DraftPages

    async def settle(self) -> None:
        """Until what was put is there, or is lost."""

    async def stop(self) -> None:
        """It takes nothing any more."""

    @property
    def num_taken(self) -> int:
        """Rows, or what the fake has for them."""
        return 0


class FakeCase(Case):
    def __init__(self) -> None:
        self.pages: FakeDraftPages = FakeDraftPages(PAGE_BYTES, NUM_ROWS)

    async def stop(self) -> None:
        self.pages.is_stopped = True

    @property
    def num_taken(self) -> int:
        return sum(get.num_asked for get in self.pages._gets)


class RealCase(Case):
    def __init__(self, address: str) -> None:
        nobody: Any = None  # no engine's thread: nothing of an engine is moved
        limits = WorkerLimits(attach_budget_s=WAIT_S, transfer_budget_s=WAIT_S, put_budget_s=WAIT_S)

        def connector(memory: Any) -> StoreConnector:
            target = StoreTarget(address, "w", b"i" * 16, "ab" * 32, memory, "shm")
            return StoreConnector(target, nobody, limits)

        self.pages: StoreDraftPages = StoreDraftPages(
            PAGE_BYTES, NUM_ROWS * PAGE_BYTES + 1, limits, make_connector=connector
        )

    async def settle(self) -> None:
        await until(lambda: not self.pages._puts)

    async def stop(self) -> None:
        await self.pages.stop(timeout_s=WAIT_S)

    @property
    def num_taken(self) -> int:
        return self.pages.staging.num_rows["taken"]


@pytest.fixture(params=["fake", "real"])
async def case(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    if request.param == "fake":
        yield FakeCase()
        return
    settings = KvStoreSettings(slab_dir=str(tmp_path), capacity_bytes=1 << 18, stop_timeout_s=0.0)
    async with contextlib.AsyncExitStack() as stack:
        store = await stack.enter_async_context(serve.running(settings))
        real = RealCase(store.address)
        assert await real.pages.start(wait_s=WAIT_S)
        stack.push_async_callback(real.stop)
        yield real
        await real.stop()
        await until(lambda: real.num_taken == 0)
        await until(lambda: len(store.node.store.leases) == 0)
        invariants.check(store.node.store)


def pages_of(num_pages: int, seed: int = 0) -> Pages:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (num_pages, PAGE_BYTES), dtype=np.uint8)


def keys_of(pages: DraftPages, num_pages: int, model: str = "cd" * 32) -> list[bytes]:
    return [pages.key(model, NUM_TOKENS, bytes([index]) * 16) for index in range(num_pages)]


async def put(case: Case, keys: Sequence[bytes], pages: Pages, parent: bytes = b"") -> bool:
    """Returns: they are there."""
    one = case.pages.put(keys, parent, pages, NUM_TOKENS)
    await case.settle()
    return not one.is_lost


async def come(case: Case, fetch: Fetch) -> Fetched:
    await until(lambda: fetch.is_done)
    return fetch.result()


async def get(case: Case, keys: Sequence[bytes], num_tokens: int = NUM_TOKENS) -> Fetched:
    """What comes of it; it is dropped."""
    fetch = case.pages.get(keys, num_tokens)
    case.pages.check_integrity([fetch])
    found = await come(case, fetch)
    kept = Fetched(found.pages.copy(), found.reason, found.seconds)
    case.pages.drop(fetch)
    case.pages.check_integrity([])
    return kept


async def test_what_was_put_comes_back_byte_for_byte(case: Case) -> None:
    keys, given = keys_of(case.pages, 3), pages_of(3)
    put_in = given.copy()
    one = case.pages.put(keys, b"", put_in, NUM_TOKENS)
    put_in[:] = 0  # they may change as soon as put returns
    await case.settle()
    assert not one.is_lost
    found = await get(case, keys)
    assert np.array_equal(found.pages, given) and found.reason == "" and found.seconds >= 0
    assert await put(case, keys_of(case.pages, 5)[3:], pages_of(2, 1), keys[2])
    found = await get(case, keys_of(case.pages, 5)[2:])
    assert np.array_equal(found.pages, [given[2], *pages_of(2, 1)])
    assert await put(case, keys, pages_of(3, 9))  # there already: not written
    assert np.array_equal((await get(case, keys)).pages, given)
    assert (case.pages.counts.num_put, case.pages.counts.num_fetched) == (5, 9)
    assert not case.pages.counts.not_put and not case.pages.counts.not_fetched
    assert case.num_taken == 0


async def test_only_leading_pages_come(case: Case) -> None:
    keys, given = keys_of(case.pages, 4), pages_of(2)
    assert (await get(case, keys)).reason == "missing"
    await put(case, keys[:2], given)
    found = await get(case, keys)
    assert np.array_equal(found.pages, given) and found.reason == "missing"
    found = await get(case, [keys[3], keys[0]])
    assert found.pages.shape == (0, PAGE_BYTES) and found.reason == "missing"
    assert case.pages.counts.not_fetched == {"missing": 4 + 2 + 2}


async def test_pages_of_another_size_do_not_come(case: Case) -> None:
    keys = keys_of(case.pages, 2)
    await put(case, keys, pages_of(2))
    found = await get(case, keys, NUM_TOKENS + 1)
    assert found.pages.shape == (0, PAGE_BYTES) and found.reason == "size"
    assert case.pages.counts.not_fetched == {"size": 2}
    with pytest.raises(IntegrityError, match="2 pages of 1000 bytes"):
        case.pages.put(keys, b"", pages_of(3), NUM_TOKENS)


async def test_a_page_follows_another_one_or_is_lost(case: Case) -> None:
    keys = keys_of(case.pages, 3)
    assert not await put(case, keys[1:2], pages_of(1), keys[0])
    assert case.pages.counts.not_put == {"missing": 1}
    assert await put(case, keys[:1], pages_of(1))
    assert await put(case, keys[1:2], pages_of(1), keys[0])
    assert not (await get(case, keys[:2])).reason


async def test_rows_bound_what_is_on_its_way(case: Case) -> None:
    pages = case.pages
    keys = keys_of(pages, 8)
    assert pages.max_get_pages == pages.num_free_get_pages == NUM_ROWS
    assert pages.num_free_put_pages == NUM_ROWS // 2
    with pytest.raises(PagesRefused) as refused:
        pages.put(keys[:4], b"", pages_of(4), NUM_TOKENS)
    assert refused.value.reason == "no_rows"
    await put(case, keys[:3], pages_of(3))
    await put(case, keys[3:6], pages_of(3, 1), keys[2])
    await put(case, keys[6:], pages_of(2, 2), keys[5])
    first = pages.get(keys[:2], NUM_TOKENS)
    assert (pages.num_free_get_pages, pages.num_free_put_pages) == (NUM_ROWS - 2, NUM_ROWS // 2)
    second = pages.get(keys, NUM_TOKENS)
    assert (first.num_asked, second.num_asked) == (2, NUM_ROWS - 2)
    assert (pages.num_free_get_pages, pages.num_free_put_pages) == (0, 0)
    with pytest.raises(PagesRefused) as refused:
        pages.put(keys[:1], b"", pages_of(1), NUM_TOKENS)
    assert refused.value.reason == "no_rows"
    with pytest.raises(PagesRefused) as refused:
        pages.get(keys, NUM_TOKENS)
    assert refused.value.reason == "no_rows"
    pages.check_integrity([first, second])
    assert np.array_equal((await come(case, second)).pages[:3], pages_of(3))
    pages.drop(second)
    third = pages.get(keys[4:], NUM_TOKENS)
    assert third.num_asked == 4
    found = (await come(case, third)).pages
    assert np.array_equal(found, [*pages_of(3, 1)[1:], *pages_of(2, 2)])
    assert np.array_equal((await come(case, first)).pages, pages_of(3)[:2])
    for fetch in (first, third):
        pages.drop(fetch)
    pages.check_integrity([])
    assert case.num_taken == 0


async def test_what_is_not_wanted_any_more_leaves_nothing(case: Case) -> None:
    keys = keys_of(case.pages, 3)
    await put(case, keys, pages_of(3))
    fetch = case.pages.get(keys, NUM_TOKENS)
    case.pages.drop(fetch)
    case.pages.drop(fetch)
    case.pages.check_integrity([])
    await until(lambda: case.num_taken == 0)
    assert np.array_equal((await get(case, keys)).pages, pages_of(3))


async def test_keys_bind_model_size_and_text(case: Case) -> None:
    """A page of another draft model, or another number of tokens, is never found."""
    key = case.pages.key
    keys = {
        key(model, num_tokens, text)
        for model in ("cd" * 32, "ce" * 32)
        for num_tokens in (12, 13)
        for text in (b"a" * 16, b"b" * 16)
    }
    assert len(keys) == 8 and {len(each) for each in keys} == {16}
    await put(case, keys_of(case.pages, 2), pages_of(2))
    found = await get(case, keys_of(case.pages, 2, model="ce" * 32))
    assert len(found.pages) == 0 and found.reason == "missing"


async def test_after_the_stop_everything_is_refused(case: Case) -> None:
    keys = keys_of(case.pages, 2)
    await put(case, keys, pages_of(2))
    fetch = case.pages.get(keys, NUM_TOKENS)
    await come(case, fetch)
    await case.stop()
    for ask in (
        lambda: case.pages.get(keys, NUM_TOKENS),
        lambda: case.pages.put(keys, b"", pages_of(2), NUM_TOKENS),
    ):
        with pytest.raises(PagesRefused) as refused:
            ask()
        assert refused.value.reason == "stopped"
    assert (case.pages.num_free_get_pages, case.pages.num_free_put_pages) == (0, 0)
    assert np.array_equal(fetch.result().pages, pages_of(2))  # it is here
    case.pages.drop(fetch)
    case.pages.check_integrity([])


async def test_the_law_is_checked(case: Case) -> None:
    fetch = case.pages.get(keys_of(case.pages, 2), NUM_TOKENS)
    with pytest.raises(IntegrityError, match="1 fetches are kept, not 0"):
        case.pages.check_integrity([])
    await come(case, fetch)
    case.pages.drop(fetch)
    with pytest.raises(IntegrityError, match="0 fetches are kept, not 1"):
        case.pages.check_integrity([fetch])
