"""Who asks: what authentication found out about the client behind a request.

The edge (gRPC, HTTP) makes one for each request and hands it to the front desk. Knows no keys and
no headers. A value.

API keys: who a client is by the key that it sends.

The file is `process.api_keys`'. An unknown id is compared, too: the time of an answer tells no ids.
The file is read again when it changes; a key that was taken out of it is refused from the next
request on. One asyncio loop.
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
"""Of a caller whom no key binds: all that the wire can say."""


@dataclass(frozen=True)
class Caller:
    """See the module."""

    tenant: str = ""
    """Tenant that the client proved to be of; empty: nobody is asked to prove it, and the request
    names its own.
    """

    key_id: str = ""
    """Which API key it sent; no secret. Empty: keys are not asked for."""

    is_admin: bool = False
    """Whether it may see the whole cluster."""

    min_priority: int = LEAST_PRIORITY
    """Least priority of its requests."""

    max_priority: int = MOST_PRIORITY
    """Most priority of its requests."""

    def check_admin(self) -> None:
        """Raises: PermissionDenied unless this caller may see the whole cluster."""
        if not self.is_admin:
            raise PermissionDenied(
                "this needs an admin's API key; `baton api-key add --admin` makes one"
            )

    def check_priority(self, request: inference_pb2.GenerateRequest) -> None:
        """Raises: PermissionDenied for a priority that the caller's key does not allow."""
        if not self.min_priority <= request.priority <= self.max_priority:
            raise PermissionDenied(
                f"priority: is {request.priority}, your API key allows {self.min_priority} to "
                f"{self.max_priority}"
            )

    def tenant_of(self, request: inference_pb2.GenerateRequest) -> str:
        """The tenant that `request` is served for.

        Raises: PermissionDenied when the request names another than the caller's.
        """
        if not self.tenant:
            return request.tenant or identity.DEFAULT_TENANT
        if request.tenant not in ("", self.tenant):
            raise PermissionDenied("tenant: is not the tenant of your API key; leave it out")
        return self.tenant


ANYBODY = Caller(is_admin=True)
"""A client that proved nothing, where nothing is asked for."""


_NO_DIGEST = "0" * 64
_HELP = "send `Authorization: Bearer <key>`; `baton api-key add` makes one"


class ApiKeys:
    """The keys of a running router."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """`clock`: unix seconds. Raises: SettingsError when the file cannot be used."""
        self._file = WatchedFile("api_keys_file", [path], lambda: api_keys.load(path))
        self._clock = clock

    @property
    def tenants(self) -> Mapping[str, TenantLimits]:
        """Limits of the tenants that have their own."""
        return self._file.get().tenants

    def caller_of(self, authorization: str) -> Caller:
        """Who sends this header.

        Raises: Unauthenticated; the key is never part of the message.
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
