"""The file of API keys: strict, without secrets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from process import api_keys
from process.settings import SettingsError

DIGEST = "ab" * 32
ONE = f'[keys.0123456789ab]\ntenant = "acme"\ndigest = "{DIGEST}"\n'


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_keys_and_tenants_are_read(tmp_path: Path) -> None:
    text = ONE + "is_admin = true\nmax_priority = 5\n[tenants.acme]\nweight = 2\n"
    found = api_keys.load(write(tmp_path, text, 0o644))
    (key,) = found.keys.values()
    assert (key.tenant, key.is_admin, key.min_priority, key.max_priority) == ("acme", True, -100, 5)
    assert found.tenants["acme"].weight == 2.0
    assert DIGEST not in repr(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "cannot be read as TOML"),
        ("[key.0123456789ab]", "unknown table 'key'"),
        ("[keys]\na = 1", "keys.a: is no table"),
        ("keys = 3", "keys: is no table"),
        (ONE.replace("0123456789ab", "short"), "key id 'short'"),
        (ONE.replace("acme", "a b"), "tenant: 'a b' is no tenant's name"),
        (ONE.replace(DIGEST, "ab"), "digest: is not 64 hex digits"),
        ("[keys.0123456789ab]\ntenant='a'", "digest"),
        (ONE + "admin = true\n", "unknown key 'admin', nearest is 'is_admin'"),
        (ONE + "min_priority = 1\n", "min_priority: is above max_priority"),
        (ONE + "expires = 'soon'\n", "expires: 'soon' is no date"),
        ("[tenants.a]\nweight = 0", "weight: must be"),
        ("[tenants.a]\nmax_tokens_per_min = -1", "max_tokens_per_min: must be at least 0"),
        ("[tenants.'a b']\nweight = 1", "'a b' is no tenant's name"),
    ],
)
def test_what_is_wrong_is_named_and_no_digest_shown(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(SettingsError) as raised:
        api_keys.load(path)
    assert said in str(raised.value) and str(path) in str(raised.value)
    assert DIGEST not in str(raised.value)


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(SettingsError, match="chmod go-w"):
        api_keys.load(write(tmp_path, ONE, mode))


def test_a_file_that_is_not_there_or_too_long(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="`baton api-key add --file"):
        api_keys.load(tmp_path / "absent")
    path = write(tmp_path, ONE)
    os.truncate(path, api_keys.MAX_FILE_BYTES + 1)
    with pytest.raises(SettingsError, match=f"is longer than {api_keys.MAX_FILE_BYTES} bytes"):
        api_keys.load(path)


def test_keys_are_random_and_their_digests_tell_nothing() -> None:
    made = [api_keys.new_key("acme") for _ in range(20)]
    assert len({key for key, _, _ in made}) == len({key_id for _, key_id, _ in made}) == 20
    for key, key_id, entry in made:
        secret = key.removeprefix(f"baton-{key_id}-")
        assert len(secret) == 43 and entry.digest == api_keys.digest_of(secret)
        assert secret not in repr(entry) and secret[:8] not in entry.digest
