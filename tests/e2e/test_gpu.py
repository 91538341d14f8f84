"""Whole clusters whose engines compute, and keep their KV, on GPUs: the same tokens as one engine
alone on such a GPU, blocks that really moved between devices through the store, a killed worker.

On two GPUs if there are two, else all workers on one. Sums on a GPU depend on the batch's shape, so
where tokens must be equal requests come one at a time: the same shapes on both sides."""

from __future__ import annotations

import asyncio
import functools
import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from baton import ClusterConfig, LocalCluster
from baton.answers import Completion
from baton.client import Client, SyncClient
from baton.cluster import command_lines as cluster_plan
from baton.cluster.command_lines import ProcessSpec
from baton.errors import ClusterError
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.request import Sampling
from tests.harness.cluster import (
    BLOCK_SIZE,
    assert_idle,
    leg,
    oracle,
    prompts,
    run_engine,
    streamed,
)

_NO_GPU = "" if torch.cuda.is_available() else "NO GPU TEST: torch finds no CUDA device"
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(_NO_GPU), reason=_NO_GPU),
]

MODEL = ClusterConfig().model
MAX_TOKENS = 24
BUDGET_S = 60.0
Record = Callable[[str, object], None]


def gpus() -> str:
    """For `--device`: two where there are two."""
    return "cuda:0,cuda:1" if torch.cuda.device_count() > 1 else "cuda:0"


@functools.cache
def one_engine() -> LLMEngine:
    """Both roles in one, with a cache that leaves a cluster's workers their shares of the GPU."""
    config = EngineConfig(model=MODEL, device="cuda:0", num_threads=1, kv_bytes=2**30)
    return load_engine(config)


def alone(prompt: Sequence[int], sampling: Sampling, name: str) -> list[int]:
    """What one engine says, with nothing cached."""
    (tokens,) = run_engine(one_engine(), [(prompt, sampling)], prefix_cache=name)
    return tokens


def assert_accounts(answer: Completion) -> None:
    """Each leg's sources sum up to the prompt, nothing failed, decode computed nothing of it."""
    for one in answer.provenance.legs:
        total = one.num_tokens_computed + one.num_tokens_local + one.num_tokens_from_store
        assert total == answer.usage.num_prompt_tokens, one
        assert not one.recomputed and not one.not_stored, one
    assert leg(answer, "decode").num_tokens_computed == 0


def say_links(cluster: LocalCluster, record: Record) -> None:
    """What the workers measured of their ways to the store, into the record."""
    with SyncClient(cluster.address) as client:
        for worker in client.status().workers:
            record(f"{worker.worker_id} on {worker.device}", str(worker.links))


# Not of the module: it has its shares of the GPU as long as it lives, and other clusters follow.
@pytest.fixture(params=["shm", "grpc"])
def cluster(request: pytest.FixtureRequest) -> Iterator[LocalCluster]:
    config = ClusterConfig(port=0, device=gpus(), transport=request.param)
    with LocalCluster(config) as running:
        yield running
        assert_idle(running)


def test_tokens_equal_one_engine_on_the_same_gpu(
    cluster: LocalCluster, seed: int, scale: Callable[[int], int], record_property: Record
) -> None:
    transport = cluster.config.transport
    wanted = prompts(oracle(MODEL), random.Random(seed), max(40, scale(200)))
    chosen = [{"temperature": index % 2 * 0.8, "seed": index} for index in range(len(wanted))]
    expected = [
        alone(prompt, Sampling(MAX_TOKENS, ignore_eos=True, **one), f"{seed}-{transport}-{index}")
        for index, (prompt, one) in enumerate(zip(wanted, chosen, strict=True))
    ]
    say_links(cluster, record_property)
    record_property("prompts, each cold and as a hit", len(wanted))
    with SyncClient(cluster.address) as client:
        for turn in ("cold", "hit"):
            began = time.monotonic()
            answers = [
                client.complete(
                    prompt, max_tokens=MAX_TOKENS, ignore_eos=True, timeout_s=BUDGET_S, **one
                )
                for prompt, one in zip(wanted, chosen, strict=True)
            ]
            record_property(f"{turn}: seconds", round(time.monotonic() - began, 2))
            for answer in answers:
                assert_accounts(answer)
                assert {one.transport for one in answer.provenance.legs} == {transport}
            num_bytes = sum(answer.provenance.num_bytes_moved for answer in answers)
            record_property(f"{turn}: bytes moved", num_bytes)
            equal = [
                list(answer.token_ids) == right
                for answer, right in zip(answers, expected, strict=True)
            ]
            record_property(f"{turn}: equal to one engine", sum(equal))
            computed = [leg(answer, "prefill").num_tokens_computed for answer in answers]
            record_property(f"{turn}: prompt tokens computed", sum(computed))
            if turn == "cold":
                assert all(equal) and num_bytes > 0
            else:
                # What is left of a prompt is computed in a step of another shape than the whole.
                assert sum(equal) >= 0.95 * len(equal)
                assert max(computed) <= BLOCK_SIZE


async def test_a_killed_prefill_worker_leaves_every_stream_exact(
    seed: int, record_property: Record
) -> None:
    """kill -9 in the middle of eight streams; then its next life finds in the store what the one
    before it computed, and brings it into its GPU."""
    config = ClusterConfig(
        port=0,
        num_prefill=2,
        num_decode=2,
        device=gpus(),
        overrides=("worker.limits.lease_ttl_s=5.0",),
    )
    wanted = prompts(oracle(MODEL), random.Random(f"{seed}-kill"), 8)
    sampling = Sampling(max_tokens=2 * MAX_TOKENS, ignore_eos=True)
    expected = [alone(prompt, sampling, f"{seed}-kill-{i}") for i, prompt in enumerate(wanted)]
    pairs = LocalCluster(config)
    await asyncio.to_thread(pairs.start)
    victims = "prefill-0", "prefill-1"
    try:
        for victim in victims:
            started = asyncio.Event()
            async with Client(pairs.address) as client:
                options = {"temperature": 0.0, "ignore_eos": True, "timeout_s": BUDGET_S}
                streams = [
                    asyncio.create_task(
                        streamed(client, prompt, started, max_tokens=2 * MAX_TOKENS, **options)
                    )
                    for prompt in wanted
                ]
                async with asyncio.timeout(BUDGET_S):
                    await started.wait()
                await asyncio.to_thread(pairs.kill, victim)
                answers = await asyncio.gather(*streams)
            num_exact = sum(
                list(answer.token_ids) == right
                for answer, right in zip(answers, expected, strict=True)
            )
            record_property(f"streams exact, {victim} killed", f"{num_exact} of {len(wanted)}")
            assert num_exact == len(wanted)
            began = time.monotonic()
            await asyncio.to_thread(pairs.wait_ready, 120)
            record_property(f"seconds until {victim} is back", round(time.monotonic() - began, 2))
            await asyncio.to_thread(assert_idle, pairs)
        for victim in victims:
            await asyncio.to_thread(pairs.kill, victim)
        await asyncio.to_thread(pairs.wait_ready, 120)
        # None has a cache of its own: what is not computed now is the store's.
        num_from_store = 0
        async with Client(pairs.address) as client:
            for prompt, right in zip(wanted, expected, strict=True):
                again = await client.complete(
                    list(prompt), max_tokens=4, temperature=0.0, ignore_eos=True
                )
                assert list(again.token_ids) == right[:4]
                num_from_store += leg(again, "prefill").num_tokens_from_store
        assert num_from_store > 0
        record_property("prompt tokens that next lives took from the store", num_from_store)
        await asyncio.to_thread(assert_idle, pairs)
    finally:
        await asyncio.to_thread(pairs.stop)


def test_nixl_to_a_store_on_the_same_machine_is_refused_by_name() -> None:
    config = ClusterConfig(port=0, device=gpus(), overrides=('worker.transport="nixl"',))
    with pytest.raises(ClusterError, match="set transport to shm"), LocalCluster(config):
        raise AssertionError("it started")


def _far_store(specs: Sequence[ProcessSpec], slab_dir: str) -> list[ProcessSpec]:
    """Stores whose shared memory nobody else can open, like another machine's: a file system of
    their own lies over its folder."""
    mount = 'mount -t tmpfs tmpfs "$0" && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mount, slab_dir)
    return [ProcessSpec(spec.name, spec.kind, (*prefix, *spec.argv)) for spec in specs]


def test_nixl_moves_a_gpus_blocks_to_a_store_elsewhere(
    monkeypatch: pytest.MonkeyPatch, seed: int, record_property: Record
) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-m", "true"]).returncode:
        pytest.skip("no mount namespace of one's own here")
    pytest.importorskip("nixl_cu13._api", reason="NIXL is not installed")
    stores = cluster_plan.stores

    def elsewhere(config: ClusterConfig, **options: object) -> list[ProcessSpec]:
        return _far_store(stores(config, **options), str(options["slab_dir"]))  # type: ignore[arg-type]

    monkeypatch.setattr(cluster_plan, "stores", elsewhere)
    config = ClusterConfig(port=0, device=gpus(), overrides=('worker.transport="nixl"',))
    wanted = prompts(oracle(MODEL), random.Random(f"{seed}-nixl"), 20)
    with LocalCluster(config) as cluster, SyncClient(cluster.address) as client:
        say_links(cluster, record_property)
        num_bytes = 0
        for index, prompt in enumerate(wanted):
            answer = client.complete(
                prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=BUDGET_S
            )
            sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
            assert list(answer.token_ids) == alone(prompt, sampling, f"{seed}-nixl-{index}")
            assert_accounts(answer)
            assert {one.transport for one in answer.provenance.legs} == {"nixl"}
            num_bytes += answer.provenance.num_bytes_moved
        record_property("prompts equal over nixl", len(wanted))
        record_property("bytes moved", num_bytes)
        assert_idle(cluster)


@pytest.mark.parametrize(
    ("handover", "way"),
    [("direct", "grpc"), ("direct", "nixl"), ("direct", "cuda_ipc"), ("auto", "nixl")],
)
def test_decode_reads_the_prefill_workers_gpu(
    handover: str, way: str, seed: int, record_property: Record
) -> None:
    """The direct handover: out of one engine's cache into the other's, the store written behind."""
    if way == "nixl":
        pytest.importorskip("nixl_cu13._api", reason="NIXL is not installed")
    config = ClusterConfig(port=0, device=gpus(), handover=handover, direct_transport=way)
    wanted = prompts(oracle(MODEL), random.Random(f"{seed}-{way}"), 30)
    sampling = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)
    with LocalCluster(config) as cluster, SyncClient(cluster.address) as client:
        answers = [
            client.complete(
                prompt, max_tokens=MAX_TOKENS, temperature=0.0, ignore_eos=True, timeout_s=BUDGET_S
            )
            for prompt in wanted
        ]
        say_links(cluster, record_property)
        num_direct = 0
        for index, (prompt, answer) in enumerate(zip(wanted, answers, strict=True)):
            assert list(answer.token_ids) == alone(
                prompt, sampling, f"{seed}-{handover}-{way}-{index}"
            )
            assert_accounts(answer)
            if leg(answer, "prefill").handover == "direct":
                decode = leg(answer, "decode")
                assert decode.num_tokens_direct == len(prompt) - decode.num_tokens_local
                num_direct += 1
        assert num_direct == len(wanted) or handover == "auto"
        record_property("prompts equal", len(wanted))
        record_property("prompts read directly", num_direct)
        moved = sum(leg(answer, "decode").num_bytes_read for answer in answers)
        record_property("bytes read by decode", moved)
        assert_idle(cluster)


def test_the_command_line_serves_from_gpus(tmp_path: Path, record_property: Record) -> None:
    """What a user types: `baton up --device cuda`, then `baton generate`."""
    from tests.e2e.test_cli import Up

    up = Up(tmp_path, "--device", gpus())
    try:
        assert f"on {gpus()}, KV over shm" in up.wait_ready()
        said = up.baton("generate", "Once upon a time", "--max-tokens", "24", "--json")
        value = json.loads(said.stdout)
        assert value["usage"]["num_output_tokens"] > 0
        record_property("baton generate", value["text"])
        shown = up.baton("status").stdout
        record_property("baton status", shown)
        for device in gpus().split(","):
            assert device in shown
    finally:
        up.end()
