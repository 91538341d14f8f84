"""LoraLimits: the limits of one engine's LoRA adapters. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import NonNegativeInt, PositiveInt, SettingsError, check_ranges

MOST_LAUNCHED_RANK = 64
"""Largest value of `max_launched_rank`: query, key and value are one linear layer with three times
the rank, which one kernel holds completely (baton_kernels/lora_triton.py); tested up to 192
there, in Triton's interpreter only."""


@dataclass(frozen=True)
class LoraLimits:
    """Limits of the adapters of one engine. Raises SettingsError for a value out of range."""

    max_num_adapters: NonNegativeInt = 8
    """Largest number of adapters loaded at once; 0: none may be loaded."""

    max_rank: PositiveInt = 64
    """Highest rank of one adapter. The work per token grows with it."""

    max_bytes: PositiveInt = 1 << 30
    """Largest number of bytes of all loaded adapters together, as stored in memory (float32 on
    CPU)."""

    max_launched_rank: int = 0
    """Highest rank of adapters that decode in steps that are launched ahead, in CUDA graphs of
    their own; 0: none does. It reserves memory for `max_num_adapters` of this rank on every
    linear layer from the start, and doubles the time to capture graphs. It needs `overlap`, our
    own decoder, no `exact` and no quantized KV cache; otherwise, above this rank, and in steps
    with prompts, adapters decode in plain steps."""

    def __post_init__(self) -> None:
        check_ranges(self)
        rank = self.max_launched_rank
        most = min(self.max_rank, MOST_LAUNCHED_RANK)
        if not 0 <= rank <= most:
            raise SettingsError(
                f"max_launched_rank: {rank} is not 0 to {most}, the least of max_rank "
                f"({self.max_rank}) and what kernels take ({MOST_LAUNCHED_RANK})"
            )
