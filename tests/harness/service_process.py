"""Our processes as a pod runs them: `python -m services.<name> --set ...`, with what their probes
and their logs say; and addresses for them."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.waiting import block_until

ROOT = Path(__file__).resolve().parents[2]
WAIT_S = 180.0
"""That it ends is the promise: how long its imports take is the machine's business."""
STOP_S = 60.0
"""From SIGTERM to its exit, when it has nothing under way."""


def own_address() -> str:
    """host:port for one process and its next lives, at an address of loopback that no other uses:
    no connection takes the port, not before the process starts and not while it is dead."""
    host = f"127.{'.'.join(str(secrets.randbelow(254) + 1) for _ in range(3))}"
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def ask(address: str, path: str) -> tuple[int, str]:
    """Status and line; 0: nobody listens."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=5) as reply:
            return reply.status, reply.read().decode().strip()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode().strip()
    except OSError:
        return 0, ""


class Process:
    """One of ours, and all that its port has said, each answer once."""

    def __init__(self, module: str, *options: str) -> None:
        self.address = own_address()
        settings = [f"metrics_listen={self.address}", *options]
        self._log = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module]
            + [part for setting in settings for part in ("--set", setting)],
            cwd=ROOT,
            env={**os.environ, "KUBECONFIG": "/no/such/file"},
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        self.seen: list[tuple[str, int, str]] = []

    def until(self, path: str, status: int, says: str = "") -> None:
        """Until that probe has been answered so."""

        def is_answered() -> bool:
            said = [(each, *ask(self.address, each)) for each in ("/livez", "/readyz")]
            self.seen += [each for each in said if each not in self.seen]
            return any(each[:2] == (path, status) and says in each[2] for each in said)

        block_until(is_answered, WAIT_S)

    @property
    def log(self) -> str:
        # Its end is where the process writes.
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """All lines of that event so far."""
        whole, _, _ = self.log.rpartition("\n")
        lines = [json.loads(line) for line in whole.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def until_logged(self, event: str) -> list[dict[str, Any]]:
        """As `logged`, once there is one."""
        block_until(lambda: self.logged(event), WAIT_S)
        return self.logged(event)

    def end(self) -> int:
        """As Kubernetes does. Returns: its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)

    def ended(self) -> int:
        """By itself."""
        return self._process.wait(WAIT_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._log.close()


@contextmanager
def started(module: str, *options: str) -> Iterator[Process]:
    process = Process(module, *options)
    try:
        yield process
    finally:
        process.kill()
