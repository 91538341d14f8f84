"""What another user of the machine reaches of a cluster that `baton up` starts: the router's two
client ports, and nothing else. One cluster with every kind of part."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton.local_cluster import ClusterConfig, LocalCluster
from process.access import Role
from tests.wire.test_roles import methods

pytestmark = pytest.mark.e2e

NOBODY = 65534
ROLES = {
    "store": Role.KVSTORE,
    "draft": Role.DRAFT,
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "autoscaler": Role.AUTOSCALER,
}
STRANGER = """
import json, os, socket, sys
import grpc

asked = json.load(sys.stdin)
grpc.insecure_channel("127.0.0.1:1").close()  # imports what another user may not be able to read
os.setgroups([])
os.setgid(asked["uid"])
os.setuid(asked["uid"])
answers = []
for address, path in asked["calls"]:
    with grpc.insecure_channel(address) as channel:
        try:
            channel.stream_stream(path)(iter((b"",)), timeout=asked["timeout_s"]).next()
            code = "OK"
        except StopIteration:
            code = "OK"
        except grpc.RpcError as error:
            code = error.code().name
    answers.append(code)
with socket.socket(socket.AF_UNIX) as redis:
    try:
        redis.connect(asked["redis"])
        answers.append("OK")
    except OSError as error:
        answers.append(type(error).__name__)
print(json.dumps(answers))
"""
"""Begins as root, which can import everything, and becomes another user before its first call. The
messages are empty: any answer but UNAVAILABLE says that the method was reached."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = ClusterConfig(port=0, num_stores=2, num_draft=1, autoscale=True)
    with LocalCluster(config) as running:
        yield running


def test_only_the_clients_ports_are_open_to_the_machine(cluster: LocalCluster) -> None:
    listening = {
        f"{found.laddr.ip.removeprefix('::ffff:')}:{found.laddr.port}"
        for info in cluster.processes.values()
        for found in psutil.Process(info.pid).net_connections(kind="inet")
        if found.status == psutil.CONN_LISTEN
    }
    assert listening == {cluster.address, cluster.http_address}
    sockets = [info.address for info in cluster.processes.values() if info.kind in ROLES]
    sockets += [cluster.redis_url]
    assert len(sockets) == 7
    for address in sockets:
        path = Path(address.removeprefix("unix:").removeprefix("//"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_another_user_can_call_no_part(cluster: LocalCluster) -> None:
    if os.getuid():
        pytest.skip("needs root, to become another user")
    calls = [
        (info.address, path)
        for info in cluster.processes.values()
        if info.kind in ROLES
        for path, _ in methods(ROLES[info.kind])
    ]
    open_to_all = (cluster.address, "/baton.v1.Inference/ListModels")
    asked = {
        "uid": NOBODY,
        "timeout_s": 10.0,
        "redis": cluster.redis_url.removeprefix("unix://"),
        "calls": [open_to_all, *calls],
    }
    told = subprocess.run(
        [sys.executable, "-c", STRANGER],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    client, *others, redis = json.loads(told.stdout)
    assert client == "OK"
    assert len(others) > 60
    assert set(others) == {"UNAVAILABLE"}, dict(zip(calls, others, strict=True))
    assert redis == "PermissionError"
