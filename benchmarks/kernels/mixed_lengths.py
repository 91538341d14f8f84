"""What one long sequence beside short ones costs attention on this GPU, by how long a program's
share of a sequence may be (baton_kernels/gpu/attention_plan.py:cut_long).

    python3 benchmarks/kernels/mixed_lengths.py

Time of one layer beside that of its bytes at the copy rate measured in the same run, and beside the
same launch without the long sequence. The last line says which span is best over all cases.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from baton_kernels.attention import decode_attention
from baton_kernels.gpu import attention_plan

from benchmarks.kernels.attention import (
    BLOCK,
    ROTATED_BYTES,
    Case,
    cache,
    copy_rate,
    say,
    seconds_of,
)

SPANS = (0, 4096, 2048, 1536, 1024, 768, 512, 256)
"""0: no sequence is cut for its length alone."""


@dataclass(frozen=True)
class Mix:
    """Short sequences and a long one, in a launch for more rows, with tables of that width."""

    name: str
    num_heads: int
    num_short: int
    short: int
    long: int
    num_rows: int
    width_tokens: int


MIXES = (
    Mix("8B 16 x 1500 + 8192", 32, 16, 1500, 8192, 24, 8320),
    Mix("8B 16 x 2000 + 8192", 32, 16, 2000, 8192, 24, 8320),
    Mix("8B 16 x 4000 + 8192", 32, 16, 4000, 8192, 24, 8320),
    Mix("8B 64 x 1000 + 8192", 32, 63, 1000, 8192, 64, 8320),
    Mix("0.6B 16 x 4000 + 8192", 16, 16, 4000, 8192, 24, 30320),
    Mix("0.6B 16 x 6000 + 8192", 16, 16, 6000, 8192, 24, 30320),
    Mix("8B 16 x 6000", 32, 16, 6000, 0, 16, 8320),
    Mix("8B 64 x 6000", 32, 64, 6000, 0, 64, 8320),
    Mix("8B 4 x 8000", 32, 4, 8000, 0, 4, 8320),
)


def us_of(mix: Mix, span: int, num_long: int) -> tuple[float, int]:
    """(microseconds of a layer, bytes that it reads)"""
    attention_plan.LONG_POSITIONS = 4096 if span else 1 << 30
    attention_plan.SPAN_POSITIONS = span
    lengths = [mix.short] * mix.num_short + [mix.long] * num_long * bool(mix.long)
    lengths += [0] * (mix.num_rows - len(lengths))
    case = Case(mix.name, 1, sum(lengths), num_heads=mix.num_heads)
    num_layers = max(2, min(8, math.ceil(ROTATED_BYTES / case.bytes_per_layer)))
    width = -(-mix.width_tokens // BLOCK)
    tables = torch.zeros(mix.num_rows, width, dtype=torch.int32, device="cuda")
    counts = [-(-length // BLOCK) for length in lengths]
    order = torch.randperm(sum(counts), device="cuda").int()
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = order[first : first + count]
        first += count
    ends = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    layers = cache(case, sum(counts), num_layers)
    query = torch.randn(mix.num_rows, mix.num_heads, 128, device="cuda").bfloat16()
    out = torch.empty_like(query)

    def launch(layer: int) -> object:
        return decode_attention(query, layers[layer], tables, ends, out=out, scaling=0.1)

    return seconds_of(launch, num_layers, max(16, num_layers)) * 1e6, case.bytes_per_layer


def main() -> None:
    torch.manual_seed(0)
    ceiling = copy_rate()
    say(f"{torch.cuda.get_device_name()}: copy {ceiling / 1e12:.2f} TB/s (read + write)")
    say(f"{'us of a layer by span':24}" + "".join(f"{span or 'uncut':>9}" for span in SPANS))
    logs: dict[int, list[float]] = {span: [] for span in SPANS}
    for mix in MIXES:
        found, line = {}, ""
        for span in SPANS:
            found[span], num_bytes = us_of(mix, span, 1)
            line += f"{found[span]:9.1f}"
        least = num_bytes / ceiling * 1e6
        alone = f", without the long one {us_of(mix, 0, 0)[0]:.1f}" if mix.long else ""
        say(f"{mix.name:24}{line}   bytes alone {least:.1f}{alone}")
        for span in SPANS:
            logs[span].append(math.log(found[span] / least))
    means = {span: math.exp(sum(values) / len(values)) for span, values in logs.items()}
    say(f"{'times the bytes, mean':24}" + "".join(f"{means[span]:9.3f}" for span in SPANS))
    say(f"best {min(means, key=means.__getitem__)}")


if __name__ == "__main__":
    main()
