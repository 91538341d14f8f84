"""Secured: what protects a local cluster, as settings of its parts. Values; no part of a secret is
in them, only the files that hold one: command lines can be read by everybody on a machine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit, urlunsplit

from baton.cert_set import CertSet
from process.access import Role


@dataclass(frozen=True)
class Secured:
    """See the module. Empty: nothing is asked of anybody."""

    certs: CertSet | None = None
    """For TLS to clients and between all parts but Redis; None: none."""
    api_keys_file: str = ""
    """Keys that the router asks clients for."""
    redis_user: str = ""
    redis_password_file: str = ""

    def settings_of(self, role: Role) -> dict[str, str | float]:
        """The settings of a part of that role."""
        values: dict[str, str | float] = {}
        if self.certs is not None:
            values |= _files("tls", self.certs, role) | {"tls.ca_file": str(self.certs.ca_file)}
        if self.redis_password_file:
            values |= {"redis.password_file": self.redis_password_file}
            values |= {"redis.user": self.redis_user} if self.redis_user else {}
        if role is Role.ROUTER:
            values |= _files("client_tls", self.certs, role) if self.certs is not None else {}
            values |= {"api_keys_file": self.api_keys_file} if self.api_keys_file else {}
        return values


OPEN = Secured()


def _files(group: str, certs: CertSet, role: Role) -> dict[str, str | float]:
    return {
        f"{group}.cert_file": str(certs.cert_file(role)),
        f"{group}.key_file": str(certs.key_file(role)),
    }


def take_password(redis_url: str, file: Path) -> tuple[str, str]:
    """Write the password in a Redis URL into `file`, for our eyes only.

    Returns: the URL without user and password, and the user; an URL without a password comes back
    as it is, and nothing is written.
    """
    parts = urlsplit(redis_url)
    if not parts.password:
        return redis_url, ""
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8") as out:
        out.write(unquote(parts.password))
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2])
    return urlunsplit(bare), unquote(parts.username or "")
