"""Layout, memory and sizing of the device cache."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import ModelNotSupported, TooFewBlocks
from engine.kv import sizing
from engine.kv.layout import KvLayout, LayerKv, uniform_layout
from engine.kv.memory import KvMemory
from engine.kv.sizing import choose_num_blocks, free_memory_bytes

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


def test_a_block_is_one_contiguous_run_heads_outermost() -> None:
    memory = KvMemory(LAYOUT, 5)
    assert memory.cache.shape == (5, 2, 3, 2, 4, 8)
    assert memory.cache.is_contiguous()
    assert LAYOUT.block_bytes == 2 * 3 * 2 * 4 * 8 * 4
    assert memory.address % mmap.PAGESIZE == 0
    assert memory.host_view.shape == (5, LAYOUT.block_bytes)
    assert memory.host_view.ctypes.data == memory.address
    assert not memory.host_view.any()


def test_the_host_view_shares_the_cache() -> None:
    memory = KvMemory(LAYOUT, 5)
    memory.cache[3] = 1.5
    expected = torch.full(LAYOUT.block_shape, 1.5).numpy().tobytes()
    assert memory.host_view[3].tobytes() == expected
    memory.host_view[2] = memory.host_view[3]
    assert bool((memory.cache[2] == 1.5).all()) and not bool(memory.cache[1].any())


def test_bfloat16_takes_half() -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16")
    assert layout.block_bytes * 2 == LAYOUT.block_bytes
    assert KvMemory(layout, 2).cache.dtype is torch.bfloat16


def test_layout_comes_from_what_the_probe_saw() -> None:
    assert uniform_layout([LayerKv(2, 8, 2, 8)] * 3, block_size=4, dtype="float32") == LAYOUT


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([], "no attention layer"),
        ([LayerKv(1, 576, 1, 512)], "1x576"),
        ([LayerKv(2, 8, 2, 8), LayerKv(4, 8, 4, 8)], "layer 1"),
    ],
)
def test_other_layouts_are_refused_by_name(layers: list[LayerKv], named: str) -> None:
    with pytest.raises(ModelNotSupported, match=named):
        uniform_layout(layers, block_size=4, dtype="float32")


@pytest.mark.parametrize(
    "other",
    [
        {"num_layers": 4},
        {"num_kv_heads": 1},
        {"head_dim": 16},
        {"block_size": 8},
        {"dtype": "bfloat16"},
    ],
)
def test_everything_that_changes_bytes_changes_the_fingerprint_part(other: dict[str, int]) -> None:
    fields = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "block_size": 4}
    changed = KvLayout(**({**fields, "dtype": "float32"} | other))  # type: ignore[arg-type]
    assert changed.fingerprint_part != LAYOUT.fingerprint_part


def test_blocks_by_number_by_bytes_or_by_free_memory() -> None:
    block = LAYOUT.block_bytes
    assert choose_num_blocks(EngineConfig(num_blocks=30), LAYOUT, 100, 0) == 30
    assert choose_num_blocks(EngineConfig(kv_bytes=block * 27 + 1), LAYOUT, 100, 0) == 27
    assert choose_num_blocks(EngineConfig(), LAYOUT, 100, block * 200) == 50
    assert choose_num_blocks(EngineConfig(), LAYOUT, 100, 1 << 40) == (256 << 20) // block
    assert choose_num_blocks(EngineConfig(), LAYOUT, 1 << 20, 1 << 40) == (1 << 20)


def test_one_window_may_take_half_of_the_free_memory() -> None:
    block = LAYOUT.block_bytes
    assert choose_num_blocks(EngineConfig(), LAYOUT, 100, block * 99) == 25
    assert choose_num_blocks(EngineConfig(), LAYOUT, 100, block * 50) == 25
    with pytest.raises(TooFewBlocks, match=r"^half of the free memory .* gives 24 KV blocks"):
        choose_num_blocks(EngineConfig(), LAYOUT, 100, block * 49)


@pytest.mark.parametrize(
    ("config", "num_free_blocks", "window", "says"),
    [
        (
            EngineConfig(num_blocks=24),
            0,
            100,
            "needs 25 blocks = 38400 bytes: `--set worker.engine.context_window=96` (or raise "
            "worker.engine.num_blocks)",
        ),
        (EngineConfig(kv_bytes=999), 0, 100, "bytes: raise worker.engine.kv_bytes"),
        (
            EngineConfig(),
            6000,
            40960,
            "`--set worker.engine.context_window=8192` (or raise worker.engine.kv_bytes)",
        ),
    ],
)
def test_too_few_blocks_for_one_window_says_how_many_and_what_to_type(
    config: EngineConfig, num_free_blocks: int, window: int, says: str
) -> None:
    with pytest.raises(TooFewBlocks) as caught:
        choose_num_blocks(config, LAYOUT, window, num_free_blocks * LAYOUT.block_bytes)
    assert str(caught.value).endswith(says)


def test_free_memory_is_read_from_the_machine() -> None:
    assert free_memory_bytes("cpu") > 1 << 20


@pytest.mark.parametrize(
    ("limit", "current", "cached", "free_bytes"),
    [
        ("1000", 900, (300, 100), 500),
        ("1000", 900, (0, 0), 100),
        ("1000", 1100, (0, 0), 0),
        ("1000", 100, (300, 100), 1000),
        ("max", 900, (0, 0), 5000),
        ("9999", 900, (0, 0), 5000),
    ],
)
def test_page_cache_of_a_container_counts_as_free(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    current: int,
    cached: tuple[int, int],
    free_bytes: int,
) -> None:
    monkeypatch.setattr(sizing, "_CGROUP", tmp_path)
    monkeypatch.setattr(sizing, "_meminfo_available_bytes", lambda: 5000)
    assert free_memory_bytes("cpu") == 5000  # no cgroup at all
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{current}\n")
    stat = f"anon 7\ninactive_file {cached[0]}\nactive_file {cached[1]}\nslab 9\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert free_memory_bytes("cpu") == free_bytes
