"""The router's HTTP port with keys and over TLS: who is answered what."""

from __future__ import annotations

import ssl
from pathlib import Path

import aiohttp
import pytest

from baton import certs, key_files
from baton.cert_set import CertSet
from process import api_keys
from process.access import Role
from process.tls import TlsSettings
from tests.harness.router_bench import BOUND_S, Bench, running

BODY = {"model": "fake", "prompt": "hello", "max_tokens": 2}
BOUND = aiohttp.ClientTimeout(total=BOUND_S)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertSet:
    return certs.write(tmp_path_factory.mktemp("certs"))


def context(made: CertSet, role: Role | None) -> ssl.SSLContext:
    """A client's, with that role's certificate."""
    found = ssl.create_default_context(cafile=str(made.ca_file))
    if role is not None:
        found.load_cert_chain(made.cert_file(role), made.key_file(role))
    return found


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
    user, user_id, user_entry = api_keys.new_key("acme")
    admin, admin_id, admin_entry = api_keys.new_key("ops", is_admin=True)
    key_files.add(path, user_id, user_entry)
    key_files.add(path, admin_id, admin_entry)
    async with running(http_listen="127.0.0.1:0", api_keys_file=str(path)) as bench:
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


async def test_pages_of_other_origins_may_not_ask_unless_they_are_named() -> None:
    async with running(http_listen="127.0.0.1:0") as bench:
        assert await answer_to(bench, PAGE, "OPTIONS") == (403, None)
        assert await answer_to(bench, PAGE) == (403, None)
        assert await answer_to(bench, "http://localhost:3000") == (200, None)
    async with running(http_listen="127.0.0.1:0", cors_origins=(PAGE,)) as bench:
        assert await answer_to(bench, PAGE, "OPTIONS") == (204, PAGE)
        assert await answer_to(bench, PAGE) == (200, PAGE)
        assert await answer_to(bench, PAGE, "GET", "/v1/models") == (200, PAGE)
        assert await answer_to(bench, PAGE, "GET", "/live") == (200, None)
        assert await answer_to(bench, OTHER_PAGE, "OPTIONS") == (403, None)
        assert await answer_to(bench, OTHER_PAGE) == (403, None)


async def test_a_page_that_is_allowed_needs_its_key_and_reads_refusals(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    user, user_id, user_entry = api_keys.new_key("acme")
    key_files.add(path, user_id, user_entry)
    settings = {"http_listen": "127.0.0.1:0", "api_keys_file": str(path)}
    async with running(**settings, cors_origins=("*",)) as bench:
        assert await answer_to(bench, PAGE, "OPTIONS") == (204, PAGE)
        assert await answer_to(bench, PAGE) == (401, PAGE)
        assert await answer_to(bench, PAGE, key=user) == (200, PAGE)
    async with running(**settings) as bench:
        assert await answer_to(bench, PAGE, "OPTIONS") == (405, None)
        assert await answer_to(bench, PAGE, key=user) == (200, None)


async def test_over_tls_nobody_is_answered_in_the_clear(made: CertSet) -> None:
    own = TlsSettings("", str(made.cert_file(Role.ROUTER)), str(made.key_file(Role.ROUTER)))
    async with running(http_listen="127.0.0.1:0", client_tls=own, expect_idle=False) as bench:
        assert await status_of(bench, "/v1/models", tls=context(made, None)) == 200
        with pytest.raises(aiohttp.ClientError):
            await status_of(bench, "/v1/models")
        with pytest.raises(aiohttp.ClientError):
            await status_of(bench, "/v1/models", tls=ssl.create_default_context())
        await bench.channel.close()


async def test_where_certificates_are_asked_for_their_role_decides(made: CertSet) -> None:
    own = made.tls_of(Role.ROUTER)
    async with running(http_listen="127.0.0.1:0", client_tls=own, expect_idle=False) as bench:
        with pytest.raises(aiohttp.ClientError):
            await status_of(bench, "/v1/models", tls=context(made, None))
        for role in Role:
            tls = context(made, role)
            may_ask = role in (Role.CLIENT, Role.ADMIN)
            assert await status_of(bench, "/v1/models", tls=tls) == (200 if may_ask else 403), role
            expected = 200 if may_ask else 403
            assert await status_of(bench, "/v1/completions", tls=tls, **BODY) == expected, role
            expected = 200 if role is Role.ADMIN else 403
            assert await status_of(bench, "/live/data.json", tls=tls) == expected, role
