"""What one HTTP client can do to the loop that all share, and to its own connection: bodies that
cost more to refuse than to send, and answers that nobody reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest

from process.errors import NoCapacity
from protos import common_pb2, inference_pb2
from services.router import http_half_open
from services.router.openai import bodies, completions, embeddings, event_stream
from services.router.openai.answers import Envelope
from services.router.page.snapshots import Snapshots
from tests.harness.router_bench import HttpBench, Served, http_bench, served
from tests.harness.waiting import until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
JSON = {"content-type": "application/json"}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def router() -> Iterator[Served]:
    with served() as bench:
        yield bench


def ask(
    router: Served,
    path: str,
    body: Mapping[str, Any] | bytes,
    headers: Mapping[str, str] = MappingProxyType(JSON),
) -> tuple[int, Any]:
    """Status and parsed answer."""
    connection = http.client.HTTPConnection(router.url.removeprefix("http://"), timeout=20)
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request("POST", path, data, dict(headers))
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def peer_of(router: Served) -> socket.socket:
    """A bare connection."""
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


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
    assert ask(router, TEXT, body)[0] == 400 and not decoded
    # And once for all samples of one that is answered.
    status, answer = ask(router, TEXT, {"prompt": [5], "echo": True, "n": 3, "max_tokens": 1})
    assert status == 200 and len(answer["choices"]) == 3 and len(decoded) == 1


@pytest.mark.parametrize("levels", [70, 900, 950])
@pytest.mark.parametrize("place", ["response_format", "tools", "chat_template_kwargs"])
def test_what_is_nested_too_deep_is_refused_wherever_it_stands(
    router: Served, place: str, levels: int
) -> None:
    deep = '{"a":' * levels + "1" + "}" * levels
    inner = {
        "response_format": '{"type":"json_schema","json_schema":{"name":"n","schema":%s}}',
        "tools": '[{"type":"function","function":{"name":"f","parameters":%s}}],'
        '"tool_choice":"required"',
        "chat_template_kwargs": '{"mood":%s}',
    }[place]
    body = '{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"%s":%s}'
    status, answer = ask(router, CHAT, (body % (place, inner % deep)).encode())
    assert status == 400 and "nested" in answer["error"]["message"]


def test_a_stream_of_the_page_has_no_head(router: Served) -> None:
    with peer_of(router) as peer:
        peer.sendall(b"HEAD /live/events HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        answer = b""
        while data := peer.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 405") and b"data:" not in answer


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
    with peer_of(router) as peer:
        peer.sendall(b"GET /live/events HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        answer = b""
        with contextlib.suppress(ConnectionError):
            while data := peer.recv(65536):
                answer += data
    assert answer.count(b"HTTP/1.1") == 1 and b"data:" in answer


@pytest.mark.parametrize("origin", ["http://evil.example:8000", "null", "http://[", "file://"])
def test_a_page_from_elsewhere_uses_nothing_here(router: Served, origin: str) -> None:
    headers = {**JSON, "origin": origin, "host": "evil.example:8000"}
    assert ask(router, TEXT, {"prompt": "a", "max_tokens": 1}, headers)[0] == 403


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "http://localhost", "http://[::1]:1"])
def test_a_page_of_this_machine_may(router: Served, origin: str) -> None:
    headers = {**JSON, "origin": origin}
    assert ask(router, TEXT, {"prompt": "a", "max_tokens": 1}, headers)[0] == 200


def test_a_large_body_is_read_while_others_are_served(
    router: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, parse = threading.Event(), threading.Event(), bodies.parse

    def held(data: bytes) -> Any:
        if len(data) > 100_000:
            begun.set()
            assert go_on.wait(20)
        return parse(data)

    monkeypatch.setattr(bodies, "parse", held)
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(ask, router, TEXT, {"prompt": [5] * 200_000})
        assert begun.wait(20)
        assert ask(router, TEXT, {"prompt": "a", "max_tokens": 2})[0] == 200
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
    events = event_stream.EventStream(stalled, {}, 60.0)
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
    text = await embeddings.answer({}, "m", messages, [{"request_id": "r"}])
    beside.cancel()
    assert num_turns >= 5
    answer = json.loads(text)
    assert [entry["embedding"] for entry in answer["data"]] == [[i + 0.5, -1.0] for i in range(5)]
    assert answer["usage"] == {"prompt_tokens": 15, "total_tokens": 15}
    assert (answer["model"], answer["baton"]["requests"]) == ("m", [{"request_id": "r"}])
    assert json.loads(await embeddings.answer({}, "m", [], []))["data"] == []


async def _asked(bench: HttpBench, body: dict[str, Any], version: str = "1.1") -> Any:
    """A connection that has sent a request and ended its own direction. Returns: reader, writer."""
    host, _, port = bench.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    writer.write_eof()
    return reader, writer


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("grace_s", [0.0, 60.0])
async def test_a_client_that_half_closes_gets_its_answer(
    monkeypatch: pytest.MonkeyPatch, is_streamed: bool, version: str, grace_s: float
) -> None:
    monkeypatch.setattr(http_half_open, "_GRACE_S", grace_s)
    body = {"prompt": "x", "max_tokens": 8, "stream": is_streamed}
    async with http_bench() as bench:
        bench.prefill.gate.close()
        bench.decode.token_gate.close()
        reader, writer = await _asked(bench, body, version)
        await until(bench.prefill.gate.reached.is_set)
        if version == "1.1" and not grace_s:
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
            assert await reader.readline() == b"\r\n"
        bench.prefill.gate.open()
        await until(lambda: bench.decode.generated)
        bench.decode.token_gate.open()
        assert (await reader.readline()).split()[1] == b"200"
        text = (await reader.read()).decode()  # to the end: the connection is closed then
        writer.close()
    assert "[DONE]" in text if is_streamed else '"finish_reason": "length"' in text
    assert bench.decode.num_cancelled == 0


async def test_a_client_that_half_closes_in_a_stream_gets_the_rest() -> None:
    async with http_bench() as bench:
        bench.decode.token_gate.close()
        host, _, port = bench.router.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps({"prompt": "x", "max_tokens": 8, "stream": True}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
        await reader.readuntil(b"data: ")
        writer.write_eof()
        await reader.readuntil(b"2\r\n:\n\r\n")
        bench.decode.token_gate.open()
        assert b"[DONE]" in await reader.read()
        writer.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_half_closes_and_goes_away_ends_its_request(is_streamed: bool) -> None:
    async with http_bench() as bench:
        bench.decode.token_gate.close()
        body = {"prompt": "x", "max_tokens": 8, "stream": is_streamed}
        _, writer = await _asked(bench, body)
        await until(lambda: bench.decode.generated)
        writer.transport.abort()
        await until(lambda: bench.decode.num_cancelled == 1)
        bench.decode.token_gate.open()
        await until(bench.is_idle)


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\n\r\n"])
async def test_a_client_that_ends_without_a_whole_request_is_let_go(data: bytes) -> None:
    async with http_bench() as bench:
        host, _, port = bench.router.http_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        writer.write_eof()
        await reader.read()  # to the end
        writer.close()
        await until(lambda: bench.router._http.connections.num_open == 0)  # type: ignore[union-attr]
