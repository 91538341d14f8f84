"""The number of blocks of the KV cache: a pure function, and the measurements of memory that it
needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.config import EngineConfig
from engine.errors import TooFewBlocks
from engine.kv.layout import KvLayout
from process import host_memory

_NUM_WINDOWS = 4
_FLOOR_BYTES = 256 * 1024 * 1024
"""Default size of the cache where nothing is configured: room for `_NUM_WINDOWS` requests that fill
the context window, or `_FLOOR_BYTES` where that is more."""
_MODEST_WINDOW = 8192
"""The context window, in tokens, that errors suggest where the model's own is too large and this
one fits."""


_MAX_NUM_PROFILED = 1 << 18
"""Upper limit of the number of blocks chosen from a device's free memory: more than requests of a
small model fill, and each block costs bookkeeping."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of a CUDA device after the weights were loaded, in bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    weight_bytes: int

    step_bytes: int
    """Memory that the largest step needs."""

    draft_bytes: int = 0
    """Memory that draft models hold already, their KV caches included."""

    def room_bytes(self, share: float) -> int:
        """Return the bytes that remain for the KV cache if the engine may use `share` (0 to 1) of
        the device's memory; negative where the share is too small. Memory that other processes
        use counts as not free."""
        own_bytes = int(self.total_bytes * share) - self.weight_bytes - self.draft_bytes
        return min(own_bytes, self.free_bytes) - self.step_bytes


def choose_num_blocks(
    config: EngineConfig,
    layout: KvLayout,
    context_window: int,
    free_bytes: int,
    device: DeviceMemory | None = None,
    record: KvLayout | None = None,
) -> int:
    """Choose the number of blocks of the KV cache: the configured one; else, on a device that was
    measured, all that the remaining memory holds; else at most a quarter of the free memory, or,
    where one context window needs more than that, that window in at most half of it.

    Args:
        free_bytes: memory that is free now where the cache will be.
        device: the measured memory of the device; None: not measured.
        record: the layout of the part of a block on that device; None: the whole block.
    Raises: TooFewBlocks if one request that fills the context window would not fit.
    """
    if device is not None and not config.num_blocks and not config.kv_bytes:
        return _profiled_num_blocks(config, record or layout, context_window, device)
    num_window_blocks = layout.num_blocks_for(context_window)
    window_bytes = num_window_blocks * layout.block_bytes
    if config.num_blocks:
        num_blocks, key = config.num_blocks, "num_blocks"
        setting = f"num_blocks={config.num_blocks}"
    elif config.kv_bytes:
        num_blocks, key = config.kv_bytes // layout.block_bytes, "kv_bytes"
        setting = f"kv_bytes={config.kv_bytes}"
    else:
        free_bytes = max(0, free_bytes - _tail_bytes(config, layout))
        share, key = free_bytes // 4, "kv_bytes"
        wanted = max(_NUM_WINDOWS * num_window_blocks, _FLOOR_BYTES // layout.block_bytes)
        num_blocks = min(wanted, share // layout.block_bytes)
        if num_blocks < num_window_blocks:
            share = free_bytes // 2
            num_blocks = min(num_window_blocks, share // layout.block_bytes)
        setting = f"half of the free memory ({share} bytes)"
    if num_blocks < num_window_blocks:
        raise TooFewBlocks(
            f"{setting} gives {num_blocks} KV blocks, but one request of {context_window} tokens "
            f"(the context window) needs {num_window_blocks} blocks = {window_bytes} bytes: "
            + _way_out(num_blocks * layout.block_size, key)
        )
    return num_blocks


def _profiled_num_blocks(
    config: EngineConfig, layout: KvLayout, context_window: int, device: DeviceMemory
) -> int:
    room_bytes = device.room_bytes(config.memory_share) - _tail_bytes(config, layout)
    num_blocks = min(max(0, room_bytes) // layout.block_bytes, _MAX_NUM_PROFILED)
    num_window_blocks = layout.num_blocks_for(context_window)
    if num_blocks < num_window_blocks:
        window_bytes = num_window_blocks * layout.block_bytes
        raise TooFewBlocks(
            f"{device.name} has {device.total_bytes} bytes, {device.free_bytes} of them free once "
            f"{device.weight_bytes} of weights{_of_drafts(device)} are there; "
            f"memory_share={config.memory_share:g} of all, or what is free, less "
            f"{device.step_bytes} of the largest step is room for {num_blocks} KV blocks, but one "
            f"request of {context_window} tokens (the context window) needs {num_window_blocks} "
            f"blocks = {window_bytes} bytes: "
            + _way_out(num_blocks * layout.block_size, "memory_share")
        )
    return num_blocks


def _of_drafts(device: DeviceMemory) -> str:
    return f" and {device.draft_bytes} of draft models" if device.draft_bytes else ""


def _tail_bytes(config: EngineConfig, layout: KvLayout) -> int:
    """Return an upper bound in bytes of the UnquantizedTails of a quantized cache: one unfilled,
    unquantized block for each running request; with speculation also a step's draft tokens for
    it, and as many blocks that they may enter. It is up to three times that, as the buffer
    doubles, and the old memory exists while it grows."""
    if not layout.is_quantized:
        return 0
    num_slots = 1
    if config.speculation.is_on:
        num_slots += 2 * layout.num_blocks_for(config.speculation.max_num_nodes)
    return 3 * config.max_num_running * num_slots * layout.raw.block_bytes


def _way_out(num_tokens: int, key: str) -> str:
    """Return the option that fixes the error, for a cache with room for `num_tokens` tokens."""
    if num_tokens == 0:
        return f"raise worker.engine.{key}"
    window = min(num_tokens, _MODEST_WINDOW)
    return f"`--set worker.engine.context_window={window}` (or raise worker.engine.{key})"


def device_memory(device: str, *, weight_bytes: int, step_bytes: int) -> DeviceMemory | None:
    """Return the memory of a CUDA device whose largest step was measured; None for any other
    device."""
    if torch.device(device).type != "cuda" or not step_bytes:
        return None
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return DeviceMemory(
        f"{torch.cuda.get_device_name(device)} ({device})",
        total_bytes,
        free_bytes,
        weight_bytes,
        step_bytes,
    )


def held_bytes(device: str) -> int:
    """Return the bytes that PyTorch's allocator of this process holds on a CUDA device, those of
    CUDA graphs included and unused cached ones not; 0 for any other device."""
    if torch.device(device).type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return int(torch.cuda.memory_reserved(device))


def free_memory_bytes(device: str) -> int:
    """Return the bytes that are free on `device` now; on CPU the container's limit counts, too."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return host_memory.available_bytes()
