"""A part dies in the middle, or all are restarted in their turn: no request fails, every stream is
exact, nothing leaks, and the next lives are met by incarnation."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from baton.client import Client
from baton.local_cluster import ClusterConfig, LocalCluster
from baton.messages import Completion
from tests.chaos.rolling import LONG_TOKENS, Load, asks
from tests.conftest import LONG
from tests.e2e.conftest import assert_idle
from tests.e2e.oracle import Oracle, oracle, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(1500 if LONG else 240)]

MODEL = ClusterConfig().model
BUDGET_S = 30.0
NUM_STREAMS = 8
MAX_TOKENS = 64
VICTIMS = ("store", "prefill-0", "prefill-1", "redis", "decode-0")
# (transport, victim). Transports differ in how they meet the store's death; the long run does all.
KILLS = [
    (transport, victim)
    for transport, victim in itertools.product(("shm", "nixl", "grpc"), VICTIMS)
    if LONG or (transport == "shm" and victim != "prefill-1") or victim == "store"
]


@pytest.fixture(scope="module")
def pairs(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    config = ClusterConfig(
        port=0,
        num_prefill=2,
        num_decode=2,
        transport=request.param,
        # Handles that nobody comes for (their router or decode worker died) are soon forgotten.
        overrides=("worker.limits.lease_ttl_s=5.0",),
    )
    with LocalCluster(config) as running:
        yield running


@pytest.fixture(scope="module")
def reference() -> Oracle:
    return oracle(MODEL)


async def _stream(
    client: Client, prompt: Sequence[int], started: asyncio.Event, request_id: str = ""
) -> Completion:
    tokens: list[int] = []
    last = None
    async for chunk in client.generate(
        list(prompt),
        max_tokens=MAX_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        timeout_s=BUDGET_S,
        request_id=request_id,
    ):
        tokens += chunk.token_ids
        started.set()
        last = chunk
    assert last is not None and last.end is not None
    end = last.end
    assert end.provenance is not None
    return Completion(
        last.request_id, "", tuple(tokens), end.finish_reason, end.usage, end.provenance
    )


async def _disturbed(
    cluster: LocalCluster, wanted: Sequence[Sequence[int]], victim: str
) -> list[Completion | BaseException]:
    """Run all streams; SIGKILL `victim` (it is restarted) once the first token has come."""
    began = time.monotonic()
    started = asyncio.Event()
    async with Client(cluster.address) as client:
        streams = [asyncio.create_task(_stream(client, prompt, started)) for prompt in wanted]
        async with asyncio.timeout(BUDGET_S):
            await started.wait()
        await asyncio.to_thread(cluster.kill, victim)
        answers = await asyncio.gather(*streams, return_exceptions=True)
    assert time.monotonic() - began < BUDGET_S + 5, "a stream outlived its deadline"
    return list(answers)


def _expected(reference: Oracle, wanted: Sequence[Sequence[int]]) -> list[list[int]]:
    """All MAX_TOKENS tokens of each: EOS ends none of them."""
    reference.model.generation_config.eos_token_id, eos = None, reference.eos_token_ids
    try:
        return [reference.greedy(prompt, MAX_TOKENS) for prompt in wanted]
    finally:
        reference.model.generation_config.eos_token_id = sorted(eos)


def _retried(cluster: LocalCluster, worker_id: str) -> set[str]:
    """Requests that the router gave to another prefill worker after `worker_id` failed them."""
    log = cluster.processes["router"].log_path.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in log.splitlines() if '"prefill_retried"' in line]
    return {line["request_id"] for line in lines if line["worker_id"] == worker_id}


async def _meet_both_prefill_workers(client: Client) -> None:
    """Connected, a stopped worker keeps its calls; not yet, the router soon takes another."""
    met: set[str] = set()
    for index in range(200):
        answer = await client.complete([100 + index] * 5, max_tokens=1, timeout_s=BUDGET_S)
        met.update(leg.worker_id for leg in answer.provenance.legs)
        if met >= {"prefill-0", "prefill-1"}:
            return
    raise AssertionError(f"200 prompts met only {met}")


@pytest.mark.parametrize("pairs", ["shm"], indirect=True)
async def test_a_prefill_worker_killed_before_its_answer_is_replaced(
    pairs: LocalCluster, reference: Oracle, seed: int
) -> None:
    """Stopped first, so that it surely holds prompts that it has not answered when it dies."""
    wanted = prompts(reference, random.Random(f"{seed}-stopped"), NUM_STREAMS)
    request_ids = [f"stopped-{index}" for index in range(NUM_STREAMS)]
    has_token = [asyncio.Event() for _ in wanted]
    async with Client(pairs.address) as client:
        await _meet_both_prefill_workers(client)
        os.kill(pairs.processes["prefill-0"].pid, signal.SIGSTOP)
        try:
            streams = [
                asyncio.create_task(_stream(client, prompt, started, request_id))
                for prompt, started, request_id in zip(wanted, has_token, request_ids, strict=True)
            ]
            # One ran to its end: by then the others were given to a worker long ago.
            done, _ = await asyncio.wait(
                streams, timeout=BUDGET_S / 2, return_when=asyncio.FIRST_COMPLETED
            )
            assert done, "prefill-1 serves nothing"
            without = {
                request_id
                for request_id, started in zip(request_ids, has_token, strict=True)
                if not started.is_set()
            }
        finally:
            await asyncio.to_thread(pairs.kill, "prefill-0")
        answers = await asyncio.gather(*streams)
    assert 0 < len(without) < NUM_STREAMS
    retried = _retried(pairs, "prefill-0") & set(request_ids)
    assert retried, "the router gave the stopped worker nothing"
    assert retried & without, "what it held at its death was not given to the other"
    for answer, right in zip(answers, _expected(reference, wanted), strict=True):
        assert list(answer.token_ids) == right
        (prefill,) = (leg for leg in answer.provenance.legs if leg.role == "prefill")
        assert prefill.worker_id == "prefill-1"
    await asyncio.to_thread(pairs.wait_ready, 60)
    await asyncio.to_thread(assert_idle, pairs)


@pytest.mark.parametrize(("pairs", "victim"), KILLS, indirect=["pairs"])
async def test_killing_a_part_leaves_every_stream_exact(
    pairs: LocalCluster, reference: Oracle, seed: int, victim: str
) -> None:
    rng = random.Random(f"{seed}-{victim}")
    wanted = prompts(reference, rng, NUM_STREAMS)
    answers = await _disturbed(pairs, wanted, victim)
    expected = _expected(reference, wanted)
    for answer, right in zip(answers, expected, strict=True):
        assert not isinstance(answer, BaseException), repr(answer)
        assert list(answer.token_ids) == right
    await asyncio.to_thread(pairs.wait_ready, 60)
    await asyncio.to_thread(assert_idle, pairs)
    # The new life serves, and by the usual way.
    async with Client(pairs.address) as client:
        again = await client.complete(
            list(wanted[0]), max_tokens=4, temperature=0.0, ignore_eos=True
        )
        assert list(again.token_ids) == expected[0][:4]
        assert [leg.role for leg in again.provenance.legs] == ["prefill", "decode"]
    await asyncio.to_thread(assert_idle, pairs)


@pytest.mark.parametrize("pairs", ["shm"], indirect=True)
async def test_no_request_fails_while_all_parts_are_restarted(
    pairs: LocalCluster, seed: int, scale: Callable[[int], int]
) -> None:
    """As in a rollout of every role at once, and then with fewer workers for a while. The short
    run only restarts one part of each kind, and a decode worker in the middle of a stream."""
    waves = [("prefill-0", "decode-0", "router"), ("store",)]
    waves += [("prefill-1", "decode-1", "router-1")] * LONG
    load = Load(pairs, asks(MODEL, seed, 60 if LONG else 12), num_wanted=scale(2000))
    (long,) = asks(MODEL, seed, 1, LONG_TOKENS)
    async with load, asyncio.TaskGroup() as group:
        group.create_task(load.run())
        before = {name: info.pid for name, info in pairs.processes.items()}
        for names in waves:
            await load.restart(*names)
        after = {name: info.pid for name, info in pairs.processes.items()}
        await load.restart_under(long)
        if LONG:
            await load.scale_down_and_up("prefill-0", "decode-1")
        load.is_enough = True
    assert load.num_right == load.num_asked >= load.num_wanted
    assert all(before[name] != after[name] for names in waves for name in names)
    assert load.moves["moved"] > 0, f"no stream was moved: {load.moves}"
    await asyncio.to_thread(assert_idle, pairs)
