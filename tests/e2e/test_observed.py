"""A whole cluster as those who watch it see it: a real Prometheus that scrapes it, and the live
page in a real browser. Each part is skipped, loudly, where its program is not installed.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from baton.client import SyncClient
from baton.local_cluster import ClusterConfig, LocalCluster
from tests.harness.browser import browsing, text_of
from tools import dashboard_panels

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

BOUND_S = 60.0
ALERTS = Path(__file__).parents[2] / "helm" / "baton" / "alerts" / "baton.yaml"
PARTS = {"store", "prefill-0", "decode-0", "router"}
SECRET = "Once upon a lighthouse"


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(ClusterConfig(port=0, http_port=0, metrics=True)) as started:
        with SyncClient(started.address) as client:
            for _ in range(2):
                client.complete(SECRET * 8, max_tokens=8)
        yield started


def _until(found: Callable[[], Any], what: str) -> Any:
    """Ask until there is an answer."""
    end_s = time.monotonic() + BOUND_S
    while time.monotonic() < end_s:
        answer = found()
        if answer:
            return answer
        time.sleep(0.2)
    raise AssertionError(f"not within {BOUND_S:g} s: {what}")


class _Prometheus:
    """A Prometheus over the files that `baton up --metrics` wrote, scraping each second."""

    def __init__(self, config: Path, folder: Path) -> None:
        text = re.sub(r"(\w+_interval): \d+s", r"\1: 1s", config.read_text())
        own = folder / "prometheus.yml"
        own.write_text(f"{text}rule_files: [{json.dumps(str(ALERTS))}]\n")
        self._log = (folder / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={own}",
                f"--storage.tsdb.path={folder / 'data'}",
                "--web.listen-address=127.0.0.1:0",
            ],
            stdout=subprocess.DEVNULL,
            stderr=self._log,
        )
        self._folder = folder
        self._url = _until(self._find_url, "prometheus listens")
        _until(self._is_ready, "prometheus reads its own files")

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def get(self, path: str, **query: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=10) as reply:
            said = json.loads(reply.read())
        assert said["status"] == "success", said
        return said["data"]

    def value(self, query: str) -> float | None:
        """Of a query with one result; None while there is none."""
        result = self.get("query", query=query)["result"]
        return float(result[0]["value"][1]) if result else None

    def _is_ready(self) -> bool:
        """It answers queries; before that it listens, and says 503."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=10) as reply:
                return bool(reply.status == 200)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            return False

    def _find_url(self) -> str:
        assert self._process.poll() is None, (self._folder / "prometheus.log").read_text()
        said = re.search(
            r'Listening on.*address="?(127\.0\.0\.1:\d+)',
            (self._folder / "prometheus.log").read_text(),
        )
        return f"http://{said[1]}" if said else ""


@pytest.fixture
def prometheus(cluster: LocalCluster, tmp_path: Path) -> Iterator[_Prometheus]:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed: nothing is scraped for real")
    assert cluster.metrics_config is not None
    started = _Prometheus(cluster.metrics_config, tmp_path)
    try:
        yield started
    finally:
        started.stop()


def test_prometheus_scrapes_all_parts_and_answers_every_query(
    cluster: LocalCluster, prometheus: _Prometheus
) -> None:
    def ups() -> dict[str, float]:
        found = prometheus.get("query", query="up")["result"]
        return {each["metric"]["part"]: float(each["value"][1]) for each in found}

    _until(lambda: ups() == dict.fromkeys(PARTS, 1.0), "all parts are up")
    _until(lambda: prometheus.value("sum(baton_router_output_tokens_total)"), "tokens")
    assert prometheus.value("sum(baton_router_output_tokens_total)") == 16
    assert prometheus.value('baton_router_requests_total{outcome="finished"}') == 2
    assert prometheus.value("sum(baton_up)") == len(PARTS)
    for name, (_, _, panels) in dashboard_panels.DASHBOARDS.items():
        for panel in panels:
            for _, query in panel.queries:
                asked = query.replace("$__rate_interval", "1m")
                assert prometheus.get("query", query=asked) is not None, (name, panel.title)
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) > 10
    _until(
        lambda: all(
            rule["health"] == "ok"
            for group in prometheus.get("rules")["groups"]
            for rule in group["rules"]
        ),
        "all rules were evaluated",
    )
    # A part that dies is down, not gone; its next life, on another port, is found.
    cluster.kill("store", restart=False)
    _until(lambda: ups().get("store") == 0, "the dead part is seen to be down")
    cluster.restart("store")
    cluster.wait_ready(BOUND_S)
    _until(lambda: ups() == dict.fromkeys(PARTS, 1.0), "its next life is scraped")


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    with browsing(tmp_path / "profile") as driver:
        yield driver


def test_the_page_in_a_browser(cluster: LocalCluster, browser: Any) -> None:
    """Live, a request in full, the router away and back; no error in the browser's log, and no word
    of a prompt on the page."""

    text = functools.partial(text_of, browser)
    browser.get(f"http://{cluster.http_address}/live")
    _until(lambda: text("#link") == "live", "the page is live")
    _until(lambda: "decode-0" in text("#decode") and "prefill-0" in text("#prefill"), "workers")
    assert "store" in text("#stores")
    with SyncClient(cluster.address) as client:
        request_id = client.complete(SECRET * 8, max_tokens=24).request_id
    _until(lambda: request_id in text("#requests"), "the request is shown")
    _until(lambda: "finished" in text("#requests tbody tr:first-child"), "as finished")
    assert "prefill-0 → decode-0" in text("#requests tbody tr:first-child")
    browser.find_element("css selector", "#requests tbody tr").click()
    detail = _until(lambda: text("#detail"), "it is shown in full")
    for words in (request_id, "prefill compute", "decode fetch", "prefill on prefill-0", "store"):
        assert words in detail
    _until(lambda: "Why it went there" in text("#detail"), "why the router chose so")
    _until(lambda: "%" in text("#figures"), "the hit rate is told")
    assert SECRET not in str(browser.page_source)
    assert browser.get_log("browser") == []

    cluster.kill("router", restart=False)
    _until(lambda: text("#link") == "reconnecting", "the page says that it is cut off")
    assert "decode-0" in text("#decode")  # what was known stays, dimmed
    assert browser.execute_script("return document.querySelector('main').className") == "stale"
    cluster.restart("router")
    cluster.wait_ready(BOUND_S)
    _until(lambda: text("#link") == "live", "the page is back")
    # A refused connection is the browser's own to log; anything else would be ours.
    said = [entry for entry in browser.get_log("browser") if "ERR_" not in entry["message"]]
    assert said == []
