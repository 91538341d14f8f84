"""Inter-token latency while long prompts pour in: prefill on one GPU, decode on another.

A cluster of one prefill and one decode worker with random weights (`random_checkpoint`). So many
streams decode, all the time, watched by a process of its own (benchmarks/storm_streams.py). A quiet
time and a storm make a round; every other round begins with the storm, since contexts grow and
steps with them: what counts is the mean of the rounds' ratios. In a storm always `--storm` long
prompts are under way, each handed over to the decode worker and ended after its second token: a
decode worker that shares nothing with prefill but the handover should not show it.

What is told of each, quiet and storm: `seen`, what the streams' clients saw between two messages
(and `pauses_of_who_watched`, which are their own), and `steps`, from one step of the decode
worker's engine to the next, by its step log; the longest of these with what went on beside
(benchmarks/step_times.py). The last line printed is one JSON object.

    python -m benchmarks.storm --shape llama-8b --device cuda:0,cuda:1 --handover direct

Needs two CUDA devices, or one for both with `--device cuda:0`: then it shows why two are better.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from baton import ClusterConfig, LocalCluster
from baton.client import Client
from benchmarks import random_checkpoint
from benchmarks.context import context, publish
from benchmarks.random_checkpoint import SHAPES
from benchmarks.step_times import Span, cuts, explain
from benchmarks.storm_streams import PROMPT_TOKENS, TIMEOUT_S, StreamPlan, Streams, prompt_of
from process import entrypoint
from services.worker import step_log

MAX_TOKENS = {"llama-8b": 8000, "qwen3-0.6b": 30000}
"""Of each stream, which must outlive the whole benchmark."""
_ROOM = 64
_REST_S = 0.5
"""Between the end of a storm and the quiet after it, and after the streams began."""


async def _storm(
    client: Client, prompts: list[list[int]], ended_s: float, ttft_s: list[float]
) -> None:
    """One long prompt after the other until the time is over."""
    while (began_s := time.monotonic()) < ended_s:
        first = True
        async for _ in client.generate(
            prompts.pop(), max_tokens=2, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S
        ):
            if first:
                ttft_s.append(time.monotonic() - began_s)
                first = False


async def _storms(
    address: str, prompts: list[list[int]], arguments: argparse.Namespace
) -> tuple[list[Span], list[Span], list[float]]:
    """Returns: the quiet times, the storms, and the storm prompts' seconds to the first token."""
    quiet, stormy = [], []
    ttft_s: list[float] = []
    async with Client(address) as client:
        await client.complete(prompts.pop(), max_tokens=2)  # connections, links measured
        for number in range(2 * arguments.rounds):
            await asyncio.sleep(_REST_S)
            begun_s = time.monotonic()
            ended_s = begun_s + arguments.seconds
            if number % 4 in (0, 3):  # quiet, storm, storm, quiet
                await asyncio.sleep(arguments.seconds)
                quiet.append(Span(begun_s, ended_s))
                continue
            await asyncio.gather(
                *(_storm(client, prompts, ended_s, ttft_s) for _ in range(arguments.storm))
            )
            stormy.append(Span(begun_s, ended_s))
    return quiet, stormy, ttft_s


def _seen(times: list[list[tuple[float, int]]], spans: list[Span]) -> dict[str, float]:
    """What clients saw between messages, and how many of these brought several steps' tokens."""
    gaps_ms, num_late = [], 0
    for stream in times:
        for (before_s, _), (after_s, num_tokens) in itertools.pairwise(stream):
            if any(before_s in span and after_s in span for span in spans):
                gaps_ms.append((after_s - before_s) * 1e3)
                num_late += num_tokens > 1
    return cuts(gaps_ms) | {"num_of_several_steps": num_late}


def _by_time(
    times: list[list[tuple[float, int]]], quiet: list[Span], stormy: list[Span]
) -> list[dict[str, Any]]:
    """Each time on its own, in order, with the streams' tokens when it began: steps grow with
    these."""
    found = []
    for span in sorted([*quiet, *stormy], key=lambda span: span.begun_s):
        counts = [sum(num for at_s, num in stream if at_s < span.begun_s) for stream in times]
        found.append(
            {
                "kind": "storm" if span in stormy else "quiet",
                "num_tokens_before": PROMPT_TOKENS + round(statistics.mean(counts)),
                **_seen(times, [span]),
            }
        )
    return found


def _ratio(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """P99 in storms by that in the quiet time of the same round, and the geometric mean."""
    ratios = [storm["p99_ms"] / quiet["p99_ms"] for quiet, storm in rounds]
    return {
        "mean": round(statistics.geometric_mean(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
    }


def _measured(address: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Storms over the same streams; the cluster's step logs are there when it has ended."""
    vocab_size = int(SHAPES[arguments.shape]["vocab_size"])
    rng = random.Random(arguments.seed + 1)
    prompts = [
        prompt_of(rng, vocab_size, arguments.prompt_tokens) for _ in range(arguments.num_prompts)
    ]
    entrypoint.begin_serving()
    plan = StreamPlan(address, vocab_size, arguments.streams, arguments.max_tokens, arguments.seed)
    with Streams.running(plan) as streams:
        streams.wait_begun()
        quiet, stormy, ttft_s = asyncio.run(_storms(address, prompts, arguments))
        seen = streams.end()
    times = seen.streams
    return {
        "quiet": quiet,
        "storm": stormy,
        "seen": {"quiet": _seen(times, quiet), "storm": _seen(times, stormy)},
        "times": _by_time(times, quiet, stormy),
        "p99_storm_of_quiet": _ratio(
            [(_seen(times, [q]), _seen(times, [s])) for q, s in zip(quiet, stormy, strict=True)]
        ),
        "pauses_of_who_watched": [
            {"in_storm": any(at_s in span for span in stormy), "ms": round(seconds * 1e3, 2)}
            for at_s, seconds in seen.pauses
        ],
        "storm_prompts": len(ttft_s),
        "storm_ttft_p50_ms": round(statistics.median(ttft_s) * 1e3, 1),
    }


def _config(folder: Path, arguments: argparse.Namespace) -> ClusterConfig:
    return ClusterConfig(
        model=str(folder),
        port=0,
        transport=arguments.transport,
        handover=arguments.handover,
        direct_transport=arguments.direct_transport,
        device=arguments.device,
        overrides=(
            "prefill.engine.max_num_tokens_per_step=2048",
            f'decode.step_log="{folder / "logs"}"',
            *arguments.set,
        ),
    )


def _save_checkpoint(folder: Path, arguments: argparse.Namespace) -> None:
    """Random weights, and a window in which streams and storm have room."""
    kind = "cuda" if "cuda" in arguments.device else "cpu"
    random_checkpoint.save(folder, arguments.shape, device=kind)
    path = folder / "config.json"
    longest = max(arguments.prompt_tokens, PROMPT_TOKENS + arguments.max_tokens)
    described = json.loads(path.read_text(encoding="utf-8"))
    described["max_position_embeddings"] = longest + _ROOM
    path.write_text(json.dumps(described), encoding="utf-8")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--device", default="cuda:0,cuda:1", help="as of `baton up`")
    parser.add_argument("--transport", default="shm", help="between workers and their store")
    parser.add_argument("--handover", choices=("store", "direct"), default="store")
    parser.add_argument("--direct-transport", default="", help="as of `baton up`")
    parser.add_argument("--set", action="append", default=[], help="as of `baton up`")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, help="of each stream; default: by shape")
    parser.add_argument("--prompt-tokens", type=int, default=8192, help="of the storm's prompts")
    parser.add_argument("--num-prompts", type=int, default=400, help="that the storm has")
    parser.add_argument("--storm", type=int, default=2, help="prompts under way at once")
    parser.add_argument("--rounds", type=int, default=4, help="of a quiet time and a storm")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each quiet time, and storm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.max_tokens is None:
        arguments.max_tokens = MAX_TOKENS[arguments.shape]
    return arguments


def main() -> int:
    arguments = _parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_checkpoint(folder, arguments)
        with LocalCluster(_config(folder, arguments)) as cluster:
            found = _measured(cluster.address, folder, arguments)
        (log,) = (folder / "logs").iterdir()
        entries = step_log.read(log)
    quiet, stormy = found.pop("quiet"), found.pop("storm")
    steps = {"quiet": explain(entries, quiet), "storm": explain(entries, stormy)}
    pairs = [
        (explain(entries, [q])["period"], explain(entries, [s])["period"])
        for q, s in zip(quiet, stormy, strict=True)
    ]
    found["p99_storm_of_quiet_steps"] = _ratio(pairs)
    Console(stderr=True).print(found, steps)
    result = {
        "benchmark": "storm",
        **context(),
        "shape": arguments.shape,
        "device": arguments.device,
        "transport": arguments.transport,
        "handover": arguments.handover,
        "direct_transport": arguments.direct_transport,
        "num_streams": arguments.streams,
        "num_prompt_tokens": arguments.prompt_tokens,
        "num_storm": arguments.storm,
        **found,
        "steps": steps,
    }
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
