"""What changing logits before a draw costs on a CUDA device: penalties, biases and masks for every
row of a step, and what share of a large copy's rate in the same run the bytes that they move are.

Of penalties and biases every token counts as two sectors of 32 bytes of logits (read and written)
beside its own numbers; of masks the words, and the logits that are masked (written).

    python -m benchmarks.kernels.logit_ops
"""

from __future__ import annotations

import argparse

import torch
from baton_kernels import logit_ops

from benchmarks.kernels.device_timing import (
    CONSOLE,
    attempt,
    copy_gb_per_s,
    graph_us,
    line,
    num_sets,
)

VOCAB_SIZE = 128_256
ROWS = (1, 8, 64, 256)
SECTOR_BYTES = 32


def _logits(num_rows: int) -> list[torch.Tensor]:
    sets = num_sets(4 * num_rows * VOCAB_SIZE)
    return [torch.randn(num_rows, VOCAB_SIZE, device="cuda") for _ in range(sets)]


def _ids(num_rows: int, num_tokens: int) -> torch.Tensor:
    """Of each row, none twice."""
    rows = [torch.randperm(VOCAB_SIZE, device="cuda")[:num_tokens] for _ in range(num_rows)]
    return torch.stack(rows).to(torch.int32)


def penalties(num_rows: int, num_tokens: int, ceiling: float) -> str:
    logits = _logits(num_rows)
    ones = torch.ones(num_rows, device="cuda")
    given = logit_ops.Penalties(
        _ids(num_rows, num_tokens),
        torch.ones(num_rows, num_tokens, device="cuda"),
        ones * 1.1,
        ones * 0.1,
        ones * 0.1,
    )
    us = graph_us(lambda index: logit_ops.penalise(logits[index % len(logits)], given))
    return line(us, num_rows * num_tokens * (2 * SECTOR_BYTES + 8), ceiling)


def biases(num_rows: int, num_tokens: int, ceiling: float) -> str:
    logits, ids = _logits(num_rows), _ids(num_rows, num_tokens)
    values = torch.randn(num_rows, num_tokens, device="cuda")
    us = graph_us(lambda index: logit_ops.add_bias(logits[index % len(logits)], ids, values))
    return line(us, num_rows * num_tokens * (2 * SECTOR_BYTES + 8), ceiling)


def masks(num_rows: int, ceiling: float) -> str:
    """Of a grammar that leaves one token of 32: nearly all logits are written."""
    logits = _logits(num_rows)
    words = torch.ones(num_rows, -(-VOCAB_SIZE // 32), dtype=torch.int32, device="cuda")
    us = graph_us(lambda index: logit_ops.apply_bitmask(logits[index % len(logits)], words))
    return line(us, words.nbytes + logits[0].nbytes, ceiling)


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0]).parse_args()
    torch.manual_seed(0)
    ceiling = copy_gb_per_s()
    CONSOLE.print(f"{torch.cuda.get_device_name()}; a large copy: {ceiling:.0f} GB/s")
    for num_rows in ROWS:
        for num_tokens in (64, 1024):
            name = f"{num_rows} rows, {num_tokens} tokens each"
            attempt(f"penalise {name}", lambda n=num_rows, t=num_tokens: penalties(n, t, ceiling))
            attempt(f"add_bias {name}", lambda n=num_rows, t=num_tokens: biases(n, t, ceiling))
        attempt(f"apply_bitmask {num_rows} rows", lambda n=num_rows: masks(n, ceiling))


if __name__ == "__main__":
    main()
