"""A store whose slab lies on real huge pages. Mounts some of its own, where it may; elsewhere these
tests are skipped by name. The host's own huge pages stay, whatever the kernel grants: on a file of
our own."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import pytest

from kvstore import store_process
from kvstore.config import KvStoreSettings
from kvstore.slab import Slab, SlabLayout, check_room, remove_stale
from kvstore.store_status import StoreMetrics
from process.rpc_errors import NoCapacity
from tests.harness.huge_pool import HugePool
from tests.harness.store import NewWorker, chain_of

HUGE = 2 * 1024 * 1024
NUM_PAGES = 24
LIFE = b"i" * 16


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A mount of NUM_PAGES huge pages that are ours: others cannot take them meanwhile."""
    folder = tmp_path_factory.mktemp("huge")
    pool = HugePool()
    try:
        num_made = pool.grow(NUM_PAGES)
    except OSError as error:
        pytest.skip(f"no huge pages may be made here ({error.strerror}); NOT tested")
    try:
        if num_made < NUM_PAGES:
            pytest.skip(f"of {NUM_PAGES} huge pages {num_made} could be made here; NOT tested")
        size = NUM_PAGES * HUGE
        options = f"pagesize=2M,size={size},min_size={size}"
        made = subprocess.run(
            ["mount", "-t", "hugetlbfs", "-o", options, "none", str(folder)],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        if made.returncode:
            pytest.skip(f"huge pages cannot be mounted here ({made.stderr.strip()}); NOT tested")
        try:
            yield folder
        finally:
            # Lazily: what is mapped in this process stays so until it ends.
            subprocess.run(["umount", "-l", str(folder)], timeout=30, check=True)
    finally:
        pool.shrink(num_made)


@pytest.fixture
def folder(mounted: Path) -> Iterator[Path]:
    yield mounted
    assert not list(mounted.iterdir())


def test_a_slab_is_whole_pages_that_are_there(folder: Path) -> None:
    check_room(folder, 2 * HUGE)
    layout = SlabLayout.fitting(2 * HUGE, 5000, HUGE)
    store = Slab.create(folder, "node", LIFE, layout)
    assert (store.page_bytes, store.num_bytes) == (HUGE, 2 * HUGE)
    assert store.path.stat().st_size == 2 * HUGE == store.path.stat().st_blocks * 512
    worker = Slab.open(store.path, LIFE)
    worker.lock_byte("ab" * 16)
    assert store.is_locked("ab" * 16)
    worker.touch(0, layout.num_frames)
    worker.frames[:] = 7
    store.publish(3, 42)
    assert worker.generations[3] == 42
    assert int(store.block(layout.num_frames - 1).sum()) == 7 * 5000
    assert remove_stale(folder) == []  # its store lives
    worker.close()
    assert not store.is_locked("ab" * 16)
    store.close()
    assert remove_stale(folder) == [store.path]


def test_too_few_pages_end_nobody(folder: Path) -> None:
    """What must not be is SIGBUS: so in a process of its own, which ends by itself."""
    with pytest.raises(NoCapacity, match="huge pages"):
        check_room(folder, (NUM_PAGES + 1) * HUGE)
    script = (
        "import sys; from pathlib import Path; from kvstore.slab import *\n"
        f"layout = SlabLayout({HUGE}, {NUM_PAGES})\n"  # and the header: one page too much
        f"Slab.create(Path({str(folder)!r}), 'node', {LIFE!r}, layout).frames[:] = 1\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert "NoCapacity: slab_dir: " in ended.stderr.splitlines()[-1]
    # What it had taken until then is back; a few may be mapped by other tests' stores still.
    layout = SlabLayout.fitting(NUM_PAGES // 2 * HUGE, 5000, HUGE)
    half = Slab.create(folder, "node", LIFE, layout)
    half.frames[:] = 1
    half.unlink()
    half.close()


async def test_a_store_without_pages_does_not_start(
    folder: Path, store_settings: KvStoreSettings
) -> None:
    settings = dataclasses.replace(
        store_settings, slab_dir=str(folder), capacity_bytes=(NUM_PAGES + 1) * HUGE
    )
    with pytest.raises(NoCapacity, match="huge pages"):
        async with store_process.running(settings):
            raise AssertionError("it started")


@pytest.mark.parametrize("transport", ["shm", "nixl", "grpc"])
async def test_blocks_travel_through_them(
    folder: Path, store_settings: KvStoreSettings, new_worker: NewWorker, transport: str
) -> None:
    settings = dataclasses.replace(
        store_settings, slab_dir=str(folder), capacity_bytes=HUGE + HUGE // 2
    )
    async with store_process.running(settings) as store:
        one, two = [await new_worker(store.address, transport) for _ in range(2)]
        slab = store.node.slab
        assert slab is not None and slab.num_bytes == 2 * HUGE
        put = await one.put(chain_of("a", 7), range(7))
        assert await two.get(put.lease_id, put.refs, range(20, 27)) == {}
        assert np.array_equal(two.view[20:27], one.view[:7])
        shown = {family.name: family for family in StoreMetrics(store.node, None).read()}
        assert shown["baton_store_slab_bytes"].samples[0].value == 2 * HUGE
        assert shown["baton_store_slab_page_bytes"].samples[0].value == HUGE
        (named,) = folder.iterdir()
        assert os.stat(named).st_size == 2 * HUGE
        await one.status()


_OWN = 5
"""Pages that the host has before any test asks."""


class _Kernel(HugePool):
    """Grants no more than it has room for, without an error."""

    def __init__(self, file: Path, most: int) -> None:
        super().__init__(file)
        file.write_text(f"{_OWN}\n")
        self._most = most

    def _write(self, pool: TextIO, num_pages: int) -> None:
        pool.truncate(0)
        super()._write(pool, min(num_pages, self._most))


@pytest.mark.parametrize(("most", "num_given"), [(100, 24), (17, 12), (_OWN, 0), (3, 0)])
def test_only_what_was_given_is_given_back(tmp_path: Path, most: int, num_given: int) -> None:
    file = tmp_path / "nr_hugepages"
    pool = _Kernel(file, most)
    assert pool.grow(24) == num_given
    pool.shrink(num_given)
    assert int(file.read_text()) == min(_OWN, most)


def test_two_at_once_each_give_back_their_own(tmp_path: Path) -> None:
    file = tmp_path / "nr_hugepages"
    pool = _Kernel(file, 40)
    first, second = pool.grow(24), pool.grow(24)
    assert (first, second) == (24, 11)
    pool.shrink(first)
    pool.shrink(second)
    assert int(file.read_text()) == _OWN


def test_where_there_is_no_pool_that_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nr_hugepages"):
        HugePool(tmp_path / "nr_hugepages").grow(1)
