"""Operations between a layer's matrix products: RMSNorm, SwiGLU, QK-norm, RoPE and the
write of new keys and values into the cache.

Each is one pass over its input. Computed in float32, rounded once, at the end. Knows no model and
no request. Invariant: a row's result has the same bits whatever the number of rows, so these need
no `exact` mode. No state; any thread.
"""

from __future__ import annotations

import torch

from baton_kernels.block_rows import BlockRows
from baton_kernels.dispatch import Backend, runs_triton


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Compute RMSNorm row by row: x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).

    Args:
        x: [T, N], rows dense.
        weight: [N].
        out: [T, N], x's dtype; may be `x`.
    Returns: [T, N].
    Raises: ValueError naming what does not fit.
    """
    _check_rows("x", x, (None, None))
    _check_weight(weight, x)
    out = _given("out", out, x)
    if not runs_triton(backend, x):
        return out.copy_(rms_norm_reference(x, weight, eps))
    from baton_kernels import layer_ops_triton

    layer_ops_triton.rms_norm(x, weight, eps, out)
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute `rms_norm` in plain torch, over the last dimension of x with any leading
    dimensions."""
    numbers = x.float()
    scale = torch.rsqrt(numbers.square().mean(dim=-1, keepdim=True) + eps)
    return (numbers * scale * weight.float()).to(x.dtype)


def silu_mul(
    gate_up: torch.Tensor, *, out: torch.Tensor | None = None, backend: Backend = "auto"
) -> torch.Tensor:
    """Compute silu(gate) * up (SwiGLU: Shazeer, 2020).

    Args:
        gate_up: [T, 2 I], gate columns then up columns; rows dense.
        out: [T, I].
    Returns: [T, I].
    Raises: ValueError naming what does not fit.
    """
    _check_rows("gate_up", gate_up, (None, None))
    if gate_up.shape[1] % 2:
        raise ValueError(f"gate_up has {gate_up.shape[1]} columns: not two halves")
    out = _given("out", out, gate_up[:, : gate_up.shape[1] // 2])
    if not runs_triton(backend, gate_up):
        return out.copy_(silu_mul_reference(gate_up))
    from baton_kernels import layer_ops_triton

    layer_ops_triton.silu_mul(gate_up, out)
    return out


def silu_mul_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute `silu_mul` in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)


def rotate_and_write(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rows: BlockRows | None,
    block_tables: torch.Tensor | None,
    sequence_ids: torch.Tensor | None = None,
    *,
    num_heads: int,
    slots: torch.Tensor | None = None,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
    out_q: torch.Tensor | None = None,
    out_k: torch.Tensor | None = None,
    out_v: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Apply QK-norm where given and RoPE (half-split: Su et al., 2021, as Llama lays it out), and
    write keys and values into the cache.

    Args:
        qkv: [T, (H + 2 K) D], rows dense: query heads, key heads, value heads.
        positions: [T] int32, below cos_sin's rows; -1: padding: nothing is written for it, and what
            is returned of it is zero.
        cos_sin: [max_pos, D] float32, dense: D / 2 cosines, then D / 2 sines.
        rows: the cache if it is not quantized, or the tails of one that is; None: no write.
        block_tables: [B, n] int32; None with `rows`.
        sequence_ids: [T] int32, the block table's row of each token; None: token i is of row i.
        num_heads: H.
        slots: [T] int32: where in its sequence's blocks each token's key and value go, ignored
            where the position is -1; None: at its position. Nodes of a token tree share positions.
        q_norm, k_norm: [D] weights of an RMSNorm over each head, both or none.
        norm_eps: epsilon of that norm.
        out_q: [T, H, D], rows dense.
        out_k, out_v: [T, K, D], dense, qkv's dtype: where given, the rotated keys, and the values
            (which stand in qkv as they are, but for padding), are put there, too.
    Returns: [T, H, D] rotated queries, qkv's dtype.
    Raises: ValueError naming what does not fit.
    """
    num_kv_heads = _check_rotation(
        qkv, positions, cos_sin, rows, block_tables, sequence_ids, num_heads, q_norm, k_norm
    )
    if slots is not None:
        _check_ids("slots", slots, qkv.shape[0])
    num_tokens, head_dim = qkv.shape[0], cos_sin.shape[1]
    if out_q is None:
        out_q = qkv.new_empty(num_tokens, num_heads, head_dim)
    _check_out("out_q", out_q, (num_tokens, num_heads, head_dim), qkv)
    for name, given in (("out_k", out_k), ("out_v", out_v)):
        if given is not None:
            _check_out(name, given, (num_tokens, num_kv_heads, head_dim), qkv)
    if runs_triton(backend, qkv):
        from baton_kernels import layer_ops_triton

        layer_ops_triton.rotate_and_write(
            qkv, positions, cos_sin, rows, block_tables, sequence_ids, slots,
            q_norm, k_norm, norm_eps, out_q, out_k, out_v,
        )  # fmt: skip
        return out_q
    query, key, value = rotate_reference(
        qkv, positions, cos_sin, num_heads=num_heads, q_norm=q_norm, k_norm=k_norm,
        norm_eps=norm_eps,
    )  # fmt: skip
    out_q.copy_(query)
    if out_k is not None:
        out_k.copy_(key)
    if out_v is not None:
        out_v.copy_(value)
    if rows is not None and block_tables is not None:
        places = positions if slots is None else torch.where(positions < 0, positions, slots)
        write_reference(key, value, places, rows, block_tables, sequence_ids)
    return out_q


def rotate_reference(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    *,
    num_heads: int,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    norm_eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the rotation of `rotate_and_write` in plain torch, without writing to the cache.
    Returns: query [T, H, D], key [T, K, D], value [T, K, D]."""
    num_tokens, head_dim = qkv.shape[0], cos_sin.shape[1]
    heads = qkv.view(num_tokens, -1, head_dim).float()
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if q_norm is not None and k_norm is not None:
        query = rms_norm_reference(query, q_norm, norm_eps)
        key = rms_norm_reference(key, k_norm, norm_eps)
    cos, sin = cos_sin[positions.clamp(min=0).long()][:, None, :].chunk(2, dim=-1)
    is_padding = (positions < 0)[:, None, None]
    query, key = _rotate(query, cos, sin), _rotate(key, cos, sin)
    query, key, value = (x.masked_fill(is_padding, 0).to(qkv.dtype) for x in (query, key, value))
    return query, key, value


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def write_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    rows: BlockRows,
    block_tables: torch.Tensor,
    sequence_ids: torch.Tensor | None,
) -> None:
    """Write keys and values [T, K, D] of tokens into the cache at `positions` of their sequences
    (-1: not written), in plain torch. Raises: ValueError for a cache of latents."""
    if rows.values is None:
        raise ValueError("rows: latents are not written by this operation")
    (live,) = torch.nonzero(positions >= 0, as_tuple=True)
    places = positions[live].long()
    sequences = live if sequence_ids is None else sequence_ids[live].long()
    size = rows.block_size
    row_ids = rows.row_ids(block_tables[sequences, places // size][:, None])[:, :, 0]  # [T, K]
    slots = (places % size)[:, None].expand(row_ids.shape)
    rows.keys.index_put_((row_ids, slots), key[live].to(rows.keys.dtype))
    rows.values.index_put_((row_ids, slots), value[live].to(rows.values.dtype))


# -- checks


def _check_rotation(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    rows: BlockRows | None,
    block_tables: torch.Tensor | None,
    sequence_ids: torch.Tensor | None,
    num_heads: int,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
) -> int:
    """Check the arguments of `rotate_and_write`. Returns: the number of kv heads. Raises:
    ValueError naming what does not fit."""
    _check_rows("qkv", qkv, (None, None))
    if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError("cos_sin is [max_pos, D] float32, dense")
    head_dim = cos_sin.shape[1]
    num_others = qkv.shape[1] // head_dim - num_heads
    if head_dim % 2 or qkv.shape[1] % head_dim or num_others < 2 or num_others % 2:
        raise ValueError(
            f"qkv has {qkv.shape[1]} columns: not {num_heads} heads of {head_dim} and as many key "
            "as value heads"
        )
    _check_ids("positions", positions, qkv.shape[0])
    if sequence_ids is not None:
        _check_ids("sequence_ids", sequence_ids, qkv.shape[0])
    if (rows is None) != (block_tables is None):
        raise ValueError("block_tables: given exactly where rows are")
    if rows is not None and block_tables is not None:
        _check_cache(rows, num_others // 2, head_dim)
        check_tables(block_tables)
        if sequence_ids is None and block_tables.shape[0] < qkv.shape[0]:
            raise ValueError(f"block_tables has {block_tables.shape[0]} rows for {qkv.shape[0]}")
    if (q_norm is None) != (k_norm is None):
        raise ValueError("q_norm and k_norm: both or none")
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None and (norm.shape != (head_dim,) or not norm.is_contiguous()):
            raise ValueError(f"{name} is [{head_dim}], dense, not {tuple(norm.shape)}")
    return num_others // 2


def _check_cache(rows: BlockRows, num_kv_heads: int, head_dim: int) -> None:
    if rows.dtype:
        raise ValueError(f"rows: a cache of {rows.dtype} is not written token by token")
    if rows.values is None or (rows.k_head_dim, rows.v_head_dim) != (head_dim, head_dim):
        raise ValueError(f"rows: keys and values of {head_dim}, not of another width, no latents")
    if rows.num_heads != num_kv_heads:
        raise ValueError(f"rows has {rows.num_heads} kv heads, qkv {num_kv_heads}")


def check_tables(block_tables: torch.Tensor) -> None:
    """Check that block_tables is [B, n] int32 with dense rows. Raises: ValueError otherwise."""
    if block_tables.dim() != 2 or block_tables.dtype != torch.int32:
        raise ValueError("block_tables is [B, n] int32")
    if block_tables.stride(1) != 1 and block_tables.shape[1] > 1:
        raise ValueError("block_tables: rows are dense")


def _check_ids(name: str, ids: torch.Tensor, count: int) -> None:
    if ids.shape != (count,) or ids.dtype != torch.int32 or not ids.is_contiguous():
        raise ValueError(f"{name} is [{count}] int32, dense, not {tuple(ids.shape)} {ids.dtype}")


def _check_rows(
    name: str,
    x: torch.Tensor,
    shape: tuple[int | None, ...],
    like: torch.Tensor | None = None,
) -> None:
    if x.dim() != 2 or any(
        want not in (None, got) for want, got in zip(shape, x.shape, strict=True)
    ):
        raise ValueError(f"{name} is {shape}, not {tuple(x.shape)}")
    if x.stride(1) != 1:
        raise ValueError(f"{name}: rows are dense, not strides {x.stride()}")
    if like is not None and x.dtype != like.dtype:
        raise ValueError(f"{name} is {x.dtype}, x {like.dtype}")


def _check_weight(weight: torch.Tensor, x: torch.Tensor) -> None:
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"weight is [{x.shape[1]}], dense, not {tuple(weight.shape)}")


def _given(name: str, out: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if out is None:
        return like.new_empty(like.shape)
    _check_rows(name, out, tuple(like.shape), like)
    return out


def _check_out(name: str, out: torch.Tensor, shape: tuple[int, ...], like: torch.Tensor) -> None:
    if out.shape != shape or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(f"{name} is {shape} {like.dtype}, dense, not {tuple(out.shape)}")
