"""What norms, SwiGLU, rotate-and-write and the moves of whole blocks cost: time, bytes a second,
and the share of a large copy's rate in the same run.

The time is of a launch in a graph of such launches; `plain`: the same without programmatic
dependent launch. `--sweep` tries other configurations of each kernel.

    python3 benchmarks/kernels/layer_ops.py [--sweep]
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from baton_kernels import block_ops, layer_ops
from baton_kernels.block_rows import BlockRows
from baton_kernels.gpu import block_ops as gpu_blocks
from baton_kernels.gpu import layer_ops as gpu
from device_timing import CONSOLE, attempt, copy_gb_per_s, graph_us, line, num_sets, relative

BF16 = torch.bfloat16
TOKENS = (1, 8, 64, 256, 2048, 8192)
SHAPES = {"8B": (4096, 14336, 32, 8, False), "0.6B": (1024, 3072, 16, 8, True)}
"""Hidden size, intermediate size, query heads, kv heads, QK-norm. Heads of 128."""
DIM, BLOCK = 128, 16


def randn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


@contextmanager
def without_overlap() -> Iterator[None]:
    """Launches that wait for the one before them, as any other kernel's."""
    kept = gpu.overlap_options
    gpu.overlap_options = lambda _: {"OVERLAPS": False}
    try:
        yield
    finally:
        gpu.overlap_options = kept


def both(launch: Callable[[int], object]) -> tuple[float, str]:
    us = graph_us(launch)
    with without_overlap():
        return us, f"plain {graph_us(launch):.2f} us"


def norms(name: str, hidden: int, num_tokens: int, ceiling: float) -> None:
    sets = num_sets(4 * num_tokens * hidden * 2)
    x = [randn(num_tokens, hidden) for _ in range(sets)]
    residual = [randn(num_tokens, hidden) for _ in range(sets)]
    weight, out = randn(hidden), [torch.empty_like(x[0]) for _ in range(sets)]

    def plain(index: int) -> None:
        gpu.rms_norm(x[index % sets], None, weight, 1e-5, out[index % sets], None)

    def added(index: int) -> None:
        i = index % sets
        gpu.rms_norm(x[i], residual[i], weight, 1e-5, out[i], residual[i])

    def check() -> str:
        error = relative(
            layer_ops.rms_norm(x[0], weight, 1e-5),
            layer_ops.rms_norm_reference(x[0].double(), weight, 1e-5),
        )
        us, more = both(plain)
        return line(us, 2 * x[0].nbytes, ceiling, f"{more}  error {error:.1e}")

    attempt(f"rms_norm {name} T={num_tokens}", check)
    attempt(
        f"add_rms_norm {name} T={num_tokens}",
        lambda: line(*_with(both(added), 4 * x[0].nbytes, ceiling)),
    )


def _with(found: tuple[float, str], num_bytes: int, ceiling: float) -> tuple[Any, ...]:
    return found[0], num_bytes, ceiling, found[1]


def swiglu(name: str, width: int, num_tokens: int, ceiling: float) -> None:
    sets = num_sets(3 * num_tokens * width * 2)
    gate_up = [randn(num_tokens, 2 * width) for _ in range(sets)]
    out = [gate_up[0].new_empty(num_tokens, width) for _ in range(sets)]
    attempt(
        f"silu_mul {name} T={num_tokens}",
        lambda: line(
            *_with(
                both(lambda i: gpu.silu_mul(gate_up[i % sets], out[i % sets])),
                3 * out[0].nbytes,
                ceiling,
            )
        ),
    )


class Rotation:
    """Inputs of rotate_and_write: `num_tokens` sequences at random places (a decode), or one
    prompt."""

    def __init__(self, name: str, num_tokens: int, *, is_prompt: bool) -> None:
        _, _, self.heads, kv_heads, has_norms = SHAPES[name]
        width = (self.heads + 2 * kv_heads) * DIM
        self.sets = num_sets(2 * num_tokens * width * 2)
        num_blocks = max(2048, num_tokens // BLOCK + 1)
        keys = randn(num_blocks * kv_heads * 2, BLOCK, DIM)
        self.rows = BlockRows(keys[:-1], keys[1:], DIM, kv_heads, kv_heads * 2, 2)
        self.qkv = [randn(num_tokens, width) for _ in range(self.sets)]
        self.out_q = [torch.empty(num_tokens, self.heads, DIM, device="cuda", dtype=BF16)] * 2
        count = num_tokens if is_prompt else 64 * BLOCK
        angles = torch.randn(max(count, 1024), DIM // 2, device="cuda")
        self.cos_sin = torch.cat((angles.cos(), angles.sin()), 1).contiguous()
        int32 = {"dtype": torch.int32, "device": "cuda"}
        if is_prompt:
            self.positions = torch.arange(num_tokens, **int32)
            self.ids = torch.zeros(num_tokens, **int32)
            self.tables = torch.randperm(num_blocks, device="cuda").to(torch.int32)[None]
        else:
            self.positions = torch.randint(0, 64 * BLOCK, (num_tokens,), **int32)
            self.ids = None
            picked = torch.randperm(num_blocks, device="cuda")[: 64 * min(num_tokens, 32)]
            self.tables = picked.to(torch.int32).view(-1, 64).repeat(-(-num_tokens // 32), 1)
            self.tables = self.tables[:num_tokens].contiguous()
        self.norms = (randn(DIM), randn(DIM)) if has_norms else (None, None)
        self.kv = [
            torch.empty(num_tokens, kv_heads, DIM, device="cuda", dtype=BF16)
            for _ in range(2 * is_prompt)
        ] or [None, None]
        self.num_bytes = 2 * self.qkv[0].nbytes + (2 * self.kv[0].nbytes if is_prompt else 0)

    def launch(self, index: int, config: tuple[int, int] | None = None) -> None:
        gpu.rotate_and_write(
            self.qkv[index % self.sets], self.positions, self.cos_sin, self.rows, self.tables,
            self.ids, None, *self.norms, 1e-6, self.out_q[0], *self.kv, config=config,
        )  # fmt: skip


def rotations(name: str, num_tokens: int, ceiling: float, *, sweeps: bool) -> None:
    is_prompt = num_tokens > 256
    rotation = Rotation(name, num_tokens, is_prompt=is_prompt)

    def row() -> str:
        us, more = both(rotation.launch)
        error = relative(
            rotation.out_q[0],
            layer_ops.rotate_reference(
                rotation.qkv[39 % rotation.sets].double(), rotation.positions, rotation.cos_sin,
                num_heads=rotation.heads, q_norm=rotation.norms[0], k_norm=rotation.norms[1],
            )[0],
        )  # fmt: skip
        return line(us, rotation.num_bytes, ceiling, f"{more}  error {error:.1e}")

    attempt(f"rotate_and_write {name} T={num_tokens}", row)
    for config in ((1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (16, 4)) if sweeps else ():
        attempt(
            f"  heads, warps {config}",
            lambda c=config: line(
                graph_us(lambda i: rotation.launch(i, c)), rotation.num_bytes, ceiling
            ),
        )


def norm_sweep(ceiling: float, hidden: int, num_tokens: int, config: tuple[int, int]) -> None:
    sets = num_sets(4 * num_tokens * hidden * 2)
    x = [randn(num_tokens, hidden) for _ in range(sets)]
    residual = [randn(num_tokens, hidden) for _ in range(sets)]
    weight, out = randn(hidden), torch.empty_like(x[0])

    def launch(index: int) -> None:
        i = index % sets
        gpu.rms_norm(x[i], residual[i], weight, 1e-5, out, residual[i], config=config)

    attempt(
        f"  add_rms_norm {hidden} T={num_tokens} rows, warps {config}",
        lambda: line(graph_us(launch), 4 * out.nbytes, ceiling),
    )


def silu_sweep(ceiling: float, width: int, num_tokens: int, config: tuple[int, int]) -> None:
    sets = num_sets(3 * num_tokens * width * 2)
    gate_up = [randn(num_tokens, 2 * width) for _ in range(sets)]
    out = gate_up[0].new_empty(num_tokens, width)
    attempt(
        f"  silu_mul {width} T={num_tokens} columns, warps {config}",
        lambda: line(
            graph_us(lambda i: gpu.silu_mul(gate_up[i % sets], out, config=config)),
            3 * out.nbytes,
            ceiling,
        ),
    )


def blocks(ceiling: float, count: int, configs: tuple[tuple[int, int], ...]) -> None:
    """Blocks of an 8B model: 2 MB each."""
    cache = randn(1024, 8 * 32 * 2 * BLOCK * DIM)
    ids = torch.randperm(512, device="cuda")[:count].to(torch.int32)
    pairs = torch.stack((ids, ids + 512), 1)
    staging = torch.empty(count, cache.shape[1], device="cuda", dtype=BF16)
    moved = 2 * staging.nbytes
    rows: dict[str, Callable[[int], object]] = {
        "gather_blocks": lambda _: block_ops.gather_blocks(cache, ids, out=staging),
        "scatter_blocks": lambda _: block_ops.scatter_blocks(cache, ids, staging),
        "copy_blocks": lambda _: block_ops.copy_blocks(cache, pairs),
        "clear_blocks": lambda _: block_ops.clear_blocks(cache, ids),
    }
    for name, launch in rows.items():
        num_bytes = moved // 2 if name == "clear_blocks" else moved
        attempt(
            f"{name} {count} of 2 MB",
            lambda run=launch, each=num_bytes: line(graph_us(run, 10), each, ceiling),
        )
    for config in configs:
        attempt(
            f"  gather_blocks bytes, warps {config}",
            lambda c=config: line(
                graph_us(lambda _: gpu_blocks.move(cache, ids, staging, None, config=c), 10),
                moved,
                ceiling,
            ),
        )


NORM_SWEEP = {
    1024: ((1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (4, 8)),
    4096: ((1, 4), (1, 8), (1, 16), (2, 8), (2, 16)),
}
SILU_SWEEP = ((512, 2), (1024, 4), (1024, 2), (2048, 4), (2048, 8), (4096, 8))
BLOCK_SWEEP = ((8192, 4), (16384, 4), (16384, 8), (32768, 8), (65536, 16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    sweeps = parser.parse_args().sweep
    torch.manual_seed(0)
    ceiling = copy_gb_per_s()
    CONSOLE.print(f"{torch.cuda.get_device_name()}; a large copy: {ceiling:.0f} GB/s")
    for name, (hidden, width, *_) in SHAPES.items():
        for num_tokens in TOKENS:
            norms(name, hidden, num_tokens, ceiling)
            swiglu(name, width, num_tokens, ceiling)
            rotations(name, num_tokens, ceiling, sweeps=sweeps and num_tokens in (1, 64, 8192))
    for count in (8, 64, 512):
        blocks(ceiling, count, BLOCK_SWEEP if sweeps else ())
    if not sweeps:
        return
    for hidden, configs in NORM_SWEEP.items():
        for num_tokens, norm in itertools.product((1, 64, 8192), configs):
            norm_sweep(ceiling, hidden, num_tokens, norm)
    for (num_tokens, width), silu in itertools.product(
        ((1, 14336), (8192, 14336), (8192, 3072)), SILU_SWEEP
    ):
        silu_sweep(ceiling, width, num_tokens, silu)


if __name__ == "__main__":
    main()
