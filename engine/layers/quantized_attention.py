"""QuantizedAttention: the attention of one step over a quantized cache, with the interface of
TorchPagedAttention.

A token at position p attends to quantized KV in every block before its own, and to unquantized KV
in its own block (positions p // P * P to p). So the KV that a token attends to, and the KV that is
stored of it, depend on positions alone: not on the chunks of a prompt, on prefix hits, or on other
requests of the batch. A block is quantized once, in the step that fills it (KvQuantizer); until
then its KV is unquantized in a slot of `KvMemory.tails`. Draft tokens (Span.branches) attend to the
same KV as plain ones at their place (DraftBlockVersions), and are stored only in slots of their
own: accepted ones are moved to the sequence's blocks by `UnquantizedTails.keep`.

Spans of one token are attended together, on CUDA by a kernel that reads the quantized cache; longer
ones one by one, over dequantized copies. Blocks that a step fills keep their tails until the step
is processed (engine/kv/cache_manager.py), so that a failed step can be computed again. Engine
thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from baton_kernels import attention_reference, block_rows
from baton_kernels.attention import decode_attention
from baton_kernels.kv_quantization import dequantize, quantize, scale_for

from engine.batch import Batch, TokenSpan
from engine.kv.layout import KvLayout
from engine.kv.memory import HeadRows, KvMemory, LayerView
from engine.layers.torch_attention import (
    Attend,
    TorchPagedAttention,
    block_table,
    row_ids,
    size_class,
)

# -- numbers to bytes and back


Scales = tuple[float, float | None]
"""One layer's fixed scales, of keys and of values (None for latents)."""


class KvQuantizer:
    """Quantizes KV into the cache's bytes, and dequantizes it. It knows no step and no request.

    Args:
        views: the views of `memory`, one per layer.
        fixed: the scales of each layer, if the layout has one scale per tensor.
    """

    def __init__(self, memory: KvMemory, views: list[LayerView], fixed: Sequence[Scales]) -> None:
        if memory.tails is None:
            raise ValueError("this cache is not quantized")
        self._layout = memory.layout
        self._tails = memory.tails
        self._views = views
        self._fixed = fixed

    def freeze(self, layer: int, kv: int, block_ids: torch.Tensor, numbers: torch.Tensor) -> None:
        """Quantize full blocks into the cache.

        Args:
            kv: 0: keys, 1: values.
            block_ids: [1, n].
            numbers: [K, n, P, D], unquantized.
        """
        rows, scales = self._rows(layer, kv)
        quantized, its_scales = self._quantize(layer, kv, numbers)
        ids = row_ids(block_ids, self._views[layer].heads)[0]  # [K, n]
        rows[ids] = quantized
        scales[ids] = its_scales

    def freeze_tails(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Quantize the contents of tail slots into blocks, in all layers
        (UnquantizedTails.quantize)."""
        device = self._views[0].keys.device
        blocks, tails = (torch.tensor([list(one)], device=device) for one in (block_ids, slots))
        ids: dict[HeadRows, torch.Tensor] = {}
        for layer, view in enumerate(self._tails.memory.layer_views()):
            if view.heads not in ids:
                ids[view.heads] = row_ids(tails, view.heads)[0]  # [K, n]
            for kv, numbers in enumerate((view.keys, view.values)):
                if numbers is not None:
                    self.freeze(layer, kv, blocks, numbers[ids[view.heads]])

    def read(self, layer: int, kv: int, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Dequantize blocks: row numbers [B, K, n] -> [B, K, n * P, D] in `dtype`."""
        rows, scales = self._rows(layer, kv)
        flat = ids.reshape(-1)
        found = dequantize(
            rows.index_select(0, flat), scales.index_select(0, flat), self._layout.dtype, dtype
        )
        batch, num_heads, num_blocks = ids.shape
        return found.view(batch, num_heads, num_blocks * rows.shape[1], rows.shape[2])

    def rounded(self, layer: int, kv: int, numbers: torch.Tensor) -> torch.Tensor:
        """Quantize and dequantize numbers of blocks, [K, n, P, D], without storing them."""
        pair = self._quantize(layer, kv, numbers)
        return dequantize(*pair, self._layout.dtype, numbers.dtype)

    def _quantize(
        self, layer: int, kv: int, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fixed = self._fixed[layer][kv] if self._fixed else None
        return quantize(numbers, self._layout.dtype, self._layout.num_scales, fixed)

    def _rows(self, layer: int, kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the quantized rows [rows, P, D] of a layer, and their scales [rows, scales]."""
        view = self._views[layer]
        rows, scales = (view.values, view.v_scales) if kv else (view.keys, view.k_scales)
        if rows is None or scales is None:
            raise ValueError("a quantized cache without scales")
        return rows, scales


class DraftBlockVersions:
    """The KV that draft tokens of one span attend to in a quantized cache, in one forward pass.

    A draft token attends to the same KV as any token at its position on its own path: quantized in
    earlier blocks, unquantized in its own. A block that a path fills has other numbers on each
    path, so that each version is quantized outside of the cache, for the nodes below the token that
    fills it. A draft token's KV is stored only unquantized, in slots of its own
    (engine/kv/unquantized_tails.py).

    The columns of scores after those of earlier tokens are the draft tokens, then the versions,
    `size` each.

    Args: first_computed: position of the first token whose unquantized KV is known, which is a
        block's first.
    """

    def __init__(
        self, span: TokenSpan, size: int, first_computed: int, device: torch.device
    ) -> None:
        self.num_nodes = len(span.branches)
        self._device = device
        parents = span.branches
        is_path = np.eye(self.num_nodes, dtype=bool)  # [node, itself or what is above it]
        for node, parent in enumerate(parents):
            if parent >= 0:
                is_path[node] |= is_path[parent]
        positions = np.array(span.positions[-self.num_nodes :])
        blocks = positions // size
        has_children = np.isin(np.arange(self.num_nodes), parents)
        fillers = np.flatnonzero((positions % size == size - 1) & has_children)
        sees_nodes = is_path & (blocks[:, None] == blocks[None, :])
        sees_versions = (is_path & ~np.eye(self.num_nodes, dtype=bool))[:, fillers].repeat(size, 1)
        self._sees = np.concatenate((sees_nodes, sees_versions), axis=1)
        inside = (blocks[fillers] * size)[:, None] + np.arange(size)  # [versions, P] positions
        self._positions = np.concatenate((positions, inside.reshape(-1)))
        trunk_end = span.end - self.num_nodes
        # Where the numbers of a version's tokens lie among those that are known as computed.
        places = inside - first_computed
        for row, filler in enumerate(fillers):
            own = np.flatnonzero(sees_nodes[filler])
            places[row, positions[own] % size] = trunk_end - first_computed + own
        self.num_versions = len(fillers)
        self._places = torch.from_numpy(places.reshape(-1)).to(device)

    def versions(self, computed: torch.Tensor) -> torch.Tensor:
        """Quantize the versions of blocks: KV [K, S, D] from `first_computed` on, the draft tokens
        last -> [K, versions, P, D]."""
        num_heads, _, dim = computed.shape
        picked = computed.index_select(1, self._places)
        return picked.view(num_heads, self.num_versions, -1, dim)

    def visible(self, num_tokens: int, window: int | None, positions: torch.Tensor) -> torch.Tensor:
        """Return the mask of the columns that each token of the span attends to, [T, N + versions *
        P] bool.

        Args:
            num_tokens: number of tokens of the span, T.
            positions: [T], the positions of its tokens.
        """
        visible = torch.zeros(
            (num_tokens, self._sees.shape[1]), dtype=torch.bool, device=self._device
        )
        visible[num_tokens - self.num_nodes :] = torch.from_numpy(self._sees).to(self._device)
        if window is not None:
            columns = torch.from_numpy(self._positions).to(self._device)
            visible &= columns[None, :] > positions[:, None] - window
        return visible


# -- the attention of one step


def uses_kernel(device: torch.device) -> bool:
    """Return whether spans of one token are attended by a kernel on this device."""
    return device.type == "cuda"


@dataclass
class _Chunk:
    """A span of several tokens, or one without blocks."""

    first: int
    span: TokenSpan
    start: int
    """Position from which KV is unquantized: that of the first token's block."""
    num_full: int
    """Number of the request's blocks that are full after this step; draft tokens do not count."""
    tail_in: int | None
    """Tail slot of the block in whose middle the span begins; None: it begins a block."""
    tail_out: int | None
    """Tail slot of the block that the span leaves unfilled; None: it fills its last block."""
    guesses: DraftBlockVersions | None = None
    guess_slots: torch.Tensor | None = None  # [1, n] slots that their numbers go into
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


@dataclass
class _Group:
    """Spans of one token with about the same number of blocks."""

    places: torch.Tensor  # [B] in the batch's row
    table: torch.Tensor  # [B, n] block ids
    ends: torch.Tensor  # [B]
    tails: torch.Tensor  # [B] slots of their last blocks
    full: torch.Tensor  # [F] members whose last block this token fills
    ints: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # table, ends, tails for the kernel
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


class QuantizedAttention:
    """The attention of one step; used for one forward pass.

    Args:
        views: the views of `memory`, one per layer.
        fixed: the scales of each layer, if the layout has one scale per tensor.
    """

    def __init__(
        self, batch: Batch, memory: KvMemory, views: list[LayerView], fixed: Sequence[Scales]
    ) -> None:
        if memory.tails is None:
            raise ValueError("this cache is not quantized")
        self._blocks = KvQuantizer(memory, views, fixed)
        self._views = views
        self._layout = memory.layout
        self._device = memory.cache.device
        self._tails = memory.tails
        self._tails.drop_guesses()
        self._uses_kernel = uses_kernel(self._device)
        self._chunks: list[_Chunk] = []
        self._groups: list[_Group] = []
        self._place(batch)
        self._tail_views = self._tails.memory.layer_views()  # after all were opened

    def _place(self, batch: Batch) -> None:
        singles: dict[int, list[tuple[int, TokenSpan]]] = {}
        first = 0
        for span in batch.spans:
            if span.num_tokens == 1 and span.block_ids:
                kind = 0 if self._uses_kernel else size_class(span)  # it needs no equal lengths
                singles.setdefault(kind, []).append((first, span))
            else:
                self._chunks.append(self._chunk(first, span))
            first += span.num_tokens
        for members in singles.values():
            spans = [span for _, span in members]
            size = self._layout.block_size
            slots = [self._tail(span.block_ids[-1], span.start % size) for span in spans]
            full = [index for index, span in enumerate(spans) if span.end % size == 0]
            table = block_table(spans, self._device)
            ends, tails = self._tensor([span.end for span in spans]), self._tensor(slots)
            self._groups.append(
                _Group(
                    places=self._tensor([place for place, _ in members]),
                    table=table,
                    ends=ends,
                    tails=tails,
                    full=self._tensor(full),
                    ints=(table.int(), ends.int(), tails.int()),
                )
            )

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)

    def _tail(self, block_id: int, offset: int) -> int:
        """Return the tail slot of a block for a token at `offset` in it; opens one for offset 0."""
        return self._tails.slot(block_id) if offset else self._tails.open(block_id)

    def _chunk(self, first: int, span: TokenSpan) -> _Chunk:
        if not span.block_ids:  # a warm-up: nothing is stored
            return _Chunk(first, span, 0, 0, None, None)
        size, num_nodes = self._layout.block_size, len(span.branches)
        end = span.end - num_nodes
        begun, num_full = span.start // size, end // size
        tail_in = self._tails.slot(span.block_ids[begun]) if span.start % size else None
        tail_out = None
        if end % size:
            is_begun = num_full == begun and tail_in is not None
            tail_out = tail_in if is_begun else self._tails.open(span.block_ids[num_full])
        chunk = _Chunk(first, span, begun * size, num_full, tail_in, tail_out)
        if num_nodes == 0:
            return chunk
        slots = self._tails.guess(span.block_ids[(end - 1) // size], num_nodes)
        self._tails.quantize = self._blocks.freeze_tails
        chunk.guess_slots = self._tensor(list(slots))[None]
        chunk.guesses = DraftBlockVersions(span, size, chunk.start, self._device)
        return chunk

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
        """Store the new tokens' KV and compute one layer's attention: query [H, T, D], key [K, T,
        D], value [K, T, Dv] -> [T, H, Dv]."""
        num_heads, num_tokens, _ = query.shape
        out = query.new_empty(num_tokens, num_heads, self._views[layer].v_head_dim)
        for group in self._groups:
            picked = query.index_select(1, group.places).transpose(0, 1)
            if self._uses_kernel:
                out[group.places] = self._attend_by_kernel(
                    group, layer, picked, key, value, scaling, window, softcap, sinks
                )
                continue
            keys, values = self._group_kv(group, layer, key, value)
            mask = group.masks.get(window)
            if mask is None:
                mask = attention_reference.one_mask(group.ends, keys.shape[2], window, query.dtype)
                group.masks[window] = mask
            out[group.places] = attention_reference.attend_one(
                picked, keys, values, mask, scaling, softcap, sinks
            )
        for chunk in self._chunks:
            part = slice(chunk.first, chunk.first + chunk.span.num_tokens)
            keys, values = self._chunk_kv(chunk, layer, key[:, part], value[:, part])
            mask = chunk.masks.get(window)
            if mask is None:
                mask = self._mask(chunk, keys.shape[1], window, query.dtype)
                chunk.masks[window] = mask
            out[part] = attention_reference.attend_chunk(
                query[:, part], keys, values, mask, scaling, softcap, sinks
            )
        return out

    # -- one token each

    def _attend_by_kernel(
        self,
        group: _Group,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the attention of a group with the kernel: [B, H, D] -> [B, H, Dv]."""
        view, tail = self._views[layer], self._tail_views[layer]
        self._store(group, layer, 0, tail.keys, key)
        if tail.values is not None:
            self._store(group, layer, 1, tail.values, value)
        table, ends, tails = group.ints
        return decode_attention(
            query,
            view.block_rows(self._layout.dtype),
            table,
            ends,
            scaling=scaling,
            window=window,
            softcap=softcap,
            sinks=sinks,
            tails=block_rows.Tails(tail.block_rows(""), tails),
        )

    def _group_kv(
        self, group: _Group, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [B, K, S, D] and values of whole sequences, for their newest tokens."""
        tail = self._tail_views[layer]
        keys = self._grouped(group, layer, 0, tail.keys, key)
        if tail.values is None:
            return keys, keys[..., : tail.v_head_dim]
        return keys, self._grouped(group, layer, 1, tail.values, value)

    def _grouped(
        self,
        group: _Group,
        layer: int,
        kv: int,
        tail_rows: torch.Tensor,
        new: torch.Tensor,
    ) -> torch.Tensor:
        """Store the new tokens [K, T, D], and return the KV of whole sequences, [B, K, S, D], with
        the last block unquantized."""
        size, heads = self._layout.block_size, self._views[layer].heads
        tails = self._store(group, layer, kv, tail_rows, new)
        found = self._blocks.read(layer, kv, row_ids(group.table, heads), new.dtype)
        last = torch.div(group.ends - 1, size, rounding_mode="floor")  # [B] index of the last block
        columns = last[:, None] * size + torch.arange(size, device=self._device)  # [B, P]
        index = columns[:, None, :, None].expand(tails.shape)
        return found.scatter_(2, index, tails)

    def _store(
        self,
        group: _Group,
        layer: int,
        kv: int,
        tail_rows: torch.Tensor,
        new: torch.Tensor,
    ) -> torch.Tensor:
        """Write the new tokens [K, T, D] to their tails, and quantize tails that are full. Returns:
        the tails, [B, K, P, D]."""
        size = self._layout.block_size
        tail_heads = self._tail_views[layer].heads
        ids = row_ids(group.tails[:, None], tail_heads)[:, :, 0]  # [B, K]
        offsets = ((group.ends - 1) % size)[:, None].expand(ids.shape)
        tail_rows.index_put_((ids, offsets), new.index_select(1, group.places).transpose(0, 1))
        tails = tail_rows.index_select(0, ids.reshape(-1)).view(*ids.shape, size, -1)
        if group.full.numel():
            last = torch.div(group.ends - 1, size, rounding_mode="floor")  # [B] of the last block
            block_ids = group.table[group.full, last[group.full]]
            full = tails[group.full].transpose(0, 1)
            self._blocks.freeze(layer, kv, block_ids[None, :], full)
        return tails

    # -- several tokens of one request

    def _chunk_kv(
        self, chunk: _Chunk, layer: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys [K, S, D] and values: all full blocks dequantized, then the tokens from
        `chunk.start` on unquantized, then the dequantized versions of blocks that draft tokens
        fill."""
        tail = self._tail_views[layer]
        keys = self._chunked(chunk, layer, 0, tail.keys, key)
        if tail.values is None:
            return keys, keys[..., : tail.v_head_dim]
        return keys, self._chunked(chunk, layer, 1, tail.values, value)

    def _chunked(
        self,
        chunk: _Chunk,
        layer: int,
        kv: int,
        tail_rows: torch.Tensor,
        new: torch.Tensor,
    ) -> torch.Tensor:
        if not chunk.span.block_ids:
            return new
        size, span = self._layout.block_size, chunk.span
        heads, tail_heads = self._views[layer].heads, self._tail_views[layer].heads
        computed = new
        if chunk.tail_in is not None:
            ids = row_ids(self._tensor([chunk.tail_in])[None], tail_heads)[0, :, 0]  # [K]
            computed = torch.cat((tail_rows[ids][:, : span.start - chunk.start], new), dim=1)
        block_ids = self._tensor(list(span.block_ids[: chunk.num_full]))[None, :]
        num_new = chunk.num_full - chunk.start // size
        if num_new > 0:
            full = computed[:, : num_new * size].reshape(new.shape[0], num_new, size, -1)
            self._blocks.freeze(layer, kv, block_ids[:, -num_new:], full)
        num_known = computed.shape[1] - len(span.branches)
        if chunk.tail_out is not None:
            rest = computed[:, max(0, num_new) * size : num_known]
            ids = row_ids(self._tensor([chunk.tail_out])[None], tail_heads)[0, :, 0]
            tail_rows[ids, : rest.shape[1]] = rest
        columns = [computed]
        if chunk.num_full > 0:
            ids = row_ids(block_ids, heads)
            columns.insert(0, self._blocks.read(layer, kv, ids, new.dtype)[0])
        if chunk.guesses is not None and chunk.guess_slots is not None:
            slots = row_ids(chunk.guess_slots, tail_heads)[0]  # [K, n]
            nodes = torch.arange(len(span.branches), device=self._device)
            offsets = (nodes % size).expand(slots.shape[0], -1)
            tail_rows.index_put_((slots[:, nodes // size], offsets), computed[:, num_known:])
            if chunk.guesses.num_versions:
                versions = chunk.guesses.versions(computed)
                columns.append(self._blocks.rounded(layer, kv, versions).flatten(1, 2))
        return torch.cat(columns, dim=1)

    def _mask(
        self, chunk: _Chunk, num_columns: int, window: int | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the mask [T, S] of the columns of `_chunk_kv`: dequantized columns of earlier
        blocks, unquantized ones of the same block."""
        size, span, guesses = self._layout.block_size, chunk.span, chunk.guesses
        if not span.block_ids:
            return attention_reference.chunk_mask(0, span.end, window, dtype, self._device)
        queries = torch.arange(span.start, span.end, device=self._device)[:, None]
        of_guesses: list[torch.Tensor] = []
        if guesses is not None:
            queries = self._tensor(span.positions)[:, None]
            of_guesses = [guesses.visible(span.num_tokens, window, queries[:, 0])]
            num_columns -= of_guesses[0].shape[1]
        num_quantized = chunk.num_full * size
        positions = torch.arange(num_columns, device=self._device)[None, :]
        is_quantized = positions < num_quantized
        positions = torch.where(is_quantized, positions, positions - num_quantized + chunk.start)
        block_start = queries // size * size
        visible = torch.where(
            is_quantized,
            positions < block_start,
            (positions >= block_start) & (positions <= queries),
        )
        if window is not None:
            visible &= positions > queries - window
        return attention_reference.as_bias(torch.cat([visible, *of_guesses], dim=1), dtype)


# -- fixed scales


_NUM_CALIBRATION_TOKENS = 128
_HEADROOM = 1.25
"""Factor of the greatest number of the calibration prompt, since other prompts may exceed it;
numbers beyond are clamped; guessed."""


class _Greatest:
    """An Attend that computes as TorchPagedAttention does, and records the greatest key and value
    of each layer."""

    def __init__(self, step: TorchPagedAttention, num_layers: int) -> None:
        self._step = step
        self.found: list[tuple[torch.Tensor, torch.Tensor | None]] = [
            (torch.zeros(()), None)
        ] * num_layers

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
        """Record the greatest key and value, and compute one layer's attention: [T, H, Dv]."""
        self.found[layer] = (key.abs().max(), None if is_latent else value.abs().max())
        return self._step.attend(
            layer, query, key, value, scaling, window, softcap, sinks, is_latent
        )


@torch.inference_mode()
def calibrate_scales(
    forward: Callable[[Batch, Attend], object],
    layout: KvLayout,
    *,
    vocab_size: int,
    num_positions: int | None,
    device: str,
) -> tuple[Scales, ...]:
    """Find the fixed scales, one for all keys and one for all values of each layer, from the
    greatest numbers of a fixed prompt.

    The prompt depends on the vocabulary size and the number of positions alone, so that every start
    of a model finds the same scales.

    Args:
        forward: computes a batch with the model and the given attention.
        num_positions: the number of positions that the model was made for; None: unlimited.
    """
    num_tokens = min(_NUM_CALIBRATION_TOKENS, num_positions or _NUM_CALIBRATION_TOKENS)
    token_ids = tuple((7919 * i + 17) % vocab_size for i in range(num_tokens))
    batch = Batch(token_ids, (TokenSpan(0, num_tokens, ()),), (num_tokens - 1,))
    memory = KvMemory(layout.raw, 1, device)  # of which nothing is used
    step = TorchPagedAttention(batch, memory.layer_views(), layout.block_size)
    greatest = _Greatest(step, layout.num_layers)
    forward(batch, greatest)
    return tuple(
        (
            float(scale_for(keys * _HEADROOM, layout.dtype)),
            None if values is None else float(scale_for(values * _HEADROOM, layout.dtype)),
        )
        for keys, values in greatest.found
    )
