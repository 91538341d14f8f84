"""One process's /metrics over HTTP, in the text format that Prometheus scrapes, and beside it what
probes ask: /livez and /readyz.

Served by a thread of its own from `start` to `stop`, so that a scrape never waits for the event
loop unless a collector asks it to; each connection has a short timeout. Knows no metric of Baton's:
those come from collectors. It adds what the system knows of the process (CPU, memory, files). Bound
to the address that it is told, usually loopback: it answers whoever asks.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process.errors import Unavailable
from process.health import Health
from process.settings import SettingsError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

SCRAPE_WAIT_S = 2.0
"""For the event loop's answer."""

# A second family beside each counter and histogram, of when it was made: nobody asks for it, and
# Prometheus counts its series.
disable_created_metrics()  # type: ignore[no-untyped-call]


class LoopCollector(Collector):
    """Metrics that only the event loop may read: `read` runs there, whoever scrapes waits for it, a
    bounded time. Without an answer the scrape says so (`silent`) rather than showing old numbers.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        read: Callable[[], Sequence[Metric]],
        silent: Callable[[], Sequence[Metric]],
    ) -> None:
        self._loop = loop
        self._read = read
        self._silent = silent

    def collect(self) -> Iterable[Metric]:
        """All metrics, now."""

        async def reading() -> Sequence[Metric]:
            return self._read()

        asking = asyncio.run_coroutine_threadsafe(reading(), self._loop)
        try:
            return asking.result(SCRAPE_WAIT_S)
        except (WaitTimeoutError, TimeoutError):
            asking.cancel()
            return self._silent()


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

    def __init__(self, *collectors: Collector, health: Health | None = None) -> None:
        """`health`: what probes are told; None: there is nobody to probe, and they get 404."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._health = health
        ProcessCollector(registry=self._registry)
        self.add(*collectors)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.address = ""

    def add(self, *collectors: Collector) -> None:
        """More to collect; the server may be started already."""
        for collector in collectors:
            self._registry.register(collector)

    def start(self, listen: str) -> None:
        """Serve on `listen` (host:port; port 0: a free one). Raises: Unavailable when it is
        taken."""
        host, port = split(listen)
        try:
            self._server = _listen(host, port, _application(self._registry, self._health))
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


def _application(registry: CollectorRegistry, health: Health | None) -> WSGIApplication:
    metrics: WSGIApplication = make_wsgi_app(registry)
    probes = {"/livez": health.why_not_alive, "/readyz": health.why_not_ready} if health else {}

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        probe = probes.get(path)
        if probe is None and path in ("/livez", "/readyz"):
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"this process has no probes\n"]
        if probe is None:
            return metrics(environ, start_response)
        why_not = probe()
        start_response(
            "503 Service Unavailable" if why_not else "200 OK",
            [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")],
        )
        return [f"{why_not or 'ok'}\n".encode()]

    return answer


def _listen(host: str, port: int, application: WSGIApplication) -> WSGIServer:
    class Server(ThreadingWSGIServer):
        address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]

    return make_server(host, port, application, Server, _Handler)


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
