"""The live page over real HTTP: what it shows is what happened, to whom it shows it, and that it
ends with the router; and in a real browser, over a cluster that says what a test wants."""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

from process.rpc_errors import NotFound, Unauthenticated
from protos import inference_pb2
from services.router.callers import ANYBODY, Caller
from services.router.http_server import HttpServer
from services.router.page import routes, snapshots
from services.router.page.routes import LivePage
from services.router.page.snapshots import Snapshots
from tests.harness.browser import browsing, text_of
from tests.harness.router_bench import BOUND_S, HttpBench
from tests.harness.waiting import block_until, until

FILES = {
    "": "text/html",
    "/style.css": "text/css",
    "/page.js": "text/javascript",
    "/mark.svg": "image/svg+xml",
}


async def _data(session: aiohttp.ClientSession, url: str, **headers: str) -> Any:
    async with session.get(f"{url}/live/data.json", headers=headers) as reply:
        assert reply.status == 200, await reply.text()
        return await reply.json()


async def _events(session: aiohttp.ClientSession, url: str) -> AsyncGenerator[Any, None]:
    async with asyncio.timeout(BOUND_S), session.get(f"{url}/live/events") as reply:
        assert reply.headers["Content-Type"] == "text/event-stream"
        async for line in reply.content:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


async def test_it_shows_what_requests_did(bench: HttpBench) -> None:
    """One request, from being served to its account, without a word of what it says."""
    secret = "lighthouse keeper"
    async with aiohttp.ClientSession() as session:
        bench.decode.token_gate.close()
        going = asyncio.create_task(
            bench.generate(request_id="told", text=secret, sampling={"max_tokens": 40})
        )
        router = bench.router
        await until(lambda: router.desk.log.num_live == 1)
        live = (await _data(session, bench.url))["requests"]
        assert [(each["request_id"], each["outcome"]) for each in live] == [("told", "")]
        assert live[0]["state"]
        bench.decode.token_gate.open()
        *_, last = await going
        await until(lambda: router.desk.log.num_live == 0)
        await asyncio.sleep(snapshots.INTERVAL_S / 2)  # a snapshot is that old at most
        told = await _data(session, bench.url)
        assert secret not in json.dumps(told)
        (ended,) = told["requests"]
        async with session.get(
            f"{bench.url}/live/explain.json?request_id=told&tenant={ended['tenant']}"
        ) as reply:
            (decision,) = (await reply.json())["decisions"]
        assert (decision["prefill_id"], decision["decode_id"]) == ("p0", "d0")
        async with session.get(f"{bench.url}/live/explain.json?request_id=other") as reply:
            assert reply.status == 404
    assert (ended["outcome"], ended["state"]) == ("finished", "")
    assert (ended["prefill_id"], ended["decode_id"]) == ("p0", "d0")
    assert ended["num_output_tokens"] == 40
    assert ended["provenance"]["num_prompt_tokens"] == ended["num_prompt_tokens"] > 0
    assert {leg["role"] for leg in ended["provenance"]["legs"]} == {"prefill", "decode"}
    spans = ended["spans"]
    assert spans[0]["begin_s"] == 0
    for before, after in itertools.pairwise(spans):
        assert before["end_s"] == after["begin_s"] and before["stage"] != after["stage"]
    # All of its stages; its last message was on its way after them.
    assert spans[-1]["end_s"] == pytest.approx(sum(time.seconds for time in last.times))
    assert spans[-1]["end_s"] <= ended["elapsed_s"]
    assert 0 < ended["first_token_s"] < ended["elapsed_s"]
    assert {worker["worker_id"] for worker in told["status"]["workers"]} == {"p0", "d0"}


async def test_its_files_are_ours_and_load_nothing_from_elsewhere(bench: HttpBench) -> None:
    async with aiohttp.ClientSession() as session:
        for name, kind in FILES.items():
            async with session.get(f"{bench.url}/live{name}") as reply:
                text = await reply.text()
                assert reply.status == 200 and reply.content_type == kind
                policy = reply.headers["Content-Security-Policy"]
                assert "default-src 'none'" in policy and "unsafe" not in policy
                assert reply.headers["X-Content-Type-Options"] == "nosniff"
                assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), name
                assert "innerHTML" not in text
        for name in ("/routes.py", "/../routes.py", "/%2e%2e/routes.py", "/nothing.js"):
            async with session.get(f"{bench.url}/live{name}") as reply:
                assert reply.status == 404, name


async def test_the_history_comes_once_and_then_what_is_new(bench: HttpBench) -> None:
    async with aiohttp.ClientSession() as session:
        history = bench.router.desk.history
        await history.stop()  # no point between the answer and ours
        await bench.generate(sampling={"max_tokens": 4})
        history.take_point()
        async with aclosing(_events(session, bench.url)) as events:
            first = await anext(events)
            history.take_point()
            # One may be on its way that was made before.
            while not (new := (await anext(events))["history"]):
                pass
        assert [point["unix_ms"] for point in new] == [str(history.points[-1].unix_ms)]
        assert len(first["history"]) >= 1
        point = first["history"][-1]
        num_prompt = sum(int(v) for k, v in point.items() if k.startswith("num_tokens_"))
        assert num_prompt > 0 and int(point["num_output_tokens"]) == 4
        assert point["num_finished"] == 1 and point["first_token_s"] > 0


async def test_a_name_elsewhere_that_points_here_is_told_nothing(bench: HttpBench) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("data.json", "events", "explain.json"):
            async with session.get(
                f"{bench.url}/live/{path}", headers={"Host": "elsewhere.example:8501"}
            ) as reply:
                assert reply.status == 403
                assert "127.0.0.1" in (await reply.json())["error"]["message"]
        port = bench.url.rpartition(":")[2]
        for host in (f"localhost:{port}", f"[::1]:{port}", "127.0.0.1"):
            assert await _data(session, bench.url, Host=host)


async def _status(
    asked: inference_pb2.GetClusterStatusRequest,
) -> inference_pb2.GetClusterStatusReply:
    assert asked.as_heard  # looking costs the workers nothing
    return inference_pb2.GetClusterStatusReply(router_id="r")


def _explain(asked: inference_pb2.ExplainRequest) -> inference_pb2.ExplainReply:
    raise NotFound("request_id: nobody knows it")


def _keyed(header: str) -> Caller:
    if header not in ("Bearer admin", "Bearer user"):
        raise Unauthenticated("send an API key")
    return Caller(tenant="t", key_id="k", is_admin=header == "Bearer admin")


async def test_with_keys_only_an_admin_is_told() -> None:
    page = LivePage(_status, _keyed, explain=_explain, is_on_loopback=True)
    async with _serving(page) as url, aiohttp.ClientSession() as session:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer nobody"}, 401),
            ({"Authorization": "Bearer user"}, 403),
            # With a key whoever sends it may come by any name.
            ({"Authorization": "Bearer admin", "Host": "baton.example"}, 200),
        ):
            for path in ("data.json", "explain.json", "events"):
                async with session.get(f"{url}/live/{path}", headers=headers) as reply:
                    is_unknown = status == 200 and path == "explain.json"
                    assert reply.status == (404 if is_unknown else status), (path, headers)
        async with session.get(f"{url}/live") as reply:
            assert reply.status == 200  # the page itself says nothing


async def test_viewers_are_bounded_and_end_with_the_server() -> None:
    page = LivePage(_status, lambda header: ANYBODY, explain=_explain, is_on_loopback=True)
    async with aiohttp.ClientSession() as session:
        async with _serving(page) as url:
            replies = [await session.get(f"{url}/live/events") for _ in range(routes.MAX_VIEWERS)]
            async with session.get(f"{url}/live/events") as refused:
                assert refused.status == 429
            replies.pop().close()
            await until(lambda: page.num_viewers == routes.MAX_VIEWERS - 1)
            again = await session.get(f"{url}/live/events")
            assert again.status == 200
        # The server ended; the streams with it, at once rather than after its patience.
        await until(lambda: page.num_viewers == 0)
        for reply in (*replies, again):
            reply.close()


async def test_a_snapshot_serves_all_who_look_within_a_moment() -> None:
    num_made, now_s = 0, 100.0

    async def status(
        asked: inference_pb2.GetClusterStatusRequest,
    ) -> inference_pb2.GetClusterStatusReply:
        nonlocal num_made
        num_made += 1
        if num_made == 2:
            raise ValueError("just now")
        return inference_pb2.GetClusterStatusReply(
            num_requests_finished=num_made,
            history=[inference_pb2.UsagePoint(unix_ms=at) for at in (1, 2, 3)],
            requests=[
                inference_pb2.RequestInfo(request_id="live", num_output_tokens=num_made),
                inference_pb2.RequestInfo(request_id="ended", outcome="finished"),
            ],
        )

    shown = Snapshots(status, clock=lambda: now_s)
    texts = [await shown.text(after) for after in (0, 2, 3)]
    assert num_made == 1
    assert [seen for _, seen in texts] == [3, 3, 3]
    assert [len(json.loads(text)["history"]) for text, _ in texts] == [3, 1, 0]
    now_s += snapshots.INTERVAL_S
    with pytest.raises(ValueError, match="just now"):
        await shown.text()
    text, _ = await shown.text()  # a failure is not kept
    told = json.loads(text)
    assert told["status"]["num_requests_finished"] == "3"
    assert [(r["request_id"], r["num_output_tokens"]) for r in told["requests"]] == [
        ("live", 3),
        ("ended", 0),
    ]


DRAIN_S = 3600.0


class _serving:
    """A page on a server of its own."""

    def __init__(self, page: LivePage) -> None:
        self._server = HttpServer([page.add_to], max_body_bytes=1024, drain_s=DRAIN_S)

    async def __aenter__(self) -> str:
        await self._server.start("127.0.0.1:0")
        return f"http://{self._server.address}"

    async def __aexit__(self, *error: object) -> None:
        await self._server.stop()


async def test_a_reader_that_takes_nothing_is_let_go() -> None:
    """It holds one stream for a while, then it is gone, with all that was not written to it."""

    async def large(
        asked: inference_pb2.GetClusterStatusRequest,
    ) -> inference_pb2.GetClusterStatusReply:
        return inference_pb2.GetClusterStatusReply(problems=["x" * 1_000_000])

    quick = {"write_s": 0.1, "interval_s": 0.001}
    page = LivePage(large, lambda header: ANYBODY, explain=_explain, is_on_loopback=True, **quick)
    async with _serving(page) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=4096)
        writer.write(f"GET /live/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        head = await reader.readuntil(b"\r\n\r\n")  # it views, however soon it is let go
        assert head.startswith(b"HTTP/1.1 200")
        await until(lambda: page.num_viewers == 0)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            while True:
                await reader.readexactly(1 << 16)
        writer.close()


# ---- in a browser


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
