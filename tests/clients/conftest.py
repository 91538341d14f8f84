"""One `baton up` for all clients, which asks for API keys."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BATON = ROOT / ".venv/bin/baton"
STOP_S = 60

# litellm would fetch its list of models' prices when it is imported.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"


@dataclass(frozen=True)
class Server:
    url: str
    """Of the OpenAI API, `/v1` included."""
    key: str
    limited_key: str
    """Of a tenant that has one token a minute: its first request leaves it many in debt."""


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    command = [BATON, "up", "--port", "0", "--http-port", "0", "--api-keys"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as up:
        try:
            assert up.stdout is not None
            said = ""
            for line in up.stdout:
                said += line
                if "Ctrl-C" in line:
                    break
            url = re.search(r"OpenAI's API: (\S+)", said)
            keys = re.search(r"The digests of the keys are in (\S+)", said)
            assert url is not None and keys is not None, said
            file = Path(keys[1])
            key, limited_key = (_new_key(file, tenant) for tenant in ("any", "limited"))
            with file.open("a") as opened:
                opened.write("\n[tenants.limited]\nmax_tokens_per_min = 1\n")
            yield Server(url[1], key, limited_key)
        finally:
            up.terminate()
            try:
                up.communicate(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                up.kill()
                raise


def _new_key(file: Path, tenant: str) -> str:
    command = [BATON, "api-key", "add", "--tenant", tenant, "--file", file]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.strip()
