"""Prometheus metrics and health probes of a process over HTTP: /metrics, and what `HealthProbes`
answers to /livez and /readyz; and functions that make metric families of plain numbers.

A thread of its own serves them, from `start` to `stop`, so that a scrape waits for the event loop
only where a collector does. Bound to the address that it is given, usually loopback: it answers any
client.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as WaitTimeoutError
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import (
    CollectorRegistry,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process.rpc_errors import Unavailable
from process.settings import split_host_port

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

SCRAPE_WAIT_S = 2.0
"""Longest time that a scrape waits for the event loop."""

STUCK_S = 60.0
"""Time without a turn after which an event loop counts as stuck, and /livez fails. Guessed: the
longest that work held a loop (measured) is below a second."""

_TURN_S = 1.0

Labels = Mapping[str, str]
"""The labels on every sample of a process: its own (a worker's id and role, a store's node id)."""

# A second family beside each counter and histogram, with its creation time: Prometheus would count
# its series, and no query uses it.
disable_created_metrics()  # type: ignore[no-untyped-call]


def gauge(name: str, text: str, labels: Labels, level: float) -> Metric:
    """Make a gauge (a value that goes up and down) of one sample."""
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), float(level))
    return family


def gauges(
    name: str, text: str, labels: Labels, by: str, levels: Iterable[tuple[str, float]]
) -> Metric:
    """Make a gauge with one sample for each value of the label `by`: few and known values, such as
    reasons; never ids."""
    family = GaugeMetricFamily(name, text, labels=(*labels, by))
    for value, level in levels:
        family.add_metric((*labels.values(), value), float(level))
    return family


def counter(name: str, text: str, labels: Labels, count: float) -> Metric:
    """Make a counter since the process started; `_total` is added to its name."""
    family = CounterMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), count)
    return family


def counters(
    name: str, text: str, labels: Labels, by: str, counts: Iterable[tuple[str, float]]
) -> Metric:
    """Make a counter with one sample for each value of the label `by`."""
    family = CounterMetricFamily(name, text, labels=(*labels, by))
    for value, count in counts:
        family.add_metric((*labels.values(), value), count)
    return family


def trace_spans(labels: Labels, num_exported: int, num_failed: int, num_dropped: int) -> Metric:
    """Make the counter of ended trace spans, by what became of them."""
    ends = (("exported", num_exported), ("failed", num_failed), ("dropped", num_dropped))
    text = "Trace spans that ended and do not wait to be sent."
    return counters("baton_trace_spans", text, labels, "outcome", ends)


def histogram(
    name: str,
    text: str,
    labels: Labels,
    bounds: Sequence[float],
    counts: Sequence[int],
    total: float,
) -> Metric:
    """Make a histogram: `counts[i]` observations were at most `bounds[i]` and above the bound
    before, the last count is of those above all bounds; `total` is their sum. Prometheus counts
    what is at most each bound, all smaller ones included."""
    family = HistogramMetricFamily(name, text, labels=tuple(labels))
    buckets: list[tuple[str, float]] = []
    so_far = 0
    for bound, count in zip((*bounds, None), counts, strict=True):
        so_far += count
        buckets.append(("+Inf" if bound is None else repr(bound), so_far))
    family.add_metric(tuple(labels.values()), buckets, total)
    return family


class HealthProbes:
    """Answers Kubernetes' liveness and readiness probes of a process.

    Alive: until its event loop has not turned for STUCK_S, far longer than any work holds it, so
    that a process which is merely busy is not restarted. It depends on no load and no peer. Ready:
    what the process's own check says at that moment; before there is one it is starting. `follow`
    and `end` belong to the event loop's thread, everything else to any.
    """

    def __init__(
        self,
        why: str = "starting",
        clock: Callable[[], float] = time.monotonic,
        turn_s: float = _TURN_S,
    ) -> None:
        """Args: why: why the process is not ready, until there is a check. turn_s: seconds between
        two notes that the loop turns."""
        self._clock = clock
        self._turn_s = turn_s
        self._why = why
        self._check: Callable[[], str] | None = None
        self._turned_at_s: float | None = None
        self._turn: asyncio.TimerHandle | None = None

    def follow(self) -> None:
        """Watch the running loop from now on, until `end`."""
        loop = asyncio.get_running_loop()

        def turn() -> None:
            self._turned_at_s = self._clock()
            self._turn = loop.call_later(self._turn_s, turn)

        turn()

    def end(self) -> None:
        """Stop watching the loop: the process ends, and gets no work. A second call does
        nothing."""
        self._check, self._why = None, "stopping"
        if self._turn is not None:
            self._turn.cancel()
        self._turn = self._turned_at_s = None

    def say(self, why: str) -> None:
        """Set why the process is not ready, until there is a check: how far its start has come."""
        self._why = why

    def set_check(self, check: Callable[[], str]) -> None:
        """Set the readiness check: a function that returns, in one line, why the process should get
        no work; empty: it should. Another thread calls it at any time: it must neither wait nor
        change anything."""
        self._check = check

    def why_not_alive(self) -> str:
        """Why the liveness probe fails; empty: the process is alive."""
        turned_at_s = self._turned_at_s
        silent_s = 0.0 if turned_at_s is None else self._clock() - turned_at_s
        return f"the event loop has not turned for {silent_s:.0f} s" if silent_s > STUCK_S else ""

    def why_not_ready(self) -> str:
        """Why the readiness probe fails; empty: the process is ready."""
        check = self._check
        return self._why if check is None else check()


class LoopCollector(Collector):
    """Collects metrics that only the event loop may read: `read` runs there, and the scrape waits
    for it, SCRAPE_WAIT_S at most. Without an answer the scrape has `silent`'s metrics, not old
    numbers."""

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
        """All metrics of the process, with their values of now."""

        async def reading() -> Sequence[Metric]:
            return self._read()

        asking = asyncio.run_coroutine_threadsafe(reading(), self._loop)
        try:
            return asking.result(SCRAPE_WAIT_S)
        except (WaitTimeoutError, TimeoutError):
            asking.cancel()
            return self._silent()


class _Handler(WSGIRequestHandler):
    """Serves one HTTP connection."""

    timeout = 5.0
    """Seconds for each read from it and each write to it."""

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError):  # too slow: the connection is closed
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape is no event."""


class MetricsServer:
    """Serves /metrics and the health probes over HTTP. `address` is host:port, known once
    started."""

    def __init__(self, *collectors: Collector, health: HealthProbes | None = None) -> None:
        """Args: health: answers the probes; None: they get 404."""
        self._registry = CollectorRegistry(auto_describe=False)
        self._health = health
        ProcessCollector(registry=self._registry)
        self.add(*collectors)
        self._server: WSGIServer | None = None
        self._thread: threading.Thread | None = None
        self.address = ""

    def add(self, *collectors: Collector) -> None:
        """Add collectors, also after the start."""
        for collector in collectors:
            self._registry.register(collector)

    def start(self, listen: str) -> None:
        """Serve on `listen` (host:port; port 0: a free one). Raises: Unavailable when it is
        taken."""
        host, port = split_host_port(listen)
        try:
            self._server = _listen(host, port, _application(self._registry, self._health))
        except OSError as error:
            raise Unavailable(f"metrics_listen: cannot listen on {listen}: {error}") from error
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()
        self.address = f"{listen.rpartition(':')[0]}:{self._server.server_port}"

    def stop(self) -> None:
        """End the server and its thread, if it was started. A second call does nothing."""
        server, thread = self._server, self._thread
        self._server = self._thread = None
        if server is not None and thread is not None:
            server.shutdown()
            thread.join()
            server.server_close()


def _application(registry: CollectorRegistry, health: HealthProbes | None) -> WSGIApplication:
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
