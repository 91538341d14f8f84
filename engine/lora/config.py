"""LoraLimits: how much of LoRA one engine takes. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import SettingsError


@dataclass(frozen=True)
class LoraLimits:
    """Bounds on the adapters that one engine holds. Raises SettingsError for a value out of
    range."""

    max_num_adapters: int = 8
    """Most adapters loaded at once; 0: none may be loaded."""

    max_rank: int = 64
    """Highest rank of one adapter. The work per token grows with it."""

    max_bytes: int = 1 << 30
    """Most bytes of all loaded adapters together, as they are held (float32 on CPU)."""

    def __post_init__(self) -> None:
        if self.max_num_adapters < 0:
            raise SettingsError(f"max_num_adapters: {self.max_num_adapters} is negative")
        for name in ("max_rank", "max_bytes"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: {getattr(self, name)} is below 1")
