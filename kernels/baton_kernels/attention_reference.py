"""Paged attention in plain torch: write KV into blocks, gather it, attend. Runs on CPU and CUDA
alike.

One layer's keys (or values) are seen as head rows, [R, P block size, D head dim]: each row is what
one head cached in one block. Every function here takes such a view, `rows`, and row numbers; the
caller knows which row belongs to which sequence, and what is padding. No state; any thread.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def write(
    rows: torch.Tensor, row_ids: torch.Tensor, slots: torch.Tensor, values: torch.Tensor
) -> None:
    """Write the keys or values of tokens into their cache slots, in place.

    Args:
        rows: [R, P, D] view of the cache; written in place.
        row_ids, slots: [K, T] int64, no pair twice.
        values: [K, T, D], the cache's dtype.
    """
    rows.index_put_((row_ids, slots), values)


def gather(
    rows: torch.Tensor, row_ids: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Gather keys or values of whole sequences, head by head.

    Args:
        rows: [R, P, D].
        row_ids: [B, K, n] int64: the n blocks of each of B sequences, padded with any valid row.
        out: where the result is written: of its shape, contiguous, the rows' dtype; None: new
            memory.
    Returns: [B, K, n * P, D], contiguous. Copies B * K * n * P * D elements once.
    """
    batch, num_heads, num_blocks = row_ids.shape
    _, block_size, dim = rows.shape
    if out is None:
        picked = rows.index_select(0, row_ids.view(-1))
        return picked.view(batch, num_heads, num_blocks * block_size, dim)
    torch.index_select(rows, 0, row_ids.view(-1), out=out.view(-1, block_size, dim))
    return out


def attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention of one token per sequence. Query heads that share a kv head become rows of
    one small matrix.

    Args:
        query: [B, H, D], H = K * G.
        keys, values: [B, K, S, D], [B, K, S, Dv].
        mask: [B, 1, 1, S] added to the scores: 0, or -inf for padding and what lies outside a
        window.
        softcap, sinks: as in `attend_capped`; sinks [H].
    Returns: [B, H, Dv].
    """
    batch, num_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.view(batch, num_kv_heads, -1, head_dim)  # [B, K, G, D]
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scaling)
    else:
        if sinks is not None:
            sinks = sinks.view(1, num_kv_heads, -1, 1)
        out = attend_capped(grouped, keys, values, mask, scaling, softcap, sinks)
    return out.reshape(batch, num_heads, values.shape[3])


def attend_chunk(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of several tokens of one sequence.

    Args:
        query: [H, T, D], H = K * G.
        keys, values: [K, S, D], [K, S, Dv], S >= T: the cached tokens and these T, in order.
        mask: [T, S] added to the scores; None: plain causal, and S == T. Not None where softcap or
        sinks are given.
        softcap, sinks: as in `attend_capped`; sinks [H].
    Returns: [T, H, Dv].
    """
    if softcap is None and sinks is None:
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
    num_heads, num_tokens, head_dim = query.shape
    grouped = query.reshape(keys.shape[0], -1, num_tokens, head_dim)  # [K, G, T, D]
    if sinks is not None:
        sinks = sinks.view(keys.shape[0], -1, 1, 1)
    out = attend_capped(grouped, keys[:, None], values[:, None], mask, scaling, softcap, sinks)
    return out.reshape(num_heads, num_tokens, -1).transpose(0, 1)


def attend_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Compute attention with softcap or sinks, which torch's scaled_dot_product_attention lacks.
    Softmax in float32.

    Args:
        query: [..., T, D]; keys, values: [..., S, D], [..., S, Dv]; mask: broadcasts to [..., T, S]
        softcap: scores become softcap * tanh(score / softcap) before the mask (Gemma 2).
        sinks: broadcasts to [..., T, 1]: one more score per row that takes weight and gives no
        value (gpt-oss).
    Returns: [..., T, Dv].
    """
    scores = torch.matmul(query, keys.transpose(-1, -2)) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
    return torch.matmul(weights[..., : values.shape[-2]], values)


def chunk_mask(
    start: int, end: int, window: int | None, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Build the additive mask of a chunk, [end - start, end]: 0 where the token at `start + row`
    may see position `column`, -inf elsewhere.

    Args:
        window: a token sees itself and window - 1 before it; None: all before it.
    """
    queries = torch.arange(start, end, device=device)[:, None]
    positions = torch.arange(end, device=device)[None, :]
    visible = positions <= queries
    if window is not None:
        visible = visible & (positions > queries - window)
    return as_bias(visible, dtype)


def one_mask(
    ends: torch.Tensor, num_positions: int, window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Build the additive mask of one token per sequence, [B, 1, 1, num_positions]: 0 where the
    newest token of sequence b (at ends[b] - 1) may see, -inf elsewhere."""
    positions = torch.arange(num_positions, device=ends.device)[None, :]
    visible = positions < ends[:, None]
    if window is not None:
        visible = visible & (positions >= ends[:, None] - window)
    return as_bias(visible, dtype)[:, None, None, :]


def as_bias(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert a boolean mask to an additive one: 0 where visible, -inf elsewhere."""
    bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return bias.masked_fill_(~visible, float("-inf"))
