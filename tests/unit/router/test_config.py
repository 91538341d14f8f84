"""Settings: what must be there, what is out of range, one line each."""

from __future__ import annotations

import pytest

from engine import input_processor
from process import settings
from process.settings import SettingsError
from services.router.config import MAX_SAMPLES, RouterSettings


def test_the_bound_of_samples_is_the_engines() -> None:
    assert MAX_SAMPLES == input_processor.MAX_SAMPLES


def test_defaults_with_a_model() -> None:
    loaded = settings.load(RouterSettings, overrides=["model=baton-5m", "times.drain_s=1"])
    assert loaded.listen.startswith("127.0.0.1:") and loaded.times.drain_s == 1.0


def test_a_full_admission_queue_can_still_be_asked_who_gives_way() -> None:
    loaded = settings.load(RouterSettings, overrides=["model=baton-5m"])
    admitted = loaded.admission.max_active_requests + loaded.admission.max_queued_requests
    assert loaded.limits.max_requests_in_flight > admitted


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("model=", "model: needed"),
        ("redis_url=", "redis_url: needed"),
        ("listen=nowhere", "host:port"),
        ("listen=127.0.0.1:99999", "host:port"),
        ("limits.max_request_bytes=0", "limits.max_request_bytes: must be at least 1"),
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
        ("routing_policy=random", "routing_policy: expected one of joint, prefix_aware"),
        ("short_prefill_tokens=-1", "short_prefill_tokens: must be at least 0"),
        ('models=["b","m"]', "models: 'm' is named twice"),
        ("limits.num_decisions_kept=0", "limits.num_decisions_kept: must be at least 1"),
        ("client_tls.ca_file=/ca", "client_tls.ca_file: needs client_tls.cert_file"),
        ("times.max_suspect_s=0.1", "max_suspect_s: must not be below suspect_s"),
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


OUTSIDE = "0.0.0.0:1"
TLS = ("client_tls.cert_file=/c", "client_tls.key_file=/k")


@pytest.mark.parametrize("port", ["listen", "http_listen"])
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), "in the clear and by anybody; set client_tls.cert_file"),
        (("api_keys_file=/f",), "in the clear and by anybody; set client_tls.cert_file"),
        (TLS, "by anybody; set api_keys_file, or allow_anonymous=true"),
        (("client_tls.allow_plaintext=true",), "by anybody; set api_keys_file"),
        ((*TLS, "api_keys_file=/f"), ""),
        ((*TLS, "allow_anonymous=true"), ""),
        (("client_tls.allow_plaintext=true", "api_keys_file=/f"), ""),
    ],
)
def test_who_listens_to_the_network_says_what_protects_it(
    port: str, overrides: tuple[str, ...], said: str
) -> None:
    whole = ["model=m", f"{port}={OUTSIDE}", *overrides]
    if not said:
        assert settings.load(RouterSettings, overrides=whole)
        return
    with pytest.raises(settings.SettingsError, match=f"{port}: .*{said}"):
        settings.load(RouterSettings, overrides=whole)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (('cors_origins=["https://a.example", "http://localhost:3000"]',), ""),
        (('cors_origins=["*"]', "api_keys_file=/f"), ""),
        (('cors_origins=["*"]',), "set api_keys_file"),
        (('cors_origins=["https://a.example/"]',), "is no origin"),
        (('cors_origins=["a.example"]',), "is no origin"),
    ],
)
def test_origins_of_pages_are_origins(overrides: tuple[str, ...], said: str) -> None:
    if not said:
        assert settings.load(RouterSettings, overrides=["model=m", *overrides]).cors_origins
        return
    with pytest.raises(settings.SettingsError, match=f"cors_origins: .*{said}"):
        settings.load(RouterSettings, overrides=["model=m", *overrides])


def test_loopback_needs_nothing() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        assert settings.load(RouterSettings, overrides=["model=m", f"listen={host}:1"])


def test_a_certificate_for_peers_is_whole_or_not_there() -> None:
    with pytest.raises(settings.SettingsError, match=r"tls\.ca_file: goes with"):
        settings.load(RouterSettings, overrides=["model=m", "tls.cert_file=/c", "tls.key_file=/k"])
