"""Who may call what: a role in the certificate, method by method; what is not named is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from process import authorization
from process.authorization import RULES, WORKERS, PeerRole
from protos import (
    autoscaler_pb2,
    decode_pb2,
    draft_pb2,
    inference_pb2,
    kvstore_pb2,
    prefill_pb2,
    worker_control_pb2,
)

SERVED = {
    PeerRole.ROUTER: [inference_pb2],
    PeerRole.PREFILL: [prefill_pb2, kvstore_pb2, worker_control_pb2],
    PeerRole.DECODE: [decode_pb2, worker_control_pb2],
    PeerRole.KVSTORE: [kvstore_pb2],
    PeerRole.DRAFT: [draft_pb2],
    PeerRole.AUTOSCALER: [autoscaler_pb2],
}


def methods(role: PeerRole) -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for module in SERVED[role]
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


@pytest.mark.parametrize("role", SERVED)
def test_every_method_is_decided_about_and_no_other(role: PeerRole) -> None:
    ours = {method for method in RULES[role] if method.startswith("/baton.")}
    assert ours == methods(role)


@pytest.mark.parametrize("role", SERVED)
def test_no_method_of_ours_is_open_to_every_role(role: PeerRole) -> None:
    for method in methods(role):
        assert RULES[role][method] < frozenset(PeerRole), method


@pytest.mark.parametrize(
    ("uris", "roles"),
    [
        (["baton://role/router"], {PeerRole.ROUTER}),
        (["spiffe://elsewhere/x", "baton://role/kvstore"], {PeerRole.KVSTORE}),
        (["baton://role/decode", "baton://role/prefill"], {PeerRole.PREFILL, PeerRole.DECODE}),
        ([], set()),
        (["baton://role/"], set()),
        (["baton://role/king"], set()),
        (["baton://role/router/"], set()),
        (["BATON://role/router"], set()),
        # Whoever signs these into one certificate has made a mistake: none counts.
        (["baton://role/router", "baton://role/admin"], set()),
        (["baton://role/router", "baton://role/nobody"], set()),
        (["baton://role/router", "baton://role/router"], set()),
        (["baton://role/prefill", "baton://role/decode", "baton://role/admin"], set()),
        (["baton://role/prefill", "baton://role/decode", "baton://role/king"], set()),
        (["baton://role/prefill", "baton://role/decode", "baton://role/decode"], set()),
    ],
)
def test_the_roles_of_a_certificate(uris: list[str], roles: set[PeerRole]) -> None:
    assert authorization.roles_of(uris) == roles


def test_no_pair_but_that_of_a_worker_goes_into_one_certificate() -> None:
    for num in range(2, len(PeerRole) + 1):
        for together in itertools.combinations(PeerRole, num):
            expected = WORKERS if set(together) == WORKERS else frozenset()
            assert authorization.roles_of(role.uri for role in together) == expected, together


ROLES = st.lists(st.sampled_from(PeerRole), max_size=4)
METHODS = sorted({method for rules in RULES.values() for method in rules})


@given(named=ROLES, server=st.sampled_from(sorted(RULES, key=str)), method=st.sampled_from(METHODS))
def test_several_roles_gain_nothing_beyond_what_each_may(
    named: list[PeerRole], server: PeerRole, method: str
) -> None:
    """Nor do they lose it, where they may be together at all."""
    roles = authorization.roles_of(role.uri for role in named)
    assert roles <= set(named)
    may = authorization.refusal(RULES[server], method, roles) == ""
    each = [authorization.refusal(RULES[server], method, frozenset({role})) == "" for role in roles]
    assert may == any(each)


def test_the_tables_of_a_worker_s_roles_agree_where_they_meet() -> None:
    """Who takes the other role adds its table to the one that it has."""
    one, two = (RULES[role] for role in sorted(WORKERS, key=str))
    shared = one.keys() & two.keys()
    assert shared and all(one[method] == two[method] for method in shared)


def test_refusals_say_what_and_whom() -> None:
    rules = RULES[PeerRole.DECODE]

    def refused(method: str, *roles: PeerRole) -> str:
        return authorization.refusal(rules, f"/baton.v1.Decode/{method}", frozenset(roles))

    assert refused("Stream", PeerRole.ROUTER) == ""
    assert refused("Stream", PeerRole.CLIENT).endswith("/Stream: not for a peer of role client")
    assert refused("Stream", *WORKERS).endswith("not for a peer of role prefill and decode")
    assert refused("NotThere", PeerRole.ADMIN)
    assert "no role" in refused("Stream")
