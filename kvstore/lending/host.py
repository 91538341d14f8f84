"""Which host this is, for whoever may map memory on the same one only."""

from __future__ import annotations

import functools
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@functools.cache
def own_host_id() -> str:
    """Of the running kernel: containers of one host have the same, and no two hosts have. Empty
    where the kernel tells none."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return ""
