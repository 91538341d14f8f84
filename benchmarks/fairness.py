"""A noisy tenant against a quiet one: how long the quiet one waits, with the fair queue or not.

One whole cluster each, in turn. The noisy tenant keeps `--noisy` requests under way all the time,
the quiet one sends one now and then (Poisson). "Without" lets every request through to the workers
at once, whose own queues know no tenants. A request waits wherever it does (in the router, for
blocks, in the engine), so what is told is the time to the first token, and how far it is above the
median of the quiet tenant alone. The last line printed is one JSON object.

    python -m benchmarks.fairness --seconds 20 --out benchmarks/results/<date>-fairness.json
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton import ClusterConfig, LocalCluster
from baton.client import Client
from baton.errors import BatonError
from benchmarks.context import context, publish
from services.router.admission_settings import AdmissionSettings

EVERYTHING = (
    "router.admission.num_steps_ahead=1000000",
    "router.admission.max_active_requests=1000000",
)
"""Without a queue of the router's own."""

_WARM_UP_S = 4.0
"""Until the workers have what they take."""


@dataclass
class Seen:
    """One tenant in one kind of phase, over all of its rounds. Seconds."""

    ttft_s: list[float] = field(default_factory=list)
    num_failed: int = 0
    seconds: float = 0.0
    """That were measured."""

    def summary(self) -> dict[str, Any]:
        return {
            "num_requests": len(self.ttft_s),
            "num_failed": self.num_failed,
            "requests_per_s": round(len(self.ttft_s) / self.seconds, 2),
            **_quantiles(self.ttft_s),
        }


class Load:
    """Two tenants' requests at one cluster."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self._client = client
        self._arguments = arguments
        self._rng = random.Random(arguments.seed)

    async def one(self, tenant: str, into: Seen) -> None:
        """A request with a prompt that nobody has seen."""
        prompt = [self._rng.randrange(100, 2000) for _ in range(self._arguments.prompt_tokens)]
        began_s, first_s = time.perf_counter(), 0.0
        try:
            async for _ in self._client.generate(
                prompt,
                tenant=tenant,
                max_tokens=self._arguments.output_tokens,
                ignore_eos=True,
                timeout_s=300.0,
            ):
                first_s = first_s or time.perf_counter() - began_s
        except BatonError:
            into.num_failed += 1
            return
        into.ttft_s.append(first_s)

    async def quiet(self, into: Seen) -> list[asyncio.Task[None]]:
        """The quiet tenant for a while. Returns: its requests, of which some are still to end."""
        end_s, calls = time.perf_counter() + self._arguments.seconds, list[asyncio.Task[None]]()
        while time.perf_counter() < end_s:
            calls.append(asyncio.create_task(self.one("quiet", into)))
            await asyncio.sleep(self._rng.expovariate(self._arguments.quiet_per_s))
        into.seconds += self._arguments.seconds
        return calls

    async def beside_noise(self, quiet: Seen, noisy: Seen) -> None:
        """Both tenants; the noisy one's first requests have arrived before."""
        now = Seen()

        async def keep_on() -> None:
            while True:
                await self.one("noisy", now)

        crowd = [asyncio.create_task(keep_on()) for _ in range(self._arguments.noisy)]
        await asyncio.sleep(_WARM_UP_S)
        num_before = len(now.ttft_s)
        calls = await self.quiet(quiet)
        # Those that ended within the phase, whenever they began.
        noisy.ttft_s += now.ttft_s[num_before:]
        noisy.num_failed += now.num_failed
        noisy.seconds += self._arguments.seconds
        await asyncio.gather(*calls)
        for task in crowd:
            task.cancel()
        await asyncio.gather(*crowd, return_exceptions=True)


class Side:
    """One cluster and what was seen of it."""

    def __init__(self, client: Client, arguments: argparse.Namespace) -> None:
        self.load = Load(client, arguments)
        self.alone, self.quiet, self.noisy = Seen(), Seen(), Seen()

    def summary(self) -> dict[str, Any]:
        quiet, alone = self.quiet.summary(), self.alone.summary()
        quiet["waited_p99_ms"] = round(quiet["ttft_p99_ms"] - alone["ttft_p50_ms"], 1)
        return {"alone": alone, "quiet": quiet, "noisy": self.noisy.summary()}


async def rounds(addresses: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Each cluster in its turn, again and again, so that drift of the machine hits both."""
    async with contextlib.AsyncExitStack() as stack:
        sides = [
            Side(await stack.enter_async_context(Client(address)), arguments)
            for address in addresses
        ]
        for side in sides:
            for _ in range(3):
                await side.load.one("warm-up", Seen())
        for _ in track(range(arguments.rounds), "rounds", console=Console(stderr=True)):
            for side in sides:
                await asyncio.gather(*await side.load.quiet(side.alone))
                await side.load.beside_noise(side.quiet, side.noisy)
        return [side.summary() for side in sides]


def config(arguments: argparse.Namespace, *overrides: str) -> ClusterConfig:
    overrides = (*overrides, "worker.limits.max_waiting_requests=1024")
    return ClusterConfig(port=0, model=arguments.model, overrides=overrides)


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {
        "ttft_p50_ms": round(cuts[49] * 1e3, 1),
        "ttft_p99_ms": round(cuts[98] * 1e3, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each phase")
    parser.add_argument("--noisy", type=int, default=64, help="requests under way")
    parser.add_argument("--quiet-per-s", type=float, default=2.0)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=8)
    parser.add_argument("--steps-ahead", type=int, default=AdmissionSettings().num_steps_ahead)
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    ahead = f"router.admission.num_steps_ahead={arguments.steps_ahead}"
    with (
        LocalCluster(config(arguments, ahead)) as fair,
        LocalCluster(config(arguments, *EVERYTHING)) as open_to_all,
    ):
        addresses = (fair.address, open_to_all.address)
        with_queue, without = asyncio.run(rounds(addresses, arguments))
    result = {
        "benchmark": "fairness",
        **context(),
        "model": arguments.model,
        "num_noisy": arguments.noisy,
        "quiet_per_s": arguments.quiet_per_s,
        "num_prompt_tokens": arguments.prompt_tokens,
        "num_output_tokens": arguments.output_tokens,
        "num_steps_ahead": arguments.steps_ahead,
        "num_rounds": arguments.rounds,
        "seconds": arguments.seconds,
        "with_fair_queue": with_queue,
        "without": without,
    }
    table = Table("", "quiet alone", "quiet, fair queue", "quiet, without")
    for what in ("ttft_p50_ms", "ttft_p99_ms", "waited_p99_ms"):
        found = (with_queue["alone"], with_queue["quiet"], without["quiet"])
        table.add_row(what, *(str(each.get(what, "-")) for each in found))
    rates = (with_queue["noisy"], without["noisy"])
    table.add_row("noisy requests/s", "-", *(str(each["requests_per_s"]) for each in rates))
    Console(stderr=True).print(table)
    publish(result, arguments.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
