"""Who asks: what authentication found out about the client behind a request.

The edge (gRPC, HTTP) makes one for each request and hands it to the front desk. Knows no keys and
no headers. A value.
"""

from __future__ import annotations

from dataclasses import dataclass

from process.errors import PermissionDenied
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
