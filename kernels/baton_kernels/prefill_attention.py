"""Attention of several new tokens per sequence over what the cache holds of it and over one
another: prompts, and chunks of prompts after a cached prefix.

Three versions on CUDA, all of which read the paged cache and nothing else: one in a Hopper GPU's
own instructions for plain causal attention, one in Triton for all other cases and GPUs, and one for
exact mode. Knows no model and no request. No state; any thread.
"""

from __future__ import annotations

import torch

from baton_kernels import attention_reference
from baton_kernels.block_rows import BlockRows
from baton_kernels.dispatch import Backend, runs_triton
from baton_kernels.layer_ops import check_tables


def prefill_attention(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    *,
    max_query_len: int,
    max_end: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    exact: bool = False,
) -> torch.Tensor:
    """Compute causal attention of new tokens, several sequences in one batch.

    Args:
        query: [T, H, D], H = K * G, head numbers dense.
        rows: the cache, which holds the new tokens' keys and values already; not quantized, the
            query's dtype.
        block_tables: [B, n] int32; entries beyond a sequence's end are never followed.
        query_starts: [B + 1] int32: sequence b has rows query_starts[b] to query_starts[b + 1].
        starts: [B] int32: tokens of each sequence that were in the cache before.
        max_query_len, max_end: at least the most new tokens, and the greatest end (start + new
            tokens), of a sequence.
        window: a token sees itself and window - 1 before it; None: all before it.
        softcap, sinks [H]: as in `reference.attend_capped`.
        out: [T, H, Dv], head numbers dense; rows that belong to no sequence are not written.
        exact: a row has the same bits whatever chunk it comes in and whatever else is in the batch,
            and those of decode_attention's exact mode.
    Returns: [T, H, Dv].
    Raises: ValueError naming what does not fit.
    """
    _check(query, rows, block_tables, query_starts, starts, sinks)
    shape = (*query.shape[:2], rows.v_head_dim)
    if out is not None and (out.shape != shape or out.dtype != query.dtype or out.stride(2) != 1):
        raise ValueError(f"out is {shape} {query.dtype}, not {tuple(out.shape)} {out.dtype}")
    if not runs_triton(backend, query):
        return _by_reference(
            query, rows, block_tables, query_starts, starts, scaling, window, softcap, sinks,
            query.new_empty(shape) if out is None else out,
        )  # fmt: skip
    out = query.new_empty(shape) if out is None else out
    if exact:
        from baton_kernels import prefill_attention_triton

        prefill_attention_triton.exact_prefill_attention(
            query, rows, block_tables, query_starts, starts, out, max_query_len=max_query_len,
            scaling=scaling, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return out
    from baton_kernels import hopper_support, prefill_attention_triton

    is_plain = (window is None or window >= max_end) and softcap is None and sinks is None
    if is_plain and hopper_support.can_run(query, rows):
        from baton_kernels import prefill_attention_hopper

        prefill_attention_hopper.prefill_attention(
            query, rows, block_tables, query_starts, starts, max_query_len, scaling, out
        )
        return out
    prefill_attention_triton.prefill_attention(
        query, rows, block_tables, query_starts, starts, max_query_len, scaling, window, softcap,
        sinks, out,
    )  # fmt: skip
    return out


def prefill_attention_reference(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute causal attention of one sequence's new tokens in plain torch. query: [T, H, D]; keys
    [K, start + T, D] and values [K, start + T, Dv] of all its tokens. Returns: [T, H, Dv] in the
    query's dtype, computed in float32 (in float64 where the query is)."""
    wide = torch.promote_types(query.dtype, torch.float32)
    end = start + query.shape[0]
    mask = attention_reference.chunk_mask(start, end, window, wide, query.device)
    return attention_reference.attend_chunk(
        query.to(wide).transpose(0, 1), keys.to(wide), values.to(wide), mask, scaling, softcap,
        None if sinks is None else sinks.to(wide),
    ).to(query.dtype)  # fmt: skip


def _by_reference(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    scaling: float,
    window: int | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> torch.Tensor:
    firsts = query_starts.tolist()
    for index, start in enumerate(starts.tolist()):
        part = slice(firsts[index], firsts[index + 1])
        count = part.stop - part.start
        if count == 0:
            continue
        keys, values = sequence_rows(rows, block_tables[index], start + count)
        out[part] = prefill_attention_reference(
            query[part], keys, values, start, scaling, window, softcap, sinks
        )
    return out


def sequence_rows(
    rows: BlockRows, block_table: torch.Tensor, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy the keys [K, end, D] and values [K, end, Dv] of one sequence out of the cache."""
    num_blocks = -(-end // rows.block_size)
    ids = rows.row_ids(block_table[:num_blocks])[None]  # [1, K, n]
    keys = attention_reference.gather(rows.keys, ids)[0, :, :end]
    if rows.values is None:
        return keys, keys[..., : rows.v_head_dim]
    return keys, attention_reference.gather(rows.values, ids)[0, :, :end]


def _check(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    starts: torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    if rows.dtype:
        raise ValueError(f"rows: a cache of {rows.dtype} is not read here")
    if query.dim() != 3 or query.stride(2) != 1 or query.shape[2] != rows.k_head_dim:
        raise ValueError(f"query is [T, H, {rows.k_head_dim}], not {tuple(query.shape)}")
    if query.dtype != rows.keys.dtype:
        raise ValueError(f"query is {query.dtype}, the cache {rows.keys.dtype}")
    num_heads = query.shape[1]
    if num_heads % rows.num_heads:
        raise ValueError(f"query has {num_heads} heads for {rows.num_heads} kv heads")
    check_tables(block_tables)
    num_sequences = starts.shape[0]
    if block_tables.shape[0] != num_sequences:
        raise ValueError(f"block_tables has {block_tables.shape[0]} rows, starts {num_sequences}")
    for name, x, count in (
        ("starts", starts, num_sequences),
        ("query_starts", query_starts, num_sequences + 1),
    ):
        if x.shape != (count,) or x.dtype != torch.int32 or not x.is_contiguous():
            raise ValueError(f"{name} is [{count}] int32, not {tuple(x.shape)} {x.dtype}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise ValueError(f"sinks is [{num_heads}], not {tuple(sinks.shape)}")
