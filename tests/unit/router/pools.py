"""Random pools of workers and requests, for tests of policies."""

from __future__ import annotations

import random
from dataclasses import replace

from services.router.config import RouterCosts
from services.router.policies import PlacementQuery, Pools, WorkerLoad
from services.router.prefixes import FoundPrefixes
from services.router.worker_views import LinkView

COSTS = RouterCosts(prefill_tokens_per_s=1000, link_bytes_per_s=1e6, decode_request_s=0.1)


def load(worker_id: str, **changes: object) -> WorkerLoad:
    base = WorkerLoad(
        worker_id=worker_id,
        fingerprint="f",
        block_size=16,
        block_bytes=1600,
        num_blocks=100,
        num_free_blocks=100,
        num_requests=0,
        num_queued_tokens=0,
        store_node_id="s",
        transport="shm",
        remote_transport="grpc",
        incarnation=f"life of {worker_id}",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def random_load(rng: random.Random, worker_id: str, stores: list[str]) -> WorkerLoad:
    """Few values of everything, so that ties are common."""
    nodes = rng.sample([*stores, "p0/lent", "p1/lent"], rng.choice([0, 0, 1, 3]))
    return load(
        worker_id,
        fingerprint=rng.choice(["f", "f", "f", "g"]),
        block_bytes=rng.choice([1600, 1600, 3200]),
        num_requests=rng.choice([0, 0, 1, 5]),
        num_queued_tokens=rng.choice([0, 0, 100, 5000]),
        num_free_blocks=rng.choice([100, 100, 5]),
        store_node_id=rng.choice([*stores, ""]),
        transport=rng.choice(["shm", "shm", "grpc"]),
        remote_transport=rng.choice(["", "grpc", "grpc"]),
        lender_node_id=rng.choice(["", f"{worker_id}/lent"]),
        is_suspect=rng.random() < 0.15,
        context_window=rng.choice([0, 512, 512, 4096]),
        links={
            node: LinkView(rng.choice([0.0, 1e3, 1e5, 9e5, 1e6]), rng.random() < 0.3)
            for node in nodes
        },
    )


def slow_case(rng: random.Random) -> tuple[Pools, PlacementQuery]:
    """Workers that differ by nothing but stores, lenders and what was measured: links that are
    slow, or degraded, decide."""
    stores = ["s", "t", "u"][: rng.randint(1, 3)]
    prefill_names, decode_names = [f"p{i}" for i in range(4)], [f"d{i}" for i in range(4)]
    transport, lends = rng.choice(["shm", "grpc"]), rng.random() < 0.5
    has_slow_prefill = rng.random() < 0.5

    def links(nodes: list[str]) -> dict[str, LinkView]:
        return {
            node: LinkView(rng.choice([2e4, 1e5, 1e6, 1e6]), rng.random() < 0.2)
            for node in nodes
            if rng.random() < 0.5
        }

    lent = [f"{name}/lent" for name in prefill_names]
    prefill = [
        load(
            name,
            store_node_id=rng.choice(stores),
            transport=transport,
            lender_node_id=f"{name}/lent" if lends else "",
            num_queued_tokens=rng.choice([0, 0, 20]),
            links=links(stores) if has_slow_prefill else {},
        )
        for name in prefill_names
    ]
    decode = [
        load(
            name,
            store_node_id=rng.choice(stores),
            transport=transport,
            num_requests=rng.choice([0, 0, 1]),
            links=links([*stores, *lent]),
        )
        for name in decode_names
    ]
    held = {store: rng.choice([2, 9]) for store in stores if rng.random() < 0.5}
    ask = PlacementQuery(
        num_prompt_tokens=300,
        max_tokens=17,
        affinity=rng.randbytes(16),
        prefixes=FoundPrefixes({("f", 16): held}),
        window=317,
    )
    return Pools.of(prefill, decode, COSTS), ask


def random_case(rng: random.Random) -> tuple[Pools, PlacementQuery]:
    """Up to nine workers of each role, and a request."""
    stores = ["s", "t", "u"][: rng.randint(1, 3)]
    prefill = [random_load(rng, f"p{i}", stores) for i in range(rng.randint(0, 9))]
    decode = [random_load(rng, f"d{i}", stores) for i in range(rng.randint(0, 9))]
    held = {store: rng.choice([2, 4, 7]) for store in stores if rng.random() < 0.6}
    num_tokens = rng.choice([10, 160, 600])
    ask = PlacementQuery(
        num_prompt_tokens=num_tokens,
        max_tokens=17,
        affinity=rng.randbytes(16),
        prefixes=FoundPrefixes({("f", 16): held}),
        needs_decode=rng.random() < 0.9,
        local={
            worker.incarnation: rng.choice([16, 160])
            for worker in rng.sample([*prefill, *decode], min(2, len(prefill) + len(decode)))
        }
        if rng.random() < 0.5
        else {},
        turn=rng.randrange(100),
        max_own_tokens=rng.choice([0, 0, 20, 1000]),
        window=num_tokens + 17,
    )
    return Pools.of(prefill, decode, COSTS), ask
