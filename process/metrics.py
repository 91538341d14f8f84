"""One process's /metrics over HTTP, in the text format that Prometheus scrapes.

Served by a thread of its own from `start` to `stop`, so that a scrape never waits for the event
loop unless a collector asks it to; each connection has a short timeout. Knows no metric: those come
from collectors. Bound to the address that it is told, usually loopback: it answers whoever asks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from process.errors import Unavailable
from process.settings import SettingsError


class _Handler(WSGIRequestHandler):
    """One connection."""

    timeout = 5.0
    """Seconds for each read from it and each write to it."""

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError):  # too slow: the connection is closed
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """A scrape is no event."""


class MetricsServer:
    """See the module. `address` is host:port, known once started."""

    def __init__(self, *collectors: Collector) -> None:
        self._registry = CollectorRegistry(auto_describe=False)
        for collector in collectors:
            self._registry.register(collector)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.address = ""

    def start(self, listen: str) -> None:
        """Serve on `listen` (host:port; port 0: a free one). Raises: Unavailable when it is
        taken."""
        host, port = split(listen)
        try:
            self._server = _listen(host, port, self._registry)
        except OSError as error:
            raise Unavailable(f"metrics_listen: cannot listen on {listen}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """End the server and its thread; nothing if it was not started. Idempotent."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            thread.join()
            server.server_close()


def _listen(host: str, port: int, registry: CollectorRegistry) -> WSGIServer:
    class Server(ThreadingWSGIServer):
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

    return make_server(host, port, make_wsgi_app(registry), Server, _Handler)


def check_listen(name: str, listen: str) -> None:
    """A setting that is empty (off) or host:port. Raises: SettingsError."""
    if listen:
        try:
            split(listen)
        except ValueError as error:
            raise SettingsError(f"{name}: {listen!r} is not host:port") from error


def split(listen: str) -> tuple[str, int]:
    """host and port. Raises: ValueError."""
    host, colon, port = listen.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536):
        raise ValueError(f"{listen!r} is not host:port")
    return host, int(port)
