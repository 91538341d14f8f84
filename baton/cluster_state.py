"""Which local clusters run, so that `baton generate` finds one without being told where.

One small JSON file per running cluster under XDG_RUNTIME_DIR/baton or ~/.cache/baton, named by the
owner's process id. A file whose owner is gone is stale: it is ignored and removed. Blocking; any
thread.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from baton.run_folder import is_alive, owner_of


@dataclass(frozen=True)
class ClusterState:
    """A cluster that some `baton up` owns."""

    address: str
    model: str
    owner: str
    """As `run_folder.owner_of` says it."""
    started_s: float
    """Wall clock, to find the youngest."""


def announce(address: str, model: str) -> Path:
    """Write this process's cluster down. Returns: the file, to be removed at the end."""
    state = ClusterState(address, model, owner_of(os.getpid()), time.time())
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / f"{os.getpid()}.json"
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps(dataclasses.asdict(state)), encoding="utf-8")
    scratch.replace(path)
    return path


def find() -> ClusterState | None:
    """The youngest running cluster of this user, if any."""
    alive = []
    for path in sorted(_folder().glob("*.json")):
        try:
            state = ClusterState(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            continue
        if is_alive(state.owner):
            alive.append(state)
        else:
            path.unlink(missing_ok=True)
    return max(alive, key=lambda state: state.started_s, default=None)


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "baton"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "baton" / "clusters"
