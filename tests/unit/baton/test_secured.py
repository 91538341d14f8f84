"""What protects a local cluster, as command lines: files that hold secrets, never a secret."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from baton import ClusterConfig
from baton.cluster import command_lines as cluster_plan
from baton.cluster.command_lines import OPEN, Secured, take_password
from baton.development_certificates import CertSet
from process import settings
from process.authorization import PeerRole
from services.router.config import RouterSettings


@pytest.mark.parametrize(
    ("url", "bare", "user", "password"),
    [
        ("redis://:pa%3Ass@h:1/0", "redis://h:1/0", "", "pa:ss"),
        ("rediss://me:secret@h:1/2?x=1", "rediss://h:1/2?x=1", "me", "secret"),
    ],
)
def test_a_password_goes_into_a_file_of_ours_alone(
    tmp_path: Path, url: str, bare: str, user: str, password: str
) -> None:
    file = tmp_path / "password"
    assert take_password(url, file) == (bare, user)
    assert file.read_text() == password
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("url", ["redis://h:1/0", "unix:///tmp/x.sock", "rediss://me@h:1/0"])
def test_an_url_without_a_password_stays_as_it_is(tmp_path: Path, url: str) -> None:
    assert take_password(url, tmp_path / "password") == (url, "")
    assert not (tmp_path / "password").exists()


def test_nothing_is_set_where_nothing_is_asked() -> None:
    assert all(OPEN.settings_of(role) == {} for role in PeerRole)


def test_each_part_is_told_its_own_files(tmp_path: Path) -> None:
    secured = Secured(CertSet(tmp_path), "/keys.toml", "me", "/password")
    config = ClusterConfig(tls=True, api_keys=True)
    parts = cluster_plan.WorkerSpec("rediss://h:1/0", ("unix:/s",), "/k", tmp_path, secured)
    for spec in cluster_plan.workers(config, parts):
        line = " ".join(spec.argv)
        assert f'tls.cert_file="{tmp_path}/{spec.kind}.crt"' in line
        assert f'tls.key_file="{tmp_path}/{spec.kind}.key"' in line
        assert 'redis.password_file="/password"' in line and 'redis.user="me"' in line
        assert "api_keys_file" not in line and "client_tls" not in line
    router = cluster_plan.router(
        config, redis_url="rediss://h:1/0", listen="127.0.0.1:0", secured=secured
    )
    overrides = [part for part in router.argv if "=" in part]
    made = settings.load(RouterSettings, overrides=overrides)
    assert made.tls.cert_file == made.client_tls.cert_file == f"{tmp_path}/router.crt"
    assert made.tls.ca_file and not made.client_tls.ca_file
    assert made.api_keys_file == "/keys.toml" and made.redis.password_file == "/password"
