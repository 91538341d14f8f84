"""A service as the process that a pod runs: `python -m services.<name> --set ...`; and addresses
for processes."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def own_address() -> str:
    """host:port for one process and its next lives, at an address of loopback that no other uses:
    no connection takes the port, not before the process starts and not while it is dead."""
    host = f"127.{'.'.join(str(secrets.randbelow(254) + 1) for _ in range(3))}"
    with socket.create_server((host, 0)) as probe:
        return f"{host}:{probe.getsockname()[1]}"


def start_service(name: str, *overrides: str, **environment: str) -> subprocess.Popen[str]:
    """`overrides`: key=value each. `environment`: beside our own. Its log is its stderr, a pipe;
    whoever starts it ends it."""
    arguments = [part for override in overrides for part in ("--set", override)]
    return subprocess.Popen(
        [sys.executable, "-m", f"services.{name}", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
