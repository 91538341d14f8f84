"""TorchPagedAttention: the attention of one step over the paged cache in plain torch, on any
device; and Scratch, the memory into which keys and values are gathered on a CPU.

The places of the step's tokens in the cache are computed once and used by every layer. Short spans
(decodes, token trees, prompts with few tokens left) are attended together, padded within groups of
similar length; longer spans one by one. Prefill and decode are not distinguished otherwise. Engine
thread only.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from baton_kernels import attention_reference

from engine.batch import Batch, TokenSpan
from engine.errors import IntegrityError
from engine.kv.memory import TORCH_DTYPES, HeadRows, KvMemory, LayerView

_GROWTH = 2
_PADDING = 2
"""Largest ratio of padded to real blocks in a group of sequences, except short ones."""


@dataclass
class _Place:
    pages: torch.Tensor
    """The memory, [bytes] uint8."""
    asked_bytes: int
    """The largest number of bytes that `take` was asked for and had room for."""
    newest: torch.Tensor
    """The tensor that `take` returned last."""


class Scratch:
    """CPU memory into which a model's steps gather keys and values, layer after layer, step after
    step.

    Memory that is allocated and freed in each layer would return to the operating system and be
    zeroed and mapped again, page by page, whenever the C library trims its heap. On other devices
    the caching allocator keeps memory, so that Scratch is not used.

    Invariant (`check_integrity`): it holds at most `limit_bytes`, and at each place at most twice
    the largest size asked for there, rounded up to a page; nothing after `close`.

    Args: limit_bytes: largest size; requests beyond it get ordinary memory.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._places: dict[str, _Place] = {}
        self._is_closed = False

    @property
    def num_bytes(self) -> int:
        """Number of bytes held, pages that were not written yet included."""
        return sum(len(one.pages) for one in self._places.values())

    def take(self, place: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a contiguous tensor of this shape with undefined contents. The next call for this
        place reuses its memory."""
        one = self._places.get(place)
        if one is not None and one.newest.shape == shape and one.newest.dtype is dtype:
            return one.newest
        num_bytes = math.prod(shape) * dtype.itemsize
        if one is None or num_bytes > len(one.pages):
            one = self._grow(place, num_bytes)
        if one is None:
            return torch.empty(shape, dtype=dtype)
        one.asked_bytes = max(one.asked_bytes, num_bytes)
        one.newest = one.pages[:num_bytes].view(dtype).view(shape)
        return one.newest

    def _grow(self, place: str, num_bytes: int) -> _Place | None:
        """Enlarge a place. Returns: None if that exceeds the limit."""
        old = self._places.get(place)
        old_bytes = 0 if old is None else len(old.pages)
        room_bytes = 0 if self._is_closed else self.limit_bytes - self.num_bytes + old_bytes
        wanted_bytes = max(num_bytes, min(_GROWTH * old_bytes, room_bytes))
        if not 0 < num_bytes <= room_bytes:
            return None
        self._places.pop(place, None)  # before there are others in its stead
        pages = _pages(min(_whole_pages(wanted_bytes), room_bytes))
        one = self._places[place] = _Place(pages, num_bytes, pages[:0])
        return one

    def close(self) -> None:
        """Release all memory, which is freed with the last tensor taken. Idempotent; later calls of
        `take` return ordinary memory."""
        self._is_closed = True
        self._places.clear()

    def check_integrity(self) -> None:
        """Check the sizes. Raises: IntegrityError where the invariant does not hold."""
        if self.num_bytes > self.limit_bytes:
            raise IntegrityError(f"scratch: {self.num_bytes} bytes, beyond {self.limit_bytes}")
        if self._is_closed and self._places:
            raise IntegrityError(f"scratch: {self.num_bytes} bytes are held by a closed one")
        for name, one in self._places.items():
            most = _whole_pages(_GROWTH * one.asked_bytes)
            if not one.asked_bytes <= len(one.pages) <= most:
                raise IntegrityError(
                    f"scratch: {name} has {len(one.pages)} bytes for {one.asked_bytes}"
                )
            inside = one.pages.untyped_storage().data_ptr()
            if len(one.newest) and one.newest.untyped_storage().data_ptr() != inside:
                raise IntegrityError(f"scratch: {name} gave memory that is not its own")


def scratch_for(memory: KvMemory, dtype: str) -> Scratch | None:
    """Create the Scratch of a model that computes in `dtype` on this cache; None on devices that
    need none.

    Its limit is the padded size of one layer's keys and values for the whole cache, and at most the
    size of the cache: automatic sizing leaves a CPU that much (kv/sizing.py).
    """
    if torch.device(memory.device).type != "cpu":
        return None
    layout = memory.record
    item_bytes = TORCH_DTYPES[dtype].itemsize
    if layout.dtype != dtype:  # as stored, before as computed
        item_bytes += TORCH_DTYPES[layout.dtype].itemsize
    most = max(
        one.num_k_heads * one.k_head_dim + one.num_v_heads * one.v_head_dim for one in layout.layers
    )
    block_bytes = _PADDING * layout.block_size * most * item_bytes
    return Scratch(memory.num_blocks * min(block_bytes, layout.block_bytes))


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _pages(num_bytes: int) -> torch.Tensor:
    """Return page-aligned memory, [bytes] uint8, whose pages are committed when first written."""
    buffer = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them: slower, nothing else
            buffer.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(buffer, dtype=torch.uint8)


_GROUP_FLOOR = 8
"""Number of blocks up to which sequences form one group, since padding them costs less than another
call; guessed."""

_GROUP_TOKENS = 32
"""Number of tokens up to which spans are attended in groups; for a longer span, padding and a copy
of the queries cost more than a call of its own; guessed."""

_TOKENS_FLOOR = 8
"""Number of tokens up to which spans of 2 and more form one group, since padded rows cost less than
another call."""


class Attend(Protocol):
    """Protocol of the attention of one step, which a model's layers call."""

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
        """Write the new tokens' KV and compute one layer's attention: query [H, T, D], key [K, T,
        D], value [K, T, Dv] -> [T, H, Dv].

        Args:
            window: a token attends to itself and window - 1 tokens before it; None: to all before
                it.
            softcap, sinks: as in baton_kernels.attention_reference.attend_capped; sinks is [H].
            is_latent: `value` is the first columns of `key`, and is not stored separately.
        """
        ...


Rows = dict[HeadRows, torch.Tensor]
"""Row numbers by the layout of a layer's heads in a block; mostly one entry."""


@dataclass
class _Group:
    """Short spans with about the same number of blocks and of tokens, padded to the largest: B
    spans of n rows each."""

    spans: list[TokenSpan]
    num_rows: int  # n
    places: torch.Tensor  # [B * n] of each row in the batch; of padding, the span's last token's
    own_rows: torch.Tensor | None  # which of the B * n are no padding; None: all
    table: torch.Tensor  # [B, blocks] block ids
    gather_ids: Rows = field(default_factory=dict)  # [B, K, blocks]
    masks: dict[tuple[int | None, int], torch.Tensor] = field(default_factory=dict)
    # by window, and query heads of a kv head

    @property
    def own_places(self) -> torch.Tensor:
        """The indices of the rows that are not padding."""
        return self.places if self.own_rows is None else self.places[self.own_rows]


@dataclass
class _Chunk:
    """A span of many tokens, or one without blocks."""

    first: int
    span: TokenSpan
    table: torch.Tensor | None  # [1, n] block ids; None: all it attends to is in the batch
    gather_ids: Rows = field(default_factory=dict)  # [1, K, n]
    masks: dict[int | None, torch.Tensor] = field(default_factory=dict)


class TorchPagedAttention:
    """The attention of one step; used for one forward pass.

    Args:
        views: one per layer (KvMemory.layer_views).
        scratch: memory into which keys and values are gathered; None: new memory each time.
    """

    def __init__(
        self,
        batch: Batch,
        views: list[LayerView],
        block_size: int,
        scratch: Scratch | None = None,
    ) -> None:
        keys = views[0].keys
        self._views = views
        self._device, self._dtype = keys.device, keys.dtype
        self._block_size = block_size
        self._scratch = scratch
        self._chunks: list[_Chunk] = []
        self._groups: list[_Group] = []
        self._new_blocks: torch.Tensor | None = None  # [T] block ids of the new tokens
        self._new_slots: torch.Tensor | None = None
        self._write_ids: dict[HeadRows, tuple[torch.Tensor, torch.Tensor]] = {}
        self._place(batch)

    def _place(self, batch: Batch) -> None:
        short: dict[tuple[int, int], list[tuple[int, TokenSpan]]] = {}
        block_ids: list[int] = []
        slots: list[int] = []
        first = 0
        for span in batch.spans:
            if _is_short(span):
                kind = size_class(span), _length_class(span)
                short.setdefault(kind, []).append((first, span))
            else:
                table = block_table([span], self._device) if span.start > 0 else None
                self._chunks.append(_Chunk(first, span, table))
            if span.block_ids:
                for position in range(span.start, span.end):
                    block_ids.append(span.block_ids[position // self._block_size])
                    slots.append(position % self._block_size)
            first += span.num_tokens
        self._groups = [self._group(members) for members in short.values()]
        self._is_one_group = (
            not self._chunks and len(self._groups) == 1 and self._groups[0].own_rows is None
        )
        if block_ids:  # all spans or none: a warm-up is alone in its batch
            self._new_blocks = torch.tensor(block_ids, device=self._device)
            self._new_slots = torch.tensor(slots, device=self._device)

    def _group(self, members: list[tuple[int, TokenSpan]]) -> _Group:
        """Build a group of spans, each given with its index in the batch."""
        spans = [span for _, span in members]
        counts = np.array([span.num_tokens for span in spans])
        num_rows = int(counts.max())
        firsts = np.array([first for first, _ in members])
        steps = np.arange(num_rows)
        places = firsts[:, None] + np.minimum(steps, counts[:, None] - 1)
        own_rows: torch.Tensor | None = None
        if counts.min() < num_rows:
            is_own = steps < counts[:, None]
            own_rows = torch.from_numpy(np.flatnonzero(is_own)).to(self._device)
        return _Group(
            spans,
            num_rows,
            torch.from_numpy(places.reshape(-1)).to(self._device),
            own_rows,
            block_table(spans, self._device),
        )

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
        """Write the new tokens' KV, and compute one layer's attention.

        Args:
            query: [H, T, D]; key: [K, T, D]; value: [K, T, Dv].
            softcap, sinks: as in baton_kernels.attention_reference.attend_capped; sinks is [H].
            is_latent: ignored, since the layer's view has this information.
        Returns: [T, H, Dv], contiguous.
        """
        view = self._views[layer]
        if key.dtype is not self._dtype:  # no token sees more than what is stored
            key, value = key.to(self._dtype).to(key.dtype), value.to(self._dtype).to(key.dtype)
        self._write(view, key, value)
        if self._is_one_group:
            out = self._attend_group(self._groups[0], query, view, scaling, window, softcap, sinks)
            return out.contiguous()  # nearly always it is
        num_heads, num_tokens, _ = query.shape
        out = query.new_empty(num_tokens, num_heads, view.v_head_dim)
        for group in self._groups:
            picked = query.index_select(1, group.places)
            rows = self._attend_group(group, picked, view, scaling, window, softcap, sinks)
            if group.own_rows is not None:
                rows = rows.index_select(0, group.own_rows)
            out[group.own_places] = rows
        for chunk in self._chunks:
            part = slice(chunk.first, chunk.first + chunk.span.num_tokens)
            if chunk.table is None:
                keys, values = key[:, part], value[:, part]
            else:
                keys, values = self._gather(view, chunk.table, chunk.gather_ids, query.dtype)
                keys, values = keys[0, :, : chunk.span.end], values[0, :, : chunk.span.end]
            is_plain = softcap is None and sinks is None
            mask = self._chunk_mask(chunk, window, query.dtype, is_plain=is_plain)
            out[part] = attention_reference.attend_chunk(
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
        attention_reference.write(view.keys, *ids, key.to(self._dtype))
        if view.values is not None:
            attention_reference.write(view.values, *ids, value.to(self._dtype))

    def _gather(
        self, view: LayerView, table: torch.Tensor, gather_ids: Rows, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gather keys [B, K, S, D] and values [B, K, S, Dv] of whole sequences, valid until the
        next call."""
        ids = gather_ids.get(view.heads)
        if ids is None:
            ids = gather_ids[view.heads] = row_ids(table, view.heads)
        keys = self._gathered("keys", view.keys, ids, dtype)
        if view.values is None:
            return keys, keys[..., : view.v_head_dim]
        return keys, self._gathered("values", view.values, ids, dtype)

    def _gathered(
        self, place: str, rows: torch.Tensor, ids: torch.Tensor, dtype: torch.dtype
    ) -> torch.Tensor:
        """Gather rows into a place of the scratch, or into new memory without one."""
        if self._scratch is None:
            return attention_reference.gather(rows, ids).to(dtype)
        batch, num_heads, num_blocks = ids.shape
        shape = batch, num_heads, num_blocks * rows.shape[1], rows.shape[2]
        out = self._scratch.take(place, shape, dtype)
        if dtype is rows.dtype:
            return attention_reference.gather(rows, ids, out)
        stored = self._scratch.take("stored", shape, rows.dtype)
        return out.copy_(attention_reference.gather(rows, ids, stored))

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
        """Compute the attention of a group: [H, B * n, D] -> [B * n, H, Dv]."""
        num_spans, num_rows = len(group.spans), group.num_rows
        num_heads, _, head_dim = query.shape
        num_kv_heads = view.heads.num_heads
        share = num_heads // num_kv_heads
        mask = group.masks.get((window, share))
        if mask is None:
            num_positions = group.table.shape[1] * self._block_size
            mask = group_mask(group.spans, num_positions, window, query.dtype, self._device)
            mask = group.masks[window, share] = mask.repeat(1, 1, 1 if num_rows == 1 else share, 1)
        keys, values = self._gather(view, group.table, group.gather_ids, query.dtype)
        # The rows of a span are so many more query heads of each kv head.
        rows = query.view(num_kv_heads, share, num_spans, num_rows, head_dim)
        rows = rows.permute(2, 0, 1, 3, 4).reshape(num_spans, -1, head_dim)
        if sinks is not None:
            sinks = sinks.repeat_interleave(num_rows)
        out = attention_reference.attend_one(rows, keys, values, mask, scaling, softcap, sinks)
        out = out.view(num_spans, num_heads, num_rows, -1)
        return out.transpose(1, 2).reshape(num_spans * num_rows, num_heads, -1)

    def _chunk_mask(
        self, chunk: _Chunk, window: int | None, dtype: torch.dtype, *, is_plain: bool
    ) -> torch.Tensor | None:
        """Return the mask of a chunk; None: plain causal attention, which torch's own attention has
        built in."""
        span = chunk.span
        if is_plain and span.start == 0 and (window is None or window >= span.end):
            return None
        if window not in chunk.masks:
            chunk.masks[window] = attention_reference.chunk_mask(
                span.start, span.end, window, dtype, self._device
            )
        return chunk.masks[window]


def group_mask(
    spans: Sequence[TokenSpan],
    num_positions: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """Return the mask of a group, [B, 1, n, num_positions], where n is the largest number of tokens
    of a span: 0 where a token attends to a slot, -inf elsewhere. For token trees it is
    SpecInfer's topology-aware causal mask, section 4.2. Entries of padding are undefined.

    Args: window: a token attends to itself and window - 1 positions before it; None: to all before
        it.
    """
    num_rows = max(span.num_tokens for span in spans)
    if num_rows == 1:
        ends = torch.tensor([span.end for span in spans], device=device)
        return attention_reference.one_mask(ends, num_positions, window, dtype)
    slots = np.arange(num_positions)
    own = np.array([span.start for span in spans])[:, None] + np.arange(num_rows)
    trunk_ends = np.array([span.end - len(span.branches) for span in spans])
    # What all nodes see; of the trunk's tokens each what lies before it.
    visible = slots < np.minimum(own + 1, trunk_ends[:, None])[:, :, None]
    trees = [(row, span) for row, span in enumerate(spans) if span.branches]
    for row, span in trees:
        trunk_end = trunk_ends[row]
        nodes = visible[row, trunk_end - span.start : span.num_tokens, trunk_end : span.end]
        for node, parent in enumerate(span.branches):
            if parent >= 0:
                nodes[node] = nodes[parent]
            nodes[node, node] = True
    if window is not None:
        positions = np.tile(slots, (len(spans), 1))
        for row, span in trees:
            own[row, : span.num_tokens] = positions[row, span.start : span.end] = span.positions
        visible &= positions[:, None] > own[:, :, None] - window
    return attention_reference.as_bias(torch.from_numpy(visible).to(device), dtype)[:, None]


def _is_short(span: TokenSpan) -> bool:
    """Return whether a span is attended in a group."""
    if not span.block_ids:
        return False
    is_few = span.start > 0 and span.num_tokens <= _GROUP_TOKENS
    return is_few or span.num_tokens == 1 or span.is_tree


def _length_class(span: TokenSpan) -> int:
    """Return the class of a span's number of tokens; spans of one class are padded to the same
    number."""
    return 0 if span.num_tokens == 1 else (max(_TOKENS_FLOOR, span.num_tokens) - 1).bit_length()


def size_class(span: TokenSpan) -> int:
    """Return the class of a span's number of blocks; spans of one class are padded to the same
    number."""
    return max(_GROUP_FLOOR, len(span.block_ids) - 1).bit_length()


def block_table(spans: list[TokenSpan], device: torch.device) -> torch.Tensor:
    """Build the block table [B, n], padded with each span's own last block, which the mask hides.
    Another sequence's block must not be used: masked scores are weighted with 0, and 0 times NaN
    is NaN."""
    num_blocks = max(len(span.block_ids) for span in spans)
    return torch.tensor(
        [
            span.block_ids + span.block_ids[-1:] * (num_blocks - len(span.block_ids))
            for span in spans
        ],
        device=device,
    )


def row_ids(block_ids: torch.Tensor, heads: HeadRows) -> torch.Tensor:
    """Convert block ids [B, n] to row numbers [B, K, n] of a layer's views."""
    steps = torch.arange(heads.num_heads, device=block_ids.device) * heads.head_step
    return block_ids[:, None, :] * heads.rows_per_block + steps[None, :, None]
