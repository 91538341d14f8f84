"""A worker changes its role where certificates say who is who: what it shows names the role that it
has, and the one on disk decides which it may take."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

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
from services.decode.role import DecodeRole
from services.worker import main
from services.worker.config import WorkerLimits, WorkerSettings
from tests.harness.gated_engine import fake_engine
from tests.harness.prefill_decode_pair import WAIT_S


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_a_certificate_of_one_role_keeps_it_and_says_so(tmp_path: Path) -> None:
    """Asked by those who may ask; nobody else gets as far."""
    made = development_certificates.write(tmp_path)
    settings = WorkerSettings(
        worker_id="w",
        redis_url="",
        tls=made.tls_of(PeerRole.DECODE),
        limits=WorkerLimits(drain_s=0.2, stop_grace_s=0.05),
    )
    serving_one = await main.start(fake_engine(), settings, "decode", DecodeRole)
    request = worker_control_pb2.SetRoleRequest(role="prefill")
    try:
        for asking, code, says in (
            (
                PeerRole.ADMIN,
                grpc.StatusCode.FAILED_PRECONDITION,
                "cannot serve as prefill: cert_file",
            ),
            (PeerRole.AUTOSCALER, grpc.StatusCode.FAILED_PRECONDITION, "baton://role/decode"),
            (PeerRole.ROUTER, grpc.StatusCode.PERMISSION_DENIED, "not for a peer of role router"),
        ):
            dial = rpc.Dialer(TlsIdentity(made.tls_of(asking), asking))
            async with dial(serving_one.address, PeerRole.DECODE) as channel:
                stub = worker_control_pb2_grpc.WorkerControlStub(channel)
                told = await code_of(stub.SetRole(request, timeout=WAIT_S))
                assert told[0] is code and says in told[1] and "\n" not in told[1]
        assert serving_one.core.identity.role == "decode" and not serving_one.core.draining
    finally:
        await serving_one.stop()


def worker_with(made: CertSet, role: PeerRole) -> WorkerSettings:
    limits = WorkerLimits(drain_s=0.2, stop_grace_s=0.05)
    return WorkerSettings(worker_id="w", redis_url="", tls=made.tls_of(role), limits=limits)


async def asked_over_tls(
    made: CertSet, address: str, asking: PeerRole, dialled: PeerRole, role: str
) -> tuple[grpc.StatusCode, str]:
    """What comes of SetRole."""
    dial = rpc.Dialer(TlsIdentity(made.tls_of(asking), asking))
    async with dial(address, dialled) as channel:
        stub = worker_control_pb2_grpc.WorkerControlStub(channel)
        request = worker_control_pb2.SetRoleRequest(role=role)
        try:
            reply = await stub.SetRole(request, timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
    return grpc.StatusCode.OK, reply.role


async def test_a_certificate_of_both_roles_serves_in_either_by_its_own_table(
    tmp_path: Path,
) -> None:
    """A peer of the role that it has not any more is told so, as without TLS; one that never had
    business here is refused, before and after."""
    made = development_certificates.write(tmp_path, flips=True)
    w = await main.start(fake_engine(), worker_with(made, PeerRole.DECODE), "decode", DecodeRole)
    ask = common_pb2.GetWorkerStatusRequest()

    async def status(asking: PeerRole, called: PeerRole) -> tuple[grpc.StatusCode, str]:
        dial = rpc.Dialer(TlsIdentity(made.tls_of(asking), asking))
        async with dial(w.address, called) as channel:
            stub: Any = (
                decode_pb2_grpc.DecodeStub(channel)
                if called is PeerRole.DECODE
                else prefill_pb2_grpc.PrefillStub(channel)
            )
            try:
                return grpc.StatusCode.OK, (await stub.GetWorkerStatus(ask, timeout=WAIT_S)).role
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""

    denied, away = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE
    try:
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
    finally:
        await w.stop()


async def test_flips_that_are_allowed_or_forbidden_later_need_no_restart(tmp_path: Path) -> None:
    """New certificates are what decides. A worker that has flipped keeps showing the last one that
    names its role: nobody could reach it under another."""
    made = development_certificates.write(tmp_path)
    w = await main.start(fake_engine(), worker_with(made, PeerRole.DECODE), "decode", DecodeRole)
    ok, refused = grpc.StatusCode.OK, grpc.StatusCode.FAILED_PRECONDITION
    try:
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
    finally:
        await w.stop()


async def test_a_certificate_that_was_refused_until_the_flip_is_shown_with_it(
    tmp_path: Path,
) -> None:
    """Whoever hears of the new role may dial it at once."""
    made = development_certificates.write(tmp_path)
    settings = worker_with(made, PeerRole.DECODE)
    w = await main.start(fake_engine(), settings, "decode", DecodeRole)
    try:
        other = made.tls_of(PeerRole.PREFILL)
        shutil.copyfile(other.cert_file, settings.tls.cert_file)
        shutil.copyfile(other.key_file, settings.tls.key_file)
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.DECODE, "prefill")
        assert told == (grpc.StatusCode.OK, "prefill")
        told = await asked_over_tls(made, w.address, PeerRole.ADMIN, PeerRole.PREFILL, "prefill")
        assert told == (grpc.StatusCode.OK, "prefill")
    finally:
        await w.stop()
