"""The router's HTTP port: what one client can do to its own connection, which pages may ask, who is
answered what with keys and over TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from baton import development_certificates
from baton.development_certificates import CertSet
from tests.harness.access import Role, add_key, client_context, one_sided_tls
from tests.harness.router_bench import (
    BOUND_S,
    JSON,
    Bench,
    HttpBench,
    Served,
    http_bench,
    say_something_after,
    served,
)
from tests.harness.waiting import until

pytestmark = pytest.mark.oracle

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "fake", "prompt": "hello", "max_tokens": 2}
BOUND = aiohttp.ClientTimeout(total=BOUND_S)


@pytest.fixture(scope="module")
def router() -> Iterator[Served]:
    with served() as bench:
        yield bench


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
    status, answer = router.ask(CHAT, (body % (place, inner % deep)).encode())
    assert status == 400 and "nested" in answer["error"]["message"]


def test_a_stream_of_the_page_has_no_head(router: Served) -> None:
    with router.connect() as peer:
        peer.sendall(b"HEAD /live/events HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
        answer = b""
        while data := peer.recv(65536):
            answer += data
    assert answer.startswith(b"HTTP/1.1 405") and b"data:" not in answer


@pytest.mark.parametrize("origin", ["http://evil.example:8000", "null", "http://[", "file://"])
def test_a_page_from_elsewhere_uses_nothing_here(router: Served, origin: str) -> None:
    headers = {**JSON, "origin": origin, "host": "evil.example:8000"}
    assert router.ask(TEXT, {"prompt": "a", "max_tokens": 1}, headers)[0] == 403


@pytest.mark.parametrize("origin", ["http://127.0.0.1:8000", "http://localhost", "http://[::1]:1"])
def test_a_page_of_this_machine_may(router: Served, origin: str) -> None:
    headers = {**JSON, "origin": origin}
    assert router.ask(TEXT, {"prompt": "a", "max_tokens": 1}, headers)[0] == 200


async def _asked(
    bench: HttpBench, body: dict[str, Any], version: str = "1.1", *, is_over: bool = True
) -> Any:
    """A connection that has sent a request and, if it `is_over`, ended its own direction. Returns:
    reader, writer."""
    host, _, port = bench.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)
    if is_over:
        writer.write_eof()
    return reader, writer


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("grace_s", [0.0, 60.0])
async def test_a_client_that_half_closes_gets_its_answer(
    monkeypatch: pytest.MonkeyPatch, is_streamed: bool, version: str, grace_s: float
) -> None:
    say_something_after(monkeypatch, grace_s)
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


async def test_a_client_that_half_closes_in_a_stream_gets_the_rest(bench: HttpBench) -> None:
    bench.decode.token_gate.close()
    body = {"prompt": "x", "max_tokens": 8, "stream": True}
    reader, writer = await _asked(bench, body, is_over=False)
    await reader.readuntil(b"data: ")
    writer.write_eof()
    await reader.readuntil(b"2\r\n:\n\r\n")
    bench.decode.token_gate.open()
    assert b"[DONE]" in await reader.read()
    writer.close()


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_client_that_half_closes_and_goes_away_ends_its_request(
    bench: HttpBench, is_streamed: bool
) -> None:
    bench.decode.token_gate.close()
    body = {"prompt": "x", "max_tokens": 8, "stream": is_streamed}
    _, writer = await _asked(bench, body)
    await until(lambda: bench.decode.generated)
    writer.transport.abort()
    await until(lambda: bench.decode.num_cancelled == 1)
    bench.decode.token_gate.open()
    await until(bench.is_idle)


@pytest.mark.parametrize("data", [b"", b"POST /v1/comp", b"POST /v1/completions HTTP/1.1\r\n\r\n"])
async def test_a_client_that_ends_without_a_whole_request_is_let_go(
    bench: HttpBench, data: bytes
) -> None:
    host, _, port = bench.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    writer.write_eof()
    await reader.read()  # to the end
    writer.close()
    await until(lambda: bench.probe.num_connections == 0)


# -- keys, pages of other origins, TLS


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertSet:
    return development_certificates.write(tmp_path_factory.mktemp("certs"))


async def status_of(
    bench: Bench, path: str, *, tls: ssl.SSLContext | None = None, key: str = "", **body: object
) -> int:
    """Of a GET, or of a POST with a body."""
    scheme = "https" if tls else "http"
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{scheme}://{bench.router.http_address}{path}"
    async with aiohttp.ClientSession(timeout=BOUND) as session:
        method, options = ("POST", {"json": body}) if body else ("GET", {})
        async with session.request(
            method, url, headers=headers, ssl=tls or True, **options
        ) as answer:
            await answer.read()
            return answer.status


async def test_a_key_is_asked_for_and_bounds_what_may_be_asked(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    user, admin = add_key(path, "acme"), add_key(path, "ops", is_admin=True)
    async with http_bench(api_keys_file=str(path)) as bench:
        for where in ("/v1/models", "/v1/models/fake", "/live/data.json"):
            assert await status_of(bench, where) == 401, where
            assert await status_of(bench, where, key=user + "x") == 401, where
        for where in ("/v1/completions", "/v1/chat/completions", "/v1/embeddings"):
            assert await status_of(bench, where, **BODY) == 401, where
        assert bench.prefill.requests == []
        assert await status_of(bench, "/v1/completions", key=user, **BODY) == 200
        assert await status_of(bench, "/v1/models", key=user) == 200
        assert await status_of(bench, "/live/data.json", key=user) == 403
        assert await status_of(bench, "/live/data.json", key=admin) == 200
        assert await status_of(bench, "/health") == 200
        assert {prefilled.tenant for prefilled in bench.prefill.requests} == {"acme"}


PAGE, OTHER_PAGE = "https://app.example.com", "https://other.example.com"


async def answer_to(
    bench: Bench, origin: str, method: str = "POST", path: str = "/v1/completions", key: str = ""
) -> tuple[int, str | None]:
    """Status, and the origin that the answer allows, of what a browser sends for a page."""
    url = f"http://{bench.router.http_address}{path}"
    headers = {"origin": origin, **({"authorization": f"Bearer {key}"} if key else {})}
    if method == "OPTIONS":
        headers |= {
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-os",
        }
    async with aiohttp.ClientSession(timeout=BOUND) as session:
        body = BODY if method == "POST" else None
        async with session.request(method, url, json=body, headers=headers) as answer:
            if method == "OPTIONS" and answer.status == 204:
                allowed = answer.headers["access-control-allow-headers"].split(",")
                assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed)
                assert "POST" in answer.headers["access-control-allow-methods"]
            return answer.status, answer.headers.get("access-control-allow-origin")


async def test_pages_of_other_origins_may_not_ask_unless_they_are_named(bench: HttpBench) -> None:
    assert await answer_to(bench, PAGE, "OPTIONS") == (403, None)
    assert await answer_to(bench, PAGE) == (403, None)
    assert await answer_to(bench, "http://localhost:3000") == (200, None)
    async with http_bench(cors_origins=(PAGE,)) as bench:
        assert await answer_to(bench, PAGE, "OPTIONS") == (204, PAGE)
        assert await answer_to(bench, PAGE) == (200, PAGE)
        assert await answer_to(bench, PAGE, "GET", "/v1/models") == (200, PAGE)
        assert await answer_to(bench, PAGE, "GET", "/live") == (200, None)
        assert await answer_to(bench, OTHER_PAGE, "OPTIONS") == (403, None)
        assert await answer_to(bench, OTHER_PAGE) == (403, None)


async def test_a_page_that_is_allowed_needs_its_key_and_reads_refusals(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    user = add_key(path, "acme")
    settings = {"api_keys_file": str(path)}
    async with http_bench(**settings, cors_origins=("*",)) as bench:
        assert await answer_to(bench, PAGE, "OPTIONS") == (204, PAGE)
        assert await answer_to(bench, PAGE) == (401, PAGE)
        assert await answer_to(bench, PAGE, key=user) == (200, PAGE)
    async with http_bench(**settings) as bench:
        assert await answer_to(bench, PAGE, "OPTIONS") == (405, None)
        assert await answer_to(bench, PAGE, key=user) == (200, None)


async def test_over_tls_nobody_is_answered_in_the_clear(made: CertSet) -> None:
    async with http_bench(client_tls=one_sided_tls(made), expect_idle=False) as bench:
        assert await status_of(bench, "/v1/models", tls=client_context(made, None)) == 200
        with pytest.raises(aiohttp.ClientError):
            await status_of(bench, "/v1/models")
        with pytest.raises(aiohttp.ClientError):
            await status_of(bench, "/v1/models", tls=ssl.create_default_context())
        await bench.channel.close()


async def test_where_certificates_are_asked_for_their_role_decides(made: CertSet) -> None:
    own = made.tls_of(Role.ROUTER)
    async with http_bench(client_tls=own, expect_idle=False) as bench:
        with pytest.raises(aiohttp.ClientError):
            await status_of(bench, "/v1/models", tls=client_context(made, None))
        for role in Role:
            tls = client_context(made, role)
            may_ask = role in (Role.CLIENT, Role.ADMIN)
            assert await status_of(bench, "/v1/models", tls=tls) == (200 if may_ask else 403), role
            expected = 200 if may_ask else 403
            assert await status_of(bench, "/v1/completions", tls=tls, **BODY) == expected, role
            expected = 200 if role is Role.ADMIN else 403
            assert await status_of(bench, "/live/data.json", tls=tls) == expected, role


async def test_a_wrong_role_is_refused_on_every_path(tmp_path: Path) -> None:
    made = development_certificates.write(tmp_path)
    right, wrong = (client_context(made, role) for role in (Role.CLIENT, Role.DECODE))
    flips = client_context(
        development_certificates.write(tmp_path, flips=True), Role.DECODE
    )  # by the same CA
    async with http_bench(client_tls=made.tls_of(Role.ROUTER), expect_idle=False) as bench:
        async with aiohttp.ClientSession(timeout=BOUND) as session:

            async def status(method: str, path: str, tls: ssl.SSLContext) -> int:
                url = f"https://{bench.router.http_address}{path}"
                async with session.request(method, url, ssl=tls) as answer:
                    return answer.status

            assert await status("GET", "/health", right) == 200
            assert len(bench.probe.http_paths) > 8
            for method, path in sorted(bench.probe.http_paths):
                for tls in (wrong, flips):
                    found = await status(method, path.replace("{model}", "fake"), tls)
                    assert found == 403, (method, path)
