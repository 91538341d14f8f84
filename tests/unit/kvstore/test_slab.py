"""The slab's file: sized honestly, found by workers, removed after its store's death, and the locks
that say who lives."""

from __future__ import annotations

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
    SUFFIX,
    Slab,
    SlabLayout,
    check_room,
    default_capacity_bytes,
    remove_stale,
)
from process.errors import FailedPrecondition, NoCapacity

LIFE = b"i" * 16
ATTACHMENT = "ab" * 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def _create(folder: Path, life: bytes = LIFE) -> Slab:
    return Slab.create(folder, "node", life, SlabLayout(frame_bytes=5000, num_frames=7))


def test_frames_lie_on_pages_and_do_not_overlap(folder: Path) -> None:
    slab = _create(folder)
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


def test_a_worker_sees_what_the_store_writes_and_the_reverse(folder: Path) -> None:
    store = _create(folder)
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


def test_touching_changes_nothing(folder: Path) -> None:
    slab = _create(folder)
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


def test_too_little_room_names_the_settings(folder: Path) -> None:
    with pytest.raises(NoCapacity, match=r"slab_dir.*capacity_bytes"):
        check_room(folder, 2**60)
    with pytest.raises(NoCapacity, match="slab_dir"):
        check_room(folder / "absent", 1)
    with pytest.raises(NoCapacity, match="capacity_bytes"):
        Slab.create(folder, "node", LIFE, SlabLayout(frame_bytes=2**50, num_frames=64))
    assert not list(folder.iterdir())


def test_a_worker_elsewhere_gets_a_clear_error(folder: Path) -> None:
    with pytest.raises(FailedPrecondition, match="on the store's host"):
        Slab.open(folder / "absent", LIFE)
    store = _create(folder)
    with pytest.raises(FailedPrecondition, match="another start"):
        Slab.open(store.path, b"j" * 16)
    other = folder / f"x{SUFFIX}"
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


def test_files_of_dead_stores_are_removed_and_of_living_ones_kept(folder: Path) -> None:
    living = _create(folder)
    script = (
        "import sys, os; from pathlib import Path; from kvstore.slab import *;"
        f"Slab.create(Path({str(folder)!r}), 'dead', b'd'*16, SlabLayout(4096, 2)); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", script], check=False, timeout=30)
    dead = next(path for path in folder.iterdir() if path.name.startswith("dead"))
    assert remove_stale(folder) == [dead]
    assert remove_stale(folder) == []
    assert living.path.exists()
    living.unlink()
    assert not living.path.exists()
    living.block(0)[:] = 1  # the memory stays
    living.close()


def test_the_lock_of_a_worker_ends_with_its_process(folder: Path) -> None:
    store = _create(folder)
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
