"""TLS: files that fit or a line that says why not; handshakes with the right one, only."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton import development_certificates
from baton.development_certificates import CertSet
from process import grpc_server, rpc
from process.authorization import RULES, PeerRole
from process.rpc import Dialer
from process.rpc_errors import Unavailable
from process.settings import SettingsError
from process.tls import TlsIdentity, TlsSettings, is_loopback
from protos import kvstore_pb2, kvstore_pb2_grpc

CALL_S = 10.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertSet:
    return development_certificates.write(tmp_path_factory.mktemp("certs"))


class Store(kvstore_pb2_grpc.KvStoreServicer):
    @rpc.unary
    async def GetStatus(self, request: Any, context: Any) -> kvstore_pb2.GetStatusReply:
        return kvstore_pb2.GetStatusReply(node_id="here")


@asynccontextmanager
async def a_store(identity: TlsIdentity) -> AsyncIterator[str]:
    server, address = await grpc_server.listen(
        "127.0.0.1:0",
        [lambda server: kvstore_pb2_grpc.add_KvStoreServicer_to_server(Store(), server)],
        identity=identity,
        rules=RULES[PeerRole.KVSTORE],
    )
    try:
        yield address
    finally:
        await server.stop(0)


async def ask(channel: grpc.aio.Channel) -> str:
    async with channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)
        try:
            reply = await stub.GetStatus(kvstore_pb2.GetStatusRequest(), timeout=CALL_S)
        except grpc.aio.AioRpcError as error:
            raise rpc.error_from_rpc(error) from error
        return str(reply.node_id)


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:1", True),
        ("127.9.9.9:1", True),
        ("localhost:1", True),
        ("[::1]:1", True),
        ("unix:/x/a.sock", True),
        ("0.0.0.0:1", False),
        ("[::]:1", False),
        ("10.0.0.1:1", False),
        ("somewhere:1", False),
        ("localhost.evil:1", False),
    ],
)
def test_loopback(listen: str, expected: bool) -> None:
    assert is_loopback(listen) is expected


def test_a_listener_for_others_needs_tls_or_the_word_that_it_does_without(made: CertSet) -> None:
    with pytest.raises(SettingsError, match=r"listen: 0\.0\.0\.0:1 .* set tls\.cert_file"):
        TlsSettings().check_listen("listen", "0.0.0.0:1", "tls")
    TlsSettings().check_listen("listen", "127.0.0.1:1", "tls")
    TlsSettings(allow_plaintext=True).check_listen("listen", "0.0.0.0:1", "tls")
    made.tls_of(PeerRole.KVSTORE).check_listen("listen", "0.0.0.0:1", "tls")


def test_half_of_a_pair_is_refused() -> None:
    with pytest.raises(SettingsError, match="goes with key_file"):
        TlsSettings(cert_file="x")
    with pytest.raises(SettingsError, match=r"tls\.ca_file"):
        TlsSettings(ca_file="x").check_peers("tls")


def test_what_is_wrong_with_the_files_is_said_at_the_start(made: CertSet, tmp_path: Path) -> None:
    ok = made.tls_of(PeerRole.PREFILL)
    TlsIdentity(ok, PeerRole.PREFILL)
    with pytest.raises(SettingsError, match="does not name baton://role/decode"):
        TlsIdentity(ok, PeerRole.DECODE)
    with pytest.raises(SettingsError, match="are no certificate and its key"):
        TlsIdentity(TlsSettings(ok.ca_file, ok.cert_file, str(made.key_file(PeerRole.DECODE))))
    with pytest.raises(SettingsError, match=r"absent.*No such file.*baton certs"):
        TlsIdentity(TlsSettings(str(tmp_path / "absent"), ok.cert_file, ok.key_file))
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("rubbish")
    with pytest.raises(SettingsError, match=f"ca_file {rubbish}"):
        TlsIdentity(TlsSettings(str(rubbish), ok.cert_file, ok.key_file))
    mine = tmp_path / "key"
    mine.write_bytes(Path(ok.key_file).read_bytes())
    mine.chmod(0o644)
    with pytest.raises(SettingsError, match=f"run `chmod 600 {mine}`"):
        TlsIdentity(TlsSettings(ok.ca_file, ok.cert_file, str(mine)))


def test_a_certificate_that_is_over_is_refused_at_the_start(tmp_path: Path) -> None:
    over = development_certificates.write(tmp_path, days=0)  # over as soon as it is made
    with pytest.raises(SettingsError, match=r"router\.crt: expired at"):
        TlsIdentity(over.tls_of(PeerRole.ROUTER))


async def test_only_the_expected_role_is_talked_to_and_only_a_known_ca(
    made: CertSet, tmp_path: Path
) -> None:
    """A prefill worker's certificate makes nobody a store; nor does one of another CA."""
    as_router = Dialer(TlsIdentity(made.tls_of(PeerRole.ROUTER)))
    async with a_store(TlsIdentity(made.tls_of(PeerRole.KVSTORE))) as address:
        assert await ask(as_router(address, PeerRole.KVSTORE)) == "here"
        with pytest.raises(Unavailable):
            await ask(as_router(address, PeerRole.PREFILL))
        with pytest.raises(Unavailable):
            await ask(rpc.channel(address))  # in the clear
        without = TlsIdentity(TlsSettings(ca_file=str(made.ca_file)))
        with pytest.raises(Unavailable):
            await ask(Dialer(without)(address, PeerRole.KVSTORE))
        other = development_certificates.write(tmp_path).tls_of(PeerRole.ROUTER)
        with pytest.raises(Unavailable):
            await ask(Dialer(TlsIdentity(other))(address, PeerRole.KVSTORE))
        mixed = TlsSettings(str(made.ca_file), other.cert_file, other.key_file)
        with pytest.raises(Unavailable):
            await ask(Dialer(TlsIdentity(mixed))(address, PeerRole.KVSTORE))
        assert await ask(as_router(address, PeerRole.KVSTORE)) == "here"


async def test_new_certificates_are_taken_up_without_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    made = development_certificates.write(folder)
    store, router = (TlsIdentity(made.tls_of(role)) for role in (PeerRole.KVSTORE, PeerRole.ROUTER))
    dial = Dialer(router)
    async with a_store(store) as address:
        assert await ask(dial(address, PeerRole.KVSTORE)) == "here"
        for name in ("ca.crt", "ca.key"):  # the whole CA is another one from here on
            (folder / name).unlink()
        development_certificates.write(folder)
        assert dial.num_reloads == 1  # seen without a connection being made
        outsider = Dialer(
            TlsIdentity(development_certificates.write(tmp_path / "other").tls_of(PeerRole.ROUTER))
        )
        assert await ask(dial(address, PeerRole.KVSTORE)) == "here"
        assert (store.num_reloads, router.num_reloads, dial.num_reloads) == (1, 1, 1)
        with pytest.raises(Unavailable):
            await ask(outsider(address, PeerRole.KVSTORE))
        # Half of a rotation, as it may be met: the pair that fitted stays.
        made.key_file(PeerRole.KVSTORE).write_text("nothing")
        assert await ask(dial(address, PeerRole.KVSTORE)) == "here"


async def _http(address: tuple[str, int], context: ssl.SSLContext) -> bytes:
    async with asyncio.timeout(CALL_S):
        reader, writer = await asyncio.open_connection(
            *address, ssl=context, server_hostname="localhost"
        )
        try:
            writer.write(b"hi\n")
            shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            assert await reader.readline() == b"hi\n"
            return bytes(shown)
        finally:
            writer.close()


async def test_an_http_server_shows_the_newest_certificate(tmp_path: Path) -> None:
    made = development_certificates.write(tmp_path)
    identity = TlsIdentity(
        TlsSettings("", str(made.cert_file(PeerRole.ROUTER)), str(made.key_file(PeerRole.ROUTER)))
    )

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0, ssl=identity.http_context())
    client = ssl.create_default_context(cafile=str(made.ca_file))
    async with server:
        address = server.sockets[0].getsockname()
        first = await _http(address, client)
        assert await _http(address, client) == first
        development_certificates.write(tmp_path)
        second = await _http(address, client)
        assert second != first
        assert await _http(address, client) == second
