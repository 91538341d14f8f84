"""LoraLimits: how much of LoRA one engine takes. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import NonNegativeInt, PositiveInt, SettingsError, check_ranges

MOST_LAUNCHED_RANK = 64
"""Query, key and value are one linear layer with three times the rank, and a kernel holds all of it
(baton_kernels/lora_triton.py): tried up to 192 there, in Triton's interpreter only."""


@dataclass(frozen=True)
class LoraLimits:
    """Bounds on the adapters that one engine holds. Raises SettingsError for a value out of
    range."""

    max_num_adapters: NonNegativeInt = 8
    """Most adapters loaded at once; 0: none may be loaded."""

    max_rank: PositiveInt = 64
    """Highest rank of one adapter. The work per token grows with it."""

    max_bytes: PositiveInt = 1 << 30
    """Most bytes of all loaded adapters together, as they are held (float32 on CPU)."""

    max_launched_rank: int = 0
    """Adapters of at most this rank decode in steps that are launched ahead, in CUDA graphs of
    their own; 0: none does. Takes memory for `max_num_adapters` of this rank on every linear layer,
    from the start, and twice the time to capture graphs. With `overlap`, of our own decoder, where
    nothing is promised of a request's last bit (`exact`) and the KV cache is not quantized:
    elsewhere, above this rank, and beside prompts they decode in plain steps."""

    def __post_init__(self) -> None:
        check_ranges(self)
        rank = self.max_launched_rank
        most = min(self.max_rank, MOST_LAUNCHED_RANK)
        if not 0 <= rank <= most:
            raise SettingsError(
                f"max_launched_rank: {rank} is not 0 to {most}, the least of max_rank "
                f"({self.max_rank}) and what kernels take ({MOST_LAUNCHED_RANK})"
            )
