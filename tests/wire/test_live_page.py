"""The live page over real HTTP: what it shows is what happened, to whom it shows it, and that it
ends with the router.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp
import pytest

from process.errors import NotFound, Unauthenticated
from protos import inference_pb2
from services.router.callers import ANYBODY, Caller
from services.router.http_server import HttpServer
from services.router.page import routes, snapshots
from services.router.page.routes import LivePage
from services.router.page.snapshots import Snapshots
from tests.harness.router_bench import BOUND_S, http_bench, request
from tests.harness.waiting import until

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


async def test_it_shows_what_requests_did() -> None:
    """One request, from being served to its account, without a word of what it says."""
    secret = "lighthouse keeper"
    async with http_bench() as bench, aiohttp.ClientSession() as session:
        bench.decode.token_gate.close()
        going = asyncio.create_task(
            bench.generate(request(request_id="told", text=secret, sampling={"max_tokens": 40}))
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


async def test_its_files_are_ours_and_load_nothing_from_elsewhere() -> None:
    async with http_bench() as bench, aiohttp.ClientSession() as session:
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


async def test_the_history_comes_once_and_then_what_is_new() -> None:
    async with http_bench() as bench, aiohttp.ClientSession() as session:
        history = bench.router.desk.history
        await history.stop()  # no point between the answer and ours
        await bench.generate(request(sampling={"max_tokens": 4}))
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


async def test_a_name_elsewhere_that_points_here_is_told_nothing() -> None:
    async with http_bench() as bench, aiohttp.ClientSession() as session:
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
