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
from services.router.openai import bodies, completions, embeddings, event_stream
from services.router.openai.answers import Envelope
from services.router.page.snapshots import Snapshots
from tests.wire.http_bench import Served, served

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
    monkeypatch.setattr(event_stream, "_END_S", 0.02)
    events = event_stream.EventStream(stalled, {}, 60.0)
    monkeypatch.setattr(events, "_response", stalled)
    await events.end()
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
