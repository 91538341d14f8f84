"""What probes see of each process's life, from its first moment to its last."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.service_process import own_address

ROOT = Path(__file__).parents[2]


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
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        self.seen: list[tuple[str, int, str]] = []

    def until(self, path: str, status: int) -> None:
        deadline_s = time.monotonic() + 100
        while time.monotonic() < deadline_s:
            for each in ("/livez", "/readyz"):
                said = (each, *ask(self.address, each))
                if said not in self.seen:
                    self.seen.append(said)
                if said[:2] == (path, status):
                    return
            time.sleep(0.02)
        raise AssertionError(self.seen)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """All lines of that event so far."""
        text = os.pread(self._log.fileno(), 1 << 20, 0)  # its end is where the process writes
        lines = [json.loads(line) for line in text.splitlines() if line.startswith(b"{")]
        return [line for line in lines if line["event"] == event]

    def end(self) -> int:
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(30)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(30)
        self._log.close()


@pytest.fixture
def started() -> Iterator[list[Process]]:
    made: list[Process] = []
    yield made
    for process in made:
        process.kill()


def test_a_worker_lives_while_it_loads_and_is_ready_when_it_serves(started: list[Process]) -> None:
    worker = Process("services.prefill", "engine.model=baton-5m", "engine.device=cpu", "redis_url=")
    started.append(worker)
    worker.until("/readyz", 200)
    assert ("/livez", 200, "ok") in worker.seen
    why = {said[2] for said in worker.seen if said[:2] == ("/readyz", 503)}
    assert "loading the model" in why
    # How far it is may go by faster than anybody asks; it is told as it is logged.
    steps = worker.logged("loading")
    assert {"weights", "warm-up"} <= {step["what"] for step in steps}
    told = {f"loading the model: {s['what']}, {s['done']} of {s['total']}" for s in steps}
    assert why <= {"loading the model", *told}
    assert {said[1] for said in worker.seen if said[0] == "/livez"} <= {0, 200}
    assert worker.end() == 0


def test_a_router_that_never_met_redis_is_not_ready(started: list[Process]) -> None:
    nowhere = "redis_url=redis://127.0.0.1:1"
    router = Process("services.router", "model=baton-5m", nowhere)
    started.append(router)
    router.until("/readyz", 503)
    router.until("/livez", 200)
    while not any("Redis" in said[2] for said in router.seen):
        router.seen.append(("/readyz", *ask(router.address, "/readyz")))
    assert ask(router.address, "/livez") == (200, "ok")
    assert router.end() == 0


def test_a_store_is_ready_at_once(started: list[Process], tmp_path: Path) -> None:
    store = Process("kvstore", f"slab_dir={json.dumps(str(tmp_path))}")
    started.append(store)
    store.until("/readyz", 200)
    assert store.end() == 0
