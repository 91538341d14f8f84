"""CertSet: where the files of a development set of certificates lie, and whose are which. Values;
`certs` makes the files.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from process.access import PeerRole
from process.tls import TlsSettings


@dataclass(frozen=True)
class CertSet:
    """The files of a set."""

    folder: Path

    @property
    def ca_file(self) -> Path:
        """The certificate that all others are signed by."""
        return self.folder / "ca.crt"

    def cert_file(self, role: PeerRole) -> Path:
        """A role's certificate."""
        return self.folder / f"{role.value}.crt"

    def key_file(self, role: PeerRole) -> Path:
        """Its private key."""
        return self.folder / f"{role.value}.key"

    def tls_of(self, role: PeerRole) -> TlsSettings:
        """The settings of a process of that role."""
        return TlsSettings(str(self.ca_file), str(self.cert_file(role)), str(self.key_file(role)))
