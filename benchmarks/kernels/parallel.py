"""Several GPUs computing one decoder: what a sum over ranks costs, and a decode step and a prefill
with it, under CUDA graphs.

One process a GPU, as in an engine; random weights of the 8B shape in bfloat16, 1,024 tokens of
context. Beside it the ceiling of the same run: a copy between two GPUs. With stages, steps follow
one another without waiting: a row is the time from one to the next, which is less than one takes.
A row that fails says so and hides no other, unless it leaves the ranks apart. The last line printed
is one JSON object, seconds by row.

    python -m benchmarks.kernels.parallel [--shares 2] [--stages 1]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from rich.console import Console

from benchmarks.context import context, publish
from engine.batch import Batch, Span
from engine.decoder.inputs import DecodeInputs
from engine.decoder.model import kv_layout
from engine.decoder.shape import DecoderShape, read_shape
from engine.decoder.sources import random_weights
from engine.parallel.memory import RankMemory
from engine.parallel.place import Grid
from engine.parallel.process_ranks import ProcessRanks
from engine.parallel.rank_model import RankModel, share_of
from process import entrypoint

_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 16384,
}  # fmt: skip
BATCHES = (1, 8, 64, 256)
CONTEXT = 1024
PREFILL = 8192
BLOCK_SIZE = 16
_IN_GRAPH = 20
_ROUNDS = 20
_TIMEOUT_S = 120.0

_console = Console(width=160, highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", type=int, default=2)
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--rank", type=int, default=-1, help="of a process that this starts itself")
    parser.add_argument("--meeting-file", type=int, default=-1)
    parser.add_argument("--out", default="", help="a file for the JSON")
    asked = parser.parse_args()
    grid = Grid(asked.shares, asked.stages)
    if asked.rank >= 0:
        entrypoint.die_with_parent()
        _Rank(grid, asked.rank, asked.meeting_file, asked.out).run()
        return
    num_devices = torch.cuda.device_count()
    if num_devices < grid.num_ranks:
        _console.print(f"{grid.num_ranks} GPUs are needed, torch finds {num_devices}")
        sys.exit(2)
    meeting_file = os.memfd_create("ranks")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.kernels.parallel", "--shares", f"{asked.shares}",
             "--stages", f"{asked.stages}", "--rank", f"{rank}",
             "--meeting-file", f"{meeting_file}", "--out", f"{asked.out or ''}"],
            pass_fds=(meeting_file,),
            env=os.environ | {"BATON_PARENT_PID": f"{os.getpid()}"},
        )
        for rank in range(grid.num_ranks)
    ]  # fmt: skip
    sys.exit(max(process.wait() for process in ranks))


class _Rank:
    """One process. Rank 0 prints."""

    def __init__(self, grid: Grid, rank: int, meeting_file: int, out: str) -> None:
        self.grid, self.rank, self._out = grid, rank, out
        self._seconds: dict[str, float] = {}
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.ranks = ProcessRanks(grid, rank, f"cuda:{rank}", _TIMEOUT_S)
        self.ranks.form(meeting_file)

    def run(self) -> None:
        self.print(f"{self.grid.num_shares} shares, {self.grid.num_stages} stages; torch "
                   f"{torch.__version__}, NCCL {torch.cuda.nccl.version()}")  # fmt: skip
        self._ceiling()
        if self.grid.num_shares > 1:
            for num_rows in (1, 8, 64, 256, 2048, PREFILL):
                self._row(f"sum of {num_rows} x 4096", lambda n=num_rows: self._sum(n))
        shape = read_shape(transformers.LlamaConfig(**_LLAMA))
        model, num_blocks = self._model(shape)
        for num_rows in BATCHES:
            self._row(
                f"decode b{num_rows} ctx {CONTEXT}",
                lambda n=num_rows: self._decode(model, n, num_blocks),
            )
        self._row(f"prefill 1 x {PREFILL}", lambda: self._prefill(model, shape))
        torch.cuda.synchronize()
        if self.rank == 0:
            publish(
                {
                    "benchmark": "parallel",
                    **context(),
                    "command": "python -m benchmarks.kernels.parallel "
                    f"--shares {self.grid.num_shares} --stages {self.grid.num_stages}",
                    "device": torch.cuda.get_device_name(),
                    "num_shares": self.grid.num_shares,
                    "num_stages": self.grid.num_stages,
                    "seconds": self._seconds,
                },
                Path(self._out) if self._out else None,
            )
            sys.stdout.flush()
        os._exit(0)  # process groups are not taken down in order

    def print(self, line: str) -> None:
        if self.rank == 0:
            _console.print(line)

    def _row(self, name: str, measure: Callable[[], tuple[float, str]]) -> None:
        try:
            self._seconds[name], shown = measure()
            self.print(f"{name:28s} {shown}")
        except Exception as error:  # the other rows may do
            self.print(f"{name:28s} failed: {type(error).__name__}: {error}")

    def _ceiling(self) -> None:
        if self.rank == 0 and torch.cuda.device_count() > 1:
            size = 1 << 30
            source = torch.empty(size, dtype=torch.uint8, device="cuda:0")
            target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
            seconds = _seconds(lambda: target.copy_(source), num_rounds=5)
            self._seconds["copy of 1 GiB from GPU to GPU"] = seconds
            self.print(f"copy from GPU to GPU         {size / seconds / 1e9:.0f} GB/s")
        self.ranks.add_up(torch.zeros(1, device=self.device))  # nobody else computes meanwhile
        torch.cuda.synchronize()

    def _sum(self, num_rows: int) -> tuple[float, str]:
        x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16, device=self.device)
        graph = _captured(lambda: [self.ranks.add_up(x) for _ in range(_IN_GRAPH)])
        seconds = _seconds(graph.replay) / _IN_GRAPH
        return seconds, f"{seconds * 1e6:8.1f} us   {x.nbytes / seconds / 1e9:.0f} GB/s"

    def _model(self, shape: DecoderShape) -> tuple[RankModel, int]:
        place = self.ranks.place
        weights = random_weights(
            shape,
            dtype=torch.bfloat16,
            device=self.device,
            seed=self.rank,
            share=share_of(place, shape),
        )
        model = RankModel(weights, self.ranks, num_positions=16384, device=f"cuda:{self.rank}")
        layout = kv_layout(shape, block_size=BLOCK_SIZE, dtype="bfloat16")
        num_blocks = max(BATCHES) * (CONTEXT // BLOCK_SIZE + 1)
        memory = RankMemory(layout, place, num_blocks, f"cuda:{self.rank}")
        memory.cache.normal_(0.0, 0.3)
        model.attach(memory)
        return model, num_blocks

    @torch.inference_mode()
    def _decode(self, model: RankModel, num_rows: int, num_blocks: int) -> tuple[float, str]:
        width = CONTEXT // BLOCK_SIZE
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(num_blocks, generator=generator)[: num_rows * width]
        inputs = DecodeInputs(
            torch.arange(num_rows, dtype=torch.int32, device=self.device),
            torch.full((num_rows,), CONTEXT - 1, dtype=torch.int32, device=self.device),
            order.view(num_rows, width).to(self.device, torch.int32),
        )
        graph = _captured(lambda: model.decode(inputs))
        seconds = _seconds(graph.replay)
        return seconds, f"{seconds * 1e3:8.3f} ms   {num_rows / seconds:,.0f} tok/s"

    def _prefill(self, model: RankModel, shape: DecoderShape) -> tuple[float, str]:
        blocks = tuple(range(PREFILL // BLOCK_SIZE))
        token_ids = tuple(index % shape.vocab_size for index in range(PREFILL))
        batch = Batch(token_ids, (Span(0, PREFILL, blocks),), (PREFILL - 1,))
        seconds = _seconds(lambda: model.forward(batch), num_rounds=3)
        return seconds, f"{seconds * 1e3:8.1f} ms   {PREFILL / seconds:,.0f} tok/s"


def _captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        try:
            run()
        finally:
            graph.capture_end()
    torch.cuda.synchronize()
    return graph


def _seconds(run: Callable[[], object], num_rounds: int = _ROUNDS) -> float:
    """Of one run, the median."""
    run()
    times = []
    for _ in range(num_rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


if __name__ == "__main__":
    main()
