"""The services of each role's process, without anything behind them: who may call what of them. And
certificates that say too little."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton import development_certificates
from baton.development_certificates import CertSet
from process import grpc_server, rpc
from process.authorization import RULES
from process.authorization import WORKERS as WORKERS
from process.authorization import PeerRole as Role
from process.secret_files import replace_file
from process.tls import TlsIdentity, TlsSettings
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

CONTROL = (worker_control_pb2, worker_control_pb2_grpc)
STORE = (kvstore_pb2, kvstore_pb2_grpc)
SERVED: dict[Role, list[tuple[Any, Any]]] = {
    Role.ROUTER: [(inference_pb2, inference_pb2_grpc)],
    Role.PREFILL: [(prefill_pb2, prefill_pb2_grpc), STORE, CONTROL],
    Role.DECODE: [(decode_pb2, decode_pb2_grpc), CONTROL],
    Role.KVSTORE: [STORE],
    Role.DRAFT: [(draft_pb2, draft_pb2_grpc)],
    Role.AUTOSCALER: [
        (autoscaler_pb2, autoscaler_pb2_grpc),
        (externalscaler_pb2, externalscaler_pb2_grpc),
    ],
}
"""What each role's process serves. The servicers are the generated ones, which serve nothing: a
caller that gets to one of them sees UNIMPLEMENTED."""


def _add_to(module: Any, stubs: Any, server: grpc.aio.Server) -> None:
    for name in module.DESCRIPTOR.services_by_name:
        add = getattr(stubs, f"add_{name}Servicer_to_server")
        add(getattr(stubs, f"{name}Servicer")(), server)


@asynccontextmanager
async def serving_as(role: Role, made: CertSet) -> AsyncIterator[str]:
    server, address = await grpc_server.listen(
        "127.0.0.1:0",
        [partial(_add_to, *modules) for modules in SERVED[role]],
        identity=TlsIdentity(made.tls_of(role), role),
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
        for module, _ in SERVED[role]
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]


def may_call(caller: Role, server: Role, path: str) -> bool:
    """By the table."""
    return caller in RULES[server][path]


def calling(tls: TlsSettings, address: str, server: Role, role: Role | None = None) -> Any:
    """A channel to that address, dialled as to `server`, by a process with these certificates.
    Args: role: that the process says to have; None: none."""
    return rpc.Dialer(TlsIdentity(tls, role) if role else TlsIdentity(tls))(address, server)


def certificate_of(made: CertSet, folder: Path, names: Sequence[str]) -> TlsSettings:
    """Signed by its CA, for these names of hosts alone, whatever its subject says."""
    ca_key = serialization.load_pem_private_key((made.folder / "ca.key").read_bytes(), None)
    ca = x509.load_pem_x509_certificate(made.ca_file.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "baton://role/router")])
    one = development_certificates._builder(subject, ca.subject, key, 1)
    if names:
        hosts = x509.SubjectAlternativeName([x509.DNSName(name) for name in names])
        one = one.add_extension(hosts, critical=False)
    certificate = one.sign(ca_key, hashes.SHA256())  # type: ignore[arg-type]
    files = (folder / "crt", folder / "key")
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    replace_file(files[1], development_certificates._key_pem(key), mode=0o600)
    return TlsSettings(str(made.ca_file), str(files[0]), str(files[1]))
