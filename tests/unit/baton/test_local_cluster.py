"""What a local cluster takes of the machine, and what it says where it cannot have it."""

from __future__ import annotations

import os
import tempfile
import types
from pathlib import Path

import pytest

from baton import local_cluster
from baton.cluster_config import ClusterConfig
from baton.errors import ClusterError
from baton.local_cluster import LocalCluster

MIB = 1024 * 1024


def _room(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    found = types.SimpleNamespace(f_bavail=num_bytes // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: found)


@pytest.mark.parametrize(("free", "expected"), [(64, 32), (32, 16), (4096, 512)])
def test_the_store_gets_half_of_what_is_free_at_most(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    _room(monkeypatch, free * MIB)
    config = ClusterConfig()
    assert local_cluster._store_capacity_bytes(config, Path("/m/x")) == expected * MIB


def test_several_stores_share_what_one_would_get(monkeypatch: pytest.MonkeyPatch) -> None:
    _room(monkeypatch, 64 * MIB)
    config = ClusterConfig(num_stores=2)
    assert local_cluster._store_capacity_bytes(config, Path("/m/x")) == 16 * MIB
    _room(monkeypatch, 63 * MIB)
    with pytest.raises(ClusterError, match=rf"2 KV store\(s\) need {64 * MIB}"):
        local_cluster._store_capacity_bytes(config, Path("/m/x"))


def test_too_little_shared_memory_is_refused_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _room(monkeypatch, 31 * MIB)
    with pytest.raises(ClusterError, match=r"/m has \d+ bytes free.*--shm-size") as caught:
        local_cluster._store_capacity_bytes(ClusterConfig(), Path("/m/x"))
    assert "\n" not in str(caught.value)
    for override in ("store.capacity_bytes=4096", "store.slab_dir=/elsewhere"):
        config = ClusterConfig(overrides=(override,))
        assert local_cluster._store_capacity_bytes(config, Path("/m/x")) == 512 * MIB


def test_no_temporary_folder_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/gone")
    with pytest.raises(ClusterError, match=r"no temporary folder.*gone.*TMPDIR"):
        LocalCluster(ClusterConfig(port=0)).start()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("store.capacity_byte=1", "store: settings: unknown key 'capacity_byte'"),
        ("router.routing_polcy=joint", "router: settings: unknown key 'routing_polcy'"),
        ("worker.engine.kv_dtyp=int8", "prefill: settings: engine: unknown key 'kv_dtyp'"),
        ("decode.limits.drain_s=soon", "decode: settings: limits: drain_s: expected float"),
        ("draft.engine.modl=x", "draft: settings: engine: unknown key 'modl'"),
        ("autoscaler.plan.x=1", "autoscaler: settings: plan: unknown key 'x'"),
        ("router.tenant_secret=abc", "tenant_secret: everybody on this machine"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, override: str, said: str
) -> None:
    def no_process(*arguments: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(local_cluster, "Supervisor", no_process)
    with pytest.raises(ClusterError) as caught:
        LocalCluster(ClusterConfig(port=0, overrides=(override,))).start()
    assert said in str(caught.value) and "--set" in str(caught.value)


def test_log_dir_is_blamed_for_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ClusterError, match=r"^--log-dir /proc/nowhere: "):
        LocalCluster(ClusterConfig(port=0, log_dir="/proc/nowhere")).start()

    def no_redis() -> Path:
        raise PermissionError(13, "Permission denied", "/x/redis-server")

    monkeypatch.setattr(local_cluster.redis_server, "find", no_redis)
    with pytest.raises(ClusterError, match="/x/redis-server") as caught:
        LocalCluster(ClusterConfig(port=0)).start()
    assert "--log-dir" not in str(caught.value)
