"""Inter-token latency while long prompts pour in: prefill on one GPU, decode on another.

python -m benchmarks.storm --shape llama-8b --device cuda:0,cuda:1 --handover direct
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import click

from baton import ClusterConfig, LocalCluster
from baton.client import Client
from benchmarks import harness, random_checkpoint
from benchmarks.random_checkpoint import SHAPES
from process import entrypoint
from services.worker import step_log
from tools.step_log import LoggedSpan, cuts, explain

MAX_TOKENS = {"llama-8b": 8000, "qwen3-0.6b": 30000}
"""Number of tokens of each stream, which must outlive the whole benchmark."""
_NUM_PROMPTS = 400
"""Most prompts of all storms."""
_ROOM = 64
_REST_S = 0.5
"""Between the end of a storm and the quiet after it, and after the streams began."""

# -- the streams, in a process of their own: nothing else that the benchmark does can delay what
# they see. Nor can its own garbage collector: it looks at all that was imported once, before the
# streams begin, and each later look that took long is in the result.

PROMPT_TOKENS = 256
TIMEOUT_S = 300.0
_WARM_TOKENS = 8
_LONG_S = 0.001


def prompt_of(rng: random.Random, vocab_size: int, num_tokens: int) -> list[int]:
    """Make a prompt of random token ids."""
    return [rng.randrange(vocab_size) for _ in range(num_tokens)]


@dataclass(frozen=True)
class StreamPlan:
    """The streams that decode all the while: how many, how long, and of which router and seed."""

    address: str
    vocab_size: int
    num_streams: int
    max_tokens: int
    seed: int


@dataclass(frozen=True)
class Seen:
    """What the streams' clients saw.

    Attributes: streams: when each token of each stream came, and how many came with it. pauses: of
    the process that watched, for its garbage: when each began, and seconds.
    """

    streams: list[list[tuple[float, int]]]
    pauses: list[tuple[float, float]]


class Streams:
    """The connection to the process that watches the streams: `running` starts it, `wait_begun`
    waits, `end` brings back what it has seen."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    @classmethod
    @contextmanager
    def running(cls, plan: StreamPlan) -> Iterator[Self]:
        """Run the streams in a process of their own until the block ends."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=_run, args=(plan, theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            yield cls(ours)
        finally:
            ours.close()
            process.join(10)
            if process.is_alive():
                process.kill()

    def wait_begun(self) -> None:
        """Wait until every stream decodes. Raises: RuntimeError with what a stream failed with."""
        self._receive()

    def end(self) -> Seen:
        """End the streams. Returns: what their clients saw. Raises: RuntimeError when a stream
        ended before."""
        self._connection.send("end")
        found: Seen = self._receive()
        return found

    def _receive(self) -> Any:
        if not self._connection.poll(TIMEOUT_S):
            raise RuntimeError("the streams do not answer")
        problem, value = self._connection.recv()
        if problem:
            raise RuntimeError(problem)
        return value


class _Pauses:
    """Pauses by the garbage collector, from here on."""

    def __init__(self) -> None:
        self.found: list[tuple[float, float]] = []
        self._begun_s = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now_s = time.monotonic()
        if phase == "start":
            self._begun_s = now_s
        elif now_s - self._begun_s >= _LONG_S:
            self.found.append((self._begun_s, now_s - self._begun_s))


def _run(plan: StreamPlan, connection: Connection) -> None:
    try:
        entrypoint.begin_serving()
        asyncio.run(_stream_all(plan, connection))
    except Exception as error:  # the other process says it
        connection.send((f"{type(error).__name__}: {error}", None))


async def _stream_all(plan: StreamPlan, connection: Connection) -> None:
    rng = random.Random(plan.seed)
    pauses = _Pauses()
    seen: list[list[tuple[float, int]]] = [[] for _ in range(plan.num_streams)]
    async with Client(plan.address) as client:

        async def one(times: list[tuple[float, int]]) -> None:
            async for chunk in client.generate(
                prompt_of(rng, plan.vocab_size, PROMPT_TOKENS),
                max_tokens=plan.max_tokens,
                temperature=0.0,
                ignore_eos=True,
                timeout_s=TIMEOUT_S,
            ):
                if chunk.token_ids:
                    times.append((time.monotonic(), len(chunk.token_ids)))

        tasks = [asyncio.create_task(one(times)) for times in seen]
        end = asyncio.create_task(asyncio.to_thread(connection.recv))
        try:
            while not all(len(times) > _WARM_TOKENS for times in seen):
                _check(tasks)
                await asyncio.sleep(0.05)
            connection.send(("", None))
            await asyncio.wait([end, *tasks], return_when=asyncio.FIRST_COMPLETED)
            _check(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        connection.send(("", Seen(seen, pauses.found)))


def _check(tasks: Sequence[asyncio.Task[None]]) -> None:
    over = [task for task in tasks if task.done()]
    for task in over:
        task.result()  # what it failed with
    if over:
        raise RuntimeError(f"{len(over)} streams ended before the storm: raise --max-tokens")


# -- storms


@dataclass(frozen=True)
class StormOptions:
    """The options of the command."""

    shape: str
    device: str
    transport: str
    handover: str
    direct_transport: str
    overrides: tuple[str, ...]
    streams: int
    max_tokens: int
    prompt_tokens: int
    storm: int
    rounds: int
    seconds: float
    seed: int


async def _storm(
    client: Client, prompts: list[list[int]], ended_s: float, ttft_s: list[float]
) -> None:
    """Send one long prompt after the other until the time is over."""
    while (began_s := time.monotonic()) < ended_s:
        first = True
        async for _ in client.generate(
            prompts.pop(), max_tokens=2, temperature=0.0, ignore_eos=True, timeout_s=TIMEOUT_S
        ):
            if first:
                ttft_s.append(time.monotonic() - began_s)
                first = False


async def _storms(
    address: str, prompts: list[list[int]], options: StormOptions
) -> tuple[list[LoggedSpan], list[LoggedSpan], list[float]]:
    """Run the quiet times and the storms. Returns: the quiet times, the storms, and the storm
    prompts' seconds to the first token."""
    quiet, stormy = [], []
    ttft_s: list[float] = []
    async with Client(address) as client:
        await client.complete(prompts.pop(), max_tokens=2)  # connections, links measured
        for number in range(2 * options.rounds):
            await asyncio.sleep(_REST_S)
            begun_s = time.monotonic()
            ended_s = begun_s + options.seconds
            if number % 4 in (0, 3):  # quiet, storm, storm, quiet
                await asyncio.sleep(options.seconds)
                quiet.append(LoggedSpan(begun_s, ended_s))
                continue
            await asyncio.gather(
                *(_storm(client, prompts, ended_s, ttft_s) for _ in range(options.storm))
            )
            stormy.append(LoggedSpan(begun_s, ended_s))
    return quiet, stormy, ttft_s


def _seen(times: list[list[tuple[float, int]]], spans: list[LoggedSpan]) -> dict[str, float]:
    """Times between messages as the streams' clients saw them."""
    return cuts(
        [
            (after_s - before_s) * 1e3
            for stream in times
            for (before_s, _), (after_s, _) in itertools.pairwise(stream)
            if any(before_s in span and after_s in span for span in spans)
        ]
    )


def _ratio(rounds: list[tuple[dict[str, float], dict[str, float]]]) -> dict[str, Any]:
    """P99 in storms by that in the quiet time of the same round, and the geometric mean."""
    ratios = [storm["p99_ms"] / quiet["p99_ms"] for quiet, storm in rounds]
    return {
        "mean": round(statistics.geometric_mean(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
    }


def _measured(address: str, folder: Path, options: StormOptions) -> dict[str, Any]:
    """Storms over the same streams; the cluster's step logs are there when it has ended."""
    vocab_size = int(SHAPES[options.shape]["vocab_size"])
    rng = random.Random(options.seed + 1)
    prompts = [prompt_of(rng, vocab_size, options.prompt_tokens) for _ in range(_NUM_PROMPTS)]
    entrypoint.begin_serving()
    plan = StreamPlan(address, vocab_size, options.streams, options.max_tokens, options.seed)
    with Streams.running(plan) as streams:
        streams.wait_begun()
        quiet, stormy, ttft_s = asyncio.run(_storms(address, prompts, options))
        seen = streams.end()
    times = seen.streams
    return {
        "quiet": quiet,
        "storm": stormy,
        "seen": {"quiet": _seen(times, quiet), "storm": _seen(times, stormy)},
        "p99_storm_of_quiet": _ratio(
            [(_seen(times, [q]), _seen(times, [s])) for q, s in zip(quiet, stormy, strict=True)]
        ),
        "pauses_of_the_watcher": [
            {"in_storm": any(at_s in span for span in stormy), "ms": round(seconds * 1e3, 2)}
            for at_s, seconds in seen.pauses
        ],
        "storm_prompts": len(ttft_s),
        "storm_ttft_p50_ms": round(statistics.median(ttft_s) * 1e3, 1),
    }


def _config(folder: Path, options: StormOptions) -> ClusterConfig:
    return ClusterConfig(
        model=str(folder),
        port=0,
        transport=options.transport,
        handover=options.handover,
        direct_transport=options.direct_transport,
        device=options.device,
        overrides=(
            "prefill.engine.max_num_tokens_per_step=2048",
            f'decode.step_log="{folder / "logs"}"',
            *options.overrides,
        ),
    )


def _save_checkpoint(folder: Path, options: StormOptions) -> None:
    """Random weights, and a window in which streams and storm have room."""
    kind = "cuda" if "cuda" in options.device else "cpu"
    random_checkpoint.save(folder, options.shape, device=kind)
    path = folder / "config.json"
    longest = max(options.prompt_tokens, PROMPT_TOKENS + options.max_tokens)
    described = json.loads(path.read_text(encoding="utf-8"))
    described["max_position_embeddings"] = longest + _ROOM
    path.write_text(json.dumps(described), encoding="utf-8")


@harness.case
@click.option("--shape", type=click.Choice(list(SHAPES)), default="llama-8b")
@click.option("--device", default="cuda:0,cuda:1", help="as of `baton up`")
@click.option("--transport", default="shm", help="between workers and their store")
@click.option("--handover", type=click.Choice(("store", "direct")), default="store")
@click.option("--direct-transport", default="", help="as of `baton up`")
@click.option("--set", "overrides", multiple=True, help="as of `baton up`")
@click.option("--streams", default=16)
@click.option("--max-tokens", type=int, help="of each stream; default: by shape")
@click.option("--prompt-tokens", default=8192, help="of the storm's prompts")
@click.option("--storm", default=2, help="prompts under way at once")
@click.option("--rounds", default=4, help="of a quiet time and a storm")
@click.option("--seconds", default=3.0, help="of each quiet time, and storm")
@click.option("--seed", default=0)
def main(**given: Any) -> dict[str, Any]:
    """Milliseconds between tokens of streams while long prompts pour in: prefill on one GPU, decode
    on another; the storm's P99 by the quiet one's.

    A cluster of one prefill and one decode worker with random weights. So many streams decode, all
    the time, watched by a process of its own. A quiet time and a storm make a round; every other
    round begins with the storm, since contexts grow and steps with them: what counts is the mean of
    the rounds' ratios. In a storm always --storm long prompts are under way, each handed over to
    the decode worker and ended after its second token: a decode worker that shares nothing with
    prefill but the handover should not show it. `seen`: what the streams' clients saw between two
    messages (and `pauses_of_the_watcher`, which are their own); `steps`: from one step of the
    decode worker's engine to the next, by its step log, the longest with what went on beside
    (tools/step_log.py). Needs two CUDA devices, or one for both with --device cuda:0.
    """
    given["max_tokens"] = given["max_tokens"] or MAX_TOKENS[given["shape"]]
    options = StormOptions(**given)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _save_checkpoint(folder, options)
        with LocalCluster(_config(folder, options)) as cluster:
            found = _measured(cluster.address, folder, options)
        (log,) = (folder / "logs").iterdir()
        entries = step_log.read(log)
    quiet, stormy = found.pop("quiet"), found.pop("storm")
    steps = {"quiet": explain(entries, quiet), "storm": explain(entries, stormy)}
    pairs = [
        (explain(entries, [q])["period"], explain(entries, [s])["period"])
        for q, s in zip(quiet, stormy, strict=True)
    ]
    found["p99_storm_of_quiet_steps"] = _ratio(pairs)
    harness.CONSOLE.print(found, steps)
    return {**given, **found, "steps": steps}


if __name__ == "__main__":
    main()
