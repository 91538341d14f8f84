"""What grammars cost the requests beside them, through a local cluster.

First: the time to the first token of a fresh cluster's first constrained request, beside that of
its tenth; another schema each, so that each is compiled. Then: the gaps between tokens of streams
without a grammar while harmless grammars are sent one after the other, and while hostile ones
(those of the tests) are, each followed for 60 tokens where it is accepted. Last: the memory of one
grammar service and its compiling process, alone in this process, as harmless grammars fill its
cache, hostile ones pass through it, and harmless ones fill it again. The last line printed is one
JSON object.

    python -m benchmarks.grammar_load --starts 5 --hostile 500
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

from baton import ClusterConfig, LocalCluster
from baton.client import Client
from baton.errors import BatonError
from benchmarks.context import context, publish
from checkpoints.resolve import resolve
from engine.errors import InvalidRequest
from engine.grammar.config import GrammarLimits
from engine.grammar.service import GrammarService
from engine.request import GrammarKind, GrammarSpec
from tests.unit.engine.grammar.hostile_grammars import hostile_grammars

PROMPT = "Once upon a time"
NUM_STREAMS = 4
NUM_TOKENS = 100
SEED = 1
VOCAB_SIZE = 2048
"""Of the bundled model."""


def schema(index: int) -> dict[str, Any]:
    """One that no other index has."""
    return {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, f"k{index}": {"enum": [1, 2]}},
        "required": ["name", f"k{index}"],
    }


async def first_token_s(client: Client, **options: Any) -> float:
    """Seconds to the first chunk with a token."""
    began = time.perf_counter()
    async for chunk in client.generate(PROMPT, max_tokens=8, temperature=0, **options):
        if chunk.token_ids:
            return time.perf_counter() - began
    raise SystemExit("an answer without a token")


async def starts(num_starts: int) -> dict[str, Any]:
    """First and tenth constrained request of fresh clusters."""
    first: list[float] = []
    tenth: list[float] = []
    for _ in range(num_starts):
        with LocalCluster(ClusterConfig(port=0)) as cluster:
            async with Client(cluster.address) as client:
                await first_token_s(client)  # what any first request costs is not a grammar's
                times = [await first_token_s(client, json_schema=schema(i)) for i in range(10)]
        first.append(times[0])
        tenth.append(times[9])
    return {
        "first_ms": [round(one * 1e3, 1) for one in first],
        "tenth_ms": [round(one * 1e3, 1) for one in tenth],
        "ratio_of_medians": round(statistics.median(first) / statistics.median(tenth), 3),
    }


async def stream_gaps(client: Client, seed: int) -> list[float]:
    """Seconds between the tokens of one stream without a grammar."""
    times: list[float] = []
    async for chunk in client.generate(
        PROMPT, max_tokens=NUM_TOKENS, ignore_eos=True, temperature=1.0, seed=seed
    ):
        times += [time.perf_counter()] * bool(chunk.token_ids)
    return [after - before for before, after in itertools.pairwise(times)]


async def send(client: Client, grammars: Sequence[tuple[str, str]]) -> dict[str, int]:
    """Send requests with (option, grammar) one after the other."""
    counts = {"answered": 0, "refused": 0}
    for name, text in grammars:
        try:
            await client.complete(PROMPT, max_tokens=60, timeout_s=30, **{name: text})
            counts["answered"] += 1
        except BatonError:
            counts["refused"] += 1
    return counts


def memory_mb() -> float:
    """Resident memory of the cluster's processes."""
    children = psutil.Process().children(recursive=True)
    return round(sum(one.memory_info().rss for one in children) / 1e6, 1)


def quantiles(gaps: Sequence[float]) -> dict[str, float]:
    """Milliseconds."""
    cuts = statistics.quantiles(gaps, n=1000)
    return {
        "p50_ms": round(cuts[499] * 1e3, 3),
        "p99_ms": round(cuts[989] * 1e3, 3),
        "max_ms": round(max(gaps) * 1e3, 1),
    }


def hostile(num: int, rng: random.Random) -> list[tuple[str, str]]:
    """(kind, grammar) of so many that fit a request."""
    names = {"regex": "regex", "json_schema": "json_schema", "lark": "ebnf", "gbnf": "ebnf"}
    every = [
        (names[kind], text)
        for _, kind, text in hostile_grammars()
        if kind != "choice" and len(text) < 60_000
    ]
    return rng.sample(every, min(num, len(every)))


def follow(service: GrammarService, spec: GrammarSpec, rng: random.Random) -> None:
    """Compile it and follow one random output for 60 tokens, as far as it comes."""
    try:
        compilation = service.submit(spec)
    except InvalidRequest:
        return
    if not compilation.wait(60):
        raise SystemExit(f"not compiled in 60 s: {spec}")
    if compilation.error is None:
        state = compilation.state(frozenset())
        for _ in range(60):
            service.filler.submit([state])
            service.filler.wait([state], None)
            allowed = np.nonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))[0]
            if not len(allowed):  # complete, or ended by a limit
                break
            state.accept(int(rng.choice(allowed)))
    service.release(compilation)


def own_memory_mb() -> float:
    """Of this process and its children."""
    return round(memory_mb() + psutil.Process().memory_info().rss / 1e6, 1)


def service_memory(num_hostile: int) -> dict[str, Any]:
    """Resident MB of a service and its compiling process, and the longest compilation."""
    rng = random.Random(SEED)
    folder = resolve("baton-5m", files="tokenizer").path
    service = GrammarService.from_checkpoint(folder, VOCAB_SIZE, GrammarLimits())
    service.prepare()
    found: dict[str, Any] = {"ready_mb": own_memory_mb(), "longest_compilation_s": 0.0}
    num_cached = service.limits.max_num_cached
    for name, grammars in (
        ("harmless", [("json_schema", json.dumps(schema(i))) for i in range(num_cached)]),
        ("hostile", hostile(num_hostile, rng)),
        ("harmless_again", [("json_schema", json.dumps(schema(-i))) for i in range(1, num_cached)]),
    ):
        for kind, text in grammars:
            began = time.perf_counter()
            follow(service, GrammarSpec(GrammarKind(kind), text), rng)
            took = time.perf_counter() - began
            found["longest_compilation_s"] = max(found["longest_compilation_s"], round(took, 2))
        found[f"behind_{name}_mb"] = own_memory_mb()
        found[f"cached_behind_{name}_mb"] = round(service.stats().cached_bytes / 1e6, 1)
    service.check_integrity()
    service.close()
    return found


async def beside(num_hostile: int) -> dict[str, Any]:
    """Streams beside harmless grammars, beside hostile ones, and beside harmless ones again."""
    chosen = hostile(num_hostile, random.Random(SEED))
    harmless = [("json_schema", json.dumps(schema(i))) for i in range(num_hostile // 2)]
    again = [("json_schema", json.dumps(schema(-i))) for i in range(1, num_hostile // 2)]
    result: dict[str, Any] = {"num_hostile": len(chosen)}
    with LocalCluster(ClusterConfig(port=0)) as cluster:
        async with Client(cluster.address) as client:
            for name, sent in (("warm-up", harmless[:8]), ("harmless", harmless)):
                result[name], result["memory_mb"] = await streams(client, sent), memory_mb()
            result["hostile"] = await streams(client, chosen)
            result["memory_behind_hostile_mb"] = memory_mb()
            result["harmless_again"] = await streams(client, again)
            result["memory_at_the_end_mb"] = memory_mb()
    del result["warm-up"]
    calm = statistics.mean(result[one]["p99_ms"] for one in ("harmless", "harmless_again"))
    result["ratio_p99"] = round(result["hostile"]["p99_ms"] / calm, 3)
    return result


async def streams(client: Client, grammars: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Gaps of streams while these grammars are sent."""
    sending = asyncio.create_task(send(client, grammars))
    found: list[float] = []
    for index in itertools.count():
        seeds = range(NUM_STREAMS * index, NUM_STREAMS * (index + 1))
        for gaps in await asyncio.gather(*(stream_gaps(client, seed) for seed in seeds)):
            found += gaps
        if sending.done():
            return quantiles(found) | sending.result()
    raise AssertionError


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--starts", type=int, default=5, help="fresh clusters; 0: none")
    parser.add_argument("--hostile", type=int, default=500, help="hostile grammars; 0: none")
    parser.add_argument("--memory", type=int, default=500, help="hostile grammars; 0: none")
    parser.add_argument("--out", type=Path, help="write the JSON object here, too")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"benchmark": "grammar_load", **context()}
    if arguments.starts:
        result["first_request"] = asyncio.run(starts(arguments.starts))
    if arguments.hostile:
        result["hostile"] = asyncio.run(beside(arguments.hostile))
    if arguments.memory:
        result["memory"] = service_memory(arguments.memory)
    Console(stderr=True).print(json.dumps(result, indent=2))
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
