"""Settings of a worker: what is out of range, one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from process import settings
from process.settings import SettingsError
from services.worker.config import WorkerSettings, adapter_folders


def test_adapters_are_names_and_folders() -> None:
    loaded = settings.load(
        WorkerSettings, overrides=['adapters=["a=/x/y", "b=rel=ative"]', "metrics_listen=h:0"]
    )
    assert adapter_folders(loaded) == [("a", Path("/x/y")), ("b", Path("rel=ative"))]


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ('adapters=["a"]', "name=folder"),
        ('adapters=["=x"]', "name=folder"),
        ('adapters=["a=x", "a=y"]', "a name twice"),
        ("metrics_listen=nowhere", "metrics_listen"),
        ("listen=nowhere", "host:port"),
        ("transport=pigeon", "none of shm, nixl, grpc"),
        ("remote_transport=shm", "remote_transport: 'shm' is none of nixl, grpc and ''"),
        ("direct_transport=shm", "direct_transport: 'shm' is none of cuda_ipc, nixl, grpc and"),
        ("link_floor_bytes_per_s=-1", "link_floor_bytes_per_s: must be at least 0"),
        ("limits.replicate_after_hits=-1", "limits.replicate_after_hits: must be at least 0"),
        ("limits.max_remote_stores=0", "limits.max_remote_stores: must be at least 1"),
        ("store_address=h:1", "handle_keys_file: is needed.*`baton keys new FILE`"),
        ("limits.max_waiting_requests=0", "at least 1"),
        ("limits.drain_s=-1", "limits.drain_s: must be at least 0"),
        (
            "listen=0.0.0.0:1",
            r"listen: 0\.0\.0\.0:1 is reached from other machines.*tls\.cert_file",
        ),
        ("tls.cert_file=x", "goes with key_file"),
        ("tls.ca_file=x", r"tls\.ca_file: goes with cert_file"),
        ("redis.ca_file=x", "rediss://"),
    ],
)
def test_what_is_wrong_is_named(override: str, word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        settings.load(WorkerSettings, overrides=[override])


def test_an_adapter_has_another_name_than_the_model() -> None:
    overrides = ["engine.model=baton-5m", 'adapters=["baton-5m=x"]']
    with pytest.raises(SettingsError, match="adapters: 'baton-5m' is the served model's name"):
        settings.load(WorkerSettings, overrides=overrides)


def test_a_way_to_other_workers_needs_ways_to_other_nodes() -> None:
    overrides = ["direct_transport=cuda_ipc", 'remote_transport=""']
    with pytest.raises(SettingsError, match="direct_transport: needs remote_transport"):
        settings.load(WorkerSettings, overrides=overrides)


def test_handles_are_always_signed_where_there_are_any() -> None:
    overrides = ["store_address=h:1", "handle_keys_file=/x/keys", 'remote_transport=""']
    loaded = settings.load(WorkerSettings, overrides=overrides)
    assert (loaded.handle_keys_file, loaded.remote_transport) == ("/x/keys", "")
    assert settings.load(WorkerSettings).handle_keys_file == ""  # nor is there a store
