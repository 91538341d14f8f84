"""BlockRows: one layer's part of the paged KV cache, in the form that attention kernels take.

Head k's matrix of block b, [P block size, D], is row b * rows_per_block + k * head_step of `keys`
(and of `values`). It says where numbers lie; the caller knows which sequence owns a block and which
slots are filled. Invariant: checked once when built, so kernels may trust it. Immutable; any
thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

QUANTIZED = ("int8", "fp8_e4m3")
"""Quantized cache formats, values of `BlockRows.dtype` beside "": both are stored as int8 tensors,
one byte a number."""


@dataclass(frozen=True)
class BlockRows:
    """One layer's keys and values in the paged cache: head k's matrix of block b, [P, D], is row b
    * rows_per_block + k * head_step of `keys`.

    Raises: ValueError naming the field that does not fit.
    """

    keys: torch.Tensor
    """Keys, [R, P, D]: any stride between rows; slots and columns of one matrix are dense; latents
    (MLA) where `values` is None."""

    values: torch.Tensor | None
    """Values, [R, P, Dv], laid out like `keys`. None: they are the first `v_head_dim` columns of
    the keys."""

    v_head_dim: int
    """Dv: value columns of one token."""

    num_heads: int
    """K: number of kv heads."""

    rows_per_block: int
    """Number of rows from one block to the next."""

    head_step: int
    """Number of rows from one head to the next."""

    k_scales: torch.Tensor | None = None
    """Key scales, [R, S] float32 where quantized: S = 1 (one for the matrix) or P (one for each
    token). A number is its byte times its scale."""

    v_scales: torch.Tensor | None = None
    """Value scales, shaped like `k_scales`."""

    dtype: str = ""
    """Quantization format: "" if `keys` holds numbers as they are, else one of QUANTIZED, and
    `keys` is int8."""

    def __post_init__(self) -> None:
        if self.dtype not in ("", *QUANTIZED):
            raise ValueError(f"dtype {self.dtype!r} is none of {QUANTIZED} and not empty")
        if self.num_heads < 1 or self.rows_per_block < 1 or self.head_step < 1:
            raise ValueError("num_heads, rows_per_block and head_step are at least 1")
        self._check_matrices("keys", self.keys)
        self._check_scales("k_scales", self.k_scales, self.keys)
        if self.values is None:
            if not 0 < self.v_head_dim <= self.keys.shape[2]:
                raise ValueError(f"v_head_dim {self.v_head_dim} of latents {self.keys.shape[2]}")
            if self.v_scales is not None:
                raise ValueError("v_scales without values")
            return
        self._check_matrices("values", self.values)
        if self.values.shape[2] != self.v_head_dim:
            raise ValueError(f"v_head_dim {self.v_head_dim}, but values {self.values.shape}")
        if self.values.shape[1] != self.block_size or self.values.dtype != self.keys.dtype:
            raise ValueError("values have another block size or dtype than the keys")
        self._check_scales("v_scales", self.v_scales, self.values)

    def _check_matrices(self, name: str, rows: torch.Tensor) -> None:
        if rows.dim() != 3:
            raise ValueError(f"{name} is [R, P, D], not {tuple(rows.shape)}")
        if rows.stride(2) != 1 or rows.stride(1) != rows.shape[2]:
            raise ValueError(f"{name}: a row is one dense matrix, not strides {rows.stride()}")
        if self.dtype and rows.dtype != torch.int8:
            raise ValueError(f"{name} of a cache of {self.dtype} is int8, not {rows.dtype}")
        if not self.dtype and not rows.dtype.is_floating_point:
            raise ValueError(f"{name} is {rows.dtype}: say in `dtype` how it is quantized")

    def _check_scales(self, name: str, scales: torch.Tensor | None, rows: torch.Tensor) -> None:
        if (scales is not None) != bool(self.dtype):
            raise ValueError(f"{name}: given exactly where the cache is quantized")
        if scales is None:
            return
        if scales.dtype != torch.float32 or scales.dim() != 2 or scales.stride(1) != 1:
            raise ValueError(f"{name} is [R, 1 or P] float32 with dense rows")
        if scales.shape[1] not in (1, rows.shape[1]):
            raise ValueError(f"{name} has {scales.shape[1]} numbers a row: 1 or {rows.shape[1]}")

    @property
    def block_size(self) -> int:
        """Return P, the number of tokens in a block."""
        return self.keys.shape[1]

    @property
    def k_head_dim(self) -> int:
        """Return D, the number of key columns of one token."""
        return self.keys.shape[2]

    @property
    def is_latent(self) -> bool:
        """Return whether the values are columns of the keys (MLA) and have no bytes of their
        own."""
        return self.values is None

    @property
    def scales_per_row(self) -> int:
        """Return the number of scales per matrix: 0 (not quantized), 1 or P."""
        return 0 if self.k_scales is None else self.k_scales.shape[1]

    def row_ids(self, block_ids: torch.Tensor) -> torch.Tensor:
        """Convert block ids [..., n] to the row numbers of every head, [..., K, n] int64."""
        heads = torch.arange(self.num_heads, device=block_ids.device)[:, None] * self.head_step
        return block_ids.long()[..., None, :] * self.rows_per_block + heads


@dataclass(frozen=True)
class Tails:
    """Unquantized blocks of a quantized cache that are still being filled: the block of a
    sequence's newest token is read here, all earlier blocks where they are quantized."""

    rows: BlockRows
    """Storage of the tail blocks, not quantized; slot s of it is addressed like block s."""

    slots: torch.Tensor
    """Slot of each sequence's newest block, [B] int32; -1: it has none, and all is read
    quantized."""
