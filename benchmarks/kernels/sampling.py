"""Microseconds of draw_tokens on a CUDA device, and what share of that a bare read of the logits
would take.

Each figure is a launch of a captured CUDA graph that draws from buffers in turn, together larger
than the L2 cache, as logits are after a layer of gigabytes. The read is measured in the same run,
with torch's amax over the same buffers, which is one pass. Two kinds of rows: "peaked" ones as a
language model gives (few tokens hold the mass), "flat" ones as random weights give.

    python -m benchmarks.kernels.sampling [--sweep]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from baton_kernels.gpu import sampling as gpu
from baton_kernels.sampling import DrawnTokens, Needs, SamplingRows, draw_tokens_reference
from rich.table import Table

from benchmarks.kernels.device_timing import CONSOLE, attempt, graph_us, num_sets
from engine.request import Sampling
from engine.sampling import pipeline
from engine.sampling.history import TokenHistory

NUM_ROWS = (1, 8, 64, 256)
VOCAB_SIZES = (128_256, 151_936)
LAUNCHES = 20


class Kind(NamedTuple):
    """What all rows of a batch ask for."""

    name: str
    needs: Needs
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


KINDS = (
    Kind("greedy", "greedy"),
    Kind("temperature", "sampled", 1.0),
    Kind("min-p", "sampled", 1.0, min_p=0.05),
    Kind("top-k", "truncated", 1.0, top_k=50),
    Kind("top-p", "truncated", 1.0, top_p=0.9),
    Kind("all three", "truncated", 0.7, 50, 0.9, 0.02),
    Kind("none, full path", "truncated", 1.0),
)


def main() -> None:
    """Print the table; with --sweep also splits and tiles."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="splits and tiles as well")
    options = parser.parse_args()
    CONSOLE.print(torch.cuda.get_device_name(), torch.__version__)
    for spread, name in ((1.0, "flat"), (4.0, "peaked")):
        _table(name, spread)
    _pipeline()
    for num_rows, kind in ((1, KINDS[5]), (256, KINDS[5]), (256, KINDS[4]), (256, KINDS[1])):
        attempt(f"kernels of {kind.name}, {num_rows} rows, us", partial(_kernels, num_rows, kind))
    if options.sweep:
        _sweep()


def _table(name: str, spread: float) -> None:
    table = Table(title=f"us per call (share of it that a read takes), {name} rows")
    table.add_column("rows x tokens")
    table.add_column("read", justify="right")
    for kind in KINDS:
        table.add_column(kind.name, justify="right")
    for num_tokens in VOCAB_SIZES:
        for num_rows in NUM_ROWS:
            buffers = _logits(num_rows, num_tokens, spread)
            read = _read_us(buffers)
            cells = [_cell(buffers, kind, read) for kind in KINDS]
            table.add_row(f"{num_rows} x {num_tokens}", f"{read:.1f}", *cells)
    CONSOLE.print(table)


def _cell(buffers: Sequence[torch.Tensor], kind: Kind, read_us: float) -> str:
    """One op that fails must not hide the others."""
    try:
        rows = _rows(len(buffers[0]), kind)
        some = SamplingRows(*(each[:8] for each in rows))
        expected = draw_tokens_reference(buffers[0][:8], some)
        out, counters = _out(len(buffers[0])), _counters(len(buffers[0]))
        gpu.draw_tokens(buffers[0], rows, kind.needs, out, counters)
        is_right = out.token_ids[:8].equal(expected.token_ids)
        found = _time_us(
            buffers, lambda logits: gpu.draw_tokens(logits, rows, kind.needs, out, counters)
        )
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:40]}"
    return f"{found:.1f} ({read_us / found:.0%})" + ("" if is_right else " WRONG")


def _kernels(num_rows: int, kind: Kind) -> str:
    """Each launch of a call by itself, peaked rows."""
    buffers = _logits(num_rows, VOCAB_SIZES[1], 4.0)
    rows, out, counters = _rows(num_rows, kind), _out(num_rows), _counters(num_rows)
    for logits in buffers[:2]:
        gpu.draw_tokens(logits, rows, kind.needs, out, counters)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for index in range(20):
            gpu.draw_tokens(buffers[index % len(buffers)], rows, kind.needs, out, counters)
        torch.cuda.synchronize()
    return ", ".join(
        f"{one.key} {one.self_device_time_total / one.count:.1f}"
        for one in profile.key_averages()
        if one.self_device_time_total
    )


def _pipeline() -> None:
    """The engine's own way, host and copies included: a step that is not captured."""
    fields: dict[str, dict[str, Any]] = {
        "greedy": {},
        "top-p": {"temperature": 1.0, "top_p": 0.9},
        "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.5, "temperature": 1.0},
        "grammar": {},
    }
    for name, each in fields.items():
        attempt(f"pipeline.draw, 64 x {VOCAB_SIZES[0]}, {name}", partial(_pipeline_ms, name, each))


def _pipeline_ms(name: str, fields: dict[str, Any]) -> str:
    num_rows, num_tokens = 64, VOCAB_SIZES[0]
    logits = _logits(num_rows, num_tokens, 4.0)[0]
    sampling = Sampling(max_tokens=1, **fields)
    past = list(range(0, 100_000, 50))  # 2,000 tokens of each row are penalised
    history = TokenHistory(sampling, past, past[:500])
    bitmask = torch.full((-(-num_tokens // 32),), 0x55555555, dtype=torch.int32)
    draws = [
        pipeline.Draw(
            sampling,
            position,
            history=history if name == "penalties" else None,
            bitmask=bitmask if name == "grammar" else None,
        )
        for position in range(num_rows)
    ]
    pipeline.draw(logits, draws)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        pipeline.draw(logits, draws)
        times.append(time.perf_counter() - began)
    return f"{statistics.median(times) * 1e3:.3f} ms"


def _sweep() -> None:
    table = Table(title="us per call by tile, warps, registers (down) and splits, 151,936 tokens")
    all_splits = (2, 4, 8, 16, 32, 64, 128)
    for title in ("rows", "kind", "tile x warps x registers", *map(str, all_splits)):
        table.add_column(title, justify="right")
    shapes = ((1024, 4, 96), (1024, 4, 80), (512, 4, 64))
    for name, kind, spread in (
        ("greedy", KINDS[0], 4.0),
        ("peaked temperature", KINDS[1], 4.0),
        ("peaked, all three", KINDS[5], 4.0),
    ):
        for num_rows in NUM_ROWS:
            buffers = _logits(num_rows, VOCAB_SIZES[1], spread)
            for shape in shapes:
                cells = [_swept(buffers, kind, splits, *shape) for splits in all_splits]
                table.add_row(str(num_rows), name, " x ".join(map(str, shape)), *cells)
    CONSOLE.print(table)


def _swept(
    buffers: Sequence[torch.Tensor],
    kind: Kind,
    splits: int,
    tile: int,
    warps: int,
    registers: int | None,
) -> str:
    num_rows = len(buffers[0])
    num_programs = splits * num_rows
    if not min(32, 16 * num_rows) <= num_programs <= 2048:
        return ""
    rows, out, counters = _rows(num_rows, kind), _out(num_rows), _counters(num_rows)
    try:
        found = _time_us(
            buffers,
            lambda logits: gpu.draw_tokens(
                logits,
                rows,
                kind.needs,
                out,
                counters,
                splits=splits,
                tile=tile,
                warps=warps,
                registers=registers,
            ),
        )
    except Exception as error:
        return type(error).__name__
    return f"{found:.1f}"


def _logits(num_rows: int, num_tokens: int, spread: float) -> list[torch.Tensor]:
    count = num_sets(num_rows * num_tokens * 2, most=LAUNCHES)
    generator = torch.Generator(device="cuda").manual_seed(0)
    return [
        (torch.randn(num_rows, num_tokens, device="cuda", generator=generator) * spread).bfloat16()
        for _ in range(count)
    ]


def _rows(num_rows: int, kind: Kind) -> SamplingRows:
    def filled(value: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device="cuda")

    return SamplingRows(
        filled(kind.temperature, torch.float32),
        torch.arange(num_rows, device="cuda") * 0x5DEECE66D + 11,
        torch.arange(num_rows, dtype=torch.int32, device="cuda"),
        filled(kind.top_k, torch.int32),
        filled(kind.top_p, torch.float32),
        filled(kind.min_p, torch.float32),
    )


def _out(num_rows: int) -> DrawnTokens:
    return DrawnTokens(
        torch.empty(num_rows, dtype=torch.int32, device="cuda"),
        torch.empty(num_rows, dtype=torch.float32, device="cuda"),
    )


def _counters(num_rows: int) -> torch.Tensor:
    return torch.zeros(num_rows, dtype=torch.int32, device="cuda")


def _read_us(buffers: Sequence[torch.Tensor]) -> float:
    out = torch.empty(len(buffers[0]), dtype=buffers[0].dtype, device="cuda")
    return _time_us(buffers, lambda logits: torch.amax(logits, dim=1, out=out))


def _time_us(buffers: Sequence[torch.Tensor], call: Callable[[torch.Tensor], object]) -> float:
    return graph_us(lambda index: call(buffers[index % len(buffers)]), num_launches=LAUNCHES)


if __name__ == "__main__":
    main()
