"""The prefix cache's tree: match, insert, reserve, put back and evict for 100,000 blocks.

Two shapes: one chain of all blocks, and a forest of prompts of 64 blocks, each of which shares 32
with 99 others. The ceiling is a flat dict from hash to block that does nothing else: no references,
no order of eviction, no law. Hashes are made before. Figures are nanoseconds per block, the median
of the rounds. The last line printed is one JSON object.

    python -m benchmarks.radix --blocks 100000 --rounds 5

Nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.context import context, publish
from engine.kv.block_pool import BlockPool
from engine.kv.radix_tree import RadixTree

Chains = list[list[bytes]]
Cost = dict[str, float]
"""Operation -> seconds."""

_PROMPT_BLOCKS, _SHARED_BLOCKS, _SHARERS = 64, 32, 100


def one_chain(num_blocks: int) -> Chains:
    """All blocks follow one another."""
    return [[index.to_bytes(16, "little") for index in range(num_blocks)]]


def forest(num_blocks: int) -> Chains:
    """Prompts whose first half is shared by many; `num_blocks` distinct blocks, or a few less."""
    chains: Chains = []
    num_made = 0

    def make(count: int) -> list[bytes]:
        nonlocal num_made
        num_made += count
        return [index.to_bytes(16, "little") for index in range(num_made - count, num_made)]

    shared: list[bytes] = []
    while num_made + _PROMPT_BLOCKS <= num_blocks:
        if len(chains) % _SHARERS == 0:
            shared = make(_SHARED_BLOCKS)
        chains.append(shared + make(_PROMPT_BLOCKS - _SHARED_BLOCKS))
    return chains


def with_tree(chains: Chains, num_blocks: int) -> Cost:
    """One life of every block: reserved, cached, given back, matched, reused, evicted."""
    tree = RadixTree(BlockPool(num_blocks))
    pool = tree.pool
    cost: Cost = {}
    held: list[tuple[int, ...]] = []

    def reserve() -> None:
        held.extend(tree.reserve(chain, len(chain))[0] for chain in chains)

    def put_back() -> None:
        while held:
            pool.put_back(reversed(held.pop()))

    def compute() -> None:
        """As an engine does: a prompt that shares is reserved when the first is cached."""
        for chain in chains:
            block_ids, num_shared = tree.reserve(chain, len(chain))
            parent = chain[num_shared - 1] if num_shared else b""
            for index in range(num_shared, len(chain)):
                tree.insert(parent, chain[index], block_ids[index])
                parent = chain[index]
            held.append(block_ids)

    _time(cost, "reserve and insert", compute)
    pool.check_integrity()
    tree.check_integrity()
    _time(cost, "put back", put_back)
    _time(cost, "match", lambda: [tree.match(chain) for chain in chains])
    _time(cost, "match length", lambda: [tree.match_length(chain) for chain in chains])
    _time(cost, "reserve, all cached", reserve)
    put_back()
    num_cached = len(tree)
    _time(cost, "evict", lambda: tree.take(pool.num_blocks))
    if len(tree) or not num_cached:
        raise RuntimeError("the benchmark did not evict what it cached")
    return cost


def with_dict(chains: Chains, num_blocks: int) -> Cost:
    """The ceiling: the map alone."""
    block_of: dict[bytes, int] = {}
    cost: Cost = {}

    def insert() -> None:
        block_id = 0
        for chain in chains:
            for chain_hash in chain:
                if chain_hash not in block_of:
                    block_of[chain_hash] = block_id
                    block_id += 1

    def match(chain: list[bytes]) -> list[int]:
        matched = []
        for chain_hash in chain:
            block_id = block_of.get(chain_hash)
            if block_id is None:
                break
            matched.append(block_id)
        return matched

    _time(cost, "reserve and insert", insert)
    _time(cost, "match", lambda: [match(chain) for chain in chains])
    return cost


def _time(cost: Cost, name: str, work: Callable[[], object]) -> None:
    began = time.perf_counter()
    work()
    cost[name] = time.perf_counter() - began


def measure(chains: Chains, num_blocks: int, num_rounds: int) -> dict[str, dict[str, float]]:
    """{"tree" or "dict": {operation: nanoseconds per block of the chains}}; they take turns."""
    num_chained = sum(map(len, chains))
    runs: dict[str, list[Cost]] = {"tree": [], "dict": []}
    for _ in range(num_rounds):
        for name, run in (("tree", with_tree), ("dict", with_dict)):
            gc.collect()
            runs[name].append(run(chains, num_blocks))
    return {
        name: {
            operation: round(
                statistics.median(cost[operation] for cost in costs) / num_chained * 1e9, 1
            )
            for operation in costs[0]
        }
        for name, costs in runs.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    shapes = {"one chain": one_chain(arguments.blocks), "forest": forest(arguments.blocks)}
    costs = {
        name: measure(chains, arguments.blocks, arguments.rounds) for name, chains in shapes.items()
    }
    table = Table(title=f"nanoseconds per block, {arguments.blocks} blocks")
    for column in ("", "operation", "tree", "dict"):
        table.add_column(column, justify="right")
    for name, cost in costs.items():
        for operation, value in cost["tree"].items():
            table.add_row(name, operation, f"{value}", f"{cost['dict'].get(operation, '')}")
    console.print(table)
    result = {
        "benchmark": "radix",
        "num_blocks": arguments.blocks,
        "num_prompts": {name: len(chains) for name, chains in shapes.items()},
        "num_prompt_blocks": {name: sum(map(len, chains)) for name, chains in shapes.items()},
        "rounds": arguments.rounds,
        "ns_per_block": costs,
        "load_average": round(os.getloadavg()[0], 1),  # others' work on the same cores
        **context(),
    }
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
