"""Redis with a password out of a file, and over TLS: a real Redis behind a real TLS endpoint."""

from __future__ import annotations

import asyncio
import socket
import ssl
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from baton import development_certificates
from process import registry
from process.authorization import PeerRole
from process.registry import RedisAccess
from process.settings import SettingsError
from tests.harness.redis_server import PASSWORD, a_redis, behind_tls, password_file
from tests.harness.waiting import WAIT_S


async def pings(url: str, access: RedisAccess) -> bool:
    client = registry.connect_redis(url, WAIT_S, access)
    try:
        async with asyncio.timeout(WAIT_S):
            return bool(await client.ping())
    finally:
        await client.aclose()


async def test_a_password_out_of_a_file_is_used_and_taken_up_when_it_changes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with a_redis(tmp_path) as socket:
        url = f"unix://{socket}"
        with pytest.raises(RedisError, match="authenticate"):
            await pings(url, RedisAccess())
        file = password_file(tmp_path, "wrong")
        access = RedisAccess(password_file=file)
        client = registry.connect_redis(url, WAIT_S, access)
        with pytest.raises(RedisError) as raised:
            await client.ping()
        assert "wrong" not in str(raised.value).replace("wrong password", "").lower()
        password_file(tmp_path, PASSWORD)
        assert await client.ping()
        await client.aclose()
        assert await pings(url, RedisAccess(user="default", password_file=file))
    assert not caplog.records, "redis-py warns of what a provider of passwords lacks"


async def test_over_tls_both_sides_are_checked(tmp_path: Path) -> None:
    made = development_certificates.write(tmp_path / "certs")
    stranger = development_certificates.write(tmp_path / "others")
    file = password_file(tmp_path, PASSWORD)
    ours = (str(made.cert_file(PeerRole.PREFILL)), str(made.key_file(PeerRole.PREFILL)))
    async with a_redis(tmp_path) as socket, behind_tls(socket, made) as port:
        url = f"rediss://localhost:{port}/0"
        assert await pings(url, RedisAccess(str(made.ca_file), *ours, password_file=file))
        for access in (
            RedisAccess(str(stranger.ca_file), *ours, password_file=file),  # not our CA's Redis
            RedisAccess("", *ours, password_file=file),
            RedisAccess(str(made.ca_file), password_file=file),  # without a certificate
        ):
            with pytest.raises(registry.REDIS_FAILURES):
                await pings(url, access)
        wrong_name = f"rediss://127.0.0.2:{port}/0"
        with pytest.raises(registry.REDIS_FAILURES):
            await pings(wrong_name, RedisAccess(str(made.ca_file), *ours, password_file=file))


def test_what_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="begin redis_url with rediss://"):
        registry.check_redis("redis://h/0", RedisAccess(ca_file="x"))
    with pytest.raises(SettingsError, match="names a user or password, too") as raised:
        registry.check_redis("redis://:hunter2@h/0", RedisAccess(password_file="x"))
    assert "hunter2" not in str(raised.value)
    with pytest.raises(SettingsError, match="goes with password_file"):
        RedisAccess(user="x")
    with pytest.raises(SettingsError, match="No such file"):
        registry.connect_redis("redis://h/0", 1.0, RedisAccess(password_file=str(tmp_path / "no")))


async def test_a_tls_connection_that_is_refused_is_closed_at_once(tmp_path: Path) -> None:
    """The peer never answers close_notify, for which asyncio waits 30 s."""
    made = development_certificates.write(tmp_path / "certs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.cert_file(PeerRole.ROUTER), made.key_file(PeerRole.ROUTER))
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            accepted, _ = listener.accept()
            accepted.settimeout(WAIT_S)
            tls = context.wrap_socket(accepted, server_side=True)
            tls.recv(1024)
            tls.sendall(b"-NOAUTH Authentication required.\r\n")
            with socket.socket(fileno=tls.detach()) as under:
                under.settimeout(WAIT_S)
                while under.recv(1024):
                    pass

        url = f"rediss://localhost:{listener.getsockname()[1]}/0"
        client = registry.connect_redis(url, WAIT_S, RedisAccess(str(made.ca_file)))
        until_closed = asyncio.create_task(asyncio.to_thread(refuse))
        with pytest.raises(RedisError, match="Authentication required"):
            await client.ping()
        await until_closed
        await client.aclose()
