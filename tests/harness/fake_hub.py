"""A server on loopback that speaks the hub's protocol as far as fetching a checkpoint needs it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "tests/tiny-qwen3"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER_BRANCH = "other"


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


@contextlib.contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Serve the checkpoint in `folder` as `NAME`."""
    hub = Hub(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
