"""PagedAttention: the attention of a layer by the kernels, from its fused QKV projection to its
output: applies RoPE, writes keys and values to the cache, and computes the attention of each row
by the kind of its span: a single token, a chunk, or a token tree.

It knows no weights but a layer's head norms. Invariant: all keys and values of a step are written
before any row is attended, so that a step may contain several spans of one sequence. Engine thread
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from baton_kernels.attention import decode_attention, rotate_and_attend, tree_attention
from baton_kernels.block_rows import BlockRows
from baton_kernels.dispatch import Backend
from baton_kernels.layer_ops import rotate_and_write
from baton_kernels.prefill_attention import prefill_attention

from engine.decoder.inputs import MixedInputs


class HeadNorms(Protocol):
    """The RMSNorm weights [D] of a layer's query and key heads; None: they have no norm."""

    @property
    def q_norm(self) -> torch.Tensor | None: ...

    @property
    def k_norm(self) -> torch.Tensor | None: ...


class PagedAttention:
    """The attention of one pipeline stage's layers, which are numbered from its first one.

    Args:
        num_heads: number of query heads of this rank.
        scaling: the factor of scores.
        norm_eps: the epsilon of the head norms.
        rope: [positions, D] float32, for as many positions as the longest request has.
        windows: the sliding window of each layer: a token attends to itself and window - 1 tokens
            before it; None: to all before it.
        is_exact: the bits of a row's result do not depend on the other rows.
    Attributes:
        rows: the cache of each layer.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        scaling: float,
        norm_eps: float,
        rope: torch.Tensor,
        windows: Sequence[int | None],
        is_exact: bool,
    ) -> None:
        self.backend: Backend = "auto"
        self.rows: Sequence[BlockRows] = ()
        self._num_heads = num_heads
        self._scaling = scaling
        self._norm_eps = norm_eps
        self._rope = rope
        self._windows = windows
        self._is_exact = is_exact

    def decode(
        self,
        index: int,
        layer: HeadNorms,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        block_tables: torch.Tensor,
    ) -> torch.Tensor:
        """Write KV and compute the attention of one token of each sequence: [B, (H + 2 K) D] -> [B,
        H D]."""
        attended = rotate_and_attend(
            qkv,
            positions,
            self._rope,
            self.rows[index],
            block_tables,
            num_heads=self._num_heads,
            scaling=self._scaling,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=self._norm_eps,
            window=self._windows[index],
            backend=self.backend,
            exact=self._is_exact,
        )
        return attended.view(qkv.shape[0], -1)

    def forward(
        self, index: int, layer: HeadNorms, qkv: torch.Tensor, inputs: MixedInputs
    ) -> torch.Tensor:
        """Write KV and compute the attention of any step: [T, (H + 2 K) D] -> [T, H D]."""
        num_rows, num_singles = qkv.shape[0], inputs.num_singles
        if num_singles == num_rows:
            return self.decode(index, layer, qkv, inputs.positions, inputs.block_tables)
        query = self._rotated_into_cache(index, layer, qkv, inputs)
        out = torch.empty_like(query)
        first_node = num_rows - inputs.num_nodes
        if num_singles:
            self._singles(
                index,
                query[:num_singles],
                inputs.block_tables[:num_singles],
                inputs.ends,
                out[:num_singles],
            )
        if num_singles < first_node:
            chunks = slice(num_singles, first_node)
            self._chunks(index, query[chunks], inputs, out[chunks])
        if first_node < num_rows:
            self._trees(index, query[first_node:], inputs, out[first_node:])
        return out.view(num_rows, -1)

    def forward_drawn(
        self,
        index: int,
        layer: HeadNorms,
        qkv: torch.Tensor,
        inputs: MixedInputs,
        drawn: torch.Tensor,
    ) -> torch.Tensor:
        """Write all rows' KV, and compute the attention of the rows `drawn` [R] int32 only, in a
        step without token trees: [T, (H + 2 K) D] -> [R, H D]."""
        query = self._rotated_into_cache(index, layer, qkv, inputs)
        tables = inputs.block_tables.index_select(0, inputs.sequence_ids.index_select(0, drawn))
        ends = inputs.positions.index_select(0, drawn) + 1
        return self._singles(index, query.index_select(0, drawn), tables, ends)

    def rotate(
        self,
        index: int,
        layer: HeadNorms,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        *,
        block_tables: torch.Tensor | None = None,
        sequence_ids: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
        key_value: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Apply head norms and RoPE, and write keys and values to the cache (with `block_tables`)
        and to `key_value`. Returns: queries [T, H, D]."""
        out_k, out_v = key_value if key_value is not None else (None, None)
        return rotate_and_write(
            qkv,
            positions,
            self._rope,
            None if block_tables is None else self.rows[index],
            block_tables,
            sequence_ids,
            num_heads=self._num_heads,
            slots=slots,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            norm_eps=self._norm_eps,
            out_k=out_k,
            out_v=out_v,
            backend=self.backend,
        )

    def _rotated_into_cache(
        self, index: int, layer: HeadNorms, qkv: torch.Tensor, inputs: MixedInputs
    ) -> torch.Tensor:
        return self.rotate(
            index,
            layer,
            qkv,
            inputs.positions,
            block_tables=inputs.block_tables,
            sequence_ids=inputs.sequence_ids,
            slots=inputs.slots,
        )

    def _singles(
        self,
        index: int,
        query: torch.Tensor,
        block_tables: torch.Tensor,
        ends: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the attention of single tokens: [B, H, D] -> [B, H D]."""
        attended = decode_attention(
            query,
            self.rows[index],
            block_tables,
            ends,
            scaling=self._scaling,
            window=self._windows[index],
            out=out,
            backend=self.backend,
            exact=self._is_exact,
        )
        return attended.view(query.shape[0], -1)

    def _chunks(
        self, index: int, query: torch.Tensor, inputs: MixedInputs, out: torch.Tensor
    ) -> None:
        end = inputs.block_tables.shape[0] - inputs.num_trees
        prefill_attention(
            query,
            self.rows[index],
            inputs.block_tables[inputs.num_singles : end],
            inputs.query_starts,
            inputs.starts,
            max_query_len=inputs.max_query_len,
            max_end=inputs.max_end,
            scaling=self._scaling,
            window=self._windows[index],
            out=out,
            backend=self.backend,
            exact=self._is_exact,
        )

    def _trees(
        self, index: int, query: torch.Tensor, inputs: MixedInputs, out: torch.Tensor
    ) -> None:
        trees = inputs.trees
        if trees is None:
            raise ValueError("inputs: no rows of trees")
        tree_attention(
            query,
            self.rows[index],
            inputs.block_tables[inputs.block_tables.shape[0] - trees.num_sequences :],
            trees.num_cached,
            trees.node_starts,
            trees.depths,
            trees.visible,
            max_num_nodes=trees.max_num_nodes,
            scaling=self._scaling,
            window=self._windows[index],
            out=out,
            backend=self.backend,
            exact=self._is_exact,
            is_early=True,  # ahead are heads turned, or other rows attended
        )
