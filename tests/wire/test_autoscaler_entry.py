"""`python -m services.autoscaler` as a process: starts, decides, stops, and fails with one line."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from tests.conftest import third
from tests.harness.redis_server import RedisServer
from tests.harness.service_process import start_service

pytestmark = pytest.mark.oracle


def _start(*overrides: str) -> subprocess.Popen[str]:
    return start_service("autoscaler", *overrides, KUBECONFIG="/no/such/file")


async def test_it_decides_until_told_to_stop(tmp_path: Path) -> None:
    """Nobody answers for the workers: it says so, changes nothing, and goes on."""
    server = RedisServer()
    await server.start()
    process = _start(
        f"redis_url={server.url}",
        "scaler=local",
        f"local_address=unix:{tmp_path}/nobody.sock",
        "interval_s=0.05",
        "metrics_listen=127.0.0.1:0",
    )
    try:
        assert process.stderr is not None
        events = map(json.loads, iter(process.stderr.readline, ""))
        ready = next(line for line in events if line["event"] == "ready")
        # Not the only one, where Redis is slow.
        problems = (line["why"] for line in events if line["event"] == "problem")
        assert any("`baton up` does not scale its workers" in why for why in problems)
        with urllib.request.urlopen(f"http://{ready['metrics']}/livez", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()
        server.remove()


@pytest.mark.parametrize(
    ("overrides", "says"),
    third(
        [
            (("scaler=local",), "local_address: needed with scaler=local"),
            (("plan.limits.decode.max_wrokers=3",), "nearest is 'max_workers'"),
            ((), "neither in a pod with a service account"),
        ]
    ),
)
def test_what_is_wrong_is_one_line_and_exit_code_2(overrides: tuple[str, ...], says: str) -> None:
    process = _start(*overrides)
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 2
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("autoscaler: ")]
    assert says in line
