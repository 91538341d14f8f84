"""The bare forward of our own decoder under CUDA graphs, without an engine: random weights, 1,024
tokens of context, blocks of 16 in no order; beside the ceilings of the same run.

    python -m benchmarks.decoder step --shapes llama-8b --ablate
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
import transformers
from baton_kernels.linear import linear

from benchmarks import harness
from benchmarks.harness import Several, attempt, event_s
from benchmarks.random_checkpoint import SHAPES
from engine.batch import Batch, TokenSpan
from engine.decoder.graph_set import GraphSet
from engine.decoder.inputs import DecodeInputs, mixed_inputs
from engine.decoder.tree_graphs import TreeGraphs, TreeShape
from engine.kv.memory import KvMemory
from engine.layers import linear as fused_linear
from engine.layers.attention import PagedAttention
from engine.models.llama import (
    LlamaConfig,
    LlamaDecoder,
    block_rows,
    kv_layout,
    on_device,
    read_llama_config,
    rope_table,
)
from engine.models.weights import random_weights
from engine.parallel.distributed_ranks import DistributedRanks
from engine.parallel.rank_grid import Grid
from engine.parallel.rank_memory import RankMemory
from engine.parallel.rank_model import RankModel, share_of
from engine.request import Sampling
from engine.sampling.metadata import SamplingRequest
from engine.sampling.sampler import Sampler
from process import entrypoint

CONTEXT = 1024
BLOCK_SIZE = 16
BATCHES = "1,8,64,256"
PROMPTS = ((1, 8192), (16, 2048))

TINY = SHAPES["llama-8b"] | {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": 211,
}


def shape_of(name: str) -> LlamaConfig:
    """A model shape of random_checkpoint by its name, or the tiny one."""
    fields = TINY if name == "tiny" else SHAPES[name]
    its = {key: value for key, value in fields.items() if key != "architectures"}
    return read_llama_config(transformers.AutoConfig.for_model(**its))


# -- a step and a prompt


class Bench:
    """A decoder with random weights and a KV cache of random numbers, for `step`."""

    def __init__(self, shape: LlamaConfig, max_batch: int, *, is_exact: bool) -> None:
        self.shape, self.device = shape, torch.device("cuda")
        weights = random_weights(shape, dtype=torch.bfloat16, device=self.device, seed=1)
        self.decoder = LlamaDecoder(
            weights, rope_table(shape, 16384, self.device), is_exact=is_exact
        )
        layout = kv_layout(shape, block_size=BLOCK_SIZE, dtype="bfloat16")
        num_tokens = max(max_batch * CONTEXT, max(count * length for count, length in PROMPTS))
        num_blocks = num_tokens // BLOCK_SIZE + max_batch
        self.memory = KvMemory(layout, num_blocks, "cuda")
        for first in range(0, num_blocks, 256):
            self.memory.cache[first : first + 256].normal_()
        self.decoder.attach([block_rows(view, layout) for view in self.memory.layer_views()])
        self._order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2))

    def decode_inputs(self, batch: int) -> DecodeInputs:
        num_blocks = CONTEXT // BLOCK_SIZE
        tables = torch.zeros(batch, 80, dtype=torch.int32)
        tables[:, :num_blocks] = self._order[: batch * num_blocks].view(batch, num_blocks)
        token_ids = torch.randint(0, self.shape.vocab_size, (batch,), dtype=torch.int32)
        positions = torch.full((batch,), CONTEXT - 1, dtype=torch.int32)
        return DecodeInputs(
            token_ids.to(self.device), positions.to(self.device), tables.to(self.device)
        )

    def error_of_decode(self, batch: int) -> float:
        """Relative error of a decode step against plain torch on the same weights."""
        inputs = self.decode_inputs(batch)
        actual = self.decoder.decode(inputs).float()
        self.decoder.use_backend("reference")
        expected = self.decoder.decode(inputs).float()
        self.decoder.use_backend("auto")
        return float((actual - expected).norm() / expected.norm())

    def captured_decode(self, batch: int) -> Callable[[], object]:
        """Capture one decode step in a CUDA graph, to be replayed."""
        inputs = self.decode_inputs(batch)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.decoder.decode(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.decoder.decode(inputs)
        return graph.replay

    def prefill(self, num_prompts: int, length: int) -> Callable[[], object]:
        size = length // BLOCK_SIZE
        spans = tuple(
            TokenSpan(0, length, tuple(self._order[index * size : (index + 1) * size].tolist()))
            for index in range(num_prompts)
        )
        token_ids = torch.randint(0, self.shape.vocab_size, (num_prompts * length,)).tolist()
        ends = tuple(length * (index + 1) - 1 for index in range(num_prompts))
        batch = Batch(tuple(token_ids), spans, ends)
        return lambda: self.decoder.forward(mixed_inputs(batch, self.device))

    def products(self, num_rows: int) -> Callable[[], object]:
        """The library's products of all layers, with nothing beside them."""
        pairs = [
            (
                torch.randn(num_rows, one.in_features, device=self.device).bfloat16(),
                torch.randn(one.in_features, one.out_features, device=self.device).bfloat16(),
            )
            for one in self.decoder.weights.layers[0].projections
        ]

        def run() -> None:
            for _ in range(self.shape.num_layers):
                for a, b in pairs:
                    torch.mm(a, b)

        return run

    def decode_bytes(self, batch: int) -> int:
        """Bytes that a decode step must read: the weights but for the embedding, once, and the keys
        and values of all sequences."""
        weights, shape = self.decoder.weights, self.shape
        num_bytes = sum(one.tensors[0].nbytes for one in weights.projections)
        token = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * 2
        return num_bytes + batch * CONTEXT * token

    def prefill_flop(self, num_prompts: int, length: int) -> float:
        """Operations of a prompt: products of all layers for all tokens, and causal attention."""
        weights, shape = self.decoder.weights, self.shape
        layers = sum(p.tensors[0].numel() for layer in weights.layers for p in layer.projections)
        num_tokens = num_prompts * length
        attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length * num_tokens
        return 2.0 * layers * num_tokens + attention


def _unattended(self: PagedAttention, _index: int, _layer: Any, qkv: Any, *_: Any) -> Any:
    """Nothing is rotated, written or attended: the queries as they are."""
    return qkv[:, : self._num_heads * self._rope.shape[1]]


def _unnormed(*args: Any, **kwargs: Any) -> torch.Tensor:
    return linear(*args, **kwargs | {"norm_weight": None, "half_norm": None, "leaves": None})


Replaced = tuple[Any, str, Any]
"""A replacement within `ABLATIONS`: (module or class, name, what stands there meanwhile)."""

_NO_ATTENTION: Replaced = (PagedAttention, "decode", _unattended)
_NO_NORM: Replaced = (fused_linear, "linear", _unnormed)
_WHOLE_NORMS: Replaced = (LlamaDecoder, "_room", lambda *_: None)
ABLATIONS: dict[str, tuple[Replaced, ...]] = {
    "whole": (),
    "norms by launches of their own": (_WHOLE_NORMS,),
    "no norms": (_WHOLE_NORMS, _NO_NORM),
    "no attention": (_NO_ATTENTION,),
    "neither": (_WHOLE_NORMS, _NO_NORM, _NO_ATTENTION),
}
"""Parts of a step that are left out in turn, to see what each adds: kernels overlap, so their own
times do not add up to the step's."""


@contextlib.contextmanager
def replaced(changes: Sequence[Replaced]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in changes:
            stack.enter_context(mock.patch.object(target, name, stand_in))
        yield


def _error_row(bench: Bench) -> dict[str, Any]:
    return {"error": bench.error_of_decode(8)}


def _step_row(bench: Bench, batch: int, ceilings: dict[str, float]) -> dict[str, Any]:
    seconds = event_s(bench.captured_decode(batch), 20, 3)
    num_bytes = bench.decode_bytes(batch)
    return {
        "ms": seconds * 1e3,
        "TB/s": num_bytes / seconds / 1e12,
        "of ceiling": f"{num_bytes / seconds / ceilings['copy_gb_per_s'] / 1e9:.1%}",
    }


def _ablated_row(bench: Bench, batch: int, changes: Sequence[Replaced]) -> dict[str, Any]:
    with replaced(changes):
        return {"ms": event_s(bench.captured_decode(batch), 20, 3) * 1e3}


def _prefill_row(
    bench: Bench, count: int, length: int, ceilings: dict[str, float]
) -> dict[str, Any]:
    run = bench.prefill(count, length)
    run()
    seconds = event_s(run, 5, 3)
    flop = bench.prefill_flop(count, length)
    return {
        "ms": seconds * 1e3,
        "TFLOP/s": flop / seconds / 1e12,
        "of ceiling": f"{flop / seconds / ceilings['matmul_tflop_per_s'] / 1e12:.1%}",
        "tokens/s": round(count * length / seconds),
        "its products by the library, ms": event_s(bench.products(count * length), 3, 3) * 1e3,
    }


@harness.case
@click.option("--shapes", type=Several(click.Choice(list(SHAPES))), default=",".join(SHAPES))
@click.option("--batches", type=Several(int), default=BATCHES)
@click.option("--exact", is_flag=True, help="bits that do not depend on the batch")
@click.option("--ablate", is_flag=True, help="a step without some of its parts")
def step(
    shapes: Sequence[str],
    batches: Sequence[int],
    exact: bool,
    ablate: bool,
) -> dict[str, Any]:
    """Decode steps (ceiling: a large copy) and prompts (ceiling: a large product), milliseconds."""
    harness.needs_cuda()
    ceilings = harness.device_ceilings()
    result: dict[str, Any] = {**harness.device_context(), "ceilings": ceilings}
    with torch.inference_mode():
        for name in shapes:
            bench = Bench(shape_of(name), max([*batches, 8]), is_exact=exact)
            rows = [attempt("decode b8", _error_row, bench)]
            for batch in batches:
                rows.append(attempt(f"decode b{batch}", _step_row, bench, batch, ceilings))
                for what, changes in ABLATIONS.items() if ablate else ():
                    rows.append(attempt(f"  b{batch} {what}", _ablated_row, bench, batch, changes))
            for count, length in PROMPTS:
                name_of = f"prefill {count} x {length}"
                rows.append(attempt(name_of, _prefill_row, bench, count, length, ceilings))
            harness.show(f"{name}: {ceilings}", rows)
            result[name] = rows
            del bench
            torch.cuda.empty_cache()
    return result


# -- a step that verifies a token tree

WINDOW = 4096
NUM_BRANCHES = 4
NUM_MOVED = 4


@dataclass(frozen=True)
class Way:
    """A way to cut the step otherwise: what chooses is replaced, and nothing else. The numbers that
    come out are the same up to rounding, unless a part is left out."""

    name: str
    replaced: tuple[Replaced, ...]


NO_TREES = Way("without attention", ((PagedAttention, "_trees", lambda *_: None),))
NO_MIXED = Way("without attention, rotation and KV", ((PagedAttention, "forward", _unattended),))


def attention_ways() -> list[Way]:
    """Ways to cut tree attention otherwise."""
    from baton_kernels import attention_plan as plan

    def config(sizes: tuple[int, int, int, int]) -> Replaced:
        return plan, "config_for", lambda *_, **__: plan.Config(*sizes)

    def splits(factor: float) -> Replaced:
        chosen = plan.plan_splits
        return plan, "plan_splits", lambda *its: max(1, round(chosen(*its) * factor))

    sizes = ((32, 32, 4, 3), (32, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 3))
    found = [Way(f"attention {one}", (config(one),)) for one in sizes]
    return [*found, *(Way(f"attention: splits x {by}", (splits(by),)) for by in (0.5, 0.75, 2.0))]


def product_ways() -> list[Way]:
    """Ways to compute products of few rows in tiles of 64."""
    from baton_kernels import linear_tiles

    chosen = linear_tiles.skinny_tile

    def of_64_rows(num_rows: int, *its: Any) -> Any:
        return chosen(max(num_rows, 33) if num_rows > 16 else num_rows, *its)

    return [Way("products: tiles of 64 rows", ((linear_tiles, "skinny_tile", of_64_rows),))]


@contextlib.contextmanager
def going(way: Way) -> Iterator[None]:
    """Context in which a way's replacement stands; what is chosen by shapes is chosen anew, before
    and after."""
    with contextlib.ExitStack() as stack:
        stack.callback(_forget_choices)
        stack.enter_context(replaced(way.replaced))
        _forget_choices()
        yield


def _forget_choices() -> None:
    with contextlib.suppress(ImportError):
        from baton_kernels import linear_tiles

        linear_tiles.choose_tile.cache_clear()


def tree_batch(context_len: int, num_nodes: int) -> Batch:
    """Make a batch of one sequence with a tree of guesses behind its newest token."""
    parents = tuple(
        -1 if node == num_nodes * branch // NUM_BRANCHES else node - 1
        for branch in range(NUM_BRANCHES)
        for node in range(
            num_nodes * branch // NUM_BRANCHES, num_nodes * (branch + 1) // NUM_BRANCHES
        )
    )
    num_rows = 1 + num_nodes
    blocks = tuple(range(-(-(context_len + num_rows) // BLOCK_SIZE)))
    span = TokenSpan(context_len, num_rows, blocks, branches=parents)
    return Batch((1,) * num_rows, (span,), tuple(range(num_rows)))


class VerifyBench:
    """A decoder with random weights and a KV cache of random numbers, on a GPU or a CPU, for
    `verify`.

    Args: max_num_nodes: most guesses of a step. rounds: of each figure, which is their median.
    """

    def __init__(
        self, shape: LlamaConfig, device: str, *, context_len: int, max_num_nodes: int, rounds: int
    ) -> None:
        self.device = torch.device(device)
        self.is_cuda = self.device.type == "cuda"
        self.shape, self.context_len = shape, context_len
        self._max_num_nodes, self._rounds = max_num_nodes, rounds
        dtype = torch.bfloat16 if self.is_cuda else torch.float32
        weights = random_weights(shape, dtype=dtype, device=self.device, seed=1)
        self.decoder = LlamaDecoder(weights, rope_table(shape, WINDOW, self.device))
        layout = kv_layout(shape, block_size=BLOCK_SIZE, dtype=str(dtype).removeprefix("torch."))
        num_blocks = layout.num_blocks_for(context_len + 1 + max_num_nodes)
        self.memory = KvMemory(layout, num_blocks, device)
        self.memory.cache.normal_()
        self.decoder.attach([block_rows(view, layout) for view in self.memory.layer_views()])

    def plain_ms(self) -> float:
        """Milliseconds of the forward of a plain decode step, back to back."""
        num_blocks = -(-(self.context_len + 1) // BLOCK_SIZE)
        tables = torch.zeros(1, WINDOW // BLOCK_SIZE, dtype=torch.int32, device=self.device)
        tables[0, :num_blocks] = torch.arange(num_blocks)
        ints = torch.tensor([[1], [self.context_len]], dtype=torch.int32, device=self.device)
        inputs = DecodeInputs(ints[0], ints[1], tables)

        def forward(_: int) -> None:
            self.decoder.decode(inputs)

        graphs: GraphSet[int] = GraphSet(forward, uses_graphs=self.is_cuda)
        graphs.capture([1])
        return self._back_to_back(lambda: graphs.run(1))

    def graphs_for(self, batch: Batch) -> tuple[TreeGraphs, TreeShape]:
        """Make CUDA graphs of the step's shape alone. Returns: the graphs and that shape."""
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
        """Milliseconds of the forward over the tree, back to back."""
        graphs, shape = self.graphs_for(batch)
        graphs.run(shape, batch)
        its = graphs._graphs  # noqa: SLF001  what the step is without its inputs is what is asked
        return self._back_to_back(lambda: its.run(shape))

    def calls(self, batch: Batch) -> dict[str, float]:
        """Milliseconds of the forward from an idle device to its end; and the part that the host
        took: its inputs, the launch of its graph, and all until it was free again."""
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
        """Milliseconds of sampling at each node, read back, and of the move of a path, with nothing
        queued before them."""
        num_rows = len(batch.draw_indices)
        logits = torch.randn(num_rows, self.shape.vocab_size, device=self.device)
        logits = logits.to(self.decoder.weights.layers[0].norm.dtype)
        sampling = Sampling(max_tokens=1)
        draws = [SamplingRequest(sampling, self.context_len + row) for row in range(num_rows)]
        last = len(batch.spans[0].block_ids) - 1
        moves = [(last, slot + 8, last, slot) for slot in range(NUM_MOVED)]
        return {
            "draw": self._waited(lambda: Sampler().begin(logits, draws).result()),
            "move": self._waited(lambda: self.memory.move_tokens(moves)),
        }

    def account(self, num_nodes: int) -> dict[str, float]:
        """Milliseconds of one step by part: what each part adds, since kernels overlap."""
        batch = tree_batch(self.context_len, num_nodes)
        whole = self.step_ms(batch)
        with going(NO_TREES):
            unattended = self.step_ms(batch)
        with going(NO_MIXED):
            products = self.step_ms(batch)
        return {
            "forward": whole,
            "products and norms": products,
            "rotation and KV": round(unattended - products, 4),
            "attention": round(whole - unattended, 4),
            **self.calls(batch),
            **self.draws(batch),
        }

    def way_ms(self, way: Way, num_nodes: int) -> dict[str, float]:
        """Milliseconds of the forward, cut in another way."""
        with going(way):
            return {"ms": self.step_ms(tree_batch(self.context_len, num_nodes))}

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


@harness.case
@click.option("--shape", type=click.Choice([*SHAPES, "tiny"]), default="llama-8b")
@click.option("--nodes", type=Several(int), default="8,16,32,64", help="guesses of a step")
@click.option("--ways", type=Several(int), default="32", help="guesses for which other cuts run")
@click.option("--context", "context_len", default=CONTEXT)
@click.option("--rounds", default=10)
def verify(
    shape: str, nodes: Sequence[int], ways: Sequence[int], context_len: int, rounds: int
) -> dict[str, Any]:
    """A step that verifies a token tree of four branches at batch 1, beside a plain decode's:
    milliseconds by part.

    The captured forward, replayed back to back; without attention, and without rotation and KV
    besides; the forward as the engine calls it, and what the host did of that; the draw behind it,
    and the move of a kept path. Then (on CUDA) attention and products cut otherwise than their
    tables say. `--shape tiny` runs it on a CPU.
    """
    device = "cpu" if shape == "tiny" else "cuda:0"
    if device != "cpu":
        harness.needs_cuda()
    with torch.inference_mode(), on_device(torch.device(device)):
        bench = VerifyBench(
            shape_of(shape),
            device,
            context_len=context_len,
            max_num_nodes=max(*nodes, 64),
            rounds=rounds,
        )
        plain = bench.plain_ms()
        steps = {f"{count} nodes": bench.account(count) for count in nodes}
        parts = next(iter(steps.values()), {})
        harness.show(
            f"milliseconds; a plain forward takes {plain:.3f}",
            [{"part": part, **{name: one[part] for name, one in steps.items()}} for part in parts],
        )
        found: dict[str, Any] = {}
        for count in ways if bench.is_cuda else ():
            every = [*attention_ways(), *product_ways()]
            rows = [attempt(way.name, bench.way_ms, way, count) for way in every]
            harness.show(f"{count} nodes, otherwise", rows)
            found[f"{count} nodes"] = rows
    context = harness.device_context(device)
    return {**context, "shape": shape, "plain forward": plain, "steps": steps, "ways": found}


# -- several GPUs that compute one decoder

PREFILL = 8192
_IN_GRAPH = 20


class Rank:
    """One process of a parallel run. Rank 0 prints."""

    def __init__(self, grid: Grid, rank: int, meeting_file: int) -> None:
        self.grid, self.rank = grid, rank
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.ranks = DistributedRanks(grid, rank, f"cuda:{rank}", 120.0)
        self.ranks.form(meeting_file)

    def run(self, out: Path | None, command: str) -> None:
        rows = [attempt("copy of 1 GiB from GPU to GPU", self._ceiling)]
        self.ranks.add_up(torch.zeros(1, device=self.device))  # all wait until rank 0 has copied
        torch.cuda.synchronize()
        if self.grid.num_shares > 1:
            for num_rows in (1, 8, 64, 256, 2048, PREFILL):
                rows.append(attempt(f"sum of {num_rows} x 4096", self._sum, num_rows))
        shape = shape_of("llama-8b")
        model, num_blocks = self._model(shape)
        for num_rows in (1, 8, 64, 256):
            case = f"decode b{num_rows} ctx {CONTEXT}"
            rows.append(attempt(case, self._decode, model, num_rows, num_blocks))
        rows.append(attempt(f"prefill 1 x {PREFILL}", self._prefill, model, shape))
        torch.cuda.synchronize()
        if self.rank == 0:
            nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
            title = f"{self.grid.num_shares} shares, {self.grid.num_stages} stages"
            harness.show(f"{title}, NCCL {nccl}", rows)
            known = {"benchmark": "decoder parallel", **harness.context(), "command": command}
            harness.publish({**known, **harness.device_context(), "rows": rows}, out)
        os._exit(0)  # process groups are not taken down in order

    def _ceiling(self) -> dict[str, Any]:
        if self.rank > 0 or torch.cuda.device_count() < 2:
            return {}
        size = 1 << 30
        source = torch.empty(size, dtype=torch.uint8, device="cuda:0")
        target = torch.empty(size, dtype=torch.uint8, device="cuda:1")
        seconds = event_s(lambda: target.copy_(source), 5, 1)
        return {"ms": seconds * 1e3, "GB/s": size / seconds / 1e9}

    def _sum(self, num_rows: int) -> dict[str, Any]:
        x = torch.zeros(num_rows, 4096, dtype=torch.bfloat16, device=self.device)
        graph = _captured(lambda: [self.ranks.add_up(x) for _ in range(_IN_GRAPH)])
        seconds = event_s(graph.replay, 20, 1) / _IN_GRAPH
        return {"ms": seconds * 1e3, "GB/s": x.nbytes / seconds / 1e9}

    def _model(self, shape: LlamaConfig) -> tuple[RankModel, int]:
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
        num_blocks = 256 * (CONTEXT // BLOCK_SIZE + 1)
        memory = RankMemory(layout, place, num_blocks, f"cuda:{self.rank}")
        memory.cache.normal_(0.0, 0.3)
        model.attach(memory)
        return model, num_blocks

    @torch.inference_mode()
    def _decode(self, model: RankModel, num_rows: int, num_blocks: int) -> dict[str, Any]:
        width = CONTEXT // BLOCK_SIZE
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(num_blocks, generator=generator)[: num_rows * width]
        inputs = DecodeInputs(
            torch.arange(num_rows, dtype=torch.int32, device=self.device),
            torch.full((num_rows,), CONTEXT - 1, dtype=torch.int32, device=self.device),
            order.view(num_rows, width).to(self.device, torch.int32),
        )
        graph = _captured(lambda: model.decode(inputs))
        seconds = event_s(graph.replay, 20, 1)
        return {"ms": seconds * 1e3, "tokens/s": round(num_rows / seconds)}

    def _prefill(self, model: RankModel, shape: LlamaConfig) -> dict[str, Any]:
        blocks = tuple(range(PREFILL // BLOCK_SIZE))
        token_ids = tuple(index % shape.vocab_size for index in range(PREFILL))
        batch = Batch(token_ids, (TokenSpan(0, PREFILL, blocks),), (PREFILL - 1,))
        seconds = event_s(lambda: model.forward(batch), 3, 1)
        return {"ms": seconds * 1e3, "tokens/s": round(PREFILL / seconds)}


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


@click.command("parallel", context_settings={"show_default": True})
@click.option("--shares", default=2, help="tensor parallel")
@click.option("--stages", default=1, help="pipeline parallel")
@click.option("--out", type=click.Path(path_type=Path), help="a file for the last line")
@click.option("--rank", default=-1, hidden=True)
@click.option("--meeting-file", default=-1, hidden=True)
def parallel(shares: int, stages: int, out: Path | None, rank: int, meeting_file: int) -> None:
    """The 8B shape on several GPUs, one process each: a sum over ranks, a decode step, a prompt;
    ceiling: a copy between two GPUs.

    With stages, steps follow one another without waiting: a row is the time from one to the next,
    which is less than one takes.
    """
    grid = Grid(shares, stages)
    options = ["--shares", f"{shares}", "--stages", f"{stages}"]
    command = " ".join(["python -m benchmarks.decoder parallel", *options])
    if rank >= 0:
        entrypoint.die_with_parent()
        Rank(grid, rank, meeting_file).run(out, command)
    harness.needs_cuda(grid.num_ranks)
    meeting = os.memfd_create("ranks")
    options += ["--meeting-file", f"{meeting}", *(("--out", f"{out}") if out else ())]
    with contextlib.ExitStack() as stack:
        processes = [
            stack.enter_context(
                harness.child(
                    *harness.module("benchmarks.decoder", "parallel", *options, "--rank", f"{at}"),
                    pass_fds=(meeting,),
                )
            )
            for at in range(grid.num_ranks)
        ]
        code = max(process.wait() for process in processes)
    sys.exit(code)


main = harness.program(__doc__, step, verify, parallel)

if __name__ == "__main__":
    main()
