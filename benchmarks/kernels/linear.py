"""Linear layers of few rows on a GPU: time, bytes a second and share of the read ceiling, beside
the library, in the chain that a decode step runs (linear_chain.py). The ceiling is measured in the
same run by a kernel that only reads.

    python -m benchmarks.kernels.linear [--others]
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from baton_kernels.fp8_linear import Fp8Weight, fp8_linear
from baton_kernels.linear import linear
from baton_kernels.lora import add_lora, group_rows

from benchmarks.kernels.linear_chain import MODELS, Chain, Pool, Shape, say, seconds_of

POOL_BYTES = 17_000_000_000


def narrowed(weight: torch.Tensor) -> torch.Tensor:
    """Half of the same memory as one byte a number; any bytes will do."""
    half = weight.reshape(-1)[: weight.numel() // 2]
    return half.view(torch.float8_e4m3fn).view(weight.shape)


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
    say("one layer's linears and norms, us: norms half done between products, and by themselves")
    for model, num_rows in itertools.product(MODELS, (2, 8, 16, 32, 64)):
        chain = Chain(pool, model, num_rows, num_layers=16)
        ours, apart = chain.seconds(None, None), chain.seconds(None, None, halves=False)
        say(f"{model:5} M={num_rows:<4} {ours * 1e6:.1f}, {apart * 1e6:.1f}")
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Linear layers of few rows on a GPU.")
    parser.add_argument("--others", action="store_true", help="fp8 and adapters, too")
    arguments = parser.parse_args()
    pool = Pool(POOL_BYTES)
    ceiling = read_ceiling(pool)
    say(f"read ceiling {ceiling / 1e12:.2f} TB/s on {torch.cuda.get_device_name()}")
    layers(pool, ceiling)
    if arguments.others:
        others(pool)
    errors()


if __name__ == "__main__":
    main()
