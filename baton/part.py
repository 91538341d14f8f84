"""Part: one child process of a local cluster, and what is told of it. Values; whose thread may
change them, baton/supervisor.py says.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from baton.child import Child
from baton.cluster_plan import ProcessSpec


class State(enum.Enum):
    """See baton/supervisor.py."""

    STARTING = "starting"
    READY = "ready"
    BACKOFF = "backoff"
    HELD = "held"
    RETIRING = "retiring"
    STOPPED = "stopped"


@dataclass(frozen=True)
class ProcessInfo:
    """What is known of one part now."""

    name: str
    kind: str
    state: State
    pid: int
    address: str
    num_restarts: int
    log_path: Path
    metrics_address: str = ""
    """Where it serves /metrics; empty: nowhere."""
    http_address: str = ""
    """Where it serves the HTTP API; empty: nowhere."""
    incarnation: str = ""
    """A worker's, in hex, by which the registry tells its lives apart."""


@dataclass(frozen=True)
class ClusterEvent:
    """Something to show: `what` is starting, loading, ready, silent, died, restarting or
    stopped."""

    name: str
    what: str
    detail: str = ""
    done: int = 0
    total: int = 0


OnEvent = Callable[[ClusterEvent], None]


@dataclass(eq=False)
class Part:
    """A child process and its state."""

    spec: ProcessSpec
    child: Child
    state: State = State.STARTING
    started_s: float = 0.0
    backoff_s: float = 0.0
    """The pause before its next life: the first is none."""
    due_s: float = 0.0
    num_restarts: int = 0
    silent_s: float = 0.0
    """For how long it has not been heard of while it should be."""

    @property
    def info(self) -> ProcessInfo:
        """As of now."""
        return ProcessInfo(
            name=self.spec.name,
            kind=self.spec.kind,
            state=self.state,
            pid=self.child.pid,
            address=self.child.address,
            num_restarts=self.num_restarts,
            log_path=self.child.log_path,
            metrics_address=self.child.metrics_address,
            http_address=self.child.http_address,
            incarnation=self.child.incarnation,
        )

    @property
    def last_line(self) -> str:
        """What it said last, in a few words."""
        lines = list(self.child.last_lines)
        return f"its last line: {lines[-1]}" if lines else "it said nothing"
