"""How much memory a process may take: the host's, or what its container leaves."""

from __future__ import annotations

from pathlib import Path

import pytest

from process.host_memory import available_bytes


@pytest.mark.parametrize(
    ("limit", "current", "cached", "free_bytes"),
    [
        ("1000", 900, (300, 100), 500),
        ("1000", 900, (0, 0), 100),
        ("1000", 1100, (0, 0), 0),
        ("1000", 100, (300, 100), 1000),
        ("max", 900, (0, 0), 5120),
        ("9999", 900, (0, 0), 5120),
    ],
)
def test_page_cache_of_a_container_counts_as_free(
    tmp_path: Path,
    limit: str,
    current: int,
    cached: tuple[int, int],
    free_bytes: int,
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 5 kB\n")
    assert available_bytes(tmp_path / "none", meminfo) == 5120  # no cgroup at all
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{current}\n")
    stat = f"anon 7\ninactive_file {cached[0]}\nactive_file {cached[1]}\nslab 9\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert available_bytes(tmp_path, meminfo) == free_bytes


def test_a_kernel_that_says_nothing_is_an_error(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        available_bytes(tmp_path, meminfo)
