"""Services as the processes that a pod runs: they start, say by their probes how they are, serve,
stop, and fail with one line."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.conftest import third
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import channel, save_tokenizer
from tests.harness.service_process import ROOT, own_address

WAIT_S = 180.0
"""That it ends is the promise: how long its imports take is the machine's business."""
STOP_S = 60.0
"""From SIGTERM to its exit, when it has nothing under way."""

pytestmark = [pytest.mark.oracle, pytest.mark.timeout(2 * WAIT_S)]


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
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            for each in ("/livez", "/readyz"):
                said = (each, *ask(self.address, each))
                if said not in self.seen:
                    self.seen.append(said)
                if said[:2] == (path, status) and says in said[2]:
                    return
            time.sleep(0.02)
        raise AssertionError(self.seen)

    @property
    def log(self) -> str:
        # Its end is where the process writes.
        return os.pread(self._log.fileno(), 1 << 20, 0).decode()

    def logged(self, event: str) -> list[dict[str, Any]]:
        """All lines of that event so far."""
        lines = [json.loads(line) for line in self.log.splitlines() if line.startswith("{")]
        return [line for line in lines if line["event"] == event]

    def until_logged(self, event: str) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + WAIT_S
        while not (lines := self.logged(event)):
            assert time.monotonic() < deadline_s, self.log
            time.sleep(0.02)
        return lines

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


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    """One that is not started yet."""
    made = RedisServer()
    yield made
    made.remove()


def _checkpoint(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    save_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


async def test_a_router_is_ready_once_it_has_met_redis_and_serves_until_told_to_stop(
    tmp_path: Path, redis: RedisServer
) -> None:
    settings = f"model={_checkpoint(tmp_path)}", f"redis_url={redis.url}"
    with started("services.router", *settings) as router:
        router.until("/readyz", 503, "Redis")
        assert ask(router.address, "/livez") == (200, "ok")
        await redis.start()
        (ready,) = router.until_logged("ready")
        async with channel(ready["address"]) as connected:
            stub = inference_pb2_grpc.InferenceStub(connected)
            asked = inference_pb2.GetClusterStatusRequest()
            while not (await stub.GetClusterStatus(asked, timeout=10)).redis_reachable:
                time.sleep(0.02)
            status = await stub.GetClusterStatus(asked, timeout=10)
        assert status.router_id == ready["router_id"]
        assert router.end() == 0


async def test_an_autoscaler_decides_until_told_to_stop(tmp_path: Path, redis: RedisServer) -> None:
    """Nobody answers for the workers: it says so, changes nothing, and goes on."""
    await redis.start()
    with started(
        "services.autoscaler",
        f"redis_url={redis.url}",
        "scaler=local",
        f"local_address=unix:{tmp_path}/nobody.sock",
        "interval_s=0.05",
    ) as autoscaler:
        autoscaler.until_logged("ready")
        # Not the only one, where Redis is slow.
        while "`baton up` does not scale its workers" not in str(
            autoscaler.until_logged("problem")
        ):
            time.sleep(0.02)
        assert ask(autoscaler.address, "/livez")[0] == 200
        assert autoscaler.end() == 0


def test_a_worker_lives_while_it_loads_and_is_ready_when_it_serves() -> None:
    settings = "engine.model=baton-5m", "engine.device=cpu", "redis_url="
    with started("services.prefill", *settings) as worker:
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


def test_a_store_is_ready_at_once(tmp_path: Path) -> None:
    with started("kvstore", f"slab_dir={json.dumps(str(tmp_path))}") as store:
        store.until("/readyz", 200)
        assert store.end() == 0


@pytest.mark.parametrize(
    ("service", "overrides", "word"),
    third(
        [
            ("router", (), "model: needed"),
            ("router", ("model=./no/such/folder",), "no such folder"),
            ("router", ("model={broken}",), "tokenizer"),
            ("router", ("model={good}", "modle=x"), "nearest is 'model'"),
            ("router", ("model={good}", "listen={busy}"), "cannot listen on 127.0.0.1:"),
            ("autoscaler", ("scaler=local",), "local_address: needed with scaler=local"),
            ("autoscaler", ("plan.limits.decode.max_wrokers=3",), "nearest is 'max_workers'"),
            ("autoscaler", (), "neither in a pod with a service account"),
        ]
    ),
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    service: str, overrides: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    good, broken = _checkpoint(tmp_path / "good"), _checkpoint(tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"good": good, "broken": broken, "busy": f"127.0.0.1:{taken.getsockname()[1]}"}
        wrong = [override.format(**names) for override in overrides]
        with started(f"services.{service}", *wrong) as process:
            assert process.ended() == 2
            log = process.log
    assert "Traceback" not in log
    (line,) = [line for line in log.splitlines() if line.startswith(f"{service}: ")]
    assert word in line
