"""Whose KV may meet: each tenant's its own, unless the operator opens a named scope.

The tenants of a scope hash their prompts with one salt, so what one of them leaves in a store is
found by the others. A scope's salt is derived apart from every tenant's: no tenant gets into a
scope by its name. Values; pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from process.api_keys import TENANT
from process.settings import SettingsError
from services.router import identity

# As validation allows tenants, but without the "=" that ends the tenant's name.
_SCOPE = re.compile(r"[A-Za-z0-9._:@/+-]{1,64}")


def parse_scopes(entries: Sequence[str]) -> Mapping[str, str]:
    """Scope by tenant, from entries "tenant=scope".

    Raises: SettingsError naming the entry that is not so, or the tenant that is in two scopes.
    """
    scopes: dict[str, str] = {}
    for entry in entries:
        tenant, _, scope = entry.rpartition("=")
        if not (TENANT.fullmatch(tenant) and _SCOPE.fullmatch(scope)):
            raise SettingsError(
                f"tenant_scopes: {entry!r} is not tenant=scope; both are 1 to 64 letters, digits "
                "and any of . _ : @ / + -"
            )
        if scopes.setdefault(tenant, scope) != scope:
            raise SettingsError(f"tenant_scopes: tenant {tenant!r} is in two scopes; leave one")
    return scopes


class TenantSalts:
    """The salt of each tenant's chain hashes."""

    def __init__(self, secret: str, scopes: Mapping[str, str]) -> None:
        """`scopes`: by tenant; who is not in it shares with nobody."""
        self._secret = secret
        self._scopes = dict(scopes)

    def of(self, tenant: str) -> bytes:
        """32 bytes; equal for two tenants only if they are in one scope."""
        scope = self._scopes.get(tenant)
        if scope is None:
            return identity.tenant_salt(tenant, self._secret)
        return identity.scope_salt(scope, self._secret)
