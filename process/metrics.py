"""One process's /metrics over HTTP, in the text format that Prometheus scrapes.

Served by a thread of its own from `start` to `stop`, so that a scrape never waits for the event
loop unless a collector asks it to; each connection has a short timeout. Knows no metric: those come
from collectors. Bound to the address that it is told, usually loopback: it answers whoever asks.
"""

from __future__ import annotations

import threading
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from process.errors import Unavailable
from process.settings import SettingsError


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
            self._server, self._thread = start_http_server(port, host, self._registry)
        except OSError as error:
            raise Unavailable(f"metrics_listen: cannot listen on {listen}: {error}") from error
        self.address = f"{host}:{self._server.server_port}"

    def stop(self) -> None:
        """End the server and its thread; nothing if it was not started. Idempotent."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            thread.join()
            server.server_close()


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
