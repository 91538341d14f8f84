"""What a decode step of our own decoder costs when it is launched ahead: by CUDA graphs, in a loop
of launch and read with one launch under way, random weights and a random cache.

A line for each batch: milliseconds a step in the loop; of the graph alone, replayed back to back;
the step's bytes at the bandwidth that a large copy reaches in the same run, and the share of it;
microseconds of the host in launch and in read (without the wait). "no model" is a decoder that
gives the same logits: what the rows, the draw and the host cost. Without CUDA only that is run.
Then plain steps: decodes and chunks of prompts together, launched kernel by kernel and as a graph.

    python3 benchmarks/kernels/graph_step.py --shapes 0.6B 8B --batches 1 8 64 256
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console

from engine.decoder.ahead import AheadDecoder
from engine.decoder.graphs import Decode
from engine.decoder.inputs import DecodeInputs
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.models.interface import DecodeRow
from engine.request import Sampling
from engine.sampling.row import Draw

NUM_CONTEXT_TOKENS = 1024
BLOCK_SIZE = 16
WINDOW = 4096
GREEDY = Sampling(max_tokens=1 << 20)
SAMPLED = Sampling(max_tokens=1 << 20, temperature=0.8, top_k=50, top_p=0.95)


@dataclass
class Case:
    """A decoder to time."""

    name: str
    decode: Decode
    vocab_size: int
    weight_bytes: int = 0
    token_bytes: int = 0
    """Of the KV."""
    num_blocks: int = 1 << 17
    num_parameters: int = 0
    decoder: Any = None
    kept: list[object] = field(default_factory=list)


class Rows:
    """The rows of a batch, a token further at every launch."""

    def __init__(self, num_rows: int, sampling: Sampling) -> None:
        blocks_each = NUM_CONTEXT_TOKENS // BLOCK_SIZE + 16
        order = torch.randperm(num_rows * blocks_each, generator=torch.Generator().manual_seed(0))
        tables = order.view(num_rows, blocks_each).tolist()
        self._num_blocks = NUM_CONTEXT_TOKENS // BLOCK_SIZE
        self._tables = tables
        self._keys = [(f"request {index}", 0) for index in range(num_rows)]
        self._block_ids = [tuple(table[: self._num_blocks]) for table in tables]
        # Requests fill their blocks at different steps.
        self._lengths = [NUM_CONTEXT_TOKENS - index % BLOCK_SIZE for index in range(num_rows)]
        self._sampling = sampling
        self._is_first = True

    def next(self) -> list[DecodeRow]:
        """Made anew, as the engine makes them."""
        rows = []
        for index, position in enumerate(self._lengths):
            num_blocks = position // BLOCK_SIZE + 1
            if num_blocks > len(self._block_ids[index]):
                self._block_ids[index] = tuple(self._tables[index][:num_blocks])
            self._lengths[index] = position + 1
            token_id = 7 if self._is_first else -1
            draw = Draw(self._sampling, position + 1, 0, position - NUM_CONTEXT_TOKENS)
            row = DecodeRow(self._keys[index], token_id, position, self._block_ids[index], draw)
            rows.append(row)
        self._is_first = False
        return rows


def _loop(ahead: AheadDecoder, rows: Rows, num_steps: int) -> tuple[float, float, float]:
    """Seconds a step; and of the host in launch and in read, medians."""
    launches, reads = [], []
    ahead.read(ahead.launch(rows.next()))
    before = ahead.launch(rows.next())
    planned = rows.next()
    began = time.perf_counter()
    for _ in range(num_steps):
        start = time.perf_counter()
        launch = ahead.launch(planned)
        launches.append(time.perf_counter() - start)
        planned = rows.next()
        ahead.read(before)
        before = launch
    step_s = (time.perf_counter() - began) / num_steps
    ahead.read(before)
    for _ in range(20):
        launch = ahead.launch(planned)
        planned = rows.next()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        ahead.read(launch)
        reads.append(time.perf_counter() - start)
    return step_s, statistics.median(launches), statistics.median(reads)


def _graph_s(ahead: AheadDecoder, num_rows: int, num_steps: int) -> float:
    """Seconds of the graph alone, of the rows that were launched last."""
    graphs = ahead._graphs  # noqa: SLF001  what the loop adds to it is what is asked
    num_blocks = NUM_CONTEXT_TOKENS // BLOCK_SIZE + 16
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for count in (3, num_steps):
        begin.record()
        for _ in range(count):
            graphs.run(num_rows, num_blocks, "greedy")
        end.record()
    ahead.drain()  # which numbers the steps anew: these were not launched by it
    return begin.elapsed_time(end) / num_steps / 1e3


def _copy_bytes_per_s() -> float:
    """Read and written, of a large copy."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    target.copy_(source)
    begin.record()
    for _ in range(20):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 20 * 2 * source.numel() / (begin.elapsed_time(end) / 1e3)


def _constant(device: torch.device) -> Case:
    vocab_size = 151936 if device.type == "cuda" else 4096
    logits = torch.randn(256, vocab_size, device=device).to(torch.bfloat16)

    def decode(inputs: DecodeInputs) -> torch.Tensor:
        return logits[: inputs.num_rows]

    return Case("no model", decode, vocab_size)


def _model(name: str, max_rows: int) -> Case:
    from transformers import LlamaConfig, Qwen3Config

    from engine.decoder.decoder import Decoder
    from engine.decoder.model import block_rows
    from engine.decoder.shape import read_shape, rope_table
    from engine.decoder.sources import random_weights

    sizes = {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": WINDOW}
    if name == "0.6B":
        config = Qwen3Config(
            num_hidden_layers=28,
            hidden_size=1024,
            num_attention_heads=16,
            intermediate_size=3072,
            vocab_size=151936,
            tie_word_embeddings=True,
            **sizes,
        )
    else:
        config = LlamaConfig(
            num_hidden_layers=32,
            hidden_size=4096,
            num_attention_heads=32,
            intermediate_size=14336,
            vocab_size=128256,
            tie_word_embeddings=False,
            **sizes,
        )
    shape, device = read_shape(config), torch.device("cuda")
    weights = random_weights(shape, dtype=torch.bfloat16, device=device, seed=0)
    layout = KvLayout.plain(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=BLOCK_SIZE,
        dtype="bfloat16",
    )
    num_blocks = max_rows * (NUM_CONTEXT_TOKENS // BLOCK_SIZE + 16)
    memory = KvMemory(layout, num_blocks, "cuda")
    memory.cache.normal_()
    decoder = Decoder(weights, rope_table(shape, WINDOW, device))
    decoder.attach([block_rows(view, layout) for view in memory.layer_views()])
    embedding_bytes = 0 if shape.is_tied else 2 * shape.vocab_size * shape.hidden_size
    return Case(
        name,
        decoder.decode,
        shape.vocab_size,
        weights.num_bytes - embedding_bytes,
        layout.token_bytes,
        num_blocks,
        shape.num_parameters,
        decoder,
        [memory],
    )


def _time(case: Case, batches: list[int], num_steps: int, bytes_per_s: float) -> None:
    """Print a line for each batch and kind of draw."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(width=140)
    ahead = AheadDecoder(
        case.decode,
        max_rows=max(batches),
        context_window=WINDOW,
        block_size=BLOCK_SIZE,
        vocab_size=case.vocab_size,
        device=device,
    )
    free = torch.cuda.mem_get_info()[0] if device.type == "cuda" else 0
    began = time.perf_counter()
    ahead.warm_up()
    seconds = time.perf_counter() - began
    if device.type == "cuda":
        free -= torch.cuda.mem_get_info()[0]
    num_graphs = len(ahead._graphs.buckets)  # noqa: SLF001
    console.print(f"{case.name}: {num_graphs} graphs, {seconds:.1f} s, {free / 2**20:.0f} MiB")
    for num_rows in batches:
        for label, sampling in (("greedy", GREEDY), ("sampled", SAMPLED)):
            step_s, launch_s, read_s = _loop(ahead, Rows(num_rows, sampling), num_steps)
            graph = ""
            if device.type == "cuda" and sampling is GREEDY:
                num_bytes = case.weight_bytes + case.token_bytes * num_rows * NUM_CONTEXT_TOKENS
                floor_s = num_bytes / bytes_per_s
                graph_s = _graph_s(ahead, num_rows, num_steps)
                graph = f"graph {graph_s * 1e3:7.3f} ms, bytes {floor_s * 1e3:7.3f} ms"
                graph += f" ({floor_s / step_s:4.0%} of the step)"
            console.print(
                f"{case.name:>8} B={num_rows:<3} {label:7} step {step_s * 1e3:7.3f} ms, host: "
                f"launch {launch_s * 1e6:4.0f} us, read {read_s * 1e6:4.0f} us; {graph}"
            )


def _plain_steps(case: Case, max_rows: int) -> None:
    """Milliseconds of a step with its packing, on the wall: launched, and as a graph."""
    from engine.batch import Batch, Span
    from engine.decoder.inputs import mixed_inputs
    from engine.decoder.step_graphs import StepGraphs, max_chunk_tokens

    console, device = Console(width=140), torch.device("cuda")
    steps = StepGraphs(
        case.decoder.forward,
        max_singles=max_rows,
        max_tokens=min(8192, max_chunk_tokens(case.num_parameters)),
        context_window=WINDOW,
        block_size=BLOCK_SIZE,
        device=device,
    )
    began, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    steps.capture()
    seconds, free = time.perf_counter() - began, free - torch.cuda.mem_get_info()[0]
    console.print(
        f"{case.name}: {len(steps.shapes)} plain steps captured, {seconds:.1f} s, "
        f"{free / 2**20:.0f} MiB"
    )
    each = NUM_CONTEXT_TOKENS // BLOCK_SIZE + 16
    for num_singles, lengths in (
        (8, ()),
        (0, (64,)),
        (0, (256,)),
        (0, (512,)),
        (0, (1024,)),
        (0, (2048,)),
        (0, (1024,) * 8),
        (0, (32,) * 16),
        (8, (248,)),
        (64, (100, 100, 100)),
        (256, (256,)),
    ):
        if num_singles > max_rows:
            continue
        all_lengths = (1,) * num_singles + lengths
        spans = []
        for index, length in enumerate(all_lengths):
            start = NUM_CONTEXT_TOKENS - length * (length > 1)
            blocks = range(index % max_rows * each, (index % max_rows + 1) * each)
            spans.append(Span(start, length, tuple(blocks[: -(-(start + length) // BLOCK_SIZE)])))
        draws = [sum(all_lengths[: index + 1]) - 1 for index in range(len(all_lengths))]
        batch = Batch((7,) * sum(all_lengths), tuple(spans), tuple(draws))
        shape = steps.shape_of(batch)
        if shape is None:
            continue
        times = []
        for run in (
            lambda batch=batch: case.decoder.forward(mixed_inputs(batch, device)),
            lambda batch=batch, shape=shape: steps.run(shape, batch),
        ):
            walls = []
            for _ in range(12):
                torch.cuda.synchronize()
                start_s = time.perf_counter()
                run()
                torch.cuda.synchronize()
                walls.append(time.perf_counter() - start_s)
            times.append(statistics.median(walls[2:]))
        expected, found = case.decoder.forward(mixed_inputs(batch, device)), steps.run(shape, batch)
        error = ((found.float() - expected.float()).norm() / expected.float().norm()).item()
        console.print(
            f"{case.name:>8} {num_singles:3} decodes, chunks of {lengths}: launched "
            f"{times[0] * 1e3:6.2f} ms, graph {times[1] * 1e3:6.2f} ms {tuple(shape)}, relative "
            f"difference {error:.1e}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shapes", nargs="*", default=["0.6B", "8B"], choices=["0.6B", "8B"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    console = Console(width=140)
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda" if is_cuda else "cpu")
    bytes_per_s = _copy_bytes_per_s() if is_cuda else 0.0
    console.print(f"copy: {bytes_per_s / 1e12:.2f} TB/s")
    cases: list[Callable[[], Case]] = [lambda: _constant(device)]
    if is_cuda:
        cases += [
            lambda name=name: _model(name, max(arguments.batches)) for name in arguments.shapes
        ]
    for make in cases:
        try:
            case = make()
            _time(case, arguments.batches, arguments.steps, bytes_per_s)
            if case.decoder is not None:
                _plain_steps(case, max(arguments.batches))
            del case
        except Exception:  # one that fails must not hide the others
            console.print(traceback.format_exc())
        if is_cuda:
            gc.collect()  # graphs and what they compute name one another
            torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
