"""A service as the process that a pod runs: `python -m services.<name> --set ...`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


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
