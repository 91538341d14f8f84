"""Settings: what must be there, what is out of range, one line each."""

from __future__ import annotations

import pytest

from engine import admission
from process import settings
from process.settings import SettingsError
from services.router.config import MAX_SAMPLES, RouterSettings


def test_the_bound_of_samples_is_the_engines() -> None:
    assert MAX_SAMPLES == admission.MAX_SAMPLES


def test_defaults_with_a_model() -> None:
    loaded = settings.load(RouterSettings, overrides=["model=baton-5m", "times.drain_s=1"])
    assert loaded.listen.startswith("127.0.0.1:") and loaded.times.drain_s == 1.0


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("model=", "model: needed"),
        ("redis_url=", "redis_url: needed"),
        ("listen=nowhere", "host:port"),
        ("listen=127.0.0.1:99999", "host:port"),
        ("limits.max_request_bytes=0", "max_request_bytes: must be above 0"),
        ("limits.hard_request_bytes=1", "hard_request_bytes"),
        ("limits.max_samples=129", "max_samples: at most 128"),
        ("times.poll_interval_s=-1", "poll_interval_s"),
        ("times.poll_interval_s=nan", "poll_interval_s"),
        ("costs.link_bytes_per_s=0", "link_bytes_per_s"),
        ("tenant_secret=" + "x" * 65, "tenant_secret"),
        ('tenant_scopes=["alone"]', "'alone' is not tenant=scope"),
        ('tenant_scopes=["a="]', "'a=' is not tenant=scope"),
        ('tenant_scopes=["=team"]', "is not tenant=scope"),
        ('tenant_scopes=["a=team","a=other"]', "tenant 'a' is in two scopes"),
        ("pol_interval=1", "unknown key"),
    ],
)
def test_what_is_wrong_is_named(override: str, word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        settings.load(RouterSettings, overrides=["model=m", override])


def test_scopes_from_the_command_line() -> None:
    loaded = settings.load(RouterSettings, overrides=["model=m", 'tenant_scopes=["a=s","b=s"]'])
    assert loaded.tenant_scopes == ("a=s", "b=s")


def test_a_secret_is_not_logged() -> None:
    loaded = settings.load(RouterSettings, overrides=["model=m", "tenant_secret=hush"])
    assert "hush" not in settings.to_json(loaded)
