"""What prefill attention costs, by version: ours over the paged cache, cuDNN's and
Flash-Attention 2 through torch over dense keys, with the copies that those need.

TFLOP/s count the products that causality asks for, no more; the share is of a large bfloat16 matrix
product in the same run. Beside it, how long cuDNN needs the first time it sees a shape. `--sweep`
tries other tiles of our kernel.

    python3 benchmarks/kernels/prefill_attention.py [--sweep] [--versions auto cudnn]
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from baton_kernels import prefill_attention as door
from baton_kernels.block_rows import BlockRows
from baton_kernels.gpu import prefill_attention as gpu
from baton_kernels.gpu.prefill_attention import TileConfig
from device_timing import CONSOLE, attempt, matmul_tflop_per_s, relative, stream_us

DIM, BLOCK = 128, 16
ATEN = torch.ops.aten
"""Below torch's functions: these have no choice of their own, and give the softmax's sums."""
HEADS = ((32, 8), (16, 8))
CASES: dict[str, list[tuple[int, int]]] = {
    "1x8192": [(0, 8192)],
    "4x2048": [(0, 2048)] * 4,
    "16x2048": [(0, 2048)] * 16,
    "1x2048": [(0, 2048)],
    "8x1024": [(0, 1024)] * 8,
    "1x1024": [(0, 1024)],
    "1x8000": [(0, 8000)],
    "1x2048 after 6144": [(6144, 2048)],
    "1x512 after 7680": [(7680, 512)],
    "ragged 900..4000": [(0, 900), (0, 1500), (0, 3000), (0, 4000), (512, 1024)],
    "64x128": [(0, 128)] * 64,
    "32x64 after 1024": [(1024, 64)] * 32,
    "1x1 after 1023": [(1023, 1)],
    "8x1 after 1023": [(1023, 1)] * 8,
    "64x1 after 1023": [(1023, 1)] * 64,
    "256x1 after 1023": [(1023, 1)] * 256,
    "1x1 after 16383": [(16383, 1)],
}


@dataclass
class Step:
    """A step over one layer of a two-layer cache, blocks in random order."""

    name: str
    spans: list[tuple[int, int]]
    num_heads: int
    num_kv_heads: int

    def __post_init__(self) -> None:
        each = [-(-(start + count) // BLOCK) for start, count in self.spans]
        num_blocks = sum(each)
        cache = torch.randn(
            num_blocks * self.num_kv_heads, 4, BLOCK, DIM, device="cuda", dtype=torch.bfloat16
        )
        self.rows = BlockRows(
            cache[:, 2], cache[:, 3], DIM, self.num_kv_heads, self.num_kv_heads, 1
        )
        order = torch.randperm(num_blocks, device="cuda").to(torch.int32)
        self.tables = torch.zeros(len(each), max(each), dtype=torch.int32, device="cuda")
        for index, count in enumerate(each):
            self.tables[index, :count], order = order[:count], order[count:]
        keys, values = [], []
        for index, (start, count) in enumerate(self.spans):
            k, v = door.sequence_rows(self.rows, self.tables[index], start + count)
            keys.append(k[:, start:].transpose(0, 1))
            values.append(v[:, start:].transpose(0, 1))
        self.key, self.value = torch.cat(keys).contiguous(), torch.cat(values).contiguous()
        self.query = torch.randn(
            len(self.key), self.num_heads, DIM, device="cuda", dtype=torch.bfloat16
        )
        self.out = torch.empty_like(self.query)
        self.firsts = [0, *itertools.accumulate(count for _, count in self.spans)]
        int32 = {"dtype": torch.int32, "device": "cuda"}
        self.query_starts = torch.tensor(self.firsts, **int32)
        self.starts = torch.tensor([start for start, _ in self.spans], **int32)
        self.longest = max(count for _, count in self.spans)
        self.end = max(start + count for start, count in self.spans)
        self.scaling = DIM**-0.5
        self.gathered: tuple[torch.Tensor, ...] | None = None

    @property
    def tflop(self) -> float:
        pairs = sum(count * start + count * (count + 1) // 2 for start, count in self.spans)
        return 4 * self.num_heads * DIM * pairs / 1e12

    def triton(self, config: TileConfig | None = None) -> torch.Tensor:
        gpu.prefill_attention(
            self.query, self.rows, self.tables, self.query_starts, self.starts, self.longest,
            self.scaling, None, None, None, self.out, config=config,
        )  # fmt: skip
        return self.out

    def auto(self) -> torch.Tensor:
        return door.prefill_attention(
            self.query, self.rows, self.tables, self.query_starts,
            self.starts, max_query_len=self.longest, max_end=self.end, scaling=self.scaling,
            out=self.out,
        )  # fmt: skip

    def exact(self) -> torch.Tensor:
        return door.prefill_attention(
            self.query, self.rows, self.tables, self.query_starts,
            self.starts, max_query_len=self.longest, max_end=self.end, scaling=self.scaling,
            out=self.out, exact=True,
        )  # fmt: skip

    def cudnn(self) -> torch.Tensor:
        """A call for all sequences: equal and fresh ones alone."""
        if len(set(self.spans)) > 1 or self.spans[0][0] > 0:
            raise ValueError("not equal and fresh")
        q, k, v = (
            x.view(len(self.spans), -1, *x.shape[1:]).transpose(1, 2)
            for x in (self.query, self.key, self.value)
        )
        out = ATEN._scaled_dot_product_cudnn_attention(  # noqa: SLF001
            q, k, v, None, False, 0.0, True, False, scale=self.scaling
        )[0]
        return out.transpose(1, 2).reshape(self.query.shape)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All keys and values side by side, and where each sequence's begin."""
        if self.starts.max() == 0:
            return self.key, self.value, self.query_starts
        keys, values = [], []
        for index, (start, count) in enumerate(self.spans):
            k, v = door.sequence_rows(self.rows, self.tables[index], start + count)
            keys.append(k.transpose(0, 1))
            values.append(v.transpose(0, 1))
        ends = (start + count for start, count in self.spans)
        firsts = torch.tensor([0, *itertools.accumulate(ends)], dtype=torch.int32, device="cuda")
        return torch.cat(keys), torch.cat(values), firsts

    def flash(self) -> torch.Tensor:
        if self.gathered is None:
            self.gathered = self.dense()
        key, value, firsts = self.gathered
        return ATEN._flash_attention_forward(  # noqa: SLF001
            self.query, key, value, self.query_starts, firsts, self.longest, self.end, 0.0, True,
            False, scale=self.scaling,
        )[0]  # fmt: skip

    def truth(self) -> torch.Tensor:
        """Float32, of the last tokens of the first and the last sequence."""
        found = []
        for index in (0, len(self.spans) - 1):
            start, count = self.spans[index]
            some = min(count, 64)
            k, v = door.sequence_rows(self.rows, self.tables[index], start + count)
            query = self.query[self.firsts[index + 1] - some : self.firsts[index + 1]]
            found.append(
                door.prefill_attention_reference(
                    query.float(), k.float(), v.float(), start + count - some, self.scaling
                )
            )
        return torch.cat(found)

    def error(self, out: torch.Tensor) -> float:
        found = []
        for index in (0, len(self.spans) - 1):
            some = min(self.spans[index][1], 64)
            found.append(out[self.firsts[index + 1] - some : self.firsts[index + 1]])
        return relative(torch.cat(found), self.truth())


def timed(step: Step, run: Callable[[], torch.Tensor], ceiling: float) -> str:
    step.out.fill_(float("nan"))
    error = step.error(run())
    us = stream_us(lambda _: run(), 5)
    rate = step.tflop / us * 1e6
    return f"{us:9.1f} us {rate:6.0f} TFLOP/s {100 * rate / ceiling:4.0f} %  error {error:.1e}"


def first_call(name: str, run: Callable[[int], Any]) -> None:
    """How long the host waits for shapes never seen, and for one seen before."""

    def row() -> str:
        times = []
        for length in (2000, 2001, 3000, 3000):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run(length)
            torch.cuda.synchronize()
            times.append((time.perf_counter() - begin) * 1e3)
        return "  ".join(f"{each:.2f} ms" for each in times)

    attempt(name, row)


def first_calls() -> None:
    def inputs(length: int) -> tuple[torch.Tensor, ...]:
        return tuple(
            torch.randn(length, heads, DIM, device="cuda", dtype=torch.bfloat16)
            for heads in (32, 8, 8)
        )

    def dense(length: int) -> None:
        q, k, v = (x[None].transpose(1, 2) for x in inputs(length))
        ATEN._scaled_dot_product_cudnn_attention(  # noqa: SLF001
            q, k, v, None, False, 0.0, True, False, scale=0.1
        )

    first_call("cuDNN, lengths 2000 2001 3000 3000", dense)


SWEEP = [
    TileConfig(64, 64, 4, 2),
    TileConfig(64, 64, 4, 4),
    TileConfig(128, 128, 8, 2),
]

SWEPT = ("1x8192", "1x2048 after 6144")
VERSIONS = ("auto", "triton", "exact", "cudnn", "flash")


def case(step: Step, ceiling: float, versions: Sequence[str], *, is_swept: bool) -> None:
    CONSOLE.print(f"{step.name}, {step.num_heads} heads, {step.num_kv_heads} kv heads of {DIM}")
    for version in versions:
        attempt(f"  {version}", lambda v=version: timed(step, getattr(step, v), ceiling))
    for config in SWEEP if is_swept and "triton" in versions else ():
        shape = (config.num_queries, config.num_keys, config.num_warps, config.num_stages)
        attempt(f"  triton {shape}", lambda c=config: timed(step, lambda: step.triton(c), ceiling))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--versions", nargs="+", default=VERSIONS, choices=VERSIONS)
    given = parser.parse_args()
    torch.manual_seed(0)
    ceiling = matmul_tflop_per_s()
    CONSOLE.print(f"{torch.cuda.get_device_name()}; a large product: {ceiling:.0f} TFLOP/s")
    if "cudnn" in given.versions:
        first_calls()
    for (num_heads, num_kv_heads), name in itertools.product(HEADS, CASES):
        is_swept = given.sweep and num_heads == 32 and name in SWEPT
        case(
            Step(name, CASES[name], num_heads, num_kv_heads), ceiling, given.versions,
            is_swept=is_swept,
        )  # fmt: skip


if __name__ == "__main__":
    main()
