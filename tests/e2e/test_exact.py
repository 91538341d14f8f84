"""The first promise: disaggregated == one engine == `transformers`, token for token, over each
transport; and the KV really moved."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from baton import cli
from baton.client import Client, SyncClient
from baton.local_cluster import ClusterConfig, LocalCluster
from baton.messages import Completion, KvLeg
from protos import inference_pb2
from tests.conftest import LONG, SESSION_SEED
from tests.harness.cluster import (
    BLOCK_SIZE,
    CLUSTERS,
    Oracle,
    Sampling,
    assert_idle,
    oracle,
    prompts,
    run_engine,
    single_engine,
)

# The long run takes minutes a test.
pytestmark = [pytest.mark.oracle, pytest.mark.e2e, pytest.mark.timeout(1200)]

MODEL = ClusterConfig().model
MAX_TOKENS = 24
# What no transport changes runs over one.
over_one_transport = pytest.mark.parametrize("cluster", CLUSTERS[:1], indirect=True)


@pytest.fixture(scope="module")
def reference() -> Oracle:
    return oracle(MODEL)


@pytest.fixture(scope="module")
def greedy(reference: Oracle) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts, and what is right, over whichever transport."""
    wanted = prompts(reference, random.Random(SESSION_SEED), 200 if LONG else 16)
    return wanted, [reference.greedy(prompt, MAX_TOKENS) for prompt in wanted]


async def complete_all(
    address: str,
    wanted: Sequence[Sequence[int]],
    concurrency: int,
    options: Sequence[dict[str, object]] = (),
) -> list[Completion]:
    """All prompts, at most `concurrency` at once; answers in their order."""
    gate = asyncio.Semaphore(concurrency)
    async with Client(address) as client:

        async def one(index: int) -> Completion:
            async with gate:
                extra = options[index] if options else {"temperature": 0.0}
                return await client.complete(
                    list(wanted[index]), max_tokens=MAX_TOKENS, timeout_s=120, **extra
                )

        return list(await asyncio.gather(*(one(index) for index in range(len(wanted)))))


def leg(completion: Completion, role: str) -> KvLeg:
    (found,) = (leg for leg in completion.provenance.legs if leg.role == role)
    return found


def assert_moved(completion: Completion) -> None:
    """The account sums up, and decode computed nothing of the prompt."""
    num_prompt = completion.usage.num_prompt_tokens
    for one in completion.provenance.legs:
        total = one.num_tokens_computed + one.num_tokens_local + one.num_tokens_from_store
        assert total == num_prompt, one
        assert not one.recomputed, one
    if len(completion.token_ids) > 1:
        assert leg(completion, "decode").num_tokens_computed == 0


def split(total: int, rng: random.Random) -> list[int]:
    """Random group sizes of 1 to 32 that sum to `total`: how ragged batches come about."""
    sizes = []
    while total:
        sizes.append(min(total, rng.randint(1, 32)))
        total -= sizes[-1]
    return sizes


async def test_greedy_equals_transformers_with_and_without_a_prefix_hit(
    cluster: LocalCluster, greedy: tuple[list[list[int]], list[list[int]]], seed: int
) -> None:
    rng = random.Random(seed)
    wanted, expected = greedy
    for attempt in ("cold", "prefix hit"):
        done = 0
        for size in split(len(wanted), rng):
            group = slice(done, done + size)
            answers = await complete_all(cluster.address, wanted[group], concurrency=size)
            for prompt, answer, right in zip(wanted[group], answers, expected[group], strict=True):
                assert list(answer.token_ids) == right, (attempt, len(prompt), prompt)
                assert_moved(answer)
            done += size


async def test_sampled_equals_one_engine_whatever_the_batch_around(
    cluster: LocalCluster, reference: Oracle, seed: int, scale: Callable[[int], int]
) -> None:
    rng = random.Random(seed + 1)
    count = max(12, scale(200))
    wanted = prompts(reference, rng, count)
    settings = [
        {
            "temperature": rng.choice([0.3, 0.7, 1.0, 1.5]),
            "top_p": rng.choice([0.5, 0.9, 1.0]),
            "top_k": rng.choice([0, 5, 40]),
            "seed": rng.randrange(2**63),
        }
        for _ in range(count)
    ]
    engine = single_engine(MODEL)
    expected = []
    for index, (prompt, one) in enumerate(zip(wanted, settings, strict=True)):
        sampling = Sampling(max_tokens=MAX_TOKENS, **one)  # type: ignore[arg-type]
        expected += run_engine(engine, [(prompt, sampling)], prefix_cache=f"{seed}-{index}")
    answers = await complete_all(cluster.address, wanted, concurrency=8, options=settings)
    for prompt, answer, right, one in zip(wanted, answers, expected, settings, strict=True):
        assert list(answer.token_ids) == right, (len(prompt), one)
        assert answer.seed == one["seed"]
        assert_moved(answer)


def _settled(cluster: LocalCluster) -> inference_pb2.StoreStatus:
    """The store, idle and no longer counting: blocks of earlier answers are written back late."""
    deadline = time.monotonic() + 40
    now = assert_idle(cluster).stores[0]
    while True:
        before = now
        time.sleep(0.5)
        now = assert_idle(cluster).stores[0]
        if (now.num_bytes_written, now.num_bytes_read) == (
            before.num_bytes_written,
            before.num_bytes_read,
        ):
            return now
        assert time.monotonic() < deadline, "the store goes on counting"


@over_one_transport
def test_the_stores_own_counters_saw_the_bytes(
    cluster: LocalCluster, client: SyncClient, reference: Oracle, seed: int
) -> None:
    rng = random.Random(seed + 2)
    for length in (5, 16, 33, 90):
        prompt = [rng.randrange(100, 2000) for _ in range(length)]
        before = _settled(cluster)
        answer = client.complete(prompt, max_tokens=4, temperature=0.0, ignore_eos=True)
        after = _settled(cluster)
        num_blocks = -(-length // BLOCK_SIZE)  # a tail block travels like a full one
        assert after.num_bytes_written - before.num_bytes_written == num_blocks * after.frame_bytes
        # A worker tells of its reads with its next renewal or release: some may be older.
        num_bytes_read = after.num_bytes_read - before.num_bytes_read
        assert num_bytes_read >= num_blocks * after.frame_bytes
        assert num_bytes_read % after.frame_bytes == 0
        assert leg(answer, "decode").num_bytes_read == num_blocks * after.frame_bytes
        assert leg(answer, "prefill").num_bytes_written == num_blocks * after.frame_bytes
        assert answer.provenance.legs[0].transport == cluster.config.transport


@over_one_transport
def test_a_second_prompt_computes_only_what_follows_its_last_full_block(
    cluster: LocalCluster, client: SyncClient, reference: Oracle, seed: int
) -> None:
    rng = random.Random(seed + 3)
    for length in (1, 15, 16, 17, 32, 33, 100):
        prompt = [rng.randrange(100, 2000) for _ in range(length)]
        options = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        first = client.complete(prompt, **options)
        second = client.complete(prompt, **options)
        num_cached = (length - 1) // BLOCK_SIZE * BLOCK_SIZE
        assert second.token_ids == first.token_ids
        assert leg(second, "prefill").num_tokens_computed == length - num_cached
        assert second.usage.num_cached_tokens == num_cached
        if length == 100:
            # A new life of the prefill worker has an empty device cache: the store must give it.
            cluster.restart("prefill-0")
            cluster.wait_ready(60)
            third = client.complete(prompt, **options)
            assert third.token_ids == first.token_ids
            assert leg(third, "prefill").num_tokens_local == 0
            assert leg(third, "prefill").num_tokens_from_store == num_cached
            assert leg(third, "prefill").num_tokens_computed == length - num_cached
            assert leg(third, "prefill").incarnation != leg(first, "prefill").incarnation


@over_one_transport
def test_the_index_in_redis_knows_what_the_store_holds(
    cluster: LocalCluster, client: SyncClient, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """`baton audit` compares them, hash by hash, once the store has told Redis what is new."""

    def audited() -> dict[str, Any]:
        assert cli.main(["audit", "--redis", cluster.redis_url, "--json"]) == 0
        (store,) = json.loads(capsys.readouterr().out)["stores"]
        assert store["num_missing"] == store["num_false"] == 0
        found: dict[str, Any] = store
        return found

    before = audited()
    prompt = [random.Random(seed + 5).randrange(100, 2000) for _ in range(70)]
    client.complete(prompt, max_tokens=2, temperature=0.0, ignore_eos=True)
    deadline = time.monotonic() + 10
    while audited()["num_right"] < before["num_right"] + 70 // BLOCK_SIZE:
        assert time.monotonic() < deadline, "the prompt's blocks are not in the index"
    assert list(client.status().problems) == []


@over_one_transport
def test_one_token_never_touches_decode(
    cluster: LocalCluster, client: SyncClient, reference: Oracle, seed: int
) -> None:
    (prompt,) = prompts(reference, random.Random(seed + 4), 1)
    (right,) = reference.greedy(prompt, 1)
    before = {worker.worker_id: worker.num_output_tokens for worker in client.status().workers}
    by_length = client.complete(prompt, max_tokens=1, temperature=0.0, ignore_eos=True)
    assert by_length.token_ids == (right,)
    assert by_length.finish_reason == "length"
    by_stop = client.complete(
        prompt, max_tokens=9, temperature=0.0, ignore_eos=True, stop_token_ids=[right]
    )
    assert by_stop.finish_reason == "stop_token"
    assert by_stop.stop_token_id == right
    for answer in (by_length, by_stop):
        assert [one.role for one in answer.provenance.legs] == ["prefill"]
    after = {worker.worker_id: worker.num_output_tokens for worker in assert_idle(cluster).workers}
    assert after["decode-0"] == before["decode-0"]


@over_one_transport
def test_text_streams_in_pieces_that_join_to_the_whole(
    client: SyncClient, reference: Oracle
) -> None:
    chunks = list(client.generate("Once upon a time", max_tokens=40, temperature=0.0))
    text = "".join(chunk.text for chunk in chunks)
    ids = [token for chunk in chunks for token in chunk.token_ids]
    assert len(chunks) > 3
    kept = [token for token in ids if token not in reference.eos_token_ids]
    assert text == reference.tokenizer.decode(kept, skip_special_tokens=True)
    # A stop string is cut where it begins, and what overshot it is not counted.
    word = text.split()[4]
    cut = client.complete("Once upon a time", max_tokens=40, temperature=0.0, stop=[word])
    assert cut.finish_reason == "stop_string"
    assert cut.stop_string == word
    assert cut.text == text[: text.index(word)]
    assert cut.usage.num_output_tokens == len(cut.token_ids) < len(ids)


@over_one_transport
def test_a_prompt_meets_what_its_own_tenants_left_and_nothing_else(
    cluster: LocalCluster, client: SyncClient, reference: Oracle, seed: int
) -> None:
    """The same prompt from each tenant, twice: a and b share a scope (conftest.py) and hit each
    other's blocks from the first time on; a tenant called like the scope hits only its own."""
    rng = random.Random(seed + 6)
    prompt = [rng.randrange(100, 2000) for _ in range(200)]
    expected = reference.greedy(prompt, 4)
    full = (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    seen: dict[str, list[int]] = {}
    for tenant in ("a", "b", "c", "team", "") * 2:
        answer = client.complete(prompt, max_tokens=4, temperature=0.0, tenant=tenant)
        assert list(answer.token_ids) == expected
        num_cached = len(prompt) - leg(answer, "prefill").num_tokens_computed
        seen.setdefault(tenant, []).append(num_cached)
    assert seen == {
        "a": [0, full],
        "b": [full, full],
        "c": [0, full],
        "team": [0, full],
        "": [0, full],
    }
