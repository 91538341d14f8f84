"""Several tokens a step on one GPU: what a step costs that verifies guesses, and what it brings.

Random weights, bfloat16, greedy, made where they are used: no checkpoint, no disk. What attention
and MLP add to a token is scaled down so far that the next token is the last one's successor
whatever is rounded how: costs are those of any weights, and whoever knows the rule can guess right
as often as he likes. Plain steps are launched ahead, as they are where nobody guesses.

1. A step by number of guessed tokens (`--nodes`), a tree of four branches for each sequence, at
   batch 1, 8 and 32 with 1,024 tokens of context: milliseconds of the engine's whole step, without
   the time that the drafter takes, beside a plain step's; and of the forward pass alone on the
   device, and its launch on the host. A step of more rows than there are graphs for says so.
2. Speed by batch size, 1 to 64, with guesses of up to four tokens of which each is right with the
   chance that gives `--tokens-per-step` where all are computed (what the bundled model has with its
   draft model: benchmarks/speculation.py, batch 1, "all of the tree"); the engine chooses how many
   it computes, and has served that batch for a while. The drafter itself costs nothing here: a
   draft model's time comes on top.

    python -m benchmarks.speculation_gpu --shape llama-8b

The last line printed is one JSON object. Needs one CUDA device with 80 GB; takes about two minutes.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.context import context, publish
from benchmarks.known_model import (
    BLOCK_SIZE,
    DEPTH,
    DEVICE,
    NUM_BRANCHES,
    Scripted,
    chance_for,
    make_model,
    make_weights,
    successor,
)
from benchmarks.random_checkpoint import SHAPES
from engine.batch import Batch, Span
from engine.config import EngineConfig
from engine.decoder.model import DecoderModel
from engine.decoder.shape import DecoderShape, read_shape
from engine.decoder.weights import DecoderWeights
from engine.loop import Engine
from engine.request import Request, Sampling
from engine.speculation.config import SpeculationConfig
from kvstore import block_hash
from process import entrypoint

CONTEXT = 1024
NUM_BLOCKS = 4096
NUM_STEPS = 40
MAX_BATCH = 64
SWEEP_PROMPT, SWEEP_OUTPUT = 512, 97
SETTLING_STEPS = 400
"""Tokens of a sequence before its batch is measured: batches above four are tried after 200 steps
(engine/speculation/worth.py), and a server's load lasts longer."""
_ROOT = block_hash.root_key(b"benchmark", "00")


def _block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """As a worker's."""
    return block_hash.extend(_ROOT, parent, token_ids)


# -- runs


class Bench:
    """One engine, and requests that differ from all before."""

    def __init__(self, engine: Engine, shape: DecoderShape) -> None:
        self.engine = engine
        self._shape = shape
        self._num_requests = 0

    def submit(self, batch: int, num_prompt: int, num_output: int) -> list[str]:
        vocab_size = self.engine.model_info.vocab_size
        sampling = Sampling(max_tokens=num_output, ignore_eos=True)
        names = []
        for _ in range(batch):
            self._num_requests += 1
            token_ids = tuple(
                (self._num_requests * 7919 + at * 104_729) % vocab_size for at in range(num_prompt)
            )
            names.append(f"r{self._num_requests}")
            self.engine.submit(Request(names[-1], token_ids, sampling, _block_hash))
        return names

    def steps(self, names: Sequence[str]) -> Iterator[tuple[float, dict[str, tuple[int, ...]]]]:
        """(milliseconds, new tokens by request) of each step after all have drawn."""
        live: set[str] = set()
        while self.engine.has_work():
            was_full = len(live) == len(names)
            began = time.perf_counter()
            output = self.engine.step()
            took_ms = (time.perf_counter() - began) * 1e3
            told = {event.request_id: event.token_ids for event in output.events}
            live |= told.keys()
            if was_full:
                yield took_ms, told

    def step_ms(self, batch: int, drafter: Scripted | None = None) -> float:
        """Median of NUM_STEPS steps of decodes alone, without what the drafter took."""
        names = self.submit(batch, CONTEXT, 1000)
        found: list[float] = []
        before = drafter.seconds if drafter else 0.0
        for took_ms, told in self.steps(names):
            if any(len(token_ids) != 1 for token_ids in told.values()):
                raise SystemExit("a wrong guess was kept, or a step told nothing")
            drafted_s = drafter.seconds - before if drafter else 0.0
            before = drafter.seconds if drafter else 0.0
            found.append(took_ms - drafted_s * 1e3)
            if len(found) == NUM_STEPS:
                break
        for name in names:
            self.engine.abort(name)
        while self.engine.has_work():
            self.engine.step()
        self.engine.step()  # whatever is in flight is over
        return statistics.median(found[5:])

    def answers(self, batch: int) -> tuple[float, float]:
        """(tokens per second from all first tokens to the last one, tokens of a sequence's step).
        Every answer is looked at."""
        names = self.submit(batch, SWEEP_PROMPT, SWEEP_OUTPUT)
        took_s, num_tokens, num_events = 0.0, 0, 0
        newest: dict[str, int] = {}
        for took_ms, told in self.steps(names):
            took_s += took_ms / 1e3
            for name, token_ids in told.items():
                for token_id in token_ids:
                    before = newest.get(name)
                    if before is not None and token_id != successor(before, self._shape):
                        raise SystemExit(f"{name}: {token_id} is not what follows {before}")
                    newest[name] = token_id
                num_tokens += len(token_ids)
                num_events += 1
        return num_tokens / took_s, num_tokens / num_events


def device_times(model: DecoderModel, batch: int, num_nodes: int) -> dict[str, float]:
    """One forward pass: median milliseconds on the device, and until the host had launched it. What
    lies in the cache is spoiled."""
    each = -(-(CONTEXT + 1 + num_nodes) // BLOCK_SIZE)
    parents = [
        -1 if place == num_nodes * branch // NUM_BRANCHES else place - 1
        for branch in range(NUM_BRANCHES)
        for place in range(
            num_nodes * branch // NUM_BRANCHES, num_nodes * (branch + 1) // NUM_BRANCHES
        )
    ]
    spans = tuple(
        Span(
            CONTEXT,
            1 + num_nodes,
            tuple(range(index * each, (index + 1) * each)),
            branches=tuple(parents),
        )
        for index in range(batch)
    )
    num_rows = batch * (1 + num_nodes)
    step = Batch((1,) * num_rows, spans, tuple(range(num_rows)))
    device_ms, host_ms = [], []
    for _ in range(15):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        began = time.perf_counter()
        start.record()
        model.forward(step)
        end.record()
        host_ms.append((time.perf_counter() - began) * 1e3)
        end.synchronize()
        device_ms.append(start.elapsed_time(end))
    return {
        "device_ms": round(statistics.median(device_ms[5:]), 3),
        "host_ms": round(statistics.median(host_ms[5:]), 3),
    }


def _config(num_nodes: int, *, always: bool) -> EngineConfig:
    return EngineConfig(
        device=DEVICE,
        max_num_tokens_per_step=8192,
        max_num_running=MAX_BATCH,
        num_blocks=NUM_BLOCKS,
        speculation=SpeculationConfig(max_num_nodes=max(num_nodes, 1), always=always),
    )


def _engine(
    weights: DecoderWeights, num_nodes: int, drafter: Scripted | None, *, always: bool = False
) -> tuple[Engine, DecoderModel, float]:
    """And the seconds that its graphs and kernels took."""
    config = _config(num_nodes, always=always)
    model = make_model(weights, config, num_nodes=num_nodes)
    engine = Engine(config, model, drafters=[drafter] if drafter else [])
    began = time.perf_counter()
    engine.warm_up()
    return engine, model, time.perf_counter() - began


def _close(engine: Engine) -> None:
    engine.check_integrity()
    engine.close()
    gc.collect()
    torch.cuda.empty_cache()


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Both parts."""
    config = transformers.AutoConfig.for_model(**_for_model(SHAPES[arguments.shape]))
    shape = read_shape(config)
    weights = make_weights(shape)
    drafter = Scripted(shape)
    plain_engine, _, plain_ready_s = _engine(weights, 0, None)
    most = max(arguments.nodes)
    engine, model, ready_s = _engine(weights, most, drafter, always=True)
    entrypoint.begin_serving()
    plain, own = Bench(plain_engine, shape), Bench(engine, shape)
    result: dict[str, Any] = {
        "warm_up_s": {"plain": round(plain_ready_s, 1), "guessing": round(ready_s, 1)},
        "steps": {},
    }
    graphs = model.graphs
    assert graphs is not None
    result["num_graphs"] = graphs.num_shapes
    for batch in arguments.step_batches:
        plain.step_ms(batch)  # whatever is made on the first use
        plain_ms = plain.step_ms(batch)
        found: dict[str, Any] = {"plain_ms": round(plain_ms, 3)}
        for num_nodes in arguments.nodes:
            drafter.num_nodes = num_nodes
            missed = graphs.num_missed
            took_ms = own.step_ms(batch, drafter)
            # Prompts that are computed beside guesses may miss, too: once or twice.
            found[f"{num_nodes} nodes"] = {
                "ms": round(took_ms, 3),
                "ratio": round(took_ms / plain_ms, 3),
                "in_graph": graphs.num_missed - missed < NUM_STEPS,
            }
        result["steps"][f"batch {batch}"] = found
    for batch in arguments.step_batches:
        for num_nodes in arguments.nodes:
            found = device_times(model, batch, num_nodes)
            result["steps"][f"batch {batch}"][f"{num_nodes} nodes"] |= found
        result["steps"][f"batch {batch}"]["plain forward"] = device_times(model, batch, 0)
    _show_steps(console, result["steps"])
    _close(engine)
    del engine, model, own, graphs
    drafter.num_nodes = 0
    drafter.chance = chance_for(arguments.tokens_per_step, DEPTH)
    result["chance"] = round(drafter.chance, 3)
    engine, _, again_s = _engine(weights, 16, drafter)
    result["warm_up_s"]["guessing, kernels compiled"] = round(again_s, 1)
    result["sweep"] = _sweep(plain, Bench(engine, shape), arguments.batches)
    _show_sweep(console, result["sweep"])
    _close(engine)
    _close(plain_engine)
    return result


def _sweep(plain: Bench, own: Bench, batches: Sequence[int]) -> dict[str, Any]:
    """Turn about, the better of two."""
    found: dict[str, Any] = {}
    plain.answers(1)  # whatever is made on the first use
    own.answers(1)
    for batch in batches:
        for _ in range(-(-SETTLING_STEPS // SWEEP_OUTPUT)):
            own.answers(batch)
        ways = {"plain": [plain.answers(batch)], "guessing": [own.answers(batch)]}
        ways["plain"].append(plain.answers(batch))
        ways["guessing"].append(own.answers(batch))
        plain_per_s, own_per_s = (max(rate for rate, _ in one) for one in ways.values())
        found[f"batch {batch}"] = {
            "plain_tokens_per_s": round(plain_per_s, 1),
            "tokens_per_s": round(own_per_s, 1),
            "speed": round(own_per_s / plain_per_s, 3),
            "tokens_per_step": round(statistics.mean(kept for _, kept in ways["guessing"]), 3),
        }
    return found


def _for_model(fields: dict[str, Any]) -> dict[str, Any]:
    """What transformers' config takes."""
    return {name: value for name, value in fields.items() if name != "architectures"}


def _show_steps(console: Console, steps: dict[str, Any]) -> None:
    table = Table(title="a step, ms (ratio to plain)")
    table.add_column("")
    names = [name for name in next(iter(steps.values())) if name.endswith("nodes")]
    for name in ("plain", *names):
        table.add_column(name, justify="right")
    for batch, found in steps.items():
        cells = [
            f"{found[name]['ms']:.2f} ({found[name]['ratio']:.2f}), device "
            f"{found[name]['device_ms']:.2f}, host {found[name]['host_ms']:.2f}"
            + ("" if found[name]["in_graph"] else ", no graph")
            for name in names
        ]
        forward = found["plain forward"]
        table.add_row(batch, f"{found['plain_ms']:.2f}, device {forward['device_ms']:.2f}", *cells)
    console.print(table)


def _show_sweep(console: Console, sweep: dict[str, Any]) -> None:
    table = Table(title="speed against plain decoding, launched ahead")
    for column in ("", "plain tok/s", "tok/s", "speed", "tokens per step"):
        table.add_column(column, justify="right")
    for batch, found in sweep.items():
        table.add_row(
            batch,
            f"{found['plain_tokens_per_s']:.0f}",
            f"{found['tokens_per_s']:.0f}",
            f"{found['speed']:.2f}",
            f"{found['tokens_per_step']:.2f}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-8b")
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--step-batches", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--tokens-per-step", type=float, default=3.3)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.speculation_gpu: torch finds no CUDA device")
    console = Console(stderr=True, width=200)
    result: dict[str, Any] = {
        **context(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "shape": arguments.shape,
        "tokens_per_step": arguments.tokens_per_step,
        **measure(arguments, console),
    }
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
