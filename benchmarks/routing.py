"""How long a choice of workers takes at 10, 100 and 1,000 workers, and how much of the prompts each
policy finds cached.

The choice is measured as the router makes it: loads that changed are made again, the policy
chooses, the choice is recorded; and the policy by itself, beside trying all pairs with the same
terms, which is what the search spares. The hit rates come from a replay in simulated time
(benchmarks/routing_replay.py) of a trace in Mooncake's format (--trace), or of one that is drawn;
the ceiling is one endless cache. The last line printed is one JSON object.

    python -m benchmarks.routing --workers 10 100 1000

Nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console
from rich.table import Table

from baton.load.workload import TraceLine, read_trace
from benchmarks.context import context, publish
from benchmarks.routing_replay import Hardware, Replay, ceiling, conversations
from services.router import policies
from services.router.candidates import Candidates
from services.router.config import RouterCosts, RoutingPolicy
from services.router.decisions import Decision, Decisions
from services.router.decode_streams import DecodeStreams
from services.router.policies.scored import ScoredPolicy
from services.router.policy import DECODE, PREFILL, Ask, Pools
from services.router.prefill_client import PrefillClient
from services.router.prefix_runs import Prefixes
from services.router.probation import Probation
from services.router.registry import Registry
from services.router.views import Link, ServedModel, Snapshot, WorkerView

NAMES: Sequence[RoutingPolicy] = get_args(RoutingPolicy)
WORKERS_PER_NODE = 8
NUM_LINKS = 8
"""Other nodes that each worker has met."""


class _Standing:
    """Registry, streams and calls of a router that stand still but for what the benchmark says."""

    def __init__(self, workers: Sequence[WorkerView]) -> None:
        self.snapshot = Snapshot(tuple(workers), (), True)
        self.on_change: list[Callable[[str], None]] = []
        self.queued: dict[str, int] = {}

    def is_up(self, worker_id: str) -> bool:
        return True

    def load(self, worker: WorkerView) -> None:
        return None

    def num_queued_tokens(self, worker_id: str) -> int:
        return self.queued.get(worker_id, 0)

    def set_queued(self, worker_id: str, num_tokens: int) -> None:
        self.queued[worker_id] = num_tokens
        for tell in self.on_change:
            tell(worker_id)


def _views(num_workers: int, rng: random.Random) -> list[WorkerView]:
    nodes = [f"node-{i}" for i in range(max(1, num_workers // WORKERS_PER_NODE))]
    views = []
    for index in range(num_workers):
        role = PREFILL if index % 2 else DECODE
        name = f"{role}-{index}"
        met = rng.sample(nodes, min(NUM_LINKS, len(nodes)))
        views.append(
            WorkerView(
                worker_id=name,
                role=role,
                address="127.0.0.1:1",
                incarnation=f"life of {name}",
                model="m",
                fingerprint="ab" * 32,
                tokenizer_digest="",
                block_size=16,
                block_bytes=2 << 20,
                num_blocks=30_000,
                num_free_blocks=rng.randrange(20_000, 30_000),
                num_requests=rng.randrange(64),
                context_window=131_072,
                vocab_size=128_000,
                store_node_id=nodes[index % len(nodes)],
                transport="shm",
                remote_transport="nixl",
                lender_node_id=f"{name}/lent" if role == PREFILL else "",
                is_draining=False,
                dtype="bfloat16",
                links={node: Link(20e9 * rng.uniform(0.5, 1.0)) for node in met},
            )
        )
    return views


def _ask(num_workers: int, turn: int, rng: random.Random) -> Ask:
    nodes = [f"node-{i}" for i in range(max(1, num_workers // WORKERS_PER_NODE))]
    held = {node: rng.randrange(1, 512) for node in rng.sample(nodes, min(4, len(nodes)))}
    return Ask(
        num_prompt_tokens=8192,
        max_tokens=256,
        affinity=rng.randbytes(16),
        prefixes=Prefixes({("ab" * 32, 16): held}),
        turn=turn,
        window=8448,
    )


def _timed(work: Callable[[int], Any], count: int) -> dict[str, float]:
    """Microseconds of this thread's CPU at the median and at 99 %."""
    times = []
    for number in range(count):
        begin_s = time.thread_time()
        work(number)
        times.append(time.thread_time() - begin_s)
    cuts = statistics.quantiles(times, n=100)
    return {"p50_us": cuts[49] * 1e6, "p99_us": cuts[98] * 1e6}


def _decisions(num_workers: int, count: int, rng: random.Random) -> dict[str, dict[str, float]]:
    costs, views = RouterCosts(prefill_tokens_per_s=33_000), _views(num_workers, rng)
    standing = _Standing(views)
    candidates = Candidates(
        cast(Registry, standing),
        cast(DecodeStreams, standing),
        cast(PrefillClient, standing),
        Probation(first_s=1, most_s=30, clock=time.monotonic),
        served=ServedModel(("m",), ""),
        costs=costs,
    )
    prefill_ids = [view.worker_id for view in views if view.role == PREFILL]
    asks = [_ask(num_workers, turn, rng) for turn in range(count)]
    record = Decisions(1024)
    joint = policies.make("joint", costs)

    def whole(number: int) -> None:
        # One prompt was sent since the last choice, and one was answered.
        for _ in range(2):
            standing.set_queued(rng.choice(prefill_ids), rng.randrange(60_000))
        pools, ask = candidates.pools(), asks[number]
        choice = joint.choose(pools, ask)
        record.add("t", f"r{number}", Decision("first", joint, pools, ask, choice, 0.0, 0.0))

    found = {"joint, whole decision": _timed(whole, count)}
    candidates.check_integrity()
    pools = candidates.pools()
    for name in NAMES:
        policy = policies.make(name, costs)
        found[name] = _timed(lambda number, p=policy: p.choose(pools, asks[number]), count)
    idle = _idle(pools)
    found["joint, all idle"] = _timed(lambda number: joint.choose(idle, asks[number]), count)
    if num_workers <= 100:
        tried = _timed(lambda number: _try_all(joint, pools, asks[number]), 20)
        found["joint, by trying all pairs"] = tried
    return found


def _idle(pools: Pools) -> Pools:
    def rest(loads: Any) -> Any:
        return tuple(replace(load, num_requests=0, num_queued_tokens=0) for load in loads)

    return replace(pools, prefill=rest(pools.prefill), decode=rest(pools.decode))


def _try_all(policy: Any, pools: Pools, ask: Ask) -> int:
    assert isinstance(policy, ScoredPolicy)
    scorer = policy.scorer(pools, ask)
    return min(
        scorer.prefill_cost(p) + scorer.way_cost(p, d) + scorer.decode_cost(d)
        for p in pools.prefill
        for d in pools.decode
    )


def _replays(trace: Sequence[TraceLine]) -> list[dict[str, Any]]:
    most = ceiling(trace)
    rows = []
    for can_pull in (True, False):
        hardware = Hardware(can_pull=can_pull)
        costs = RouterCosts(
            prefill_tokens_per_s=hardware.prefill_tokens_per_s,
            link_bytes_per_s=hardware.link_bytes_per_s,
            decode_request_s=0.001,
        )
        for name in NAMES:
            outcome = Replay(policies.make(name, costs), hardware, costs).run(trace)
            cuts = statistics.quantiles(outcome.first_token_s, n=100)
            rows.append(
                {
                    "policy": name,
                    "stores": "read by all" if can_pull else "each worker its own",
                    "hit_rate": outcome.hit_rate,
                    "of_ceiling": outcome.hit_rate / most if most else 0.0,
                    "pulled": outcome.num_pulled_tokens / outcome.num_prompt_tokens,
                    "first_token_p50_s": cuts[49],
                    "first_token_p99_s": cuts[98],
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--decisions", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=6000, help="of the drawn trace")
    parser.add_argument("--rate", type=float, default=55.0, help="its requests a second")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format instead")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parsed = parser.parse_args()
    console = Console()

    times: dict[str, dict[str, dict[str, float]]] = {}
    table = Table("workers", "choice", "p50 us", "p99 us", box=None)
    for num_workers in parsed.workers:
        found = _decisions(num_workers, parsed.decisions, random.Random(parsed.seed))
        times[str(num_workers)] = found
        for name, row in found.items():
            table.add_row(str(num_workers), name, f"{row['p50_us']:.0f}", f"{row['p99_us']:.0f}")
    console.print(table)

    trace = (
        read_trace(parsed.trace)
        if parsed.trace
        else conversations(parsed.requests, parsed.rate, parsed.seed)
    )
    most = ceiling(trace)
    rows = _replays(trace)
    console.print(f"\n{len(trace)} requests, an endless cache would hit {most:.1%} of their tokens")
    table = Table("stores", "policy", "hit", "of ceiling", "pulled", "TTFT p50", "p99", box=None)
    for row in rows:
        table.add_row(
            row["stores"],
            row["policy"],
            f"{row['hit_rate']:.1%}",
            f"{row['of_ceiling']:.1%}",
            f"{row['pulled']:.1%}",
            f"{row['first_token_p50_s'] * 1000:.0f} ms",
            f"{row['first_token_p99_s'] * 1000:.0f} ms",
        )
    console.print(table)
    publish(
        {
            "benchmark": "routing",
            **context(),
            "decision_us": times,
            "trace": {
                "num_requests": len(trace),
                "num_prompt_tokens": sum(line.num_input_tokens for line in trace),
                "drawn": parsed.trace is None,
            },
            "ceiling": most,
            "policies": rows,
        },
        parsed.out,
    )


if __name__ == "__main__":
    main()
