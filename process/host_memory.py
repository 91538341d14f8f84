"""Memory that this process may still take: of its host, or of its container's limit."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_PAGE_CACHE = ("inactive_file", "active_file")


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Memory that the kernel would give this process now: the host's, or what the container's limit
    leaves.

    Args: cgroup: folder of this process's cgroup v2; where there is none, the host's number stands.
    Raises: OSError when `meminfo` names no MemAvailable.
    """
    free = _host_bytes(meminfo)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        current = int((cgroup / "memory.current").read_text())
        stat = (cgroup / "memory.stat").read_text()
    except OSError:
        return free
    if limit == "max":
        return free
    # The kernel drops cached file pages before it refuses memory, such as those of a checkpoint
    # that was just read.
    fields = dict(line.split() for line in stat.splitlines())
    used = max(0, current - sum(int(fields.get(name, 0)) for name in _PAGE_CACHE))
    return min(free, max(0, int(limit) - used))


def _host_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} names no MemAvailable")
