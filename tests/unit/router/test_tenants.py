"""Who shares cached prefixes: the tenants of one scope, and nobody else."""

from __future__ import annotations

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import block_hash
from process.settings import SettingsError
from services.router.config import TenantSalts, parse_scopes

NAMES = st.text(string.ascii_letters + string.digits + "._:@/+-", min_size=1, max_size=64)
SECRETS = st.text(max_size=16)


@given(tenants=st.lists(NAMES, unique=True, min_size=2, max_size=8), secret=SECRETS)
def test_by_default_no_two_tenants_share(tenants: list[str], secret: str) -> None:
    salts = TenantSalts(secret, {})
    assert len({salts.of(tenant) for tenant in tenants}) == len(tenants)


@given(
    scopes=st.dictionaries(NAMES, NAMES, max_size=8),
    others=st.lists(NAMES, unique=True, max_size=8),
    secret=SECRETS,
)
def test_equal_salts_mean_one_scope(scopes: dict[str, str], others: list[str], secret: str) -> None:
    """Also when a tenant is called like a scope: its salt is never the scope's."""
    parsed = parse_scopes([f"{tenant}={scope}" for tenant, scope in scopes.items()])
    assert parsed == scopes
    salts = TenantSalts(secret, parsed)
    tenants = {*scopes, *scopes.values(), *others}
    for one in tenants:
        for other in tenants - {one}:
            is_one_scope = one in scopes and scopes[one] == scopes.get(other)
            assert (salts.of(one) == salts.of(other)) == is_one_scope


@given(scope=NAMES, secret=SECRETS)
def test_the_chains_of_a_scope_meet_and_no_others(scope: str, secret: str) -> None:
    """What counts in the end: the names of blocks."""
    salts = TenantSalts(secret, {"a": scope, "b": scope})
    chains = {
        tenant: tuple(block_hash.chain(block_hash.root_key(salts.of(tenant), "ab"), range(40), 16))
        for tenant in ("a", "b", "c", scope)
        if tenant in ("a", "b", "c") or scope not in ("a", "b", "c")
    }
    assert chains["a"] == chains["b"]
    for tenant in chains.keys() - {"a", "b"}:
        assert not set(chains[tenant]) & set(chains["a"])


def test_a_tenant_s_name_may_hold_what_ends_it() -> None:
    """Base64 does; the last one counts."""
    assert parse_scopes(["dGVhbQ===team"]) == {"dGVhbQ==": "team"}
    assert parse_scopes(["a=s", "a=s"]) == {"a": "s"}


@pytest.mark.parametrize("entry", ["", "a", "a=", "=s", "a b=s", "a=s t", "a" * 65 + "=s"])
def test_entries_that_are_not_so_are_named(entry: str) -> None:
    with pytest.raises(SettingsError, match=r"tenant_scopes: '.*' is not tenant=scope"):
        parse_scopes([entry])
