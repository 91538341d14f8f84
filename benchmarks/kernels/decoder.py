"""The bare forward pass of our decoder on one GPU: decode steps under a CUDA graph, prefill, and
where a decode step's time goes kernel by kernel.

Random weights of two shapes in bfloat16, 1,024 tokens of context, blocks of 16 in no order. Beside
it the ceilings of the same run: a large copy (bytes read and written) and a large matrix product.
A row that fails says so and hides no other.

    python benchmarks/kernels/decoder.py [--shapes llama-8b] [--profile 1 64] [--fp8] [--exact]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from baton_kernels.linear import linear
from rich.console import Console

from engine.batch import Batch, Span
from engine.decoder import projection
from engine.decoder.decoder import Decoder
from engine.decoder.inputs import DecodeInputs, mixed_inputs
from engine.decoder.model import block_rows, kv_layout
from engine.decoder.shape import DecoderShape, read_shape, rope_table
from engine.decoder.sources import random_weights
from engine.kv.memory import KvMemory

_console = Console(width=160, highlight=False)

_LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 16384,
}  # fmt: skip
_QWEN = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True, "max_position_embeddings": 16384,
}  # fmt: skip
SHAPES: dict[str, Callable[[], Any]] = {
    "llama-8b": lambda: transformers.LlamaConfig(**_LLAMA),
    "qwen3-0.6b": lambda: transformers.Qwen3Config(**_QWEN),
}
BATCHES = (1, 8, 64, 256)
CONTEXT = 1024
PROMPTS = ((1, 8192), (16, 2048))
BLOCK_SIZE = 16
_NUM_PROFILED_STEPS = 4
_NUM_TOP = 12
_DEVICE = torch.device("cuda")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--batches", nargs="*", type=int, default=list(BATCHES))
    parser.add_argument("--profile", nargs="*", type=int, default=[1], help="batches to profile")
    parser.add_argument("--no-prefill", action="store_true")
    parser.add_argument("--profile-prefill", action="store_true")
    parser.add_argument("--fp8", action="store_true", help="layers' matrices in fp8")
    parser.add_argument("--exact", action="store_true", help="bits that do not depend on the batch")
    parser.add_argument("--ablate", action="store_true", help="a step without some of its parts")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    _console.print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    copy_rate, product_rate = _ceilings()
    _console.print(f"copy {copy_rate / 1e12:.2f} TB/s, product {product_rate / 1e12:.0f} TFLOP/s")
    with torch.inference_mode():
        for name in arguments.shapes:
            _run_shape(name, arguments, copy_rate, product_rate)
            torch.cuda.empty_cache()


def _run_shape(
    name: str, arguments: argparse.Namespace, copy_rate: float, product_rate: float
) -> None:
    begun = time.monotonic()
    shape = read_shape(SHAPES[name]())
    weight_dtype = "fp8_e4m3" if arguments.fp8 else ""
    max_batch = max([*arguments.batches, 8])
    bench = _Bench(shape, max_batch, weight_dtype, is_exact=arguments.exact)
    _console.print(f"\n{name}: made in {time.monotonic() - begun:.1f} s")
    with _guarded("error"):
        error = bench.error_of_decode(8)
        _console.print(f"{'decode b8 against plain torch':<34} relative error {error:.2e}")
    for batch in arguments.batches:
        with _guarded(f"decode {batch}"):
            begun = time.monotonic()
            replay, host_s = bench.captured_decode(batch)
            compile_s = time.monotonic() - begun
            seconds = _timed(replay)
            num_bytes = bench.decode_bytes(batch)
            share = num_bytes / seconds / copy_rate
            _console.print(
                f"{f'decode b{batch} ctx {CONTEXT}':<34} {seconds * 1e3:8.3f} ms  "
                f"{num_bytes / seconds / 1e12:5.2f} TB/s  {share:5.1%} of copy   "
                f"(eager {host_s * 1e3:.1f} ms, first {compile_s:.1f} s)"
            )
            if batch in arguments.profile:
                _print_kernels(replay, seconds)
            del replay
        if arguments.ablate:
            _print_ablations(bench, batch)
    for num_prompts, length in () if arguments.no_prefill else PROMPTS:
        with _guarded(f"prefill {num_prompts} x {length}"):
            run = bench.prefill(num_prompts, length)
            run()
            seconds = _timed(run, num_rounds=5)
            flops = bench.prefill_flops(num_prompts, length)
            _console.print(
                f"{f'prefill {num_prompts} x {length}':<34} {seconds * 1e3:8.1f} ms  "
                f"{flops / seconds / 1e12:5.0f} TF/s  {flops / seconds / product_rate:5.1%} of "
                f"product   {num_prompts * length / seconds:,.0f} tok/s"
            )
            products_s = _timed(bench.products(num_prompts * length), num_rounds=3)
            _console.print(
                f"{'    its products alone, by the library':<34} {products_s * 1e3:4.1f} ms"
            )
            if arguments.profile_prefill:
                _print_kernels(run, seconds)


class _Bench:
    """A decoder with random weights and a cache of random numbers."""

    def __init__(
        self, shape: DecoderShape, max_batch: int, weight_dtype: str, *, is_exact: bool
    ) -> None:
        self.shape = shape
        weights = random_weights(
            shape, dtype=torch.bfloat16, device=_DEVICE, seed=1, weight_dtype=weight_dtype
        )
        self.decoder = Decoder(weights, rope_table(shape, 16384, _DEVICE), is_exact=is_exact)
        layout = kv_layout(shape, block_size=BLOCK_SIZE, dtype="bfloat16")
        num_tokens = max(max_batch * CONTEXT, max(count * length for count, length in PROMPTS))
        self._num_blocks = num_tokens // BLOCK_SIZE + max_batch
        self.memory = KvMemory(layout, self._num_blocks, "cuda")
        for first in range(0, self._num_blocks, 256):
            self.memory.cache[first : first + 256].normal_()
        self.decoder.attach([block_rows(view, layout) for view in self.memory.layer_views()])
        generator = torch.Generator().manual_seed(2)
        self._order = torch.randperm(self._num_blocks, generator=generator)

    def decode_inputs(self, batch: int) -> DecodeInputs:
        num_blocks = CONTEXT // BLOCK_SIZE
        tables = torch.zeros(batch, 80, dtype=torch.int32)
        tables[:, :num_blocks] = self._order[: batch * num_blocks].view(batch, num_blocks)
        token_ids = torch.randint(0, self.shape.vocab_size, (batch,), dtype=torch.int32)
        positions = torch.full((batch,), CONTEXT - 1, dtype=torch.int32)
        return DecodeInputs(token_ids.to(_DEVICE), positions.to(_DEVICE), tables.to(_DEVICE))

    def error_of_decode(self, batch: int) -> float:
        inputs = self.decode_inputs(batch)
        actual = self.decoder.decode(inputs).float()
        self.decoder.use_backend("reference")
        expected = self.decoder.decode(inputs).float()
        self.decoder.use_backend("auto")
        return float((actual - expected).norm() / expected.norm())

    def captured_decode(self, batch: int) -> tuple[Callable[[], object], float]:
        """(a replay of one step, seconds of one step that is not captured)."""
        inputs = self.decode_inputs(batch)
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.decoder.decode(inputs)
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        begun = time.monotonic()
        for _ in range(3):
            self.decoder.decode(inputs)
        torch.cuda.synchronize()
        eager_s = (time.monotonic() - begun) / 3
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.decoder.decode(inputs)
        return graph.replay, eager_s

    def prefill(self, num_prompts: int, length: int) -> Callable[[], object]:
        size = length // BLOCK_SIZE
        spans = tuple(
            Span(0, length, tuple(self._order[index * size : (index + 1) * size].tolist()))
            for index in range(num_prompts)
        )
        token_ids = torch.randint(0, self.shape.vocab_size, (num_prompts * length,)).tolist()
        ends = tuple(length * (index + 1) - 1 for index in range(num_prompts))
        batch = Batch(tuple(token_ids), spans, ends)
        return lambda: self.decoder.forward(mixed_inputs(batch, _DEVICE))

    def products(self, num_rows: int) -> Callable[[], object]:
        """The library's products of all layers, nothing beside."""
        layer = self.decoder.weights.layers[0]
        pairs = [
            (
                torch.randn(num_rows, one.in_features, device=_DEVICE).bfloat16(),
                torch.randn(one.in_features, one.out_features, device=_DEVICE).bfloat16(),
            )
            for one in layer.projections
        ]

        def run() -> None:
            for _ in range(self.shape.num_layers):
                for a, b in pairs:
                    torch.mm(a, b)

        return run

    def decode_bytes(self, batch: int) -> int:
        """Weights but for the embedding, once, and the keys and values of all sequences."""
        weights = self.decoder.weights
        num_bytes = sum(one.tensors[0].nbytes for one in weights.projections)
        shape = self.shape
        token = 2 * shape.num_kv_heads * shape.head_dim * shape.num_layers * 2
        return num_bytes + batch * CONTEXT * token

    def prefill_flops(self, num_prompts: int, length: int) -> float:
        """Products of all layers for all tokens, causal attention, the head for one row each."""
        weights, shape = self.decoder.weights, self.shape
        layers = sum(p.tensors[0].numel() for layer in weights.layers for p in layer.projections)
        num_tokens = num_prompts * length
        attention = 2 * shape.num_layers * shape.num_heads * shape.head_dim * length * num_tokens
        return 2.0 * layers * num_tokens + attention


def _print_ablations(bench: _Bench, batch: int) -> None:
    """What a part adds to the step: kernels overlap, so their own times do not add up to it."""
    for name, changes in _ABLATIONS.items():
        with _guarded(f"    b{batch} {name}"), contextlib.ExitStack() as stack:
            for target, attribute, stand_in in changes:
                stack.enter_context(mock.patch.object(target, attribute, stand_in))
            replay, _ = bench.captured_decode(batch)
            _console.print(f"    b{batch} {name:<30} {_timed(replay) * 1e3:8.3f} ms")
            del replay


def _unattended(
    decoder: Decoder, _index: int, _layer: object, qkv: torch.Tensor, *_: object
) -> torch.Tensor:
    return qkv[:, : decoder.shape.num_heads * decoder.shape.head_dim]


def _unnormed(*args: Any, **kwargs: Any) -> torch.Tensor:
    return linear(*args, **kwargs | {"norm_weight": None, "half_norm": None, "leaves": None})


_NO_ATTENTION = (Decoder, "_attend_each", _unattended)
_NO_NORM = (projection, "linear", _unnormed)
_WHOLE_NORMS = (Decoder, "_room", lambda *_: None)
_ABLATIONS: dict[str, tuple[tuple[Any, str, Any], ...]] = {
    "whole": (),
    "norms by launches of their own": (_WHOLE_NORMS,),
    "no norms": (_WHOLE_NORMS, _NO_NORM),
    "no attention": (_NO_ATTENTION,),
    "neither": (_WHOLE_NORMS, _NO_NORM, _NO_ATTENTION),
}


class _guarded:
    """An exception becomes one line."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        lines = str(error).splitlines() or [""]
        _console.print(f"{self._what:<34} FAILED: {type(error).__name__}: {' / '.join(lines[:4])}")
        return True


def _timed(run: Callable[[], object], num_rounds: int = 20) -> float:
    """Median seconds of one run."""
    for _ in range(3):
        run()
    found: list[float] = []
    for _ in range(num_rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def _print_kernels(replay: Callable[[], object], step_s: float) -> None:
    """The kernels of one step by time, and what no kernel explains (below 0: they overlap)."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        for _ in range(_NUM_PROFILED_STEPS):
            replay()
        torch.cuda.synchronize()
    rows = sorted(_kernel_times(profile), key=lambda row: -row[2])
    total_us = sum(time_us for _, _, time_us in rows)
    for name, count, time_us in rows[:_NUM_TOP]:
        _console.print(
            f"    {time_us:8.1f} us {count:5.0f} x {time_us / max(count, 1):7.2f} us  {name[:90]}"
        )
    rest_us = sum(time_us for _, _, time_us in rows[_NUM_TOP:])
    num_kernels = sum(count for _, count, _ in rows)
    _console.print(
        f"    {rest_us:8.1f} us others; {num_kernels:.0f} kernels, {total_us:.0f} us in them, "
        f"{step_s * 1e6 - total_us:.0f} us between them"
    )


def _kernel_times(profile: Any) -> Iterator[tuple[str, float, float]]:
    """(name, launches a step, microseconds a step)."""
    for entry in profile.key_averages():
        time_us = getattr(entry, "self_device_time_total", 0.0)
        if time_us > 0:
            yield entry.key, entry.count / _NUM_PROFILED_STEPS, time_us / _NUM_PROFILED_STEPS


def _ceilings() -> tuple[float, float]:
    """Bytes per second of a copy, FLOP per second of a bfloat16 product."""
    source = torch.randn(1 << 28, device=_DEVICE)
    target = torch.empty_like(source)
    copy_s = _timed(lambda: target.copy_(source), num_rounds=10)
    a, b = (torch.randn(8192, 8192, device=_DEVICE).bfloat16() for _ in range(2))
    product_s = _timed(lambda: torch.mm(a, b), num_rounds=10)
    return 2 * source.nbytes / copy_s, 2 * 8192**3 / product_s


if __name__ == "__main__":
    main()
