"""Certificates in Secrets: pods of an old and of a new set must still trust each other, and nobody
is shown the CA's key."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp.web
import attrs
import kmock
import pytest
import pytest_asyncio
from cryptography import x509

from baton import development_certificates
from baton.development_certificates import CertsError, SecretsPlace
from process.authorization import WORKERS, PeerRole, roles_of
from process.tls import TlsIdentity, TlsSettings

if TYPE_CHECKING:  # a second, which only a process that runs these tests has to spend
    from kubernetes import client

PLACE = SecretsPlace("baton-tls", "models", "baton-certs")


@attrs.define(kw_only=True)
class ApiServer(kmock.KubernetesEmulator):
    """Errors are answers; `refused`: verbs that the client may not use."""

    refused: tuple[str, ...] = ()

    async def _handle(self, request: Any) -> aiohttp.web.StreamResponse:
        try:
            if request.method.value in self.refused:
                raise kmock.KubernetesError(status=403, reason="Forbidden", message="no")
            return await super()._handle(request)
        except kmock.KubernetesError as error:
            return await self._render_error(error)


@pytest_asyncio.fixture
async def cluster() -> AsyncIterator[tuple[ApiServer, client.CoreV1Api]]:
    """An API server, and the official client of it."""
    from kubernetes import client

    emulator = ApiServer()
    async with emulator, kmock.Server(emulator) as server:
        emulator.resources["v1/secrets"] = {}
        emulator.objects["v1/serviceaccounts", "models", "baton-certs"] = {
            "metadata": {"name": "baton-certs", "namespace": "models", "uid": "u-1"}
        }
        host = str(server.url).rstrip("/")
        with client.ApiClient(client.Configuration(host=host)) as connection:
            yield emulator, client.CoreV1Api(connection)


async def write(api: client.CoreV1Api, place: SecretsPlace = PLACE, **more: Any) -> list[str]:
    servers = {"redis": "baton-redis.models.svc"}
    return await asyncio.to_thread(
        development_certificates.write_secrets,
        place,
        hosts=["localhost"],
        days=30,
        servers=servers,
        api=api,
        **more,
    )


def data_of(emulator: Any, name: str) -> dict[str, bytes]:
    secret = dict(emulator.objects["v1/secrets", "models", name])
    return {key: base64.b64decode(value) for key, value in secret["data"].items()}


async def test_each_role_gets_its_own_and_a_process_takes_it(
    cluster: tuple[ApiServer, client.CoreV1Api], tmp_path: Path
) -> None:
    emulator, api = cluster
    names = await write(api)
    assert set(names) == {f"baton-tls-{role.value}" for role in PeerRole} | {"baton-tls-redis"}
    for role in PeerRole:
        files = {}
        content = data_of(emulator, f"baton-tls-{role.value}")
        assert set(content) == {"ca.crt", "tls.crt", "tls.key"}
        for key, value in content.items():
            files[key] = tmp_path / f"{role.value}-{key}"
            files[key].write_bytes(value)
            files[key].chmod(0o440)  # as a pod mounts them
        told = TlsSettings(*(str(files[key]) for key in ("ca.crt", "tls.crt", "tls.key")))
        assert TlsIdentity.of(told, role) is not None
    redis = x509.load_pem_x509_certificate(data_of(emulator, "baton-tls-redis")["tls.crt"])
    found = redis.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert found.get_values_for_type(x509.DNSName) == ["baton-redis.models.svc"]
    assert not found.get_values_for_type(x509.UniformResourceIdentifier)  # it has no role
    owner = dict(emulator.objects["v1/secrets", "models", "baton-tls-ca"])["metadata"]
    assert owner["ownerReferences"] == [
        {"apiVersion": "v1", "kind": "ServiceAccount", "name": "baton-certs", "uid": "u-1"}
    ]


async def test_renewing_keeps_the_ca(cluster: tuple[ApiServer, client.CoreV1Api]) -> None:
    emulator, api = cluster
    await write(api)
    before = {name: data_of(emulator, f"baton-tls-{name}") for name in ("ca", "decode")}
    await write(api)
    after = {name: data_of(emulator, f"baton-tls-{name}") for name in ("ca", "decode")}
    assert after["ca"] == before["ca"]
    assert after["decode"]["ca.crt"] == before["decode"]["ca.crt"]
    assert after["decode"]["tls.crt"] != before["decode"]["tls.crt"]
    assert after["decode"]["tls.key"] != before["decode"]["tls.key"]


async def test_workers_that_may_flip_are_named_so(
    cluster: tuple[ApiServer, client.CoreV1Api],
) -> None:
    emulator, api = cluster
    for flips in (False, True, False):
        await write(api, flips=flips)
        for role in PeerRole:
            content = data_of(emulator, f"baton-tls-{role.value}")["tls.crt"]
            certificate = x509.load_pem_x509_certificate(content)
            found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName)
            uris = found.value.get_values_for_type(x509.UniformResourceIdentifier)
            assert roles_of(uris) == (WORKERS if flips and role in WORKERS else {role})


async def test_what_the_api_server_refuses_is_one_line(
    cluster: tuple[ApiServer, client.CoreV1Api],
) -> None:
    emulator, api = cluster
    emulator.refused = ("POST",)
    with pytest.raises(CertsError, match="get, create and patch") as told:
        await write(api)
    assert "403" in str(told.value) and "\n" not in str(told.value)
    with pytest.raises(CertsError, match="404"):
        await write(api, SecretsPlace("baton-tls", "models", "no-such-account"))


async def test_an_api_server_that_is_not_there_is_one_line() -> None:
    from kubernetes import client

    configuration = client.Configuration(host="http://127.0.0.1:1")
    configuration.retries = 0
    with (
        client.ApiClient(configuration) as connection,
        pytest.raises(CertsError, match="cannot be reached"),
    ):
        await write(client.CoreV1Api(connection))


def test_outside_of_a_pod_the_namespace_is_asked_for() -> None:
    absent = Path("/no/such/file")
    with pytest.raises(CertsError, match="--namespace: needed"):
        development_certificates.write_secrets(
            SecretsPlace("p"), hosts=[], days=1, servers={}, api=object(), namespace_file=absent
        )
