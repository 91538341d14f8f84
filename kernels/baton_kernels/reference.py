"""Paged attention in plain torch: write KV into blocks, gather it, attend. Runs on CPU and CUDA
alike.

The cache is [N blocks, K kv heads, L layers, 2, P block size, D head dim]. One layer's keys (or
values) are seen as head rows, [N * K, P, D]: row b * K + k is what head k cached in block b. Every
function here takes such a view, `rows`, and row numbers; which block belongs to whom, and what is
padding, is the caller's knowledge. No state; any thread.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def head_rows(cache: torch.Tensor, layer: int, kv: int) -> torch.Tensor:
    """One layer's keys (kv=0) or values (kv=1) as [N * K, P, D], a view."""
    num_blocks, num_heads, num_layers, _, block_size, head_dim = cache.shape
    flat = cache.view(num_blocks * num_heads, num_layers, 2, block_size, head_dim)
    return flat[:, layer, kv]


def write(
    rows: torch.Tensor, row_ids: torch.Tensor, slots: torch.Tensor, values: torch.Tensor
) -> None:
    """Put tokens' keys or values into their slots.

    Args:
        rows: [N * K, P, D] view of the cache; written in place.
        row_ids, slots: [K, T] int64, no pair twice.
        values: [K, T, D], the cache's dtype.
    """
    rows.index_put_((row_ids, slots), values)


def gather(rows: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
    """Keys or values of whole sequences, head by head.

    Args:
        rows: [N * K, P, D].
        row_ids: [B, K, n] int64: the n blocks of each of B sequences, padded with any valid row.
    Returns: [B, K, n * P, D], contiguous. Copies B * K * n * P * D elements once.
    """
    batch, num_heads, num_blocks = row_ids.shape
    picked = rows.index_select(0, row_ids.view(-1))
    return picked.view(batch, num_heads, num_blocks * rows.shape[1], rows.shape[2])


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Attention of one token per sequence. Query heads that share a kv head become rows of one
    small matrix.

    Args:
        query: [B, H, D], H = K * G.
        keys, values: [B, K, S, D].
        mask: [B, 1, 1, S] added to the scores: 0, or -inf for padding and what lies outside a
        window.
    Returns: [B, H, D].
    """
    batch, num_heads, head_dim = query.shape
    grouped = query.view(batch, keys.shape[1], -1, head_dim)  # [B, K, G, D]
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    return out.reshape(batch, num_heads, head_dim)


def attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
) -> torch.Tensor:
    """Attention of several tokens of one sequence, causal.

    Args:
        query: [H, T, D], H = K * G.
        keys, values: [K, S, D], S >= T: the cached tokens and these T, in order.
        mask: [T, S] added to the scores; None: plain causal, and S == T.
    Returns: [T, H, D].
    """
    out = scaled_dot_product_attention(
        query[None],
        keys[None],
        values[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[0] != keys.shape[0],
    )
    return out[0].transpose(0, 1)


def chunk_mask(
    start: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[end - start, end]: 0 where the token at `start + row` may see position `column`, -inf
    elsewhere.

    Args:
        window: a token sees itself and window - 1 before it; None: all before it.
    """
    queries = torch.arange(start, end, device=device)[:, None]
    positions = torch.arange(end, device=device)[None, :]
    visible = positions <= queries
    if window is not None:
        visible = visible & (positions > queries - window)
    return _as_bias(visible, dtype)


def one_mask(
    ends: torch.Tensor, num_positions: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """[B, 1, 1, num_positions]: 0 where the newest token of sequence b (at ends[b] - 1) may see,
    -inf elsewhere."""
    positions = torch.arange(num_positions, device=ends.device)[None, :]
    visible = positions < ends[:, None]
    if window is not None:
        visible = visible & (positions >= ends[:, None] - window)
    return _as_bias(visible, dtype)[:, None, None, :]


def _as_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))
