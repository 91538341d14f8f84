"""The file of a file tier, on a real file system: what verifies comes back, nothing else does."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvstore import block_hash
from kvstore.block_refs import StoredPage
from kvstore.page_file import HEADER_BYTES, PageFile, PageLayout
from process.rpc_errors import FailedPrecondition, NoCapacity

LAYOUT = PageLayout(5000, 6)


def _data(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(number).integers(0, 256, 5000, dtype=np.uint8)


def _page(index: int, tenant: str = "t") -> StoredPage:
    return StoredPage(
        index=index,
        chain_hash=bytes([index]) * 16,
        parent=bytes([index - 1]) * 16 if index else b"",
        checksum=block_hash.checksum(_data(index)),
        num_tokens=16,
        tenant=tenant,
        serial=100 + index,
    )


def _filled(path: Path) -> None:
    pages = PageFile.open(path, LAYOUT)
    assert pages.scan() == ([], 0)
    for index in range(4):
        pages.write(_page(index, "ä" * index), _data(index))
    pages.close()
    pages.close()  # twice is once


def _poke(path: Path, offset: int, number: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ (1 << number)]))


def test_what_was_written_is_found_by_the_next_life(tmp_path: Path) -> None:
    path = tmp_path / "a.baton-pages"
    _filled(path)
    assert path.stat().st_size == LAYOUT.total_bytes
    assert path.stat().st_blocks * 512 >= LAYOUT.total_bytes  # really taken
    assert path.stat().st_mode & 0o077 == 0  # nobody else reads tenants' KV
    pages = PageFile.open(path, LAYOUT)
    stored, num_torn = pages.scan()
    assert (stored, num_torn) == ([_page(i, "ä" * i) for i in range(4)], 0)
    into = np.zeros(5000, dtype=np.uint8)
    for page in stored:
        assert pages.read(page.index, page.checksum, into)
        assert np.array_equal(into, _data(page.index))
    assert not pages.read(5, stored[0].checksum, into)  # never written
    pages.close()


def test_every_flipped_bit_of_a_header_is_seen(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "a.baton-pages"
    _filled(path)
    draw = random.Random(seed)
    for _ in range(60):
        at = 4096 + 2 * HEADER_BYTES + draw.randrange(HEADER_BYTES)
        bit = draw.randrange(8)
        _poke(path, at, bit)
        pages = PageFile.open(path, LAYOUT)
        stored, num_torn = pages.scan()
        assert [page.index for page in stored] == [0, 1, 3] and num_torn == 1
        pages.close()
        _poke(path, at, bit)


def test_every_flipped_bit_of_a_page_is_seen(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "a.baton-pages"
    _filled(path)
    draw = random.Random(seed)
    pages = PageFile.open(path, LAYOUT)
    into = np.zeros(5000, dtype=np.uint8)
    for _ in range(60):
        at = LAYOUT.data_offset + 2 * LAYOUT.stride_bytes + draw.randrange(5000)
        bit = draw.randrange(8)
        _poke(path, at, bit)
        assert not pages.read(2, _page(2).checksum, into)
        _poke(path, at, bit)
        assert pages.read(2, _page(2).checksum, into)
    pages.close()


def test_a_header_in_another_pages_place_is_no_header(tmp_path: Path) -> None:
    path = tmp_path / "a.baton-pages"
    _filled(path)
    with path.open("r+b") as file:
        file.seek(4096)
        header = file.read(HEADER_BYTES)
        file.seek(4096 + 4 * HEADER_BYTES)
        file.write(header)
    pages = PageFile.open(path, LAYOUT)
    stored, num_torn = pages.scan()
    assert ([page.index for page in stored], num_torn) == ([0, 1, 2, 3], 1)
    pages.close()


@pytest.mark.parametrize("other", [PageLayout(5001, 6), PageLayout(5000, 7), PageLayout(64, 2)])
def test_another_layout_is_cleared_and_says_so(tmp_path: Path, other: PageLayout) -> None:
    path = tmp_path / "a.baton-pages"
    _filled(path)
    pages = PageFile.open(path, other)
    assert pages.scan() == ([], 0) and path.stat().st_size == other.total_bytes
    assert "6 pages of 5000 bytes" in pages.cleared
    pages.close()
    # Headers of the earlier file do not verify in the new one, even if they lay there still.
    PageFile.open(path, other).close()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda path: os.truncate(path, 20_000), "shorter"),
        (lambda path: _poke(path, 13, 3), "damaged"),
        (lambda path: _poke(path, 0, 0), "not a page file"),
        (lambda path: os.truncate(path, 10), "not a page file"),
    ],
)
def test_a_damaged_file_is_cleared_and_says_so(
    tmp_path: Path, spoil: Callable[[Path], None], why: str
) -> None:
    path = tmp_path / "a.baton-pages"
    _filled(path)
    spoil(path)
    pages = PageFile.open(path, LAYOUT)
    assert pages.scan() == ([], 0)
    assert why in pages.cleared
    pages.close()


def test_a_file_that_became_shorter_loses_pages_not_the_process(tmp_path: Path) -> None:
    path = tmp_path / "a.baton-pages"
    _filled(path)
    pages = PageFile.open(path, LAYOUT)
    os.truncate(path, LAYOUT.data_offset + LAYOUT.stride_bytes)
    into = np.zeros(5000, dtype=np.uint8)
    assert pages.read(0, _page(0).checksum, into)
    assert not pages.read(1, _page(1).checksum, into)
    pages.close()
    assert not pages.read(0, _page(0).checksum, into)  # a descriptor that is gone, too


def test_two_stores_never_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.baton-pages"
    pages = PageFile.open(path, LAYOUT)
    with pytest.raises(FailedPrecondition, match="node_id"):
        PageFile.open(path, LAYOUT, lock_wait_s=0.0)
    pages.close()
    PageFile.open(path, LAYOUT).close()


def test_no_room_is_refused_by_the_settings_name(tmp_path: Path) -> None:
    with pytest.raises(NoCapacity, match="file_tier_bytes"):
        PageLayout.fitting(8192, 5000)
    free = os.statvfs(tmp_path)
    capacity_bytes = 2 * free.f_blocks * free.f_frsize
    layout = PageLayout.fitting(capacity_bytes, 1 << 30)
    assert layout.total_bytes <= capacity_bytes
    path = tmp_path / "a.baton-pages"
    with pytest.raises(NoCapacity, match="file_tier_dir"):
        PageFile.open(path, layout)
    assert path.stat().st_size == 0  # nothing stays taken


def test_a_file_is_not_cleared_for_one_that_has_no_room(tmp_path: Path) -> None:
    """A wrong setting, put right again, costs nothing; a larger file may use the old one's room."""
    path = tmp_path / "a.baton-pages"
    _filled(path)
    with pytest.raises(NoCapacity, match="file_tier_bytes"):
        PageFile.open(path, PageLayout(5000, 1 << 40))
    pages = PageFile.open(path, LAYOUT)
    assert len(pages.scan()[0]) == 4
    pages.close()


def test_as_many_pages_as_fit(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(200):
        block_bytes = draw.randrange(1, 100_000)
        capacity_bytes = draw.randrange(200_000, 10_000_000)
        layout = PageLayout.fitting(capacity_bytes, block_bytes)
        assert layout.total_bytes <= capacity_bytes
        more = PageLayout(block_bytes, layout.num_pages + 2)
        assert more.total_bytes > capacity_bytes
