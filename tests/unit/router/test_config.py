"""Settings: what must be there, what is out of range, one line each."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from engine import input_processor
from process import settings
from process.settings import SettingsError
from services.router.config import MAX_SAMPLES, RouterSettings


def test_the_bound_of_samples_is_the_engines() -> None:
    assert MAX_SAMPLES == input_processor.MAX_SAMPLES


def load(*overrides: str) -> RouterSettings:
    return settings.load(RouterSettings, overrides=["model=m", *overrides])


def test_defaults_with_a_model() -> None:
    loaded = load("times.drain_s=1", 'tenant_scopes=["a=s","b=s"]', "tenant_secret=hush")
    assert loaded.listen.startswith("127.0.0.1:") and loaded.times.drain_s == 1.0
    assert loaded.tenant_scopes == ("a=s", "b=s")
    assert "hush" not in settings.to_json(loaded)  # nor in a log
    # A full admission queue can still be asked which request gives way.
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
        ('tls={cert_file="/c", key_file="/k"}', r"tls\.ca_file: goes with"),
        ("times.max_suspect_s=0.1", "max_suspect_s: must not be below suspect_s"),
        ("admission.max_active_requests=0", "max_active_requests: must be at least 1"),
        ("admission.max_queued_requests=0", "max_queued_requests: must be at least 1"),
        ("admission.num_steps_ahead=0", "num_steps_ahead: must be at least 1"),
        ("admission.max_tokens_per_min=-1", "max_tokens_per_min: must be at least 0"),
        ("admission.rate_timeout_s=0", "rate_timeout_s"),
    ],
)
def test_what_is_wrong_is_named(override: str, word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        load(override)


CERTIFIED = ("client_tls.cert_file=/c", "client_tls.key_file=/k")
IN_THE_CLEAR = "in the clear and by anybody; set client_tls.cert_file"


@pytest.mark.parametrize("port", ["listen", "http_listen"])
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ((), IN_THE_CLEAR),
        (("api_keys_file=/f",), IN_THE_CLEAR),
        (CERTIFIED, "by anybody; set api_keys_file, or allow_anonymous=true"),
        (("client_tls.allow_plaintext=true",), "by anybody; set api_keys_file"),
        ((*CERTIFIED, "api_keys_file=/f"), ""),
        ((*CERTIFIED, "allow_anonymous=true"), ""),
        (("client_tls.allow_plaintext=true", "api_keys_file=/f"), ""),
    ],
)
def test_a_port_that_the_network_reaches_needs_protection(
    port: str, overrides: tuple[str, ...], said: str
) -> None:
    with pytest.raises(SettingsError, match=f"{port}: .*{said}") if said else nullcontext():
        load(f"{port}=0.0.0.0:1", *overrides)


def test_loopback_needs_nothing() -> None:
    for host in ("127.0.0.1", "localhost", "[::1]"):
        load(f"listen={host}:1")


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
    with pytest.raises(SettingsError, match=f"cors_origins: .*{said}") if said else nullcontext():
        load(*overrides)
