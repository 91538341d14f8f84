"""A worker changes its role where certificates say who is who: what it shows names the role that it
has, and the one on disk decides which it may take."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from baton import development_certificates
from baton.development_certificates import CertSet
from process import rpc
from process.authorization import WORKERS, PeerRole
from process.tls import TlsIdentity
from protos import (
    common_pb2,
    decode_pb2_grpc,
    prefill_pb2_grpc,
    worker_control_pb2,
    worker_control_pb2_grpc,
)
from tests.harness.gated_engine import fake_engine
from tests.harness.prefill_decode_pair import WAIT_S, started


def worker_with(made: CertSet) -> Any:
    """A decode worker that has this certificate."""
    return started("decode", fake_engine(), worker_id="w", tls=made.tls_of(PeerRole.DECODE))


@asynccontextmanager
async def dialling(
    made: CertSet, address: str, asking: PeerRole, dialled: PeerRole
) -> AsyncIterator[Any]:
    dial = rpc.Dialer(TlsIdentity(made.tls_of(asking), asking))
    async with dial(address, dialled) as channel:
        yield channel


async def outcome(call: Any) -> tuple[grpc.StatusCode, str]:
    """The role that is told; or why not."""
    try:
        return grpc.StatusCode.OK, (await call).role
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""


async def asked_over_tls(
    made: CertSet, address: str, asking: PeerRole, dialled: PeerRole, role: str
) -> tuple[grpc.StatusCode, str]:
    """What comes of SetRole."""
    async with dialling(made, address, asking, dialled) as channel:
        stub = worker_control_pb2_grpc.WorkerControlStub(channel)
        request = worker_control_pb2.SetRoleRequest(role=role)
        return await outcome(stub.SetRole(request, timeout=WAIT_S))


async def test_a_certificate_of_one_role_keeps_it_and_says_so(tmp_path: Path) -> None:
    """Asked by those who may ask; nobody else gets as far."""
    made = development_certificates.write(tmp_path)
    refused, denied = grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.PERMISSION_DENIED
    async with worker_with(made) as w:
        for asking, code, says in (
            (PeerRole.ADMIN, refused, "cannot serve as prefill: cert_file"),
            (PeerRole.AUTOSCALER, refused, "baton://role/decode"),
            (PeerRole.ROUTER, denied, "not for a peer of role router"),
        ):
            told = await asked_over_tls(made, w.address, asking, PeerRole.DECODE, "prefill")
            assert told[0] is code and says in told[1] and "\n" not in told[1]
        assert w.core.identity.role == "decode" and not w.core.draining


async def test_a_certificate_of_both_roles_serves_in_either_by_its_own_table(
    tmp_path: Path,
) -> None:
    """Who never had business here is refused, before and after."""
    made = development_certificates.write(tmp_path, flips=True)
    ask = common_pb2.GetWorkerStatusRequest()

    async def status(asking: PeerRole, called: PeerRole) -> tuple[grpc.StatusCode, str]:
        stubs: Any = {PeerRole.DECODE: decode_pb2_grpc.DecodeStub}
        async with dialling(made, w.address, asking, called) as channel:
            stub = stubs.get(called, prefill_pb2_grpc.PrefillStub)(channel)
            return await outcome(stub.GetWorkerStatus(ask, timeout=WAIT_S))

    denied, away = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE
    async with worker_with(made) as w:
        assert (await status(PeerRole.ROUTER, PeerRole.DECODE)) == (grpc.StatusCode.OK, "decode")
        # It never was one: nobody has told a router so.
        assert (await status(PeerRole.ROUTER, PeerRole.PREFILL))[0] is denied
        for asking in (*WORKERS, PeerRole.ROUTER, PeerRole.KVSTORE, PeerRole.CLIENT):
            told = await asked_over_tls(made, w.address, asking, PeerRole.DECODE, "prefill")
            assert told[0] is denied, asking
        assert w.core.identity.role == "decode"
        told = await asked_over_tls(
            made, w.address, PeerRole.AUTOSCALER, PeerRole.DECODE, "prefill"
        )
        assert told == (grpc.StatusCode.OK, "prefill")
        assert (await status(PeerRole.ROUTER, PeerRole.PREFILL)) == (grpc.StatusCode.OK, "prefill")
        assert (await status(PeerRole.ROUTER, PeerRole.DECODE)) == (
            away,
            "w has the role prefill now",
        )
        for asking in (*WORKERS, PeerRole.KVSTORE, PeerRole.CLIENT):
            assert (await status(asking, PeerRole.PREFILL))[0] is denied, asking
            assert (await status(asking, PeerRole.DECODE))[0] is denied, asking
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.PREFILL, "decode")
        assert told == (grpc.StatusCode.OK, "decode")
        assert (await status(PeerRole.ROUTER, PeerRole.DECODE)) == (grpc.StatusCode.OK, "decode")


async def test_flips_that_are_allowed_or_forbidden_later_need_no_restart(tmp_path: Path) -> None:
    """It keeps showing the last certificate that names its role."""
    made = development_certificates.write(tmp_path)
    ok, refused = grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION
    async with worker_with(made) as w:
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.DECODE, "prefill")
        assert told[0] is refused
        development_certificates.write(tmp_path, flips=True)
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.DECODE, "prefill")
        assert told == (ok, "prefill")
        development_certificates.write(tmp_path)  # decode alone, again
        # A new connection each, as the role that it has.
        for _ in range(2):
            told = await asked_over_tls(
                made, w.address, PeerRole.ADMIN, PeerRole.PREFILL, "prefill"
            )
            assert told == (ok, "prefill")
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.PREFILL, "decode")
        assert told == (ok, "decode")
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.DECODE, "prefill")
        assert told[0] is refused


async def test_a_certificate_that_was_refused_until_the_flip_is_shown_with_it(
    tmp_path: Path,
) -> None:
    """Whoever hears of the new role may dial it at once."""
    made = development_certificates.write(tmp_path)
    async with worker_with(made) as w:
        own, other = made.tls_of(PeerRole.DECODE), made.tls_of(PeerRole.PREFILL)
        shutil.copyfile(other.cert_file, own.cert_file)
        shutil.copyfile(other.key_file, own.key_file)
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.DECODE, "prefill")
        assert told == (grpc.StatusCode.OK, "prefill")
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.PREFILL, "prefill")
        assert told == (grpc.StatusCode.OK, "prefill")
