"""The temporary folders of one local cluster, and the cleaning up after one that was killed.

A cluster owns a folder for its socket and logs, one in memory for its store's slab, and, where its
stores have a file tier, one on disk for that. Each carries
the owner's process id and start time in a file; a folder whose owner is gone is removed by the next
cluster that starts. Blocking; any thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
