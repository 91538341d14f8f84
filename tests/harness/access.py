"""API keys and certificates of tests."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from baton import api_key_file
from baton.development_certificates import CertSet
from process import api_keys
from process.authorization import PeerRole as Role
from process.tls import TlsSettings


def add_key(path: Path, tenant: str, **entry: Any) -> str:
    """Put a key of this tenant into the file. Returns: what its owner sends. Args: entry: what else
    the file says of it."""
    key, key_id, written = api_keys.new_key(tenant, **entry)
    api_key_file.add(path, key_id, written)
    return key


def one_sided_tls(made: CertSet, role: Role = Role.ROUTER) -> TlsSettings:
    """A server's that asks its clients for no certificate."""
    return TlsSettings("", str(made.cert_file(role)), str(made.key_file(role)))


def client_context(made: CertSet, role: Role | None) -> ssl.SSLContext:
    """A client's, with that role's certificate or without any."""
    found = ssl.create_default_context(cafile=str(made.ca_file))
    if role is not None:
        found.load_cert_chain(made.cert_file(role), made.key_file(role))
    return found
