"""How many blocks the KV cache gets: a pure function, and what it needs to know of the machine."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.errors import TooFewBlocks
from engine.kv.layout import KvLayout

_NUM_WINDOWS = 4
_FLOOR_BYTES = 256 * 1024 * 1024
"""What an engine gets when nothing is configured: room for four requests that fill the context
window, or this much where that is more. Guesses at what one machine's users do at once."""


def choose_num_blocks(
    config: EngineConfig, layout: KvLayout, context_window: int, free_bytes: int
) -> int:
    """Blocks of the KV cache.

    Args:
        free_bytes: memory free on the device now.
    Raises: TooFewBlocks when one request that fills the context window would not fit.
    """
    num_window_blocks = layout.num_blocks_for(context_window)
    window_bytes = num_window_blocks * layout.block_bytes
    if config.num_blocks:
        num_blocks, setting = config.num_blocks, f"num_blocks={config.num_blocks}"
    elif config.kv_bytes:
        num_blocks, setting = config.kv_bytes // layout.block_bytes, f"kv_bytes={config.kv_bytes}"
    else:
        share = free_bytes // 4
        wanted = max(_NUM_WINDOWS * num_window_blocks, _FLOOR_BYTES // layout.block_bytes)
        num_blocks = min(wanted, share // layout.block_bytes)
        setting = f"a quarter of the free memory ({share} bytes)"
    if num_blocks < num_window_blocks:
        raise TooFewBlocks(
            f"{setting} gives {num_blocks} KV blocks, but one request of {context_window} tokens "
            f"(the context window) needs {num_window_blocks} blocks = {window_bytes} bytes: raise "
            "kv_bytes or lower context_window"
        )
    return num_blocks


def free_memory_bytes(device: str) -> int:
    """Memory free on `device` now; on CPU the container's limit counts too."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = _meminfo_available_bytes()
    cgroup = Path("/sys/fs/cgroup")
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
    except OSError:
        return free  # no cgroup v2 here: the host's number stands
    return free if limit == "max" else min(free, max(0, int(limit) - used))


def _meminfo_available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo names no MemAvailable: set kv_bytes")
