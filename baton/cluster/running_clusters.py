"""The running clusters of this user, and the folders that they own.

Commands such as `baton generate` find a cluster by a small JSON file, which `baton up` writes while
it runs. The file is named by the process id of `baton up` and lies in XDG_RUNTIME_DIR/baton or
~/.cache/baton/clusters, or, where neither can be written, in a private folder of the temporary
folder. A file whose process has ended is ignored and removed.

A cluster owns a folder for its sockets and logs, one in shared memory for the slabs of its stores,
and one on disk where its stores have a file tier. Each has a file with the owner's process id and
start time; the next cluster that starts removes folders whose owner has ended. Blocking; any
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
    """A running cluster of this user, as its `baton up` describes it in a file for other
    commands."""

    address: str
    model: str
    owner: str = field(default_factory=lambda: owner_of(os.getpid()))
    """Identity of the process of `baton up`, by `owner_of`."""
    started_s: float = field(default_factory=time.time)
    """Time of the cluster's start (wall clock), by which commands find the last one started."""
    redis_url: str = field(default="", repr=False)
    """URL of the Redis with the cluster's prefix index."""
    tls_dir: str = ""
    """Folder of the cluster's certificates; empty: no TLS."""
    api_key: str = field(default="", repr=False)
    """API key of an admin; empty: the cluster needs none."""
    api_keys_file: str = ""
    """File to which `baton api-key` adds keys."""
    autoscaler_address: str = ""
    """Address of the autoscaler; empty: the cluster has none."""
    http_address: str = ""
    """Address of the HTTP API; empty: the cluster has none."""
    chosen_name: str = ""
    """The name given to `baton up --cluster`; empty: none."""

    @property
    def name(self) -> str:
        """The name for the option --cluster: the chosen one, or the router's port."""
        return self.chosen_name or self.address.rpartition(":")[2]


def announce(state: ClusterState) -> Path:
    """Write the file that describes this process's cluster. Returns: the file, to be removed at the
    end.

    Raises: ClusterError when it cannot be written.
    """
    home = _folder()
    if home is not None:
        # Where the home is read-only or another user's, use the temporary folder.
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
    # It has secrets: the password of Redis, an API key.
    replace_file(path, json.dumps(dataclasses.asdict(state)), mode=0o600)
    return path


def find(address: str = "") -> ClusterState | None:
    """Find the last started cluster of this user; None: none runs.

    Args: address: host:port of its gRPC API, HTTP API or autoscaler; empty: any cluster.
    """
    found = [state for state in running() if not address or _listens_on(state, address)]
    return found[-1] if found else None


def running() -> list[ClusterState]:
    """Find all running clusters of this user, the last started last."""
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
    """The folder of these files; None for a user without a home."""
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
    """Whether the path is a private folder of this user. In the temporary folder it may be another
    user's, or a link."""
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
    """The folders of a cluster, which only their owner may read."""

    path: Path
    memory: Path
    disk: Path | None = None
    """Folder for file tiers, in the folder that the user chose; None: no file tier."""

    @classmethod
    def make(cls, disk_base: str = "", shared_memory: Path = SHARED_MEMORY) -> RunFolder:
        """Make new, empty folders, and remove those whose owners have ended.

        Args: disk_base: parent of `disk`; empty: no `disk`. shared_memory: parent of `memory`, if
        it
            exists.
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
        """Remove all folders with their content. A second call does nothing."""
        for folder in (self.path, self.memory, self.disk):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)


def owner_of(pid: int) -> str:
    """The identity of a process as "pid start-time", since ids are reused; empty if it has
    ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    # The start time is field 22. The command's name before may hold spaces.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return ""
    return f"{pid} {fields[19]}"


def is_alive(owner: str) -> bool:
    """Whether the process of this identity runs."""
    pid = owner.partition(" ")[0]
    return pid.isdecimal() and owner_of(int(pid)) == owner


def _new(base: Path) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
    (folder / _OWNER).write_text(owner_of(os.getpid()), encoding="utf-8")
    return folder


def _remove_dead(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        # Another user's folder, or one that is being made or removed at this moment.
        with contextlib.suppress(OSError):
            owner = (folder / _OWNER).read_text(encoding="utf-8")
            if folder.stat().st_uid == os.getuid() and owner and not is_alive(owner):
                shutil.rmtree(folder, ignore_errors=True)
