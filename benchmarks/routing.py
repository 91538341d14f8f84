"""How long a choice of workers takes, and how much of the prompts each policy finds cached.

python -m benchmarks.routing --workers 10,100,1000
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import click

from baton.load.workload import BLOCK_TOKENS, TraceLine, read_trace
from benchmarks import harness
from benchmarks.harness import Several
from services.router import policies
from services.router.circuit_breaker import Probation
from services.router.config import RouterCosts, RoutingPolicy
from services.router.placement import PlacementDecision, PlacementLog
from services.router.policies import (
    DECODE,
    PREFILL,
    Choice,
    LinkCosts,
    PlacementQuery,
    Policy,
    Pools,
    WorkerLoad,
)
from services.router.prefixes import FoundPrefixes, PrefixAffinity
from services.router.registry import Registry
from services.router.worker_client import DecodeStreams, PrefillClient
from services.router.worker_directory import WorkerDirectory
from services.router.worker_views import LinkView, ServedModel, Snapshot, StoreView, WorkerView

# -- the choice

NAMES: Sequence[RoutingPolicy] = get_args(RoutingPolicy)
WORKERS_PER_NODE = 8
NUM_LINKS = 8
"""Number of other nodes to which each worker knows its link."""


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

    def num_free_places(self, worker: WorkerView) -> None:
        return None

    def num_queued_tokens(self, worker_id: str) -> int:
        return self.queued.get(worker_id, 0)

    def set_queued(self, worker_id: str, num_tokens: int) -> None:
        self.queued[worker_id] = num_tokens
        for notify in self.on_change:
            notify(worker_id)


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
                links={node: LinkView(20e9 * rng.uniform(0.5, 1.0)) for node in met},
            )
        )
    return views


def _ask(num_workers: int, turn: int, rng: random.Random) -> PlacementQuery:
    nodes = [f"node-{i}" for i in range(max(1, num_workers // WORKERS_PER_NODE))]
    held = {node: rng.randrange(1, 512) for node in rng.sample(nodes, min(4, len(nodes)))}
    return PlacementQuery(
        num_prompt_tokens=8192,
        max_tokens=256,
        affinity=rng.randbytes(16),
        prefixes=FoundPrefixes({("ab" * 32, 16): held}),
        turn=turn,
        window=8448,
    )


def _apply(
    choose: Callable[[PlacementQuery], Any], asks: Sequence[PlacementQuery], number: int
) -> None:
    choose(asks[number])


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
    candidates = WorkerDirectory(
        cast(Registry, standing),
        cast(DecodeStreams, standing),
        cast(PrefillClient, standing),
        Probation(first_s=1, most_s=30, clock=time.monotonic),
        served=ServedModel(("m",), ""),
        costs=costs,
    )
    prefill_ids = [view.worker_id for view in views if view.role == PREFILL]
    asks = [_ask(num_workers, turn, rng) for turn in range(count)]
    record = PlacementLog(1024)
    joint = policies.make("joint", costs)

    def whole(number: int) -> None:
        # One prompt was sent since the last choice, and one was answered.
        for _ in range(2):
            standing.set_queued(rng.choice(prefill_ids), rng.randrange(60_000))
        pools, ask = candidates.pools(), asks[number]
        choice = joint.choose(pools, ask)
        record.add(
            "t", f"r{number}", PlacementDecision("first", joint, pools, ask, choice, 0.0, 0.0)
        )

    found = {"joint, whole decision": _timed(whole, count)}
    candidates.check_integrity()
    pools = candidates.pools()
    for name in NAMES:
        choose = partial(policies.make(name, costs).choose, pools)
        found[name] = _timed(partial(_apply, choose, asks), count)
    return found


# -- a cluster in simulated time, whose requests the router's own policies route. Workers are rates:
# a prefill worker computes one prompt after the other, a decode worker all of its requests at once.
# Stores and device caches keep what was used last, in blocks of 512 tokens, as the trace has them.

TOKEN_BYTES = 128 * 1024
"""Bytes of the KV of one token of an 8B model with 8 KV heads."""

FINGERPRINT = "sim"


@dataclass(frozen=True)
class Hardware:
    """The machines of the simulated cluster."""

    num_prefill: int = 8
    num_decode: int = 8
    store_blocks: int = 1000
    """Number of blocks of 512 tokens that each store keeps; each prefill worker has a store of its
    own."""
    device_blocks: int = 500
    """Number of blocks that each worker's own cache keeps."""
    prefill_tokens_per_s: float = 33_000.0
    link_bytes_per_s: float = 20e9
    token_s: float = 0.012
    """Seconds between two tokens of a stream."""
    can_pull: bool = True
    """Whether workers read blocks from the stores of other nodes."""


@dataclass
class Outcome:
    """The outcome of one replay."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_pulled_tokens: int = 0
    """Cached tokens that another node's store had."""
    first_token_s: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.num_cached_tokens / self.num_prompt_tokens


class _Cache:
    """Blocks by id, the last used ones; a prefix is found as far as it has no gap."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def match(self, hash_ids: Sequence[int]) -> int:
        """Leading blocks that it has."""
        return sum(1 for _ in itertools.takewhile(self._blocks.__contains__, hash_ids))

    def use(self, hash_ids: Sequence[int]) -> None:
        """All of them are there now, the first ones latest used: what goes first are tails."""
        for hash_id in reversed(hash_ids):
            self._blocks.pop(hash_id, None)
            self._blocks[hash_id] = None
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)


@dataclass
class _Prefill:
    name: str
    store: _Cache
    device: _Cache
    free_at_s: float = 0.0
    waiting: list[tuple[float, int]] = field(default_factory=list)
    """When each prompt is done, and how many of its tokens are computed."""

    def num_queued_tokens(self, now_s: float) -> int:
        self.waiting = [entry for entry in self.waiting if entry[0] > now_s]
        return sum(num_tokens for _, num_tokens in self.waiting)


@dataclass
class _Decode:
    name: str
    device: _Cache
    ends: list[float] = field(default_factory=list)

    def num_requests(self, now_s: float) -> int:
        while self.ends and self.ends[0] <= now_s:
            heapq.heappop(self.ends)
        return len(self.ends)


class Replay:
    """The simulation of one trace under one policy."""

    def __init__(self, policy: Policy, hardware: Hardware, costs: RouterCosts) -> None:
        self._policy = policy
        self._hardware = hardware
        self._prefill = [
            _Prefill(f"p{i}", _Cache(hardware.store_blocks), _Cache(hardware.device_blocks))
            for i in range(hardware.num_prefill)
        ]
        self._decode = [
            _Decode(f"d{i}", _Cache(hardware.device_blocks)) for i in range(hardware.num_decode)
        ]
        self._stores = {
            f"store of {p.name}": StoreView(f"store of {p.name}", "", "") for p in self._prefill
        }
        self._conversations = PrefixAffinity(65_536)
        names = [p.name for p in self._prefill] + [d.name for d in self._decode]
        self._num_blocks = {f"life of {name}": hardware.device_blocks for name in names}
        self._links = LinkCosts((), costs)

    def run(self, trace: Sequence[TraceLine]) -> Outcome:
        """Simulate the whole trace."""
        outcome = Outcome()
        for turn, line in enumerate(trace):
            self._serve(line, turn, outcome)
        return outcome

    def _serve(self, line: TraceLine, turn: int, outcome: Outcome) -> None:
        now_s = line.timestamp_ms / 1000
        chain = _chain(line.hash_ids)
        held = {
            f"store of {p.name}": num
            for p in self._prefill
            if (num := p.store.match(line.hash_ids))
        }
        layout = (FINGERPRINT, BLOCK_TOKENS)
        local = self._conversations.find(chain, self._num_blocks)
        ask = PlacementQuery(
            num_prompt_tokens=line.num_input_tokens,
            max_tokens=line.num_output_tokens,
            affinity=chain[0],
            prefixes=FoundPrefixes({layout: held}, self._stores, {layout: chain}),
            local={life: num * BLOCK_TOKENS for life, num in local.items()},
            turn=turn,
        )
        choice = self._policy.choose(self._pools(now_s), ask)
        self._carry_out(choice, line, chain, now_s, outcome)

    def _carry_out(
        self,
        choice: Choice,
        line: TraceLine,
        chain: Sequence[bytes],
        now_s: float,
        outcome: Outcome,
    ) -> None:
        p = next(p for p in self._prefill if p.name == choice.prefill_id)
        d = next(d for d in self._decode if d.name == choice.decode_id)
        most = line.num_input_tokens - 1
        num_local = p.device.match(line.hash_ids) * BLOCK_TOKENS
        num_home = p.store.match(line.hash_ids) * BLOCK_TOKENS
        num_held = max([num_local, num_home, *_ends(choice)])
        num_cached = min(most, num_held)
        num_pulled = max(0, num_cached - max(num_local, num_home))
        num_computed = line.num_input_tokens - num_cached
        hardware = self._hardware
        fetched_bytes = (num_cached - min(num_cached, num_local) + num_pulled) * TOKEN_BYTES
        # What is fetched comes while others compute.
        ready_s = now_s + fetched_bytes / hardware.link_bytes_per_s
        p.free_at_s = max(ready_s, p.free_at_s) + num_computed / hardware.prefill_tokens_per_s
        p.waiting.append((p.free_at_s, num_computed))
        num_moved = line.num_input_tokens - min(
            line.num_input_tokens, d.device.match(line.hash_ids) * BLOCK_TOKENS
        )
        handed_s = p.free_at_s + num_moved * TOKEN_BYTES / hardware.link_bytes_per_s
        heapq.heappush(d.ends, handed_s + line.num_output_tokens * hardware.token_s)
        for cache in (p.store, p.device, d.device):
            cache.use(line.hash_ids)
        self._conversations.note(chain, [f"life of {p.name}", f"life of {d.name}"])
        outcome.num_prompt_tokens += line.num_input_tokens
        outcome.num_cached_tokens += num_cached
        outcome.num_pulled_tokens += num_pulled
        outcome.first_token_s.append(p.free_at_s - now_s)

    def _pools(self, now_s: float) -> Pools:
        prefill = tuple(self._load(p.name, p.num_queued_tokens(now_s), 0) for p in self._prefill)
        decode = tuple(self._load(d.name, 0, d.num_requests(now_s)) for d in self._decode)
        return Pools(prefill, decode, self._links, {})

    def _load(self, name: str, num_queued_tokens: int, num_requests: int) -> WorkerLoad:
        return WorkerLoad(
            worker_id=name,
            fingerprint=FINGERPRINT,
            block_size=BLOCK_TOKENS,
            block_bytes=BLOCK_TOKENS * TOKEN_BYTES,
            num_blocks=100_000,
            num_free_blocks=100_000,
            num_requests=num_requests,
            num_queued_tokens=num_queued_tokens,
            store_node_id=f"store of {name.replace('d', 'p')}",
            transport="shm",
            remote_transport="nixl" if self._hardware.can_pull or name[0] == "d" else "",
            lender_node_id=f"{name}/lent" if name[0] == "p" else "",
            incarnation=f"life of {name}",
        )


def ceiling(trace: Sequence[TraceLine]) -> float:
    """The hit rate of one endless cache that all prompts share."""
    seen: set[int] = set()
    num_cached = 0
    for line in trace:
        num_blocks = sum(1 for _ in itertools.takewhile(seen.__contains__, line.hash_ids))
        num_cached += min(line.num_input_tokens - 1, num_blocks * BLOCK_TOKENS)
        seen.update(line.hash_ids)
    return num_cached / sum(line.num_input_tokens for line in trace)


def conversations(
    num_requests: int, requests_per_s: float, seed: int, *, num_groups: int = 40
) -> list[TraceLine]:
    """Make a trace of conversations: each begins with one of a few long instructions, some far more
    usual than others, and grows by question and answer until it ends."""
    rng, ids = random.Random(seed), itertools.count(1)
    heads = [[next(ids) for _ in range(rng.randint(2, 10))] for _ in range(num_groups)]
    weights = [1 / (rank + 1) for rank in range(num_groups)]
    due: list[tuple[float, int, list[int], int]] = []
    lines: list[TraceLine] = []
    now_s, number = 0.0, itertools.count()
    while len(lines) < num_requests:
        # About five turns a conversation.
        now_s += rng.expovariate(requests_per_s / 5)
        head = rng.choices(heads, weights)[0]
        heapq.heappush(due, (now_s, next(number), list(head), rng.randint(1, 9)))
        while due and due[0][0] <= now_s and len(lines) < num_requests:
            at_s, _, history, num_left = heapq.heappop(due)
            history = [*history, *(next(ids) for _ in range(rng.randint(1, 3)))]
            num_output = rng.randint(50, 500)
            # The last block is filled in part; its id is this request's alone.
            num_input = (len(history) - 1) * BLOCK_TOKENS + rng.randint(1, BLOCK_TOKENS)
            lines.append(TraceLine(at_s * 1000, num_input, num_output, tuple(history)))
            if num_left > 1:
                again_s = at_s + 5 + rng.expovariate(1 / 20)
                heapq.heappush(due, (again_s, next(number), history, num_left - 1))
    return sorted(lines, key=lambda line: line.timestamp_ms)


def _chain(hash_ids: Sequence[int]) -> list[bytes]:
    """The ids as chain hashes: equal ids in front are equal prefixes."""
    return [hash_id.to_bytes(16) for hash_id in hash_ids]


def _ends(choice: Choice) -> list[int]:
    return [(run.first_block + run.num_blocks) * BLOCK_TOKENS for run in choice.runs]


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
                    "hit_rate": round(outcome.hit_rate, 4),
                    "of_ceiling": round(outcome.hit_rate / most, 4),
                    "pulled": round(outcome.num_pulled_tokens / outcome.num_prompt_tokens, 4),
                    "first_token_p50_ms": round(cuts[49] * 1e3, 1),
                    "first_token_p99_ms": round(cuts[98] * 1e3, 1),
                }
            )
    return rows


@harness.case
@click.option("--workers", type=Several(int), default="10,100,1000")
@click.option("--decisions", default=1000)
@click.option("--requests", default=6000, help="of the drawn trace")
@click.option("--rate", default=55.0, help="its requests a second")
@click.option("--trace", type=click.Path(path_type=Path), help="in Mooncake's format, instead")
@click.option("--seed", default=1)
def main(
    workers: Sequence[int],
    decisions: int,
    requests: int,
    rate: float,
    trace: Path | None,
    seed: int,
) -> dict[str, Any]:
    """Microseconds of a choice by number of workers, and the hit rate of each policy.

    A choice is measured as the router makes it: loads that changed are made again, the policy
    chooses, the choice is recorded; and each policy by itself. Hit rates come from a replay in
    simulated time of a trace, drawn or given; the ceiling is one endless cache.
    """
    times = {str(num): _decisions(num, decisions, random.Random(seed)) for num in workers}
    rows = [
        {"workers": num, "choice": name, **row}
        for num, one in times.items()
        for name, row in one.items()
    ]
    harness.show("microseconds", rows)
    lines = read_trace(trace) if trace else conversations(requests, rate, seed)
    most, found = ceiling(lines), _replays(lines)
    harness.show(f"{len(lines)} requests, an endless cache hits {most:.1%} of their tokens", found)
    return {
        "decision_us": times,
        "num_requests": len(lines),
        "num_prompt_tokens": sum(line.num_input_tokens for line in lines),
        "is_drawn": trace is None,
        "ceiling": most,
        "policies": found,
    }


if __name__ == "__main__":
    main()
