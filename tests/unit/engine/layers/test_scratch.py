"""Memory that steps gather into: the same numbers bit for bit, whatever it held before, and a law
for how much of it there is."""

from __future__ import annotations

import random

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.config import EngineConfig
from engine.errors import IntegrityError
from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.kv.sizing import choose_num_blocks
from engine.layers.torch_attention import Scratch, TorchPagedAttention, scratch_for

SIZE, HEADS, NUM_BLOCKS = 4, 6, 600
DTYPES = (torch.float32, torch.bfloat16)


class _Dirty(Scratch):
    """All that it gives is NaN, but for what is given in between of another place."""

    num_taken = 0

    def take(self, place: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.num_taken += 1
        return super().take(place, shape, dtype).fill_(float("nan"))


def test_it_holds_what_was_asked_for_and_no_more_than_its_limit(seed: int) -> None:
    rng = random.Random(seed)
    limit_bytes = rng.choice([0, 5000, 300_000, 1 << 24])
    scratch = Scratch(limit_bytes)
    newest: dict[str, torch.Tensor] = {}
    for step in range(200):
        place = rng.choice("abc")
        shape = tuple(rng.randrange(0, 30) for _ in range(rng.randint(1, 4)))
        taken = scratch.take(place, shape, rng.choice(DTYPES))
        assert taken.shape == shape and taken.is_contiguous()
        newest[place] = taken.fill_(step)
        # What was taken last of each place is nobody else's.
        marks = [int(one.view(-1)[0]) for one in newest.values() if one.numel()]
        assert len(set(marks)) == len(marks)
        assert scratch.num_bytes <= limit_bytes
        scratch.check_integrity()
    before = scratch.num_bytes
    assert (before > 0) == (limit_bytes > 0)
    scratch.close()
    assert scratch.num_bytes == 0
    assert scratch.take("a", (3, 5), torch.float32).shape == (3, 5)
    scratch.check_integrity()
    assert scratch.num_bytes == 0


def test_what_fits_is_the_same_memory_again_and_what_does_not_grows_by_doubling() -> None:
    scratch = Scratch(1 << 30)
    num_sizes = len(
        {scratch.take("keys", (rows, 64), torch.float32).data_ptr() for rows in range(1, 2000)}
    )
    assert num_sizes <= 8  # 512 kB in pages of 4 kB or more
    held = scratch.num_bytes
    for rows in (3, 1999, 7):
        assert scratch.take("keys", (rows, 64), torch.float32).shape == (rows, 64)
    assert scratch.num_bytes == held <= 2 * 1999 * 64 * 4


def test_books_that_do_not_add_up_are_noticed() -> None:
    scratch = Scratch(1 << 20)
    scratch.take("keys", (64, 64), torch.float32)
    scratch.limit_bytes = 100
    with pytest.raises(IntegrityError, match="beyond 100"):
        scratch.check_integrity()
    scratch.limit_bytes = 1 << 20
    one = scratch._places["keys"]
    one.pages = torch.empty(8 * len(one.pages), dtype=torch.uint8)
    with pytest.raises(IntegrityError, match="keys"):
        scratch.check_integrity()


LAYERS = {
    "alike": (LayerKv(2, 8, 2, 8), LayerKv(2, 8, 2, 8)),
    "unlike": (LayerKv(1, 8, 1, 6), LayerKv(3, 8, 3, 6)),
    "latents": (LayerKv(1, 8, 0, 6), LayerKv(1, 8, 0, 6)),
}


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("limit_bytes", [1 << 24, 40_000])
def test_results_are_equal_bit_for_bit(kind: str, dtype: str, limit_bytes: int, seed: int) -> None:
    """Steps of any spans and trees, one after the other with the same scratch, one too small for
    the larger of them among these; a cache of the computed numbers, and of shorter ones."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    layout = layout_of(list(LAYERS[kind]), block_size=SIZE, dtype=dtype)
    memory = KvMemory(layout, NUM_BLOCKS)
    memory.cache.copy_(torch.randn(memory.cache.shape, generator=generator))
    views, scratch = memory.layer_views(), _Dirty(limit_bytes)
    for _ in range(4):
        spans = _spans(rng)
        num_rows = sum(span.num_tokens for span in spans)
        batch = Batch((0,) * num_rows, spans, ())
        steps = [
            TorchPagedAttention(batch, views, SIZE, scratch),
            TorchPagedAttention(batch, views, SIZE),
        ]
        window, softcap = rng.choice([None, 3]), rng.choice([None, 2.0])
        for layer, view in enumerate(views):
            num_kv_heads = view.heads.num_heads
            query = torch.randn(HEADS, num_rows, 8, generator=generator)
            key = torch.randn(num_kv_heads, num_rows, 8, generator=generator)
            value = torch.randn(num_kv_heads, num_rows, 6 + 2 * (kind == "alike"),
                                generator=generator)  # fmt: skip
            if kind == "latents":
                value = key[..., :6]
            found, expected = (
                step.attend(layer, query, key, value, 0.3, window, softcap) for step in steps
            )
            assert torch.equal(found, expected)
            assert not found.isnan().any()
        scratch.check_integrity()
    assert scratch.num_taken > 0


def _spans(rng: random.Random) -> tuple[TokenSpan, ...]:
    """Decodes, trees, and chunks with a past and without, of odd lengths in shuffled blocks."""
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    spans: list[TokenSpan] = []
    for _ in range(rng.randint(1, 9)):
        start = rng.choice([0, 1, 5, 30, 99])
        count = rng.choice([1, 1, 2, 7, 40])
        num_nodes = rng.choice([0, 0, 3]) if start else 0
        branches = tuple(rng.randrange(-1, node) for node in range(num_nodes))
        end = start + count + num_nodes
        blocks = tuple(free.pop() for _ in range(-(-end // SIZE)))
        spans.append(TokenSpan(start, count + num_nodes, blocks, branches=branches))
    return tuple(spans)


@pytest.mark.parametrize("num_layers", [1, 2, 40])
@pytest.mark.parametrize("window", [64, 4096, 100_000])
def test_automatic_sizing_leaves_room_for_it(num_layers: int, window: int) -> None:
    layout = KvLayout.plain(
        num_layers=num_layers, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32"
    )
    window_bytes = layout.num_blocks_for(window) * layout.block_bytes
    for free_bytes in (2 * window_bytes, 3 * window_bytes, 5 * window_bytes, 1 << 30):
        if free_bytes < 2 * window_bytes:
            continue  # refused
        num_blocks = choose_num_blocks(EngineConfig(model="any"), layout, window, free_bytes)
        memory = KvMemory(layout, num_blocks)  # nothing of it is written
        scratch = scratch_for(memory, "float32")
        assert scratch is not None and scratch.num_bytes == 0
        assert 0 < scratch.limit_bytes <= free_bytes - num_blocks * layout.block_bytes
