"""What a router adds: microseconds of CPU and latency per token, tokens a second, time to the first
token; beside a bare relay of one multiplexed decode stream, in the same run.

Workers are fakes that answer at once over the real wire (benchmarks/router_peers.py); the router is
the real process with the bundled model's tokenizer. For each number of streams there are two runs:
*paced* (steps of a fixed time, far below what any target can do: every token is a message of its
own, so CPU per token and latency are comparable) and *saturated* (steps faster than any target
follows: tokens a second; the router then merges what it cannot send in time, the relay does not).
All requests are taken in before the first of them decodes, and only what comes while all of them do
is counted. `direct` is the client on the decode stream itself: added latency is measured from
there. The client is one process as well and shares the cores with all of them. The last line
printed is one JSON object.

    python -m benchmarks.router_overhead --out benchmarks/results/<date>-router-overhead.json
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from process import entrypoint  # before gRPC; the children inherit what it sets

# isort: split
import aiohttp
import grpc.aio
import msgspec
import uvloop
from rich.console import Console
from rich.table import Table

import checkpoints
from baton.cluster.local_cluster import find_redis_server
from benchmarks.context import context, publish
from benchmarks.router_clients import Ask, a_request, direct, first_of, over_grpc, over_http
from benchmarks.router_peers import SERVICE
from process import rpc
from tokens.text import OutputText
from tokens.tokenizer import Tokenizer

MODEL = "baton-5m"
TOKENS_PER_S = 2_000
"""Of the paced runs, of all streams together: far below what any target can do."""
MOST_TOKENS_PER_S = 40_000
"""Of the saturated runs: more than any target takes."""
_FEW = 3


@dataclass
class Run:
    """What one run of several streams came to, while all of them were under way: from the moment
    when each has a few tokens until the first one ends.
    """

    pid: int
    num_tokens: int = 0
    num_messages: int = 0
    transits_s: list[float] = field(default_factory=list)
    wall_s: float = 0.0
    cpu_s: float = 0.0
    is_steady: bool = False

    def begin(self) -> None:
        """All streams are under way."""
        self.is_steady = True
        self.cpu_s, self.wall_s = -cpu_of(self.pid), -time.monotonic()

    def end(self) -> None:
        """The first one ends."""
        self.is_steady = False
        self.cpu_s += cpu_of(self.pid)
        self.wall_s += time.monotonic()

    def take(self, count: int, transit_s: float) -> None:
        """A message came."""
        if not self.is_steady:
            return
        self.num_tokens += count
        self.num_messages += 1
        if transit_s == transit_s:
            self.transits_s.append(transit_s)

    def figures(self, *, is_paced: bool) -> dict[str, float]:
        """As published."""
        figures = {
            "tokens_per_s": round(self.num_tokens / self.wall_s),
            "tokens_per_message": round(self.num_tokens / self.num_messages, 2),
            "cpu_us_per_token": round(self.cpu_s / self.num_tokens * 1e6, 1),
            "num_tokens": self.num_tokens,
        }
        if is_paced:
            cuts = statistics.quantiles(self.transits_s, n=100)
            figures |= {
                "transit_p50_ms": round(cuts[49] * 1e3, 3),
                "transit_p99_ms": round(cuts[98] * 1e3, 3),
            }
        return figures


async def run_streams(
    ask: Ask, pid: int, *, num_streams: int, num_tokens: int, step_s: float, has_times: bool
) -> Run:
    """`num_streams` requests at the same time; the CPU is that of process `pid`.

    Raises: RuntimeError when they were never all under way.
    """
    run, num_started, is_over = Run(pid), 0, False

    async def one() -> None:
        nonlocal num_started, is_over
        num_messages = 0
        async for count, transit_s in ask(num_tokens, step_s, has_times, num_streams):
            num_messages += 1
            run.take(count, transit_s)
            if num_messages == _FEW:
                num_started += 1
                if num_started == num_streams and not is_over:
                    run.begin()
        if run.is_steady:
            run.end()
        is_over = True

    async with asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(one())
    if not run.num_tokens:
        raise RuntimeError(f"{num_streams} streams of {num_tokens} tokens never ran together")
    return run


async def first_tokens(
    ask: Callable[[], Awaitable[float]], count: int, pid: int
) -> dict[str, float]:
    """Milliseconds to the first token, one request after the other, and the CPU of process `pid`
    for a whole request.
    """
    for _ in range(20):
        await ask()
    cpu_s = cpu_of(pid)
    times_ms = [await ask() * 1e3 for _ in range(count)]
    cuts = statistics.quantiles(times_ms, n=100)
    return {
        "p50_ms": round(cuts[49], 3),
        "p99_ms": round(cuts[98], 3),
        "cpu_ms_per_request": round((cpu_of(pid) - cpu_s) / count * 1e3, 3),
    }


async def measure_first_tokens(
    router: str, prefill: str, text: str, ids: Sequence[int], count: int, pids: tuple[int, int]
) -> dict[str, dict[str, float]]:
    """Through the router with and without tokenizing, and from the prefill worker itself; `pids`:
    the workers' and the router's.
    """
    generate: Any = rpc.channel(router).unary_stream(f"/{SERVICE}/Generate")

    def through(prompt: str | Sequence[int]) -> Callable[[], Awaitable[float]]:
        data = a_request(2, 0.0, False, prompt=prompt).SerializeToString()

        async def ask() -> float:
            began_s = time.perf_counter()
            call = generate(data)
            await call.read()
            first_s = time.perf_counter() - began_s
            while await call.read() is not grpc.aio.EOF:
                pass
            return first_s

        return ask

    return {
        "worker": await first_tokens(first_of(prefill, ids), count, pids[0]),
        "router_ids": await first_tokens(through(ids), count, pids[1]),
        "router_text": await first_tokens(through(text), count, pids[1]),
    }


def text_cost_us(tokenizer: Tokenizer) -> float:
    """Microseconds of detokenizing and stop matching per token, part of the router's."""
    ids = [300 + number % 600 for number in range(20_000)]
    output = OutputText(tokenizer, stop=("zzz",))
    began_s = time.process_time()
    for token_id in ids:
        output.feed((token_id,))
    return round((time.process_time() - began_s) / len(ids) * 1e6, 1)


def cpu_of(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A child process, ended at the end."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ready_line(process: subprocess.Popen[str]) -> list[str]:
    """Its addresses. Raises: RuntimeError when it ended instead."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("ready "):
            return line.split()[1:]
    raise RuntimeError("a process of the benchmark ended early")


@contextmanager
def router_process(redis_url: str, folder: Path) -> Iterator[tuple[int, str, str]]:
    """The real router. Yields: pid, gRPC address, HTTP address."""
    log = folder / "router.log"
    settings = {
        "redis_url": f'"{redis_url}"',
        "model": f'"{MODEL}"',
        "listen": '"127.0.0.1:0"',
        "http_listen": '"127.0.0.1:0"',
        "admission.max_queued_requests": "4096",
        "admission.max_queued_per_tenant": "4096",
    }
    argv = [sys.executable, "-m", "services.router"]
    for key, value in settings.items():
        argv += ["--set", f"{key}={value}"]
    with log.open("w") as out:
        process = subprocess.Popen(argv, stdout=out, stderr=out)
    try:
        for _ in range(600):
            for line in log.read_text().splitlines():
                if '"event": "ready"' in line:
                    fields = msgspec.json.decode(line)
                    yield process.pid, fields["address"], fields["http"]
                    return
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-2000:])
            time.sleep(0.1)
        raise RuntimeError("the router did not come up")
    finally:
        process.kill()
        process.wait()


async def measure(arguments: argparse.Namespace, redis_url: str, folder: Path) -> dict[str, Any]:
    """All runs."""
    checkpoint = checkpoints.resolve(MODEL, files="tokenizer")
    tokenizer = Tokenizer.load(checkpoint.path)
    text = "Once upon a time there was a little dog who liked to run. " * 4
    peers = (sys.executable, "-m", "benchmarks.router_peers")
    result: dict[str, Any] = {
        **context(),
        "grpc": entrypoint.grpc_experiments(),
        "text_us_per_token": text_cost_us(tokenizer),
    }
    with started(*peers, "workers", redis_url, MODEL) as workers:
        decode, prefill = ready_line(workers)
        with (
            started(*peers, "relay", decode) as relay,
            router_process(redis_url, folder) as (pid, router, http),
        ):
            (relay_address,) = ready_line(relay)
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
                await _until_served(router)
                result["first_token"] = await measure_first_tokens(
                    router,
                    prefill,
                    text,
                    tokenizer.encode(text),
                    arguments.requests,
                    (workers.pid, pid),
                )
                targets: dict[str, tuple[Ask, int]] = {
                    "direct": (direct(decode), workers.pid),
                    "relay": (over_grpc(relay_address), relay.pid),
                    "router": (over_grpc(router), pid),
                    "router_http": (over_http(http, session), pid),
                }
                for num_streams in arguments.streams:
                    result[f"streams_{num_streams}"] = await measure_streams(
                        targets, num_streams, arguments.seconds
                    )
    return result


async def measure_streams(
    targets: dict[str, tuple[Ask, int]], num_streams: int, seconds: float
) -> dict[str, Any]:
    """Paced and saturated, each target in turn."""
    found: dict[str, Any] = {}
    step_s = num_streams / TOKENS_PER_S
    for name, (ask, pid) in targets.items():
        Console(stderr=True).print(f"{num_streams} streams, {name}")
        paced = await run_streams(
            ask,
            pid,
            num_streams=num_streams,
            num_tokens=10 + int(seconds / step_s),
            step_s=step_s,
            has_times=True,
        )
        found[name] = {"paced": paced.figures(is_paced=True)}
        if name == "direct":
            continue
        num_tokens = max(400, int(seconds * 10_000 / num_streams))
        full = await run_streams(
            ask,
            pid,
            num_streams=num_streams,
            num_tokens=num_tokens,
            step_s=num_streams / MOST_TOKENS_PER_S,
            has_times=False,
        )
        found[name]["saturated"] = full.figures(is_paced=False)
    for name in ("relay", "router", "router_http"):
        mine, base = found[name]["paced"], found["direct"]["paced"]
        for quantile in ("p50", "p99"):
            key = f"transit_{quantile}_ms"
            found[name][f"added_{quantile}_ms"] = round(mine[key] - base[key], 3)
    relay = found["relay"]["saturated"]["tokens_per_s"]
    for name in ("router", "router_http"):
        found[name]["of_relay"] = round(found[name]["saturated"]["tokens_per_s"] / relay, 3)
    return found


async def _until_served(router: str) -> None:
    """The router has seen the workers and is connected to them."""
    ask = over_grpc(router)
    for _ in range(100):
        try:
            async for _message in ask(3, 0.0, False, 0):
                pass
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.1)
        else:
            return
    raise RuntimeError("the router does not serve")


def show(result: dict[str, Any]) -> None:
    """The table."""
    table = Table("streams", "through", "CPU us/token", "added p50/p99 ms", "tokens/s", "of relay")
    for key, runs in result.items():
        if not key.startswith("streams_"):
            continue
        for name in ("relay", "router", "router_http"):
            run = runs[name]
            table.add_row(
                key.removeprefix("streams_"),
                name,
                str(run["paced"]["cpu_us_per_token"]),
                f"{run['added_p50_ms']} / {run['added_p99_ms']}",
                f"{run['saturated']['tokens_per_s']} "
                f"({run['saturated']['tokens_per_message']} a message)",
                str(run.get("of_relay", "")),
            )
    console = Console(stderr=True)
    console.print(table)
    console.print(result["first_token"])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--seconds", type=float, default=3.0, help="about, of each run")
    parser.add_argument("--requests", type=int, default=200, help="for the time to first token")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as name:
        folder = Path(name)
        socket = folder / "redis.sock"
        options = ("--port", "0", "--unixsocket", str(socket), "--save", "", "--appendonly", "no")
        with started(str(find_redis_server()), *options, "--dir", name):
            while not socket.exists():
                time.sleep(0.01)
            result = uvloop.run(measure(arguments, f"unix://{socket}", folder))
    show(result)
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
