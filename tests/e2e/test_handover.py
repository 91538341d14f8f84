"""The direct path in a real cluster: decode reads the prefill worker's own cache, the store is
written behind, and a prefill worker that dies with what it lent costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from baton import ClusterConfig, LocalCluster
from baton.client import Client
from baton.messages import Completion, KvLeg
from engine.config import EngineConfig
from engine.loop import load_engine
from engine.request import Sampling
from kvstore.errors import MISSING, STORE_UNAVAILABLE
from kvstore.lending import lender_node_id
from process import serving
from protos import common_pb2, prefill_pb2_grpc
from tests.harness.cluster import BLOCK_SIZE, Oracle, assert_idle, oracle, prompts, run_engine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MODEL = ClusterConfig().model
MAX_TOKENS = 12
WAIT_S = 30.0
MAX_TRIES = 5
LENDER = lender_node_id("prefill-0")

Ask = Callable[[], Awaitable[common_pb2.WorkerStatus]]


@pytest.fixture(scope="module")
def reference() -> Oracle:
    return oracle(MODEL)


@pytest.fixture(scope="module", params=["grpc", pytest.param("nixl", marks=pytest.mark.long)])
def direct(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    """A prompt is computed in many small steps, so that decode has time to fetch early, and a test
    to come in between."""
    config = ClusterConfig(
        port=0,
        handover="direct",
        direct_transport=request.param,
        overrides=(
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


def leg(completion: Completion, role: str) -> KvLeg:
    (found,) = (leg for leg in completion.provenance.legs if leg.role == role)
    return found


def long_prompt(reference: Oracle, rng: random.Random) -> list[int]:
    """Of many blocks and a tail, whose answer does not end at once."""
    while True:
        for found in prompts(reference, rng, 40):
            if len(found) >= 500 and len(reference.greedy(found[:487], 2)) > 1:
                return found[:487]


async def test_streams_are_exact_and_come_out_of_the_prefill_workers_cache(
    direct: LocalCluster, reference: Oracle, seed: int, scale: Callable[[int], int]
) -> None:
    wanted = prompts(reference, random.Random(seed), max(8, scale(200)))
    expected = [reference.greedy(prompt, MAX_TOKENS) for prompt in wanted]
    gate = asyncio.Semaphore(4)

    async with Client(direct.address) as client:

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
        transport = direct.config.direct_transport
        assert {count.transport for count in decode.from_store} <= {transport}
        assert decode.transport == (transport if decode.num_bytes_read else "")
        has_moved = prefill.num_bytes_read or prefill.num_bytes_written
        assert prefill.transport == ("shm" if has_moved else "")
        assert decode.num_tokens_direct + decode.num_tokens_local >= len(prompt) - 1
        num_direct += decode.num_tokens_direct
    assert num_direct > 0
    status = assert_idle(direct)
    (lender,) = (worker for worker in status.workers if worker.lender_node_id)
    assert (lender.lender_node_id, lender.num_lent_blocks) == (LENDER, 0)


async def test_a_prefill_worker_that_dies_with_what_it_lent_changes_no_answer(
    direct: LocalCluster, reference: Oracle, seed: int
) -> None:
    """What decode had early is used, the rest is computed again and counted. What was handed over
    before is in the store by then: the next life of the prefill worker finds it there."""
    rng = random.Random(seed + 1)
    stored = long_prompt(reference, rng)
    num_blocks = len(stored) // BLOCK_SIZE
    async with Client(direct.address) as client:
        num_before = (await client.status()).stores[0].num_committed
        await _complete(client, stored)
        await _until_stored(client, num_before + num_blocks)
        for _ in range(MAX_TRIES):
            lost = long_prompt(reference, rng)
            completion = await _with_a_death(direct, client, lost)
            assert list(completion.token_ids) == reference.greedy(lost, MAX_TOKENS)
            decode = leg(completion, "decode")
            if decode.recomputed:
                break
            # Decode had all of it before it could be stopped, or nobody saw that it ran.
            assert decode.num_tokens_direct == len(lost)
        assert leg(completion, "prefill").handover == "direct"
        num_lost = -(-len(lost) // BLOCK_SIZE) - decode.num_tokens_direct // BLOCK_SIZE
        assert decode.recomputed == {STORE_UNAVAILABLE: num_lost}
        assert decode.num_tokens_computed == len(lost) - decode.num_tokens_direct
        again = leg(await _complete(client, stored), "prefill")
        assert again.num_tokens_from_store == num_blocks * BLOCK_SIZE


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


async def _with_a_death(cluster: LocalCluster, client: Client, prompt: list[int]) -> Completion:
    """The answer to a prompt whose prefill worker is killed once its handle is out and before
    decode can take it in, which is stopped so long. The worker is started again. On a busy machine
    the answer may be there before anything was seen of it: then nothing died."""
    async with _prefill_worker(cluster) as status:
        num_counted = (await status()).num_prompt_tokens_computed
        asking = asyncio.create_task(_complete(client, prompt))
        # If it runs, decode has set blocks aside.
        await _until(status, lambda worker: worker.num_running > 0 or asking.done())
        if asking.done():
            return await asking
        os.kill(cluster.processes["decode-0"].pid, signal.SIGSTOP)
        try:
            await _until(status, lambda worker: worker.num_prompt_tokens_computed > num_counted)
            await status()  # by its answer the handle, which came before it, is out
            cluster.kill("prefill-0", restart=False)
        finally:
            os.kill(cluster.processes["decode-0"].pid, signal.SIGCONT)
        completion = await asking
    cluster.restart("prefill-0")
    await asyncio.to_thread(cluster.wait_ready)
    return completion


async def _complete(client: Client, prompt: list[int]) -> Completion:
    return await client.complete(prompt, max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=60)


@asynccontextmanager
async def _prefill_worker(cluster: LocalCluster) -> AsyncIterator[Ask]:
    """Asks the prefill worker itself: the router would wait for one that is stopped."""
    async with serving.channel(cluster.processes["prefill-0"].address) as channel:
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
