"""Certificates for development: a CA, and a certificate for each role, in a folder or in Secrets.

In production a CA of the user's own issues them. Baton asks one thing of a certificate: that its
names say the role (`process.authorization`). The URI `baton://role/<role>` decides which methods
its owner may call; the DNS name `<role>.baton.internal` is the one that its clients verify. A
worker that may change its role has the names of both.

`write` makes the set in a folder, `write_secrets` keeps it in Secrets of a Kubernetes cluster. Run
again, both keep the CA and make new certificates, which running processes take up; processes with
new and with old certificates trust each other meanwhile. Blocking; any thread.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.errors import BatonError
from process import kubernetes_config
from process.authorization import WORKERS, PeerRole
from process.kubernetes_config import NAMESPACE_FILE
from process.secret_files import replace_file
from process.settings import SettingsError
from process.tls import TlsSettings

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
NO_SERVERS: Mapping[str, str] = MappingProxyType({})
CALL_S = 10.0
"""Time limit of one call to Kubernetes' API server."""
_CA_DAYS = 3650
_SKEW = datetime.timedelta(minutes=5)
"""Clocks differ, so a certificate is valid from this much before it was made."""


class CertsError(BatonError):
    """A set of certificates cannot be made; the message says why."""


@dataclass(frozen=True)
class CertSet:
    """The files of a set of certificates, in one folder."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        """Path of the CA's certificate."""
        return self.folder / "ca.crt"

    def cert_file(self, role: PeerRole) -> Path:
        """Path of a role's certificate."""
        return self.folder / f"{role.value}.crt"

    def key_file(self, role: PeerRole) -> Path:
        """Path of a role's private key."""
        return self.folder / f"{role.value}.key"

    def tls_of(self, role: PeerRole) -> TlsSettings:
        """The TLS settings of a process of this role."""
        return TlsSettings(str(self.ca_file), str(self.cert_file(role)), str(self.key_file(role)))


def write(
    folder: Path,
    *,
    hosts: Sequence[str] = LOCAL_HOSTS,
    days: int = 365,
    servers: Mapping[str, str] = NO_SERVERS,
    flips: bool = False,
) -> CertSet:
    """Make a set of certificates in `folder`, or renew those of the set that is there.

    Args: hosts: names and addresses by which clients call the router. days: how long the
        certificates are valid. servers: host by name of each server without a role that needs a
        certificate, such as Redis. flips: workers may change their role, so their certificates name
        both.
    Raises: CertsError.
    """
    names = {role.value: _names_of_role(role, flips) for role in PeerRole}
    names[PeerRole.ROUTER.value] += [_name_of(host) for host in hosts]
    names |= {server: [_name_of(host)] for server, host in servers.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ca_key, ca = _ca(folder)
        for owner, its_names in names.items():
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _leaf(owner, its_names, key, ca_key, ca, days)
            replace_file(folder / f"{owner}.key", _key_pem(key), mode=0o600)
            replace_file(folder / f"{owner}.crt", _pem(certificate), mode=0o644)
    except OSError as error:
        raise CertsError(f"{error.filename or folder}: {error.strerror}") from error
    return CertSet(folder)


def _names_of_role(role: PeerRole, flips: bool) -> list[x509.GeneralName]:
    others = WORKERS - {role} if flips and role in WORKERS else frozenset()
    return [
        name
        for each in (role, *others)
        for name in (x509.UniformResourceIdentifier(each.uri), x509.DNSName(each.server_name))
    ]


def _ca(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key_file, cert_file = folder / "ca.key", folder / "ca.crt"
    if key_file.exists() or cert_file.exists():
        try:
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(cert_file.read_bytes())
        except (OSError, ValueError, TypeError) as error:
            raise CertsError(
                f"{folder}: holds half a CA, or one that cannot be read ({error}); name another "
                "folder"
            ) from error
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CertsError(
                f"{key_file}: is not a key that `baton certs` made; name another folder"
            )
        return key, certificate
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Baton development CA")])
    usage = x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        _builder(name, name, key, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    replace_file(key_file, _key_pem(key), mode=0o600)
    replace_file(cert_file, _pem(certificate), mode=0o644)
    return key, certificate


def _leaf(
    owner: str,
    names: Sequence[x509.GeneralName],
    key: ec.EllipticCurvePrivateKey,
    ca_key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    days: int,
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"baton {owner}")])
    both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
    identifier = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    issued_by = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier)
    return (
        _builder(subject, ca.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(both, critical=False)
        .add_extension(issued_by, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name_of(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return x509.DNSName(host)
    except ValueError:
        raise CertsError(f"--host {host}: is not a host name or address") from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


# -- Secrets


@dataclass(frozen=True)
class SecretsPlace:
    """The Kubernetes Secrets of a set of certificates. PREFIX-ca holds the CA with its key, and no
    pod mounts it. PREFIX-ROLE holds ca.crt, tls.crt and tls.key of a role under the names that
    cert-manager uses, so that pods take either."""

    prefix: str
    """The first part of the Secrets' names."""

    namespace: str = ""
    """Namespace of the Secrets; empty: that of the pod that this runs in."""

    owner: str = ""
    """ServiceAccount with which Kubernetes removes the Secrets; empty: they stay."""

    def name(self, of: str) -> str:
        """The name of a role's Secret, or of the CA's."""
        return f"{self.prefix}-{of}"


def write_secrets(
    place: SecretsPlace,
    *,
    hosts: Sequence[str],
    days: int,
    servers: Mapping[str, str],
    flips: bool = False,
    api: Any = None,
    namespace_file: Path = NAMESPACE_FILE,
) -> list[str]:
    """Make a set of certificates in Kubernetes Secrets, or renew its certificates.

    Args: hosts, days, servers, flips: as `write`. api: a `kubernetes.client.CoreV1Api`; None: by
        the pod's service account, or a kubeconfig. namespace_file: has the namespace where neither
        `place` nor the connection names one.
    Returns: the names of the Secrets. Raises: CertsError, one line.
    """
    try:
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError
    except ImportError as error:
        raise CertsError(
            f"--secrets: {error}; the client of Kubernetes comes with `pip install "
            "'baton[kubernetes]'`"
        ) from error
    namespace = place.namespace
    if api is None:
        connection, own_namespace = _connect()
        api, namespace = client.CoreV1Api(connection), namespace or own_namespace
    try:
        namespace = namespace or namespace_file.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise CertsError("--namespace: needed outside of a pod") from error
    store = _Secrets(api, place, namespace)
    try:
        return store.renew(hosts, days, servers, flips)
    except ApiException as error:
        raise CertsError(
            f"Secrets {place.prefix}-*: the API server says {error.status} {error.reason}; the "
            "ServiceAccount needs get, create and patch of them"
        ) from error
    except (HTTPError, OSError) as error:
        raise CertsError(f"the API server cannot be reached: {error}") from error


def _connect() -> tuple[Any, str]:
    """Connect to Kubernetes. Returns: the connection, and its namespace, which may be empty."""
    from kubernetes import client

    try:
        configuration, namespace = kubernetes_config.load()
    except SettingsError as error:
        raise CertsError(f"--secrets: {error}") from error
    return client.ApiClient(configuration), namespace


class _Secrets:
    """Reads and writes the Secrets of one set."""

    def __init__(self, api: Any, place: SecretsPlace, namespace: str) -> None:
        self._api = api
        self._place = place
        self._namespace = namespace

    def renew(
        self, hosts: Sequence[str], days: int, servers: Mapping[str, str], flips: bool
    ) -> list[str]:
        """Make or renew the set in the Secrets, as `write_secrets`."""
        owner = self._owner()
        with tempfile.TemporaryDirectory(prefix="baton-certs-") as name:
            folder = Path(name)
            ca = self._find("ca")
            if ca is not None:
                for file in ("ca.crt", "ca.key"):
                    (folder / file).write_bytes(base64.b64decode(ca.data[file]))
            made = write(folder, hosts=hosts, days=days, servers=servers, flips=flips)
            ca_cert = made.ca_file.read_bytes()
            if ca is None:
                # The first Secret: of two runs at the same time one fails here, and its set is
                # not written.
                content = {"ca.crt": ca_cert, "ca.key": (folder / "ca.key").read_bytes()}
                self._create("ca", content, owner)
            names = [*(role.value for role in PeerRole), *servers]
            for each in names:
                content = {
                    "ca.crt": ca_cert,
                    "tls.crt": (folder / f"{each}.crt").read_bytes(),
                    "tls.key": (folder / f"{each}.key").read_bytes(),
                }
                self._put(each, content, owner)
        return [self._place.name(each) for each in names]

    def _owner(self) -> Any:
        if not self._place.owner:
            return None
        found = self._api.read_namespaced_service_account(
            self._place.owner, self._namespace, _request_timeout=CALL_S
        )
        return {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "name": self._place.owner,
            "uid": found.metadata.uid,
        }

    def _find(self, of: str) -> Any:
        from kubernetes.client.exceptions import ApiException

        try:
            return self._api.read_namespaced_secret(
                self._place.name(of), self._namespace, _request_timeout=CALL_S
            )
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def _create(self, of: str, content: Mapping[str, bytes], owner: Any) -> None:
        body = self._body(of, content, owner)
        self._api.create_namespaced_secret(self._namespace, body, _request_timeout=CALL_S)

    def _put(self, of: str, content: Mapping[str, bytes], owner: Any) -> None:
        if self._find(of) is None:
            self._create(of, content, owner)
            return
        self._api.patch_namespaced_secret(
            self._place.name(of),
            self._namespace,
            self._body(of, content, owner),
            _request_timeout=CALL_S,
        )

    def _body(self, of: str, content: Mapping[str, bytes], owner: Any) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self._place.name(of),
            "labels": {"app.kubernetes.io/name": "baton"},
        }
        if owner is not None:
            metadata["ownerReferences"] = [owner]
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": metadata,
            "type": "Opaque",
            "data": {key: base64.b64encode(value).decode() for key, value in content.items()},
        }
