"""Lookups per second in the prefix index, in a real Redis, by the code that routers and stores run.

python -m benchmarks.prefix_index --blocks 3000000 --nodes 8 --lookups 2000
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import redis.asyncio
from rich.progress import track

from baton.cluster.local_cluster import find_redis_server
from benchmarks import harness
from kvstore import index
from kvstore.block_changes import ChangeLog
from kvstore.index import PrefixIndex
from kvstore.index_publisher import PrefixIndexPublisher
from process import registry
from protos import inference_pb2

CALL_S = 30.0
FILL_S = 600.0
BLOCK_SIZE = 16
FINGERPRINT = "ab" * 32
CONCURRENCY = (1, 8, 32)

Chains = list[list[bytes]]


@contextlib.asynccontextmanager
async def running_redis() -> AsyncIterator[tuple[str, redis.asyncio.Redis]]:
    """Run a Redis on a socket file, without persistence. Yields: its URL, and a client of it."""
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        socket = Path(folder) / "redis.sock"
        argv = (str(find_redis_server()), "--port", "0", "--unixsocket", str(socket))
        options = ("--save", "", "--appendonly", "no", "--dir", folder)
        with harness.child(*argv, *options, stdout=subprocess.DEVNULL):
            url = f"unix://{socket}"
            client = registry.connect_redis(url, CALL_S)
            async with asyncio.timeout(CALL_S):
                while not await _pings(client):
                    await asyncio.sleep(0.02)
            yield url, client
            await client.aclose()


async def _pings(client: redis.asyncio.Redis) -> bool:
    try:
        return bool(await client.ping())
    except registry.REDIS_FAILURES:
        return False


def prompts_of(rng: random.Random, num_prompts: int, num_blocks: int) -> Chains:
    """Make the chain hashes of prompts that share nothing."""
    return [[rng.randbytes(16) for _ in range(num_blocks)] for _ in range(num_prompts)]


def place(
    rng: random.Random, chains: Chains, nodes: Sequence[str], num_blocks: int
) -> dict[str, list[bytes]]:
    """Choose which hashes each node holds: prefixes of the prompts, of every length, so that
    presence is prefix-closed; and others that no prompt asks for, up to `num_blocks` in all."""
    held: dict[str, list[bytes]] = {node: [] for node in nodes}
    for chain in chains:
        for node in nodes:
            held[node] += chain[: rng.randint(0, len(chain))]
    per_node = num_blocks // len(nodes)
    for node, hashes in held.items():
        if len(hashes) > per_node:
            raise ValueError(f"{node}: the prompts alone fill it; ask for more blocks")
        hashes += [rng.randbytes(16) for _ in range(per_node - len(hashes))]
    return held


@contextlib.asynccontextmanager
async def published(redis_url: str, held: Mapping[str, list[bytes]]) -> AsyncIterator[float]:
    """Publish every node's hashes as its store would; they are removed at the end. Yields:
    seconds."""
    async with contextlib.AsyncExitStack() as stack:
        began = time.perf_counter()
        for node, hashes in track(held.items(), "filling", console=harness.CONSOLE):
            publisher = PrefixIndexPublisher(
                redis_url,
                node_id=node,
                incarnation=_life(node),
                status=inference_pb2.StoreStatus,
                changes=ChangeLog(),
                snapshot=partial(in_pieces, hashes),
                heartbeat_s=FILL_S,  # none disturbs the measurement
                heartbeat_ttl_s=2 * FILL_S,
                timeout_s=CALL_S,
            )
            publisher.start()
            stack.push_async_callback(publisher.stop)
            async with asyncio.timeout(FILL_S):
                while not publisher.synced:
                    await asyncio.sleep(0.01)
        yield time.perf_counter() - began


def in_pieces(hashes: list[bytes], num_hashes: int) -> list[list[bytes]]:
    """Cut hashes into lists, as a store's snapshot."""
    return [hashes[at : at + num_hashes] for at in range(0, len(hashes), num_hashes)]


def _life(node: str) -> bytes:
    return node.encode().ljust(16, b"-")


Call = Callable[[Sequence[bytes]], Awaitable[Any]]


async def timed(
    call: Call, chains: Chains, num_calls: int, concurrency: int
) -> tuple[float, list[float]]:
    """Make calls, so many at once. Returns: calls per second, and how long each took."""
    latencies: list[float] = []
    numbers = iter(range(num_calls))

    async def caller() -> None:
        for number in numbers:
            began = time.perf_counter()
            await call(chains[number % len(chains)])
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(concurrency)))
    return num_calls / (time.perf_counter() - began), latencies


async def measure(
    num_blocks: int,
    num_nodes: int,
    num_prompts: int,
    prompt_blocks: int,
    num_lookups: int,
    seed: int,
) -> dict[str, Any]:
    """Measure all figures of the prefix index."""
    rng = random.Random(seed)
    nodes = [f"node-{at}" for at in range(num_nodes)]
    lives = {node: _life(node).hex() for node in nodes}
    chains = prompts_of(rng, num_prompts, prompt_blocks)
    held = place(rng, chains, nodes, num_blocks)
    lengths = {node: set(hashes) for node, hashes in held.items()}
    async with running_redis() as (url, client), published(url, held) as fill_s:
        num_bytes = int((await client.info("memory"))["used_memory"])
        found_by = PrefixIndex(client, CALL_S)
        for chain in chains[:20]:
            _check(await found_by.lookup(chain, lives), chain, lengths)
        nothing = client.register_script("return 0")
        keys = [index.index_key(node, life) for node, life in lives.items()]

        async def lookup(chain: Sequence[bytes]) -> None:
            await found_by.lookup(chain, lives)

        async def round_trip(chain: Sequence[bytes]) -> None:
            await nothing(keys=keys, args=[b"".join(chain)])

        rows = []
        for concurrency in CONCURRENCY:
            await timed(lookup, chains, 50, concurrency)  # warm
            ceiling, bare = await timed(round_trip, chains, num_lookups, concurrency)
            rate, latencies = await timed(lookup, chains, num_lookups, concurrency)
            rows.append(
                {
                    "concurrency": concurrency,
                    "lookups_per_s": round(rate),
                    "round_trips_per_s": round(ceiling),
                    "share_of_round_trip": round(rate / ceiling, 3),
                    **harness.cuts(latencies, "us", 1e6),
                    "round_trip_p50_us": harness.cuts(bare, "us", 1e6)["p50_us"],
                }
            )
    num_held = sum(len(hashes) for hashes in held.values())
    return {
        "num_blocks": num_held,
        "num_nodes": num_nodes,
        "prompt_blocks": prompt_blocks,
        "fill_s": round(fill_s, 2),
        "published_per_s": round(num_held / fill_s),
        "redis_bytes_per_block": round(num_bytes / num_held, 1),
        "figures": rows,
    }


def _check(
    found: Mapping[str, int], chain: Sequence[bytes], held: Mapping[str, set[bytes]]
) -> None:
    """The index must be right, or its speed means nothing."""
    for node, num_blocks in found.items():
        is_there = [chain_hash in held[node] for chain_hash in chain]
        right = is_there.index(False) if False in is_there else len(chain)
        if num_blocks != right:
            raise RuntimeError(f"{node}: {num_blocks} blocks found, {right} are there")


@harness.case
@click.option("--blocks", default=3_000_000, help="over all nodes")
@click.option("--nodes", default=8)
@click.option("--prompts", default=200, help="different ones")
@click.option("--prompt-blocks", default=1024)
@click.option("--lookups", default=2000)
@click.option("--seed", default=0)
def main(
    blocks: int, nodes: int, prompts: int, prompt_blocks: int, lookups: int, seed: int
) -> dict[str, Any]:
    """Lookups per second in the prefix index: prompts over several nodes, 1, 8 and 32 at once, and
    how many bytes Redis takes for a block.

    The ceiling is the same round trip with a script that does nothing: the same arguments, the same
    connection.
    """
    figures = asyncio.run(measure(blocks, nodes, prompts, prompt_blocks, lookups, seed))
    harness.show("lookups", figures["figures"])
    return figures


if __name__ == "__main__":
    main()
