"""Time to first token and inter-token latency: the local cluster against one in-process engine.

Both run the same prompts, one after the other and interleaved, so that drift of the machine hits
both. The in-process engine is the ceiling: what remains is the price of five processes, two wires
and the KV handover. The last line printed is one JSON object.

    python -m benchmarks.serve --requests 20 --out benchmarks/results/<date>-serve.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton import ClusterConfig, LocalCluster
from baton.client import SyncClient
from benchmarks.context import context, publish
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from engine.request import Request, Sampling
from kvstore import block_hash


@dataclass
class Latencies:
    """Seconds; one TTFT a request, one gap per token after the first."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)

    def add(self, began_s: float, token_times_s: Sequence[float]) -> None:
        self.ttft_s.append(token_times_s[0] - began_s)
        self.itl_s += [after - before for before, after in itertools.pairwise(token_times_s)]

    def summary(self) -> dict[str, float]:
        def ms(values: Sequence[float], quantile: int) -> float:
            return round(statistics.quantiles(values, n=100)[quantile - 1] * 1e3, 3)

        return {
            "ttft_p50_ms": ms(self.ttft_s, 50),
            "ttft_p99_ms": ms(self.ttft_s, 99),
            "itl_p50_ms": ms(self.itl_s, 50),
            "itl_p99_ms": ms(self.itl_s, 99),
        }


def through_engine(engine: Engine, prompt: Sequence[int], num_tokens: int, into: Latencies) -> None:
    """One request through the in-process engine, with a prefix cache of its own."""
    began = time.perf_counter()
    root = block_hash.root_key(os.urandom(16), engine.model_info.fingerprint)
    request = Request(
        request_id="0",
        prompt_token_ids=tuple(prompt),
        sampling=Sampling(max_tokens=num_tokens, ignore_eos=True),
        block_hasher=lambda parent, ids: block_hash.extend(root, parent, ids),
        cache_root=root,
    )
    engine.reserve(request)
    engine.start("0")
    times: list[float] = []
    while engine.has_work():
        for event in engine.step().events:
            times += [time.perf_counter()] * len(event.token_ids)
    into.add(began, times)


def through_cluster(
    client: SyncClient, prompt: Sequence[int], num_tokens: int, into: Latencies
) -> dict[str, float]:
    """One request through the cluster; returns its stage times."""
    began = time.perf_counter()
    times: list[float] = []
    stages: dict[str, float] = {}
    for chunk in client.generate(
        list(prompt), max_tokens=num_tokens, ignore_eos=True, temperature=0.0
    ):
        times += [time.perf_counter()] * len(chunk.token_ids)
        if chunk.end is not None:
            stages = dict(chunk.end.times)
    into.add(began, times)
    return stages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument("--transport", default="shm", choices=("shm", "nixl", "grpc"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    console = Console(stderr=True)
    engine = load_engine(EngineConfig(model=arguments.model, device="cpu", num_threads=1))
    alone, cluster_latencies = Latencies(), Latencies()
    stages: dict[str, list[float]] = {}
    config = ClusterConfig(model=arguments.model, port=0, transport=arguments.transport)
    with LocalCluster(config) as cluster, SyncClient(cluster.address) as client:
        for warm_up in (True, False):
            count = 3 if warm_up else arguments.requests
            for _ in track(range(count), "warm-up" if warm_up else "requests", console=console):
                # Fresh ids: no prefix is ever met twice.
                prompt = [rng.randrange(100, 2000) for _ in range(arguments.prompt_tokens)]
                into = (Latencies(), Latencies()) if warm_up else (alone, cluster_latencies)
                through_engine(engine, prompt, arguments.output_tokens, into[0])
                times = through_cluster(client, prompt, arguments.output_tokens, into[1])
                if not warm_up:
                    for stage, seconds in times.items():
                        stages.setdefault(stage, []).append(seconds)
    one, many = alone.summary(), cluster_latencies.summary()
    result = {
        "benchmark": "serve",
        **context(),
        "model": arguments.model,
        "transport": arguments.transport,
        "num_requests": arguments.requests,
        "num_prompt_tokens": arguments.prompt_tokens,
        "num_output_tokens": arguments.output_tokens,
        "engine": one,
        "cluster": many,
        "added_ttft_p50_ms": round(many["ttft_p50_ms"] - one["ttft_p50_ms"], 3),
        "added_itl_p50_ms": round(many["itl_p50_ms"] - one["itl_p50_ms"], 3),
        "ttft_ratio": round(many["ttft_p50_ms"] / one["ttft_p50_ms"], 3),
        "itl_ratio": round(many["itl_p50_ms"] / one["itl_p50_ms"], 3),
        "stage_p50_ms": {
            stage: round(statistics.median(values) * 1e3, 3) for stage, values in stages.items()
        },
    }
    table = Table("", "engine (ceiling)", "cluster", "added")
    for name, value in one.items():
        table.add_row(name, f"{value:.2f}", f"{many[name]:.2f}", f"{many[name] - value:+.2f}")
    console.print(table)
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
