"""mTLS between roles on real gRPC: each method of each service, called with each role's
certificate, is served to those whom the table names and refused with PERMISSION_DENIED to all
others."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from baton import development_certificates
from baton.development_certificates import CertSet
from tests.harness.role_services import (
    SERVED,
    WORKERS,
    Role,
    calling,
    certificate_of,
    may_call,
    methods,
    outcome,
    serving_as,
)

pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CertSet:
    return development_certificates.write(tmp_path_factory.mktemp("certs"))


@pytest.mark.parametrize("server", SERVED, ids=lambda role: role.value)
async def test_a_wrong_role_is_refused_on_every_method(server: Role, made: CertSet) -> None:
    num_refused = num_let_in = 0
    async with serving_as(server, made) as address:
        for caller in Role:
            async with calling(made.tls_of(caller), address, server, caller) as channel:
                for path, method in methods(server):
                    code = await outcome(channel, path, method)
                    may = may_call(caller, server, path)
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
    made = development_certificates.write(tmp_path, flips=True)
    codes: dict[str, set[grpc.StatusCode]] = {}
    async with serving_as(server, made) as address:
        for caller in WORKERS:
            async with calling(made.tls_of(caller), address, server, caller) as channel:
                for path, method in methods(server):
                    codes.setdefault(path, set()).add(await outcome(channel, path, method))
        for role in Role:
            async with calling(made.tls_of(Role.ADMIN), address, role) as channel:
                # Of one kind of call: gRPC's client may cancel a stream of its own instead of
                # telling why there is no connection.
                plain = next(one for one in methods(server) if not one[1].client_streaming)
                told = await outcome(channel, *plain)
                is_dialled = role is server or {role, server} == WORKERS
                assert (told is not grpc.StatusCode.UNAVAILABLE) is is_dialled, role
    for path, found in codes.items():
        may = any(may_call(worker, server, path) for worker in WORKERS)
        assert found == {
            grpc.StatusCode.UNIMPLEMENTED if may else grpc.StatusCode.PERMISSION_DENIED
        }, path


@pytest.mark.parametrize("names", [[], ["router.baton.internal"], ["baton://role/router"]])
async def test_a_certificate_of_our_ca_without_a_role_may_do_nothing(
    made: CertSet, tmp_path: Path, names: list[str]
) -> None:
    """Nor does one help that names a role where names of hosts belong."""
    tls = certificate_of(made, tmp_path, names)
    async with serving_as(Role.DECODE, made) as address:
        async with calling(tls, address, Role.DECODE) as channel:
            for path, method in methods(Role.DECODE):
                code = await outcome(channel, path, method)
                assert code is grpc.StatusCode.PERMISSION_DENIED, path
