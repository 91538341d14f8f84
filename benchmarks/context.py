"""What a benchmark's figures belong to: the commit, the command that made them, the hardware; and
how they are handed over."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

COMMIT = "BATON_BENCHMARK_COMMIT"
"""Environment variable: the commit of a tree that was copied here without its history, as `git
describe --always --dirty` says it where the history is."""


def context() -> dict[str, str]:
    """Fields for a result's JSON object. Holds no path of this machine."""
    arguments = list(sys.argv[1:])
    for option in (
        "--out",
        "--plot",
        "--resume",
        "--cache",
    ):  # where a result lies says nothing of it
        if option in arguments:
            at = arguments.index(option)
            del arguments[at : at + 2]
    return {
        "commit": _commit(),
        "command": shlex.join(["python", "-m", _module(), *arguments]),
        "hardware": f"{os.cpu_count()} cores, {_processor()}",
        "python": platform.python_version(),
    }


def publish(result: Mapping[str, Any], out: Path | None) -> None:
    """The result as one line of JSON: the last that is printed, and into a file if one is named."""
    line = json.dumps(result)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n", encoding="utf-8")
    sys.stdout.write(line + "\n")


def _module() -> str:
    """What runs, as `python -m` takes it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else f"benchmarks.{Path(sys.argv[0]).stem}"


def _commit() -> str:
    if told := os.environ.get(COMMIT):
        return told
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    values = {
        key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
    }
    features = set(values.get("flags", "").split())
    wide = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in features]
    return f"{values.get('model name', platform.machine())} ({', '.join(wide)})"
