"""QuantizedBlocks: from numbers to a quantized cache's bytes and back. Knows no step and no
request. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from baton_kernels.quantize import dequantize, quantize

from engine.kv.memory import HeadRows, KvMemory, LayerView
from engine.models.step_attention import row_ids

Scales = tuple[float, float | None]
"""One layer's fixed scales, of keys and of values (None: latents)."""


class QuantizedBlocks:
    """See the module.

    Args:
        views: of `memory`, one per layer.
        fixed: scales by layer, where the layout's are per tensor.
    """

    def __init__(self, memory: KvMemory, views: list[LayerView], fixed: Sequence[Scales]) -> None:
        if memory.tails is None:
            raise ValueError("this cache is not quantized")
        self._layout = memory.layout
        self._tails = memory.tails
        self._views = views
        self._fixed = fixed

    def freeze(self, layer: int, kv: int, block_ids: torch.Tensor, numbers: torch.Tensor) -> None:
        """Quantize full blocks for good.

        Args:
            kv: 0: keys, 1: values.
            block_ids: [1, n].
            numbers: [K, n, P, D] as computed.
        """
        rows, scales = self._rows(layer, kv)
        quantized, its_scales = self._quantize(layer, kv, numbers)
        ids = row_ids(block_ids, self._views[layer].heads)[0]  # [K, n]
        rows[ids] = quantized
        scales[ids] = its_scales

    def freeze_tails(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Quantize blocks whose numbers lie in these slots, in all layers: Tails.quantize."""
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
        """[B, K, n] row numbers -> [B, K, n * P, D] in `dtype`."""
        rows, scales = self._rows(layer, kv)
        flat = ids.reshape(-1)
        found = dequantize(
            rows.index_select(0, flat), scales.index_select(0, flat), self._layout.dtype, dtype
        )
        batch, num_heads, num_blocks = ids.shape
        return found.view(batch, num_heads, num_blocks * rows.shape[1], rows.shape[2])

    def rounded(self, layer: int, kv: int, numbers: torch.Tensor) -> torch.Tensor:
        """[K, n, P, D] as computed -> what `read` would give of them, were they blocks."""
        pair = self._quantize(layer, kv, numbers)
        return dequantize(*pair, self._layout.dtype, numbers.dtype)

    def _quantize(
        self, layer: int, kv: int, numbers: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        fixed = self._fixed[layer][kv] if self._fixed else None
        return quantize(numbers, self._layout.dtype, self._layout.num_scales, fixed)

    def _rows(self, layer: int, kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, P, D] bytes, and their scales [rows, scales]."""
        view = self._views[layer]
        rows, scales = (view.values, view.v_scales) if kv else (view.keys, view.k_scales)
        if rows is None or scales is None:
            raise ValueError("a quantized cache without scales")
        return rows, scales
