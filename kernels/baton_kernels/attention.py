"""Attention of few query tokens per sequence over the paged cache: of one token
(`decode_attention`), of the nodes of a token tree (`tree_attention`), or of a decode step from the
fused QKV projection to the attention output (`rotate_and_attend`).

Knows where numbers lie (BlockRows) and how many a sequence has; knows no model, no request and no
step. Invariant: nothing is read through a block table's entry beyond a sequence's own positions,
and nothing that is read there can reach the result. No state that a caller sees; any thread, one
Workspace (attention_plan.py) for launches that may overlap.
"""

from __future__ import annotations

import torch

from baton_kernels import attention_reference
from baton_kernels.attention_plan import Config, Rotation, Tree, Workspace
from baton_kernels.block_rows import BlockRows, Tails
from baton_kernels.dispatch import Backend, runs_triton
from baton_kernels.kv_quantization import dequantize
from baton_kernels.layer_ops import rotate_and_write


def decode_attention(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    ends: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tails: Tails | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    exact: bool = False,
    workspace: Workspace | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Compute attention of each sequence's newest token, whose key and value are in the cache
    already.

    The work is split over positions (Flash-Decoding: Dao et al., 2023); query heads of one kv head
    are computed together.

    Args:
        query: [B, H, D], any strides but the last; H a multiple of rows.num_heads.
        rows: the cache that holds keys and values.
        block_tables: [B, n] int32; entries beyond a sequence's own are never used.
        ends: [B] int32: positions that are there, the newest included; 0: padding.
        scaling: factor of the scores.
        window: a token sees itself and window - 1 before it; None: all.
        softcap: scores become softcap * tanh(score / softcap) (Gemma 2).
        sinks: [H]: one more score per head that takes weight and gives no value (gpt-oss).
        tails: unquantized blocks of a quantized cache, where the newest token's block is read.
        num_splits: most splits of a sequence; None: chosen by shapes. Ignored where `exact`.
        out: [B, H, Dv], query's dtype.
        exact: a sequence's bits depend on nothing but its own positions: not on batch-mates, table
            width or splits; and they equal those of the same token in a chunk
            (prefill_attention, exact).
        workspace: counters of the launch; None: the calling thread's own.
        config: tile sizes, for benchmarks; None: chosen by shapes.
    Returns: [B, H, Dv]; zeros for padding.
    Raises: ValueError naming the argument that does not fit.
    Bytes moved: sum(ends) * K * (D + Dv) numbers. FLOPs: 2 * sum(ends) * H * (D + Dv).
    """
    batch = query.shape[0]
    _check_query(query, rows)
    _check_ints("ends", ends, (batch,))
    _check_tables(block_tables, batch)
    _check_scores(query, window, softcap, sinks)
    _check_tails(tails, rows, batch)
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits {num_splits} is at least 1")
    out = _output(out, query, rows)
    if not runs_triton(backend, query):
        found = decode_attention_reference(
            query, rows, block_tables, ends,
            scaling=scaling, window=window, softcap=softcap, sinks=sinks, tails=tails,
        )  # fmt: skip
        return out.copy_(found)
    from baton_kernels import attention_triton

    attention_triton.launch(
        query, rows, block_tables, ends, out,
        scaling=scaling, window=window, softcap=softcap, sinks=sinks, tails=tails,
        num_splits=num_splits, exact=exact, workspace=workspace, config=config,
    )  # fmt: skip
    return out


def tree_attention(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    num_cached: torch.Tensor,
    node_starts: torch.Tensor,
    depths: torch.Tensor,
    visible: torch.Tensor,
    *,
    max_num_nodes: int,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_splits: int | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    exact: bool = False,
    is_early: bool = False,
    workspace: Workspace | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Compute attention of token trees, many sequences at once: each node sees all cached positions
    of its sequence and its own ancestors (SpecInfer's topology-aware mask, arXiv 2305.09781,
    section 4).

    The nodes of a sequence are numbered depth first, its root is node 0, and node i's key and value
    lie in slot num_cached + i of the sequence's block table (scratch slots: the accepted path is
    moved to num_cached + depth afterwards). A sequence without a tree has one node: its next token.
    A chain of nodes is a chunk: the result is that of causal attention.

    Args:
        query: [N, H, D]: the nodes of all sequences, one after the other.
        rows, scaling, softcap, sinks, num_splits, exact, workspace, config: as in
            `decode_attention`. `rows` is not quantized: nodes are raw numbers.
        block_tables: [B, n] int32; a sequence's own: those of cached positions and of its nodes.
        num_cached: [B] int32: positions before the root.
        node_starts: [B + 1] int32: sequence b's nodes are rows node_starts[b] to node_starts[b +
            1]; none: padding. Rows from node_starts[B] on are padding, too, and not written.
        depths: [N] int32: 0 for a root; a node's position is num_cached + depth.
        visible: [N, W] bool, rows dense: which nodes of its own sequence a node sees, itself
            included; W at least the number of nodes of any one.
        max_num_nodes: most nodes of a sequence, known to the host; decides the grid.
        window: a node sees ancestors and cached positions above its position - window; None: all.
        out: [N, H, Dv], query's dtype.
        is_early: all but the query, keys and values was written by no kernel of the step, and may
            be read while the launch directly ahead ends (on Hopper).
    Returns: [N, H, Dv].
    Raises: ValueError naming the argument that does not fit.
    Bytes moved: as decode_attention, once per ceil(nodes * G / 64). FLOPs: times nodes.
    """
    batch, num_nodes = num_cached.shape[0], query.shape[0]
    _check_query(query, rows)
    if rows.dtype:
        raise ValueError(
            "rows: a quantized cache holds no tree: its blocks are quantized when full"
        )
    _check_ints("num_cached", num_cached, (batch,))
    _check_tables(block_tables, batch)
    _check_ints("node_starts", node_starts, (batch + 1,))
    _check_ints("depths", depths, (num_nodes,))
    if visible.dtype != torch.bool or visible.dim() != 2 or visible.stride(1) != 1:
        raise ValueError(f"visible is [N, W] bool with dense rows, not {visible.dtype}")
    if visible.shape[0] != num_nodes or not 0 < max_num_nodes <= visible.shape[1]:
        raise ValueError(
            f"visible {tuple(visible.shape)} of {num_nodes} nodes, max_num_nodes {max_num_nodes}"
        )
    _check_scores(query, window, softcap, sinks)
    out = _output(out, query, rows)
    if not runs_triton(backend, query):
        found = tree_attention_reference(
            query, rows, block_tables, num_cached, node_starts, depths, visible,
            scaling=scaling, window=window, softcap=softcap, sinks=sinks,
        )  # fmt: skip
        return out.copy_(found)
    from baton_kernels import attention_triton

    attention_triton.launch(
        query, rows, block_tables, num_cached, out,
        scaling=scaling, window=window, softcap=softcap, sinks=sinks,
        tree=Tree(node_starts, depths, visible.view(torch.uint8)), max_num_nodes=max_num_nodes,
        num_splits=num_splits, exact=exact, workspace=workspace, config=config, is_early=is_early,
    )  # fmt: skip
    return out


# -- references


def decode_attention_reference(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    ends: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    tails: Tails | None = None,
) -> torch.Tensor:
    """Compute `decode_attention` in plain torch, on any device."""
    size = rows.block_size
    positions = torch.arange(block_tables.shape[1] * size, device=query.device)
    is_own = positions < ends[:, None]
    keys, values = sequence_kv(rows, block_tables, is_own, query.dtype)
    if tails is not None:
        for numbers, matrices in zip((keys, values), _tail_matrices(tails, rows), strict=True):
            _put_tails(numbers, matrices, tails.slots, ends, size)
        keys.masked_fill_(~is_own[:, None, :, None], 0)
        values.masked_fill_(~is_own[:, None, :, None], 0)
    mask = attention_reference.one_mask(ends, positions.shape[0], window, query.dtype)
    is_padding = (ends <= 0)[:, None, None]
    mask = mask.masked_fill(is_padding[..., None], 0)  # no row without a column: it would be NaN
    out = attention_reference.attend_one(
        query.contiguous(), keys, values, mask, scaling, softcap, sinks
    )
    return out.masked_fill(is_padding, 0)


def tree_attention_reference(
    query: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    num_cached: torch.Tensor,
    node_starts: torch.Tensor,
    depths: torch.Tensor,
    visible: torch.Tensor,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `tree_attention` in plain torch, one sequence after the other; waits for the device.
    The result is zero in rows that belong to no sequence."""
    out = query.new_zeros(*query.shape[:2], rows.v_head_dim)
    starts = node_starts.tolist()
    for index, cached in enumerate(num_cached.tolist()):
        nodes = slice(starts[index], starts[index + 1])
        num_nodes = nodes.stop - nodes.start
        if num_nodes == 0:
            continue
        end = cached + num_nodes
        num_blocks = -(-end // rows.block_size)
        is_own = torch.arange(num_blocks * rows.block_size, device=query.device) < end
        keys, values = sequence_kv(
            rows, block_tables[index, None, :num_blocks], is_own[None], query.dtype
        )
        is_seen = torch.ones(num_nodes, end, dtype=torch.bool, device=query.device)
        is_seen[:, cached:] = visible[nodes, :num_nodes]
        if window is not None:
            places = torch.cat((torch.arange(cached, device=query.device), cached + depths[nodes]))
            is_seen &= places[None, :] > places[cached:, None] - window
        out[nodes] = attention_reference.attend_chunk(
            query[nodes].transpose(0, 1),
            keys[0, :, :end],
            values[0, :, :end],
            attention_reference.as_bias(is_seen, query.dtype),
            scaling,
            softcap,
            sinks,
        )
    return out


def sequence_kv(
    rows: BlockRows, block_tables: torch.Tensor, is_own: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather the keys [B, K, n * P, D] and values [B, K, n * P, Dv] of whole sequences in `dtype`,
    with 0 where not `is_own` [B, n * P]: slots of other sequences may hold anything, NaN too."""
    found: list[torch.Tensor] = []
    ids = rows.row_ids(block_tables)
    for matrices, scales in ((rows.keys, rows.k_scales), (rows.values, rows.v_scales)):
        if matrices is None:
            found.append(found[0][..., : rows.v_head_dim])
            continue
        numbers = attention_reference.gather(matrices, ids)
        if scales is not None:
            flat = scales.index_select(0, ids.view(-1))
            numbers = numbers.view(flat.shape[0], rows.block_size, -1)
            numbers = dequantize(numbers, flat, rows.dtype, dtype)
            numbers = numbers.view(*ids.shape[:2], -1, numbers.shape[-1])
        numbers = numbers.to(dtype).masked_fill(~is_own[:, None, :, None], 0)
        found.append(numbers)
    return found[0], found[1]


def _tail_matrices(tails: Tails, rows: BlockRows) -> list[torch.Tensor]:
    """Return the unquantized blocks of `tails`, keys [B, K, P, D] and values [B, K, P, Dv], one per
    sequence. For latents (MLA) the values are columns of the keys."""
    ids = tails.rows.row_ids(tails.slots.clamp(min=0)[:, None])[:, :, 0]
    keys = tails.rows.keys[ids]
    values = keys[..., : rows.v_head_dim] if tails.rows.values is None else tails.rows.values[ids]
    return [keys, values]


def _put_tails(
    numbers: torch.Tensor,
    matrices: torch.Tensor,
    slots: torch.Tensor,
    ends: torch.Tensor,
    size: int,
) -> None:
    """Replace the last block of each sequence in `numbers` [B, K, S, D] by `matrices` [B, K, P, D]
    where `slots` has one."""
    for index in torch.nonzero((slots >= 0) & (ends > 0))[:, 0].tolist():
        start = (int(ends[index]) - 1) // size * size
        numbers[index, :, start : start + size] = matrices[index].to(numbers.dtype)


# -- checks


def _check_query(query: torch.Tensor, rows: BlockRows) -> None:
    if query.dim() != 3 or query.stride(2) != 1:
        raise ValueError(f"query is [B, H, D] with dense heads, not {tuple(query.shape)}")
    if query.shape[2] != rows.k_head_dim:
        raise ValueError(f"query has heads of {query.shape[2]}, rows of {rows.k_head_dim}")
    if query.shape[1] % rows.num_heads:
        raise ValueError(f"query has {query.shape[1]} heads, rows {rows.num_heads}")
    if not rows.dtype and rows.keys.dtype != query.dtype:
        raise ValueError(f"query is {query.dtype}, rows {rows.keys.dtype}")
    if rows.keys.device != query.device:
        raise ValueError(f"query is on {query.device}, rows on {rows.keys.device}")


def _check_ints(name: str, ints: torch.Tensor, shape: tuple[int, ...]) -> None:
    if ints.shape != shape or ints.dtype != torch.int32 or not ints.is_contiguous():
        raise ValueError(f"{name} is {shape} int32, dense, not {tuple(ints.shape)} {ints.dtype}")


def _check_tables(block_tables: torch.Tensor, batch: int) -> None:
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32:
        raise ValueError("block_tables is [B, n] int32")
    if block_tables.shape[0] != batch or block_tables.shape[1] < 1:
        raise ValueError(f"block_tables is {tuple(block_tables.shape)} for {batch} sequences")
    if block_tables.shape[1] > 1 and block_tables.stride(1) != 1:
        raise ValueError("block_tables: rows are dense")


def _check_scores(
    query: torch.Tensor, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    if window is not None and window < 1:
        raise ValueError(f"window {window} is at least 1")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap {softcap} is above 0")
    if sinks is not None and (sinks.shape != query.shape[1:2] or not sinks.is_contiguous()):
        raise ValueError(f"sinks is [{query.shape[1]}], dense, not {tuple(sinks.shape)}")


def _check_tails(tails: Tails | None, rows: BlockRows, batch: int) -> None:
    if tails is None:
        return
    _check_ints("tails.slots", tails.slots, (batch,))
    theirs = tails.rows
    if theirs.dtype or (theirs.num_heads, theirs.block_size) != (rows.num_heads, rows.block_size):
        raise ValueError("tails.rows: raw numbers, heads and block size of rows")
    if (theirs.k_head_dim, theirs.v_head_dim) != (rows.k_head_dim, rows.v_head_dim):
        raise ValueError("tails.rows: other head dims than rows")
    if theirs.is_latent != rows.is_latent:
        raise ValueError("tails.rows: latents exactly where rows are")


def _output(out: torch.Tensor | None, query: torch.Tensor, rows: BlockRows) -> torch.Tensor:
    shape = (*query.shape[:2], rows.v_head_dim)
    if out is None:
        return query.new_empty(shape)
    if out.shape != shape or out.dtype != query.dtype or out.stride(2) != 1:
        raise ValueError(f"out is {shape} {query.dtype} with dense heads, not {tuple(out.shape)}")
    return out


_MAX_GROUP = 16
"""Most query heads per kv head: more would take several programs, none of which could write the new
key and value for the others."""


def rotate_and_attend(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    *,
    num_heads: int,
    scaling: float,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
    exact: bool = False,
    workspace: Workspace | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Rotate, write to the cache and attend: `rotate_and_write`, then `decode_attention` of the
    tokens that it wrote.

    On Hopper a launch begins while the one ahead of it ends, so the kernel ahead must not write
    `positions` or `block_tables`.

    Args:
        qkv: [B, (H + 2 K) D], rows dense: the newest token of each sequence.
        positions: [B] int32: where it stands; -1: padding: nothing is written, and it gives zeros.
        cos_sin, rows, num_heads, q_norm, k_norm, norm_eps: as in `rotate_and_write`.
        block_tables: [B, n] int32; entries beyond a sequence's own are never used.
        scaling, window, softcap, sinks, out, exact, workspace, config: as in `decode_attention`.
    Returns: [B, H, D].
    Raises: ValueError naming the argument that does not fit.
    Bytes moved, FLOPs: those of decode_attention; qkv once.
    """
    if not runs_triton(backend, qkv) or exact or not _fits_one_launch(rows, num_heads):
        query = rotate_and_write(
            qkv, positions, cos_sin, rows, block_tables, num_heads=num_heads, q_norm=q_norm,
            k_norm=k_norm, norm_eps=norm_eps, backend=backend,
        )  # fmt: skip
        return decode_attention(
            query, rows, block_tables, positions + 1, scaling=scaling, window=window,
            softcap=softcap, sinks=sinks, out=out, backend=backend, exact=exact,
            workspace=workspace, config=config,
        )  # fmt: skip
    _check_rotation(qkv, positions, cos_sin, rows, block_tables, num_heads, q_norm, k_norm)
    shape = (qkv.shape[0], num_heads, rows.v_head_dim)
    if out is None:
        out = qkv.new_empty(shape)
    if out.shape != shape or out.dtype != qkv.dtype or out.stride(2) != 1:
        raise ValueError(f"out is {shape} {qkv.dtype} with dense heads, not {tuple(out.shape)}")
    if sinks is not None and (sinks.shape != (num_heads,) or not sinks.is_contiguous()):
        raise ValueError(f"sinks is [{num_heads}], dense, not {tuple(sinks.shape)}")
    from baton_kernels import attention_triton

    attention_triton.launch(
        qkv.view(qkv.shape[0], -1, rows.k_head_dim), rows, block_tables, positions, out,
        scaling=scaling, window=window, softcap=softcap, sinks=sinks, workspace=workspace,
        config=config, rotation=Rotation(cos_sin, q_norm, k_norm, norm_eps), is_early=True,
    )  # fmt: skip
    return out


def _fits_one_launch(rows: BlockRows, num_heads: int) -> bool:
    dim = rows.k_head_dim
    return (
        not rows.dtype
        and not rows.is_latent
        and dim == rows.v_head_dim
        and dim >= 16
        and dim & (dim - 1) == 0
        and num_heads <= _MAX_GROUP * rows.num_heads
    )


def _check_rotation(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> None:
    dim = rows.k_head_dim
    if qkv.dim() != 2 or qkv.stride(1) != 1 or qkv.dtype != rows.keys.dtype:
        raise ValueError(f"qkv is [B, columns] {rows.keys.dtype}, rows dense, not {qkv.dtype}")
    if qkv.shape[1] != (num_heads + 2 * rows.num_heads) * dim or num_heads % rows.num_heads:
        raise ValueError(f"qkv has {qkv.shape[1]} columns for {num_heads} heads of {dim}")
    if positions.shape != qkv.shape[:1] or positions.dtype != torch.int32:
        raise ValueError(f"positions is [{qkv.shape[0]}] int32, not {tuple(positions.shape)}")
    if cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous() or cos_sin.shape[1:] != (dim,):
        raise ValueError(f"cos_sin is [max_pos, {dim}] float32, dense")
    if block_tables.dtype != torch.int32 or block_tables.shape[:1] != qkv.shape[:1]:
        raise ValueError(f"block_tables is [{qkv.shape[0]}, n] int32")
    if block_tables.dim() != 2 or (block_tables.shape[1] > 1 and block_tables.stride(1) != 1):
        raise ValueError("block_tables: rows are dense")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: both or none")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and (norm.shape != (dim,) or not norm.is_contiguous()):
            raise ValueError(f"{name} is [{dim}], dense, not {tuple(norm.shape)}")
