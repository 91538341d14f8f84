"""A slab on huge pages, as far as an ordinary folder can tell: what it takes, and what is said when
there is no room. tests/conformance/test_huge_pages.py has real ones."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import slab
from kvstore.slab import PAGE_BYTES, Slab, SlabLayout, check_room
from process.errors import NoCapacity

HUGE = 2 * 1024 * 1024
LIFE = b"i" * 16


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes itself for one of huge pages."""
    monkeypatch.setattr(slab, "page_bytes_of", lambda fd: HUGE)
    return tmp_path


def test_an_ordinary_folder_is_none(tmp_path: Path) -> None:
    assert slab.page_bytes_in(tmp_path) == PAGE_BYTES
    with pytest.raises(NoCapacity, match="slab_dir"):
        slab.page_bytes_in(tmp_path / "absent")
    with pytest.raises(OSError, match="descriptor"):
        slab.page_bytes_of(-1)


@given(
    capacity_bytes=st.integers(1, 1 << 36),
    frame_bytes=st.integers(1, 1 << 26),
    page_bytes=st.sampled_from([HUGE, 1 << 30]),
)
def test_all_of_it_goes_into_the_capacity_in_whole_pages(
    capacity_bytes: int, frame_bytes: int, page_bytes: int
) -> None:
    room = slab.round_up(capacity_bytes, page_bytes)
    assert 0 <= room - capacity_bytes < page_bytes and room % page_bytes == 0
    plain = capacity_bytes // SlabLayout(frame_bytes, 1).stride_bytes
    try:
        layout = SlabLayout.fitting(capacity_bytes, frame_bytes, page_bytes)
    except NoCapacity:
        # Even one would not go in; at most one is given up to spare us a search.
        assert plain == 0 or SlabLayout(frame_bytes, 2).total_bytes > room
        return
    assert layout.total_bytes <= room
    assert layout.num_frames <= plain
    more = SlabLayout(frame_bytes, layout.num_frames + 2)
    assert more.total_bytes > room or layout.num_frames + 2 > plain


def test_the_file_is_whole_pages_and_a_worker_finds_all_in_it(folder: Path) -> None:
    layout = SlabLayout(frame_bytes=5000, num_frames=300)
    store = Slab.create(folder, "node", LIFE, layout)
    assert (store.page_bytes, store.num_bytes) == (HUGE, 2 * HUGE)
    assert store.path.stat().st_size == 2 * HUGE > layout.total_bytes > HUGE
    assert store.frames.shape == (300, 8192)
    worker = Slab.open(store.path, LIFE)
    assert worker.layout == layout and worker.num_bytes == 2 * HUGE
    worker.block(299)[:] = 7
    assert int(store.block(299).sum()) == 7 * 5000
    worker.close()
    store.close()


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.ENOSPC])
def test_too_few_pages_are_one_line_at_the_start(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked = []

    def reserve(folder: Path, num_bytes: int) -> None:
        asked.append(num_bytes)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(slab, "_reserve", reserve)
    check_room(folder, 0)  # asks only whether the folder is there
    assert asked == []
    with pytest.raises(NoCapacity, match=r"slab_dir.*huge pages.*capacity_bytes.*nr_huge") as told:
        check_room(folder, HUGE + 1)
    assert asked == [2 * HUGE] and "\n" not in str(told.value)


def test_a_folder_that_is_not_ours_is_said_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve(folder: Path, num_bytes: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(slab, "_reserve", reserve)
    with pytest.raises(NoCapacity, match=r"slab_dir: .*: Permission denied$"):
        check_room(folder, HUGE)


def test_pages_that_went_since_the_start_are_named_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(NoCapacity, match="huge pages of 2097152"):
        Slab.create(folder, "node", LIFE, SlabLayout(5000, 7))
    assert not list(folder.iterdir())
