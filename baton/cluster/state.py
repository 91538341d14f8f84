"""Which local clusters of this user run, and the folders that they own.

So that `baton generate` finds a cluster without being told where, one small JSON file per running
cluster lies under XDG_RUNTIME_DIR/baton or ~/.cache/baton, or, where that cannot be written, under
a folder of this user's in the temporary folder; named by the owner's process id. A file whose owner
is gone is stale: it is ignored and removed.

A cluster owns a folder for its socket and logs, one in memory for its store's slab, and, where its
stores have a file tier, one on disk for that. Each carries the owner's process id and start time in
a file; a folder whose owner is gone is removed by the next cluster that starts. Blocking; any
thread.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from baton.errors import ClusterError
from process.secret_files import replace_file


@dataclass(frozen=True)
class ClusterState:
    """A cluster that some `baton up` owns."""

    address: str
    model: str
    owner: str
    """As `owner_of` says it."""
    started_s: float
    """Wall clock, to find the youngest."""
    redis_url: str = field(default="", repr=False)
    """Where its prefix index lies, for audits."""
    tls_dir: str = ""
    """Folder with its set of certificates; empty: no TLS."""
    api_key: str = field(default="", repr=False)
    """An admin's; empty: it asks for none."""
    api_keys_file: str = ""
    """Where `baton api-key` puts more of them."""
    autoscaler_address: str = ""
    """Where its autoscaler answers; empty: it has none."""
    http_address: str = ""
    """Of the router's HTTP API; empty: it has none."""
    chosen_name: str = ""
    """By its owner; empty: none was."""

    @property
    def name(self) -> str:
        """By which commands choose it: its own, or the router's port."""
        return self.chosen_name or self.address.rpartition(":")[2]


def announce(
    address: str,
    model: str,
    redis_url: str = "",
    *,
    tls_dir: str = "",
    api_key: str = "",
    api_keys_file: str = "",
    autoscaler_address: str = "",
    http_address: str = "",
    name: str = "",
) -> Path:
    """Write this process's cluster down. Returns: the file, to be removed at the end.

    Raises: ClusterError when there is no place for it.
    """
    state = ClusterState(
        address,
        model,
        owner_of(os.getpid()),
        time.time(),
        redis_url,
        tls_dir=tls_dir,
        api_key=api_key,
        api_keys_file=api_keys_file,
        autoscaler_address=autoscaler_address,
        http_address=http_address,
        chosen_name=name,
    )
    home = _folder()
    if home is not None:
        # A read-only home, or one of somebody else's: the temporary folder serves as well.
        with contextlib.suppress(OSError):
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            return _write(home, state)
    folder = _temporary_folder()
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        if not _is_ours_alone(folder):
            raise ClusterError(
                f"{folder} is not a folder of yours alone: remove it, or let XDG_RUNTIME_DIR or "
                "TMPDIR name another place"
            )
        return _write(folder, state)
    except OSError as error:
        raise ClusterError(f"no place to announce the cluster: {error}") from error


def _write(folder: Path, state: ClusterState) -> Path:
    path = folder / f"{os.getpid()}.json"
    # For this user alone: it holds secrets, such as Redis's password and an API key.
    replace_file(path, json.dumps(dataclasses.asdict(state)), mode=0o600)
    return path


def find(address: str = "", name: str = "") -> ClusterState | None:
    """The youngest running cluster of this user, if any.

    Args: address: host:port that one of its parts for clients listens on; empty: of any cluster.
        name: its own; empty: any.
    """
    found = [
        state
        for state in running()
        if (not address or _listens_on(state, address)) and (not name or state.name == name)
    ]
    return found[-1] if found else None


def running() -> list[ClusterState]:
    """All running clusters of this user, the youngest last."""
    alive = []
    for path in _announcements():
        try:
            state = ClusterState(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if is_alive(state.owner):
            alive.append(state)
        else:
            with contextlib.suppress(OSError):  # it stays ignored
                path.unlink(missing_ok=True)
    return sorted(alive, key=lambda state: state.started_s)


def _listens_on(state: ClusterState, address: str) -> bool:
    wanted = address.replace("localhost:", "127.0.0.1:")
    return wanted in (state.address, state.http_address, state.autoscaler_address)


def _announcements() -> list[Path]:
    home, temporary = _folder(), _temporary_folder()
    folders = [] if home is None else [home]
    if _is_ours_alone(temporary):
        folders.append(temporary)
    return [path for folder in folders for path in sorted(folder.glob("*.json"))]


def _folder() -> Path | None:
    """Where announcements belong; None for a user without a home."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "baton"
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        return None
    return cache / "baton" / "clusters"


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def _is_ours_alone(folder: Path) -> bool:
    """Others can write in the temporary folder: what is found there may be theirs, or a link."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.getuid()
        and stat.S_IMODE(found.st_mode) & 0o077 == 0
    )


_PREFIX = "baton-cluster-"
_OWNER = "owner"
# A Unix socket's path has at most 107 bytes; ours adds a short name to the folder's.
_MAX_FOLDER_BYTES = 80
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class RunFolder:
    """Folders of one life of one cluster, readable by their owner only."""

    path: Path
    memory: Path
    disk: Path | None = None
    """In the folder that the user chose; None: nothing lies on disk."""

    @classmethod
    def make(cls, disk_base: str = "", shared_memory: Path = SHARED_MEMORY) -> RunFolder:
        """New, empty folders; those of dead owners go first.

        Args: disk_base: where `disk` is made; empty: there is none. shared_memory: where `memory`
            is made, if it is there.
        """
        base = Path(tempfile.gettempdir())
        if len(os.fsencode(base)) > _MAX_FOLDER_BYTES - 40:
            base = Path("/tmp")
        memory_base = shared_memory if shared_memory.is_dir() else base
        disk = Path(disk_base).resolve() if disk_base else None
        for folder in {base, memory_base, disk or base}:
            _remove_dead(folder)
        made = cls(_new(base), _new(memory_base))
        try:
            return cls(made.path, made.memory, None if disk is None else _new(disk))
        except OSError:
            made.remove()
            raise

    def remove(self) -> None:
        """All folders and what is in them. Idempotent."""
        for folder in (self.path, self.memory, self.disk):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def owner_of(pid: int) -> str:
    """A process's identity, safe against the reuse of its id: "pid start-time"; empty if gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # Field 22; fields are counted after the command's name, which may hold spaces.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return ""
    return f"{pid} {fields[19]}"


def is_alive(owner: str) -> bool:
    """Whether the process of that identity still runs."""
    pid = owner.partition(" ")[0]
    return pid.isdecimal() and owner_of(int(pid)) == owner


def _new(base: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    (folder / _OWNER).write_text(owner_of(os.getpid()), encoding="utf-8")
    return folder


def _remove_dead(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        # Another user's folder, or one that is being made or removed this moment: not ours.
        with contextlib.suppress(OSError):
            owner = (folder / _OWNER).read_text(encoding="utf-8")
            if folder.stat().st_uid == os.getuid() and owner and not is_alive(owner):
                shutil.rmtree(folder, ignore_errors=True)
