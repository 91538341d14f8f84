"""Paged attention in plain torch, against attention written out over unpaged tensors."""

from __future__ import annotations

import math

import pytest
import torch

from engine.batch import Batch, Span
from engine.kv.layout import KvLayout
from engine.kv.memory import KvMemory
from engine.models.hugging_face import layer_views
from engine.models.step_attention import StepAttention

HEADS, KV_HEADS, DIM, SIZE, LAYERS = 6, 2, 8, 4, 2


def _naive(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int, window: int | None
) -> torch.Tensor:
    """[H, T, D] over [K, S, D], token by token."""
    group = query.shape[0] // keys.shape[0]
    out = torch.empty(query.shape[1], query.shape[0], query.shape[2])
    for token in range(query.shape[1]):
        last = start + token
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(query.shape[0]):
            k, v = keys[head // group, first : last + 1], values[head // group, first : last + 1]
            weights = torch.softmax(k @ query[head, token] / math.sqrt(DIM), 0)
            out[token, head] = weights @ v
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 5, 100])
def test_any_mix_of_spans_equals_naive_attention(window: int | None, seed: int) -> None:
    """Singles of very different lengths (so several groups), fresh prompts, chunks with a cached
    past, all in one step, in shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    layout = KvLayout(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    shapes = [(0, 1), (5, 1), (0, 7), (3, 6), (8, 4), (99, 1), (11, 1), (4, 1), (60, 9)]
    memory = KvMemory(layout, 100)
    free = torch.randperm(100, generator=generator).tolist()
    views = layer_views(memory)
    spans, parts = [], []
    for start, count in shapes:
        blocks = tuple(free.pop() for _ in range(-(-(start + count) // SIZE)))
        spans.append(Span(start, count, blocks))
        keys, values = torch.randn(2, LAYERS, KV_HEADS, start + count, DIM, generator=generator)
        parts.append((torch.randn(LAYERS, HEADS, count, DIM, generator=generator), keys, values))
        for position in range(start):  # what earlier steps wrote
            cell = memory.cache[blocks[position // SIZE], :, :, :, position % SIZE]  # [K, L, 2, D]
            cell[:, :, 0] = keys[:, :, position].transpose(0, 1)
            cell[:, :, 1] = values[:, :, position].transpose(0, 1)
    num_tokens = sum(count for _, count in shapes)
    step = StepAttention(Batch((0,) * num_tokens, tuple(spans), ()), views, KV_HEADS, SIZE)
    for layer in range(LAYERS):
        whole = [
            (start, q[layer], k[layer], v[layer])
            for (start, _), (q, k, v) in zip(shapes, parts, strict=True)
        ]
        out = step.attend(
            layer,
            torch.cat([q for _, q, _, _ in whole], dim=1),
            torch.cat([k[:, start:] for start, _, k, _ in whole], dim=1),
            torch.cat([v[:, start:] for start, _, _, v in whole], dim=1),
            DIM**-0.5,
            window,
        )
        expected = torch.cat([_naive(q, k, v, start, window) for start, q, k, v in whole])
        assert torch.allclose(out, expected, atol=1e-5)


def test_decodes_alone_equal_naive_attention(seed: int) -> None:
    """The path without any copy of queries: one group, nothing else."""
    generator = torch.Generator().manual_seed(seed)
    layout = KvLayout(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    memory = KvMemory(layout, 20)
    memory.cache.copy_(torch.randn(memory.cache.shape, generator=generator))
    starts = [0, 3, 4, 18]
    spans = tuple(
        Span(start, 1, tuple(range(5 * i, 5 * i + start // SIZE + 1)))
        for i, start in enumerate(starts)
    )
    query = torch.randn(HEADS, 4, DIM, generator=generator)
    key, value = torch.randn(2, KV_HEADS, 4, DIM, generator=generator)
    step = StepAttention(Batch((0,) * 4, spans, ()), layer_views(memory), KV_HEADS, SIZE)
    out = step.attend(0, query, key, value, DIM**-0.5, None)
    for i, start in enumerate(starts):
        blocks = memory.cache[list(spans[i].block_ids)][:, :, 0]  # [n, K, 2, P, D]
        flat = blocks.permute(2, 1, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)
        assert torch.equal(flat[0, :, start], key[:, i])  # written where it belongs
        expected = _naive(query[:, i : i + 1], flat[0], flat[1], start, None)
        assert torch.allclose(out[i : i + 1], expected, atol=1e-5)


def test_a_step_writes_its_own_slots_and_nothing_else(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = KvLayout(
        num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    memory = KvMemory(layout, 6)
    memory.cache.fill_(7.0)
    span = Span(3, 3, (4, 1))
    step = StepAttention(Batch((0,) * 3, (span,), ()), layer_views(memory), KV_HEADS, SIZE)
    key, value = torch.randn(2, KV_HEADS, 3, DIM, generator=generator)
    step.attend(1, torch.randn(HEADS, 3, DIM, generator=generator), key, value, 1.0, None)
    changed = (memory.cache != 7.0).nonzero().tolist()
    cells = {(block, layer, slot) for block, _, layer, _, slot, _ in changed}
    assert cells == {(4, 1, 3), (1, 1, 0), (1, 1, 1)}


def test_a_warm_up_touches_no_block() -> None:
    layout = KvLayout(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    memory = KvMemory(layout, 2)
    batch = Batch((0,) * 5, (Span(0, 5, ()),), (4,))
    step = StepAttention(batch, layer_views(memory), KV_HEADS, SIZE)
    ones = torch.ones(KV_HEADS, 5, DIM)
    step.attend(0, torch.ones(HEADS, 5, DIM), ones, ones, 1.0, None)
    assert not memory.host_view.any()
