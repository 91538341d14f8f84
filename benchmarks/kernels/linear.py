"""Linear layers of few rows on a GPU: time, bytes a second and share of the read ceiling, beside
the library.

All is timed in a CUDA graph of the chain that a decode step runs: per layer qkv with norm, o with
residual, gate and up with norm and SwiGLU, down with residual; then the head. Weights are those of
all layers, far more than L2 holds. A launch alone, or many equal ones, would mislead: in a chain
of its own kind a kernel fills its neighbour's gaps as it never does between others (seen: a tile
15 % faster that way was slower in the step). The ceiling is measured in the same run by a kernel
that only reads.

    python -m benchmarks.kernels.linear [--sweep 1 8 64] [--others] [--seconds 60] [--out FILE]

--sweep tries many tiles for each linear layer in turn, at those numbers of rows, and prints the
time of a whole layer with the best of them (--out: with all).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from baton_kernels.fp8_linear import Fp8Weight, fp8_linear
from baton_kernels.gpu import linear as gpu
from baton_kernels.gpu.tiles import Tile
from baton_kernels.layer_ops import rms_norm, silu_mul
from baton_kernels.linear import linear
from baton_kernels.lora import add_lora, group_rows

POOL_BYTES = 17_000_000_000
NUM_COMPILERS = max(1, min(15, (os.cpu_count() or 1) - 1))


@dataclass(frozen=True)
class Shape:
    """One linear layer."""

    name: str
    width: int
    depth: int
    is_gated: bool = False
    has_norm: bool = False
    has_residual: bool = False

    @property
    def weight_shape(self) -> tuple[int, int]:
        return self.width * (2 if self.is_gated else 1), self.depth

    @property
    def num_bytes(self) -> int:
        return 2 * self.weight_shape[0] * self.depth

    def extras(self, norm: torch.Tensor, residual: torch.Tensor) -> dict[str, Any]:
        """What a decoder asks of this layer."""
        return {
            "residual": residual if self.has_residual else None,
            "norm_weight": norm if self.has_norm else None,
            "activation": "silu_mul" if self.is_gated else None,
        }


def model_shapes(
    name: str, hidden: int, qkv: int, attended: int, inner: int, vocab: int
) -> list[Shape]:
    return [
        Shape(f"{name} qkv", qkv, hidden, has_norm=True),
        Shape(f"{name} o", hidden, attended, has_residual=True),
        Shape(f"{name} gate_up", inner, hidden, is_gated=True, has_norm=True),
        Shape(f"{name} down", hidden, inner, has_residual=True),
        Shape(f"{name} head", vocab, hidden, has_norm=True),
    ]


MODELS = {
    "8B": (32, model_shapes("8B", 4096, 6144, 4096, 14336, 128256)),
    "0.6B": (28, model_shapes("0.6B", 1024, 4096, 2048, 3072, 151936)),
}


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Pool:
    """Random weights, handed out as views one after another, round and round."""

    def __init__(self, num_bytes: int) -> None:
        self.numbers = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device="cuda")
        for part in self.numbers.split(1 << 28):
            part.normal_(std=0.02)
        self._next = 0

    def take(self, height: int, depth: int) -> torch.Tensor:
        size = height * depth
        if self._next + size > self.numbers.numel():
            self._next = 0
        first = self._next
        self._next += size
        return self.numbers[first : first + size].view(height, depth)


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """Half of the same memory as one byte a number; any bytes will do."""
    half = weight.reshape(-1)[: weight.numel() // 2]
    return half.view(torch.float8_e4m3fn).view(weight.shape)


def seconds_of(chain: Callable[[], None], num_replays: int = 3) -> float:
    """Median seconds of one replay of the chain as a CUDA graph."""
    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    graph.replay()
    times = []
    for _ in range(num_replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


@triton.jit
def read_kernel(source, out, NUM_STEPS: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * NUM_STEPS * BLOCK
    seen = tl.zeros((BLOCK,), dtype=tl.int32)
    for step in tl.range(NUM_STEPS):
        seen |= tl.load(source + first + step * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + tl.program_id(0), tl.max(seen, axis=0))


def read_ceiling(pool: Pool) -> float:
    """Bytes a second of reading alone: the best of a few ways to cut it."""
    source = pool.numbers.view(torch.int32)[: 1 << 30]
    best = 0.0
    for block, steps in ((2048, 8), (4096, 8), (4096, 32), (8192, 4)):
        num_programs = source.numel() // (block * steps)
        out = torch.empty(num_programs, dtype=torch.int32, device="cuda")

        def chain(grid: int = num_programs, o: Any = out, n: int = steps, b: int = block) -> None:
            read_kernel[(grid,)](source, o, NUM_STEPS=n, BLOCK=b, num_warps=8)

        best = max(best, 4 * num_programs * block * steps / seconds_of(chain))
    return best


def time_layers(
    pool: Pool,
    model: str,
    num_rows: int,
    run: Callable[..., torch.Tensor],
    only: Shape | None = None,
) -> tuple[float, int]:
    """(seconds, bytes of weights) of all linear layers of a step.

    Args:
        only: of this one of every layer; None: all.
    """
    num_layers, shapes = MODELS[model]
    stack = [shape for _ in range(num_layers) for shape in shapes[:-1]] + [shapes[-1]]
    if only is not None:
        stack = [shape for shape in stack if shape == only]
    weights = [pool.take(*shape.weight_shape) for shape in stack]
    inputs = {
        shape.depth: torch.randn(num_rows, shape.depth, device="cuda").bfloat16()
        for shape in shapes
    }
    norms = {d: torch.rand(d, device="cuda").bfloat16() for d in inputs}
    outs = {s.name: torch.randn(num_rows, s.width, device="cuda").bfloat16() for s in shapes}

    def chain() -> None:
        for shape, weight in zip(stack, weights, strict=True):
            run(
                inputs[shape.depth],
                weight,
                out=outs[shape.name],
                **shape.extras(norms[shape.depth], outs[shape.name]),
            )

    return seconds_of(chain), sum(shape.num_bytes for shape in stack)


def library(x: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The library's product alone, nothing around it."""
    return torch.mm(x, weight.t())


def layers(pool: Pool, ceiling: float) -> None:
    say("linear layers of one decode step: ms, TB/s of weights, share of the read ceiling")
    for model, num_rows in itertools.product(MODELS, (1, 2, 4, 8, 16, 32, 64, 128, 256, 2048)):
        line = f"{model:5} M={num_rows:<4}"
        for name, run in (
            ("ours", linear),
            ("exact", functools.partial(linear, exact=True)),
            ("library, product alone", library),
        ):
            try:
                seconds, num_bytes = time_layers(pool, model, num_rows, run)
                rate = num_bytes / seconds
                line += f"  {name} {seconds * 1e3:7.3f} {rate / 1e12:5.2f} {rate / ceiling:4.0%}"
            except Exception as error:
                line += f"  {name} {type(error).__name__}: {str(error)[:200]}"
        say(line)
    say("the same by layer, us each with what surrounds it")
    for model, num_rows in itertools.product(MODELS, (1, 8, 16, 32, 64)):
        parts = []
        for shape in MODELS[model][1][:-1]:
            seconds, _ = time_layers(pool, model, num_rows, linear, shape)
            parts.append(f"{shape.name} {seconds / MODELS[model][0] * 1e6:.1f}")
        say(f"M={num_rows:<4} {', '.join(parts)}")


def others(pool: Pool) -> None:
    """fp8, chained as in `layers`; adapters: both launches, 4 adapters of rank 16."""
    say("fp8 linear layers of one decode step: ms, TB/s of weights")
    halves: dict[int, torch.Tensor] = {}

    def run_fp8(x: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        scales = halves.setdefault(weight.shape[0], torch.ones(weight.shape[0], device="cuda"))
        return fp8_linear(x, Fp8Weight(narrowed(weight), scales), **kwargs)

    for model, num_rows in itertools.product(("8B",), (1, 8)):
        try:
            seconds, num_bytes = time_layers(pool, model, num_rows, run_fp8)
            say(f"{model:5} M={num_rows:<4} {seconds * 1e3:7.3f} {num_bytes / 2e12 / seconds:5.2f}")
        except Exception as error:
            say(f"{model:5} M={num_rows:<4} {type(error).__name__}: {str(error)[:200]}")
    say("adapters, us: rows with 4 of them (rank 16), by width and depth")
    for num_rows, (width, depth) in itertools.product(
        (1, 8, 64, 512), ((6144, 4096), (4096, 14336))
    ):
        x, out = (pool.take(num_rows, length) for length in (depth, width))
        factors = [
            (pool.take(64, depth).view(4, 16, depth), pool.take(64, width).view(4, 16, width))
        ]
        factors += [(torch.randn_like(a), torch.randn_like(b)) for a, b in factors * 19]
        rows = group_rows([row % 4 for row in range(num_rows)], "cuda")

        def chain(x: Any = x, out: Any = out, factors: Any = factors, rows: Any = rows) -> None:
            for a, b in factors:
                add_lora(out, x, a, b, rows)

        try:
            line = f"{seconds_of(chain) / len(factors) * 1e6:7.2f}"
        except Exception as error:
            line = f"{type(error).__name__}: {str(error)[:200]}"
        say(f"M={num_rows:<4} {width}x{depth} {line}")


def errors() -> None:
    """Relative error of each shape against float64, and bits from run to run."""
    say("relative error against float64; equal bits in 5 runs; exact: bits of row 0 for any M")
    for shape, num_rows in itertools.product(MODELS["0.6B"][1][:4], (1, 3, 8, 16, 40, 64, 200)):
        x = torch.randn(num_rows, shape.depth, device="cuda").bfloat16()
        weight = torch.randn(shape.weight_shape, device="cuda").bfloat16() * 0.02
        norm = torch.rand(shape.depth, device="cuda").bfloat16()
        residual = torch.randn(num_rows, shape.width, device="cuda").bfloat16()
        kwargs = shape.extras(norm, residual)
        first = shape.extras(norm, residual[:1])
        try:
            results = [linear(x, weight, **kwargs) for _ in range(5)]
            wide = linear(
                x.double(), weight.double(), backend="reference",
                **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()},
            )  # fmt: skip
            error = (results[0].double() - wide).norm() / wide.norm()
            same = all(torch.equal(results[0], one) for one in results)
            alone = linear(x[:1], weight, exact=True, **first)
            exact = torch.equal(alone, linear(x, weight, exact=True, **kwargs)[:1])
            say(f"{shape.name:14} M={num_rows:<4} {error:.2e} same {same} exact {exact}")
        except Exception as failure:
            say(f"{shape.name:14} M={num_rows:<4} {type(failure).__name__}: {str(failure)[:200]}")


# ---- the sweep


class Chain:
    """Some layers of one decode step, each launch with a tile that can be replaced."""

    def __init__(self, pool: Pool, model: str, num_rows: int) -> None:
        self.shapes = MODELS[model][1][:-1]
        self.num_layers = 8
        self._weights = {
            shape: [pool.take(*shape.weight_shape) for _ in range(self.num_layers)]
            for shape in self.shapes
        }
        self._inputs = {
            shape: torch.randn(num_rows, shape.depth, device="cuda").bfloat16()
            for shape in self.shapes
        }
        self._norms = {
            shape: torch.rand(shape.depth, device="cuda").bfloat16() for shape in self.shapes
        }
        self._outs = {
            shape: torch.randn(num_rows, shape.width, device="cuda").bfloat16()
            for shape in self.shapes
        }

    def seconds(self, replaced: Shape | None, way: Way | None) -> float:
        """Of one layer, with `replaced` done that way and the others as `linear` does them."""

        def chain() -> None:
            for index in range(self.num_layers):
                for shape in self.shapes:
                    x, out, norm = self._inputs[shape], self._outs[shape], self._norms[shape]
                    weight = self._weights[shape][index]
                    if shape is replaced and way is not None:
                        launch_way(x, weight, out, norm, shape, way)
                    else:
                        linear(x, weight, out=out, **shape.extras(norm, out))

        return seconds_of(chain, num_replays=5) / self.num_layers


@dataclass(frozen=True)
class Way:
    """One way to do a linear layer."""

    tile: Tile | None
    """None: the library."""

    fuses_norm: bool = False

    def __str__(self) -> str:
        tile = self.tile
        if tile is None:
            return "library"
        cut = [tile.block_m] if tile.block_m else []
        cut += [tile.block_n, tile.block_k, tile.split_k, tile.num_warps, tile.num_stages]
        text = ",".join(map(str, cut)) + ("w" if tile.splits_warps else "")
        text += "" if tile.prefetch_bytes else " none ahead"
        return text + (" norm" if self.fuses_norm else "")


def launch_way(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    norm: torch.Tensor,
    shape: Shape,
    way: Way,
) -> None:
    if shape.has_norm and not way.fuses_norm:
        x = rms_norm(x, norm, 1e-6)
    if way.tile is not None:
        gpu.launch(
            x,
            weight,
            out,
            way.tile,
            residual=out if shape.has_residual else None,
            norm_weight=norm if shape.has_norm and way.fuses_norm else None,
            norm_eps=1e-6,
            is_gated=shape.is_gated,
        )
    elif shape.is_gated:
        silu_mul(torch.mm(x, weight.t()), out=out)
    elif shape.has_residual:
        torch.addmm(out, x, weight.t(), out=out)
    else:
        torch.mm(x, weight.t(), out=out)


def ways(shape: Shape, num_rows: int) -> Iterator[Way]:
    """What is worth a try: enough programs for the device, no more shared memory than it has."""
    if num_rows == 1:
        for block_n, block_k, warps in (
            (2, 1024, 4), (4, 1024, 4), (2, 1024, 2), (2, 2048, 4), (1, 1024, 1), (1, 2048, 2),
            (4, 512, 4), (8, 512, 4), (2, 512, 2),
        ):  # fmt: skip
            if block_k < 2 * shape.depth:
                tile = Tile(0, block_n, block_k, 1, warps, 1)
                yield Way(tile)
                if shape.has_norm:
                    yield Way(tile, fuses_norm=True)
                elif block_n == 2:
                    yield Way(replace(tile, prefetch_bytes=0))
        return
    if num_rows > 16:
        yield Way(None)
    block_m = max(8, num_rows)
    for block_n, block_k, warps, stages, splits_warps in cuts(block_m):
        for split in (1, 2, 4, 8):
            num_programs = -(-shape.width // block_n) * split
            heights = block_n * (2 if shape.is_gated else 1)
            shared = 2 * max(1, stages) * (heights + block_m) * block_k
            steps = -(-shape.depth // block_k) // split
            if shared > 220_000 or steps < max(1, stages - 1) or block_k >= 2 * shape.depth:
                continue
            if (split == 1 or num_programs <= 800) and num_programs >= (60 if splits_warps else 96):
                yield Way(
                    Tile(block_m, block_n, block_k, split, warps, stages, splits_warps=splits_warps)
                )


def cuts(block_m: int) -> list[tuple[int, int, int, int, bool]]:
    """(block_n, block_k, warps, stages, splits_warps)."""
    wide = [(64, 128, 4, stages, False) for stages in (2, 3, 4)]
    if block_m > 16:
        return [*wide, (64, 64, 4, 4, False), (32, 128, 4, 4, False), (128, 128, 8, 2, False)]
    by_warps = [(16, 256, 4, 1), (16, 512, 4, 1), (16, 1024, 8, 1), (16, 512, 4, 3)]
    return [*wide, (64, 128, 4, 5, False), *((*cut, True) for cut in by_warps)]


class OnlyCompile:
    """Stands in for a kernel: compiles what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., object]:
        return lambda *args, **kwargs: self._kernel.warmup(*args, grid=grid, **kwargs)


def compile_one(job: tuple[Shape, int, Way | bool, float]) -> str:
    """In a process of its own; the compiled kernel lies in Triton's cache afterwards. In place of a
    way: whether what `linear` does by itself is to be exact.

    Returns: why not, else "".
    """
    shape, num_rows, way, deadline = job
    if time.time() > deadline:
        return "no time left"
    for name in ("skinny_kernel", "row_kernel"):
        kernel = getattr(gpu, name)
        if not isinstance(kernel, OnlyCompile):
            setattr(gpu, name, OnlyCompile(kernel))
    try:
        x, weight = (
            torch.empty(1, length, dtype=torch.bfloat16, device="cuda").expand(height, length)
            for height, length in ((num_rows, shape.depth), shape.weight_shape)
        )
        out = torch.empty(num_rows, shape.width, dtype=torch.bfloat16, device="cuda")
        if isinstance(way, bool):
            linear(x, weight, out=out, exact=way, **shape.extras(x[0], out))
        else:
            launch_way(x, weight, out, x[0], shape, way)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def sweep(end: float, order: list[int], out: Path | None) -> Callable[[Pool], None]:
    """Compiles in processes of their own (before this one touches the GPU); returns what times."""
    deadline = end - 15
    jobs: list[tuple[Shape, int, Way | bool, float]] = [
        (shape, num_rows, is_exact, deadline)
        for is_exact, all_rows in ((False, (1, 8, 16, 32, 64)), (True, (1, 64, 300, 600)))
        for num_rows in all_rows
        for _, shapes in MODELS.values()
        for shape in shapes
    ]
    jobs += [
        (shape, num_rows, way, deadline)
        for num_rows in order
        for _, shapes in MODELS.values()
        for shape in shapes[:-1]
        for way in ways(shape, num_rows)
        if way.tile is not None
    ]
    with multiprocessing.get_context("fork").Pool(NUM_COMPILERS) as workers:
        reasons = workers.map(compile_one, jobs, chunksize=4)
    num_compiled = sum(not reason for reason in reasons)
    say(f"compiled {num_compiled} of {len(jobs)}, {end - time.time():.0f} s left")
    say(f"    not compiled: {sorted({reason for reason in reasons if reason})[:4]}")

    def run(pool: Pool) -> None:
        rows: list[dict[str, Any]] = []
        for num_rows, model in itertools.product(order, MODELS):
            chain = Chain(pool, model, num_rows)
            base = chain.seconds(None, None)
            say(
                f"{model} M={num_rows}: a layer {base * 1e6:.1f} us; with one linear in other ways:"
            )
            for shape in chain.shapes:
                if time.time() < end:
                    rows += sweep_shape(chain, shape, num_rows)
        if out is not None:
            out.write_text(json.dumps(rows))

    return run


def sweep_shape(chain: Chain, shape: Shape, num_rows: int) -> list[dict[str, Any]]:
    """All ways of one linear layer; prints the best few."""
    found: list[tuple[float, Way]] = []
    failure = ""
    for way in ways(shape, num_rows):
        try:
            found.append((chain.seconds(shape, way), way))
        except Exception as error:
            failure = f"{way}: {type(error).__name__}: {str(error)[:150]}"
    found.sort(key=lambda one: one[0])
    best = " | ".join(f"{seconds * 1e6:.1f} {way}" for seconds, way in found[:6])
    say(f"    {shape.name:12} {best}" + (f"\n    failed: {failure}" if failure else ""))
    return [
        {"shape": shape.name, "rows": num_rows, "layer_us": seconds * 1e6, "way": str(way)}
        for seconds, way in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers of few rows on a GPU.")
    parser.add_argument("--sweep", type=int, nargs="+", metavar="ROWS", default=[])
    parser.add_argument("--others", action="store_true", help="fp8 and adapters, too")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end = time.time() + args.seconds
    timed = sweep(end, args.sweep, args.out) if args.sweep else None
    pool = Pool(POOL_BYTES)
    ceiling = read_ceiling(pool)
    say(f"read ceiling {ceiling / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")
    if timed is not None:
        timed(pool)
    layers(pool, ceiling)
    if args.others:
        others(pool)
    errors()


if __name__ == "__main__":
    main()
