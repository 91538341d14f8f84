"""What a prefix hit is worth, and what of the KV transfer is left to see: time to first token cold
and with 50 and 95 % of the prompt in the store, for prompts of 1k and 8k tokens.

A local cluster whose workers are restarted after the prefixes were stored, so that every hit comes
from the store and none from a worker's own cache; each answer's provenance is checked for that.
The ceiling of a hit is the cold time without the share that hit. `exposed` is the time between the
first and the second token beyond what later tokens take: what of storing, handing over and loading
the KV did not hide behind the prefill. The last line printed is one JSON object.

    python -m benchmarks.prefix_hit --requests 5 --prompt-tokens 1024 8192

The bundled model's window is shorter than that: the same weights run with a longer one, which
changes what they say and not what it costs. Nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton import ClusterConfig, LocalCluster
from baton.client import SyncClient
from baton.messages import End
from benchmarks.cluster import with_window
from benchmarks.harness import context, publish

SHARES = (0.0, 0.5, 0.95)
OUTPUT_TOKENS = 16
READY_S = 120.0
ANSWER_S = 600.0
_SETTLE_S = 0.5


@dataclass(frozen=True)
class Ask:
    """One measured prompt and how much of it is in the store."""

    prompt: list[int]
    share: float
    num_stored_tokens: int


@dataclass(frozen=True)
class Answer:
    """Seconds."""

    ttft_s: float
    exposed_s: float
    stages: dict[str, float]


def asks_of(rng: random.Random, num_tokens: int, count: int, block_size: int) -> list[Ask]:
    """`count` prompts for each share, in turns; no two share a token's place."""
    asks = []
    for _, share in itertools.product(range(count), SHARES):
        prompt = [rng.randrange(100, 2000) for _ in range(num_tokens)]
        stored = int(share * num_tokens) // block_size * block_size
        asks.append(Ask(prompt, share, stored))
    return asks


def ask(client: SyncClient, prompt: Sequence[int], num_tokens: int) -> tuple[list[float], End]:
    """Returns: when the request began and each token came, and its end."""
    times = [time.perf_counter()]
    end: End | None = None
    for chunk in client.generate(
        list(prompt), max_tokens=num_tokens, ignore_eos=True, temperature=0.0, timeout_s=ANSWER_S
    ):
        times += [time.perf_counter()] * len(chunk.token_ids)
        end = chunk.end or end
    if end is None or end.provenance is None:
        raise RuntimeError("the answer has no end")
    return times, end


def measured(client: SyncClient, one: Ask) -> Answer:
    """Raises: RuntimeError when the hit was another than meant."""
    times, end = ask(client, one.prompt, OUTPUT_TOKENS)
    assert end.provenance is not None
    (prefill,) = (leg for leg in end.provenance.legs if leg.role == "prefill")
    if prefill.num_tokens_from_store != one.num_stored_tokens or prefill.num_tokens_local:
        raise RuntimeError(
            f"{prefill.num_tokens_from_store} tokens from the store and "
            f"{prefill.num_tokens_local} local, {one.num_stored_tokens} and 0 were meant: {prefill}"
        )
    gaps = [after - before for before, after in itertools.pairwise(times[1:])]
    exposed_s = max(0.0, gaps[0] - statistics.median(gaps[1:]))
    return Answer(times[1] - times[0], exposed_s, dict(end.times))


def run(cluster: LocalCluster, asks: Sequence[Ask], console: Console) -> list[Answer]:
    """Store the prefixes, forget them in the workers, then ask."""
    with SyncClient(cluster.address) as client:
        for one in track(asks, "storing prefixes", console=console):
            if one.num_stored_tokens:
                # One token more: a prompt's last token is never taken from a cache.
                ask(client, one.prompt[: one.num_stored_tokens + 1], 2)
        for name, info in cluster.processes.items():
            if info.kind in ("prefill", "decode"):
                cluster.restart(name)
        cluster.wait_ready(READY_S)
        warm_up = random.Random(-1)
        for _ in range(2):
            ask(client, [warm_up.randrange(100, 2000) for _ in asks[0].prompt], OUTPUT_TOKENS)
        answers = []
        for one in track(asks, "asking", console=console):
            answers.append(measured(client, one))
            time.sleep(_SETTLE_S)  # what the last one stores and frees in the background
        return answers


def figures_of(num_tokens: int, asks: Sequence[Ask], answers: Sequence[Answer]) -> dict[str, Any]:
    """Medians by share of hit."""
    rows: list[dict[str, Any]] = []
    cold_s = 0.0
    for share in SHARES:
        own = [answer for one, answer in zip(asks, answers, strict=True) if one.share == share]
        ttft_s = statistics.median(answer.ttft_s for answer in own)
        exposed_s = statistics.median(answer.exposed_s for answer in own)
        cold_s = cold_s or ttft_s
        stages = sorted({stage for answer in own for stage in answer.stages})
        rows.append(
            {
                "hit_share": share,
                "ttft_p50_ms": round(ttft_s * 1e3, 2),
                "ttft_of_cold": round(ttft_s / cold_s, 3),
                "ceiling_of_cold": round(1 - share, 3),
                "exposed_transfer_p50_ms": round(exposed_s * 1e3, 2),
                "exposed_share_of_ttft": round(exposed_s / ttft_s, 4),
                "stage_p50_ms": {
                    stage: round(
                        statistics.median(answer.stages.get(stage, 0.0) for answer in own) * 1e3, 3
                    )
                    for stage in stages
                },
            }
        )
    return {"num_prompt_tokens": num_tokens, "shares": rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5, help="of each length and share")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument("--transport", default="shm", choices=("shm", "nixl", "grpc"))
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--store-mib", type=int, default=2048, help="room for every prefix")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    rng = random.Random(arguments.seed)
    figures = []
    with with_window(arguments.model, max(arguments.prompt_tokens) + OUTPUT_TOKENS) as model:
        config = ClusterConfig(
            model=model,
            port=0,
            transport=arguments.transport,
            overrides=(
                f"worker.engine.block_size={arguments.block_size}",
                f"store.capacity_bytes={arguments.store_mib * 1024 * 1024}",
            ),
        )
        with LocalCluster(config) as cluster:
            for num_tokens in arguments.prompt_tokens:
                asks = asks_of(rng, num_tokens, arguments.requests, arguments.block_size)
                answers = run(cluster, asks, console)
                figures.append(figures_of(num_tokens, asks, answers))
    table = Table("prompt", "hit", "TTFT ms", "of cold", "ceiling", "exposed ms", "of TTFT")
    for figure in figures:
        for row in figure["shares"]:
            table.add_row(
                str(figure["num_prompt_tokens"]),
                f"{100 * row['hit_share']:.0f} %",
                f"{row['ttft_p50_ms']:.1f}",
                f"{100 * row['ttft_of_cold']:.0f} %",
                f"{100 * row['ceiling_of_cold']:.0f} %",
                f"{row['exposed_transfer_p50_ms']:.1f}",
                f"{100 * row['exposed_share_of_ttft']:.1f} %",
            )
    console.print(table)
    result = {
        "benchmark": "prefix_hit",
        **context(),
        "model": arguments.model,
        "transport": arguments.transport,
        "num_requests": arguments.requests,
        "num_output_tokens": OUTPUT_TOKENS,
        "figures": figures,
    }
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
