"""One child process of the local cluster: started, listened to, stopped, reaped.

A child speaks by JSON lines on its output: `loading` (what, done, total), `ready` (address,
incarnation), `role_changed` (a worker's next incarnation). Every line goes into its log file; what
is understood goes to `notify`, and so does the exit. Redis, which speaks its own way, is `ready`
when it says so.

No child outlives its parent: each asks the kernel to be killed when the thread that started it ends
(PR_SET_PDEATHSIG), so the starter must be a thread that lives as long as the cluster does. `start`
and the signals are called from that one thread; `notify` is called from the child's reader thread.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.cluster_plan import ProcessSpec
from baton.pulse import PipePulse, Pulse, RedisPulse
from process import pulse

_REDIS_READY = "eady to accept connections"
"""Versions differ in what stands before it."""
_NUM_LAST_LINES = 12
_LAST_WORDS_S = 2.0
"""For what a child that has ended said last to be read. Bounded: a process that it left behind may
hold its output open."""


@dataclass(frozen=True)
class Said:
    """An event that a child logged."""

    child: Child
    event: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Exited:
    """A child's end; its exit code as `subprocess` counts (negative: a signal)."""

    child: Child
    exit_code: int


Notify = Callable[["Said | Exited"], None]


@dataclass(eq=False)
class Child:
    """One life of one process."""

    spec: ProcessSpec
    log_path: Path
    notify: Notify
    address: str = ""
    """Where it listens; known once it is ready."""
    incarnation: str = ""
    """A worker's, in hex, by which the registry tells its lives apart."""
    metrics_address: str = ""
    """Where it serves /metrics; empty: nowhere."""
    http_address: str = ""
    """Where it serves the HTTP API; empty: nowhere."""
    last_lines: collections.deque[str] = field(
        default_factory=lambda: collections.deque(maxlen=_NUM_LAST_LINES)
    )
    _process: subprocess.Popen[str] | None = None
    _pulse: Pulse | None = None
    _reader: threading.Thread | None = None

    @property
    def pid(self) -> int:
        """0 before it was started."""
        return 0 if self._process is None else self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it in a session of its own, so that Ctrl-C in the terminal reaches only us.

        Raises: OSError when the program cannot be started.
        """
        pipe = PipePulse()
        self._pulse = RedisPulse(self.spec.socket) if self.spec.kind == "redis" else pipe
        try:
            self._process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                env=os.environ
                | {
                    "BATON_PARENT_PID": str(os.getpid()),
                    pulse.ENVIRONMENT: str(pipe.write_fd),
                    "PYTHONUNBUFFERED": "1",
                },
                pass_fds=(pipe.write_fd,),
                start_new_session=True,
            )
        finally:
            pipe.started()
            if self._pulse is not pipe:
                pipe.close()
        name = f"log-{self.spec.name}"
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    def has_beaten(self) -> bool:
        """Whether it was heard of since this was asked last: see baton/pulse.py."""
        return self._pulse is not None and self._pulse.has_beaten()

    def close(self) -> None:
        """It has ended: its log is complete, and what was kept for its pulse is given back.
        Idempotent."""
        if self._reader is not None:
            self._reader.join(_LAST_WORDS_S)
        if self._pulse is not None:
            self._pulse.close()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; nothing if it has ended."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Whether it has ended within `timeout_s`."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _read(self) -> None:
        process = self._process
        assert process is not None and process.stdout is not None
        with self.log_path.open("a", encoding="utf-8") as log, process.stdout:
            for line in process.stdout:
                log.write(line)
                log.flush()
                self._understand(line.rstrip())
        self.notify(Exited(self, process.wait()))

    def _understand(self, line: str) -> None:
        if line:
            self.last_lines.append(line)
        if _REDIS_READY in line and self.spec.kind == "redis":
            self.notify(Said(self, "ready", {}))
            return
        if not line.startswith("{"):
            return
        try:
            fields = json.loads(line)
        except ValueError:
            return
        event = fields.get("event") if isinstance(fields, dict) else None
        if event in ("loading", "ready", "role_changed"):
            self.notify(Said(self, event, fields))


def complaint(child: Child) -> str:
    """The child's own one-line reason for its end, if it gave one: its last line that is no log. Of
    an exception that nobody caught the first line of what it says, which may be many: a device's
    error ends in advice."""
    lines = [line for line in child.last_lines if not line.startswith("{")]
    frames = [at for at, line in enumerate(lines) if line.startswith('  File "')]
    for line in lines[frames[-1] + 1 :] if frames else ():
        if not line.startswith("    "):  # the frame's code
            return line
    return lines[-1] if lines else ""
