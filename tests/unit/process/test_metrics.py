"""/metrics answers over HTTP from its own thread, and leaves nothing behind."""

from __future__ import annotations

import random
import socket
import threading
import urllib.request
from bisect import bisect_left
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from process import metrics, settings
from process.metrics import MetricsServer, counter, counters, gauge, gauges, histogram, trace_spans
from process.rpc_errors import Unavailable
from process.settings import SettingsError
from tests.harness import exposition


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
        settings.check_host_port("metrics_listen", listen)


def test_off_is_no_address() -> None:
    settings.check_host_port("metrics_listen", "")


WHO = {"worker_id": "w", "role": "decode"}


class _Given(Collector):
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def collect(self) -> tuple[Metric, ...]:
        return self._metrics


def _read(*metrics: Metric) -> dict[str, exposition.Family]:
    registry = CollectorRegistry()
    registry.register(_Given(*metrics))
    return exposition.read(generate_latest(registry).decode())


def test_one_and_several_of_each_kind() -> None:
    found = _read(
        gauge("baton_level", "A level.", WHO, 2),
        gauges("baton_levels", "Levels.", WHO, "state", [("a", 1), ("b", 0)]),
        counter("baton_things", "Things.", WHO, 3),
        counters("baton_kinds", "Kinds.", WHO, "reason", []),
        trace_spans(WHO, 5, 0, 1),
    )
    assert found["baton_level"].samples[0].labels == WHO
    assert [s.value for s in found["baton_levels"].samples] == [1, 0]
    assert found["baton_things_total"].samples[0].value == 3
    assert found["baton_kinds_total"].samples == ()
    assert {s.labels["outcome"]: s.value for s in found["baton_trace_spans_total"].samples} == {
        "exported": 5,
        "failed": 0,
        "dropped": 1,
    }


def test_a_histogram_counts_as_prometheus_does(seed: int, scale: Callable[[int], int]) -> None:
    """Each bucket holds all that is at most its bound."""
    random_ = random.Random(seed)
    for _ in range(scale(200)):
        bounds = sorted({round(random_.uniform(0.001, 9), 3) for _ in range(random_.randrange(8))})
        values = [random_.uniform(0, 10) for _ in range(random_.randrange(20))]
        counts = [0] * (len(bounds) + 1)
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        made = histogram("baton_x_seconds", "X.", WHO, bounds, counts, sum(values))
        samples = _read(made)["baton_x_seconds"].samples
        for sample in samples:
            if sample.name.endswith("_bucket"):
                at_most = sum(value <= float(sample.labels["le"]) for value in values)
                assert sample.value == at_most, (sample, values)
            elif sample.name.endswith("_count"):
                assert sample.value == len(values)
