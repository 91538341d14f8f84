"""The file of API keys: which keys there are, whose they are, and what each tenant may use.

TOML; `baton api-key` writes it, routers read it:

    [keys.3f9c12ab77de]
    tenant = "acme"
    digest = "..."           # of the secret; the secret itself is nowhere
    max_priority = 0

    [tenants.acme]
    weight = 2.0
    max_tokens_per_min = 100000

A key is `baton-<key id>-<43 characters>`. Its last part holds 256 random bits, so one round of
BLAKE2b is as good as a slow hash, and costs nothing per request. Knows no requests. Pure but for
`load` and `new_key`; any thread.
"""

from __future__ import annotations

import datetime
import hashlib
import re
import secrets
import stat
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from process import settings
from process.settings import NonNegativeInt, SettingsError, check_ranges

PREFIX = "baton"
MAX_FILE_BYTES = 16 * 1024 * 1024
"""Largest file of API keys that is read: about a hundred thousand keys. More belong into a
database."""

TENANT = re.compile(r"[A-Za-z0-9._:@/+=-]{1,64}")
"""Pattern of a tenant's name."""

_PERSON = b"baton-api-key-1"
_KEY_ID = re.compile(r"[0-9a-f]{12}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class TenantLimits:
    """Limits of one tenant; 0: no limit."""

    weight: Annotated[float, Meta(ge=0.001, le=1000)] = 1.0
    """Share of the cluster that the tenant gets while several wait, relative to other tenants'
    weights."""

    max_requests_per_min: NonNegativeInt = 0
    """Most requests that the tenant may start within a minute, over all routers."""

    max_tokens_per_min: NonNegativeInt = 0
    """Most tokens of the tenant, of prompts and outputs together, within a minute, over all
    routers."""

    max_queued_requests: NonNegativeInt = 0
    """Most requests of the tenant that may wait at one router; the next is refused with a retry
    time. 0: the router's own bound."""

    max_active_requests: NonNegativeInt = 0
    """Most requests of the tenant that one router serves at the same time; the others wait."""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ApiKey:
    """One API key as the file has it: whose it is and what it allows, without the secret."""

    tenant: str
    """The tenant that requests under this key belong to."""

    digest: str = field(repr=False)
    """Digest of the key's secret part: 64 hex digits."""

    is_admin: bool = False
    """Whether the key also gives access to what shows or changes the whole cluster: status,
    explain, the page."""

    min_priority: int = -100
    """Least `priority` that a request under this key may have."""

    max_priority: int = 0
    """Greatest `priority` that a request under this key may have."""

    expires: str = ""
    """Date and time (ISO 8601, UTC unless it says otherwise) from which on the key is refused;
    empty: never."""

    def __post_init__(self) -> None:
        if not TENANT.fullmatch(self.tenant):
            raise SettingsError(f"tenant: {self.tenant!r} is no tenant's name")
        if not _DIGEST.fullmatch(self.digest):
            raise SettingsError("digest: is not 64 hex digits")
        if self.min_priority > self.max_priority:
            raise SettingsError("min_priority: is above max_priority")
        self.expires_unix_s()

    def expires_unix_s(self) -> float | None:
        """Time from which on the key is refused, in Unix seconds; None: never. Raises:
        SettingsError for what is no date."""
        if not self.expires:
            return None
        try:
            moment = datetime.datetime.fromisoformat(self.expires)
        except ValueError:
            raise SettingsError(
                f"expires: {self.expires!r} is no date as 2027-01-31 or 2027-01-31T12:00:00Z"
            ) from None
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=datetime.UTC)
        return moment.timestamp()


@dataclass(frozen=True)
class KeyFile:
    """The content of a file of API keys."""

    keys: Mapping[str, ApiKey] = field(default_factory=dict)
    """The API keys, by key id."""

    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    """The limits of those tenants that the file names, by tenant."""


def new_key(tenant: str, **fields: Any) -> tuple[str, str, ApiKey]:
    """Make a random API key. Returns: the key as the client sends it, its id, and what the file
    keeps.

    Raises: SettingsError.
    """
    key_id, secret = secrets.token_hex(6), secrets.token_urlsafe(32)
    return f"{PREFIX}-{key_id}-{secret}", key_id, ApiKey(tenant, digest_of(secret), **fields)


def digest_of(secret: str) -> str:
    """Digest of a key's secret: 64 hex digits, from which the secret cannot be computed."""
    data = secret.encode(errors="surrogatepass")  # what a header holds may be no text
    return hashlib.blake2b(data, digest_size=32, person=_PERSON).hexdigest()


def load(path: Path) -> KeyFile:
    """Read a file of API keys. Raises: SettingsError naming the file, the key and the fix."""
    where = f"api_keys_file {path}"
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
            mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise SettingsError(
            f"{where}: {error.strerror}; `baton api-key add --file {path}` makes one"
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SettingsError(f"{where}: others may write it; run `chmod go-w {path}`")
    if len(content) > MAX_FILE_BYTES:
        raise SettingsError(f"{where}: is longer than {MAX_FILE_BYTES} bytes")
    try:
        values = tomllib.loads(content.decode())
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{where}: cannot be read as TOML: {error}") from None
    return parse(values, where=where)


def parse(values: Mapping[str, Any], *, where: str) -> KeyFile:
    """Read the tables of a file of API keys. Raises: SettingsError as `load`."""
    if unknown := sorted(values.keys() - {"keys", "tenants"}):
        raise SettingsError(f"{where}: unknown table '{unknown[0]}'; there are keys and tenants")
    keys = _each(ApiKey, values.get("keys", {}), f"{where}: keys")
    tenants = _each(TenantLimits, values.get("tenants", {}), f"{where}: tenants")
    for key_id in keys:
        if not _KEY_ID.fullmatch(key_id):
            raise SettingsError(f"{where}: key id '{key_id}' is not 12 hex digits")
    for tenant in tenants:
        if not TENANT.fullmatch(tenant):
            raise SettingsError(f"{where}: {tenant!r} is no tenant's name")
    return KeyFile(keys, tenants)


def _each(cls: type[Any], tables: Any, where: str) -> dict[str, Any]:
    if not isinstance(tables, Mapping):
        raise SettingsError(f"{where}: is no table of tables")
    made = {}
    for name, values in tables.items():
        if not isinstance(values, Mapping):
            raise SettingsError(f"{where}.{name}: is no table")
        try:
            made[name] = settings.build(cls, values, where="")
        except SettingsError as error:
            raise SettingsError(f"{where}.{name}: {str(error).removeprefix(': ')}") from None
    return made
