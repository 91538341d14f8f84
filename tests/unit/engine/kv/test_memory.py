"""Layout, memory and sizing of the device cache."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from engine.config import EngineConfig
from engine.engine import LLMEngine
from engine.errors import ModelNotSupported, TooFewBlocks
from engine.kv import sizing
from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.kv.sizing import (
    DeviceMemory,
    choose_num_blocks,
    free_memory_bytes,
)
from engine.speculation.config import SpeculationConfig
from engine.testing.fake_model import FakeModel

LAYOUT = KvLayout.plain(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="float32")


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
    layout = KvLayout.plain(
        num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype="bfloat16"
    )
    assert layout.block_bytes * 2 == LAYOUT.block_bytes
    assert KvMemory(layout, 2).cache.dtype is torch.bfloat16


def test_layout_comes_from_what_the_probe_saw() -> None:
    assert layout_of([LayerKv(2, 8, 2, 8)] * 3, block_size=4, dtype="float32") == LAYOUT


@pytest.mark.parametrize(
    ("layers", "named"),
    [
        ([], "no attention layer"),
        ([LayerKv(2, 8, 2, 8), LayerKv(4, 8, 2, 8)], "layer 1 has 4 key heads and 2 value heads"),
    ],
)
def test_other_layouts_are_refused_by_name(layers: list[LayerKv], named: str) -> None:
    with pytest.raises(ModelNotSupported, match=named):
        layout_of(layers, block_size=4, dtype="float32")


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
    changed = KvLayout.plain(**({**fields, "dtype": "float32"} | other))  # type: ignore[arg-type]
    assert changed.fingerprint_part != LAYOUT.fingerprint_part


TABLES = {
    "plain": (LayerKv(2, 8, 2, 8),) * 3,
    "other value dim": (LayerKv(2, 8, 2, 6),) * 3,
    "layer dims": (LayerKv(2, 8, 2, 8), LayerKv(2, 16, 2, 4), LayerKv(2, 8, 2, 8)),
    "layer heads": (LayerKv(1, 8, 1, 6), LayerKv(4, 8, 4, 6), LayerKv(1, 8, 1, 6)),
    "latents": (LayerKv(1, 40, 0, 32),) * 2,
    "all": (LayerKv(3, 8, 3, 8), LayerKv(1, 12, 0, 8), LayerKv(2, 6, 2, 10)),
}


@pytest.mark.parametrize("layers", TABLES.values(), ids=TABLES)
def test_the_table_covers_each_byte_of_a_block_once(layers: tuple[LayerKv, ...]) -> None:
    """Seen through the layers' views: what is written comes back, and nothing is left over."""
    layout = layout_of(layers, block_size=4, dtype="float32")
    memory = KvMemory(layout, 5)
    views = memory.layer_views()
    number = 1.0
    for view in views:
        for part in (view.keys, view.values):
            for block_id in range(5) if part is not None else ():
                for head in range(view.heads.num_heads):
                    row = block_id * view.heads.rows_per_block + head * view.heads.head_step
                    assert not bool(part[row].any())  # type: ignore[index]
                    part[row] = torch.arange(part[row].numel()).view(part[row].shape) + number  # type: ignore[index]
                    number += part[row].numel()  # type: ignore[index]
    numbers = memory.cache.flatten().sort().values
    assert torch.equal(numbers, torch.arange(1.0, number))
    assert layout.block_bytes * 5 == numbers.numel() * 4
    for view, layer in zip(views, layers, strict=True):
        assert view.keys.shape[1:] == (4, layer.k_head_dim)
        assert view.v_head_dim == layer.v_head_dim
        assert (view.values is None) == layer.is_latent


def test_heads_are_outermost_where_all_layers_have_equally_many() -> None:
    """A rank's share of a block is one run, whatever the dims."""
    layout = layout_of(TABLES["layer dims"], block_size=4, dtype="float32")
    assert {section.head_stride * 2 for section in layout.sections} == {layout.num_elements}
    assert max(s.offset + 4 * s.dim for s in layout.sections) == layout.num_elements // 2


def test_the_views_of_plain_attention_are_the_array() -> None:
    memory = KvMemory(LAYOUT, 5)
    memory.cache.copy_(torch.randn(memory.cache.shape))
    for layer, view in enumerate(memory.layer_views()):
        keys = memory.cache[:, :, layer, 0].reshape(10, 4, 8)
        assert torch.equal(view.keys, keys)
        assert view.values is not None
        assert torch.equal(view.values, memory.cache[:, :, layer, 1].reshape(10, 4, 8))


def test_copy_takes_all_bytes_of_one_block_and_of_no_other() -> None:
    memory = KvMemory(LAYOUT, 3)
    memory.cache.copy_(torch.randn(memory.cache.shape))
    before = memory.host_view.copy()
    memory.copy(0, 2)
    assert (memory.host_view[2] == before[0]).all()
    assert (memory.host_view[:2] == before[:2]).all()


@pytest.mark.parametrize(
    "layers",
    [
        (LayerKv(2, 8, 2, 8),) * 3,
        (LayerKv(2, 8, 2, 4), LayerKv(2, 8, 2, 4)),
        (LayerKv(4, 8, 4, 8), LayerKv(2, 8, 2, 8)),
        (LayerKv(1, 12, 0, 8),) * 2,
    ],
    ids=["uniform", "two dims", "two numbers of heads", "latents"],
)
def test_tokens_are_moved_in_every_matrix_and_nothing_else(
    layers: tuple[LayerKv, ...], seed: int
) -> None:
    """A path through a tree: what one move writes may be what another reads, or its own place."""
    memory = KvMemory(KvLayout(layers, 4, "float32"), 6)
    generator = torch.Generator().manual_seed(seed)
    memory.cache.copy_(torch.randn(memory.cache.shape, generator=generator))
    moves = [((2, 3), (2, 1)), ((5, 0), (2, 3)), ((5, 2), (5, 0)), ((0, 1), (4, 1))]
    before = [view.keys.clone() for view in memory.layer_views()]
    values = [None if view.values is None else view.values.clone() for view in memory.layer_views()]
    memory.move_tokens([(*source, *target) for source, target in moves])
    for old_keys, old_values, view in zip(before, values, memory.layer_views(), strict=True):
        heads = view.heads
        for old, new in ((old_keys, view.keys), (old_values, view.values)):
            if old is None or new is None:
                continue
            expected = old.clone()
            for (block, slot), (to_block, to_slot) in moves:
                for head in range(heads.num_heads):
                    row = head * heads.head_step
                    expected[to_block * heads.rows_per_block + row, to_slot] = old[
                        block * heads.rows_per_block + row, slot
                    ]
            # Rows of a view are of all layers and heads: those that are not its own moved, too.
            for block in range(6):
                for head in range(heads.num_heads):
                    row = block * heads.rows_per_block + head * heads.head_step
                    assert torch.equal(new[row], expected[row])
    memory.move_tokens([])


def test_no_two_tables_have_one_fingerprint_part() -> None:
    parts = {layout_of(table, block_size=4, dtype="float32").fingerprint_part: None
             for table in TABLES.values()}  # fmt: skip
    assert len(parts) == len(TABLES)


def test_the_fingerprint_part_of_plain_attention_stays_what_it_was() -> None:
    """Stores and workers of earlier versions still understand one another."""
    assert LAYOUT.fingerprint_part == (
        '{"block_size": 4, "dtype": "float32", "head_dim": 8, "kind": "plain", "num_kv_heads": 2, '
        '"num_layers": 3, "order": "block,kv_head,layer,kv,slot,dim"}'
    )


def test_blocks_by_number_by_bytes_or_by_free_memory() -> None:
    block = LAYOUT.block_bytes
    assert choose_num_blocks(EngineConfig(num_blocks=30), LAYOUT, 100, 0) == 30
    assert choose_num_blocks(EngineConfig(kv_bytes=block * 27 + 1), LAYOUT, 100, 0) == 27
    assert choose_num_blocks(EngineConfig(), LAYOUT, 100, block * 200) == 50
    assert choose_num_blocks(EngineConfig(), LAYOUT, 100, 1 << 40) == (256 << 20) // block
    assert choose_num_blocks(EngineConfig(), LAYOUT, 1 << 20, 1 << 40) == (1 << 20)


def test_the_tails_of_a_quantized_cache_come_out_of_the_free_memory() -> None:
    """Three unfilled blocks, as computed, for each request that runs: their room doubles, and the
    old lies beside the new meanwhile."""
    layout = layout_of([LayerKv(2, 8, 2, 8)], block_size=4, dtype="float32", kv_dtype="int8")
    assert layout.is_quantized
    block = layout.block_bytes
    config = EngineConfig(max_num_running=3)
    free_bytes = 200 * block + 3 * 3 * layout.raw.block_bytes
    assert choose_num_blocks(config, layout, 100, free_bytes) == 50
    assert choose_num_blocks(config, layout, 100, free_bytes - 4) == 49
    # 9 guesses lie in 3 of 4, and may enter as many more.
    guessing = replace(config, speculation=SpeculationConfig(("ngram",), max_num_nodes=9))
    more_bytes = 6 * (free_bytes - 4 * 50 * layout.block_bytes)
    assert choose_num_blocks(guessing, layout, 100, free_bytes + more_bytes) == 50
    assert choose_num_blocks(guessing, layout, 100, free_bytes + more_bytes - 4) == 49
    with pytest.raises(TooFewBlocks, match="0 KV blocks"):
        choose_num_blocks(config, layout, 100, 9 * layout.raw.block_bytes)


def test_a_measured_device_gives_all_that_its_share_leaves() -> None:
    """Weights and the largest step come first, and what others have is theirs."""
    block = LAYOUT.block_bytes
    device = DeviceMemory("a GPU", 1000 * block, 700 * block, 250 * block, 100 * block)
    config = EngineConfig(memory_share=0.8)
    assert choose_num_blocks(config, LAYOUT, 100, 0, device) == 450
    assert choose_num_blocks(EngineConfig(memory_share=1.0), LAYOUT, 100, 0, device) == 600
    assert choose_num_blocks(EngineConfig(num_blocks=30), LAYOUT, 100, 0, device) == 30
    assert choose_num_blocks(EngineConfig(kv_bytes=block * 27), LAYOUT, 100, 0, device) == 27
    with pytest.raises(TooFewBlocks) as caught:
        choose_num_blocks(EngineConfig(memory_share=0.36), LAYOUT, 100, 0, device)
    message = str(caught.value)
    for part in (
        f"a GPU has {1000 * block} bytes",
        f"{700 * block} of them free",
        "memory_share=0.36",
        f"{250 * block} of weights",
        f"{100 * block} of the largest step",
        "room for 10 KV blocks",
        "needs 25 blocks",
        "context_window=40",
    ):
        assert part in message, part
    with pytest.raises(TooFewBlocks, match=r"room for 0 KV blocks.*raise worker"):
        choose_num_blocks(EngineConfig(memory_share=0.2), LAYOUT, 100, 0, device)


def test_draft_models_come_out_of_the_share() -> None:
    """They are there already: of what is free they took their part, of the share nobody did."""
    block = LAYOUT.block_bytes
    device = DeviceMemory("a GPU", 1000 * block, 630 * block, 250 * block, 100 * block, 70 * block)
    config = EngineConfig(memory_share=0.8)
    assert choose_num_blocks(config, LAYOUT, 100, 0, device) == 380
    assert choose_num_blocks(EngineConfig(memory_share=1.0), LAYOUT, 100, 0, device) == 530
    with pytest.raises(TooFewBlocks, match=f"of weights and {70 * block} of draft models are"):
        choose_num_blocks(EngineConfig(memory_share=0.43), LAYOUT, 100, 0, device)
    assert sizing.held_bytes("cpu") == 0


def test_an_engine_is_told_what_its_proposers_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(block_size=4)
    block = model.layout.block_bytes
    device = DeviceMemory("a GPU", 1000 * block, 900 * block, 50 * block, 50 * block)
    monkeypatch.setattr(model, "device_memory", lambda: device)
    config = EngineConfig(memory_share=0.5)
    assert LLMEngine(config, model).kv.num_blocks == 400
    assert LLMEngine(config, model, draft_bytes=150 * block).kv.num_blocks == 250


def test_engines_that_share_a_device_fit_one_after_the_other() -> None:
    block = LAYOUT.block_bytes
    total, used = 1000 * block, 0
    config = EngineConfig(memory_share=0.45)
    for _ in range(2):
        used += 110 * block  # weights, and what a process has there in any case
        device = DeviceMemory("a GPU", total, total - used, 100 * block, 50 * block)
        num_blocks = choose_num_blocks(config, LAYOUT, 100, 0, device)
        assert num_blocks == 300
        used += num_blocks * block


def test_books_are_kept_of_a_bounded_number_of_blocks() -> None:
    total = LAYOUT.block_bytes << 24
    device = DeviceMemory("a GPU", total, total, 0, 0)
    assert choose_num_blocks(EngineConfig(), LAYOUT, 100, 0, device) == 1 << 18


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
