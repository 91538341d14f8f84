"""A cluster over TLS and with API keys that hands KV over directly: decode reads the prefill
worker's own cache, the store is written behind, and a prefill worker that dies with what it lent
costs time and nothing else; no caller reaches what its role or key does not allow, and a worker may
take the other role.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from baton import ClusterConfig, LocalCluster, api_key_file, development_certificates
from baton.answers import Chunk, Completion
from baton.client import Client, Credentials, SyncClient, collect_chunks
from baton.errors import PermissionDenied, Unauthenticated, Unavailable
from engine.config import EngineConfig
from engine.engine import load_engine
from engine.request import Sampling
from kvstore.errors import MISSING, STORE_UNAVAILABLE
from kvstore.node_ids import lender_node_id
from process import api_keys, rpc
from process.authorization import RULES, PeerRole
from process.tls import TlsIdentity
from protos import common_pb2, prefill_pb2_grpc, worker_control_pb2, worker_control_pb2_grpc
from tests.harness.cluster import (
    BLOCK_SIZE,
    STORE_SIZE,
    Oracle,
    assert_idle,
    leg,
    oracle,
    problems_of,
    prompts,
    run_engine,
)
from tests.wire.test_roles import methods, outcome

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = ClusterConfig().model
MAX_TOKENS = 12
WAIT_S = 120.0
MAX_TRIES = 5
LENGTHS = (64, 128, 256, 512, 1024)
"""Of streams, until one is still running when its worker is told to take the other role."""
PROMPT = "The lighthouse keeper wrote in her log that the storm would pass. " * 8
LENDER = lender_node_id("prefill-0")

Ask = Callable[[], Awaitable[common_pb2.WorkerStatus]]


@pytest.fixture(scope="module", params=["grpc", pytest.param("nixl", marks=pytest.mark.long)])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """A prompt is computed in many small steps, so that decode has time to fetch early, and a test
    to come in between."""
    config = ClusterConfig(
        port=0,
        tls=True,
        api_keys=True,
        num_decode=2,
        handover="direct",
        direct_transport=request.param,
        overrides=(
            STORE_SIZE,
            "prefill.engine.max_num_tokens_per_step=4",
            "prefill.engine.max_num_running=4",
            # Else decode brings prompts to the store, too.
            "decode.limits.write_back=false",
        ),
    )
    with LocalCluster(config) as running:
        yield running
        running.wait_ready()
        assert_idle(running)


def long_prompt(reference: Oracle, rng: random.Random) -> list[int]:
    """Of many blocks and a tail, whose answer does not end at once."""
    while True:
        for found in prompts(reference, rng, 40):
            if len(found) >= 500 and len(reference.greedy(found[:487], 2)) > 1:
                return found[:487]


def key_of(cluster: LocalCluster, tenant: str) -> str:
    key, key_id, entry = api_keys.new_key(tenant)
    api_key_file.add(Path(cluster.secured.api_keys_file), key_id, entry)
    return key


async def test_streams_are_exact_and_come_out_of_the_prefill_workers_cache(
    cluster: LocalCluster, reference: Oracle, seed: int, scale: Callable[[int], int]
) -> None:
    wanted = prompts(reference, random.Random(seed), max(8, scale(200)))
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in wanted]
    gate = asyncio.Semaphore(4)

    async with Client(cluster.address, cluster.credentials) as client:

        async def one(prompt: list[int]) -> Completion:
            async with gate:
                return await _complete(client, prompt)

        completions = await asyncio.gather(*map(one, wanted))
    num_direct = 0
    for prompt, tokens, completion in zip(wanted, expected, completions, strict=True):
        assert list(completion.token_ids) == tokens
        if len(tokens) == 1:
            continue  # it ended before there was a handle
        prefill, decode = leg(completion, "prefill"), leg(completion, "decode")
        assert prefill.handover == "direct" and not prefill.recomputed
        assert not decode.recomputed
        assert decode.num_tokens_computed <= 1  # the last token, if decode had all before it
        assert {count.node_id for count in decode.from_store} <= {LENDER}
        assert decode.num_tokens_direct == decode.num_tokens_from_store
        transport = cluster.config.direct_transport
        assert {count.transport for count in decode.from_store} <= {transport}
        assert decode.transport == (transport if decode.num_bytes_read else "")
        has_moved = prefill.num_bytes_read or prefill.num_bytes_written
        assert prefill.transport == ("shm" if has_moved else "")
        assert decode.num_tokens_direct + decode.num_tokens_local >= len(prompt) - 1
        num_direct += decode.num_tokens_direct
    assert num_direct > 0
    status = assert_idle(cluster)
    (lender,) = (worker for worker in status.workers if worker.role == "prefill")
    assert (lender.lender_node_id, lender.num_lent_blocks) == (LENDER, 0)


async def test_a_prefill_worker_that_dies_with_what_it_lent_changes_no_answer(
    cluster: LocalCluster, reference: Oracle, seed: int
) -> None:
    """What decode had early is used, the rest is computed again and counted. What was handed over
    before is in the store by then: the next life of the prefill worker finds it there."""
    rng = random.Random(seed + 1)
    stored = long_prompt(reference, rng)
    num_blocks = len(stored) // BLOCK_SIZE
    async with Client(cluster.address, cluster.credentials) as client:
        num_before = (await client.status()).stores[0].num_committed
        await _complete(client, stored)
        await _until_stored(client, num_before + num_blocks)
        for _ in range(MAX_TRIES):
            lost = long_prompt(reference, rng)
            completion = await _with_a_death(cluster, client, lost)
            assert list(completion.token_ids) == reference.greedy(lost, MAX_TOKENS)
            decode = leg(completion, "decode")
            if decode.recomputed:
                break
            # Decode had all of it before it could be stopped, or it was not seen to run.
            assert decode.num_tokens_direct == len(lost)
        assert leg(completion, "prefill").handover == "direct"
        num_lost = -(-len(lost) // BLOCK_SIZE) - decode.num_tokens_direct // BLOCK_SIZE
        assert decode.recomputed == {STORE_UNAVAILABLE: num_lost}
        assert decode.num_tokens_computed == len(lost) - decode.num_tokens_direct
        again = leg(await _complete(client, stored), "prefill")
        assert again.num_tokens_from_store == num_blocks * BLOCK_SIZE


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
    kinds = {"store": PeerRole.KVSTORE, "prefill": PeerRole.PREFILL, "decode": PeerRole.DECODE}

    async def codes(address: str, server: PeerRole, caller: PeerRole) -> dict[str, str]:
        dial = rpc.Dialer(TlsIdentity(made.tls_of(caller)))
        found = {}
        async with dial(address, server) as channel:
            for path, method in methods(server):
                if caller not in RULES[server][path]:
                    found[path] = (await outcome(channel, path, method)).name
        return found

    num_refused = 0
    for info in cluster.processes.values():
        if info.kind in kinds:
            for caller in PeerRole:
                found = asyncio.run(codes(info.address, kinds[info.kind], caller))
                assert set(found.values()) <= {"PERMISSION_DENIED"}, (info.name, caller, found)
                num_refused += len(found)
    assert num_refused > 60


@pytest.mark.parametrize("cluster", ["grpc"], indirect=True)  # NIXL opens sockets of its own
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
    development_certificates.write(made.folder)
    with cluster.connect() as client:
        assert len(client.complete(PROMPT, max_tokens=4).token_ids) == 4
        status = client.status()  # asks each process over a new connection
    assert not problems_of(status)


async def test_a_worker_takes_the_other_role_while_it_streams(cluster: LocalCluster) -> None:
    """With certificates that name both, made while the cluster runs: its stream goes on at the
    other decode worker, and it serves as what it is told to be."""
    made = cluster.secured.certs
    assert made is not None
    development_certificates.write(made.folder, flips=True)
    async with Client(cluster.address, cluster.credentials) as client:
        for max_tokens in LENGTHS:
            asked = {"max_tokens": max_tokens, "ignore_eos": True, "temperature": 0.0}
            expected = await client.complete(PROMPT, **asked)
            answer, worker_id = await _flipped_in_the_middle(cluster, client, asked)
            assert answer.token_ids == expected.token_ids
            after = await client.complete(PROMPT, max_tokens=8, temperature=0.0)
            assert after.token_ids == expected.token_ids[:8]
            reply = await _set_role(cluster, worker_id, PeerRole.PREFILL, "decode")
            assert (reply.worker_id, reply.role) == (worker_id, "decode")
            if "moved" in [leg.ended_by for leg in answer.provenance.legs]:
                break
        else:
            pytest.fail("every stream was over before its worker was told")
        assert not problems_of(await client.status())


@pytest.mark.long
async def test_quantized_blocks_are_lent_as_they_lie(seed: int) -> None:
    """What decode reads is the blocks' bytes with their scales. The unfilled block at the end is
    not lent: prefill keeps it in numbers of its own, and decode computes it again."""
    engine = load_engine(EngineConfig(model=MODEL, device="cpu", num_threads=1, kv_dtype="int8"))
    config = ClusterConfig(
        port=0,
        transport="grpc",
        handover="direct",
        overrides=('worker.engine.kv_dtype="int8"', "decode.limits.write_back=false"),
    )
    wanted = prompts(oracle(MODEL), random.Random(seed), 8)
    sampling = Sampling(max_tokens=MAX_TOKENS, temperature=0.0)
    with LocalCluster(config) as cluster:
        cluster.wait_ready()
        num_direct = 0
        async with Client(cluster.address) as client:
            for index, prompt in enumerate(wanted):
                (expected,) = run_engine(engine, [(prompt, sampling)], prefix_cache=f"{index}")
                completion = await _complete(client, prompt)
                assert list(completion.token_ids) == expected
                if len(expected) == 1:
                    continue
                prefill, decode = leg(completion, "prefill"), leg(completion, "decode")
                assert prefill.handover == ("direct" if len(prompt) >= BLOCK_SIZE else "")
                tail = {MISSING: 1} if len(prompt) % BLOCK_SIZE else {}
                assert (prefill.recomputed, decode.recomputed) == ({}, tail)
                num_full = len(prompt) // BLOCK_SIZE * BLOCK_SIZE
                assert decode.num_tokens_direct + decode.num_tokens_local >= min(
                    num_full, len(prompt) - 1
                )
                num_direct += decode.num_tokens_direct
        assert num_direct > 0
        assert_idle(cluster)
    engine.close()


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
                flip = asyncio.create_task(_set_role(cluster, busy, PeerRole.DECODE, "prefill"))
        assert flip is not None
        assert (await flip).role == "prefill"
    return collect_chunks(chunks), busy


def _dial(cluster: LocalCluster, worker_id: str, role: PeerRole) -> grpc.aio.Channel:
    """As an admin, to a worker that has this role now."""
    assert cluster.secured.certs is not None
    dial = rpc.Dialer(TlsIdentity(cluster.secured.certs.tls_of(PeerRole.ADMIN), PeerRole.ADMIN))
    return dial(cluster.processes[worker_id].address, role)


async def _set_role(
    cluster: LocalCluster, worker_id: str, present: PeerRole, role: str
) -> worker_control_pb2.SetRoleReply:
    async with _dial(cluster, worker_id, present) as channel:
        stub: Any = worker_control_pb2_grpc.WorkerControlStub(channel)
        request = worker_control_pb2.SetRoleRequest(role=role)
        reply: worker_control_pb2.SetRoleReply = await stub.SetRole(request, timeout=WAIT_S)
        return reply


async def _with_a_death(cluster: LocalCluster, client: Client, prompt: list[int]) -> Completion:
    """The answer to a prompt whose prefill worker is killed once its handle is out and before
    decode can take it in: the decode workers are stopped so long. The prefill worker is started
    again. On a busy machine the answer may be there before anything was seen of it: then nothing
    died."""
    async with _prefill_worker(cluster) as status:
        num_counted = (await status()).num_prompt_tokens_computed
        asking = asyncio.create_task(_complete(client, prompt))
        # If it runs, decode has set blocks aside.
        await _until(status, lambda worker: worker.num_running > 0 or asking.done())
        if asking.done():
            return await asking
        decode = [info.pid for info in cluster.processes.values() if info.kind == "decode"]
        for pid in decode:
            os.kill(pid, signal.SIGSTOP)
        try:
            await _until(status, lambda worker: worker.num_prompt_tokens_computed > num_counted)
            await status()  # by its answer the handle, which came before it, is out
            cluster.kill("prefill-0", restart=False)
        finally:
            for pid in decode:
                os.kill(pid, signal.SIGCONT)
        completion = await asking
    cluster.restart("prefill-0")
    await asyncio.to_thread(cluster.wait_ready)
    return completion


async def _complete(client: Client, prompt: list[int]) -> Completion:
    return await client.complete(prompt, max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=60)


@asynccontextmanager
async def _prefill_worker(cluster: LocalCluster) -> AsyncIterator[Ask]:
    """Asks the prefill worker itself: the router would wait for one that is stopped."""
    async with _dial(cluster, "prefill-0", PeerRole.PREFILL) as channel:
        stub = prefill_pb2_grpc.PrefillStub(channel)

        async def ask() -> common_pb2.WorkerStatus:
            request = common_pb2.GetWorkerStatusRequest()
            reply: common_pb2.WorkerStatus = await stub.GetWorkerStatus(request, timeout=WAIT_S)
            return reply

        yield ask


async def _until(ask: Ask, holds: Callable[[common_pb2.WorkerStatus], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not holds(await ask()):
            await asyncio.sleep(0.002)


async def _until_stored(client: Client, num_blocks: int) -> None:
    """The store holds so many blocks: what is written behind is there soon, not at once."""
    async with asyncio.timeout(WAIT_S):
        while (await client.status()).stores[0].num_committed < num_blocks:
            await asyncio.sleep(0.02)
