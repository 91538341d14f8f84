"""/metrics answers over HTTP from its own thread, and leaves nothing behind."""

from __future__ import annotations

import socket
import threading
import urllib.request

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process import metrics
from process.errors import Unavailable
from process.metrics import MetricsServer
from process.settings import SettingsError


class _One(Collector):
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        Counter("baton_test_things", "Things.", registry=self.registry).inc(3)

    def collect(self) -> list[Metric]:
        return list(self.registry.collect())


def test_what_is_collected_is_served_until_the_end() -> None:
    server = MetricsServer(_One())
    server.stop()  # not started: nothing
    before = threading.active_count()
    server.start("127.0.0.1:0")
    url = f"http://{server.address}/metrics"
    with urllib.request.urlopen(url, timeout=30) as reply:
        assert b"baton_test_things_total 3.0" in reply.read()
    other = MetricsServer(_One())
    with pytest.raises(Unavailable, match="metrics_listen"):
        other.start(server.address)
    server.stop()
    server.stop()
    assert threading.active_count() == before
    with socket.create_server(("127.0.0.1", int(server.address.rpartition(":")[2]))):
        pass  # the port is free again


def test_a_connection_that_says_no_more_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.05)
    server = MetricsServer(_One())
    server.start("127.0.0.1:0")
    try:
        host, _, port = server.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost")
            assert connection.recv(1) == b""
    finally:
        server.stop()


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:", ":1", "127.0.0.1:99999"])
def test_an_address_that_is_none_is_named(listen: str) -> None:
    with pytest.raises(SettingsError, match="metrics_listen"):
        metrics.check_listen("metrics_listen", listen)


def test_off_is_no_address() -> None:
    metrics.check_listen("metrics_listen", "")
