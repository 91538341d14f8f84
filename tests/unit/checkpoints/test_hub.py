"""Checkpoints by hub name, against a local server that speaks the hub's protocol.

Each look-up runs in a process of its own, because the hub client reads its environment once. All
are forked from one that has imported what the client needs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from checkpoints import weights_digest
from tests.harness import fake_hub
from tests.harness.fake_hub import COMMIT, NAME, OTHER_BRANCH, Hub

TOKEN = "hf_secret"
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80pickle")
    (checkpoint / "consolidated.safetensors").write_bytes(b"another layout")
    (checkpoint / "README.md").write_text("a card")
    (checkpoint / "original").mkdir()
    (checkpoint / "original" / "model.safetensors").write_bytes(b"another layout")
    with fake_hub.serve(checkpoint) as hub:
        yield hub


LOOKUPS = """
import json, os, sys

def look_up(model, files):
    from checkpoints import CheckpointError, resolve, weights_digest
    seen = []
    try:
        found = resolve(model, files=files, progress=lambda *what: seen.append(what))
    except CheckpointError as error:
        return {"error": str(error)}
    digest = weights_digest(found.path) if files == "all" else ""
    paths = sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*") if p.is_file())
    return {"name": found.name, "digest": digest, "progress": seen, "files": paths}

import checkpoints.hub  # and all that the hub client needs, once for all look-ups

for line in sys.stdin:
    model, files, environment = json.loads(line)
    if not os.fork():
        os.environ.update(environment)
        for name in [*sys.modules]:
            if name.partition(".")[0] in ("checkpoints", "huggingface_hub"):
                del sys.modules[name]  # what is read when they are imported is read anew
        print(json.dumps(look_up(model, files)), flush=True)
        os._exit(0)
    if os.wait()[1]:
        print("{}", flush=True)
"""


@pytest.fixture(scope="module")
def lookups() -> Iterator[subprocess.Popen[str]]:
    """A process that forks one for each look-up."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        clean.pop(name, None)
        clean.pop(name.upper(), None)
    with subprocess.Popen(
        [sys.executable, "-c", LOOKUPS],
        env=clean | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


Resolve = Callable[..., dict[str, object]]


@pytest.fixture
def resolve(lookups: subprocess.Popen[str]) -> Resolve:
    """Look a model up at a hub: the answer, or its error."""

    def ask(
        hub: Hub, home: Path, model: str = NAME, files: str = "all", **environment: str
    ) -> dict[str, object]:
        assert lookups.stdin is not None and lookups.stdout is not None
        own = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home)} | environment
        lookups.stdin.write(json.dumps([model, files, own]) + "\n")
        lookups.stdin.flush()
        answer: dict[str, object] = json.loads(lookups.stdout.readline())
        assert answer, "the look-up failed: its traceback is on stderr"
        return answer

    return ask


def test_everything_needed_and_nothing_else_is_fetched(
    hub: Hub, resolve: Resolve, tmp_path: Path
) -> None:
    """Pickles, other layouts and subfolders stay where they are; progress ends at the last byte."""
    answer = resolve(hub, tmp_path / "home")
    wanted = {
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert answer["name"] == NAME
    assert set(answer["files"]) == wanted == set(hub.gets)  # type: ignore[call-overload]
    assert answer["digest"] == weights_digest(hub.folder)
    progress = answer["progress"]
    assert isinstance(progress, list)
    what, done, total = progress[-1]
    assert NAME in what
    assert done == total == sum((hub.folder / name).stat().st_size for name in wanted)


def test_router_fetches_no_weights_and_worker_adds_them(
    hub: Hub, resolve: Resolve, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    answer = resolve(hub, home, files="tokenizer")
    assert answer["files"] == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert "model.safetensors.index.json" in resolve(hub, home)["files"]  # type: ignore[operator]
    assert hub.gets.count("tokenizer.json") == 1


def test_offline_uses_the_cache_and_asks_nobody(hub: Hub, resolve: Resolve, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = resolve(hub, home)
    before = hub.num_requests
    again = resolve(hub, home, HF_HUB_OFFLINE="1")
    assert again["digest"] == first["digest"]
    assert hub.num_requests == before


def test_offline_without_the_cache_says_so(hub: Hub, resolve: Resolve, tmp_path: Path) -> None:
    error = resolve(hub, tmp_path / "home", HF_HUB_OFFLINE="1")["error"]
    assert "HF_HUB_OFFLINE" in str(error) and "\n" not in str(error)
    assert hub.num_requests == 0


def test_offline_with_a_tokenizer_only_in_the_cache_says_so(
    hub: Hub, resolve: Resolve, tmp_path: Path
) -> None:
    """A half-filled cache is not taken for a checkpoint."""
    home = tmp_path / "home"
    resolve(hub, home, files="tokenizer")
    assert "HF_HUB_OFFLINE" in str(resolve(hub, home, HF_HUB_OFFLINE="1")["error"])


def test_a_hub_that_is_away_names_its_address(hub: Hub, resolve: Resolve, tmp_path: Path) -> None:
    error = resolve(hub, tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9")["error"]
    assert "http://127.0.0.1:9 cannot be reached" in str(error) and "\n" not in str(error)


def test_revisions(hub: Hub, resolve: Resolve, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for revision in (OTHER_BRANCH, COMMIT):
        assert resolve(hub, home, f"{NAME}@{revision}", "tokenizer")["name"] == NAME
    error = str(resolve(hub, home, f"{NAME}@gone", "tokenizer")["error"])
    assert "no such revision" in error and "\n" not in error


def test_unknown_private_and_gated_names(hub: Hub, resolve: Resolve, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert "not on the hub" in str(resolve(hub, home, "tests/unknown")["error"])
    hub.token = TOKEN
    assert "HF_TOKEN" in str(resolve(hub, home)["error"])
    assert resolve(hub, home, files="tokenizer", HF_TOKEN=TOKEN)["name"] == NAME
    hub.token, hub.gated = "", True
    assert "accept its terms" in str(resolve(hub, tmp_path / "fresh")["error"])


def test_a_pickle_only_repository_is_refused(hub: Hub, resolve: Resolve, tmp_path: Path) -> None:
    for path in hub.folder.glob("*.safetensors*"):
        path.unlink()
    error = str(resolve(hub, tmp_path / "home")["error"])
    assert "no .safetensors" in error and "\n" not in error
    assert not [path for path in hub.gets if path.endswith(".bin")]


def test_a_transfer_cut_short_is_not_a_checkpoint(
    hub: Hub, resolve: Resolve, tmp_path: Path
) -> None:
    hub.cut_after_bytes = 100
    error = str(resolve(hub, tmp_path / "home", HF_HUB_DOWNLOAD_TIMEOUT="2")["error"])
    assert "failed" in error and "\n" not in error
