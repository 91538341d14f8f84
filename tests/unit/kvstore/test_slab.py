"""The slab's file: sized honestly, found by workers, removed after its store's death; its locks say
who lives. Huge pages as far as an ordinary folder can tell: what they take, and what is said
when there is no room. tests/conformance/test_huge_pages.py has real ones."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import slab as slab_module
from kvstore.slab import (
    MIN_FRAMES,
    PAGE_BYTES,
    SUFFIX,
    Slab,
    SlabLayout,
    check_room,
    default_capacity_bytes,
    remove_stale,
)
from process.rpc_errors import FailedPrecondition, NoCapacity

LIFE = b"i" * 16
ATTACHMENT = "ab" * 16


def _create(tmp_path: Path, life: bytes = LIFE) -> Slab:
    return Slab.create(tmp_path, "node", life, SlabLayout(frame_bytes=5000, num_frames=7))


def test_frames_lie_on_pages_and_do_not_overlap(tmp_path: Path) -> None:
    slab = _create(tmp_path)
    layout = slab.layout
    assert layout.frames_offset % 4096 == 0 and layout.stride_bytes % 4096 == 0
    assert slab.frames_address % 4096 == 0
    for frame in range(7):
        slab.block(frame)[:] = frame + 1
        slab.publish(frame, 2 * frame)
    assert [int(slab.block(frame).sum()) for frame in range(7)] == [
        5000 * (frame + 1) for frame in range(7)
    ]
    assert slab.path.stat().st_size == layout.total_bytes
    slab.close()


def test_a_worker_sees_what_the_store_writes_and_the_reverse(tmp_path: Path) -> None:
    store = _create(tmp_path)
    worker = Slab.open(store.path, LIFE)
    assert worker.layout == store.layout
    store.block(3)[:] = 7
    store.publish(3, 42)
    worker.block(4)[:] = 9
    assert worker.generations[3] == 42
    assert np.array_equal(worker.block(3), store.block(3))
    assert int(store.block(4).sum()) == 9 * 5000
    worker.close()
    store.close()


def test_touching_changes_nothing(tmp_path: Path) -> None:
    slab = _create(tmp_path)
    slab.block(2)[:] = 7
    slab.touch(0, 7)
    slab.touch(3, 3)
    assert int(slab.frames.sum()) == 7 * 5000
    slab.close()


def test_the_capacity_says_how_many_frames_there_are() -> None:
    assert SlabLayout.fitting(10 * 8192, 5000).num_frames == 10
    with pytest.raises(NoCapacity, match="capacity_bytes"):
        SlabLayout.fitting(4096, 5000)


GIB = 1 << 30


@pytest.mark.parametrize(
    ("frame_bytes", "memory", "folder", "expected"),
    [
        (65536, 20 * GIB, 10 * GIB, 2 * GIB),  # a tenth of the memory
        (2 << 20, 16 * GIB, 8 * GIB, 2 * GIB),  # 1,024 blocks
        (2 << 20, 3 * GIB, 8 * GIB, 3 * GIB // 2),  # half of the memory
        (65536, 20 * GIB, 64 << 20, 32 << 20),  # half of the folder
        (2 << 20, 2000 * GIB, 1000 * GIB, 8 * GIB),  # no more by itself
        (64 << 20, 2000 * GIB, 1000 * GIB, 64 * GIB),  # but for 1,024 blocks
        (4096, 2000 * GIB, 1000 * GIB, GIB // 2),  # nor more than 131,072 blocks
        (100, 20 << 20, 1 << 20, 1 << 19),
    ],
)
def test_a_store_without_a_size_takes_a_part_of_what_is_free(
    frame_bytes: int, memory: int, folder: int, expected: int
) -> None:
    free = {"free_memory_bytes": memory, "free_folder_bytes": folder}
    assert default_capacity_bytes(frame_bytes, **free) == expected


@given(st.integers(1, 1 << 27), st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_a_store_without_a_size_never_takes_more_than_half(
    frame_bytes: int, memory: int, folder: int
) -> None:
    try:
        chosen = default_capacity_bytes(
            frame_bytes, free_memory_bytes=memory, free_folder_bytes=folder
        )
    except NoCapacity as error:
        assert f"({folder} bytes there, {memory} of memory)" in str(error)
        assert min(memory, folder) // 2 < MIN_FRAMES * SlabLayout(frame_bytes, 1).stride_bytes
        return
    assert chosen <= min(memory, folder) // 2
    assert SlabLayout.fitting(chosen, frame_bytes).num_frames >= MIN_FRAMES


def test_too_little_room_names_the_settings(tmp_path: Path) -> None:
    with pytest.raises(NoCapacity, match=r"slab_dir.*capacity_bytes"):
        check_room(tmp_path, 2**60)
    with pytest.raises(NoCapacity, match="slab_dir"):
        check_room(tmp_path / "absent", 1)
    with pytest.raises(NoCapacity, match="capacity_bytes"):
        Slab.create(tmp_path, "node", LIFE, SlabLayout(frame_bytes=2**50, num_frames=64))
    assert not list(tmp_path.iterdir())


def test_a_worker_elsewhere_gets_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FailedPrecondition, match="on the store's host"):
        Slab.open(tmp_path / "absent", LIFE)
    store = _create(tmp_path)
    with pytest.raises(FailedPrecondition, match="another start"):
        Slab.open(store.path, b"j" * 16)
    other = tmp_path / f"x{SUFFIX}"
    other.write_bytes(b"hello")
    with pytest.raises(FailedPrecondition, match="no slab"):
        Slab.open(other, LIFE)
    header = bytearray(store.path.read_bytes()[:4096])
    header[8] = 99  # the version
    other.write_bytes(header)
    with pytest.raises(FailedPrecondition, match="version 99"):
        Slab.open(other, LIFE)
    header[8] = slab_module.VERSION
    other.write_bytes(header)
    with pytest.raises(FailedPrecondition, match="shorter"):
        Slab.open(other, LIFE)
    store.close()


def test_files_of_dead_stores_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    living = _create(tmp_path)
    script = (
        "import sys, os; from pathlib import Path; from kvstore.slab import *;"
        f"Slab.create(Path({str(tmp_path)!r}), 'dead', b'd'*16, SlabLayout(4096, 2)); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=30)
    dead = next(path for path in tmp_path.iterdir() if path.name.startswith("dead"))
    assert remove_stale(tmp_path) == [dead]
    assert remove_stale(tmp_path) == []
    assert living.path.exists()
    living.unlink()
    assert not living.path.exists()
    living.block(0)[:] = 1  # the memory stays
    living.close()


def test_the_lock_of_a_worker_ends_with_its_process(tmp_path: Path) -> None:
    store = _create(tmp_path)
    script = (
        "import sys; from pathlib import Path; from kvstore.slab import Slab;"
        f"s = Slab.open(Path({str(store.path)!r}), {LIFE!r}); s.lock_byte({ATTACHMENT!r});"
        "print('locked', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"locked\n"
        assert store.is_locked(ATTACHMENT)
        assert not store.is_locked("cd" * 16)
        child.kill()
        child.wait(timeout=30)
        assert not store.is_locked(ATTACHMENT)
    finally:
        child.kill()
        child.communicate(timeout=30)
    worker = Slab.open(store.path, LIFE)
    worker.lock_byte(ATTACHMENT)
    assert store.is_locked(ATTACHMENT)
    worker.close()  # although the mapping is still there
    assert not store.is_locked(ATTACHMENT)
    store.close()


HUGE = 2 * 1024 * 1024


@pytest.fixture
def huge_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Takes itself for one of huge pages."""
    monkeypatch.setattr(slab_module, "page_bytes_of", lambda fd: HUGE)
    return tmp_path


def test_an_ordinary_folder_is_none(tmp_path: Path) -> None:
    assert slab_module.page_bytes_in(tmp_path) == PAGE_BYTES
    with pytest.raises(NoCapacity, match="slab_dir"):
        slab_module.page_bytes_in(tmp_path / "absent")
    with pytest.raises(OSError, match="descriptor"):
        slab_module.page_bytes_of(-1)


@given(
    capacity_bytes=st.integers(1, 1 << 36),
    frame_bytes=st.integers(1, 1 << 26),
    page_bytes=st.sampled_from([HUGE, 1 << 30]),
)
def test_all_of_it_goes_into_the_capacity_in_whole_pages(
    capacity_bytes: int, frame_bytes: int, page_bytes: int
) -> None:
    room = slab_module.round_up(capacity_bytes, page_bytes)
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


def test_the_file_is_whole_pages_and_a_worker_finds_all_in_it(huge_folder: Path) -> None:
    layout = SlabLayout(frame_bytes=5000, num_frames=300)
    store = Slab.create(huge_folder, "node", LIFE, layout)
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
    huge_folder: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    asked = []

    def reserve(folder: Path, num_bytes: int) -> None:
        asked.append(num_bytes)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(slab_module, "_reserve", reserve)
    check_room(huge_folder, 0)  # asks only whether the folder is there
    assert asked == []
    with pytest.raises(NoCapacity, match=r"slab_dir.*huge pages.*capacity_bytes.*nr_huge") as told:
        check_room(huge_folder, HUGE + 1)
    assert asked == [2 * HUGE] and "\n" not in str(told.value)


def test_a_folder_that_is_not_ours_is_said_so(
    huge_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reserve(folder: Path, num_bytes: int) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(slab_module, "_reserve", reserve)
    with pytest.raises(NoCapacity, match=r"slab_dir: .*: Permission denied$"):
        check_room(huge_folder, HUGE)


def test_pages_that_went_since_the_start_are_named_too(
    huge_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fallocate(fd: int, offset: int, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", fallocate)
    with pytest.raises(NoCapacity, match="huge pages of 2097152"):
        Slab.create(huge_folder, "node", LIFE, SlabLayout(5000, 7))
    assert not list(huge_folder.iterdir())
