"""`--model <hub name>` works like a bundled one: fetched from a hub, served by real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import fake_hub, tiny_checkpoint
from tests.harness.fake_hub import NAME, Hub

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    tiny_checkpoint.save(tmp_path / "tiny-qwen3")
    with fake_hub.serve(tmp_path / "tiny-qwen3") as hub:
        yield hub


def test_a_qwen3_checkpoint_by_its_hub_name(hub: Hub, tmp_path: Path) -> None:
    """Fetched once, though four processes want it; then answers, with decode computing nothing."""
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")} | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "home"),
        "XDG_RUNTIME_DIR": str(tmp_path),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}",
    }
    command = [sys.executable, "-m", "baton.cli"]
    up = subprocess.Popen(
        [*command, "up", "--port", "0", "--model", NAME, "--log-dir", str(tmp_path / "logs")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert up.stdout is not None
        ready = up.stdout.readline()
        assert NAME in ready, up.communicate(timeout=TIMEOUT_S)
        answer = subprocess.run(
            [*command, "generate", "x" * 40, "--max-tokens", "8", "--temperature", "0", "--json"],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            env=environment,
        )
        assert answer.returncode == 0, answer.stderr
        value = json.loads(answer.stdout)
        assert value["provenance"]["model"] == NAME
        assert value["usage"]["num_prompt_tokens"] == 40
        prefill, decode = value["provenance"]["legs"]
        assert (prefill["num_tokens_computed"], decode["num_tokens_computed"]) == (40, 0)
        assert sorted(hub.gets) == sorted(set(hub.gets)), "each file was fetched once"
        up.send_signal(signal.SIGTERM)
        up.communicate(timeout=TIMEOUT_S)
        assert up.returncode == 0
    finally:
        if up.poll() is None:
            up.kill()
            up.communicate(timeout=TIMEOUT_S)
