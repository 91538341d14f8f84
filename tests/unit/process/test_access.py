"""Who may call what: a role in the certificate, method by method; what is not named is refused."""

from __future__ import annotations

import pytest

from process import access
from process.access import RULES, Role
from protos import (
    autoscaler_pb2,
    decode_pb2,
    inference_pb2,
    kvstore_pb2,
    prefill_pb2,
    worker_control_pb2,
)

SERVED = {
    Role.ROUTER: [inference_pb2],
    Role.PREFILL: [prefill_pb2, kvstore_pb2, worker_control_pb2],
    Role.DECODE: [decode_pb2, worker_control_pb2],
    Role.KVSTORE: [kvstore_pb2],
    Role.AUTOSCALER: [autoscaler_pb2],
}


def methods(role: Role) -> set[str]:
    return {
        f"/{service.full_name}/{method.name}"
        for module in SERVED[role]
        for service in module.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


@pytest.mark.parametrize("role", SERVED)
def test_every_method_is_decided_about_and_no_other(role: Role) -> None:
    ours = {method for method in RULES[role] if method.startswith("/baton.")}
    assert ours == methods(role)


@pytest.mark.parametrize("role", SERVED)
def test_no_method_of_ours_is_open_to_every_role(role: Role) -> None:
    for method in methods(role):
        assert RULES[role][method] < frozenset(Role), method


@pytest.mark.parametrize(
    ("uris", "role"),
    [
        (["baton://role/router"], Role.ROUTER),
        (["spiffe://elsewhere/x", "baton://role/kvstore"], Role.KVSTORE),
        ([], None),
        (["baton://role/"], None),
        (["baton://role/king"], None),
        (["baton://role/router/"], None),
        (["BATON://role/router"], None),
        # Whoever signs two roles into one certificate has made a mistake: neither counts.
        (["baton://role/router", "baton://role/admin"], None),
        (["baton://role/router", "baton://role/nobody"], None),
    ],
)
def test_the_role_of_a_certificate(uris: list[str], role: Role | None) -> None:
    assert access.role_of(uris) is role


def test_refusals_say_what_and_whom() -> None:
    rules = RULES[Role.DECODE]
    assert access.refusal(rules, "/baton.v1.Decode/Stream", Role.ROUTER) == ""
    refused = access.refusal(rules, "/baton.v1.Decode/Stream", Role.CLIENT)
    assert refused == "/baton.v1.Decode/Stream: not for a peer of role client"
    assert access.refusal(rules, "/baton.v1.Decode/NotThere", Role.ADMIN)
    assert "no role" in access.refusal(rules, "/baton.v1.Decode/Stream", None)
