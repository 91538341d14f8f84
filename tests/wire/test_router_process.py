"""`python -m services.router` as a process: starts, serves, stops, and fails with one line."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import pytest

from protos import inference_pb2, inference_pb2_grpc
from tests.conftest import third
from tests.harness.redis_server import RedisServer
from tests.harness.router_bench import channel, save_tokenizer
from tests.harness.service_process import start_service

pytestmark = pytest.mark.oracle

WAIT_S = 180.0
"""That it ends is the promise: how long its imports take is the machine's business."""
STOP_S = 60.0
"""From SIGTERM to its exit, when it has nothing under way."""


def _checkpoint(folder: Path) -> Path:
    save_tokenizer(folder)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.timeout(2 * WAIT_S)
async def test_it_serves_until_told_to_stop(tmp_path: Path) -> None:
    server = RedisServer()
    await server.start()
    process = start_service("router", f"model={_checkpoint(tmp_path)}", f"redis_url={server.url}")
    try:
        assert process.stderr is not None
        ready = next(
            line
            for line in map(json.loads, iter(process.stderr.readline, ""))
            if line["event"] == "ready"
        )
        async with channel(ready["address"]) as connected:
            stub = inference_pb2_grpc.InferenceStub(connected)
            status = await stub.GetClusterStatus(
                inference_pb2.GetClusterStatusRequest(), timeout=10
            )
        assert status.redis_reachable and status.router_id == ready["router_id"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(STOP_S) == 0
    finally:
        process.kill()
        process.communicate()
        server.remove()


@pytest.mark.timeout(2 * WAIT_S)
@pytest.mark.parametrize(
    ("overrides", "word"),
    third(
        [
            ((), "model: needed"),
            (("model=./no/such/folder",), "no such folder"),
            (("model={broken}",), "tokenizer"),
            (("model={good}", "modle=x"), "nearest is 'model'"),
            (("model={good}", "listen={busy}"), "cannot listen on 127.0.0.1:"),
        ]
    ),
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    overrides: tuple[str, ...], word: str, tmp_path: Path
) -> None:
    good, broken = tmp_path / "good", tmp_path / "broken"
    good.mkdir()
    broken.mkdir()
    _checkpoint(good)
    (_checkpoint(broken) / "tokenizer.json").write_text("{}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"good": good, "broken": broken, "busy": f"127.0.0.1:{taken.getsockname()[1]}"}
        process = start_service("router", *(override.format(**names) for override in overrides))
        try:
            _, stderr = process.communicate(timeout=WAIT_S)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == 2
    assert "Traceback" not in stderr
    (line,) = [line for line in stderr.splitlines() if line.startswith("router: ")]
    assert word in line
