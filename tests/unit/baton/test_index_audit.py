"""`baton audit`: the judgement over two looks, and a real store beside a real Redis that lost or
made up entries."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from hypothesis import given
from hypothesis import strategies as st

from baton import cli, development_certificates, index_audit
from baton.cluster import running_clusters as cluster_state
from baton.cluster.running_clusters import ClusterState
from baton.index_audit import Reading, StoreAudit, compare
from kvstore import index, store_process
from kvstore.config import KvStoreSettings
from process import registry
from process.authorization import PeerRole
from process.deadline import Deadline
from process.registry import RedisAccess
from protos import inference_pb2
from tests.harness.redis_server import PASSWORD, RedisServer, a_redis, behind_tls, password_file
from tests.harness.store import Worker

STORE = inference_pb2.StoreStatus(node_id="n", address="a:1", incarnation="ab", reachable=True)
NUM_BLOCKS = 40

hashes = st.frozensets(st.integers(0, 15).map(lambda n: bytes([n]) * 16))
looks = st.builds(Reading, hashes, hashes, st.integers(0, 9), st.integers(0, 9))


@given(looks, looks)
def test_only_what_differs_in_both_looks_has_drifted(first: Reading, second: Reading) -> None:
    settled = compare(STORE, first, second, staleness_s=0.1)
    missing = {h for h in second.present if h in first.present} - first.indexed - second.indexed
    false = {h for h in second.indexed if h in first.indexed} - first.present - second.present
    assert (settled.num_missing, settled.num_false) == (len(missing), len(false))
    differing = len(second.present ^ second.indexed)
    assert settled.num_missing + settled.num_false + settled.num_in_flight == differing
    assert settled.has_drifted == bool(missing or false)
    assert index_audit.found_fault([settled]) == settled.has_drifted
    unsettled = compare(STORE, first, second, staleness_s=None)
    assert not unsettled.has_drifted and unsettled.num_in_flight == differing


@given(looks)
def test_precision_and_recall_are_shares(look: Reading) -> None:
    found = compare(STORE, look, look, staleness_s=0.0)
    assert 0.0 <= found.precision <= 1.0 and 0.0 <= found.recall <= 1.0
    assert (found.precision == found.recall == 1.0) == (look.present == look.indexed)
    assert found.sequence_lag == max(0, look.store_sequence - look.index_sequence)


def test_a_store_that_lives_and_cannot_be_compared_is_a_fault() -> None:
    assert index_audit.found_fault([StoreAudit("n", "a", "ab", problem="does not answer")])
    assert not index_audit.found_fault([StoreAudit("n", "a", "ab", is_void=True, problem="dead")])


@pytest.fixture
async def redis_server() -> AsyncIterator[RedisServer]:
    server = RedisServer()
    await server.start()
    yield server
    server.remove()


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    made = registry.connect_redis(redis_server.url, 1.0)
    yield made
    await made.aclose()


@asynccontextmanager
async def _store_at(
    redis_url: str, access: RedisAccess
) -> AsyncIterator[store_process.RunningStore]:
    """With NUM_BLOCKS blocks in it."""
    settings = KvStoreSettings(
        node_id="node-a",
        capacity_bytes=64 * 4096,
        redis_url=redis_url,
        redis=access,
        heartbeat_s=0.1,
        heartbeat_ttl_s=5.0,
    )
    async with store_process.running(settings) as running:
        worker = Worker("grpc", 4096, NUM_BLOCKS, seed=1)
        await worker.attach(running.address)
        chain = [bytes([1 + n]) * 16 for n in range(NUM_BLOCKS)]
        put = await worker.put(chain, range(NUM_BLOCKS))
        await worker.client.release([put.lease_id], deadline=Deadline.after(30))
        yield running
        await worker.client.close()


@pytest.fixture
async def store(redis_server: RedisServer) -> AsyncIterator[store_process.RunningStore]:
    async with _store_at(redis_server.url, RedisAccess()) as running:
        yield running


async def _audited(server: RedisServer) -> StoreAudit:
    (found,) = await index_audit.audit(server.url, settle_s=10.0, timeout_s=10.0)
    return found


async def test_a_true_index_is_found_true(
    store: store_process.RunningStore, redis_server: RedisServer
) -> None:
    found = await _audited(redis_server)
    assert (found.num_present, found.num_indexed) == (NUM_BLOCKS, NUM_BLOCKS)
    assert found.precision == found.recall == 1.0
    assert found.is_settled and not found.has_drifted and found.problem == ""
    assert found.incarnation == store.node.incarnation.hex()


async def test_lost_and_made_up_entries_are_counted(
    store: store_process.RunningStore,
    redis_server: RedisServer,
    client: redis.asyncio.Redis,
    seed: int,
) -> None:
    """Single fields are what no sequence number shows: only an audit finds them."""
    await _audited(redis_server)  # everything is published
    rng = random.Random(seed)
    key = index.index_key("node-a", store.node.incarnation.hex())
    lost = rng.sample([n for n in await client.hkeys(key) if len(n) == 16], rng.randint(1, 20))
    made_up = [rng.randbytes(16) for _ in range(rng.randint(1, 20))]
    await client.hdel(key, *lost)
    await client.hset(key, mapping=dict.fromkeys(made_up, 1))
    await client.set(index.index_key("node-a", "dead"), 1)
    found = await _audited(redis_server)
    assert (found.num_missing, found.num_false) == (len(lost), len(made_up))
    assert found.num_right == NUM_BLOCKS - len(lost)
    assert found.num_indexed == NUM_BLOCKS - len(lost) + len(made_up)
    assert found.num_earlier_indexes == 1


async def test_a_lost_index_is_stale_until_it_is_published_again(
    store: store_process.RunningStore, redis_server: RedisServer, client: redis.asyncio.Redis
) -> None:
    await _audited(redis_server)
    await client.delete(index.index_key("node-a", store.node.incarnation.hex()))
    found = await _audited(redis_server)
    # Either the first look met the gap, or the store's next heartbeat was faster than it.
    assert not found.has_drifted and found.is_settled
    assert found.recall == 1.0


async def test_a_silent_store_is_no_drift(
    redis_server: RedisServer, client: redis.asyncio.Redis
) -> None:
    await client.hset(index.STORES_KEY, "gone", '{"nodeId": "gone", "incarnation": "ab"}')
    found = await _audited(redis_server)
    assert found.is_void and not index_audit.found_fault([found])
    await client.set(index.beat_key("gone"), "ab")
    await client.hset(
        index.STORES_KEY,
        "gone",
        '{"nodeId": "gone", "incarnation": "ab", "address": "127.0.0.1:1"}',
    )
    found = await _audited(redis_server)
    assert found.problem and index_audit.found_fault([found])


def test_the_command_finds_the_local_cluster_and_says_what_it_found(
    redis_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: object,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert cli.main(["audit"]) == 1
    assert "baton up" in capsys.readouterr().err
    cluster_state.announce(ClusterState("127.0.0.1:1", "tiny", redis_url=redis_server.url))
    for arguments in (["audit"], ["audit", "--address", "127.0.0.1:1"]):
        assert cli.main(arguments) == 0
        assert "no store is registered" in capsys.readouterr().out
    for command in ("audit", "block"):
        assert cli.main([command, "--address", "127.0.0.1:2"]) == 1
        err = capsys.readouterr().err
        assert "no cluster of yours runs at 127.0.0.1:2; give --redis URL" in err
    found = [
        StoreAudit("good", "a:1", "ab", 10, 10, 10),
        StoreAudit("bad", "a:2", "cd", 10, 9, 8, num_missing=2, num_false=1, sequence_lag=3),
    ]

    async def audited(url: str, *, settle_s: float, **options: Any) -> list[StoreAudit]:
        assert (url, settle_s) == (redis_server.url, 2.5)
        return found

    monkeypatch.setattr(index_audit, "audit", audited)
    assert cli.main(["audit", "--settle", "2.5"]) == 1
    shown = capsys.readouterr().out
    assert "DRIFTED" in shown and "80.00 %" in shown and "88.89 %" in shown
    assert cli.main(["audit", "--settle", "2.5", "--json"]) == 1
    value = json.loads(capsys.readouterr().out)
    assert value["found_fault"] and value["stores"][1]["recall"] == 0.8
    found.pop()
    assert cli.main(["audit", "--settle", "2.5"]) == 0


def test_a_redis_that_is_away_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["audit", "--redis", "unix:///nowhere/redis.sock"]) == 1
    assert "registry" in capsys.readouterr().err


async def test_a_redis_that_asks_for_a_password_is_audited_with_its_file(
    redis_server: RedisServer,
    client: redis.asyncio.Redis,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await client.config_set("requirepass", "hunter2")
    try:
        password = tmp_path / "password"
        password.write_text("hunter2")
        password.chmod(0o600)
        for command, code, said in (("audit", 0, "no store is registered"), ("block", 1, "")):
            arguments = [command, "--redis", redis_server.url]
            assert await asyncio.to_thread(cli.main, arguments) == 1
            assert "uthenticat" in capsys.readouterr().err
            given = [*arguments, "--redis-password-file", str(password)]
            assert await asyncio.to_thread(cli.main, given) == code
            out, err = capsys.readouterr()
            assert said in out and "uthenticat" not in err
            given = [*arguments, "--redis-ca-file", str(password)]
            assert await asyncio.to_thread(cli.main, given) == 1
            assert "redis.ca_file: is for TLS" in capsys.readouterr().err
    finally:
        await client.config_set("requirepass", "")


async def test_a_redis_over_tls_with_a_password_is_asked_as_the_parts_ask_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both commands that read Redis themselves."""
    made = development_certificates.write(tmp_path / "certs")
    access = RedisAccess(
        str(made.ca_file),
        str(made.cert_file(PeerRole.PREFILL)),
        str(made.key_file(PeerRole.PREFILL)),
        password_file=password_file(tmp_path, PASSWORD),
    )
    trust = ["--redis-ca-file", access.ca_file, "--redis-cert-file", access.cert_file]
    trust += ["--redis-key-file", access.key_file]
    known = [*trust, "--redis-password-file", access.password_file]

    async def command(name: str, *options: str) -> tuple[int, str]:
        arguments = [name, "--redis", url, "--json", *options]
        code = await asyncio.to_thread(cli.main, arguments)
        out, err = capsys.readouterr()
        return code, out or err

    async with a_redis(tmp_path) as socket, behind_tls(socket, made) as port:
        url = f"rediss://localhost:{port}/0"
        async with _store_at(url, access):
            code, said = await command("audit", *known)
            (found,) = json.loads(said)["stores"]
            assert code == 0 and found["state"] == "ok", said
            assert found["num_present"] == found["num_indexed"] == NUM_BLOCKS
            code, said = await command("block", "01" * 16, *known)
            (told,) = json.loads(said)["stores"]
            assert code == 0 and [b["chain_hash"] for b in told["blocks"]] == ["01" * 16]
            for options in ([], trust, known[2:]):
                for name in ("audit", "block"):
                    code, said = await command(name, *options)
                    assert code == 1 and len(said.splitlines()) == 1, said
