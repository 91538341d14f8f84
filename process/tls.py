"""TLS for every connection: this process's certificate and the CA that it trusts, as files in PEM.

The files are read again when they change, so that a rotated certificate needs no restart: servers
show it with the next handshake, channels when they are next made. TLS 1.2 at least.
"""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from process import secret_files
from process.authorization import PeerRole
from process.secret_files import WatchedFile
from process.settings import UNIX, SettingsError, check_address, split_host_port

_MAX_FILE_BYTES = 1024 * 1024
_FIX = "`baton certs --out FOLDER` makes a set for development"


@dataclass(frozen=True)
class TlsSettings:
    """Files in PEM: a process's certificate, its private key, and the CA that it trusts."""

    ca_file: str = ""
    """Certificates (PEM) that peers' certificates must be signed by."""

    cert_file: str = ""
    """Certificate of this process, and those that lead to its CA. Empty: no TLS."""

    key_file: str = ""
    """Private key of the certificate, not encrypted; only its owner may be able to read the
    file."""

    allow_plaintext: bool = False
    """Whether to listen without TLS where other machines can connect. For networks that encrypt
    and authenticate by themselves.
    """

    def __post_init__(self) -> None:
        if bool(self.cert_file) != bool(self.key_file):
            raise SettingsError("cert_file: goes with key_file; give both or none")

    @property
    def is_on(self) -> bool:
        """Whether this process shows a certificate."""
        return bool(self.cert_file)

    def check_peers(self, name: str) -> None:
        """Check the settings of a process that calls peers and is called by them: all files or
        none.

        Raises: SettingsError.
        """
        if bool(self.ca_file) != self.is_on:
            raise SettingsError(f"{name}.ca_file: goes with cert_file and key_file")

    def check_listen(self, name: str, listen: str, group: str) -> None:
        """Check that `listen` is an address, and one that other machines reach only with TLS. name:
        of the setting with the address; group: of the TLS settings.

        Raises: SettingsError.
        """
        check_address(name, listen)
        if not (self.is_on or self.allow_plaintext or is_loopback(listen)):
            raise SettingsError(
                f"{name}: {listen} is reached from other machines, in the clear and by anybody; "
                f"set {group}.cert_file, or {group}.allow_plaintext=true where the network "
                "protects it"
            )


def is_loopback(listen: str) -> bool:
    """Whether only this machine can connect to host:port or unix:/path."""
    if listen.startswith(UNIX):
        return True
    try:
        host, _ = split_host_port(listen)
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class _Pem:
    ca: bytes
    cert: bytes
    key: bytes = field(repr=False)


class TlsIdentity:
    """A process's TLS certificate and trusted CA: makes credentials of gRPC servers and channels,
    and the context of an HTTP server. Any thread."""

    def __init__(self, settings: TlsSettings, role: PeerRole | None = None) -> None:
        """Args: role: the role that the certificate must name; None: any, or none.
        Raises: SettingsError naming the file and the fix.
        """
        self._settings = settings
        self._role = role
        paths = [
            Path(name) for name in (settings.ca_file, settings.cert_file, settings.key_file) if name
        ]
        self._pem = WatchedFile("tls", paths, self._read)

    @classmethod
    def of(cls, settings: TlsSettings, role: PeerRole | None = None) -> TlsIdentity | None:
        """The identity that the settings describe; None where no TLS file is set. Raises:
        SettingsError as the constructor."""
        return cls(settings, role) if settings.is_on or settings.ca_file else None

    def take_over(self, other: TlsIdentity) -> None:
        """Take over another identity's role, and its files as it has read them. Servers show them
        with the next handshake."""
        self._settings, self._role, self._pem = other._settings, other._role, other._pem

    @property
    def num_reloads(self) -> int:
        """The number of times that the files have changed, up to now."""
        self._pem.get()
        return self._pem.num_reloads

    @property
    def asks_clients(self) -> bool:
        """Whether clients must show a certificate."""
        return bool(self._settings.ca_file)

    def server_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a gRPC server. With a CA, clients must show a certificate of it."""
        last = [self._pem.get()]

        def config(pem: _Pem) -> Any:
            return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca or None)

        def fetch() -> Any:  # before each handshake, in a thread of gRPC's
            pem = self._pem.get()
            if pem is last[0]:
                return None  # as it was
            last[0] = pem
            return config(pem)

        return grpc.dynamic_ssl_server_credentials(config(last[0]), fetch, self.asks_clients)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a new gRPC channel. Without a CA file it trusts the CAs that the
        machine trusts."""
        pem = self._pem.get()
        return grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.cert or None)

    def http_context(self) -> ssl.SSLContext:
        """The TLS context of an HTTP server."""
        contexts = {id(pem := self._pem.get()): (pem, self._make_context(ssl.PROTOCOL_TLS_SERVER))}
        outer = next(iter(contexts.values()))[1]

        def take_newest(connection: Any, name: str | None, context: ssl.SSLContext) -> None:
            pem = self._pem.get()
            if id(pem) not in contexts:
                contexts.clear()
                contexts[id(pem)] = (pem, self._make_context(ssl.PROTOCOL_TLS_SERVER))
            connection.context = contexts[id(pem)][1]

        outer.sni_callback = take_newest  # called without a name, too
        return outer

    def _read(self) -> _Pem:
        files = self._settings
        pem = _Pem(
            _content(files.ca_file, "ca_file"),
            _content(files.cert_file, "cert_file"),
            secret_files.read_secret(
                Path(files.key_file), what="key_file", max_bytes=_MAX_FILE_BYTES, fix=_FIX
            )
            if files.key_file
            else b"",
        )
        self._make_context(ssl.PROTOCOL_TLS_SERVER)  # the files fit together
        if pem.cert:
            _check_certificate(files.cert_file, pem.cert, self._role)
        return pem

    def _make_context(self, protocol: int) -> ssl.SSLContext:
        files = self._settings
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            if files.cert_file:
                context.load_cert_chain(files.cert_file, files.key_file, password=_no_password)
        except (ssl.SSLError, OSError) as error:
            raise SettingsError(
                f"cert_file {files.cert_file}, key_file {files.key_file}: are no certificate and "
                f"its key: {_reason(error)}"
            ) from None
        try:
            if files.ca_file:
                context.load_verify_locations(files.ca_file)
                context.verify_mode = ssl.CERT_REQUIRED
        except (ssl.SSLError, OSError) as error:
            raise SettingsError(f"ca_file {files.ca_file}: {_reason(error)}") from None
        return context


def uris_of(peer: dict[str, Any] | None) -> list[str]:
    """The URIs in a certificate as `ssl` gives it; none without one."""
    return [value for kind, value in (peer or {}).get("subjectAltName", ()) if kind == "URI"]


def _content(name: str, what: str) -> bytes:
    if not name:
        return b""
    try:
        with open(name, "rb") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError as error:
        raise SettingsError(f"{what} {name}: {error.strerror}; {_FIX}") from error


def _check_certificate(name: str, content: bytes, role: PeerRole | None) -> None:
    """Check that a certificate is valid now and names the role. Raises: SettingsError."""
    from cryptography import x509  # here: a process without TLS does without

    certificate = x509.load_pem_x509_certificates(content)[0]
    over = certificate.not_valid_after_utc
    if over <= datetime.datetime.now(datetime.UTC):
        raise SettingsError(f"cert_file {name}: expired at {over:%Y-%m-%d %H:%M}; put a new one")
    if role is None:
        return
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
        hosts = names.get_values_for_type(x509.DNSName)
    except x509.ExtensionNotFound:
        uris, hosts = [], []
    if role.uri not in uris:
        raise SettingsError(
            f"cert_file {name}: does not name {role.uri}, which this process is (it names "
            f"{', '.join(uris) or 'no role'})"
        )
    if role.server_name not in hosts:
        raise SettingsError(
            f"cert_file {name}: has no DNS name {role.server_name}: nobody would talk to it as "
            f"{role.value}; `baton certs` writes it"
        )


def _no_password() -> str:
    raise OSError("the key is encrypted; no passphrase can be given, store it without")


def _reason(error: OSError) -> str:
    return getattr(error, "reason", None) or error.strerror or str(error)
