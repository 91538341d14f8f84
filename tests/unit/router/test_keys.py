"""Who sends which API key: known, bounded, or refused with the reason; never with the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from process import api_keys
from process.rpc_errors import PermissionDenied, Unauthenticated
from protos import inference_pb2
from services.router.callers import ANYBODY, ApiKeys


def write(path: Path, *entries: tuple[str, api_keys.ApiKey]) -> None:
    lines = []
    for key_id, entry in entries:
        lines += [f"[keys.{key_id}]", f'tenant = "{entry.tenant}"', f'digest = "{entry.digest}"']
        lines += [f"max_priority = {entry.max_priority}", f'expires = "{entry.expires}"']
        lines += ["is_admin = true"] if entry.is_admin else []
    path.write_text("\n".join(lines) + "\n")


def test_a_key_says_who_asks(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key, key_id, entry = api_keys.new_key("acme", max_priority=3)
    admin, admin_id, admin_entry = api_keys.new_key("ops", is_admin=True)
    write(path, (key_id, entry), (admin_id, admin_entry))
    keys = ApiKeys(path)
    for header in (f"Bearer {key}", f"bearer {key}", f"  BEARER   {key} "):
        caller = keys.caller_of(header)
        assert (caller.tenant, caller.key_id, caller.is_admin) == ("acme", key_id, False)
    keys.caller_of(f"Bearer {admin}").check_admin()
    with pytest.raises(PermissionDenied, match="admin's API key"):
        keys.caller_of(f"Bearer {key}").check_admin()


def test_what_is_no_valid_key_is_refused_without_being_repeated(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key, key_id, entry = api_keys.new_key("acme")
    other, _, _ = api_keys.new_key("acme")
    write(path, (key_id, entry))
    keys = ApiKeys(path)
    secret = key.rpartition(f"{key_id}-")[2]
    wrong = [
        *("", "Bearer", "Bearer ", f"Basic {key}", key, f"Bearer sk-{secret}", f"Bearer {secret}"),
        *(f"Bearer {other}", f"Bearer {key}x", f"Bearer {key[:-1]}", f"Bearer {key.upper()}"),
        *(f"Bearer baton-{key_id}", f"Bearer baton-{key_id}-", f"Bearer baton--{secret}"),
        *(
            f"Bearer baton-{key_id}-{entry.digest}",
            f"Bearer {key} {key}",
            "Bearer \u00fc\U0001f600",
            f"Bearer baton-{key_id}-\udcff\x00",
        ),
    ]
    for header in wrong:
        with pytest.raises(Unauthenticated) as raised:
            keys.caller_of(header)
        assert secret not in str(raised.value) and str(raised.value).startswith("authorization: ")


def test_an_expired_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key, key_id, entry = api_keys.new_key("acme", expires="2030-01-01")
    write(path, (key_id, entry))
    (now_s,) = [entry.expires_unix_s() or 0.0]
    keys = ApiKeys(path, lambda: now_s - 1)
    assert keys.caller_of(f"Bearer {key}").tenant == "acme"
    with pytest.raises(Unauthenticated, match=f"API key {key_id} expired at 2030-01-01"):
        ApiKeys(path, lambda: now_s).caller_of(f"Bearer {key}")


def test_the_tenant_is_the_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    key, key_id, entry = api_keys.new_key("acme", max_priority=3)
    write(path, (key_id, entry))
    caller = ApiKeys(path).caller_of(f"Bearer {key}")
    assert caller.tenant_of(inference_pb2.GenerateRequest()) == "acme"
    assert caller.tenant_of(inference_pb2.GenerateRequest(tenant="acme")) == "acme"
    with pytest.raises(PermissionDenied, match="tenant: is not the tenant of your API key"):
        caller.tenant_of(inference_pb2.GenerateRequest(tenant="beta"))
    caller.check_priority(inference_pb2.GenerateRequest(priority=3))
    for priority in (4, -101):
        with pytest.raises(PermissionDenied, match=f"priority: is {priority}.*-100 to 3"):
            caller.check_priority(inference_pb2.GenerateRequest(priority=priority))


def test_without_keys_requests_name_their_own_tenant() -> None:
    assert ANYBODY.tenant_of(inference_pb2.GenerateRequest()) == "default"
    assert ANYBODY.tenant_of(inference_pb2.GenerateRequest(tenant="beta")) == "beta"
    ANYBODY.check_admin()
    ANYBODY.check_priority(inference_pb2.GenerateRequest(priority=-(2**31)))
