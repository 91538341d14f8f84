"""HTTP where only a fault of ours, or a moment that no client can choose, shows it; and its server
alone, on the loop that routers run on. Reaches inside."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web

from baton.development_certificates import CertSet, write
from process import grpc_server
from process.authorization import PeerRole
from process.grpc_server import PublicPortLimits
from process.rpc_errors import NoCapacity
from process.tls import TlsIdentity
from protos import common_pb2, inference_pb2
from services.router.http_server import HttpConnections, HttpServer
from services.router.openai import completions, routes
from services.router.openai.answers import Envelope
from services.router.page.snapshots import Snapshots
from tests.harness.access import one_sided_tls
from tests.harness.router_bench import JSON, Served, raw, served
from tests.harness.waiting import until

TEXT = "/v1/completions"
MIB = 1024 * 1024


@pytest.fixture(scope="module")
def router() -> Iterator[Served]:
    with served() as bench:
        yield bench


def test_a_prompt_that_is_refused_is_not_decoded_for_its_echo(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = []
    text_of = completions.text_of

    def counted(*given: Any) -> str:
        decoded.append(given)
        return text_of(*given)

    monkeypatch.setattr(completions, "text_of", counted)
    body = {"prompt": [5] * 50_000, "echo": True, "n": 128}
    assert router.ask(TEXT, body)[0] == 400 and not decoded
    # And once for all samples of one that is answered.
    status, answer = router.ask(TEXT, {"prompt": [5], "echo": True, "n": 3, "max_tokens": 1})
    assert status == 200 and len(answer["choices"]) == 3 and len(decoded) == 1


def test_a_fault_of_ours_amid_a_stream_ends_it_in_the_one_form(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk, num_chunks = Envelope.chunk, 0

    def failing(self: Envelope, *given: Any) -> dict[str, Any]:
        nonlocal num_chunks
        num_chunks += 1
        if num_chunks == 3:
            raise ZeroDivisionError("secret")
        return chunk(self, *given)

    monkeypatch.setattr(Envelope, "chunk", failing)
    body = {"prompt": "hello", "max_tokens": 20, "stream": True}
    connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=20)
    try:
        connection.request("POST", TEXT, json.dumps(body), JSON)
        answer = connection.getresponse().read()  # raises for one that is cut off
    finally:
        connection.close()
    *_, last = [line for line in answer.split(b"\n\n") if line]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "internal_error" and b"secret" not in answer
    assert b"[DONE]" not in answer and b"HTTP/1.1" not in answer


def test_no_second_answer_stands_amid_a_first_one(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, num_texts = Snapshots.text, 0

    async def failing(self: Snapshots, after_unix_ms: int = 0) -> tuple[str, int]:
        nonlocal num_texts
        num_texts += 1
        if num_texts == 2:
            raise NoCapacity("not now")
        return await text(self, after_unix_ms)

    monkeypatch.setattr(Snapshots, "text", failing)
    with router.connect() as peer:
        peer.sendall(b"GET /live/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(65536):
                answer += data
    assert answer.count(b"HTTP/1.1") == 1 and b"data:" in answer


def test_a_large_body_is_read_while_others_are_served(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, parse = threading.Event(), threading.Event(), routes.parse_body

    def held(data: bytes) -> Any:
        if len(data) > 100_000:
            begun.set()
            assert go_on.wait(20)
        return parse(data)

    monkeypatch.setattr(routes, "parse_body", held)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(router.ask, TEXT, {"prompt": [5] * 200_000})
        assert begun.wait(20)
        assert router.ask(TEXT, {"prompt": "a", "max_tokens": 2})[0] == 200
        go_on.set()
        status, answer = large.result(20)
    assert status == 400 and "window" in answer["error"]["message"]


async def test_who_reads_nothing_at_the_end_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stalled:
        """A connection that takes nothing, and its request and response."""

        is_aborted = False

        @property
        def transport(self) -> Stalled:
            return self

        def abort(self) -> None:
            self.is_aborted = True

        async def write(self, data: bytes) -> None:
            await asyncio.Event().wait()

    stalled: Any = Stalled()
    events = routes.EventStream(stalled, {}, 60.0)
    monkeypatch.setattr(events, "_response", stalled)
    await events.end(end_s=0.02)
    assert stalled.is_aborted


async def test_embeddings_are_written_with_others_in_between() -> None:
    messages = [
        inference_pb2.GenerateResponse(
            embedding=[index + 0.5, -1.0], usage=common_pb2.Usage(num_prompt_tokens=3)
        )
        for index in range(5)
    ]
    num_turns = 0

    async def other() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(other())
    text = await completions.embedding_answer({}, "m", messages, [{"request_id": "r"}])
    beside.cancel()
    assert num_turns >= 5
    answer = json.loads(text)
    assert [entry["embedding"] for entry in answer["data"]] == [[i + 0.5, -1.0] for i in range(5)]
    assert answer["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
    assert (answer["model"], answer["baton"]["requests"]) == ("m", [{"request_id": "r"}])
    assert json.loads(await completions.embedding_answer({}, "m", [], []))["data"] == []


@asynccontextmanager
async def _server(
    certs: CertSet | None, body: bytes = b"", **options: Any
) -> AsyncIterator[tuple[str, HttpConnections]]:
    """It answers GET / with `body`, over TLS where it has certificates. Yields: its address."""

    async def answer(request: web.Request) -> web.Response:
        return web.Response(body=body)

    add = [lambda app: app.router.add_get("/", answer) and None]
    server = HttpServer(add, max_body_bytes=1024, drain_s=0.2, **options)
    try:
        context = TlsIdentity(one_sided_tls(certs)).http_context() if certs else None
        await server.start("127.0.0.1:0", context)
        assert server.connections is not None
        yield server.address, server.connections
    finally:
        await server.stop()


def test_connections_count_before_their_handshake(tmp_path: Path) -> None:
    """Ten clients connect and never begin it. On the loop that routers run on."""
    certs = write(tmp_path / "tls")
    trusting = ssl.create_default_context(cafile=str(certs.ca_file))

    async def run() -> None:
        async with _server(certs, max_connections=3, handshake_s=600.0) as (address, connections):
            host, _, port = address.rpartition(":")
            silent = [await asyncio.open_connection(host, int(port)) for _ in range(10)]
            for reader, _ in silent[3:]:
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
            assert (connections.num_open, connections.num_refused) == (3, 7)
            for _, writer in silent:
                writer.close()
            await until(lambda: not connections.num_open)
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"https://{address}/", ssl=trusting) as answer,
            ):
                assert answer.status == 200 and connections.num_open == 1

    uvloop.run(run())


def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path) -> None:
    certs = write(tmp_path / "tls")

    async def run() -> None:
        async with _server(certs, max_connections=3, handshake_s=0.1) as (address, _):
            async with raw(address, b"") as reader:
                assert await reader.read() == b""

    uvloop.run(run())


async def test_a_handshake_of_grpc_that_does_not_end_is_ended(tmp_path: Path) -> None:
    server, address = await grpc_server.listen(
        "127.0.0.1:0",
        [],
        identity=TlsIdentity(write(tmp_path / "tls").tls_of(PeerRole.ROUTER)),
        limits=PublicPortLimits(handshake_s=0.1),
    )
    try:
        async with raw(address, b"") as reader:
            assert await reader.read() == b""
    finally:
        await server.stop(0)


def test_all_of_it_on_the_loop_that_routers_run_on() -> None:
    """uvloop's transports say and do some things otherwise."""

    async def run() -> None:
        async with _server(None, b"x" * MIB, max_connections=1, stall_s=0.2) as (address, here):
            async with raw(address, b"") as first:
                await until(lambda: here.num_open)
                async with raw(address, b"") as reader:
                    assert (await reader.read()).startswith(b"HTTP/1.1 503")
                assert not first.at_eof()
            await until(lambda: not here.num_open)
            host, _, port = address.rpartition(":")
            with socket.socket() as peer:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                peer.connect((host, int(port)))
                peer.sendall(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n" * 20)
                await until(lambda: here.num_stalled == 1)
                await until(lambda: not here.num_open)

    uvloop.run(run())
