"""A whole cluster over TLS and with API keys: it works, and only for whom it should."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from baton import ClusterConfig, LocalCluster, certs, key_files
from baton.client import Client, SyncClient, collect_chunks
from baton.credentials import Credentials
from baton.errors import PermissionDenied, Unauthenticated, Unavailable
from baton.messages import Chunk, Completion
from process import api_keys, serving
from process.access import RULES, Role
from process.tls import Identity
from protos import inference_pb2, worker_control_pb2, worker_control_pb2_grpc
from tests.wire.test_roles import methods, outcome

pytestmark = pytest.mark.e2e

LENGTHS = (64, 128, 256, 512, 1024)
"""Of streams, until one is still running when its worker is told to take the other role."""
WAIT_S = 120.0

PROMPT = "The lighthouse keeper wrote in her log that the storm would pass. " * 8


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    config = ClusterConfig(port=0, tls=True, api_keys=True, handover="direct", num_decode=2)
    with LocalCluster(config) as running:
        yield running


def key_of(cluster: LocalCluster, tenant: str) -> str:
    key, key_id, entry = api_keys.new_key(tenant)
    key_files.add(Path(cluster.secured.api_keys_file), key_id, entry)
    return key


def problems_of(status: inference_pb2.GetClusterStatusReply) -> list[str]:
    """But how fast links are: that is the machine's, which may have other things to do."""
    return [problem for problem in status.problems if " is degraded: " not in problem]


def test_a_client_with_a_key_is_served_and_kv_is_handed_over(cluster: LocalCluster) -> None:
    tls = cluster.credentials.tls
    with SyncClient(cluster.address, Credentials(tls, key_of(cluster, "acme"))) as client:
        first = client.complete(PROMPT, max_tokens=8, temperature=0.0)
        again = client.complete(PROMPT, max_tokens=8, temperature=0.0)
        assert first.token_ids == again.token_ids and len(first.token_ids) == 8
        with pytest.raises(PermissionDenied, match="not the tenant of your API key"):
            client.complete(PROMPT, max_tokens=2, tenant="beta")
        with pytest.raises(PermissionDenied, match="priority: is 1"):
            client.complete(PROMPT, max_tokens=2, priority=1)
        with pytest.raises(PermissionDenied, match="admin's API key"):
            client.status()
    decode = [leg for leg in first.provenance.legs if leg.role == "decode"]
    assert sum(leg.num_tokens_direct for leg in decode) > 0
    with cluster.connect() as client:
        status = client.status()
    assert not problems_of(status) and all(store.reachable for store in status.stores)


def test_who_has_no_key_or_speaks_in_the_clear_is_not(cluster: LocalCluster) -> None:
    tls = cluster.credentials.tls
    with (
        SyncClient(cluster.address, Credentials(tls)) as client,
        pytest.raises(Unauthenticated, match="an API key is needed"),
    ):
        client.complete(PROMPT, max_tokens=2)
    with SyncClient(cluster.address) as client, pytest.raises(Unavailable, match="speaks TLS"):
        client.status()


def test_no_process_lets_a_wrong_role_call_anything(cluster: LocalCluster) -> None:
    """At the very processes: they have the guard, and each knows its own role's rules."""
    made = cluster.secured.certs
    assert made is not None
    kinds = {"store": Role.KVSTORE, "prefill": Role.PREFILL, "decode": Role.DECODE}

    async def codes(address: str, server: Role, caller: Role) -> dict[str, str]:
        dial = serving.Dialer(Identity(made.tls_of(caller)))
        found = {}
        async with dial(address, server) as channel:
            for path, method in methods(server):
                if caller not in RULES[server][path]:
                    found[path] = (await outcome(channel, path, method)).name
        return found

    num_refused = 0
    for info in cluster.processes.values():
        if info.kind in kinds:
            for caller in Role:
                found = asyncio.run(codes(info.address, kinds[info.kind], caller))
                assert set(found.values()) <= {"PERMISSION_DENIED"}, (info.name, caller, found)
                num_refused += len(found)
    assert num_refused > 60


def test_nobody_outside_this_machine_can_connect_and_no_log_holds_a_key(
    cluster: LocalCluster,
) -> None:
    secret = key_of(cluster, "logged")
    with SyncClient(cluster.address, Credentials(cluster.credentials.tls, secret)) as client:
        client.complete(PROMPT, max_tokens=2)
    with (
        SyncClient(cluster.address, Credentials(cluster.credentials.tls, secret[:-4])) as client,
        pytest.raises(Unauthenticated),
    ):
        client.complete(PROMPT, max_tokens=2)
    num_listening = 0
    for info in cluster.processes.values():
        process = psutil.Process(info.pid)
        for found in process.net_connections(kind="inet"):
            if found.status == psutil.CONN_LISTEN:
                ip = found.laddr.ip.removeprefix("::ffff:")  # IPv4 on a socket for both
                assert ip in ("127.0.0.1", "::1"), (info.name, found.laddr)
                num_listening += 1
        assert info.log_path is not None
        log = info.log_path.read_text(encoding="utf-8")
        line = " ".join(process.cmdline())
        for word in (secret, secret[:-4], cluster.credentials.api_key):
            assert word not in log and word not in line, info.name
    assert num_listening == 2, "the router's ports for clients"


def test_new_certificates_are_taken_up_by_a_running_cluster(cluster: LocalCluster) -> None:
    made = cluster.secured.certs
    assert made is not None
    certs.write(made.folder)
    with cluster.connect() as client:
        assert len(client.complete(PROMPT, max_tokens=4).token_ids) == 4
        status = client.status()  # asks each process over a new connection
    assert not problems_of(status)


async def test_a_worker_takes_the_other_role_while_it_streams(cluster: LocalCluster) -> None:
    """With certificates that name both, made while the cluster runs: its stream goes on at the
    other decode worker, and it serves as what it is told to be."""
    made = cluster.secured.certs
    assert made is not None
    certs.write(made.folder, flips=True)
    async with Client(cluster.address, cluster.credentials) as client:
        for max_tokens in LENGTHS:
            asked = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
            expected = await client.complete(PROMPT, **asked)
            answer, worker_id = await _flipped_in_the_middle(cluster, client, asked)
            assert answer.token_ids == expected.token_ids
            after = await client.complete(PROMPT, max_tokens=8, temperature=0.0)
            assert after.token_ids == expected.token_ids[:8]
            reply = await _set_role(cluster, worker_id, Role.PREFILL, "decode")
            assert (reply.worker_id, reply.role) == (worker_id, "decode")
            if "moved" in [leg.ended_by for leg in answer.provenance.legs]:
                break
        else:
            pytest.fail("every stream was over before its worker was told")
        assert not problems_of(await client.status())


async def _flipped_in_the_middle(
    cluster: LocalCluster, client: Client, asked: dict[str, Any]
) -> tuple[Completion, str]:
    """An answer, and the worker that began it and prefills since."""
    chunks: list[Chunk] = []
    flip: asyncio.Task[worker_control_pb2.SetRoleReply] | None = None
    busy = "decode-0"
    async with asyncio.timeout(WAIT_S):
        async for chunk in client.generate(PROMPT, **asked):
            chunks.append(chunk)
            if flip is None and len(chunks) > 2:  # the first token is prefill's
                workers = (await client.status()).workers
                busy = next(
                    (w.worker_id for w in workers if w.role == "decode" and w.num_running), busy
                )
                flip = asyncio.create_task(_set_role(cluster, busy, Role.DECODE, "prefill"))
        assert flip is not None
        assert (await flip).role == "prefill"
    return collect_chunks(chunks), busy


async def _set_role(
    cluster: LocalCluster, worker_id: str, present: Role, role: str
) -> worker_control_pb2.SetRoleReply:
    assert cluster.secured.certs is not None
    dial = serving.Dialer(Identity(cluster.secured.certs.tls_of(Role.ADMIN), Role.ADMIN))
    async with dial(cluster.processes[worker_id].address, present) as channel:
        stub: Any = worker_control_pb2_grpc.WorkerControlStub(channel)
        request = worker_control_pb2.SetRoleRequest(role=role)
        reply: worker_control_pb2.SetRoleReply = await stub.SetRole(request, timeout=WAIT_S)
        return reply
