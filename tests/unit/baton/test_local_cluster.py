"""What a local cluster takes of the machine, and what it says where it cannot have it."""

from __future__ import annotations

import os
import tempfile
import types
from pathlib import Path

import pytest

from baton import ClusterConfig, LocalCluster
from baton.cluster import local_cluster
from baton.errors import ClusterError

MIB = 1024 * 1024


def _room(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    found = types.SimpleNamespace(f_bavail=num_bytes // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: found)


def test_too_little_shared_memory_is_refused_unless_the_user_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for num_stores in (1, 2):
        _room(monkeypatch, 32 * num_stores * MIB)
        config = ClusterConfig(num_stores=num_stores)
        local_cluster._check_store_room(config, Path("/m/x"))
        _room(monkeypatch, 32 * num_stores * MIB - 1)
        with pytest.raises(ClusterError, match=r"/m has \d+ bytes free.*--shm-size") as caught:
            local_cluster._check_store_room(config, Path("/m/x"))
        assert f"{num_stores} KV store(s) need {32 * num_stores * MIB}" in str(caught.value)
        assert "\n" not in str(caught.value)
        for override in ("store.capacity_bytes=4096", "store.slab_dir=/elsewhere"):
            chosen = ClusterConfig(num_stores=num_stores, overrides=(override,))
            local_cluster._check_store_room(chosen, Path("/m/x"))


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
        (
            "decode.engine.speculation.draft_share_bytes=0",
            "decode: settings: engine: speculation: 'draft_share_bytes' was removed",
        ),
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

    monkeypatch.setattr(local_cluster, "find_redis_server", no_redis)
    with pytest.raises(ClusterError, match="/x/redis-server") as caught:
        LocalCluster(ClusterConfig(port=0)).start()
    assert "--log-dir" not in str(caught.value)
