"""StepAttention: where one step's tokens lie in the paged cache, worked out once and used by every
layer.

Spans of one token (decodes, and prompts with one token left) are attended together, padded within
groups of similar length; longer spans one by one. Which phase a request is in plays no part. Engine
thread only; lives for one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from baton_kernels import reference

from engine.batch import Batch, Span

_GROUP_FLOOR = 8
"""Sequences of up to this many blocks are one group: padding them costs less than another call. A
guess."""


@dataclass
class _Group:
    """Spans of one token with about the same number of blocks."""

    rows: torch.Tensor  # [B] where they lie in the batch's row
    gather_ids: torch.Tensor  # [B, K, n]
    ends: torch.Tensor  # [B]
    masks: dict[int | None, torch.Tensor]  # by window


@dataclass
class _Chunk:
    """A span of several tokens, or one that has no blocks."""

    first: int
    span: Span
    gather_ids: torch.Tensor | None  # [1, K, n]; None: all it attends to is in the batch
    masks: dict[int | None, torch.Tensor | None]


class StepAttention:
    """See the module.

    Args:
        views: per layer (keys, values), each [N * K, P, D] of the cache.
    """

    def __init__(
        self,
        batch: Batch,
        views: list[tuple[torch.Tensor, torch.Tensor]],
        num_kv_heads: int,
        block_size: int,
    ) -> None:
        keys = views[0][0]
        self._views = views
        self._device, self._dtype = keys.device, keys.dtype
        self._heads = torch.arange(num_kv_heads)
        self._num_kv_heads = num_kv_heads
        self._block_size = block_size
        self._chunks: list[_Chunk] = []
        self._groups: list[_Group] = []
        self._write_ids: tuple[torch.Tensor, torch.Tensor] | None = None
        self._place(batch)

    def _place(self, batch: Batch) -> None:
        singles: dict[int, list[tuple[int, Span]]] = {}
        block_ids: list[int] = []
        slots: list[int] = []
        first = 0
        for span in batch.spans:
            if span.num_tokens == 1 and span.block_ids:
                size_class = max(_GROUP_FLOOR, len(span.block_ids) - 1).bit_length()
                singles.setdefault(size_class, []).append((first, span))
            else:
                ids = self._gather_ids([span]) if span.start > 0 else None
                self._chunks.append(_Chunk(first, span, ids, {}))
            if span.block_ids:
                for position in range(span.start, span.end):
                    block_ids.append(span.block_ids[position // self._block_size])
                    slots.append(position % self._block_size)
            first += span.num_tokens
        for members in singles.values():
            self._groups.append(
                _Group(
                    rows=torch.tensor([row for row, _ in members], device=self._device),
                    gather_ids=self._gather_ids([span for _, span in members]),
                    ends=torch.tensor([span.end for _, span in members], device=self._device),
                    masks={},
                )
            )
        self._is_one_group = not self._chunks and len(self._groups) == 1
        if block_ids:  # all spans or none: a warm-up is alone in its batch
            row_ids = torch.tensor(block_ids)[None, :] * self._num_kv_heads + self._heads[:, None]
            offsets = torch.tensor(slots)[None, :].expand(self._num_kv_heads, -1).contiguous()
            self._write_ids = (row_ids.to(self._device), offsets.to(self._device))

    def _gather_ids(self, spans: list[Span]) -> torch.Tensor:
        """[B, K, n] head rows, padded with each span's own last block, which the mask hides.

        Nobody else's: a masked score is 0 times a value, and 0 times another's NaN is NaN.
        """
        num_blocks = max(len(span.block_ids) for span in spans)
        table = torch.tensor(
            [
                span.block_ids + span.block_ids[-1:] * (num_blocks - len(span.block_ids))
                for span in spans
            ]
        )
        ids = table[:, None, :] * self._num_kv_heads + self._heads[None, :, None]
        return ids.to(self._device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """Write the new tokens' KV, then attend.

        Args:
            query: [H, T, D]; key, value: [K, T, D].
        Returns: [T, H, D].
        """
        keys, values = self._views[layer]
        if self._write_ids is not None:
            reference.write(keys, *self._write_ids, key)
            reference.write(values, *self._write_ids, value)
        if self._is_one_group:
            return self._attend_group(
                self._groups[0], query.transpose(0, 1), keys, values, scaling, window
            )
        num_heads, num_tokens, head_dim = query.shape
        out = query.new_empty(num_tokens, num_heads, head_dim)
        for group in self._groups:
            picked = query.index_select(1, group.rows).transpose(0, 1)
            out[group.rows] = self._attend_group(group, picked, keys, values, scaling, window)
        for chunk in self._chunks:
            part = slice(chunk.first, chunk.first + chunk.span.num_tokens)
            mask = self._chunk_mask(chunk, window)
            if chunk.gather_ids is None:
                all_keys, all_values = key[:, part], value[:, part]
            else:
                end = chunk.span.end
                all_keys = reference.gather(keys, chunk.gather_ids)[0, :, :end]
                all_values = reference.gather(values, chunk.gather_ids)[0, :, :end]
            out[part] = reference.attend_chunk(query[:, part], all_keys, all_values, mask, scaling)
        return out

    def _attend_group(
        self,
        group: _Group,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scaling: float,
        window: int | None,
    ) -> torch.Tensor:
        """[B, H, D] -> [B, H, D]."""
        mask = group.masks.get(window)
        if mask is None:
            num_positions = group.gather_ids.shape[2] * self._block_size
            mask = reference.one_mask(group.ends, num_positions, window, self._dtype)
            group.masks[window] = mask
        return reference.attend_one(
            query,
            reference.gather(keys, group.gather_ids),
            reference.gather(values, group.gather_ids),
            mask,
            scaling,
        )

    def _chunk_mask(self, chunk: _Chunk, window: int | None) -> torch.Tensor | None:
        span = chunk.span
        if span.start == 0 and (window is None or window >= span.end):
            return None
        if window not in chunk.masks:
            chunk.masks[window] = reference.chunk_mask(
                span.start, span.end, window, self._dtype, self._device
            )
        return chunk.masks[window]
