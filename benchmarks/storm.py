"""Inter-token latency while long prompts pour in: prefill on one GPU, decode on another.

A cluster of one prefill and one decode worker with random weights (`random_checkpoint`). So many
streams decode; after a quiet time a storm of long prompts begins: always `--storm` of them under
way, each handed over to the decode worker and ended after its second token. What the streams'
clients see between two tokens, quiet against storm, is the figure: a decode worker that shares
nothing with prefill but the handover should not show it. The last line printed is one JSON object.

    python -m benchmarks.storm --shape llama-8b --device cuda:0,cuda:1 --handover direct

Needs two CUDA devices, or one for both with `--device cuda:0`: then it shows why two are better.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from baton.client import Client
from baton.local_cluster import ClusterConfig, LocalCluster
from benchmarks import random_checkpoint
from benchmarks.context import context, publish
from benchmarks.random_checkpoint import SHAPES

STREAM_PROMPT = 256
_TIMEOUT_S = 300.0


class Streams:
    """Streams that decode until told to stop; when each token of each came."""

    def __init__(self, client: Client, vocab_size: int, seed: int) -> None:
        self._client = client
        self._rng = random.Random(seed)
        self._vocab_size = vocab_size
        self.times_s: list[list[float]] = []

    def prompt(self, num_tokens: int) -> list[int]:
        """One that nobody had before."""
        return [self._rng.randrange(self._vocab_size) for _ in range(num_tokens)]

    async def one(self, num_tokens: int) -> None:
        """A stream of so many tokens."""
        times_s: list[float] = []
        self.times_s.append(times_s)
        async for _ in self._client.generate(
            self.prompt(STREAM_PROMPT),
            max_tokens=num_tokens,
            temperature=0.0,
            ignore_eos=True,
            timeout_s=_TIMEOUT_S,
        ):
            times_s.append(time.perf_counter())

    def gaps_ms(self, began_s: float, ended_s: float) -> list[float]:
        """Between neighbouring tokens that both came within this time."""
        return [
            (after - before) * 1e3
            for times_s in self.times_s
            for before, after in itertools.pairwise(times_s)
            if began_s <= before and after <= ended_s
        ]


def figures(gaps_ms: list[float]) -> dict[str, float]:
    """p50, p99 and the longest, in ms."""
    cuts = statistics.quantiles(gaps_ms, n=100)
    return {
        "num_gaps": len(gaps_ms),
        "p50_ms": round(cuts[49], 3),
        "p99_ms": round(cuts[98], 3),
        "longest_ms": round(max(gaps_ms), 3),
    }


async def storm(
    streams: Streams, client: Client, num_tokens: int, ended_s: float, ttft_s: list[float]
) -> None:
    """One long prompt after the other until the time is over."""
    while (began_s := time.perf_counter()) < ended_s:
        prompt = streams.prompt(num_tokens)
        first = True
        async for _ in client.generate(
            prompt, max_tokens=2, temperature=0.0, ignore_eos=True, timeout_s=_TIMEOUT_S
        ):
            if first:
                ttft_s.append(time.perf_counter() - began_s)
                first = False


async def measured(address: str, vocab_size: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Quiet, then the storm, over the same streams."""
    async with Client(address) as client:
        streams = Streams(client, vocab_size, arguments.seed)
        await client.complete(streams.prompt(arguments.prompt_tokens), max_tokens=2)
        running = [
            asyncio.create_task(streams.one(arguments.max_tokens)) for _ in range(arguments.streams)
        ]
        async with asyncio.timeout(_TIMEOUT_S):
            while sum(len(times_s) > 8 for times_s in streams.times_s) < arguments.streams:
                for task in running:
                    if task.done():
                        task.result()  # what it failed with
                await asyncio.sleep(0.05)
        quiet_s = time.perf_counter()
        await asyncio.sleep(arguments.seconds)
        storm_s = time.perf_counter()
        ended_s = storm_s + arguments.seconds
        ttft_s: list[float] = []
        await asyncio.gather(
            *(
                storm(streams, client, arguments.prompt_tokens, ended_s, ttft_s)
                for _ in range(arguments.storm)
            )
        )
        for task in running:
            if task.done():
                task.result()
        num_ended = sum(task.done() for task in running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    if num_ended:
        raise RuntimeError(f"{num_ended} streams ended before the storm: raise --max-tokens")
    quiet = figures(streams.gaps_ms(quiet_s, storm_s))
    stormy = figures(streams.gaps_ms(storm_s, ended_s))
    return {
        "quiet": quiet,
        "storm": stormy,
        "p99_storm_of_quiet": round(stormy["p99_ms"] / quiet["p99_ms"], 3),
        "storm_prompts": len(ttft_s),
        "storm_ttft_p50_ms": round(statistics.median(ttft_s) * 1e3, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--device", default="cuda:0,cuda:1", help="as of `baton up`")
    parser.add_argument("--transport", default="shm", help="between workers and their store")
    parser.add_argument("--handover", choices=("store", "direct"), default="store")
    parser.add_argument("--set", action="append", default=[], help="as of `baton up`")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=4000, help="of each stream")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="of the storm's prompts")
    parser.add_argument("--storm", type=int, default=2, help="prompts under way at once")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the two times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        kind = "cuda" if "cuda" in arguments.device else "cpu"
        random_checkpoint.save(folder, arguments.shape, device=kind)
        config = ClusterConfig(
            model=str(folder),
            port=0,
            transport=arguments.transport,
            handover=arguments.handover,
            device=arguments.device,
            overrides=(
                "prefill.engine.max_num_tokens_per_step=2048",
                *arguments.set,
            ),
        )
        with LocalCluster(config) as cluster:
            vocab_size = int(SHAPES[arguments.shape]["vocab_size"])
            found = asyncio.run(measured(cluster.address, vocab_size, arguments))
    console = Console(stderr=True)
    console.print(found)
    result = {
        "benchmark": "storm",
        **context(),
        "shape": arguments.shape,
        "device": arguments.device,
        "transport": arguments.transport,
        "handover": arguments.handover,
        "num_streams": arguments.streams,
        "num_prompt_tokens": arguments.prompt_tokens,
        "num_storm": arguments.storm,
        **found,
    }
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
