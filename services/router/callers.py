"""`Caller` and `ApiKeys`: the client behind a request, and its authentication by API key.

The gRPC and HTTP ports make one `Caller` per request. The format of the key file is
`process.api_keys`'. The file is read again when it changes: a key removed from it is refused from
the next request on. An unknown key id is compared with a digest as well, so that response times do
not reveal which ids exist. One asyncio loop.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from process import api_keys
from process.api_keys import TenantLimits
from process.rpc_errors import PermissionDenied, Unauthenticated
from process.secret_files import WatchedFile
from protos import inference_pb2
from services.router import identity

LEAST_PRIORITY, MOST_PRIORITY = -(2**31), 2**31 - 1
"""Priorities of a caller without a key's bounds: the whole range of int32."""


@dataclass(frozen=True)
class Caller:
    """What authentication found out about the client behind a request. A value."""

    tenant: str = ""
    """Tenant of the client's API key; empty: keys are not required, and the request names its
    tenant.
    """

    key_id: str = ""
    """Id of the API key, which is no secret; empty: keys are not required."""

    is_admin: bool = False
    """Whether the caller may see the whole cluster."""

    min_priority: int = LEAST_PRIORITY
    """Lowest priority that its requests may have."""

    max_priority: int = MOST_PRIORITY
    """Highest priority that its requests may have."""

    def check_admin(self) -> None:
        """Check for an admin. Raises: PermissionDenied unless the caller is one."""
        if not self.is_admin:
            raise PermissionDenied(
                "this needs an admin's API key; `baton api-key add --admin` makes one"
            )

    def check_priority(self, request: inference_pb2.GenerateRequest) -> None:
        """Check the priority. Raises: PermissionDenied when the caller's key does not allow it."""
        if not self.min_priority <= request.priority <= self.max_priority:
            raise PermissionDenied(
                f"priority: is {request.priority}, your API key allows {self.min_priority} to "
                f"{self.max_priority}"
            )

    def tenant_of(self, request: inference_pb2.GenerateRequest) -> str:
        """Return the tenant that `request` is served for.

        Raises: PermissionDenied when the request names a tenant other than the caller's.
        """
        if not self.tenant:
            return request.tenant or identity.DEFAULT_TENANT
        if request.tenant not in ("", self.tenant):
            raise PermissionDenied("tenant: is not the tenant of your API key; leave it out")
        return self.tenant


ANYBODY = Caller(is_admin=True)
"""Caller of every request where API keys are not required."""


_NO_DIGEST = "0" * 64
_HELP = "send `Authorization: Bearer <key>`; `baton api-key add` makes one"


class ApiKeys:
    """API keys of a running router, from a watched file."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Args: clock: returns unix seconds. Raises: SettingsError when the file cannot be used."""
        self._file = WatchedFile("api_keys_file", [path], lambda: api_keys.load(path))
        self._clock = clock

    @property
    def tenants(self) -> Mapping[str, TenantLimits]:
        """Limits of the tenants that have their own, by tenant."""
        return self._file.get().tenants

    def caller_of(self, authorization: str) -> Caller:
        """Return the caller with this authorization header.

        Raises: Unauthenticated when the key is missing, malformed, unknown, wrong or expired; the
            message never contains the key.
        """
        scheme, _, key = authorization.strip().partition(" ")
        if not authorization:
            raise Unauthenticated(f"authorization: an API key is needed; {_HELP}")
        prefix, _, rest = key.strip().partition("-")
        key_id, _, secret = rest.partition("-")
        if scheme.lower() != "bearer" or prefix != api_keys.PREFIX:
            raise Unauthenticated(f"authorization: is no API key of this kind; {_HELP}")
        found = self._file.get().keys.get(key_id)
        digest = found.digest if found is not None else _NO_DIGEST
        is_right = hmac.compare_digest(api_keys.digest_of(secret), digest)
        if found is None or not is_right:
            raise Unauthenticated("authorization: this API key is not valid (any more)")
        expires_s = found.expires_unix_s()
        if expires_s is not None and self._clock() >= expires_s:
            raise Unauthenticated(f"authorization: API key {key_id} expired at {found.expires}")
        return Caller(
            found.tenant,
            key_id=key_id,
            is_admin=found.is_admin,
            min_priority=found.min_priority,
            max_priority=found.max_priority,
        )
