"""mTLS between roles on real gRPC: each method of each service, called with each role's
certificate, is served to those whom the table names and refused with PERMISSION_DENIED to all
others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton import certs
from baton.cert_set import CertSet
from process import serving
from process.access import RULES, WORKERS, Role
from process.tls import Identity, TlsSettings
from protos import (
    autoscaler_pb2,
    autoscaler_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    draft_pb2,
    draft_pb2_grpc,
    externalscaler_pb2,
    externalscaler_pb2_grpc,
    inference_pb2,
    inference_pb2_grpc,
    kvstore_pb2,
    kvstore_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_control_pb2,
    worker_control_pb2_grpc,
)

CALL_S = 10.0

Add = Callable[[Any, grpc.aio.Server], None]
CONTROL: tuple[Any, Add, Any] = (
    worker_control_pb2,
    worker_control_pb2_grpc.add_WorkerControlServicer_to_server,
    worker_control_pb2_grpc.WorkerControlServicer,
)
SERVED: dict[Role, list[tuple[Any, Add, Any]]] = {
    Role.ROUTER: [
        (
            inference_pb2,
            inference_pb2_grpc.add_InferenceServicer_to_server,
            inference_pb2_grpc.InferenceServicer,
        )
    ],
    Role.PREFILL: [
        (
            prefill_pb2,
            prefill_pb2_grpc.add_PrefillServicer_to_server,
            prefill_pb2_grpc.PrefillServicer,
        ),
        (
            kvstore_pb2,
            kvstore_pb2_grpc.add_KvStoreServicer_to_server,
            kvstore_pb2_grpc.KvStoreServicer,
        ),
        CONTROL,
    ],
    Role.DECODE: [
        (decode_pb2, decode_pb2_grpc.add_DecodeServicer_to_server, decode_pb2_grpc.DecodeServicer),
        CONTROL,
    ],
    Role.KVSTORE: [
        (
            kvstore_pb2,
            kvstore_pb2_grpc.add_KvStoreServicer_to_server,
            kvstore_pb2_grpc.KvStoreServicer,
        )
    ],
    Role.DRAFT: [
        (draft_pb2, draft_pb2_grpc.add_DraftServicer_to_server, draft_pb2_grpc.DraftServicer)
    ],
    Role.AUTOSCALER: [
        (
            autoscaler_pb2,
            autoscaler_pb2_grpc.add_AutoscalerServicer_to_server,
            autoscaler_pb2_grpc.AutoscalerServicer,
        ),
        (
            externalscaler_pb2,
            externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server,
            externalscaler_pb2_grpc.ExternalScalerServicer,
        ),
    ],
}
"""What each role's process serves. The servicers are the generated ones, which serve nothing: who
gets to one of them sees UNIMPLEMENTED."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertSet:
    return certs.write(tmp_path_factory.mktemp("certs"))


@asynccontextmanager
async def serving_as(role: Role, made: CertSet) -> AsyncIterator[str]:
    server, address = await serving.listen(
        "127.0.0.1:0",
        [
            lambda server, add=add, servicer=servicer: add(servicer(), server)
            for _, add, servicer in SERVED[role]
        ],
        identity=Identity(made.tls_of(role), role),
        rules=RULES[role],
    )
    try:
        yield address
    finally:
        await server.stop(0)


async def outcome(channel: grpc.aio.Channel, path: str, method: Any) -> grpc.StatusCode:
    """What comes of one call, of the method's own kind. Streams send nothing: gRPC's client says
    INTERNAL where a write of its own meets the server's refusal."""
    try:
        if method.client_streaming and method.server_streaming:
            call: Any = channel.stream_stream(path)(iter(()), timeout=CALL_S)
            await call.read()
        elif method.client_streaming:
            await channel.stream_unary(path)(iter(()), timeout=CALL_S)
        elif method.server_streaming:
            await channel.unary_stream(path)(b"", timeout=CALL_S).read()
        else:
            await channel.unary_unary(path)(b"", timeout=CALL_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


def methods(role: Role) -> list[tuple[str, Any]]:
    return [
        (f"/{service.full_name}/{method.name}", method)
        for module, _, _ in SERVED[role]
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


@pytest.mark.parametrize("server", SERVED, ids=lambda role: role.value)
async def test_a_wrong_role_is_refused_on_every_method(server: Role, made: CertSet) -> None:
    num_refused = num_let_in = 0
    async with serving_as(server, made) as address:
        for caller in Role:
            dial = serving.Dialer(Identity(made.tls_of(caller), caller))
            async with dial(address, server) as channel:
                for path, method in methods(server):
                    code = await outcome(channel, path, method)
                    may = caller in RULES[server][path]
                    expected = (
                        grpc.StatusCode.UNIMPLEMENTED if may else grpc.StatusCode.PERMISSION_DENIED
                    )
                    assert code is expected, (path, caller)
                    num_let_in += may
                    num_refused += not may
    assert num_refused >= len(methods(server)) and num_let_in > 0


@pytest.mark.parametrize("server", SERVED, ids=lambda role: role.value)
async def test_a_worker_that_may_flip_calls_what_either_role_may(
    server: Role, tmp_path: Path
) -> None:
    """And nothing more, whichever of the two it is now; it is dialled as both, and as no other."""
    made = certs.write(tmp_path, flips=True)
    codes: dict[str, set[grpc.StatusCode]] = {}
    async with serving_as(server, made) as address:
        for caller in WORKERS:
            dial = serving.Dialer(Identity(made.tls_of(caller), caller))
            async with dial(address, server) as channel:
                for path, method in methods(server):
                    codes.setdefault(path, set()).add(await outcome(channel, path, method))
        for role in Role:
            dial = serving.Dialer(Identity(made.tls_of(Role.ADMIN)))
            async with dial(address, role) as channel:
                # Of one kind of call: gRPC's client may cancel a stream of its own instead of
                # telling why there is no connection.
                plain = next(one for one in methods(server) if not one[1].client_streaming)
                told = await outcome(channel, *plain)
                is_dialled = role is server or {role, server} == WORKERS
                assert (told is not grpc.StatusCode.UNAVAILABLE) is is_dialled, role
    for path, found in codes.items():
        may = bool(WORKERS & RULES[server][path])
        assert found == {
            grpc.StatusCode.UNIMPLEMENTED if may else grpc.StatusCode.PERMISSION_DENIED
        }, path


async def test_a_certificate_of_our_ca_without_a_role_may_do_nothing(
    made: CertSet, tmp_path: Path
) -> None:
    """Nor does one help that names a role where names of hosts belong."""
    ca_key = serialization.load_pem_private_key((made.folder / "ca.key").read_bytes(), None)
    ca = x509.load_pem_x509_certificate(made.ca_file.read_bytes())
    for names in (
        [],
        [x509.DNSName("router.baton.internal")],
        [x509.DNSName("baton://role/router")],
    ):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "baton://role/router")])
        made_one = certs._builder(subject, ca.subject, key, 1)
        if names:
            made_one = made_one.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = made_one.sign(ca_key, hashes.SHA256())  # type: ignore[arg-type]
        files = (tmp_path / "crt", tmp_path / "key")
        files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        certs._write(files[1], certs._key_pem(key), 0o600)
        tls = TlsSettings(str(made.ca_file), str(files[0]), str(files[1]))
        async with serving_as(Role.DECODE, made) as address:
            async with serving.Dialer(Identity(tls))(address, Role.DECODE) as channel:
                for path, method in methods(Role.DECODE):
                    code = await outcome(channel, path, method)
                    assert code is grpc.StatusCode.PERMISSION_DENIED, path
