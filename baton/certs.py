"""A set of certificates for development: a CA, and one certificate for each role.

Production takes these from its own CA; all that Baton asks of a certificate is the role among its
names (`process.access`): the URI `baton://role/<role>` says what it may call, the DNS name
`<role>.baton.internal` as what it may be dialled. Workers that may change their role have both
names of both. A set that is there already keeps its CA and gets
new certificates, which running processes take up. Blocking; any thread.
"""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from baton.cert_set import CertSet
from baton.errors import BatonError
from process.access import WORKERS, PeerRole
from process.secret_files import replace_file

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
NO_SERVERS: Mapping[str, str] = MappingProxyType({})
_CA_DAYS = 3650
_SKEW = datetime.timedelta(minutes=5)
"""Clocks differ; a certificate is valid from a little before it was made."""


class CertsError(BatonError):
    """A set cannot be made there; the message says why."""


def write(
    folder: Path,
    *,
    hosts: Sequence[str] = LOCAL_HOSTS,
    days: int = 365,
    servers: Mapping[str, str] = NO_SERVERS,
    flips: bool = False,
) -> CertSet:
    """Make a set in `folder`, or renew the certificates of the one that is there.

    Args: hosts: names and addresses under which clients reach the router. days: how long the
        certificates are valid. servers: others that need a certificate and have no role, such as
        Redis, and the host of each. flips: whether workers may change their role: each of their
        certificates then names both.
    Raises: CertsError.
    """
    made, names = CertSet(folder), [_name_of(host) for host in hosts]
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        ca_key, ca = _ca(folder)
        for role in PeerRole:
            own = names if role is PeerRole.ROUTER else []
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _leaf(
                role.value, [*_names_of_role(role, flips), *own], key, ca_key, ca, days
            )
            replace_file(made.key_file(role), _key_pem(key), mode=0o600)
            replace_file(made.cert_file(role), _pem(certificate), mode=0o644)
        for server, host in servers.items():
            key = ec.generate_private_key(ec.SECP256R1())
            certificate = _leaf(server, [_name_of(host)], key, ca_key, ca, days)
            replace_file(folder / f"{server}.key", _key_pem(key), mode=0o600)
            replace_file(folder / f"{server}.crt", _pem(certificate), mode=0o644)
    except OSError as error:
        raise CertsError(f"{error.filename or folder}: {error.strerror}") from error
    return made


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
            raise CertsError(f"{key_file}: is no key that `baton certs` made; name another folder")
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
        raise CertsError(f"--host {host}: is no host's name or address") from None


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
