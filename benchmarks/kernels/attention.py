"""What attention over the paged cache costs on this GPU: time, bytes a second, and the share of
the copy rate measured in the same run.

    python3 benchmarks/kernels/attention.py [--sweep]

Each launch of a graph reads another layer's keys and values, as in a model: nothing comes from the
cache that would not in real life. The relative error is against float64. `--sweep` tries other
configurations of the kernel.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from baton_kernels.attention import (
    decode_attention,
    decode_attention_reference,
    tree_attention,
)
from baton_kernels.block_rows import BlockRows, Tails
from baton_kernels.layer_ops import rms_norm, rotate_reference
from baton_kernels.quantize import quantize
from baton_kernels.rotated_attention import rotate_and_attend

BLOCK = 16
ROTATED_BYTES = 256 << 20
"""Of keys and values that a graph reads before it reads the same again: five times the L2."""


@dataclass(frozen=True)
class Case:
    """One shape of one operation."""

    name: str
    batch: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    dtype: str = ""
    scales: int = 1
    is_latent: bool = False
    num_nodes: int = 0
    """0: decode."""
    exact: bool = False
    window: int | None = None
    rotates: bool = False
    """With rotation and write, in the same launch."""

    @property
    def bytes_per_layer(self) -> int:
        numbers = self.head_dim + (0 if self.is_latent else self.v_head_dim)
        seen = min(self.context, self.window or self.context)
        per_position = numbers * (1 if self.dtype else 2)
        if self.dtype:
            per_position += 8 if self.scales > 1 else 8 // BLOCK
        return self.batch * seen * self.num_kv_heads * per_position


Job = tuple[Case, dict[str, Any]]
Launch = Callable[[int], object]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="other configurations, too")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    ceiling = copy_rate()
    jobs: list[Job] = [(case, {}) for case in cases()]
    if arguments.sweep:
        jobs += sweep()
    began = time.monotonic()
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(compile_for, jobs))
    say(f"{torch.cuda.get_device_name()}: copy {ceiling / 1e12:.2f} TB/s (read + write)")
    say(f"compiled in {time.monotonic() - began:.1f} s")
    say(f"{'case':26} {'us':>8} {'behind':>8} {'TB/s':>6} {'share':>6} {'error':>8}")
    for case, options in jobs:
        row(case, ceiling, options)


def compile_for(job: Job) -> None:
    """One small launch; what fails will fail again, and be said, when it is measured."""
    with contextlib.suppress(Exception):
        prepare(*job, num_layers=2, is_small=True).launch(0)


def row(case: Case, ceiling: float, options: dict[str, Any]) -> None:
    """One line; an error is a line, too."""
    label = f"{case.name} b{case.batch} c{case.context}" + (" exact" if case.exact else "")
    try:
        seconds, behind, error = measure(case, options)
    except Exception as failed:
        say(f"{label:26} {type(failed).__name__}: {str(failed)[:300]}")
        return
    rate = case.bytes_per_layer / seconds
    said = " ".join(str(value) for value in options.values())
    say(
        f"{label:26} {seconds * 1e6:8.2f} {behind * 1e6:8.2f} {rate / 1e12:6.2f} "
        f"{rate / ceiling:6.0%} {error:8.1e} {said}"
    )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def cases() -> Iterator[Case]:
    yield Case("8B short", 1, 32)
    for batch in (1, 8, 64, 256):
        yield Case("8B", batch, 1024)
    for batch in (1, 8, 64, 256):
        yield Case("0.6B", batch, 1024, num_heads=16)
    for batch in (1, 8, 64, 256):
        yield Case("8B rotated", batch, 1024, rotates=True)
    for batch in (1, 8):
        yield Case("0.6B rotated", batch, 1024, num_heads=16, rotates=True)
    yield Case("8B", 1, 16384)
    yield Case("8B", 48, 3000)
    yield Case("8B", 8, 1024, exact=True)
    yield Case("8B", 64, 1024, exact=True)
    yield Case("8B int8/block", 64, 1024, dtype="int8")
    yield Case("8B fp8/token", 64, 1024, dtype="fp8_e4m3", scales=BLOCK)
    mla = Case("MLA", 1, 4096, 16, 1, 576, 512, is_latent=True)
    yield mla
    yield replace(mla, batch=64, context=1024)
    yield replace(mla, name="MLA h128", batch=64, context=1024, num_heads=128)
    yield Case("gpt-oss", 64, 4096, num_heads=64, head_dim=64, v_head_dim=64, window=128)
    yield Case("8B tree 32", 1, 1024, num_nodes=32)
    yield Case("8B tree 8", 16, 1024, num_nodes=8)


def sweep() -> Iterator[Job]:
    from baton_kernels.gpu.attention import Config

    shapes = [
        Config(16, 32, 2, 4), Config(16, 32, 2, 4, merges_apart=True),
        Config(16, 16, 1, 5), Config(16, 16, 1, 5, merges_apart=True), Config(4, 16, 1, 5),
        Config(16, 16, 2, 5), Config(4, 16, 2, 5), Config(4, 16, 2, 5, merges_apart=True),
        Config(4, 32, 2, 4), Config(8, 32, 2, 4),
    ]  # fmt: skip
    for config in shapes:
        yield Case("8B rotated", 1, 32, rotates=True), {"config": config}
        for batch, splits in ((1, (8, 16)), (8, (4, 8)), (64, (1,))):
            for num_splits in splits:
                options = {"config": config, "num_splits": num_splits}
                yield Case("8B", batch, 1024), options
    fine = Config(4, 16, 1, 5, min_split_positions=32)
    yield Case("8B", 1, 1024), {"config": fine, "num_splits": 32}
    int8 = Case("8B int8/block", 64, 1024, dtype="int8")
    for case in (int8, replace(int8, name="8B fp8/token", dtype="fp8_e4m3", scales=BLOCK)):
        for shape in ((16, 64, 4, 3), (16, 128, 4, 2), (16, 16, 1, 5)):
            yield case, {"config": Config(*shape)}
    tree = Case("8B tree 32", 1, 1024, num_nodes=32)
    for shape in ((32, 32, 2, 3), (32, 16, 2, 4), (32, 16, 1, 4)):
        yield tree, {"config": Config(*shape)}


def copy_rate() -> float:
    """Bytes a second, read and written, of a large copy by a kernel (a graph gives `copy_` to the
    copy engine, which is slower)."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda _: torch.neg(source, out=target), 1, 10)


def seconds_of(launch: Callable[[int], object], num_layers: int, num_launches: int) -> float:
    """Median time of one launch in a graph of `num_launches`, layer after layer."""
    for layer in range(min(2, num_layers)):
        launch(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_launches):
            launch(index % num_layers)
    times = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / num_launches)
    return sorted(times)[len(times) // 2]


@dataclass(frozen=True)
class Prepared:
    """A case's inputs on the device."""

    launch: Launch
    layers: list[BlockRows]
    tables: torch.Tensor
    ends: torch.Tensor
    query: torch.Tensor
    out: torch.Tensor
    tails: Tails | None
    common: dict[str, Any]


def prepare(
    case: Case, options: dict[str, Any], *, num_layers: int, is_small: bool = False
) -> Prepared:
    """`is_small`: a cache of one block, for a launch that is of account for its compiling only."""
    blocks_each = -(-(case.context + case.num_nodes) // BLOCK)
    num_blocks = 1 if is_small else case.batch * blocks_each
    tables = torch.zeros(case.batch * blocks_each, device="cuda", dtype=torch.int32)
    if not is_small:
        tables = torch.randperm(num_blocks, device="cuda").int()
    tables = tables.view(case.batch, blocks_each)
    end = 1 if is_small else case.context
    ends = torch.full((case.batch,), end, dtype=torch.int32, device="cuda")
    layers = cache(case, num_blocks, num_layers)
    num_rows = case.batch * max(1, case.num_nodes)
    query = torch.randn(num_rows, case.num_heads, case.head_dim, device="cuda").bfloat16()
    out = query.new_full((num_rows, case.num_heads, case.v_head_dim), float("nan"))
    common: dict[str, Any] = {"scaling": case.head_dim**-0.5, "window": case.window}
    given: dict[str, Any] = {"out": out, "exact": case.exact} | common | options
    tails = None
    if case.num_nodes:
        tree = chains(case, num_rows)

        def launch(layer: int) -> object:
            return tree_attention(
                query, layers[layer], tables, ends, *tree, max_num_nodes=case.num_nodes, **given
            )
    elif case.rotates:
        num_all = case.num_heads + 2 * case.num_kv_heads
        qkv = torch.randn(case.batch, num_all * case.head_dim, device="cuda").bfloat16()
        angles = torch.randn(case.context, case.head_dim // 2, device="cuda")
        cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
        positions = ends - 1
        query = rotate_reference(qkv, positions, cos_sin, num_heads=case.num_heads)[0]

        def launch(layer: int) -> object:
            return rotate_and_attend(
                qkv, positions, cos_sin, layers[layer], tables, num_heads=case.num_heads, **given
            )
    else:
        if case.dtype:
            tails = Tails(raw_rows(case), torch.arange(case.batch, device="cuda").int())

        def launch(layer: int) -> object:
            return decode_attention(query, layers[layer], tables, ends, tails=tails, **given)

    return Prepared(launch, layers, tables, ends, query, out, tails, common)


def measure(case: Case, options: dict[str, Any]) -> tuple[float, float, float]:
    """(seconds of one launch among its like; seconds that it adds behind a small kernel, as in a
    model; relative error)"""
    num_layers = max(2, min(32, math.ceil(ROTATED_BYTES / case.bytes_per_layer)))
    its = prepare(case, options, num_layers=num_layers)
    count = max(20, num_layers)
    seconds = seconds_of(its.launch, num_layers, count)
    x = torch.randn(case.batch, 4096, device="cuda").bfloat16()
    weight = torch.ones(4096, device="cuda").bfloat16()

    def norm(_: int) -> None:
        rms_norm(x, weight, 1e-6, out=x)

    def both(layer: int) -> None:
        norm(layer)
        its.launch(layer)

    behind = seconds_of(both, num_layers, count) - seconds_of(norm, 1, count)
    its.out.fill_(float("nan"))
    its.launch(0)
    if case.num_nodes:
        error = tree_error(
            case, its.query, its.layers[0], its.tables, its.ends, its.out, its.common
        )
        return seconds, behind, error
    few = slice(0, min(4, case.batch))
    tails = None if its.tails is None else Tails(double(its.tails.rows), its.tails.slots[few])
    truth = decode_attention_reference(
        its.query[few].double(), double(its.layers[0]), its.tables[few], its.ends[few],
        tails=tails, **its.common,
    )  # fmt: skip
    return seconds, behind, relative_error(its.out[few], truth)


def chains(case: Case, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Every sequence's nodes one after the other: causal, so that truth is easily had."""
    nodes = case.num_nodes
    starts = torch.arange(0, num_rows + 1, nodes, device="cuda").int()
    depths = torch.arange(nodes, device="cuda").int().repeat(case.batch)
    visible = torch.ones(nodes, nodes, device="cuda").tril().bool().repeat(case.batch, 1)
    return starts, depths, visible


def tree_error(
    case: Case,
    query: torch.Tensor,
    rows: BlockRows,
    tables: torch.Tensor,
    ends: torch.Tensor,
    out: torch.Tensor,
    common: dict[str, Any],
) -> float:
    """A node of a chain is the newest token of a sequence that ends with it."""
    nodes = case.num_nodes
    truth = decode_attention_reference(
        query[:nodes].double(),
        double(rows),
        tables[:1].expand(nodes, -1),
        ends[:1] + 1 + torch.arange(nodes, device="cuda").int(),
        **common,
    )
    return relative_error(out[:nodes], truth)


def cache(case: Case, num_blocks: int, num_layers: int) -> list[BlockRows]:
    """As the engine lays it out: [blocks, kv heads, layers, keys and values, P, D]."""
    dims = [case.head_dim] if case.is_latent else [case.head_dim, case.v_head_dim]
    count = num_blocks * case.num_kv_heads * num_layers
    rows_per_block, views, scales = case.num_kv_heads * num_layers, [], []
    for dim in dims:
        numbers = torch.randn(count, BLOCK, dim, device="cuda", dtype=torch.bfloat16)
        if case.dtype:
            parts = [quantize(part, case.dtype, case.scales, None) for part in numbers.split(4096)]
            scales.append(torch.cat([part[1] for part in parts]))
            numbers = torch.cat([part[0] for part in parts])
        views.append(numbers)
    return [
        BlockRows(
            keys=views[0][layer:],
            values=None if case.is_latent else views[1][layer:],
            v_head_dim=case.v_head_dim,
            num_heads=case.num_kv_heads,
            rows_per_block=rows_per_block,
            head_step=num_layers,
            k_scales=scales[0][layer:] if case.dtype else None,
            v_scales=scales[-1][layer:] if case.dtype else None,
            dtype=case.dtype,
        )
        for layer in range(num_layers)
    ]


def raw_rows(case: Case) -> BlockRows:
    """Tails: one slot per sequence."""
    count = case.batch * case.num_kv_heads
    keys, values = (
        torch.randn(count, BLOCK, dim, device="cuda", dtype=torch.bfloat16)
        for dim in (case.head_dim, case.v_head_dim)
    )
    return BlockRows(keys, values, case.v_head_dim, case.num_kv_heads, case.num_kv_heads, 1)


def double(rows: BlockRows) -> BlockRows:
    """The same numbers in float64; a quantized cache is read as it is."""
    if rows.dtype:
        return rows
    values = None if rows.values is None else rows.values.double()
    return replace(rows, keys=rows.keys.double(), values=values)


def relative_error(out: torch.Tensor, truth: torch.Tensor) -> float:
    return float((out.double() - truth).norm() / truth.norm())


if __name__ == "__main__":
    main()
