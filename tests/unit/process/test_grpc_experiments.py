"""gRPC hears of the choice in every process of ours, and still knows the names."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from process.entrypoint import GRPC_EXPERIMENTS, OFF_EXPERIMENTS

_ENTRIES = (
    "services.router",
    "services.prefill",
    "services.decode",
    "services.autoscaler",
    "kvstore",
)

_CALL = """
import asyncio
import sys
import grpc.aio

async def main():
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
    await server.stop(None)

asyncio.run(main())
"""


def _run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if key != GRPC_EXPERIMENTS}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**inherited, **environment},
    )


@pytest.mark.parametrize("component", _ENTRIES)
def test_grpc_is_imported_behind_the_choice(component: str) -> None:
    """gRPC does not look again: what is set later is not heard."""
    code = f"""
import os
import sys
from importlib.abc import MetaPathFinder

class Watch(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "grpc":
            print(os.environ.get({GRPC_EXPERIMENTS!r}, "nothing was set"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
import {component}.__main__
"""
    assert _run(code).stdout.strip() == ",".join(OFF_EXPERIMENTS)


def test_an_environment_that_has_chosen_is_left_as_it_is() -> None:
    code = f"import os, process.entrypoint; print(repr(os.environ[{GRPC_EXPERIMENTS!r}]))"
    assert _run(code, **{GRPC_EXPERIMENTS: ""}).stdout.strip() == "''"


def test_grpc_knows_the_names() -> None:
    """It says so of one that it does not know: a new version may drop them, and nothing breaks."""
    told = _run(_CALL, **{GRPC_EXPERIMENTS: "-no_such_thing", "GRPC_VERBOSITY": "ERROR"}).stderr
    assert "Unknown experiment" in told
    told = _run(
        _CALL, **{GRPC_EXPERIMENTS: ",".join(OFF_EXPERIMENTS), "GRPC_VERBOSITY": "ERROR"}
    ).stderr
    assert "Unknown experiment" not in told
