"""Folders and announcements of clusters that died are found out and removed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.cluster import running_clusters as cluster_state
from baton.cluster.running_clusters import ClusterState, RunFolder, is_alive, owner_of
from baton.errors import ClusterError


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder with a name that is short enough for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp") as name:
        folder = Path(name)
        (folder / "memory").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", name)
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield folder


def _dead_owner() -> str:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    owner = owner_of(child.pid)
    assert is_alive(owner)
    child.communicate(b"\n")
    return owner


def test_owner_is_a_life_and_not_only_a_number() -> None:
    owner = owner_of(os.getpid())
    assert is_alive(owner)
    pid, start = owner.split()
    assert not is_alive(f"{pid} {int(start) + 1}")
    assert not is_alive("") and not is_alive("x y")
    assert not is_alive(_dead_owner())


def test_made_and_removed(places: Path) -> None:
    folder = RunFolder.make(shared_memory=places / "memory")
    assert folder.path.parent == places and folder.memory.parent == places / "memory"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert not folder.path.exists() and not folder.memory.exists()


def test_a_dead_clusters_folders_go_with_the_next_start(places: Path) -> None:
    memory = places / "memory"
    dead, alive = (RunFolder.make(shared_memory=memory) for _ in range(2))
    owner = _dead_owner()
    for path in (dead.path, dead.memory):
        (path / "owner").write_text(owner)
    (dead.memory / "slab").write_bytes(bytes(10))
    RunFolder.make(shared_memory=memory)
    assert not dead.path.exists() and not dead.memory.exists()
    assert alive.path.exists() and alive.memory.exists()


def test_a_socket_path_always_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 100)))
    folder = RunFolder.make()
    try:
        assert len(str(folder.path / "redis.sock")) <= 107
    finally:
        folder.remove()


def test_the_youngest_running_cluster_is_found(places: Path) -> None:
    assert cluster_state.find() is None
    path = cluster_state.announce(ClusterState("127.0.0.1:1", "m"))
    found = cluster_state.find()
    assert found is not None and found.address == "127.0.0.1:1"
    path.unlink()
    assert cluster_state.find() is None


def test_stale_and_broken_announcements_are_ignored(places: Path) -> None:
    path = cluster_state.announce(ClusterState("127.0.0.1:1", "m"))
    text = path.read_text()
    stale = path.with_name("1.json")
    stale.write_text(text.replace(owner_of(os.getpid()), _dead_owner()))
    path.with_name("2.json").write_text("{")
    path.unlink()
    assert cluster_state.find() is None
    assert not stale.exists()


def test_without_a_runtime_folder_the_cache_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = cluster_state.announce(ClusterState("127.0.0.1:1", "m"))
    assert path.is_relative_to(tmp_path / "baton")
    path.unlink()


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user whose home cannot be written. Returns: where the fallback lies."""
    (tmp_path / "file").touch()  # no folder can be made below it, not even by root
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"baton-{os.getuid()}"


def test_without_a_home_the_temporary_folder_is_used(no_home: Path) -> None:
    assert cluster_state.find() is None
    path = cluster_state.announce(ClusterState("127.0.0.1:1", "m"))
    assert path.parent == no_home and no_home.stat().st_mode & 0o777 == 0o700
    found = cluster_state.find()
    assert found is not None and found.address == "127.0.0.1:1"
    assert cluster_state.announce(ClusterState("127.0.0.1:1", "m")) == path


def test_a_refused_mkdir_is_no_traceback(no_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mkdir = Path.mkdir

    def refused(
        path: Path, mode: int = 0o777, parents: bool = False, exist_ok: bool = False
    ) -> None:
        if path != no_home:
            raise PermissionError(13, "Permission denied", str(path))
        mkdir(path, mode, parents, exist_ok)

    monkeypatch.setattr(Path, "mkdir", refused)
    assert cluster_state.announce(ClusterState("127.0.0.1:1", "m")).parent == no_home


@pytest.mark.parametrize("kind", ["open to others", "link"])
def test_a_temporary_folder_that_may_be_somebody_elses_is_not_trusted(
    no_home: Path, kind: str
) -> None:
    path = cluster_state.announce(ClusterState("127.0.0.1:1", "m"))
    if kind == "link":
        path.parent.rename(no_home.with_name("real"))
        no_home.symlink_to("real")
    else:
        no_home.chmod(0o777)
    assert cluster_state.find() is None
    with pytest.raises(ClusterError, match="not a folder of yours alone"):
        cluster_state.announce(ClusterState("127.0.0.1:1", "m"))


def test_what_lies_on_disk_is_each_clusters_own_and_goes_with_it(
    places: Path, tmp_path: Path
) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    folders = [RunFolder.make(str(disk)) for _ in range(2)]
    own = [folder.disk for folder in folders]
    assert None not in own and len(set(own)) == 2
    for path in own:
        assert path is not None and path.parent == disk
        (path / "store.baton-pages").touch()
    folders[0].remove()
    (folders[1].disk / "owner").write_text(_dead_owner())  # type: ignore[operator]
    last = RunFolder.make(str(disk))  # after kill -9
    assert list(disk.iterdir()) == [last.disk]
    last.remove()
    assert not list(disk.iterdir())
