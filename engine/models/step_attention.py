"""StepAttention: where one step's tokens lie in the paged cache, worked out once and used by every
layer.

Spans of one token (decodes, and prompts with one token left) are attended together, padded within
groups of similar length; longer spans one by one. Which phase a request is in plays no part. Engine
thread only; lives for one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from baton_kernels import reference

from engine.batch import Batch, Span
from engine.kv.memory import HeadRows, LayerView

_GROUP_FLOOR = 8
"""Sequences of up to this many blocks are one group: padding them costs less than another call. A
guess."""

Rows = dict[HeadRows, torch.Tensor]
"""Row numbers by how a layer's heads lie in a block: nearly always one entry."""


@dataclass
class _Group:
    """Spans of one token with about the same number of blocks."""

    places: torch.Tensor  # [B] where they lie in the batch's row
    table: torch.Tensor  # [B, n] block ids
    ends: torch.Tensor  # [B]
    gather_ids: Rows = field(default_factory=dict)  # [B, K, n]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)  # by window


@dataclass
class _Chunk:
    """A span of several tokens, or one that has no blocks."""

    first: int
    span: Span
    table: torch.Tensor | None  # [1, n] block ids; None: all it attends to is in the batch
    gather_ids: Rows = field(default_factory=dict)  # [1, K, n]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


class StepAttention:
    """See the module.

    Args:
        views: one per layer (KvMemory.layer_views).
    """

    def __init__(self, batch: Batch, views: list[LayerView], block_size: int) -> None:
        keys = views[0].keys
        self._views = views
        self._device, self._dtype = keys.device, keys.dtype
        self._block_size = block_size
        self._chunks: list[_Chunk] = []
        self._groups: list[_Group] = []
        self._new_blocks: torch.Tensor | None = None  # [T] block ids of the new tokens
        self._new_slots: torch.Tensor | None = None
        self._write_ids: dict[HeadRows, tuple[torch.Tensor, torch.Tensor]] = {}
        self._place(batch)

    def _place(self, batch: Batch) -> None:
        singles: dict[int, list[tuple[int, Span]]] = {}
        block_ids: list[int] = []
        slots: list[int] = []
        first = 0
        for span in batch.spans:
            if span.num_tokens == 1 and span.block_ids:
                singles.setdefault(size_class(span), []).append((first, span))
            else:
                table = block_table([span], self._device) if span.start > 0 else None
                self._chunks.append(_Chunk(first, span, table))
            if span.block_ids:
                for position in range(span.start, span.end):
                    block_ids.append(span.block_ids[position // self._block_size])
                    slots.append(position % self._block_size)
            first += span.num_tokens
        for members in singles.values():
            self._groups.append(
                _Group(
                    places=torch.tensor([place for place, _ in members], device=self._device),
                    table=block_table([span for _, span in members], self._device),
                    ends=torch.tensor([span.end for _, span in members], device=self._device),
                )
            )
        self._is_one_group = not self._chunks and len(self._groups) == 1
        if block_ids:  # all spans or none: a warm-up is alone in its batch
            self._new_blocks = torch.tensor(block_ids, device=self._device)
            self._new_slots = torch.tensor(slots, device=self._device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        is_latent: bool = False,
    ) -> torch.Tensor:
        """Write the new tokens' KV, then attend.

        Args:
            query: [H, T, D]; key: [K, T, D]; value: [K, T, Dv].
            softcap, sinks: see reference.attend_capped; sinks [H].
            is_latent: of no account here: the layer's view knows.
        Returns: [T, H, Dv].
        """
        view = self._views[layer]
        if key.dtype is not self._dtype:  # nobody shall see more than what is stored
            key, value = key.to(self._dtype).to(key.dtype), value.to(self._dtype).to(key.dtype)
        self._write(view, key, value)
        if self._is_one_group:
            return self._attend_group(
                self._groups[0], query.transpose(0, 1), view, scaling, window, softcap, sinks
            )
        num_heads, num_tokens, _ = query.shape
        out = query.new_empty(num_tokens, num_heads, view.v_head_dim)
        for group in self._groups:
            picked = query.index_select(1, group.places).transpose(0, 1)
            out[group.places] = self._attend_group(
                group, picked, view, scaling, window, softcap, sinks
            )
        for chunk in self._chunks:
            part = slice(chunk.first, chunk.first + chunk.span.num_tokens)
            if chunk.table is None:
                keys, values = key[:, part], value[:, part]
            else:
                keys, values = self._gather(view, chunk.table, chunk.gather_ids, query.dtype)
                keys, values = keys[0, :, : chunk.span.end], values[0, :, : chunk.span.end]
            is_plain = softcap is None and sinks is None
            mask = self._chunk_mask(chunk, window, query.dtype, is_plain=is_plain)
            out[part] = reference.attend_chunk(
                query[:, part], keys, values, mask, scaling, softcap, sinks
            )
        return out

    def _write(self, view: LayerView, key: torch.Tensor, value: torch.Tensor) -> None:
        if self._new_blocks is None or self._new_slots is None:
            return
        ids = self._write_ids.get(view.heads)
        if ids is None:
            rows = row_ids(self._new_blocks[None, :], view.heads)[0]  # [K, T]
            ids = rows, self._new_slots[None, :].expand(rows.shape).contiguous()
            self._write_ids[view.heads] = ids
        reference.write(view.keys, *ids, key.to(self._dtype))
        if view.values is not None:
            reference.write(view.values, *ids, value.to(self._dtype))

    def _gather(
        self, view: LayerView, table: torch.Tensor, gather_ids: Rows, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [B, K, S, D] and values [B, K, S, Dv] of whole sequences."""
        ids = gather_ids.get(view.heads)
        if ids is None:
            ids = gather_ids[view.heads] = row_ids(table, view.heads)
        keys = reference.gather(view.keys, ids).to(dtype)
        if view.values is None:
            return keys, keys[..., : view.v_head_dim]
        return keys, reference.gather(view.values, ids).to(dtype)

    def _attend_group(
        self,
        group: _Group,
        query: torch.Tensor,
        view: LayerView,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """[B, H, D] -> [B, H, Dv]."""
        mask = group.masks.get(window)
        if mask is None:
            num_positions = group.table.shape[1] * self._block_size
            mask = reference.one_mask(group.ends, num_positions, window, query.dtype)
            group.masks[window] = mask
        keys, values = self._gather(view, group.table, group.gather_ids, query.dtype)
        return reference.attend_one(query, keys, values, mask, scaling, softcap, sinks)

    def _chunk_mask(
        self, chunk: _Chunk, window: int | None, dtype: torch.dtype, *, is_plain: bool
    ) -> torch.Tensor | None:
        """None: plain causal, which only the plain attention has built in."""
        span = chunk.span
        if span.is_tree:
            if window not in chunk.masks:
                chunk.masks[window] = tree_mask(span, window, dtype, self._device)
            return chunk.masks[window]
        if is_plain and span.start == 0 and (window is None or window >= span.end):
            return None
        if window not in chunk.masks:
            chunk.masks[window] = reference.chunk_mask(
                span.start, span.end, window, dtype, self._device
            )
        return chunk.masks[window]


def tree_mask(
    span: Span, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[num_tokens, span.end]: 0 where a token of the span may see what lies in a slot, -inf
    elsewhere. SpecInfer's topology-aware causal mask, section 4.2.

    Args:
        window: a token sees itself and window - 1 positions before it; None: all before it.
    """
    own = torch.tensor(span.positions)
    slots = torch.arange(span.end)
    trunk = span.num_tokens - len(span.branches)
    trunk_end = span.start + trunk
    # What all nodes see; of the trunk's tokens each what lies before it.
    visible = (
        slots[None]
        < torch.clamp(span.start + 1 + torch.arange(span.num_tokens), max=trunk_end)[:, None]
    )
    for node, parent in enumerate(span.branches):
        if parent >= 0:
            visible[trunk + node, trunk_end:] = visible[trunk + parent, trunk_end:]
        visible[trunk + node, trunk_end + node] = True
    if window is not None:
        slots[span.start :] = own
        visible &= slots[None] > own[:, None] - window
    return reference.as_bias(visible.to(device), dtype)


def size_class(span: Span) -> int:
    """Spans of one class are padded to one length."""
    return max(_GROUP_FLOOR, len(span.block_ids) - 1).bit_length()


def block_table(spans: list[Span], device: torch.device) -> torch.Tensor:
    """[B, n] block ids, padded with each span's own last block, which the mask hides.

    Nobody else's: a masked score is 0 times a value, and 0 times another's NaN is NaN.
    """
    num_blocks = max(len(span.block_ids) for span in spans)
    return torch.tensor(
        [
            span.block_ids + span.block_ids[-1:] * (num_blocks - len(span.block_ids))
            for span in spans
        ],
        device=device,
    )


def row_ids(block_ids: torch.Tensor, heads: HeadRows) -> torch.Tensor:
    """[B, n] block ids -> [B, K, n] row numbers of a layer's views."""
    steps = torch.arange(heads.num_heads, device=block_ids.device) * heads.head_step
    return block_ids[:, None, :] * heads.rows_per_block + steps[None, :, None]
