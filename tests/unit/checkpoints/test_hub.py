"""Checkpoints by hub name, against a local server that speaks the hub's protocol.

Each look-up runs in a process of its own, because the hub client reads its environment once.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

NAME = "tests/tiny-qwen3"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_BRANCH = "other"
TOKEN = "hf_secret"
ROOT = Path(__file__).resolve().parents[3]


@dataclass
class Hub:
    """What the server serves, and what it was asked for."""

    folder: Path
    endpoint: str = ""
    token: str = ""
    gated: bool = False
    cut_after_bytes: int | None = None
    gets: list[str] = field(default_factory=list)
    num_requests: int = 0

    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def path_of(self, file: Path) -> str:
        return str(file.relative_to(self.folder))


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *arguments: object) -> None:
            """Quiet."""

        def do_HEAD(self) -> None:
            self._serve(with_body=False)

        def do_GET(self) -> None:
            self._serve(with_body=True)

        def _serve(self, with_body: bool) -> None:
            hub.num_requests += 1
            path = unquote(urlsplit(self.path).path)
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._error(401, "RepoNotFound", "Repository not found")
            elif hub.gated:
                self._error(403, "GatedRepo", "Accept the terms first")
            elif path.startswith(f"/api/models/{NAME}/"):
                self._api(path.removeprefix(f"/api/models/{NAME}/"))
            elif path.startswith(f"/{NAME}/resolve/"):
                revision, _, file = path.removeprefix(f"/{NAME}/resolve/").partition("/")
                self._file(revision, hub.folder / file, with_body)
            else:
                self._error(404, "RepoNotFound", "Repository not found")

        def _api(self, rest: str) -> None:
            kind, _, revision = rest.partition("/")
            if revision not in ("main", OTHER_BRANCH, COMMIT):
                self._error(404, "RevisionNotFound", "Invalid rev id")
            elif kind == "revision":
                siblings = [{"rfilename": hub.path_of(file)} for file in hub.files()]
                self._json({"id": NAME, "sha": COMMIT, "siblings": siblings})
            else:
                assert kind == "tree", rest
                entries = [
                    {
                        "type": "file",
                        "path": hub.path_of(file),
                        "size": file.stat().st_size,
                        "oid": hashlib.sha1(file.read_bytes()).hexdigest(),
                    }
                    for file in hub.files()
                ]
                self._json(entries)

        def _file(self, revision: str, file: Path, with_body: bool) -> None:
            assert revision == COMMIT, "files are asked for by commit"
            if not file.is_file():
                self._error(404, "EntryNotFound", "Entry not found")
                return
            content = file.read_bytes()
            self.send_response(200)
            self.send_header("ETag", f'"{hashlib.sha1(content).hexdigest()}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if with_body:
                hub.gets.append(hub.path_of(file))
                if hub.cut_after_bytes is not None and file.suffix == ".safetensors":
                    content = content[: hub.cut_after_bytes]
                    self.close_connection = True
                self.wfile.write(content)

        def _json(self, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _error(self, status: int, code: str, message: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", message)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    (checkpoint / "pytorch_model.bin").write_bytes(b"\x80pickle")
    (checkpoint / "consolidated.safetensors").write_bytes(b"another layout")
    (checkpoint / "README.md").write_text("a card")
    (checkpoint / "original").mkdir()
    (checkpoint / "original" / "model.safetensors").write_bytes(b"another layout")
    hub = Hub(checkpoint)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield hub
    server.shutdown()
    thread.join()
    server.server_close()


CHILD = """
import json, sys
from checkpoints import CheckpointError, resolve, weights_digest
model, files = sys.argv[1:]
seen = []
try:
    found = resolve(model, files=files, progress=lambda *what: seen.append(what))
except CheckpointError as error:
    print(json.dumps({"error": str(error)}))
else:
    digest = weights_digest(found.path) if files == "all" else ""
    paths = sorted(str(p.relative_to(found.path)) for p in found.path.rglob("*") if p.is_file())
    print(json.dumps(
        {"name": found.name, "digest": digest, "progress": seen, "files": paths}
    ))
"""


def _resolve(
    hub: Hub, home: Path, model: str = NAME, files: str = "all", **environment: str
) -> dict[str, object]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        clean.pop(name, None)
        clean.pop(name.upper(), None)
    result = subprocess.run(
        [sys.executable, "-c", CHILD, model, files],
        env=clean
        | {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
        | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return answer


def test_everything_needed_and_nothing_else_is_fetched(hub: Hub, tmp_path: Path) -> None:
    """Pickles, other layouts and subfolders stay where they are; progress ends at the last byte."""
    answer = _resolve(hub, tmp_path / "home")
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
    from checkpoints import weights_digest

    assert answer["digest"] == weights_digest(hub.folder)
    progress = answer["progress"]
    assert isinstance(progress, list)
    what, done, total = progress[-1]
    assert NAME in what
    assert done == total == sum((hub.folder / name).stat().st_size for name in wanted)


def test_router_fetches_no_weights_and_worker_adds_them(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    answer = _resolve(hub, home, files="tokenizer")
    assert answer["files"] == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    assert "model.safetensors.index.json" in _resolve(hub, home)["files"]  # type: ignore[operator]
    assert hub.gets.count("tokenizer.json") == 1


def test_offline_uses_the_cache_and_asks_nobody(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    first = _resolve(hub, home)
    before = hub.num_requests
    again = _resolve(hub, home, HF_HUB_OFFLINE="1")
    assert again["digest"] == first["digest"]
    assert hub.num_requests == before


def test_offline_without_the_cache_says_so(hub: Hub, tmp_path: Path) -> None:
    error = _resolve(hub, tmp_path / "home", HF_HUB_OFFLINE="1")["error"]
    assert "HF_HUB_OFFLINE" in str(error) and "\n" not in str(error)
    assert hub.num_requests == 0


def test_offline_with_a_tokenizer_only_in_the_cache_says_so(hub: Hub, tmp_path: Path) -> None:
    """A half-filled cache is not taken for a checkpoint."""
    home = tmp_path / "home"
    _resolve(hub, home, files="tokenizer")
    assert "HF_HUB_OFFLINE" in str(_resolve(hub, home, HF_HUB_OFFLINE="1")["error"])


def test_a_hub_that_is_away_names_its_address(hub: Hub, tmp_path: Path) -> None:
    error = _resolve(hub, tmp_path / "home", HF_ENDPOINT="http://127.0.0.1:9")["error"]
    assert "http://127.0.0.1:9 cannot be reached" in str(error) and "\n" not in str(error)


def test_revisions(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for revision in (OTHER_BRANCH, COMMIT):
        assert _resolve(hub, home, f"{NAME}@{revision}", "tokenizer")["name"] == NAME
    error = str(_resolve(hub, home, f"{NAME}@gone", "tokenizer")["error"])
    assert "no such revision" in error and "\n" not in error


def test_unknown_private_and_gated_names(hub: Hub, tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert "not on the hub" in str(_resolve(hub, home, "tests/unknown")["error"])
    hub.token = TOKEN
    assert "HF_TOKEN" in str(_resolve(hub, home)["error"])
    assert _resolve(hub, home, files="tokenizer", HF_TOKEN=TOKEN)["name"] == NAME
    hub.token, hub.gated = "", True
    assert "accept its terms" in str(_resolve(hub, tmp_path / "fresh")["error"])


def test_a_pickle_only_repository_is_refused(hub: Hub, tmp_path: Path) -> None:
    for path in hub.folder.glob("*.safetensors*"):
        path.unlink()
    error = str(_resolve(hub, tmp_path / "home")["error"])
    assert "no .safetensors" in error and "\n" not in error
    assert not [path for path in hub.gets if path.endswith(".bin")]


def test_a_transfer_cut_short_is_not_a_checkpoint(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after_bytes = 100
    error = str(_resolve(hub, tmp_path / "home", HF_HUB_DOWNLOAD_TIMEOUT="2")["error"])
    assert "failed" in error and "\n" not in error
