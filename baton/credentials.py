"""Credentials: what a client shows a router, and how it knows it. A value."""

from __future__ import annotations

from dataclasses import dataclass, field

from process.tls import TlsIdentity, TlsSettings


@dataclass(frozen=True)
class Credentials:
    """See the module."""

    tls: TlsSettings | None = None
    """None: in the clear. Without a `ca_file`, the CAs that this machine trusts."""

    api_key: str = field(default="", repr=False)
    """As `baton api-key add` showed it; empty: none."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call carries."""
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def identity(self) -> TlsIdentity | None:
        """For channels. Raises: SettingsError naming the file that cannot be used."""
        return None if self.tls is None else TlsIdentity(self.tls)


NO_CREDENTIALS = Credentials()
