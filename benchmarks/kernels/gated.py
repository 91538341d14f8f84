"""SwiGLU of many rows on a GPU: our one launch (gpu/hopper_gated.py) beside the library's product
and the launch behind it; times, share of the product ceiling of the same run, relative error.

    python -m benchmarks.kernels.gated [--sweep]

--sweep tries how the launch is cut, too.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable

import torch
from baton_kernels.gpu.hopper_gated import silu_gated
from baton_kernels.layer_ops import silu_mul

from benchmarks.kernels.linear_chain import say
from benchmarks.kernels.linear_chain import seconds_of as graph_seconds

SHAPES = {"8B": (4096, 14336), "0.6B": (1024, 3072)}
ROWS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def seconds_of(runs: list[Callable[[], object]]) -> float:
    """Seconds of one of `runs`, which take turns: each has its own weights."""

    def chain() -> None:
        for run in runs:
            run()

    return graph_seconds(chain, num_replays=7) / len(runs)


class Case:
    """One shape and number of rows. Four weights take turns: none is in L2 when it is read."""

    def __init__(self, name: str, num_rows: int, ceiling: float) -> None:
        self._name, self._num_rows, self._ceiling = name, num_rows, ceiling
        depth, width = SHAPES[name]
        self._flops = 4.0 * num_rows * depth * width
        self.x = torch.randn(num_rows, depth, device="cuda").bfloat16()
        self.out = torch.empty(num_rows, width, device="cuda", dtype=torch.bfloat16)
        self._weights = [
            torch.randn(2 * width, depth, device="cuda").bfloat16() / depth**0.5 for _ in range(4)
        ]
        gate, up = (self.x.float() @ self._weights[0].float().t()).chunk(2, dim=1)
        self._truth = torch.nn.functional.silu(gate) * up

    def show(self, what: str, run: Callable[[torch.Tensor], object]) -> None:
        """A line of `run`, which takes a weight and fills `out`; one that fails says so."""
        line = f"{self._name:5} M={self._num_rows:<5} {what:<26}"
        try:
            seconds = seconds_of([functools.partial(run, weight) for weight in self._weights])
            self.out.fill_(torch.nan)
            run(self._weights[0])
            error = float((self.out.float() - self._truth).norm() / self._truth.norm())
            rate = self._flops / seconds
            line += f" {seconds * 1e6:8.1f} us {rate / 1e12:5.0f} TFLOP/s "
            line += f"{rate / self._ceiling:4.0%}  error {error:.1e}"
        except Exception as failure:
            line += f" {type(failure).__name__}: {str(failure)[:300]}"
        say(line)


def main() -> None:
    parser = argparse.ArgumentParser(description="SwiGLU of many rows on a GPU.")
    parser.add_argument("--sweep", action="store_true")
    arguments = parser.parse_args()
    a, b = (torch.randn(8192, 8192, device="cuda").bfloat16() for _ in range(2))
    ceiling = 2 * 8192**3 / seconds_of([lambda: torch.mm(a, b)] * 4)
    say(f"{torch.cuda.get_device_name()}: product {ceiling / 1e12:.0f} TFLOP/s")
    groups = (8, 16, 32) if arguments.sweep else (16,)
    for name, num_rows in itertools.product(SHAPES, ROWS):
        case = Case(name, num_rows, ceiling)
        x, out = case.x, case.out
        case.show("library, then silu_mul", lambda w, x=x, out=out: silu_mul(x @ w.t(), out=out))
        for group_m in groups:
            ours = functools.partial(silu_gated, x, out=out, group_m=group_m)
            case.show(f"ours, group {group_m}", ours)


if __name__ == "__main__":
    main()
