"""EngineConfig: what one engine is told at start. A frozen value; what depends on the machine and
model is `ModelInfo`."""

from __future__ import annotations

from dataclasses import dataclass

from process.settings import SettingsError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16")


@dataclass(frozen=True)
class EngineConfig:
    """Settings of one engine. Raises SettingsError for a value out of range."""

    model: str = ""
    """A bundled model's name, a local folder, or a Hugging Face name. Resolved by
    checkpoints.resolve."""

    device: str = "auto"
    """"cpu", "cuda", or "auto": cuda where there is one."""

    dtype: str = "auto"
    """"float32", "bfloat16", or "auto": the dtype that the checkpoint's config names, float32 where
    it names none."""

    block_size: int = 16
    """Tokens per block. Part of the model fingerprint: every worker and store of a deployment has
    the same."""

    num_blocks: int = 0
    """Blocks of the KV cache; 0: as many as `kv_bytes` hold."""

    kv_bytes: int = 0
    """Bytes of the KV cache; 0: four full context windows or 256 MiB, whichever is more, and at
    most a quarter of the memory free at start."""

    max_num_tokens_per_step: int = 512
    """Token budget of one step: decodes first, prefill chunks in the remainder."""

    max_num_running: int = 64
    """Most requests that take part in one step; at most `max_num_tokens_per_step`, so that each
    decode has its token."""

    context_window: int = 0
    """Most tokens of one request, prompt and output together; 0: the model's own."""

    num_threads: int = 0
    """torch's CPU threads; 0: leave torch's own. One each when several engines share few cores."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise SettingsError(f"device: {self.device!r} is none of {', '.join(DEVICES)}")
        if self.dtype not in DTYPES:
            raise SettingsError(f"dtype: {self.dtype!r} is none of {', '.join(DTYPES)}")
        for name in ("block_size", "max_num_tokens_per_step", "max_num_running"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name}: {getattr(self, name)} is below 1")
        for name in ("num_blocks", "kv_bytes", "context_window", "num_threads"):
            if getattr(self, name) < 0:
                raise SettingsError(f"{name}: {getattr(self, name)} is negative")
        if self.max_num_running > self.max_num_tokens_per_step:
            raise SettingsError(
                f"max_num_running: {self.max_num_running} is above max_num_tokens_per_step "
                f"({self.max_num_tokens_per_step}); each running request needs a token per step"
            )
