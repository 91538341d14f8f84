"""Paged attention in plain torch, against attention written out over unpaged tensors."""

from __future__ import annotations

import math
import random

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.kv.layout import KvLayout, LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.layers.torch_attention import TorchPagedAttention
from engine.models.transformers_backend import Latents

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
    layout = KvLayout.plain(
        num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    shapes = [(0, 1), (5, 1), (0, 7), (3, 6), (8, 4), (99, 1), (11, 1), (4, 1), (60, 9)]
    memory = KvMemory(layout, 100)
    free = torch.randperm(100, generator=generator).tolist()
    views = memory.layer_views()
    spans, parts = [], []
    for start, count in shapes:
        blocks = tuple(free.pop() for _ in range(-(-(start + count) // SIZE)))
        spans.append(TokenSpan(start, count, blocks))
        keys, values = torch.randn(2, LAYERS, KV_HEADS, start + count, DIM, generator=generator)
        parts.append((torch.randn(LAYERS, HEADS, count, DIM, generator=generator), keys, values))
        for position in range(start):  # what earlier steps wrote
            cell = memory.cache[blocks[position // SIZE], :, :, :, position % SIZE]  # [K, L, 2, D]
            cell[:, :, 0] = keys[:, :, position].transpose(0, 1)
            cell[:, :, 1] = values[:, :, position].transpose(0, 1)
    num_tokens = sum(count for _, count in shapes)
    step = TorchPagedAttention(Batch((0,) * num_tokens, tuple(spans), ()), views, SIZE)
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
    layout = KvLayout.plain(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    memory = KvMemory(layout, 20)
    memory.cache.copy_(torch.randn(memory.cache.shape, generator=generator))
    starts = [0, 3, 4, 18]
    spans = tuple(
        TokenSpan(start, 1, tuple(range(5 * i, 5 * i + start // SIZE + 1)))
        for i, start in enumerate(starts)
    )
    query = torch.randn(HEADS, 4, DIM, generator=generator)
    key, value = torch.randn(2, KV_HEADS, 4, DIM, generator=generator)
    step = TorchPagedAttention(Batch((0,) * 4, spans, ()), memory.layer_views(), SIZE)
    out = step.attend(0, query, key, value, DIM**-0.5, None)
    for i, start in enumerate(starts):
        blocks = memory.cache[list(spans[i].block_ids)][:, :, 0]  # [n, K, 2, P, D]
        flat = blocks.permute(2, 1, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)
        assert torch.equal(flat[0, :, start], key[:, i])  # written where it belongs
        expected = _naive(query[:, i : i + 1], flat[0], flat[1], start, None)
        assert torch.allclose(out[i : i + 1], expected, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_trees_of_a_step_see_their_own_paths(
    window: int | None, softcap: float | None, seed: int
) -> None:
    """The mask of trees against each node's path by itself: wide and deep trees, paths, decodes and
    prompts in one step, with the tokens before a tree known or not. Whatever lies in other slots is
    seen by nobody."""
    generator = torch.Generator().manual_seed(seed)
    rng = random.Random(seed)
    layout = KvLayout.plain(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    memory = KvMemory(layout, 400)
    memory.cache.copy_(torch.randn(memory.cache.shape, generator=generator))
    free = torch.randperm(400, generator=generator).tolist()
    sinks = torch.randn(HEADS, generator=generator) if softcap is not None else None
    spans: list[TokenSpan] = []
    for num_nodes in (0, 0, 1, 3, 7, 7, 12, 40):
        start, trunk = rng.randrange(60), rng.randint(1, 3)
        end = start + trunk + num_nodes
        blocks = tuple(free.pop() for _ in range(-(-end // SIZE)))
        branches = tuple(rng.randrange(-1, node) for node in range(num_nodes))
        spans.append(TokenSpan(start, trunk + num_nodes, blocks, branches=branches))
    num_tokens = sum(span.num_tokens for span in spans)
    query = torch.randn(HEADS, num_tokens, DIM, generator=generator)
    key, value = torch.randn(2, KV_HEADS, num_tokens, DIM, generator=generator)
    step = TorchPagedAttention(
        Batch((0,) * num_tokens, tuple(spans), ()), memory.layer_views(), SIZE
    )
    out = step.attend(0, query, key, value, DIM**-0.5, window, softcap, sinks)
    first = 0
    for span in spans:
        blocks = memory.cache[list(span.block_ids)][:, :, 0]  # [n, K, 2, P, D]
        kv = blocks.permute(2, 1, 0, 3, 4).reshape(2, KV_HEADS, -1, DIM)
        keys, values = kv.repeat_interleave(HEADS // KV_HEADS, dim=1)
        positions = span.positions
        for index in range(span.num_tokens):
            slots = span.slots_seen(index)
            own = [*range(span.start), *positions]
            if window is not None:
                slots = [slot for slot in slots if own[slot] > positions[index] - window]
            scores = (keys[:, slots] @ query[:, first + index, :, None])[..., 0] / math.sqrt(DIM)
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            extra = scores.exp().sum(-1) + (sinks.exp() if sinks is not None else 0)
            weights = (scores.exp() / extra[:, None])[:, None]
            expected = (weights @ values[:, slots])[:, 0]
            assert torch.allclose(out[first + index], expected, atol=1e-4)
        first += span.num_tokens


@pytest.mark.parametrize("num_spans", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_tokens_heads_lie_side_by_side(
    num_spans: int, num_tokens: int, softcap: float | None
) -> None:
    """Models of transformers look at them as one row of numbers, without a copy: of a step that is
    one group, too, and of one span."""
    layout = KvLayout.plain(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    memory = KvMemory(layout, 2 * num_spans)
    memory.cache.zero_()
    spans = tuple(TokenSpan(4, num_tokens, (2 * one, 2 * one + 1)) for one in range(num_spans))
    num_rows = num_spans * num_tokens
    step = TorchPagedAttention(Batch((0,) * num_rows, spans, ()), memory.layer_views(), SIZE)
    ones = torch.ones(KV_HEADS, num_rows, DIM)
    out = step.attend(0, torch.ones(HEADS, num_rows, DIM), ones, ones, 1.0, None, softcap)
    assert out.view(num_rows, HEADS * DIM).isfinite().all()


def test_a_step_writes_its_own_slots_and_nothing_else(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    layout = KvLayout.plain(
        num_layers=2, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    memory = KvMemory(layout, 6)
    memory.cache.fill_(7.0)
    span = TokenSpan(3, 3, (4, 1))
    step = TorchPagedAttention(Batch((0,) * 3, (span,), ()), memory.layer_views(), SIZE)
    key, value = torch.randn(2, KV_HEADS, 3, DIM, generator=generator)
    step.attend(1, torch.randn(HEADS, 3, DIM, generator=generator), key, value, 1.0, None)
    changed = (memory.cache != 7.0).nonzero().tolist()
    cells = {(block, layer, slot) for block, _, layer, _, slot, _ in changed}
    assert cells == {(4, 1, 3), (1, 1, 0), (1, 1, 1)}


def test_a_warm_up_touches_no_block() -> None:
    layout = KvLayout.plain(
        num_layers=1, num_kv_heads=KV_HEADS, head_dim=DIM, block_size=SIZE, dtype="float32"
    )
    memory = KvMemory(layout, 2)
    batch = Batch((0,) * 5, (TokenSpan(0, 5, ()),), (4,))
    step = TorchPagedAttention(batch, memory.layer_views(), SIZE)
    ones = torch.ones(KV_HEADS, 5, DIM)
    step.attend(0, torch.ones(HEADS, 5, DIM), ones, ones, 1.0, None)
    assert not memory.host_view.any()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 3])
def test_softcap_and_sinks_in_any_mix_of_spans(
    softcap: float | None, has_sinks: bool, window: int | None, seed: int
) -> None:
    """Against the definition, token by token; keys and values of different dims; layers of
    different head counts, so that a block has two groups."""
    generator = torch.Generator().manual_seed(seed)
    layers = (LayerKv(1, 8, 1, 6), LayerKv(3, 8, 3, 6))
    layout = layout_of(layers, block_size=SIZE, dtype="float32")
    memory = KvMemory(layout, 40)
    free = torch.randperm(40, generator=generator).tolist()
    sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
    shapes = [(0, 1), (5, 1), (0, 7), (8, 4), (40, 1)]
    past: list[TokenSpan] = []
    now: list[TokenSpan] = []
    for start, count in shapes:
        blocks = tuple(free.pop() for _ in range(-(-(start + count) // SIZE)))
        now.append(TokenSpan(start, count, blocks))
        if start:
            past.append(TokenSpan(0, start, blocks[: -(-start // SIZE)]))
    for layer, kv in enumerate(layers):
        everything = [
            (
                torch.randn(HEADS, start + count, 8, generator=generator),
                torch.randn(kv.num_k_heads, start + count, 8, generator=generator),
                torch.randn(kv.num_k_heads, start + count, 6, generator=generator),
            )
            for start, count in shapes
        ]
        cached = [parts for parts, (start, _) in zip(everything, shapes, strict=True) if start]
        for spans, rows in ((past, cached), (now, everything)):
            tensors = [
                torch.cat(
                    [parts[i][:, span.start : span.end] for parts, span in
                     zip(rows, spans, strict=True)], dim=1,
                )
                for i in range(3)
            ]  # fmt: skip
            step = TorchPagedAttention(
                Batch((0,) * tensors[0].shape[1], tuple(spans), ()), memory.layer_views(), SIZE
            )
            out = step.attend(layer, *tensors, DIM**-0.5, window, softcap, sinks)
        first = 0
        for (start, count), (q, k, v) in zip(shapes, everything, strict=True):
            for token in range(start, start + count):
                low = 0 if window is None else max(0, token - window + 1)
                for head in range(HEADS):
                    group = head * kv.num_k_heads // HEADS
                    scores = k[group, low : token + 1] @ q[head, token] / math.sqrt(DIM)
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    extra = scores.exp().sum() + (sinks[head].exp() if sinks is not None else 0)
                    expected = (scores.exp() / extra) @ v[group, low : token + 1]
                    assert torch.allclose(out[first + token - start, head], expected, atol=1e-5)
            first += count


def test_attention_over_latents_is_attention_over_what_they_expand_to(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens, rank, rope, nope, dim = 9, 12, 4, 6, 5
    weight_k = torch.randn(HEADS, nope, rank, generator=generator)
    weight_v = torch.randn(HEADS, dim, rank, generator=generator)
    query = torch.randn(HEADS, num_tokens, nope + rope, generator=generator)
    latent = torch.randn(num_tokens, rank + rope, generator=generator)
    layout = layout_of([LayerKv(1, rank + rope, 0, rank)], block_size=SIZE, dtype="float32")
    memory = KvMemory(layout, 4)
    latents = Latents(weight_k, weight_v)
    parts = []
    for start, end in ((0, 5), (5, 8), (8, 9)):
        span = TokenSpan(start, end - start, (2, 0, 3)[: -(-end // SIZE)])
        step = TorchPagedAttention(
            Batch((0,) * (end - start), (span,), ()), memory.layer_views(), SIZE
        )
        key = latent[None, start:end]
        out = step.attend(
            0, latents.absorb(query[:, start:end]), key, key[..., :rank], 0.3, None, is_latent=True
        )
        parts.append(latents.expand(out))
    keys = torch.cat(
        (
            torch.einsum("hnr,tr->htn", weight_k, latent[:, :rank]),
            latent[None, :, rank:].expand(HEADS, -1, -1),
        ),
        dim=-1,
    )
    scores = torch.einsum("htd,hsd->hts", query, keys) * 0.3
    hidden = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    values = torch.einsum("hdr,sr->hsd", weight_v, latent[:, :rank])
    expected = torch.einsum("hts,hsd->thd", weights, values)
    assert torch.allclose(torch.cat(parts), expected, atol=1e-4)
