"""What of a prompt's KV on its way from prefill to decode is left to see: through the store, and
directly out of the prefill worker's own cache.

One local cluster for each transport, with two routers over the same workers: one hands over through
the store, the other directly. The same number of fresh prompts goes through each, in turns, and
through one engine in this process that does both roles: the ceiling, for which nothing moves.
`exposed` is the time between the first and the second token beyond what later tokens take, so what
of storing, handing over and loading did not hide behind the prefill: messages, changes of thread,
and what the first step takes longer than later ones, included. `exposed_transfer` is the part of it
in which the request waits for its KV: from the first token until prefill has stored or lent the
last blocks and made their handle (`prefill_store`), and from that handle's arrival at decode until
every block is there and verified (`decode_fetch`). As what the bytes alone would cost, a plain copy
of as many in memory stands beside them. Each answer's provenance is checked for the way that it
went. `--timeline FILE.svg` draws one more request of each way, the way's name behind FILE's. The
last line printed is one JSON object.

    python -m benchmarks.handover --requests 5 --prompt-tokens 1024 8192
    python -m benchmarks.handover --shape llama-8b --device cuda:0,cuda:1 --transports shm \
        --paths direct --prompt-tokens 8192 --direct-transport cuda_ipc \
        --set prefill.engine.max_num_tokens_per_step=2048

With the shm transport the direct path goes over gRPC: no other process maps a worker's own cache in
host memory; `--direct-transport nixl` lets NIXL push it. With `--device
cuda:0,cuda:1` the workers compute on GPUs, and so does the one engine, on the first; a `--shape`
has random weights and no engine beside the cluster, for which a GPU has no room.
The bundled model's window is lengthened where it is shorter than the prompts, see
benchmarks.prefix_hit. Nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from baton import ClusterConfig, LocalCluster
from baton.cli import plots
from baton.client import SyncClient
from baton.cluster import plan as cluster_plan
from baton.cluster.supervisor import Supervisor
from baton.messages import Chunk, completions_from
from benchmarks import random_checkpoint
from benchmarks.context import context, publish
from benchmarks.prefix_hit import ask, with_window
from benchmarks.random_checkpoint import SHAPES
from benchmarks.serve import Latencies, through_engine
from engine.config import EngineConfig
from engine.loop import Engine, load_engine
from process import entrypoint

TRANSPORTS = ("shm", "nixl", "grpc")
PATHS = ("store", "direct")
TRANSFER_STAGES = ("prefill_store", "decode_fetch")
"""Of the account of a request: the waits for its KV that no prefill hides."""
OUTPUT_TOKENS = 16
_START_S = 60.0
_SETTLE_S = 0.5
_NUM_WARM_UPS = 2
_NUM_COPIES = 5


@dataclass
class Series:
    """One way's requests, in seconds, and the bytes that decode read of each."""

    ttft_s: list[float] = field(default_factory=list)
    exposed_s: list[float] = field(default_factory=list)
    stages: list[Mapping[str, float]] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)

    def add(self, times_s: Sequence[float]) -> None:
        """Of one request: when it began and each token came."""
        gaps = [after - before for before, after in itertools.pairwise(times_s[1:])]
        self.ttft_s.append(times_s[1] - times_s[0])
        self.exposed_s.append(max(0.0, gaps[0] - statistics.median(gaps[1:])))

    @property
    def transfer_s(self) -> list[float]:
        """Of each request with an account: what it waited for its KV behind the first token."""
        return [sum(stages.get(name, 0.0) for name in TRANSFER_STAGES) for stages in self.stages]

    def figures(self) -> dict[str, Any]:
        """Medians; of the waits for KV where the requests have accounts."""
        ttft_s, exposed_s = statistics.median(self.ttft_s), statistics.median(self.exposed_s)
        names = sorted({name for stages in self.stages for name in stages})
        transfer = {}
        if self.stages:
            transfer_s = statistics.median(self.transfer_s)
            transfer = {
                "exposed_transfer_p50_ms": round(transfer_s * 1e3, 2),
                "exposed_transfer_share_of_ttft": round(transfer_s / ttft_s, 4),
            }
        return {
            "ttft_p50_ms": round(ttft_s * 1e3, 2),
            "exposed_p50_ms": round(exposed_s * 1e3, 2),
            "exposed_share_of_ttft": round(exposed_s / ttft_s, 4),
            **transfer,
            "stage_p50_ms": {
                name: round(
                    statistics.median(stages.get(name, 0.0) for stages in self.stages) * 1e3, 3
                )
                for name in names
            },
        }


@contextlib.contextmanager
def routers(cluster: LocalCluster) -> Iterator[dict[str, SyncClient]]:
    """A client by path: of the cluster's own router, which hands over through the store, and of a
    second one over the same workers, which hands over directly."""
    config = replace(cluster.config, handover="direct")
    spec = cluster_plan.router(config, redis_url=cluster.redis_url, listen="127.0.0.1:0")
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as logs:
        supervisor = Supervisor(Path(logs), lambda event: None)
        try:
            supervisor.launch([spec])
            supervisor.wait_ready([spec.name], time.monotonic() + _START_S)
            address = supervisor.processes()[spec.name].address
            with SyncClient(cluster.address) as store, SyncClient(address) as direct:
                yield dict(zip(PATHS, (store, direct), strict=True))
        finally:
            supervisor.stop([["router"]])


def through_cluster(client: SyncClient, path: str, prompt: list[int], into: Series) -> None:
    """One request. Raises: RuntimeError when it went another way than meant."""
    times_s, end = ask(client, prompt, OUTPUT_TOKENS)
    assert end.provenance is not None
    legs = {leg.role: leg for leg in end.provenance.legs}
    num_direct = len(prompt) if path == "direct" else 0
    if legs["prefill"].handover != path or legs["decode"].num_tokens_direct != num_direct:
        raise RuntimeError(f"{path} was meant: {legs}")
    into.add(times_s)
    into.stages.append(end.times)
    into.num_bytes.append(legs["decode"].num_bytes_read)


def watch_one(client: SyncClient, prompt: list[int]) -> Callable[[Path], None]:
    """One request. Returns: what draws it."""
    began_s = time.perf_counter()
    arrivals_s: list[float] = []
    ended_s = 0.0

    def noted() -> Iterator[Chunk]:
        nonlocal ended_s
        for chunk in client.generate(
            prompt, max_tokens=OUTPUT_TOKENS, ignore_eos=True, temperature=0.0
        ):
            ended_s = time.perf_counter() - began_s
            arrivals_s.extend([ended_s] * bool(chunk.token_ids))
            yield chunk

    (completion,) = completions_from(noted())
    return partial(plots.draw_timeline, completion, arrivals_s, ended_s)


def copy_s(num_bytes: int) -> float:
    """Seconds that a plain copy of so many bytes takes, the median of a few."""
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    times = []
    for _ in range(_NUM_COPIES):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def measured(
    clients: Mapping[str, SyncClient],
    engine: Engine | None,
    rng: random.Random,
    num_tokens: int,
    count: int,
    console: Console,
) -> dict[str, Series]:
    """`count` prompts of so many tokens each way, in turns; no two share a prefix."""
    found = {name: Series() for name in (*(("engine",) if engine else ()), *clients)}
    for index in track(range(-_NUM_WARM_UPS, count), f"{num_tokens} tokens", console=console):
        for name, series in found.items():
            prompt = [rng.randrange(100, 2000) for _ in range(num_tokens)]
            into = series if index >= 0 else Series()
            if name in clients:
                through_cluster(clients[name], name, prompt, into)
            elif engine is not None:
                times = Latencies()
                through_engine(engine, prompt, OUTPUT_TOKENS, times)
                gaps = [times.ttft_s[0], *times.itl_s]
                into.add([0.0, *itertools.accumulate(gaps)])
            time.sleep(_SETTLE_S)  # what the last one stores and frees in the background
    return found


def figures_of(transport: str, num_tokens: int, found: Mapping[str, Series]) -> dict[str, Any]:
    """All medians of one transport and length, and what the bytes alone cost."""
    paths = [path for path in PATHS if path in found]
    num_bytes = int(statistics.median(found[paths[0]].num_bytes))
    exposed = {path: statistics.median(found[path].exposed_s) for path in paths}
    share = {}
    if all(exposed.get(path) for path in PATHS):
        share = {"exposed_direct_of_store": round(exposed["direct"] / exposed["store"], 3)}
    return {
        "transport": transport,
        "num_prompt_tokens": num_tokens,
        "num_kv_bytes": num_bytes,
        "copy_ms": round(copy_s(num_bytes) * 1e3, 3),
        **share,
        **{name: series.figures() for name, series in found.items()},
    }


def table_of(figures: Sequence[Mapping[str, Any]]) -> Table:
    """A row for each length and way."""
    table = Table(
        "KV over", "prompt", "", "TTFT ms", "exposed ms", "of TTFT", "KV ms", "of TTFT", "copy ms"
    )
    for figure in figures:
        for name in [name for name in ("engine", *PATHS) if name in figure]:
            row = figure[name]
            table.add_row(
                figure["direct_transport"] if name == "direct" else figure["transport"],
                str(figure["num_prompt_tokens"]),
                "engine (ceiling)" if name == "engine" else name,
                f"{row['ttft_p50_ms']:.1f}",
                *_with_share(row, "exposed"),
                *_with_share(row, "exposed_transfer"),
                f"{figure['copy_ms']:.2f}",
            )
    return table


def _with_share(row: Mapping[str, Any], name: str) -> tuple[str, str]:
    """Milliseconds, and what part of the time to the first token that is; where it was measured."""
    if f"{name}_p50_ms" not in row:
        return "", ""
    return f"{row[f'{name}_p50_ms']:.2f}", f"{100 * row[f'{name}_share_of_ttft']:.1f} %"


@contextlib.contextmanager
def model_of(arguments: argparse.Namespace) -> Iterator[str]:
    """A checkpoint whose window holds the prompts."""
    if not arguments.shape:
        with with_window(arguments.model, max(arguments.prompt_tokens) + OUTPUT_TOKENS) as model:
            yield model
        return
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        kind = arguments.device.partition(":")[0]
        random_checkpoint.save(Path(folder), arguments.shape, device=kind)
        yield folder


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=5, help="of each length and way")
    parser.add_argument("--prompt-tokens", nargs="+", type=int, default=[1024, 8192])
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument("--model", default=ClusterConfig().model)
    parser.add_argument("--shape", choices=list(SHAPES), help="random weights, instead of --model")
    parser.add_argument("--device", default=ClusterConfig().device, help="as of `baton up`")
    parser.add_argument(
        "--direct-transport", nargs="+", default=[""], help="as of `baton up`; a cluster for each"
    )
    parser.add_argument("--set", action="append", default=[], help="as of `baton up`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeline", type=Path, help="*.svg, *.png or *.pdf; needs matplotlib")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.timeline:
        plots.check("--timeline", arguments.timeline)
    console = Console(stderr=True)
    rng = random.Random(arguments.seed)
    figures = []
    drawings: dict[str, Callable[[Path], None]] = {}
    with model_of(arguments) as model:
        engine = None
        if not arguments.shape:
            first = arguments.device.split(",")[0]
            engine = load_engine(EngineConfig(model=model, device=first, num_threads=1))
        entrypoint.begin_serving()  # a look at all that is loaded here would count as exposed
        for transport, direct in itertools.product(
            arguments.transports, arguments.direct_transport
        ):
            config = ClusterConfig(
                model=model,
                port=0,
                transport=transport,
                handover="store",
                device=arguments.device,
                direct_transport=direct,
                overrides=tuple(arguments.set),
            )
            with LocalCluster(config) as cluster, routers(cluster) as every:
                clients = {path: every[path] for path in arguments.paths}
                for num_tokens in arguments.prompt_tokens:
                    found = measured(clients, engine, rng, num_tokens, arguments.requests, console)
                    figures.append(
                        {"direct_transport": direct, **figures_of(transport, num_tokens, found)}
                    )
                    for path, client in clients.items() if arguments.timeline else ():
                        name = "-".join(filter(None, (transport, direct, path, str(num_tokens))))
                        prompt = [rng.randrange(100, 2000) for _ in range(num_tokens)]
                        drawings[name] = watch_one(client, prompt)
    console.print(table_of(figures))
    result = {
        "benchmark": "handover",
        **context(),
        "model": arguments.shape or arguments.model,
        "device": arguments.device,
        "num_requests": arguments.requests,
        "num_output_tokens": OUTPUT_TOKENS,
        "figures": figures,
    }
    publish(result, arguments.out)
    for name, draw in drawings.items():  # behind the figures, which a failing one would cost
        draw(arguments.timeline.with_stem(f"{arguments.timeline.stem}-{name}"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
