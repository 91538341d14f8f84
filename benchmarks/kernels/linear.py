"""Linear layers of few rows on a GPU: time, bytes a second and share of the read ceiling, beside
the library.

Every product is timed in a CUDA graph of a chain of launches over weights that rotate through far
more memory than L2 holds, so a launch overlaps its neighbours as it does in a decode step and
finds nothing cached that would not be there. `layers` is the chain that one step runs: per layer
qkv with norm, o with residual, gate and up with norm and SwiGLU, down with residual; then the head.
The ceiling is measured in the same run by a kernel that only reads.

    python -m benchmarks.kernels.linear [--sweep] [--others] [--seconds 60] [--out FILE]

--sweep times many tiles per shape and prints the best of each (all of them into --out).
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from baton_kernels.fp8_linear import Fp8Weight, fp8_linear
from baton_kernels.gpu import linear as gpu
from baton_kernels.gpu.linear import Tile
from baton_kernels.linear import linear
from baton_kernels.lora import add_lora, group_rows

POOL_BYTES = 17_000_000_000
ROTATED_BYTES = 400_000_000
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
    pool: Pool, model: str, num_rows: int, run: Callable[..., torch.Tensor]
) -> tuple[float, int]:
    """(seconds, bytes of weights) of all linear layers of a step."""
    num_layers, shapes = MODELS[model]
    stack = [shape for _ in range(num_layers) for shape in shapes[:-1]] + [shapes[-1]]
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
    for model, num_rows in itertools.product(MODELS, (1, 2, 4, 8, 16, 32, 64, 128, 256)):
        line = f"{model:5} M={num_rows:<4}"
        for name, run in (("ours", linear), ("library, product alone", library)):
            try:
                seconds, num_bytes = time_layers(pool, model, num_rows, run)
                rate = num_bytes / seconds
                line += f"  {name} {seconds * 1e3:7.3f} {rate / 1e12:5.2f} {rate / ceiling:4.0%}"
            except Exception as error:
                line += f"  {name} {type(error).__name__}: {str(error)[:200]}"
        say(line)


def others(pool: Pool) -> None:
    """fp8, chained as in `layers`; adapters: both launches, 4 adapters of rank 16."""
    say("fp8 linear layers of one decode step: ms, TB/s of weights")
    halves = {}

    def run_fp8(x: torch.Tensor, weight: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        # Half of the same memory, as one byte a number; any bytes will do.
        narrow = weight.view(-1)[: weight.numel() // 2].view(torch.float8_e4m3fn)
        scales = halves.setdefault(weight.shape[0], torch.ones(weight.shape[0], device="cuda"))
        return fp8_linear(x, Fp8Weight(narrow.view(weight.shape), scales), **kwargs)

    for model, num_rows in itertools.product(MODELS, (1, 8, 16, 64, 256)):
        try:
            seconds, num_bytes = time_layers(pool, model, num_rows, run_fp8)
            say(f"{model:5} M={num_rows:<4} {seconds * 1e3:7.3f} {num_bytes / 2e12 / seconds:5.2f}")
        except Exception as error:
            say(f"{model:5} M={num_rows:<4} {type(error).__name__}: {str(error)[:200]}")
    say("adapters, us: rows with 4 of them (rank 16), by width and depth")
    for num_rows, (width, depth) in itertools.product(
        (1, 8, 64, 512), ((6144, 4096), (4096, 14336), (4096, 1024))
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
        norm = torch.rand(shape.depth, device="cuda").bfloat16() if shape.has_norm else None
        kwargs: dict[str, Any] = {
            "norm_weight": norm,
            "activation": "silu_mul" if shape.is_gated else None,
        }
        try:
            results = [linear(x, weight, **kwargs) for _ in range(5)]
            wide = linear(
                x.double(), weight.double(), backend="reference",
                **{k: v.double() if isinstance(v, torch.Tensor) else v for k, v in kwargs.items()},
            )  # fmt: skip
            error = (results[0].double() - wide).norm() / wide.norm()
            same = all(torch.equal(results[0], one) for one in results)
            alone = linear(x[:1], weight, exact=True, **kwargs)
            exact = torch.equal(alone, linear(x, weight, exact=True, **kwargs)[:1])
            say(f"{shape.name:14} M={num_rows:<4} {error:.2e} same {same} exact {exact}")
        except Exception as failure:
            say(f"{shape.name:14} M={num_rows:<4} {type(failure).__name__}: {str(failure)[:200]}")


# ---- the sweep


def candidates(shape: Shape, num_rows: int) -> Iterator[Tile]:
    """Tiles worth a try: enough programs for the device, no more shared memory than it has."""
    if num_rows == 1:
        yield from row_candidates(shape)
        return
    block_m = max(8, num_rows)
    heights = 2 if shape.is_gated else 1
    for block_n, block_k, warps, stages, splits_warps in cuts(block_m):
        for split in (1, 2, 4, 8):
            num_programs = triton.cdiv(shape.width, block_n) * split
            steps = shape.depth // block_k // split
            shared = stages * (heights * block_n + block_m) * block_k * 2
            if shared > 220_000 or steps < 2 or (steps < stages - 1 and stages > 2):
                continue
            if (split > 1 and num_programs > 1100) or (num_programs < 120 and split < 8):
                continue
            yield Tile(block_m, block_n, block_k, split, warps, stages, splits_warps=splits_warps)


def row_candidates(shape: Shape) -> Iterator[Tile]:
    if shape.is_gated:
        sizes = [(4, 512, 4), (8, 512, 4), (4, 1024, 4), (2, 1024, 4), (2, 1024, 2), (1, 1024, 2)]
        sizes += [(1, 1024, 1), (2, 512, 1), (1, 512, 1)]
    else:
        sizes = [(2, 1024, 4), (4, 1024, 4), (2, 2048, 4), (1, 2048, 2), (2, 1024, 2), (1, 1024, 1)]
        sizes += [(2, 1024, 1), (2, 512, 1), (4, 512, 2), (2, 4096, 4), (1, 4096, 4), (4, 512, 4)]
    for block_n, block_k, warps in sizes:
        if block_k >= 2 * shape.depth:
            continue
        tile = Tile(0, block_n, block_k, 1, warps, 1)
        yield tile
        if (block_n, warps) == (2, 4):
            yield replace(tile, prefetch_bytes=0)
            yield replace(tile, prefetch_bytes=30 << 20)
            yield replace(tile, triggers_first=False)


def cuts(block_m: int) -> list[tuple[int, int, int, int, bool]]:
    """(block_n, block_k, warps, stages, splits_warps)."""
    if block_m == 16:
        return [
            (32, 128, 2, 1, False), (64, 64, 4, 1, False), (32, 256, 2, 2, False),
            (64, 128, 4, 3, False), (64, 128, 4, 5, False), (64, 256, 4, 2, False),
            (64, 256, 4, 3, False), (16, 512, 4, 2, True),
        ]  # fmt: skip
    if block_m == 8:
        return [
            (16, 64, 1, 1, False), (16, 128, 1, 1, False), (32, 64, 2, 1, False),
            (32, 128, 2, 1, False), (64, 64, 4, 1, False), (64, 128, 4, 1, False),
            (16, 128, 1, 3, False), (16, 256, 1, 2, False), (16, 512, 1, 2, False),
            (32, 128, 2, 3, False), (32, 256, 2, 2, False), (64, 128, 4, 2, False),
            (64, 128, 4, 3, False), (64, 128, 4, 5, False), (64, 256, 4, 2, False),
            (64, 256, 4, 3, False), (16, 512, 4, 2, True), (16, 512, 4, 3, True),
            (16, 1024, 8, 2, True), (32, 512, 4, 2, True),
        ]  # fmt: skip
    if block_m == 32:
        return [
            (64, 64, 4, 4, False), (64, 128, 4, 2, False), (64, 128, 4, 3, False),
            (64, 128, 4, 4, False), (128, 128, 8, 3, False),
        ]  # fmt: skip
    return [
        (32, 128, 2, 3, False), (32, 128, 4, 4, False), (64, 64, 4, 2, False),
        (64, 64, 4, 4, False), (64, 128, 4, 2, False), (64, 128, 4, 3, False),
        (64, 128, 4, 4, False), (64, 256, 4, 2, False), (128, 64, 8, 4, False),
        (128, 64, 8, 6, False), (128, 128, 8, 2, False), (128, 128, 8, 3, False),
        (128, 128, 8, 4, False),
    ]  # fmt: skip


class OnlyCompile:
    """Stands in for a kernel: compiles what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., object]:
        return lambda *args, **kwargs: self._kernel.warmup(*args, grid=grid, **kwargs)


def compile_one(job: tuple[Shape, int, Tile | None, float]) -> str:
    """In a process of its own; the compiled kernel lies in Triton's cache afterwards.

    Returns: why not, else "".
    """
    shape, num_rows, tile, deadline = job
    if time.time() > deadline:
        return "no time left"
    for name in ("skinny_kernel", "row_kernel"):
        kernel = getattr(gpu, name)
        if not isinstance(kernel, OnlyCompile):
            setattr(gpu, name, OnlyCompile(kernel))
    try:
        x, weight, out = (
            torch.empty(1, length, dtype=torch.bfloat16, device="cuda").expand(height, length)
            for height, length in (
                (num_rows, shape.depth),
                shape.weight_shape,
                (num_rows, shape.width),
            )
        )
        if tile is None:
            linear(x, weight, out=out, **shape.extras(x[0], out))
        else:
            gpu.launch(x, weight, out, tile, is_gated=shape.is_gated)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def time_tile(pool: Pool, shape: Shape, num_rows: int, tile: Tile | None) -> float:
    """Seconds a launch; without a tile the library's product."""
    num_weights = max(2, ROTATED_BYTES // shape.num_bytes)
    weights = [pool.take(*shape.weight_shape) for _ in range(min(num_weights, 40))]
    num_launches = max(6 if shape.num_bytes > 500_000_000 else 20, len(weights))
    x = torch.randn(num_rows, shape.depth, device="cuda").bfloat16()
    out = torch.empty(num_rows, shape.width, device="cuda", dtype=torch.bfloat16)

    def chain() -> None:
        for index in range(num_launches):
            weight = weights[index % len(weights)]
            if tile is None:
                torch.mm(x, weight.t())
            else:
                gpu.launch(x, weight, out, tile, is_gated=shape.is_gated)

    return seconds_of(chain) / num_launches


def sweep(end: float, out: Path | None) -> Callable[[Pool, float], None]:
    """Compiles in processes of their own (before this one touches the GPU); returns what times."""
    order = [8, 1, 64, 16, 32]
    jobs = [
        (shape, num_rows, tile, end - 25)
        for num_rows in order
        for _, shapes in MODELS.values()
        for shape in shapes
        for tile in candidates(shape, num_rows)
    ]
    same_code = {(shape, tile): rows for shape, rows, tile, _ in reversed(jobs)}
    unique: list[tuple[Shape, int, Tile | None, float]] = [
        (shape, num_rows, None, end - 25)
        for num_rows in (1, 8, 16, 32, 64)
        for _, shapes in MODELS.values()
        for shape in shapes
    ]
    unique += [(s, rows, t, until) for s, rows, t, until in jobs if same_code[(s, t)] == rows]
    with multiprocessing.get_context("fork").Pool(NUM_COMPILERS) as workers:
        reasons = workers.map(compile_one, unique, chunksize=4)
    pairs = zip(unique, reasons, strict=True)
    compiled = {(shape, tile) for (shape, _, tile, _), reason in pairs if not reason}
    say(f"compiled {len(compiled)} of {len(unique)}, {end - time.time():.0f} s left")
    say(f"    not compiled: {sorted({reason for reason in reasons if reason})[:4]}")
    if not compiled:
        compiled = {(shape, tile) for shape, _, tile, _ in unique}

    def run(pool: Pool, ceiling: float) -> None:
        rows: list[dict[str, Any]] = []
        for num_rows, (_, shapes) in itertools.product(order, MODELS.values()):
            for shape in shapes:
                if time.time() > end:
                    break
                rows += sweep_shape(pool, ceiling, shape, num_rows, compiled)
        if out is not None:
            out.write_text(json.dumps(rows))

    return run


def briefly(tile: Tile) -> str:
    cut = (tile.block_n, tile.block_k, tile.split_k, tile.num_warps, tile.num_stages)
    text = ",".join(map(str, cut)) + ("w" if tile.splits_warps else "")
    text += "" if tile.triggers_first else " late"
    return text if tile.block_m else f"{text} ahead {tile.prefetch_bytes >> 20}"


def sweep_shape(
    pool: Pool,
    ceiling: float,
    shape: Shape,
    num_rows: int,
    compiled: set[tuple[Shape, Tile | None]],
) -> list[dict[str, Any]]:
    """All tiles of one shape; prints the library and the best few."""
    found: list[tuple[float, Tile]] = []
    failure = ""
    for tile in candidates(shape, num_rows):
        if (shape, tile) in compiled:
            try:
                found.append((time_tile(pool, shape, num_rows, tile), tile))
            except Exception as error:
                failure = f"{tile}: {type(error).__name__}: {str(error)[:150]}"
    library_s = time_tile(pool, shape, num_rows, None)
    found.sort(key=lambda one: one[0])
    line = f"{shape.name:13} M={num_rows:<3} library {library_s * 1e6:6.1f} us"
    for seconds, tile in found[:5]:
        share = shape.num_bytes / seconds / ceiling
        line += f" | {seconds * 1e6:.1f} {share:.0%} {briefly(tile)}"
    say(line + (f"\n    failed: {failure}" if failure else ""))
    return [
        {"shape": shape.name, "rows": num_rows, "us": s * 1e6, **asdict(tile)} for s, tile in found
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers of few rows on a GPU.")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--others", action="store_true", help="fp8 and adapters, too")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end = time.time() + args.seconds
    timed = sweep(end, args.out) if args.sweep else None
    pool = Pool(POOL_BYTES)
    ceiling = read_ceiling(pool)
    say(f"read ceiling {ceiling / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")
    if timed is not None:
        timed(pool, ceiling)
    layers(pool, ceiling)
    if args.others:
        others(pool)
    errors()


if __name__ == "__main__":
    main()
