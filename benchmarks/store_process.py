"""A KV store in a process of its own, as `python -m kvstore` starts it, for benchmarks."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

_START_S = 60.0
_STOP_S = 10.0


@dataclass(frozen=True)
class StoreProcess:
    """address: what a client attaches to."""

    address: str
    process: subprocess.Popen[str]

    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        self.process.send_signal(number)


@contextlib.contextmanager
def running(**settings: str | int) -> Iterator[StoreProcess]:
    """A store from its ready line to its end. Raises: RuntimeError with what it said last."""
    argv = [sys.executable, "-P", "-m", "kvstore"]
    for name, value in {"listen": "127.0.0.1:0", **settings}.items():
        argv += ["--set", f"{name}={value}" if isinstance(value, int) else f'{name}="{value}"']
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    said: list[str] = []
    ready = threading.Event()
    address: list[str] = []

    def read() -> None:
        assert process.stderr is not None
        for line in process.stderr:
            said.append(line)
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                if fields.get("event") == "ready":
                    address.append(fields["address"])
                    ready.set()
        ready.set()

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        if not ready.wait(_START_S) or not address:
            raise RuntimeError(f"the store did not start: {''.join(said[-5:])}")
        yield StoreProcess(address[0], process)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)
        reader.join(_STOP_S)
        assert process.stderr is not None
        process.stderr.close()
