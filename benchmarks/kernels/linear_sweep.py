"""Tiles of linear layers on a GPU: many for each linear layer of a decode step in turn, the others
as `linear` does them; prints the time of a whole layer with the best of them (--out: with all).

    python -m benchmarks.kernels.linear_sweep 8 64 [--seconds 60] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from baton_kernels.gpu import linear as gpu
from baton_kernels.gpu.tiles import Tile
from baton_kernels.half_norm import HalfNorm

from benchmarks.kernels.linear_chain import (
    MODELS,
    Chain,
    Pool,
    Shape,
    Way,
    default_tile,
    launch_way,
    say,
)

POOL_BYTES = 6_000_000_000
NUM_COMPILERS = max(1, min(15, (os.cpu_count() or 1) - 1))


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


def _stand_ins(
    x: torch.Tensor, out: torch.Tensor, shape: Shape, way: Way, maker_block_n: int
) -> tuple[HalfNorm | None, HalfNorm | None]:
    """Halves as a chain has them."""
    if way.tile is None or way.tile.is_row:
        return None, None
    rows, block_n = (x, maker_block_n) if shape.has_norm else (out, way.tile.block_n)
    squares = torch.empty(-(-rows.shape[1] // block_n), len(rows), device="cuda")
    half = HalfNorm(rows[0], 1e-6, rows, squares)
    return (half, None) if shape.has_norm else (None, half)


Job = tuple[Shape, int, Way, int, float]
"""(layer, rows, way, block_n of the launch that leaves its norm, deadline)."""


def compile_one(job: Job) -> str:
    """In a process of its own; the compiled kernel lies in Triton's cache afterwards.

    Returns: why not, else "".
    """
    shape, num_rows, way, maker_block_n, deadline = job
    if time.time() > deadline:
        return "no time left"
    for name in ("skinny_kernel", "row_kernel"):
        kernel = getattr(gpu, name)
        if not isinstance(kernel, OnlyCompile):
            setattr(gpu, name, OnlyCompile(kernel))
    try:
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        x = torch.empty(num_rows, shape.depth, **options)
        weight = torch.empty(1, shape.depth, **options).expand(*shape.weight_shape)
        out = torch.empty(num_rows, shape.width, **options)
        launch_way(x, weight, out, x[0], shape, way, *_stand_ins(x, out, shape, way, maker_block_n))
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:150]}"
    return ""


def sweep(end: float, order: list[int], out: Path | None) -> Callable[[Pool], None]:
    """Compiles in processes of their own (before this one touches the GPU); returns what times."""
    deadline = end - 15
    jobs: list[Job] = [
        (shape, num_rows, way, 64, deadline)
        for num_rows in order
        for _, shapes in MODELS.values()
        for shape in shapes[:-1]
        for way in ways(shape, num_rows)
        if way.tile is not None
    ]
    for num_rows, (_, shapes) in itertools.product(order, MODELS.values()):
        for shape, block_n in itertools.product(shapes[:-1], (16, 32, 64, 128)):
            way = Way(default_tile(shape, num_rows))
            if way.tile is not None:
                jobs.append((shape, num_rows, way, block_n, deadline))
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
    parser = argparse.ArgumentParser(description="Tiles of linear layers on a GPU.")
    parser.add_argument("rows", type=int, nargs="+", help="numbers of rows, in this order")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    timed = sweep(time.time() + arguments.seconds, arguments.rows, arguments.out)
    timed(Pool(POOL_BYTES))


if __name__ == "__main__":
    main()
