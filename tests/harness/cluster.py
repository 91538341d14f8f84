"""What the right answer is: unmodified `transformers`, and one engine that does both roles;
and when a real cluster is idle.

Prompts are real text of the bundled corpus, cut to lengths that sit on and beside block edges.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from baton import LocalCluster
from baton.answers import Completion, KvLeg
from baton.client import Client, collect_chunks
from checkpoints.resolve import resolve
from engine.config import EngineConfig
from engine.engine import LLMEngine, load_engine
from engine.request import Request
from engine.request import Sampling as Sampling
from kvstore import block_hash
from protos import inference_pb2
from tests.conftest import LONG, TURN
from tools.bundled_model import corpus

BLOCK_SIZE = 16
EDGE_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 255, 256, 257, 511, 512, 513, 599, 600)


@dataclass(frozen=True)
class Oracle:
    """A checkpoint as `transformers` loads it, in float32."""

    path: Path
    model: Any
    tokenizer: Any

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self.model.generation_config.eos_token_id
        return frozenset([eos] if isinstance(eos, int) else eos or [])

    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """The new tokens, the one that ended it included."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return [int(token) for token in out[0, len(prompt) :]]


@cache
def oracle(model: str) -> Oracle:
    path = resolve(model, files="all").path
    loaded = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return Oracle(path, loaded, transformers.AutoTokenizer.from_pretrained(path))


def prompts(source: Oracle, rng: random.Random, count: int) -> list[list[int]]:
    """`count` prompts of 1 to 600 tokens; the first ones have the edge lengths, in random order."""
    lengths = rng.sample(EDGE_LENGTHS, min(count, len(EDGE_LENGTHS)))
    lengths += [rng.randint(1, 600) for _ in range(count - len(lengths))]
    stream: list[int] = []
    documents = corpus.documents(rng.randrange(2**31), 10**9)
    cut = []
    for length in lengths:
        while len(stream) < length + 64:
            stream += source.tokenizer.encode(next(documents).text, add_special_tokens=False)
        start = rng.randrange(64)
        cut.append(stream[start : start + length])
        stream = stream[start + length :]
    return cut


@cache
def single_engine(model: str, dtype: str = "auto") -> LLMEngine:
    """One engine in this process that prefills and decodes."""
    return load_engine(EngineConfig(model=model, dtype=dtype, device="cpu", num_threads=1))


def run_engine(
    engine: LLMEngine, wanted: Sequence[tuple[Sequence[int], Sampling]], *, prefix_cache: str
) -> list[list[int]]:
    """Run all requests at once, as many as fit; returns their output tokens.

    prefix_cache: names a prefix cache; a name never used before finds nothing.
    """
    root = block_hash.root_key(prefix_cache.encode(), engine.model_info.fingerprint)
    outputs: dict[str, list[int]] = {}
    waiting = []
    for index, (prompt, sampling) in enumerate(wanted):
        outputs[str(index)] = []
        waiting.append(
            Request(
                request_id=str(index),
                prompt_token_ids=tuple(prompt),
                sampling=sampling,
                block_hasher=lambda parent, ids: block_hash.extend(root, parent, ids),
                cache_root=root,
            )
        )
    for request in waiting:
        reservation = engine.reserve(request)
        engine.start(request.request_id, num_loaded_tokens=reservation.num_local_tokens)
    while engine.has_work():
        for event in engine.step().events:
            assert event.error is None, event.error
            outputs[event.request_id].extend(event.token_ids)
    engine.check_integrity()
    return list(outputs.values())


def leg(completion: Completion, role: str) -> KvLeg:
    """The one of that role."""
    (found,) = (leg for leg in completion.provenance.legs if leg.role == role)
    return found


async def streamed(
    client: Client, prompt: Sequence[int], began: asyncio.Event, **options: Any
) -> Completion:
    """The answer to `Client.generate`. began: set once its first tokens have come."""
    chunks = []
    async for chunk in client.generate(list(prompt), **options):
        chunks.append(chunk)
        began.set()
    return collect_chunks(chunks)


TRANSPORTS = ("shm", "nixl", "grpc")
DRAWN_TRANSPORT = TRANSPORTS[1 + TURN % 2]
"""What a cluster has that may have any: by the seed one of those that are not the default."""
STORE_SIZE = "store.capacity_bytes=128_000_000"
"""For `overrides`: room for 2,000 blocks of a bundled model. A store that is given no size takes a
tenth of the free memory, and starts later by the time in which the kernel clears it."""
# Most tokens of a step: chunks of a prompt that do (48) and do not (37) divide into blocks, and one
# that holds most prompts whole.
CHUNK_TOKENS = (512, 48, 37)


def _clusters() -> list[tuple[str, int]]:
    """(transport, chunk) of each cluster: the long run has every transport with both chunks that
    cut prompts; else shared memory has one, by the seed (the others: DRAWN_TRANSPORT)."""
    if LONG:
        return list(itertools.product(TRANSPORTS, CHUNK_TOKENS[1:]))
    return [("shm", CHUNK_TOKENS[TURN])]


CLUSTERS = [
    pytest.param((transport, chunk), id=f"{transport}-chunk{chunk}")
    for transport, chunk in _clusters()
]


def assert_idle(
    cluster: LocalCluster, timeout_s: float = 40.0
) -> inference_pb2.GetClusterStatusReply:
    """Every conservation law holds and nothing is held for anybody: no request, no lease, no block.

    Leases of handles that nobody came for lapse by themselves, so this waits, within a bound.
    """
    deadline = time.monotonic() + timeout_s
    with cluster.connect() as client:
        while True:
            status = client.status()
            found = complaints(status)
            if not found:
                return status
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


def problems_of(status: inference_pb2.GetClusterStatusReply) -> list[str]:
    """But how fast links are: that is the machine's, which may have other things to do."""
    return [problem for problem in status.problems if " is degraded: " not in problem]


def complaints(status: inference_pb2.GetClusterStatusReply) -> list[str]:
    """What is still held, or broken."""
    found = [f"{status.num_requests_in_flight} requests in the router"] * bool(
        status.num_requests_in_flight
    )
    for worker in status.workers:
        held = {
            "waiting": worker.num_waiting,
            "running": worker.num_running,
            "holding": worker.num_holding,
            "quarantined": worker.num_quarantined_blocks,
            "lent": worker.num_lent_blocks,
        }
        found += [f"{worker.worker_id}: {count} {name}" for name, count in held.items() if count]
        if worker.num_free_blocks + worker.num_cached_blocks != worker.num_blocks:
            found.append(f"{worker.worker_id}: blocks are referenced")
        if worker.integrity_error:
            found.append(f"{worker.worker_id}: {worker.integrity_error}")
    for store in status.stores:
        held = {
            "writing": store.num_writing,
            "pinned": store.num_pinned,
            "quarantined": store.num_quarantined,
            "leases": store.num_leases,
        }
        found += [f"{store.node_id}: {count} {name}" for name, count in held.items() if count]
        if store.num_free + store.num_committed != store.num_frames:
            found.append(f"{store.node_id}: frames do not sum up")
        if store.integrity_error:
            found.append(f"{store.node_id}: {store.integrity_error}")
    return found
