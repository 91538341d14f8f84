"""Paged attention in plain torch, against attention written out over unpaged tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from engine.batch import Batch, TokenSpan
from engine.kv.layout import LayerKv, layout_of
from engine.kv.memory import KvMemory
from engine.layers.torch_attention import TorchPagedAttention
from engine.models.transformers_backend import Latents

HEADS, DIM, SIZE = 6, 8, 4
PLAIN = LayerKv(2, DIM, 2, DIM)
KINDS = {"alike": [PLAIN] * 2, "of other head counts": [LayerKv(1, 8, 1, 6), LayerKv(3, 8, 3, 6)]}
STEPS: dict[str, list[tuple[int, int, int]]] = {
    # (start, tokens, nodes of a tree behind them) of each span
    # Singles of very different lengths (so several groups), fresh prompts, chunks with a past.
    "mixed": [(start, count, 0) for start, count in
              ((0, 1), (5, 1), (0, 7), (3, 6), (8, 4), (99, 1), (11, 1), (4, 1), (60, 9))],
    "decodes": [(start, 1, 0) for start in (0, 3, 4, 18)],  # no copy of queries: one group
    "trees": [(7, 2, 0), (0, 1, 0), (59, 1, 1), (23, 3, 3), (4, 1, 7), (31, 2, 7), (8, 3, 12),
              (40, 1, 40)],
}  # fmt: skip


def _memory(layers: Sequence[LayerKv], num_blocks: int) -> KvMemory:
    return KvMemory(layout_of(layers, block_size=SIZE, dtype="float32"), num_blocks)


def _stored(part: torch.Tensor, heads: Any, block_ids: Sequence[int]) -> torch.Tensor:
    """[K, slots, dim] of a layer's keys or values in these blocks."""
    first = torch.tensor(block_ids) * heads.rows_per_block
    return part[torch.arange(heads.num_heads)[:, None] * heads.head_step + first].flatten(1, 2)


def _attended(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[H, Dv] of one token [H, D] over [K, S, D] and [K, S, Dv], written out."""
    keys, values = (one.repeat_interleave(HEADS // len(one), dim=0) for one in (keys, values))
    scores = (keys @ query[..., None])[..., 0] / math.sqrt(DIM)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    extra = scores.exp().sum(-1) + (sinks.exp() if sinks is not None else 0)
    return ((scores.exp() / extra[:, None])[:, None] @ values)[:, 0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_each_token_sees_its_own_path(
    kind: str, name: str, window: int | None, softcap: float | None, has_sinks: bool, seed: int
) -> None:
    """And is written where it belongs, in shuffled blocks; what lies in other slots is seen by no
    token."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    memory = _memory(KINDS[kind], 100)
    memory.cache.copy_(torch.randn(memory.cache.shape, generator=generator))
    sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
    free, spans = rng.sample(range(100), 100), []
    for start, trunk, num_nodes in STEPS[name]:
        end = start + trunk + num_nodes
        blocks = tuple(free.pop() for _ in range(-(-end // SIZE)))
        branches = tuple(rng.randrange(-1, node) for node in range(num_nodes))
        spans.append(TokenSpan(start, trunk + num_nodes, blocks, branches=branches))
    num_tokens = sum(span.num_tokens for span in spans)
    views = memory.layer_views()
    step = TorchPagedAttention(Batch((0,) * num_tokens, tuple(spans), ()), views, SIZE)
    for layer, (kv, view) in enumerate(zip(KINDS[kind], views, strict=True)):
        query = torch.randn(HEADS, num_tokens, DIM, generator=generator)
        key = torch.randn(kv.num_k_heads, num_tokens, DIM, generator=generator)
        value = torch.randn(kv.num_k_heads, num_tokens, kv.v_head_dim, generator=generator)
        out = step.attend(layer, query, key, value, DIM**-0.5, window, softcap, sinks)
        row = 0
        for span in spans:
            keys, values = (
                _stored(part, view.heads, span.block_ids) for part in (view.keys, view.values)
            )
            positions = [*range(span.start), *span.positions]
            for index in range(span.num_tokens):
                assert torch.equal(keys[:, span.start + index], key[:, row])
                assert torch.equal(values[:, span.start + index], value[:, row])
                slots = span.slots_seen(index)
                if window is not None:
                    first = span.positions[index] - window
                    slots = [slot for slot in slots if positions[slot] > first]
                seen = keys[:, slots], values[:, slots]
                expected = _attended(query[:, row], *seen, softcap, sinks)
                assert torch.allclose(out[row], expected, atol=1e-4), (span, index)
                row += 1


@pytest.mark.parametrize("num_spans", [1, 2])
@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_tokens_heads_lie_side_by_side(
    num_spans: int, num_tokens: int, softcap: float | None
) -> None:
    """Models of transformers look at them as one row of numbers, without a copy: of a step that is
    one group, too, and of one span."""
    memory = _memory([PLAIN], 2 * num_spans)
    memory.cache.zero_()
    spans = tuple(TokenSpan(4, num_tokens, (2 * one, 2 * one + 1)) for one in range(num_spans))
    num_rows = num_spans * num_tokens
    step = TorchPagedAttention(Batch((0,) * num_rows, spans, ()), memory.layer_views(), SIZE)
    ones = torch.ones(2, num_rows, DIM)
    out = step.attend(0, torch.ones(HEADS, num_rows, DIM), ones, ones, 1.0, None, softcap)
    assert out.view(num_rows, HEADS * DIM).isfinite().all()


def test_a_step_writes_its_own_slots_and_nothing_else_and_a_warm_up_nothing() -> None:
    memory = _memory([PLAIN] * 2, 6)
    memory.cache.fill_(7.0)
    ones = torch.ones(2, 3, DIM)
    for blocks, written in (((), set()), ((4, 1), {(4, 1, 3), (1, 1, 0), (1, 1, 1)})):
        span = TokenSpan(3 if blocks else 0, 3, blocks)
        step = TorchPagedAttention(Batch((0,) * 3, (span,), ()), memory.layer_views(), SIZE)
        step.attend(1, torch.ones(HEADS, 3, DIM), ones, ones, 1.0, None)
        changed = (memory.cache != 7.0).nonzero().tolist()
        assert {(block, layer, slot) for block, _, layer, _, slot, _ in changed} == written


def test_attention_over_latents_is_attention_over_what_they_expand_to(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    num_tokens, rank, rope, nope, dim = 9, 12, 4, 6, 5
    weight_k = torch.randn(HEADS, nope, rank, generator=generator)
    weight_v = torch.randn(HEADS, dim, rank, generator=generator)
    query = torch.randn(HEADS, num_tokens, nope + rope, generator=generator)
    latent = torch.randn(num_tokens, rank + rope, generator=generator)
    memory = _memory([LayerKv(1, rank + rope, 0, rank)], 4)
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
