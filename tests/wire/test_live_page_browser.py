"""The live page in a real browser, over a cluster that says what a test wants: keys, what hostile
names do, an empty cluster, a request's row under a pointer that is slower than the page.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from process.errors import Unauthenticated
from protos import inference_pb2
from services.router.callers import ANYBODY, Caller
from services.router.http_server import HttpServer
from services.router.page.routes import LivePage
from tests.harness.browser import browsing, text_of
from tests.harness.waiting import block_until

BOUND_S = 20.0
HOSTILE = '<img src=x onerror="document.title=1">'


class _Cluster:
    """What the router says, and the page over it, on a loop of its own."""

    def __init__(self) -> None:
        self.reply = inference_pb2.GetClusterStatusReply(
            router_id="r", redis_reachable=True, history_interval_ms=2000
        )
        self.key = ""
        self.num_asked_why = 0
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="page")
        self._thread.start()
        page = LivePage(self._status, self._authorize, explain=self._explain, is_on_loopback=True)
        self._server = HttpServer([page.add_to], max_body_bytes=1024, drain_s=1.0)
        self.call(self._server.start("127.0.0.1:0"))
        self.url = f"http://{self._server.address}/live"

    def stop(self) -> None:
        self.call(self._server.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(BOUND_S)

    async def _status(
        self, asked: inference_pb2.GetClusterStatusRequest
    ) -> inference_pb2.GetClusterStatusReply:
        reply = inference_pb2.GetClusterStatusReply()
        reply.CopyFrom(self.reply)
        for request in reply.requests:
            if not request.outcome:
                request.elapsed_s = time.monotonic()  # every row changes with every look
        return reply

    def _authorize(self, header: str) -> Caller:
        if not self.key:
            return ANYBODY
        if header != f"Bearer {self.key}":
            raise Unauthenticated("this API key is not known")
        return Caller(tenant="t", key_id="k", is_admin=True)

    def _explain(self, asked: inference_pb2.ExplainRequest) -> inference_pb2.ExplainReply:
        self.num_asked_why += 1
        reply = inference_pb2.ExplainReply()
        decision = reply.decisions.add(prefill_id="p", decode_id="d", unit="s", policy=HOSTILE)
        decision.candidates.add(worker_id="p", role="prefill", chosen=True, cost=0.25)
        return reply


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with browsing(tmp_path_factory.mktemp("browser") / "profile") as driver:
        yield driver


@pytest.fixture
def cluster(browser: Any) -> Iterator[_Cluster]:
    made = _Cluster()
    try:
        yield made
    finally:
        # The page goes first: what it says of a server that is gone would stand in the log that the
        # next test reads.
        browser.get("about:blank")
        made.stop()


@pytest.fixture
def text(browser: Any) -> Callable[[str], str]:
    return functools.partial(text_of, browser)


def test_an_empty_cluster(cluster: _Cluster, browser: Any, text: Callable[[str], str]) -> None:
    browser.get(cluster.url)
    block_until(lambda: text("#link") == "live")
    block_until(lambda: "No worker is registered" in text("#decode"))
    assert "every prompt is computed" in text("#stores")
    assert "baton generate" in text("#no-requests")
    assert text(".charts").count("nothing yet") == 4
    assert browser.get_log("browser") == []


def test_names_are_text_whatever_they_say(
    cluster: _Cluster, browser: Any, text: Callable[[str], str]
) -> None:
    reply = cluster.reply
    reply.problems.append(HOSTILE)
    reply.workers.add(worker_id=HOSTILE, role="decode", model=HOSTILE, integrity_error=HOSTILE)
    reply.stores.add(node_id=HOSTILE, integrity_error=HOSTILE)
    request = reply.requests.add(request_id=HOSTILE, tenant=HOSTILE, outcome="failed", code=HOSTILE)
    request.spans.add(stage=HOSTILE, begin_s=0, end_s=1)
    leg = request.provenance.legs.add(role=HOSTILE, worker_id=HOSTILE, transport=HOSTILE)
    leg.recomputed.add(reason=HOSTILE, num_blocks=1)
    browser.get(cluster.url)
    block_until(lambda: HOSTILE in text("#requests"))
    browser.find_element("css selector", "#requests tbody tr").click()
    block_until(lambda: "policy" in text("#detail"))
    for place in ("#problems", "#decode", "#stores", "#model", "#detail"):
        assert HOSTILE in text(place), place
    assert browser.title == "Baton"
    assert browser.execute_script("return document.querySelectorAll('img[src=x]').length") == 0
    assert browser.get_log("browser") == []


def test_a_worker_that_is_gone_is_missed(
    cluster: _Cluster, browser: Any, text: Callable[[str], str]
) -> None:
    for name in ("d0", "d1"):
        cluster.reply.workers.add(worker_id=name, role="decode")
    browser.get(cluster.url)
    block_until(lambda: "d0" in text("#decode") and "d1" in text("#decode"))
    assert "gone" not in text("#decode")
    del cluster.reply.workers[0]
    block_until(lambda: "gone for" in text("#decode"))
    assert "d0" in text("#decode .card[data-state=bad]")
    cluster.reply.workers.add(worker_id="d0", role="decode")
    block_until(lambda: "gone" not in text("#decode"))
    assert browser.get_log("browser") == []


def test_a_key_is_asked_for_and_kept_for_this_tab(
    cluster: _Cluster, browser: Any, text: Callable[[str], str]
) -> None:
    cluster.key = "secret"
    cluster.reply.workers.add(worker_id="d0", role="decode")
    browser.get(cluster.url)
    block_until(lambda: text("#link") == "needs a key")
    assert "d0" not in browser.page_source
    field = browser.find_element("id", "key")
    field.send_keys("wrong\n")
    block_until(lambda: "not known" in text("#key-problem"))
    field.send_keys("secret\n")
    block_until(lambda: text("#link") == "live")
    block_until(lambda: "d0" in text("#decode"))
    browser.refresh()
    block_until(lambda: text("#link") == "live")
    assert "secret" not in browser.current_url and "secret" not in browser.page_source
    said = [entry for entry in browser.get_log("browser") if "401" not in entry["message"]]
    assert said == []
    browser.execute_script("sessionStorage.clear()")


def test_a_row_keeps_its_place_under_the_pointer(
    cluster: _Cluster, browser: Any, text: Callable[[str], str]
) -> None:
    """A live request's numbers change every second; its row stays, and so does the focus."""
    cluster.reply.requests.add(request_id="live", state="decoding")
    cluster.reply.requests.add(request_id="over", outcome="finished", elapsed_s=1)
    browser.get(cluster.url)
    block_until(lambda: "live" in text("#requests"))
    row = browser.find_element("css selector", "#requests tbody tr")
    before = text("#requests tbody tr:first-child")
    browser.execute_script("arguments[0].focus()", row)
    block_until(lambda: text("#requests tbody tr:first-child") != before)
    assert browser.switch_to.active_element == row  # not stale, and still focused
    row.send_keys("\n")
    block_until(lambda: text("#detail-title") == "live")
    assert cluster.num_asked_why == 0  # it may be chosen for again
    cluster.reply.requests[0].outcome = "finished"
    block_until(lambda: cluster.num_asked_why == 1)
    block_until(lambda: "Why it went there" in text("#detail"))
    browser.find_element("id", "detail-close").click()
    assert not browser.find_element("id", "detail").is_displayed()
    assert browser.get_log("browser") == []


@pytest.fixture
def busy(cluster: _Cluster) -> _Cluster:
    """Requests that are under way, over, refused and failed, and prompts that come now and then."""
    reply = cluster.reply
    reply.num_requests_in_flight = 2
    reply.num_requests_finished, reply.num_requests_failed = 1200, 12
    reply.num_requests_failed_by_code.update(resource_exhausted=9, internal=3)
    for role, num in (("prefill", 1), ("decode", 4)):
        worker = reply.workers.add(worker_id=f"{role}-0", role=role, model="m", num_blocks=100)
        worker.num_running, worker.num_free_blocks = num, 60
    for index in range(60):
        has_prompt = index % 5 == 0
        reply.history.add(
            unix_ms=1_700_000_000_000 + 2000 * index,
            num_tokens_computed=100 * has_prompt,
            num_tokens_local=300 * has_prompt,
            num_output_tokens=40,
            first_token_s=0.2 * has_prompt,
        )
    for index in range(40):
        request = reply.requests.add(
            request_id=f"{index:032x}",
            tenant="acme",
            outcome="failed" if index % 7 == 0 else "finished",
            code="resource_exhausted" if index % 7 == 0 else "",
            prefill_id="prefill-0",
            decode_id="decode-0",
            num_prompt_tokens=100,
            elapsed_s=1.5,
        )
        request.spans.add(stage="prefill", begin_s=0, end_s=0.5)
        request.spans.add(stage="decode", begin_s=0.5, end_s=1.5)
    return cluster


def test_failures_and_running_samples_are_named(
    busy: _Cluster, browser: Any, text: Callable[[str], str]
) -> None:
    browser.get(busy.url)
    block_until(lambda: "1,200" in text("#figures"))
    assert "5 running or waiting on workers" in text("#figures")
    assert text("#figures [data-tone=refused]") == "9 resource exhausted"
    assert text("#figures [data-tone=failed]") == "3 internal"


def test_prompts_that_come_now_and_then_draw_a_line(
    busy: _Cluster, browser: Any, text: Callable[[str], str]
) -> None:
    browser.get(busy.url)
    block_until(lambda: "1,200" in text("#figures"))
    count = "return document.querySelectorAll(arguments[0]).length"
    for chart in ("#chart-hits", "#chart-first"):
        assert browser.execute_script(count, f"{chart} polyline") == 1, chart
        assert browser.execute_script(count, f"{chart} circle") == 0, chart


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_nothing_scrolls_but_the_page_and_it_only_down(
    busy: _Cluster, browser: Any, text: Callable[[str], str], width: int
) -> None:
    """390: a phone's."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.get(busy.url)
        block_until(lambda: "1,200" in text("#figures"))
        browser.find_element("css selector", "#requests tbody tr").click()
        block_until(lambda: "policy" in text("#detail"))
        script = """return [...document.querySelectorAll('body *')].filter((node) =>
            ['auto', 'scroll'].includes(getComputedStyle(node).overflowY)
            && node.scrollHeight > node.clientHeight).map((node) => node.className)"""
        assert browser.execute_script(script) == []
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        assert "100" in text("#requests td[data-name=Prompt]")
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
