"""A cluster with every kind of part, as several nodes on one machine, each with a store of its own:
what one node computed is pulled by the other, the keys that sign what travels between them are
rotated under load, and another user of the machine reaches the router's two client ports alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from baton import ClusterConfig, LocalCluster
from baton.answers import Completion
from baton.client import Client, SyncClient
from process import signing_keys
from process.authorization import PeerRole
from tests.harness.cluster import BLOCK_SIZE, STORE_SIZE, Oracle, assert_idle, leg, prompts
from tests.wire.test_roles import methods

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = ClusterConfig().model
MAX_TOKENS = 12
NOBODY = 65534
ROLES = {
    "store": PeerRole.KVSTORE,
    "draft": PeerRole.DRAFT,
    "prefill": PeerRole.PREFILL,
    "decode": PeerRole.DECODE,
    "autoscaler": PeerRole.AUTOSCALER,
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
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def nodes(log_dir: Path) -> Iterator[LocalCluster]:
    """Two nodes, each with a store and a prefill worker; the first has the decode worker, too."""
    config = ClusterConfig(
        port=0,
        num_prefill=2,
        num_decode=1,
        num_stores=2,
        num_draft=1,
        # It is there, and starts nothing for a worker that a test kills.
        autoscale=True,
        # What is behind the answer is not surely stored yet when a test kills who stores it.
        handover="store",
        overrides=(
            STORE_SIZE,
            # Else decode brings the prompt to its own node, and nobody needs the other's.
            "decode.limits.write_back=false",
            "autoscaler.interval_s=3600.0",
        ),
        log_dir=str(log_dir),
    )
    with LocalCluster(config) as running:
        yield running
        running.wait_ready()
        assert_idle(running)
        key_file = running.handle_keys_file
    assert not key_file.exists()


def answer(cluster: LocalCluster, prompt: list[int]) -> Completion:
    with SyncClient(cluster.address) as client:
        return client.complete(prompt, max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=60)


def home_of(cluster: LocalCluster, worker_id: str) -> str:
    """The node id of a worker's store, as it says itself."""
    with SyncClient(cluster.address) as client:
        status = client.status()
    return next(w.store_node_id for w in status.workers if w.worker_id == worker_id)


def a_prompt(reference: Oracle, seed: int) -> list[int]:
    """Two hundred tokens, so twelve full blocks and a tail; the answer does not end at once, or
    there were no decode leg."""
    for found in prompts(reference, random.Random(seed), 60):
        if len(found) >= 200 and len(reference.greedy(found[:200], 2)) > 1:
            return found[:200]
    raise AssertionError("no prompt of 60 is long enough")


def test_each_node_has_its_store_and_the_router_sees_all(nodes: LocalCluster) -> None:
    assert list(nodes.store_addresses) == ["store-0", "store-1"]
    homes = {name: home_of(nodes, name) for name in ("prefill-0", "prefill-1", "decode-0")}
    assert homes == {"prefill-0": "store-0", "prefill-1": "store-1", "decode-0": "store-0"}
    with SyncClient(nodes.address) as client:
        stores = {store.node_id: store for store in client.status().stores}
    assert {name: store.address for name, store in stores.items()} == nodes.store_addresses
    assert all(store.reachable for store in stores.values())


def test_the_second_nodes_hit_comes_from_the_first_nodes_store(
    nodes: LocalCluster, reference: Oracle, seed: int
) -> None:
    """Who computed the prompt is taken away; the other node's prefill worker computes no full block
    of it again, and decode computes nothing."""
    prompt = a_prompt(reference, seed)
    expected = reference.greedy(prompt, MAX_TOKENS)
    first = answer(nodes, prompt)
    assert list(first.token_ids) == expected
    assert leg(first, "prefill").num_tokens_computed == len(prompt)
    name = leg(first, "prefill").worker_id
    nodes.kill(name, restart=False)
    try:
        second = answer(nodes, prompt)
    finally:
        nodes.restart(name)
        nodes.wait_ready()
    assert list(second.token_ids) == expected
    other = leg(second, "prefill")
    assert other.worker_id != name
    assert {count.node_id for count in other.from_store} == {home_of(nodes, name)}
    assert {count.transport for count in other.from_store} == {"grpc"}
    assert other.transport == "grpc, shm"  # read there, written at home
    assert other.num_tokens_from_store == len(prompt) // BLOCK_SIZE * BLOCK_SIZE
    assert not other.recomputed
    assert leg(second, "decode").num_tokens_computed == 0
    assert not leg(second, "decode").recomputed


async def test_keys_are_rotated_while_requests_run(
    nodes: LocalCluster, reference: Oracle, seed: int
) -> None:
    """No answer changes, and not one block is computed again for its signature."""
    wanted = prompts(reference, random.Random(seed + 1), 24)
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in wanted]
    before = signing_keys.load(nodes.handle_keys_file)
    gate = asyncio.Semaphore(4)
    done: list[int] = []

    async with Client(nodes.address) as client:

        async def one(index: int) -> Completion:
            async with gate:
                completion = await client.complete(
                    list(wanted[index]), max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=60
                )
            done.append(index)
            if len(done) % 8 == 0:
                signing_keys.rotate(nodes.handle_keys_file)
            return completion

        completions = await asyncio.gather(*(one(index) for index in range(len(wanted))))
    assert not set(before) & set(signing_keys.load(nodes.handle_keys_file))
    for completion, tokens in zip(completions, expected, strict=True):
        assert list(completion.token_ids) == tokens
        for part in completion.provenance.legs:
            assert "signature" not in part.recomputed, part


def test_keys_are_for_nobody_else(nodes: LocalCluster, log_dir: Path) -> None:
    path = nodes.handle_keys_file
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    logs = "".join(log.read_text() for log in log_dir.glob("*.log"))
    assert '"ready"' in logs
    for key in signing_keys.load(path):
        assert key.secret.hex() not in logs


def test_only_the_clients_ports_are_open_to_the_machine(nodes: LocalCluster) -> None:
    listening = {
        f"{found.laddr.ip.removeprefix('::ffff:')}:{found.laddr.port}"
        for info in nodes.processes.values()
        for found in psutil.Process(info.pid).net_connections(kind="inet")
        if found.status == psutil.CONN_LISTEN
    }
    assert listening == {nodes.address, nodes.http_address}
    sockets = [info.address for info in nodes.processes.values() if info.kind in ROLES]
    sockets += [nodes.redis_url]
    assert len(sockets) == 8
    for address in sockets:
        path = Path(address.removeprefix("unix:").removeprefix("//"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700, path
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path


def test_another_user_can_call_no_part(nodes: LocalCluster) -> None:
    if os.getuid():
        pytest.skip("needs root, to become another user")
    calls = [
        (info.address, path)
        for info in nodes.processes.values()
        if info.kind in ROLES
        for path, _ in methods(ROLES[info.kind])
    ]
    open_to_all = (nodes.address, "/baton.v1.Inference/ListModels")
    asked = {
        "uid": NOBODY,
        "timeout_s": 10.0,
        "redis": nodes.redis_url.removeprefix("unix://"),
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
