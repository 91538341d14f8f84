"""What one engine step costs without the model: schedule, prepare, bookkeeping, and the greedy pick
at a vocabulary of 4,096.

The model behind the engine costs nothing: its logits were made before. Every request of the batch
has drawn already, so that each step gives each of them one token; every 16th step of a request
fills a block, with its chain hash. The batches take turns, so that drift of the machine hits all.
The pick alone (the same rows, argmax) is the floor that the vocabulary sets. Beside the time on the
wall stands the thread's own CPU time. On a machine with other work both are too long (caches and
cores are shared); the fastest tenth of the steps (p10) then says most. The aim on CPU: under 0.5 ms
at batch 64, under 1.5 ms at 256. The last line printed is one JSON object.

    OMP_NUM_THREADS=1 python -m benchmarks.engine_step --steps 400 --rounds 5

With --ahead each step is launched before the one before was read, and the draws are there already:
what the host does while a device computes, so no step can be shorter than that.

Nothing is written unless --out says where.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import statistics
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.context import context, publish
from engine.batch import Batch
from engine.config import EngineConfig
from engine.fake import FakeModel
from engine.loop import Engine
from engine.models.interface import DecodeRow, Launch, MixedRow, Progress
from engine.request import Request, Sampling
from engine.sampling.recipe import recipe_of
from engine.sampling.row import Draw, Drawn

VOCAB_SIZE = 4096
NUM_PROMPT_TOKENS = 64
BLOCK_SIZE = 16
AIM_MS = {64: 0.5, 256: 1.5}

Times = list[tuple[float, float]]
"""Seconds on the wall and of CPU, per step."""


class ZeroCostModel(FakeModel):
    """A model whose answer is there already: the same rows of logits for every step."""

    def __init__(self, num_rows: int, context_window: int) -> None:
        super().__init__(
            vocab_size=VOCAB_SIZE, context_window=context_window, block_size=BLOCK_SIZE
        )
        self.rows = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0))

    def forward(self, batch: Batch) -> torch.Tensor:
        """The first rows, as many as are wanted."""
        return self.rows[: len(batch.draw_indices)]


class ZeroCostAhead:
    """Launches whose draws are there already."""

    max_rows = 1 << 16
    takes_prompts = True

    def warm_up(self, progress: Progress | None = None) -> None:
        """Nothing."""

    def takes(self, draw: Draw) -> bool:
        """Greedy ones: the look that a real one must take, too."""
        return recipe_of(draw.sampling).is_plain

    def launch(self, rows: Sequence[DecodeRow]) -> Launch:
        """Any token will do."""
        return [Drawn(1)] * len(rows)

    def launch_mixed(self, rows: Sequence[MixedRow]) -> Launch:
        """As `launch`."""
        return [Drawn(1) for row in rows if row.draw is not None]

    def read(self, launch: Launch) -> list[Drawn]:
        """What `launch` gave."""
        if not isinstance(launch, list):
            raise TypeError("not what launch gave")
        return launch

    def drain(self) -> None:
        """Nothing is under way."""


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """A chain hash."""
    return hashlib.blake2b(array("I", token_ids).tobytes(), key=parent, digest_size=16).digest()


def decoding_engine(batch: int, num_steps: int, preemption: str, is_ahead: bool) -> Engine:
    """An engine with `batch` requests that have all drawn, and room for `num_steps` more."""
    num_tokens = NUM_PROMPT_TOKENS + num_steps + 4
    config = EngineConfig(
        num_blocks=batch * (-(-num_tokens // BLOCK_SIZE) + 1) + 8,
        max_num_tokens_per_step=max(512, batch),
        max_num_running=batch,
        preemption=preemption,
    )
    # No wider than the requests are long: the cache must hold one window.
    model = ZeroCostModel(batch, num_tokens)
    model.ahead = ZeroCostAhead() if is_ahead else None
    engine = Engine(config, model)
    sampling = Sampling(max_tokens=num_steps + 3, ignore_eos=True)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(1, VOCAB_SIZE, (batch, NUM_PROMPT_TOKENS), generator=generator)
    for number, prompt in enumerate(prompts.tolist()):
        engine.reserve(Request(str(number), tuple(prompt), sampling, block_hash))
        engine.start(str(number))
    while sum(1 for event in engine.step().events if event.token_ids) < batch:
        pass  # prompts are still being computed
    engine.check_integrity()
    return engine


def step_times(batch: int, num_steps: int, preemption: str, is_ahead: bool = False) -> Times:
    """Each of `num_steps` decode steps."""
    engine = decoding_engine(batch, num_steps + batch, preemption, is_ahead)
    gc.collect()
    times: Times = []
    for _ in range(num_steps):
        began, cpu_began = time.perf_counter(), time.thread_time()
        output = engine.step()
        cpu_s = time.thread_time() - cpu_began
        times.append((time.perf_counter() - began, cpu_s))
        if len(output.events) != batch or not all(one.token_ids for one in output.events):
            raise RuntimeError(f"a step gave {len(output.events)} events, not {batch} tokens")
    engine.check_integrity()
    return times


def pick_times(batch: int, num_steps: int) -> list[float]:
    """CPU seconds of the greedy pick alone, by numpy's argmax."""
    rows = ZeroCostModel(batch, 32).rows.numpy()
    times: list[float] = []
    for _ in range(num_steps):
        began = time.thread_time()
        rows.argmax(axis=1).tolist()
        times.append(time.thread_time() - began)
    return times


def figures_of(batch: int, times: Times, picks: list[float]) -> dict[str, float]:
    """What is reported of one batch size, milliseconds."""
    wall, cpu = ([one[i] * 1e3 for one in times] for i in range(2))
    return {
        "step_p10_ms": round(statistics.quantiles(wall, n=10)[0], 4),
        "step_p50_ms": round(statistics.median(wall), 4),
        "step_p99_ms": round(statistics.quantiles(wall, n=100)[98], 4),
        "cpu_p50_ms": round(statistics.median(cpu), 4),
        "cpu_mean_ms": round(statistics.fmean(cpu), 4),
        "pick_cpu_p50_ms": round(statistics.median(picks) * 1e3, 4),
        "cpu_us_per_request": round(statistics.median(cpu) / batch * 1e3, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--preemption", default="never", choices=("never", "recompute"))
    parser.add_argument("--ahead", action="store_true", help="launch each step before the last")
    parser.add_argument("--out", type=Path, help="also write the JSON line to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # what `num_threads` is where several engines share few cores
    console = Console(stderr=True)
    steps: dict[int, Times] = {batch: [] for batch in arguments.batches}
    picks: dict[int, list[float]] = {batch: [] for batch in arguments.batches}
    for _ in range(arguments.rounds):
        for batch in arguments.batches:
            steps[batch] += step_times(
                batch, arguments.steps, arguments.preemption, arguments.ahead
            )
            picks[batch] += pick_times(batch, arguments.steps)
    figures = {batch: figures_of(batch, times, picks[batch]) for batch, times in steps.items()}
    table = Table(title=f"one step without the model, vocabulary {VOCAB_SIZE}")
    for column in ("batch", "p10 ms", "p50 ms", "p99", "CPU ms", "mean", "pick", "us each", "aim"):
        table.add_column(column, justify="right")
    for batch, one in figures.items():
        table.add_row(str(batch), *map(str, one.values()), str(AIM_MS.get(batch, "")))
    console.print(table)
    result = {
        "benchmark": "engine_step",
        "vocab_size": VOCAB_SIZE,
        "preemption": arguments.preemption,
        "ahead": arguments.ahead,
        "threads": 1,
        "steps": arguments.steps,
        "rounds": arguments.rounds,
        "aim_ms": {str(batch): aim for batch, aim in AIM_MS.items()},
        "batches": {str(batch): one for batch, one in figures.items()},
        "load_average": round(os.getloadavg()[0], 1),  # others' work on the same cores
        **context(),
        "torch": torch.__version__,
    }
    publish(result, arguments.out)


if __name__ == "__main__":
    main()
