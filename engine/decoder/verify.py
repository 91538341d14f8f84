"""Whether the kernels of a device give what plain torch gives, on the very weights that are served:
the steps that are tried, and how far apart logits may be. Start-up only; knows no way to compute
them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.batch import Batch, Span
from engine.errors import LoadError
from engine.kv.layout import KvLayout

NUM_TOKENS = 40
"""A chunk that is longer than a block and ends off its border, and one decode."""

_MAX_RELATIVE_ERROR = {"float32": 1e-4, "bfloat16": 0.1}
"""Of logits through the kernels against plain torch on the same weights (L2): rounding of another
order. Measured on 32 layers: 0.01 to 0.07 in bfloat16; a wrong kernel is off by 0.5 and more."""

_MAX_FP8_ERROR = 0.5
"""The same where matrices are in fp8: numbers on its rounding edges fall to either side. Measured:
0.18 on 32 layers of random numbers; what has nothing in common is off by 1.4."""


def verify_logits(
    forward: Callable[[Batch], torch.Tensor], vocab_size: int, layout: KvLayout
) -> torch.Tensor:
    """float32 logits [40, V] of a fixed prompt in a chunk and a decode, through a cache of at least
    `layout.num_blocks_for(NUM_TOKENS)` blocks that nobody uses; [0, V] of a rank that has none."""
    token_ids = tuple((7919 * i + 17) % vocab_size for i in range(NUM_TOKENS))
    cut = NUM_TOKENS - 1
    parts: list[torch.Tensor] = []
    for start, end in ((0, cut), (cut, NUM_TOKENS)):
        span = Span(start, end - start, tuple(range(layout.num_blocks_for(end))))
        batch = Batch(token_ids[start:end], (span,), tuple(range(end - start)))
        parts.append(forward(batch).float())
    return torch.cat(parts)


def check_close(
    actual: torch.Tensor, expected: torch.Tensor, *, dtype: str, is_fp8: bool, device: str
) -> None:
    """Raises: LoadError where logits through the kernels differ from plain torch's by more than
    rounding."""
    error = float((actual - expected).norm() / expected.norm())
    max_error = _MAX_FP8_ERROR if is_fp8 else _MAX_RELATIVE_ERROR[dtype]
    if not error <= max_error:  # NaN is a difference, too
        raise LoadError(
            f"kernels: logits on {device} are {error:.2g} off those of plain torch: this device or "
            "its libraries compute something else; use decoder=transformers"
        )
