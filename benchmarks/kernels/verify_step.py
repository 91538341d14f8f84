"""Where the time of a step that verifies a token tree goes, at batch 1, beside a plain decode's.

Random weights in bfloat16, 1,024 tokens of context, a tree of four branches. For a plain decode and
for each number of guessed nodes: the captured forward, replayed back to back; the same without
attention, and without what turns heads and writes KV besides, so that the difference is what a part
adds (kernels overlap: their own times do not add up to a step's); the forward as the engine calls
it, from an idle device to its end, and what the host did of that; the draw behind it, and the move
of a kept path. Then the same forward with attention and products cut otherwise than their tables
say: milliseconds beside those of the tables.

    python -m benchmarks.kernels.verify_step [--shape llama-8b] [--nodes 8 16 32 64]

A way that fails says so and hides no other. The last line printed is one JSON object, milliseconds.
On an H100 it takes less than a minute; without CUDA a tiny shape shows that it works.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from benchmarks.context import context, publish
from benchmarks.kernels.verify_ways import (
    NO_MIXED,
    NO_TREES,
    Way,
    attention_ways,
    going,
    product_ways,
)
from benchmarks.random_checkpoint import SHAPES
from engine.batch import Batch, Span
from engine.decoder.decoder import Decoder
from engine.decoder.graph_set import GraphSet
from engine.decoder.inputs import DecodeInputs
from engine.decoder.model import block_rows, kv_layout, on_device
from engine.decoder.shape import DecoderShape, read_shape, rope_table
from engine.decoder.sources import random_weights
from engine.decoder.tree_graphs import TreeGraphs, TreeShape
from engine.kv.memory import KvMemory
from engine.request import Sampling
from engine.sampling import pipeline

BLOCK_SIZE = 16
WINDOW = 4096
NUM_BRANCHES = 4
NUM_MOVED = 4
TINY = SHAPES["llama-8b"] | {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 211,
}


def tree_batch(context_len: int, num_nodes: int) -> Batch:
    """One sequence with so many guesses behind its newest token."""
    parents = tuple(
        -1 if node == num_nodes * branch // NUM_BRANCHES else node - 1
        for branch in range(NUM_BRANCHES)
        for node in range(
            num_nodes * branch // NUM_BRANCHES, num_nodes * (branch + 1) // NUM_BRANCHES
        )
    )
    num_rows = 1 + num_nodes
    blocks = tuple(range(-(-(context_len + num_rows) // BLOCK_SIZE)))
    span = Span(context_len, num_rows, blocks, branches=parents)
    return Batch((1,) * num_rows, (span,), tuple(range(num_rows)))


class Bench:
    """A decoder with random weights and a cache of random numbers.

    Args:
        max_num_nodes: most guesses of a step.
    """

    def __init__(
        self, shape: DecoderShape, device: str, *, context_len: int, max_num_nodes: int, rounds: int
    ) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.shape, self.context_len = shape, context_len
        self._max_num_nodes, self._rounds = max_num_nodes, rounds
        dtype = torch.bfloat16 if self.is_cuda else torch.float32
        weights = random_weights(shape, dtype=dtype, device=self.device, seed=1)
        self.decoder = Decoder(weights, rope_table(shape, WINDOW, self.device))
        layout = kv_layout(shape, block_size=BLOCK_SIZE, dtype=str(dtype).removeprefix("torch."))
        num_blocks = layout.num_blocks_for(context_len + 1 + max_num_nodes)
        self.memory = KvMemory(layout, num_blocks, device)
        self.memory.cache.normal_()
        self.decoder.attach([block_rows(view, layout) for view in self.memory.layer_views()])

    def plain_ms(self) -> float:
        """Of a decode's forward, back to back."""
        num_blocks = -(-(self.context_len + 1) // BLOCK_SIZE)
        tables = torch.zeros(1, WINDOW // BLOCK_SIZE, dtype=torch.int32, device=self.device)
        tables[0, :num_blocks] = torch.arange(num_blocks)
        ints = torch.tensor([[1], [self.context_len]], dtype=torch.int32, device=self.device)
        inputs = DecodeInputs(ints[0], ints[1], tables)
        graphs: GraphSet[int] = GraphSet(
            lambda _: self._ignored(self.decoder.decode(inputs)), uses_graphs=self.is_cuda
        )
        graphs.capture([1])
        return self._back_to_back(lambda: graphs.run(1))

    @staticmethod
    def _ignored(_: torch.Tensor) -> None:
        """Of a graph whose result nobody reads."""

    def graphs_for(self, batch: Batch) -> tuple[TreeGraphs, TreeShape]:
        """Of the step's shape alone."""
        graphs = TreeGraphs(
            self.decoder.forward,
            max_sequences=1,
            max_num_nodes=1 + self._max_num_nodes,
            max_rows=8192,
            context_window=WINDOW,
            block_size=BLOCK_SIZE,
            device=self.device,
        )
        num_rows = len(batch.token_ids)
        graphs.shapes = [min(one for one in graphs.shapes if one.num_rows >= num_rows)]
        graphs.capture()
        return graphs, graphs.shapes[0]

    def step_ms(self, batch: Batch) -> float:
        """Of the tree's forward, back to back."""
        graphs, shape = self.graphs_for(batch)
        graphs.run(shape, batch)
        its = graphs._graphs  # noqa: SLF001  what the step is without its inputs is what is asked
        return self._back_to_back(lambda: its.run(shape))

    def calls(self, batch: Batch) -> dict[str, float]:
        """Of the forward from an idle device to its end; and what of that the host took: its
        inputs, the launch of its graph, and all until it was free again."""
        graphs, shape = self.graphs_for(batch)
        its = graphs._graphs  # noqa: SLF001  as above
        whole: list[float] = []
        host: dict[str, list[float]] = {"call": [], "inputs": [], "launch": []}
        for _ in range(self._rounds):
            began = time.perf_counter()
            graphs.run(shape, batch)
            host["call"].append(time.perf_counter() - began)
            self._wait()
            whole.append(time.perf_counter() - began)
            began = time.perf_counter()
            graphs._host.put(shape, batch)  # noqa: SLF001  as above
            host["inputs"].append(time.perf_counter() - began)
            began = time.perf_counter()
            its.run(shape)
            host["launch"].append(time.perf_counter() - began)
            self._wait()
        found = {f"host: {name}": _median_ms(times) for name, times in host.items()}
        return {"from idle to its end": _median_ms(whole), **found}

    def draws(self, batch: Batch) -> dict[str, float]:
        """Of the draw at each node, read back, and of the move of a path, with nothing queued
        before them."""
        num_rows = len(batch.draw_indices)
        logits = torch.randn(num_rows, self.shape.vocab_size, device=self.device)
        logits = logits.to(self.decoder.weights.layers[0].norm.dtype)
        sampling = Sampling(max_tokens=1)
        draws = [pipeline.Draw(sampling, self.context_len + row) for row in range(num_rows)]
        last = len(batch.spans[0].block_ids) - 1
        moves = [(last, slot + 8, last, slot) for slot in range(NUM_MOVED)]
        return {
            "draw": self._waited(lambda: pipeline.begin(logits, draws)()),
            "move": self._waited(lambda: self.memory.move_tokens(moves)),
        }

    def _waited(self, run: Callable[[], object]) -> float:
        times: list[float] = []
        for _ in range(self._rounds):
            self._wait()
            began = time.perf_counter()
            run()
            self._wait()
            times.append(time.perf_counter() - began)
        return _median_ms(times)

    def _back_to_back(self, run: Callable[[], object]) -> float:
        """Milliseconds of one; the median of several rows of them."""
        for _ in range(3):
            run()
        times: list[float] = []
        for _ in range(3):
            self._wait()
            began = time.perf_counter()
            for _ in range(self._rounds):
                run()
            self._wait()
            times.append((time.perf_counter() - began) / self._rounds)
        return _median_ms(times)

    def _wait(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)


def _median_ms(seconds: Sequence[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 4)


# -- the account


def account(bench: Bench, num_nodes: int) -> dict[str, float]:
    """Of one step by part."""
    batch = tree_batch(bench.context_len, num_nodes)
    whole = bench.step_ms(batch)
    with going(NO_TREES):
        unattended = bench.step_ms(batch)
    with going(NO_MIXED):
        products = bench.step_ms(batch)
    return {
        "forward": whole,
        "products and norms": products,
        "rotation and KV": round(unattended - products, 4),
        "attention": round(whole - unattended, 4),
        **bench.calls(batch),
        **bench.draws(batch),
    }


def compared(
    ways: Sequence[Way], run: Callable[[], float], say: Callable[[str], None]
) -> dict[str, float | str]:
    """Milliseconds by way; the reason of one that fails."""
    found: dict[str, float | str] = {}
    for way in ways:
        try:
            with going(way):
                found[way.name] = run()
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            found[way.name] = f"{type(error).__name__}: {lines[0][:150]}"
        say(f"    {way.name:<50} {found[way.name]}")
    return found


def measure(bench: Bench, nodes: Sequence[int], compared_nodes: Sequence[int]) -> dict[str, Any]:
    """Everything.

    Args:
        compared_nodes: for which other ways are tried; on CUDA alone, where there are any.
    """
    console = Console(stderr=True, width=160)
    plain = bench.plain_ms()
    result: dict[str, Any] = {"plain forward": plain, "steps": {}, "ways": {}}
    for num_nodes in nodes:
        result["steps"][f"{num_nodes} nodes"] = account(bench, num_nodes)
    _show(console, plain, result["steps"])
    for num_nodes in compared_nodes if bench.is_cuda else ():
        batch = tree_batch(bench.context_len, num_nodes)
        console.print(f"{num_nodes} nodes, otherwise (ms of the forward):")
        ways = [*attention_ways(), *product_ways()]
        found = compared(ways, lambda batch=batch: bench.step_ms(batch), console.print)
        result["ways"][f"{num_nodes} nodes"] = found
    return result


def _show(console: Console, plain: float, steps: dict[str, dict[str, float]]) -> None:
    table = Table(title=f"milliseconds; a plain forward takes {plain:.3f}")
    table.add_column("")
    for name in steps:
        table.add_column(name, justify="right")
    for part in next(iter(steps.values()), {}):
        table.add_row(part, *(f"{step[part]:.3f}" for step in steps.values()))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    is_cuda = torch.cuda.is_available()
    parser.add_argument(
        "--shape", choices=[*SHAPES, "tiny"], default="llama-8b" if is_cuda else "tiny"
    )
    parser.add_argument("--nodes", nargs="+", type=int, default=[8, 16, 32, 64])
    parser.add_argument("--ways", nargs="*", type=int, default=[32], metavar="NODES")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=None)
    arguments = parser.parse_args()
    fields = TINY if arguments.shape == "tiny" else SHAPES[arguments.shape]
    its = {name: value for name, value in fields.items() if name != "architectures"}
    shape = read_shape(transformers.AutoConfig.for_model(**its))
    device = "cuda:0" if is_cuda else "cpu"
    with torch.inference_mode(), on_device(torch.device(device)):
        bench = Bench(
            shape,
            device,
            context_len=arguments.context,
            max_num_nodes=max(*arguments.nodes, 64),
            rounds=arguments.rounds,
        )
        found = measure(bench, arguments.nodes, arguments.ways)
    name = torch.cuda.get_device_name() if is_cuda else "cpu"
    result = {**context(), "device": name, "torch": torch.__version__, "shape": arguments.shape}
    publish({**result, **found}, arguments.out)


if __name__ == "__main__":
    main()
